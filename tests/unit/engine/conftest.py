"""What the engine's tests compare with: a plain forward of the model itself, outside the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gspo_gym.policy.load import load_policy
from gspo_gym.types import Float32Array

PlainLogprobs = Callable[[Any, Sequence[int], Sequence[int]], Float32Array]


@pytest.fixture
def model() -> Any:
    """A fresh tiny model, so that a test may change its weights."""
    return load_policy("tiny:qwen3-64", seed=1).model


@pytest.fixture
def plain_logprobs() -> PlainLogprobs:
    """(model, prompt, sampled) -> logprobs [T] of the sampled tokens at temperature 1, by one plain forward."""

    def compute(model: Any, prompt: Sequence[int], sampled: Sequence[int]) -> Float32Array:
        ids = torch.tensor([[*prompt, *sampled]])
        with torch.no_grad():
            logprobs = model(ids).logits[0].float().log_softmax(-1)
        rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        return np.asarray(logprobs[rows, ids[0, len(prompt) :]].numpy(), np.float32)

    return compute

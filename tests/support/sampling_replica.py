"""An engine with a tiny model, as an actor builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gspo_gym.engine.base import Engine
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.policy.load import load_policy


async def build(order: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Engine:
    torch.set_num_threads(1)
    model = load_policy("tiny:qwen3-64", seed=9).model
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    return LocalEngine(model, takes_tensors=True, max_model_len=order["max_model_len"])

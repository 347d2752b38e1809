"""Writes to weights that leave no trace but the weights."""

from __future__ import annotations

import pytest
import torch

from gspo_gym.engine.local.shared_model import SharedModel
from gspo_gym.policy.load import load_policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_write_that_autograd_does_not_count_is_found_in_its_own_bits(dtype: torch.dtype, is_transposed: bool) -> None:
    model = load_policy("tiny:qwen3-64").model
    weight = model.model.layers[1].mlp.up_proj.weight
    data = weight.detach().to(dtype)
    weight.data = data.t().contiguous().t() if is_transposed else data  # the same numbers, by columns
    assert weight.is_contiguous() is not is_transposed
    weight.data[0, 0] = float("nan")  # equal to nothing, and no change
    shared = SharedModel(model, max_model_len=64)
    assert not shared.contents_changed()

    weight.data[0, 0] = 1.0
    assert not shared.weights_changed()
    assert shared.contents_changed()
    shared.accept_weights()
    assert not shared.contents_changed()

    # The next number of its dtype: the least change that there is.
    last = weight.data.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    last += 1
    assert not shared.weights_changed()
    assert shared.contents_changed()

"""The files in which ranks get their batches; `tests/cluster` has real ranks, which are not in the quick tests."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo_gym.cluster.learner import _write_batch
from gspo_gym.learning.batching import TrainBatch


def test_a_rank_learns_from_the_batch_that_was_written(tmp_path: Path) -> None:
    sampled = torch.tensor([[False, True, False, True], [False, False, True, False]])
    wide = torch.arange(16.0).reshape(2, 8)
    batch = TrainBatch(
        token_ids=torch.tensor([[5, 6, 7, 8], [5, 9, 3, 0]]),
        attention_mask=torch.tensor([[True] * 4, [True, True, True, False]]),
        action_mask=sampled,
        turn_index=torch.tensor([[-1, 0, -1, 1], [-1, -1, 0, -1]]),
        trajectory_index=torch.tensor([0, 1]),
        rollout_logprobs=-wide[:, ::2] * sampled,  # not contiguous: safetensors refuses those
        advantages=wide[:, 1::2] * sampled,
        is_masked=torch.tensor([False, True]),
        token_index=torch.tensor([[0, 0, 0, 1], [0, 0, 2, 0]]),
    )
    _write_batch(batch, file := tmp_path / "batches" / "batch_000000.safetensors")
    read = TrainBatch(**load_file(file))
    for field in fields(TrainBatch):
        written, again = getattr(batch, field.name), getattr(read, field.name)
        assert torch.equal(written, again) if isinstance(written, Tensor) else written == again, field.name

"""Which sampled tokens of a batch belong together: those of a token, a turn, a segment or a trajectory."""

from __future__ import annotations

import torch

from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.losses import Pools, turn_keys


def pool_tokens(batch: TokenBatch, unit: str) -> Pools:
    """The sampled tokens of a batch by "token", "turn", "segment" (a row) or "trajectory" (all its rows)."""
    mask = batch.action_mask
    trajectory = batch.trajectory_index[:, None].expand_as(mask)[mask]
    keys = {
        "token": lambda: torch.arange(len(trajectory), device=mask.device),
        "turn": lambda: turn_keys(trajectory, batch.turn_index[mask]),
        "segment": lambda: torch.nonzero(mask)[:, 0],
        "trajectory": lambda: trajectory,
    }
    return Pools.by(keys[unit]())

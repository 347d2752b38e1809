"""Weights for tokens that the engine sampled with other probabilities than the learner gives them.

An engine runs other kernels than the learner, so under the same weights its logprobs are a little different, and its
samples come from a slightly different policy. The weight of a sampled token is w = old / rollout, the ratio of the
learner's to the engine's probability; or, shared by all tokens of a turn or a trajectory, the geometric mean of these.
Cut from above it is truncated importance sampling; with what lies outside a range left out, IcePop's masking. Weights
multiply the policy term of the loss and change no denominator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_gym.learning.batching import LabelledBatch, TokenBatch
from gspo_gym.learning.losses import Pools, turn_keys
from gspo_gym.learning.settings import CorrectionSettings


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """The weights of a micro-batch, and the sampled tokens that they changed, by reason.

    Attributes:
        weights: [B, T] >= 0, float32 or better, constants; 1 where nothing was sampled.
        num_truncated: tokens with w above `high`, which counts as `high`.
        num_masked: tokens left out (weight 0), because their w was outside [low, high].
        num_off_policy: tokens left out by `off_policy_threshold`.
    """

    weights: Tensor
    num_truncated: int
    num_masked: int
    num_off_policy: int


def correct(batch: LabelledBatch, logprobs: Tensor, settings: CorrectionSettings) -> Correction | None:
    """Return the correction of a micro-batch with these present logprobs [B, T]; None: the settings ask for none.

    `off_policy_threshold` (off-policy sequence masking, arXiv 2512.02556, as TRL has it but token by token) looks at
    the mean over the trajectory's tokens of log(rollout / now), which grows as the policy moves, and leaves out the
    trajectory's tokens with a negative advantage.
    """
    if settings.level == "none" and settings.off_policy_threshold is None:
        return None
    mask = batch.action_mask
    rollout = batch.rollout_logprobs[mask].double()
    weights = torch.ones_like(rollout)
    truncated = is_masked = off_policy = torch.zeros_like(rollout, dtype=torch.bool)
    if settings.level != "none":
        pools = pool_tokens(batch, settings.level)
        # Never the product, which TRL and verl take by default: the exp of a sum over an episode ranges over orders of
        # magnitude where each token is off by a percent, and weights of two lengths cannot be compared.
        weights = pools.mean(batch.old_logprobs[mask].double() - rollout).exp()[pools.of_token]
        if settings.mode == "truncate":
            truncated = weights > settings.high
            weights = weights.clamp(max=settings.high)
        else:
            is_masked = (weights < settings.low) | (weights > settings.high)
    if settings.off_policy_threshold is not None:
        trajectories = pool_tokens(batch, "trajectory")
        drift = trajectories.mean(rollout - logprobs.detach()[mask].double())[trajectories.of_token]
        off_policy = (drift > settings.off_policy_threshold) & (batch.advantages[mask] < 0)
    weights = weights.masked_fill(is_masked | off_policy, 0.0).to(logprobs.dtype)
    return Correction(
        torch.ones_like(logprobs).masked_scatter(mask, weights),
        num_truncated=int(truncated.sum()),
        num_masked=int(is_masked.sum()),
        num_off_policy=int(off_policy.sum()),
    )


def pool_tokens(batch: TokenBatch, unit: str) -> Pools:
    """Return the sampled tokens of a batch by "token", "turn", "segment" (a row) or "trajectory" (all its rows)."""
    mask = batch.action_mask
    trajectory = batch.trajectory_index[:, None].expand_as(mask)[mask]
    keys = {
        "token": lambda: torch.arange(len(trajectory), device=mask.device),
        "turn": lambda: turn_keys(trajectory, batch.turn_index[mask]),
        "segment": lambda: torch.nonzero(mask)[:, 0],
        "trajectory": lambda: trajectory,
    }
    return Pools.by(keys[unit]())

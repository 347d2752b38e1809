"""Weights for tokens that the engine sampled with other probabilities than the learner gives them.

An engine runs other kernels than the learner, so under the same weights its logprobs are a little different, and its
samples come from a slightly different policy. The weight of a sampled token is w = old / rollout, the ratio of the
learner's to the engine's probability; or, shared by all tokens of a turn or a trajectory, the geometric mean of these.
Cut from above it is truncated importance sampling; with what lies outside a range left out, IcePop's masking. Weights
multiply the policy term of the loss and change no denominator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gspo_gym.errors import EngineMismatchError
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
    truncated = masked = off_policy = torch.zeros_like(rollout, dtype=torch.bool)
    if settings.level != "none":
        pools = pool_tokens(batch, settings.level)
        # Never the product, which TRL and verl take by default: the exp of a sum over an episode ranges over orders of
        # magnitude where each token is off by a percent, and weights of two lengths cannot be compared.
        weights = pools.mean(batch.old_logprobs[mask].double() - rollout).exp()[pools.of_token]
        if settings.mode == "truncate":
            truncated = weights > settings.high
            weights = weights.clamp(max=settings.high)
        else:
            masked = (weights < settings.low) | (weights > settings.high)
    if settings.off_policy_threshold is not None:
        trajectories = pool_tokens(batch, "trajectory")
        drift = trajectories.mean(rollout - logprobs.detach()[mask].double())[trajectories.of_token]
        off_policy = (drift > settings.off_policy_threshold) & (batch.advantages[mask] < 0)
    weights = weights.masked_fill(masked | off_policy, 0.0).to(logprobs.dtype)
    return Correction(
        torch.ones_like(logprobs).masked_scatter(mask, weights),
        num_truncated=int(truncated.sum()),
        num_masked=int(masked.sum()),
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


# In float32 two implementations of a model differ by some 1e-5 nats at most (1e-6 for small ones). In 16 bits the
# largest of a batch's differences grows with the batch, so its mean is judged: prime-rl's limit for the KL between
# engine and learner.
MAX_GAP_FLOAT32 = 1e-4
MAX_KL_16_BITS = 0.01


class MismatchAlarm:
    """Alarm for batches that were sampled and labelled under the same weights, with different logprobs.

    Stale keys and values, another temperature, precision or adapter, an update that was skipped, sampling truncated by
    a default: each changes the logprobs of the first batch it touches, and none raises anything by itself.

    Args:
        max_gap: largest |learner's - engine's logprob| of a trained token, nats; None: `MAX_GAP_FLOAT32`, or where the
            model has weights in 16 bits `MAX_KL_16_BITS` of the mean instead.
        patience: alarms in a row that are only reported; the next is an error. A batch without gaps ends the row.
    """

    def __init__(
        self, *, max_gap: float | None = None, patience: int = 2, has_16_bits: bool = False, num_in_a_row: int = 0
    ) -> None:
        self._max_gap = max_gap
        self._patience = patience
        self._has_16_bits = has_16_bits
        self.num_in_a_row = num_in_a_row

    def check(self, metrics: Mapping[str, float], *, sampled_under: Collection[int], version: int) -> str | None:
        """Return the fault of a batch, in a sentence; None: there is none, or it cannot be judged.

        `metrics` are the update's.

        Raises:
            EngineMismatchError: it was wrong more than `patience` times in a row.
        """
        # With older tokens in the batch a difference is what an update is for.
        if set(sampled_under) != {version} or "kl/rollout_max_gap" not in metrics:
            return None
        reason = self._reason(metrics)
        if reason is None:
            self.num_in_a_row = 0
            return None
        self.num_in_a_row += 1
        if self.num_in_a_row > self._patience:
            raise EngineMismatchError(
                f"in {self.num_in_a_row} batches in a row {reason}. Look for a temperature or a truncation that the "
                "engine applies by itself, another precision, keys and values kept over an update, or an update that "
                "never arrived; correction.max_engine_gap is the limit"
            )
        return reason

    def _reason(self, metrics: Mapping[str, float]) -> str | None:
        gap, kl = metrics["kl/rollout_max_gap"], metrics["kl/rollout_k3"]
        if self._max_gap is None and self._has_16_bits:
            if kl <= MAX_KL_16_BITS:  # written so that NaN is an alarm
                return None
            return f"the engine's KL divergence from the learner is {kl:.3g} nats; expected at most {MAX_KL_16_BITS:g}"
        limit = MAX_GAP_FLOAT32 if self._max_gap is None else self._max_gap
        if gap <= limit:
            return None
        return f"a logprob of the engine is {gap:.3g} nats from the learner's; expected at most {limit:g}"


def has_16_bits(model: nn.Module) -> bool:
    """Return whether some of a model's weights are in 16 bits; then so are its logits' errors."""
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())

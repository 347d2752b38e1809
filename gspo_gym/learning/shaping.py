"""Advantages that depend on logprobs, or on the whole batch at once; after `advantages.py`, before the first step.

In this order, each only if its setting asks for it:

    KL in the reward     A_t - beta * sum over t' >= t of kl_t'      to the end of the trajectory, over all its rows
    KL shaping           A_t + beta * (mean of the trajectory's kl - kl_t)
    whitening            (A - mean) / std of the batch
    clip                 to [-clip, clip]

with kl_t = old_logprobs - ref_logprobs, an unbiased estimate of KL(old || reference) at the token t. All of it is
computed in float64 over the whole rollout batch: no division into micro-batches matters.

Sources and departures. KL in the reward: ROLL (add_token_level_kl); the sum has no discount. KL shaping: AgileRL 2.7
(use_kl_advantage_shaping), there after the clip, with k3 of the present logprobs (reversed) and not detached. Whitening
"tokens": ROLL, (A - mean) / sqrt(var + 1e-8) with Bessel's correction; "trajectories": AgileRL 2.7, (A - mean) / (std +
1e-8) with the population's, over one advantage per trajectory. Where tokens of a trajectory differ, each trajectory
weighs one and its tokens the same share, which gives the same where they do not. Advantages that differ only by
rounding become exactly 0. Trajectories that are left out of the loss are left out here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_gym.errors import CheckpointError, RecordError
from gspo_gym.learning.batching import LabelledBatch, TrainBatch
from gspo_gym.learning.correction import pool_tokens
from gspo_gym.learning.settings import AdvantageSettings, RewardSettings

_EPS = 1e-8
_ROUNDING = 1e-6  # of the largest advantage: eight roundings of float32
_MAX_KL_ERROR = 0.2
_KL_HORIZON = 10_000  # trajectories, as TRL and ROLL have by default


@dataclass(frozen=True, slots=True, eq=False)
class Shaped:
    """The micro-batches with their new advantages, in order, and metrics that `health.METRICS` explains."""

    parts: list[TrainBatch]
    metrics: Mapping[str, float]


class AdvantageShaper:
    """Shaper of the advantages of one batch after another. Its state is the beta of an adaptive KL in the reward."""

    def __init__(self, advantages: AdvantageSettings, rewards: RewardSettings) -> None:
        self._advantages = advantages
        self._rewards = rewards
        self._kl_coef = rewards.kl_coef

    @property
    def uses_reference(self) -> bool:
        """Whether micro-batches need logprobs of the old policy and the reference before they are shaped."""
        return self._rewards.kl_coef > 0 or self._advantages.kl_shaping_coef > 0

    @property
    def gives_advantages(self) -> bool:
        """Whether a trajectory with advantages that are all 0 may get others."""
        return self.uses_reference or self._advantages.whiten != "none"

    def shape(self, parts: Sequence[TrainBatch]) -> Shaped:
        """Shape a whole rollout batch, given as its micro-batches; an adaptive beta changes after it was used."""
        values = [part.advantages[part.action_mask].double() for part in parts]
        metrics: dict[str, float] = {}
        if self.uses_reference and parts:
            kl = [_log_ratios(part) for part in parts]
            values = [self._with_kl(*each) for each in zip(parts, values, kl, strict=True)]
            means = [pool_tokens(part, "trajectory").mean(each) for part, each in zip(parts, kl, strict=True)]
            metrics |= self._observe_kl(torch.cat(means))
        if self._advantages.whiten != "none" and parts:
            weights = [_token_weights(part, self._advantages.whiten) for part in parts]
            values = whiten(values, weights, is_sample=self._advantages.whiten == "tokens")
        if (limit := self._advantages.clip) is not None and parts:
            beyond = torch.cat(values).abs() > limit
            metrics["advantage/clipped_fraction"] = float(beyond.double().mean())
            values = [value.clamp(-limit, limit) for value in values]
        return Shaped([_with_advantages(*each) for each in zip(parts, values, strict=True)], metrics)

    def counters(self) -> dict[str, float]:
        return {} if self._rewards.kl_target is None else {"shaping.kl_coef": self._kl_coef}  # else it is fixed

    def restore(self, counters: Mapping[str, int | float]) -> None:
        """Go on with the beta that `counters()` gave; a CheckpointError if only one of the two runs adapts it."""
        if ("shaping.kl_coef" in counters) != (self._rewards.kl_target is not None):
            raise CheckpointError("the adaptive coefficient 'shaping.kl_coef': was rewards.kl_target changed?")
        self._kl_coef = float(counters.get("shaping.kl_coef", self._kl_coef))

    def _with_kl(self, part: TrainBatch, values: Tensor, kl: Tensor) -> Tensor:
        trajectories = pool_tokens(part, "trajectory")
        mean = trajectories.mean(kl)[trajectories.of_token]
        shaped_values = values - self._kl_coef * sum_to_go(kl, trajectories.of_token)
        return shaped_values + self._advantages.kl_shaping_coef * (mean - kl)

    def _observe_kl(self, kl_N: Tensor) -> dict[str, float]:
        """Return this batch's metrics, and set the beta for the next (arXiv 1909.08593, section 2.2)."""
        kl = float(kl_N.mean())
        metrics = {"shaping/kl": kl}
        if self._rewards.kl_coef > 0:
            metrics["shaping/kl_coef"] = self._kl_coef
        if self._rewards.kl_target is not None:
            # beta grows by the share (kl / target - 1), cut to +-20 %, times the trajectories seen over the horizon.
            error = min(max(kl / self._rewards.kl_target - 1, -_MAX_KL_ERROR), _MAX_KL_ERROR)
            # At most one horizon at a time: beta cannot become negative.
            self._kl_coef *= 1 + error * min(len(kl_N) / _KL_HORIZON, 1.0)
        return metrics


def sum_to_go(values: Tensor, trajectory: Tensor) -> Tensor:
    """Return [A] sums of the trajectory's values from each token on; the tokens of a trajectory are in order."""
    order = torch.argsort(trajectory, stable=True)
    run = values[order]
    running_sum = run.cumsum(0)  # over all trajectories: each one's total is taken off below
    num_tokens = torch.unique_consecutive(trajectory[order], return_counts=True)[1]
    total = running_sum[num_tokens.cumsum(0) - 1].repeat_interleave(num_tokens)
    return torch.empty_like(values).index_copy(0, order, total - running_sum + run)


def whiten(values: Sequence[Tensor], weights: Sequence[Tensor], *, is_sample: bool) -> list[Tensor]:
    """Shift and scale values [A] of several micro-batches to mean 0 and variance 1 of all of them together.

    `weights` say how much each value counts. `is_sample` divides by sqrt(var + 1e-8) with Bessel's correction, and
    leaves a single value as it is (ROLL); otherwise the divisor is the population's std + 1e-8 (AgileRL).
    """
    all_values, share = torch.cat(list(values)), torch.cat(list(weights))
    if is_sample and len(all_values) < 2:
        return list(values)
    # Dividing by a std that is rounding alone would blow it up to advantages of order 1.
    if float(all_values.max() - all_values.min()) <= _ROUNDING * float(all_values.abs().max()):
        return [torch.zeros_like(value) for value in values]
    share = share / share.sum()
    mean = (share * all_values).sum()
    variance = (share * (all_values - mean) ** 2).sum()
    if is_sample:
        scale = (variance * len(all_values) / (len(all_values) - 1) + _EPS).sqrt()
    else:
        scale = variance.sqrt() + _EPS
    return [(value - mean) / scale for value in values]


def _token_weights(part: TrainBatch, over: str) -> Tensor:
    """Return [A] 1 for each token, or 1 / the tokens of its trajectory."""
    pools = pool_tokens(part, "token" if over == "tokens" else "trajectory")
    return pools.num_tokens.double().reciprocal()[pools.of_token]


def _log_ratios(part: TrainBatch) -> Tensor:
    if not isinstance(part, LabelledBatch) or part.ref_logprobs is None:
        raise RecordError("AdvantageShaper: a KL term needs old and reference logprobs, got a batch without them")
    return (part.old_logprobs - part.ref_logprobs)[part.action_mask].double()


def _with_advantages(part: TrainBatch, values: Tensor) -> TrainBatch:
    new_advantages = torch.zeros_like(part.advantages).masked_scatter(
        part.action_mask, values.to(part.advantages.dtype)
    )
    return dataclasses.replace(part, advantages=new_advantages)

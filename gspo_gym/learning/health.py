"""What an update showed about itself: the micro-batch facts it leaves behind, and the metrics they amount to.

The learner fills a `Tally` while it works and reads it once. Nothing here feeds back into training; what the numbers
mean is said in `metrics.METRICS`, and what to do about them by `gspo-gym doctor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_gym.learning.batching import TrainBatch
from gspo_gym.learning.correction import Correction
from gspo_gym.learning.losses import LossStats, k3
from gspo_gym.learning.metrics import loss_metrics
from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.pooling import pool_tokens
from gspo_gym.learning.settings import LossSettings


@dataclass(frozen=True, slots=True, eq=False)
class EngineGap:
    """How far the engine's logprobs of a micro-batch are from the learner's under the same weights; float64, nats.

    Attributes:
        log_ratios: [A] learner - engine, per sampled token. trajectory_means: [n] their mean over each trajectory.
        unit_lengths: [U] sampled tokens of each unit that shares an importance ratio.
    """

    log_ratios: Tensor
    trajectory_means: Tensor
    unit_lengths: Tensor

    @classmethod
    def of(cls, batch: TrainBatch, logprobs: Tensor, unit: str) -> EngineGap:
        """The gap to these logprobs [B, T] of the learner before the update."""
        log_ratios = (logprobs.detach().double() - batch.rollout_logprobs.double())[batch.action_mask]
        trajectories = pool_tokens(batch, "trajectory")
        return cls(log_ratios, trajectories.mean(log_ratios), pool_tokens(batch, unit).num_tokens.double())


@dataclass(frozen=True, slots=True, eq=False)
class PartFacts:
    """One forward and backward pass of a micro-batch; all detached.

    `correction` None: there is none. `gap` None: the learner's logprobs before the update are not known here.
    """

    loss: LossStats
    correction: Correction | None
    gap: EngineGap | None


class Tally:
    """What the steps of one update amount to; filled while it runs, read once at its end."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self._steps: list[Sequence[PartFacts]] = []
        self._reports: list[StepReport] = []
        self._num_empty_steps = 0

    def add_empty_step(self) -> None:
        """Nothing of a minibatch had a gradient."""
        self._num_empty_steps += 1

    def add_step(self, parts: Sequence[PartFacts], report: StepReport) -> None:
        """An attempted step; what a skipped one rested on is not counted."""
        self._reports.append(report)
        if not report.is_skipped:
            self._steps.append(parts)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return len(self._steps)

    @property
    def num_nonfinite_steps(self) -> int:
        """Optimizer steps skipped, because something was NaN or infinite."""
        return len(self._reports) - len(self._steps)

    def metrics(self) -> dict[str, float]:
        """Everything that `METRICS` explains about steps; what no step showed is left out."""
        parts = [part for step in self._steps for part in step]
        metrics = loss_metrics([[part.loss for part in step] for step in self._steps])
        if parts:
            first = torch.cat([part.loss.unit_ratios for part in self._steps[0]])
            metrics["ratio/noise_floor"] = float((first - 1).abs().max())
            metrics |= engine_metrics([part.gap for part in parts if part.gap is not None], self._settings)
        corrections = [part.correction for part in parts if part.correction is not None]
        if corrections:
            metrics |= correction_metrics(corrections, sum(part.loss.num_tokens for part in parts))
        if self._reports:
            metrics["optim/learning_rate"] = self._reports[-1].learning_rate
        if norms := [report.grad_norm for report in self._reports if not report.is_skipped]:
            metrics |= {"optim/grad_norm": sum(norms) / len(norms), "optim/grad_norm_max": max(norms)}
        metrics["batch/trained_tokens"] = float(sum(part.loss.num_tokens for part in parts))
        metrics["optim/num_steps"] = float(self.num_steps)
        metrics["optim/num_nonfinite_steps"] = float(self.num_nonfinite_steps)
        metrics["optim/num_empty_steps"] = float(self._num_empty_steps)
        return metrics


def engine_metrics(gaps: Sequence[EngineGap], settings: LossSettings) -> dict[str, float]:
    """How far engine and learner are apart, and what that would do to the clip.

    Noise of standard deviation sigma per token, independent from token to token, gives the mean over a unit of L tokens
    the standard deviation sigma / sqrt(L). Ours; no trainer that we know of reports it.
    """
    if not gaps:
        return {}
    log_ratios = torch.cat([gap.log_ratios for gap in gaps])
    sigma = log_ratios.std(correction=0)
    noise = sigma / torch.cat([gap.unit_lengths for gap in gaps]).sqrt()
    floor, ceiling = torch.tensor([1 - settings.clip_low, 1 + settings.clip_high], dtype=torch.float64).log()
    # sigma 0: the quotients are -inf, whose probability is 0
    beyond = torch.special.ndtr(floor.to(noise) / noise) + torch.special.ndtr(-ceiling.to(noise) / noise)
    means = torch.cat([gap.trajectory_means for gap in gaps])
    return {
        "kl/rollout_k1": float(-log_ratios.mean()),
        "kl/rollout_k3": float(k3(log_ratios).mean()),
        "kl/rollout_max_gap": float(log_ratios.abs().max()),
        "ratio/noise_sigma": float(sigma),
        "ratio/predicted_noise": float(noise.mean()),
        "ratio/noise_clip_fraction": float(beyond.mean()),
        "correction/effective_sample_fraction": effective_sample_fraction(means),
    }


def effective_sample_fraction(log_weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2), Kish's effective sample size as a share of N; 1 if all weights are alike."""
    weights = (log_weights.double() - log_weights.max()).exp()  # a common factor cancels
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def correction_metrics(corrections: Sequence[Correction], num_tokens: int) -> dict[str, float]:
    """The shares of trained tokens whose weight was cut or set to 0, by reason."""
    return {
        "correction/truncated_fraction": sum(c.num_truncated for c in corrections) / num_tokens,
        "correction/masked_fraction": sum(c.num_masked for c in corrections) / num_tokens,
        "correction/off_policy_fraction": sum(c.num_off_policy for c in corrections) / num_tokens,
    }


def batch_metrics(batch: TrainBatch, trained: Sequence[TrainBatch]) -> Mapping[str, float]:
    """The batch as it came, and the padding of the micro-batches that are trained on."""
    advantages = batch.advantages[batch.action_mask].double()
    has_advantage = torch.unique(batch.trajectory_index[batch.advantages.ne(0).any(1)])
    num_masked = len(torch.unique(batch.trajectory_index[batch.is_masked]))
    num_slots = sum(part.token_ids.numel() for part in trained)
    num_filled = sum(int(part.attention_mask.sum()) for part in trained)
    return {
        "batch/num_trajectories": float(batch.num_trajectories),
        "batch/num_actions": float(batch.num_actions),
        "batch/tokens_per_turn": batch.num_actions / len(pool_tokens(batch, "turn").num_tokens),
        "batch/zero_advantage_fraction": 1 - len(has_advantage) / batch.num_trajectories,
        "batch/masked_fraction": num_masked / batch.num_trajectories,
        "batch/padding_fraction": 1 - num_filled / num_slots if num_slots else 0.0,
        "advantage/mean": float(advantages.mean()),
        "advantage/std": float(advantages.std(correction=0)),
    }

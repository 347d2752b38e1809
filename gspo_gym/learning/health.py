"""The metrics of an update: the arithmetic from facts about micro-batches to numbers, and a sentence on each number.

The learner fills a `Tally` while it works and reads it once. Nothing here feeds back into training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gspo_gym.learning.batching import TrainBatch
from gspo_gym.learning.correction import Correction, pool_tokens
from gspo_gym.learning.losses import LossStats, k3
from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.settings import LossSettings


@dataclass(frozen=True, slots=True, eq=False)
class EngineGap:
    """Distance of the engine's logprobs of a micro-batch from the learner's under the same weights; float64, nats.

    Attributes:
        log_ratios: [A] learner - engine, per sampled token. trajectory_means: [n] their mean over each trajectory.
        unit_lengths: [U] sampled tokens of each unit that shares an importance ratio.
    """

    log_ratios: Tensor
    trajectory_means: Tensor
    unit_lengths: Tensor

    @classmethod
    def of(cls, batch: TrainBatch, logprobs: Tensor, unit: str) -> EngineGap:
        """Return the gap to these logprobs [B, T] of the learner before the update."""
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
    """Facts about the steps of one update; filled while it runs, read once at its end."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self._steps: list[Sequence[PartFacts]] = []
        self._reports: list[StepReport] = []
        self._num_empty_steps = 0

    def add_empty_step(self) -> None:  # a minibatch without a gradient
        self._num_empty_steps += 1

    def add_step(self, parts: Sequence[PartFacts], report: StepReport) -> None:
        """Add an attempted step; the micro-batches of a skipped one are not counted."""
        self._reports.append(report)
        if not report.is_skipped:
            self._steps.append(parts)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def num_nonfinite_steps(self) -> int:
        """Optimizer steps skipped, because something was NaN or infinite."""
        return len(self._reports) - len(self._steps)

    def metrics(self) -> dict[str, float]:
        """Return all that `METRICS` explains about steps and that a step showed."""
        parts = [part for step in self._steps for part in step]
        metrics = loss_metrics([[part.loss for part in step] for step in self._steps])
        if parts:
            # Before the weights moved: what differs from 1 is not the policy's doing.
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
    """Return how far engine and learner are apart, and what that would do to the clip.

    Ours; no trainer that we know of reports it.
    """
    if not gaps:
        return {}
    log_ratios = torch.cat([gap.log_ratios for gap in gaps])
    # Noise of standard deviation sigma per token, independent from token to token, gives the mean over a unit of L
    # tokens the standard deviation sigma / sqrt(L).
    sigma = log_ratios.std(correction=0)
    noise = sigma / torch.cat([gap.unit_lengths for gap in gaps]).sqrt()
    floor, ceiling = torch.tensor([1 - settings.clip_low, 1 + settings.clip_high], dtype=torch.float64).log()
    # Where sigma is 0, the quotients are -inf, whose probability is 0.
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
    """Return the shares of trained tokens with a weight that was cut or set to 0, by reason."""
    return {
        "correction/truncated_fraction": sum(c.num_truncated for c in corrections) / num_tokens,
        "correction/masked_fraction": sum(c.num_masked for c in corrections) / num_tokens,
        "correction/off_policy_fraction": sum(c.num_off_policy for c in corrections) / num_tokens,
    }


def batch_metrics(batch: TrainBatch, trained: Sequence[TrainBatch]) -> Mapping[str, float]:
    """Return metrics of the whole batch, and the padding of the micro-batches that are trained on."""
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


# Some are there only where a setting or the model gives them something to say; what a training pass shows, only in an
# update that took a step.
METRICS: Mapping[str, str] = MappingProxyType(
    {
        "batch/num_trajectories": "trajectories in the batch (N of the loss)",
        "batch/num_actions": "sampled tokens in the batch",
        "batch/tokens_per_turn": "mean over turns of the batch of their sampled tokens",
        "batch/zero_advantage_fraction": "share of trajectories whose advantages are all 0: no policy gradient",
        "batch/masked_fraction": "share of trajectories that overlong = 'mask' leaves out of the loss",
        "batch/trained_tokens": "sampled tokens that went through a backward pass, each counted once per epoch",
        "batch/padding_fraction": "share of padding among the token slots of the micro-batches",
        "advantage/mean": "mean over sampled tokens of the batch, before KL, whitening and clip",
        "advantage/std": "population standard deviation over the same tokens",
        "advantage/clipped_fraction": "share of trained tokens whose advantage advantages.clip cut",
        "shaping/kl": "KL(old || reference), mean over trajectories of the mean log ratio of their tokens, nats",
        "shaping/kl_coef": "beta of the token-level KL in the reward, as this update used it",
        "loss/total": "mean over optimizer steps of the loss",
        "loss/policy": "mean over optimizer steps of the clipped surrogate's share",
        "loss/kl": "mean over optimizer steps of the reference term's share, kl_coef included",
        "loss/entropy": "mean over optimizer steps of the entropy bonus' share, coefficient and sign included",
        "loss/distillation": "mean over optimizer steps of the teacher's term, coefficient included",
        "ratio/mean": "mean over units and steps of the importance ratio s",
        "ratio/min": "smallest s",
        "ratio/q05": "5% quantile of s over units and steps",
        "ratio/q50": "median of s over units and steps",
        "ratio/q95": "95% quantile of s over units and steps",
        "ratio/max": "largest s",
        "ratio/log_std": "population standard deviation of log s over units and steps, nats",
        "ratio/is_constant": "1 if every s of the update was 1 (to 1e-6), so that no clip could act; else 0",
        "ratio/noise_floor": "largest |s - 1| before the weights moved: 0 unless scoring twice gives two results",
        "ratio/noise_sigma": "population standard deviation over trained tokens of learner's - engine's logprob, nats",
        "ratio/predicted_noise": (
            "mean over units of noise_sigma / sqrt(tokens of the unit), nats: the std of log s if old logprobs were "
            "the engine's and the policy had not moved"
        ),
        "ratio/noise_clip_fraction": "share of units that such noise (normal, mean 0) carries beyond the clip range",
        "clip/low_fraction": "share of trained tokens whose lower clip binds (s under the floor, advantage negative)",
        "clip/high_fraction": "share of trained tokens whose upper clip binds (s over the ceiling, advantage positive)",
        "clip/dual_fraction": "share of trained tokens with s over dual_clip and a negative advantage",
        "correction/effective_sample_fraction": (
            "(sum w)^2 / (N sum w^2) over trained trajectories, w the geometric mean over a trajectory's tokens of the "
            "learner's / the engine's probability, not cut; 1: the engine samples as the learner would"
        ),
        "correction/truncated_fraction": "share of trained tokens whose w correction.high cut",
        "correction/masked_fraction": "share of trained tokens left out because their w was outside [low, high]",
        "correction/off_policy_fraction": "share of trained tokens left out by correction.off_policy_threshold",
        "kl/old_k1": "KL(old || now), mean of -log(now/old) over trained tokens, nats",
        "kl/old_k3": "KL(old || now), mean of the non-negative estimate over trained tokens, nats",
        "kl/rollout_k1": "KL(engine || learner before the update), mean of -log ratio over trained tokens, nats",
        "kl/rollout_k3": "the same by the non-negative estimate, nats",
        "kl/rollout_max_gap": "largest |learner's - engine's logprob| of a trained token, nats",
        "kl/ref_k1": "KL(now || reference), mean of the log ratio over trained tokens, nats; with a reference only",
        "kl/ref_k3": (
            "the same by the non-negative estimate, nats; with a reference only. Log ratios beyond 20 nats count as "
            "20, and nothing else is cut: one token may decide the mean"
        ),
        "distillation/advantage": (
            "mean over trained tokens of log(teacher / policy before the update), with the baseline if there is one"
        ),
        "distillation/kl": (
            "KL(policy before the update || teacher), mean over trained tokens, nats: exact with "
            "distillation.baseline, else the non-negative estimate"
        ),
        "distillation/divergence": (
            "mean over trained tokens and passes of the divergence that distillation.divergence names, exact, of the "
            "policy in the pass, nats; in place of the three of the sampled token"
        ),
        "distillation/dropped_fraction": "share of trained tokens left out of the teacher's term: they fell too far",
        "distillation/taught_fraction": (
            "share of the batch's sampled tokens in turns with feedback; the means of distillation/* are over these"
        ),
        "distillation/agreement": (
            "correlation over the batch's trajectories of the teacher's mean log ratio of their taught tokens and the "
            "advantage by reward; < 0: the teacher prefers what earns less"
        ),
        "policy/entropy": "mean over trained tokens of the entropy they were sampled from, nats",
        "router/load_max_over_mean": (
            "of a mixture of experts: mean over layers of the busiest expert's tokens over the mean expert's; 1 is even"
        ),
        "router/idle_fraction": "of a mixture of experts: share of experts, over layers, that no token chose",
        "router/entropy": "of a mixture of experts: mean over tokens and layers of the router's entropy, nats",
        "optim/learning_rate": "of the last step",
        "optim/grad_norm": "mean over steps of the global L2 norm of the gradient, before clipping",
        "optim/grad_norm_max": "largest over steps",
        "optim/num_steps": "optimizer steps taken in this update",
        "optim/num_nonfinite_steps": "steps skipped in this update because loss or gradient were NaN or infinite",
        "optim/num_empty_steps": "steps skipped in this update because no trajectory of the minibatch had a gradient",
        "memory/rank_mib": (
            "of several ranks: MiB of parameters, gradients, optimizer state and reference on the one that holds most"
        ),
        "time/score_seconds": "scoring old and reference logprobs before the first step",
        "time/train_seconds": "forward and backward passes and optimizer steps",
    }
)


_ROUNDING = 1e-6  # of s: some roundings of float32


def loss_metrics(steps: Sequence[Sequence[LossStats]]) -> dict[str, float]:
    """Return the `loss`, `ratio`, `clip`, `kl` and `policy` metrics of optimizer steps, each given by micro-batches."""
    parts = [part for step in steps for part in step]
    if not parts:
        return {}
    # Counts and sums are added over all before they are divided: no mean depends on the division into micro-batches.
    num_tokens = sum(part.num_tokens for part in parts)
    policy = _total([part.policy_loss for part in parts]) / len(steps)
    kl = _total([part.kl_loss for part in parts]) / len(steps)
    entropy = _total([part.entropy_loss for part in parts]) / len(steps)
    metrics = {"loss/total": policy + kl + entropy, "loss/policy": policy, "loss/kl": kl, "loss/entropy": entropy}
    teachers = [part.teacher for part in parts if part.teacher is not None]
    if teachers:
        metrics["loss/distillation"] = _total([teacher.loss for teacher in teachers]) / len(steps)
        metrics["loss/total"] += metrics["loss/distillation"]
    metrics |= _ratio_metrics(torch.cat([part.unit_ratios for part in parts]))
    per_token = {
        "clip/low_fraction": [part.tokens_clipped_low for part in parts],
        "clip/high_fraction": [part.tokens_clipped_high for part in parts],
        "clip/dual_fraction": [part.tokens_dual_clipped for part in parts],
        "kl/old_k1": [part.old_k1 for part in parts],
        "kl/old_k3": [part.old_k3 for part in parts],
        "kl/ref_k1": [part.ref_k1 for part in parts if part.ref_k1 is not None],
        "kl/ref_k3": [part.ref_k3 for part in parts if part.ref_k3 is not None],
        "policy/entropy": [part.entropy_sum for part in parts if part.entropy_sum is not None],
    }
    metrics |= {name: _total(values) / num_tokens for name, values in per_token.items() if values}
    per_taught_token = {
        "distillation/advantage": [teacher.advantage_sum for teacher in teachers],
        "distillation/kl": [teacher.kl_sum for teacher in teachers],
        "distillation/divergence": [teacher.divergence_sum for teacher in teachers],
        "distillation/dropped_fraction": [teacher.num_dropped for teacher in teachers],
    }
    num_taught = _total([teacher.num_taught for teacher in teachers])
    for name, sums in per_taught_token.items():
        if num_taught and (known := [each for each in sums if each is not None]):
            metrics[name] = _total(known) / num_taught
    return metrics


def _ratio_metrics(ratios: Tensor) -> dict[str, float]:
    sorted_ratios = ratios.double().sort().values
    last = len(sorted_ratios) - 1
    metrics = {
        "ratio/mean": float(sorted_ratios.mean()),
        "ratio/min": float(sorted_ratios[0]),
        "ratio/max": float(sorted_ratios[-1]),
    }
    metrics["ratio/log_std"] = float(sorted_ratios.log().std(correction=0))
    metrics["ratio/is_constant"] = float(
        torch.allclose(sorted_ratios, torch.ones_like(sorted_ratios), rtol=0, atol=_ROUNDING)
    )
    # The nearest rank, because torch.quantile refuses more than 16 million values (unit "token").
    return metrics | {f"ratio/q{q:02d}": float(sorted_ratios[math.floor(q / 100 * last + 0.5)]) for q in (5, 50, 95)}


def _total(values: Sequence[Tensor]) -> float:
    return sum(float(value) for value in values)

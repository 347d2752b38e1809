"""What an update reports, by name: `group/name` -> a sentence, and the arithmetic from sums to those numbers.

Every mean says over what. Nothing here feeds back into training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from gspo_gym.learning.losses import LossStats, k3

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "batch/num_trajectories": "trajectories in the batch (N of the loss)",
        "batch/num_actions": "sampled tokens in the batch",
        "batch/zero_advantage_fraction": "share of trajectories whose advantages are all 0: no policy gradient",
        "batch/trained_tokens": "sampled tokens that went through a backward pass, each counted once per epoch",
        "batch/padding_fraction": "share of padding among the token slots of the micro-batches",
        "advantage/mean": "mean over sampled tokens of the batch",
        "advantage/std": "population standard deviation over sampled tokens of the batch",
        "loss/total": "mean over optimizer steps of the loss",
        "loss/policy": "mean over optimizer steps of the clipped surrogate's share",
        "loss/kl": "mean over optimizer steps of the reference term's share, kl_coef included",
        "ratio/mean": "mean over units and steps of the importance ratio s",
        "ratio/min": "smallest s",
        "ratio/q05": "5% quantile of s over units and steps",
        "ratio/q50": "median of s over units and steps",
        "ratio/q95": "95% quantile of s over units and steps",
        "ratio/max": "largest s",
        "ratio/noise_floor": "largest |s - 1| before the weights moved: 0 unless scoring twice gives two results",
        "clip/low_fraction": "share of trained tokens whose lower clip binds (s under the floor, advantage negative)",
        "clip/high_fraction": "share of trained tokens whose upper clip binds (s over the ceiling, advantage positive)",
        "kl/old_k1": "KL(old || now), mean of -log(now/old) over trained tokens, nats",
        "kl/old_k3": "KL(old || now), mean of the non-negative estimate over trained tokens, nats",
        "kl/rollout_k1": "KL(engine || learner before the update), mean of -log ratio over trained tokens, nats",
        "kl/rollout_k3": "the same by the non-negative estimate, nats",
        "kl/rollout_max_gap": "largest |learner's - engine's logprob| of a trained token, nats",
        "kl/ref_k1": "KL(now || reference), mean of the log ratio over trained tokens, nats; with a reference only",
        "kl/ref_k3": "the same by the non-negative estimate, nats; with a reference only",
        "policy/entropy": "mean over trained tokens of the entropy they were sampled from, nats",
        "optim/learning_rate": "of the last step",
        "optim/grad_norm": "mean over steps of the global L2 norm of the gradient, before clipping",
        "optim/grad_norm_max": "largest over steps",
        "optim/num_steps": "optimizer steps taken in this update",
        "optim/num_nonfinite_steps": "steps skipped in this update because loss or gradient were NaN or infinite",
        "optim/num_empty_steps": "steps skipped in this update because no trajectory of the minibatch had a gradient",
        "time/score_seconds": "scoring old and reference logprobs before the first step",
        "time/train_seconds": "forward and backward passes and optimizer steps",
    }
)


def loss_metrics(steps: Sequence[Sequence[LossStats]]) -> dict[str, float]:
    """The `loss`, `ratio`, `clip` and `kl` metrics of these optimizer steps, each the micro-batches it summed over.

    Counts and sums are added over all before they are divided. No step: no metrics.
    """
    parts = [part for step in steps for part in step]
    if not parts:
        return {}
    num_tokens = sum(part.num_tokens for part in parts)
    policy = sum(float(part.policy_loss) for part in parts) / len(steps)
    kl = sum(float(part.kl_loss) for part in parts) / len(steps)
    metrics = {"loss/total": policy + kl, "loss/policy": policy, "loss/kl": kl}
    metrics |= _ratio_metrics(torch.cat([part.unit_ratios for part in parts]))
    metrics["clip/low_fraction"] = _total([part.tokens_clipped_low for part in parts]) / num_tokens
    metrics["clip/high_fraction"] = _total([part.tokens_clipped_high for part in parts]) / num_tokens
    metrics["kl/old_k1"] = _total([part.old_k1 for part in parts]) / num_tokens
    metrics["kl/old_k3"] = _total([part.old_k3 for part in parts]) / num_tokens
    ref_k1 = [part.ref_k1 for part in parts if part.ref_k1 is not None]
    ref_k3 = [part.ref_k3 for part in parts if part.ref_k3 is not None]
    if ref_k1:
        metrics |= {"kl/ref_k1": _total(ref_k1) / num_tokens, "kl/ref_k3": _total(ref_k3) / num_tokens}
    return metrics


def rollout_metrics(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """How far the learner's old logprobs are from the engine's: pairs of ([A] old, [A] rollout) of sampled tokens."""
    old = torch.cat([old.double() for old, _ in pairs])
    rollout = torch.cat([rollout.double() for _, rollout in pairs])
    log_ratio = old - rollout
    return {
        "kl/rollout_k1": float(-log_ratio.mean()),
        "kl/rollout_k3": float(k3(log_ratio).mean()),
        "kl/rollout_max_gap": float(log_ratio.abs().max()),
    }


def _ratio_metrics(ratios: Tensor) -> dict[str, float]:
    ordered = ratios.double().sort().values
    last = len(ordered) - 1
    metrics = {"ratio/mean": float(ordered.mean()), "ratio/min": float(ordered[0]), "ratio/max": float(ordered[-1])}
    # The nearest rank, because torch.quantile refuses more than 16 million values (unit "token").
    return metrics | {f"ratio/q{q:02d}": float(ordered[math.floor(q / 100 * last + 0.5)]) for q in (5, 50, 95)}


def _total(values: Sequence[Tensor]) -> float:
    return sum(float(value) for value in values)

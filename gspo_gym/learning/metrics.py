"""What an update reports, by name: `group/name` -> a sentence, and the arithmetic from sums to those numbers.

Every mean says over what. Nothing here feeds back into training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from gspo_gym.learning.losses import LossStats

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
        "time/score_seconds": "scoring old and reference logprobs before the first step",
        "time/train_seconds": "forward and backward passes and optimizer steps",
    }
)


_ROUNDING = 1e-6  # of s: some roundings of float32


def loss_metrics(steps: Sequence[Sequence[LossStats]]) -> dict[str, float]:
    """The `loss`, `ratio`, `clip`, `kl` and `policy` metrics of these optimizer steps, each a sum over micro-batches.

    Counts and sums are added over all before they are divided. No step: no metrics.
    """
    parts = [part for step in steps for part in step]
    if not parts:
        return {}
    num_tokens = sum(part.num_tokens for part in parts)
    policy = _total([part.policy_loss for part in parts]) / len(steps)
    kl = _total([part.kl_loss for part in parts]) / len(steps)
    entropy = _total([part.entropy_loss for part in parts]) / len(steps)
    metrics = {"loss/total": policy + kl + entropy, "loss/policy": policy, "loss/kl": kl, "loss/entropy": entropy}
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
    return metrics | {name: _total(values) / num_tokens for name, values in per_token.items() if values}


def _ratio_metrics(ratios: Tensor) -> dict[str, float]:
    ordered = ratios.double().sort().values
    last = len(ordered) - 1
    metrics = {"ratio/mean": float(ordered.mean()), "ratio/min": float(ordered[0]), "ratio/max": float(ordered[-1])}
    metrics["ratio/log_std"] = float(ordered.log().std(correction=0))
    metrics["ratio/is_constant"] = float(torch.allclose(ordered, torch.ones_like(ordered), rtol=0, atol=_ROUNDING))
    # The nearest rank, because torch.quantile refuses more than 16 million values (unit "token").
    return metrics | {f"ratio/q{q:02d}": float(ordered[math.floor(q / 100 * last + 0.5)]) for q in (5, 50, 95)}


def _total(values: Sequence[Tensor]) -> float:
    return sum(float(value) for value in values)

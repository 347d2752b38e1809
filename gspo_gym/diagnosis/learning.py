"""Findings on sampling, the objective and the optimizer.

`CAUSES` break a link of the chain from sampling to the optimizer step, in the order of that chain: the numbers of the
run show it, with the setting that made it. `OTHERS` are symptoms as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from gspo_gym.diagnosis.view import Check, Finding, RunView, Window

# Fraction of the groups at which sampling itself leaves no choice: a policy that still explores has some that
# differ.
_GREEDY_GROUPS = 0.9
# Below these, one token has nearly all the probability at every place.
_GREEDY_TEMPERATURE, _GREEDY_TOP_P = 0.2, 0.2
# Above it, the distribution is flatter than in any recipe that we know of.
_FLAT_TEMPERATURE = 2.0
# Nats per token: exp(3) = 20 tokens are equally good. Models that speak have 0.2 to 1.5.
_UNIFORM_ENTROPY = 3.0
# Nats per token between the policy before and after one batch. The clip stands at 1e-3; at 0.5 the episodes are another
# policy's, and noise for this one.
_EXPLODED = 0.5
# Passes over one batch: no recipe that we know of takes more than 4.
_MANY_EPOCHS = 8
# Nats per token to the reference: a policy that may not move further is the reference.
_HELD_KL = 1e-3
# Of log(weight): over the run, weight decay alone takes a fifth of the weights.
_MAX_DECAY = 0.2
# Of the spread of the ratios: a range this small is a switch for the sign of the advantage.
_SHUT_CLIP = 0.02
# Global L2 norm after clipping: AdamW adds 1e-8 to each element's root mean square, so less moves nothing.
_LOST_GRADIENT = 1e-6
# Of the trained tokens. A trajectory's ratio clips whole trajectories: the GSPO paper (section 5.1) sees 15% of all
# tokens clipped and calls it harmless; short episodes learn well at 40%. Beyond 60% most of a batch teaches nothing.
# With a ratio per token the same paper sees 0.13%; PPO's habit is to keep it below 20%.
_MAX_SHARED_CLIP_FRACTION, _MAX_TOKEN_CLIP_FRACTION = 0.6, 0.2
# Of what can be clipped at all.
_MAX_SHARE_OF_ATTAINABLE = 0.9
# Of the units that scoring noise alone carries out of the clip range: at 10% it is a regular part of the clipping.
_MAX_NOISE_CLIP_FRACTION = 0.1
# Of the clip range: scoring twice may differ by this much before the clip acts on the difference.
_MAX_NOISE_SHARE_OF_CLIP = 0.5
# Of the steps: if the gradient is nearly always clipped, its length carries no information any more.
_MAX_CLIPPED_GRADIENT_FRACTION = 0.9
# Of the optimizer steps: one in twenty lost is no accident.
_MAX_NONFINITE_FRACTION = 0.05
# Nats per token, k3: 0.5 is a factor of 2 to 3 in a sampled token's probability; 0.01 to 0.1 is usual.
_MAX_REFERENCE_KL = 0.5
# Nats per token, k3, between engine and learner under the same weights. The same arithmetic gives 1e-7 and less,
# bfloat16 kernels 1e-4 to 1e-3; at 1e-2 single tokens differ by a seventh (exp(sqrt(2 * 0.01)) = 1.15).
_MAX_ROLLOUT_KL, _SERIOUS_ROLLOUT_KL = 1e-3, 1e-2
# In the runs that it ends, the mismatch grows with the weights: this many times the early one, and no longer tiny.
_MAX_ROLLOUT_KL_GROWTH, _MIN_GROWN_ROLLOUT_KL = 3.0, 1e-4
# Of the trained tokens that a correction leaves out; more is a bias and not a safeguard.
_MAX_CORRECTED_AWAY = 0.2


def sampling_is_greedy(run: RunView) -> Finding | None:
    """Find sampling without choice, which makes the episodes of a group equal."""
    groups = run.recent("batch/constant_group_fraction")
    if groups is None or groups.mean < _GREEDY_GROUPS or run.is_succeeding or not run.learns_from_reward:
        return None
    cases = (
        ("rollout.top_k", run.setting("rollout.top_k", 0) == 1, "set it to 0 (all tokens), or to 20 and more"),
        ("rollout.top_p", run.setting("rollout.top_p", 1.0) < _GREEDY_TOP_P, "set it to 1, or to 0.9 and more"),
        ("rollout.min_p", run.setting("rollout.min_p", 0.0) > 1 - _GREEDY_TOP_P, "set it to 0, or to 0.1 and less"),
        ("rollout.temperature", run.setting("rollout.temperature", 1.0) < _GREEDY_TEMPERATURE, "set it to 1"),
    )
    key, advice = next(((key, advice) for key, is_greedy, advice in cases if is_greedy), ("", ""))
    if not key:
        return None
    return Finding(
        "serious",
        "Sampling leaves the policy no choice, so that the episodes of a group are the same and nothing can be learned "
        "from comparing them.",
        f"{key} is {run.setting(key)}; in {groups.mean:.0%} of the groups of {groups.steps} all earn the same",
        key,
        advice,
    )


def sampling_is_uniform(run: RunView) -> Finding | None:
    """Find sampling that flattens the policy's distribution to noise."""
    temperature, entropy = run.setting("rollout.temperature", 1.0), run.early("policy/entropy")
    if temperature <= _FLAT_TEMPERATURE or entropy is None or entropy.mean < _UNIFORM_ENTROPY:
        return None
    return Finding(
        "serious",
        "Sampling flattens the policy until its tokens are nearly random: what is played is not what was learned.",
        f"rollout.temperature is {temperature:g}, and policy/entropy {entropy.mean:.2g} nats in {entropy.steps}, as of "
        f"{math.exp(entropy.mean):.0f} tokens that are as good as each other",
        "rollout.temperature",
        "set it to 1",
    )


def returns_are_clipped(run: RunView) -> Finding | None:
    """Find a clip that makes the returns of a group equal."""
    clip, groups = run.setting("rewards.clip"), run.recent("batch/constant_group_fraction")
    spread = run.recent("rollout/reward_std")
    if clip is None or groups is None or groups.mean < _GREEDY_GROUPS or spread is None or spread.mean <= clip:
        return None
    return Finding(
        "serious",
        "The returns are clipped until those of a group are all the same.",
        f"rewards.clip is {clip:g}, and returns vary by {spread.mean:.2g} before it; in {groups.mean:.0%} of the "
        f"groups of {groups.steps} none is better than another",
        "rewards.clip",
        "leave it out, or set it above the returns that good play earns",
    )


def weights_decay(run: RunView) -> Finding | None:
    """Find weight decay that shrinks the weights faster than they learn."""
    decay, rate = run.number("optimizer.weight_decay"), run.number("training.learning_rate")
    step_counts = run.all("optim/num_steps")
    if step_counts is None or decay * rate * sum(step_counts.values) <= _MAX_DECAY:
        return None
    lost = -math.expm1(-decay * rate * sum(step_counts.values))
    return Finding(
        "serious",
        "Weight decay shrinks the weights faster than training can write into them.",
        f"learning rate {rate:g} times weight decay {decay:g} takes {lost:.0%} of every weight in "
        f"{sum(step_counts.values):.0f} steps",
        "optimizer.weight_decay",
        "set it to 0, or to 0.1 and less",
    )


def entropy_bonus_dominates(run: RunView) -> Finding | None:
    """Find an entropy bonus that outweighs the advantages."""
    coefficient, entropy = run.number("loss.entropy_coef"), run.recent("policy/entropy")
    advantage = run.all("advantage/std")
    if not coefficient or entropy is None or advantage is None or not run.learns_from_reward:
        return None
    largest = max(advantage.values)
    if coefficient * entropy.mean <= largest:
        return None
    return Finding(
        "serious",
        "The bonus for entropy is worth more than any advantage, so that the policy learns to be random.",
        f"{coefficient:g} times an entropy of {entropy.mean:.2g} nats ({entropy.steps}) against advantages of "
        f"{largest:.2g}",
        "loss.entropy_coef",
        f"set it to 0, or to {0.01 * largest / max(entropy.mean, 1.0):.1g} and less",
    )


def kl_term_dominates(run: RunView) -> Finding | None:
    """Find a KL term that outweighs the advantages before the policy has moved."""
    advantage = run.all("advantage/std") if run.learns_from_reward else None
    # The gradient of a token's term is kl_coef * |log ratio|, and k3 is half the square of the log ratio.
    pulls = {key: run.number(key) * math.sqrt(2 * _HELD_KL) for key in ("loss.kl_coef", "rewards.kl_coef")}
    key = next((key for key, pull in pulls.items() if advantage is not None and pull > advantage.mean), None)
    if advantage is None or key is None:
        return None
    kl = run.recent("kl/ref_k3") or run.recent("shaping/kl")
    return Finding(
        "serious",
        "The KL term outweighs the advantages as soon as the policy moves, so that it stays the reference.",
        f"{key} is {run.number(key):g}: at {_HELD_KL:g} nats a token from the reference it pulls with "
        f"{pulls[key]:.2g}, the advantages with {advantage.mean:.2g}"
        + ("" if kl is None else f"; the distance is {kl.mean:.2g} in {kl.steps}"),
        key,
        f"set it to 0, or to {0.1 * advantage.mean:.1g} and less",
    )


def steps_too_large(run: RunView) -> Finding | None:
    """Find the first step that moved the policy far from the batch.

    An exact divergence moves with the policy, so that many passes over a batch are sound
    (docs/explanations/distillation.md).
    """
    if not run.uses_the_ratio:
        return None
    # A metric that was not finite is null in its line.
    lines = [{name: value for name, value in line.items() if value is not None} for line in run.metrics]
    exploded_lines = [line for line in lines if _has_exploded(line)]
    if not exploded_lines:
        return None
    line, rate = exploded_lines[0], run.number("training.learning_rate")
    until = [earlier.get("batch/constant_group_fraction", 0.0) for earlier in lines if earlier["step"] <= line["step"]]
    if statistics.fmean(until) >= _GREEDY_GROUPS:
        return None  # hardly anything was learned before: one episode alone moved the policy
    # The length of a step of Adam is linear in its rate.
    spread = 10 * max(run.number("loss.clip_low"), 1e-4)
    slower = rate * min(0.1, spread / max(line.get("ratio/log_std", 1.0), spread))
    has_many_epochs = run.number("training.update_epochs") >= _MANY_EPOCHS
    return Finding(
        "serious",
        "The steps are too large: within one batch the policy became another one than the one that played it.",
        f"the ratio exploded in step {line['step']}, from {line.get('ratio/min', 1.0):.2g} to "
        f"{line.get('ratio/max', math.inf):.2g} (log s varies by {line.get('ratio/log_std', 0.0):.2g} nats, KL to the "
        f"old policy {line.get('kl/old_k3', 0.0):.2g} nats a token), "
        f"and in {len(exploded_lines)} of {len(lines)} steps",
        "training.update_epochs" if has_many_epochs else "training.learning_rate",
        "set it to 1, or to 4 and less"
        if has_many_epochs
        else f"lower it to {slower:.1g}, and further until ratio/log_std is near the clip range",
    )


def _has_exploded(line: Mapping[str, Any]) -> bool:
    return bool(max(line.get("ratio/log_std", 0.0), line.get("kl/old_k3", 0.0)) > _EXPLODED)


def clip_is_shut(run: RunView) -> Finding | None:
    """Find a clip range far below the spread of the ratios: only the first step on each batch then has an effect."""
    spread, low, high = run.all("ratio/log_std"), run.number("loss.clip_low"), run.number("loss.clip_high")
    typical = 0.0 if spread is None else statistics.median(spread.values)
    if (
        spread is None
        or run.unit == "token"
        or not run.clips_the_ratio
        or typical <= 1e-6
        or max(low, high) >= _SHUT_CLIP * typical
    ):
        return None
    return Finding(
        "serious",
        "The clip range is nothing beside what the ratios do: what moved in the right direction is clipped at once.",
        f"-{low:g} to +{high:g}, and log s varies by {typical:.2g} nats in {spread.steps}",
        "loss.clip_low",
        f"set it to {0.3 * typical:.1g}, and loss.clip_high to {0.4 * typical:.1g}",
    )


def steps_too_small(run: RunView) -> Finding | None:
    """Find steps that move nothing."""
    constant, step_counts = run.all("ratio/is_constant"), run.all("optim/num_steps")
    if constant is None or step_counts is None or min(constant.values) < 1 or step_counts.mean <= 1:
        return None
    rate, limit = run.number("training.learning_rate"), run.setting("optimizer.max_grad_norm")
    norm, clip_fractions = run.all("optim/grad_norm"), run.all("advantage/clipped_fraction")
    length = math.inf if norm is None else norm.mean
    if clip_fractions is not None and clip_fractions.mean > 0.9 and length < _LOST_GRADIENT:
        key = "advantages.clip"
        why = f"advantages.clip cuts {clip_fractions.mean:.0%} of the advantages, to {run.setting(key):g}"
        advice = "leave it out, or set it to 5"
    else:
        key, why = "training.learning_rate", f"a learning rate of {rate:g}"
        advice = f"raise it a hundredfold, to {100 * rate:.1g}, until ratio/log_std comes near the clip range"
    if limit is not None and limit < _LOST_GRADIENT and limit < length < math.inf:
        key, advice = "optimizer.max_grad_norm", f"set it to 1, or to {2 * length:.1g}"
        why = f"gradients of {length:.2g} are cut to {limit:g}, less than the epsilon of the optimizer"
    return Finding(
        "serious",
        "Steps are taken, and the policy does not move.",
        f"{step_counts.mean:.1f} steps a batch leave every ratio at 1 in {constant.steps}; {why}",
        key,
        advice,
    )


def training_is_not_evaluation(run: RunView) -> Finding | None:
    """Find training returns above the last evaluation, if evaluations sample at a higher temperature."""
    here, there = run.setting("rollout.temperature", 1.0), run.setting("evaluation.temperature", 1.0)
    reward, evaluations = run.recent("rollout/reward_mean"), run.events_of("evaluation")
    interval = evaluations[-1]["data"].get("mean_return_interval") if evaluations else None
    if reward is None or interval is None or there <= max(here, _FLAT_TEMPERATURE) or reward.mean <= interval[1]:
        return None
    return Finding(
        "serious",
        "The evaluation samples otherwise than training, and scores another policy than the one that learns.",
        f"training episodes earn {reward.mean:.3f} in {reward.steps}, the last evaluation "
        f"{interval[0]:.3f} to {interval[1]:.3f}; evaluation.temperature is {there:g}, rollout.temperature {here:g}",
        "evaluation.temperature",
        f"set it to {here:g}, or to 0 (greedy)",
    )


def ratio_is_constant(run: RunView) -> Finding | None:
    """Find ratios that are all 1: GSPO, GSPO-token and GRPO are then the same, and no clip acts."""
    constant = run.recent("ratio/is_constant")
    if constant is None or min(constant.values) < 1 or not run.learns_from_reward:
        return None
    batch, size = run.setting("rollout.episodes_per_batch", 0), run.setting("training.batch_size", 0)
    return Finding(
        "warning",
        "The importance ratio is 1 everywhere: old and new policy are the same at every optimizer step, so that the "
        "clip cannot act and the unit of the ratio makes no difference.",
        f"ratio/is_constant is 1 in {constant.steps}; {batch} episodes a batch, {size} a step, "
        f"{run.setting('training.update_epochs', 1)} pass(es)",
        "training.batch_size",
        f"set it to {max(1, batch // 4)} (the paper takes 4 steps a batch), or training.update_epochs to 2 or more",
    )


def noise_reaches_the_clip(run: RunView) -> Finding | None:
    """Find noise between two scorings of the same tokens that is not small against the clip range."""
    if not run.clips_the_ratio:
        return None
    clip = min(run.number("loss.clip_low"), run.number("loss.clip_high"))
    is_rescored = run.setting("correction.old_logprobs", "recompute") == "recompute"
    floor = run.recent("ratio/noise_floor")
    if is_rescored and clip and floor is not None and floor.mean > _MAX_NOISE_SHARE_OF_CLIP * clip:
        return Finding(
            "serious",
            "Scoring the same tokens twice under the same weights gives ratios that differ by as much as the clip "
            "allows, so that the clip acts on noise.",
            f"ratio/noise_floor is {floor.mean:.2g} in {floor.steps}, the clip range {clip:.2g}",
            "model.dtype",
            'set it to "float32"; if it is, widen loss.clip_low and loss.clip_high beyond '
            f"{floor.mean / _MAX_NOISE_SHARE_OF_CLIP:.2g}",
        )
    noise, sigma = run.recent("ratio/noise_clip_fraction"), run.recent("ratio/predicted_noise")
    if is_rescored or noise is None or sigma is None or noise.mean <= _MAX_NOISE_CLIP_FRACTION:
        return None
    return Finding(
        "serious",
        "The engine's logprobs are taken as the old ones, and their noise alone clips a good part of the batch.",
        f"noise of {sigma.mean:.2g} nats in log s against a clip range of {clip:.2g}, beyond which it carries "
        f"{noise.mean:.0%} of the ratios ({noise.steps})",
        "correction.old_logprobs",
        'set it to "recompute", or widen loss.clip_low and loss.clip_high to several times the noise',
    )


def clips_too_much(run: RunView) -> Finding | None:
    """Find a clip that removes the gradient of most tokens."""
    fraction, steps = _clip_fraction(run), run.recent("optim/num_steps")
    limit = _MAX_TOKEN_CLIP_FRACTION if run.unit == "token" else _MAX_SHARED_CLIP_FRACTION
    if steps is not None and steps.mean > 1:
        # The first step on a batch has every ratio at 1, where no clip binds.
        limit = min(limit, _MAX_SHARE_OF_ATTAINABLE * (1 - 1 / steps.mean))
    if fraction is None or fraction.mean <= limit:
        return None
    low, high, rate = (run.number(key) for key in ("loss.clip_low", "loss.clip_high", "training.learning_rate"))
    return Finding(
        "warning",
        "The clip takes the gradient from a large part of every batch.",
        f"{fraction.mean:.0%} of the trained tokens in {fraction.steps}, with a ratio per {run.unit} and a range of "
        f"-{low:g} to +{high:g}; more than {limit:.0%} is too many{_ratio_range(run)}",
        "loss.clip_low",
        f"widen it to {3 * low:.2g}, and loss.clip_high to {3 * high:.2g}: the shorter the {run.unit}, the more its "
        f"ratio varies; or lower training.learning_rate to {rate / 2:.2g}",
    )


def _clip_fraction(run: RunView) -> Window | None:
    """Return the fraction of trained tokens that a clip binds, step by step."""
    low, high = run.recent("clip/low_fraction"), run.recent("clip/high_fraction")
    if low is None or high is None or len(low.values) != len(high.values):
        return None
    return Window(low.first_step, low.last_step, tuple(a + b for a, b in zip(low.values, high.values, strict=True)))


def _ratio_range(run: RunView) -> str:
    q05, q95 = run.recent("ratio/q05"), run.recent("ratio/q95")
    return "" if q05 is None or q95 is None else f"; nine ratios of ten lie between {q05.mean:.4f} and {q95.mean:.4f}"


def gradient_always_clipped(run: RunView) -> Finding | None:
    """Find gradients that are clipped in nearly every step."""
    limit, norms = run.setting("optimizer.max_grad_norm"), run.recent("optim/grad_norm")
    fraction = 0.0 if limit is None or norms is None else sum(n > limit for n in norms.values) / len(norms.values)
    if norms is None or fraction < _MAX_CLIPPED_GRADIENT_FRACTION:
        return None
    return Finding(
        "warning",
        "The gradient is clipped in nearly every step, so that one bad batch moves the weights as much as a good one.",
        f"optim/grad_norm is above {limit:g} in {fraction:.0%} of {norms.steps}, {norms.mean:.2g} on average",
        "optimizer.max_grad_norm",
        f"raise it to {2 * norms.mean:.2g}; if the norm grows over the run, lower training.learning_rate instead",
    )


def steps_not_finite(run: RunView) -> Finding | None:
    """Find optimizer steps that were skipped for a NaN or infinity."""
    skipped_steps, taken_steps = run.all("optim/num_nonfinite_steps"), run.all("optim/num_steps")
    if skipped_steps is None or taken_steps is None or not sum(skipped_steps.values):
        return None
    num_skipped = round(sum(skipped_steps.values))
    num_steps = num_skipped + round(sum(taken_steps.values))
    fraction = num_skipped / num_steps
    return Finding(
        "serious" if fraction > _MAX_NONFINITE_FRACTION else "warning",
        "Optimizer steps were skipped, because their loss or gradient was not finite.",
        f"{num_skipped} of {num_steps} steps ({fraction:.1%}) in {skipped_steps.steps}",
        "training.learning_rate",
        f'lower it to {run.number("training.learning_rate") / 2:.2g}, and use model.dtype = "float32"',
    )


def far_from_the_reference(run: RunView) -> Finding | None:
    """Find a policy that has left its reference despite a KL term."""
    kl, early = run.recent("kl/ref_k3"), run.early("kl/ref_k3")
    if kl is None or early is None or kl.mean <= _MAX_REFERENCE_KL:
        return None
    is_reward = not run.number("loss.kl_coef") and bool(run.number("rewards.kl_coef"))
    key = "rewards.kl_coef" if is_reward else "loss.kl_coef"
    return Finding(
        "warning",
        "The policy is far from its reference, although a KL term holds it.",
        f"kl/ref_k3 went from {early.mean:.2g} nats a token in {early.steps} to {kl.mean:.2g} in {kl.steps}; more than "
        f"{_MAX_REFERENCE_KL:g} is far",
        key,
        f"raise it from {run.number(key):g} to {2 * run.number(key):g}, or move the reference along with "
        "reference.update_every_n_iters",
    )


def engine_differs_from_learner(run: RunView) -> Finding | None:
    """Find an engine that samples from another distribution than the learner computes."""
    kl, early, age = run.recent("kl/rollout_k3"), run.early("kl/rollout_k3"), run.recent("rollout/staleness_mean")
    if kl is None or early is None:
        return None
    has_grown = kl.mean > _MAX_ROLLOUT_KL_GROWTH * early.mean and kl.mean > _MIN_GROWN_ROLLOUT_KL
    if kl.mean <= _MAX_ROLLOUT_KL and not has_grown:
        return None
    is_corrected = run.setting("correction.level", "none") != "none"
    if age is not None and age.mean > 0:
        # Learning itself moves the policy away from older weights, so nothing is known about the engine.
        is_handled = is_corrected or run.setting("correction.old_logprobs", "recompute") == "rollout"
        return Finding(
            "warning",
            "The policy has moved away from the older weights that sampled the episodes.",
            f"kl/rollout_k3 is {kl.mean:.2g} nats a token in {kl.steps}, whose episodes are {age.mean:.2g} versions "
            f"old on average (rollout/staleness_mean); {_MAX_ROLLOUT_KL:g} is what bfloat16 explains",
            "training.max_staleness" if is_handled else "correction.level",
            f"lower it from {run.number('training.max_staleness'):g}, or take smaller steps"
            if is_handled
            else 'set it to "trajectory" (a geometric mean, cut at correction.high), or lower training.max_staleness',
        )
    return Finding(
        "serious" if kl.mean > _SERIOUS_ROLLOUT_KL and not is_corrected else "warning",
        "The engine samples from another distribution than the learner computes for the same weights"
        + (", and the difference grows." if has_grown else "."),
        f"kl/rollout_k3 was {early.mean:.2g} nats a token in {early.steps} and is {kl.mean:.2g} in {kl.steps}; "
        f"{_MAX_ROLLOUT_KL:g} is what bfloat16 explains",
        "model.dtype" if is_corrected else "correction.level",
        'set it to "float32": the correction treats the symptom only'
        if is_corrected
        else 'set it to "trajectory" (a geometric mean, cut at correction.high), and look for the cause: dtype, '
        "truncated sampling, weights that were not published",
    )


def few_effective_samples(run: RunView) -> Finding | None:
    """Find a correction that leaves a large part of the batch out."""
    masked_fraction, off_policy = run.recent("correction/masked_fraction"), run.recent("correction/off_policy_fraction")
    fraction = sum(window.mean for window in (masked_fraction, off_policy) if window is not None)
    if masked_fraction is None or fraction <= _MAX_CORRECTED_AWAY:
        return None
    return Finding(
        "warning",
        "The correction leaves a good part of the batch out of the loss.",
        f"{fraction:.0%} of the trained tokens in {masked_fraction.steps}, more than {_MAX_CORRECTED_AWAY:.0%}",
        "correction.mode",
        'set it to "truncate", which keeps them with a smaller weight, or widen correction.low and correction.high',
    )


CAUSES: tuple[Check, ...] = (
    sampling_is_greedy,
    sampling_is_uniform,
    returns_are_clipped,
    weights_decay,
    entropy_bonus_dominates,
    kl_term_dominates,
    steps_too_large,
    clip_is_shut,
    steps_too_small,
    training_is_not_evaluation,
)
OTHERS: tuple[Check, ...] = (
    ratio_is_constant,
    noise_reaches_the_clip,
    clips_too_much,
    gradient_always_clipped,
    steps_not_finite,
    far_from_the_reference,
    engine_differs_from_learner,
    few_effective_samples,
)

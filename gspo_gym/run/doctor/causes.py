"""Checks for root causes of a run that does not learn: a broken link in the chain from sampling to the optimizer step.

`CAUSES` is in the order of that chain. `diagnose` leaves out what follows from an earlier link: a policy that is
sampled greedily has constant groups, takes no step and does not improve, and only the first needs attention. A cause is
reported if the run's numbers show it, with the setting that made it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.run.doctor.checks import Check, Finding, RunView

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
_EXPLODED_LOG_STD = 0.5
_EXPLODED_KL = 0.5
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


def sampling_is_greedy(run: RunView) -> Finding | None:
    """Find sampling without choice, which makes the episodes of a group equal."""
    groups = run.recent("batch/constant_group_fraction")
    if groups is None or groups.mean < _GREEDY_GROUPS or run.is_succeeding:
        return None
    cases = (
        ("rollout.top_k", run.setting("rollout.top_k", 0) == 1, "set it to 0 (all tokens), or to 20 and more"),
        ("rollout.top_p", run.setting("rollout.top_p", 1.0) < _GREEDY_TOP_P, "set it to 1, or to 0.9 and more"),
        ("rollout.min_p", run.setting("rollout.min_p", 0.0) > 1 - _GREEDY_TOP_P, "set it to 0, or to 0.1 and less"),
        ("rollout.temperature", run.setting("rollout.temperature", 1.0) < _GREEDY_TEMPERATURE, "set it to 1"),
    )
    for key, is_greedy, advice in cases:
        if is_greedy:
            return Finding(
                "serious",
                "sampling_is_greedy",
                "Sampling leaves the policy no choice, so that the episodes of a group are the same and nothing can be "
                "learned from comparing them.",
                f"{key} is {run.setting(key)}; in {groups.mean:.0%} of the groups of {groups.steps} all earn the same",
                key,
                advice,
            )
    return None


def sampling_is_uniform(run: RunView) -> Finding | None:
    """Find sampling that flattens the policy's distribution to noise."""
    temperature, entropy = run.setting("rollout.temperature", 1.0), run.early("policy/entropy")
    if temperature <= _FLAT_TEMPERATURE or entropy is None or entropy.mean < _UNIFORM_ENTROPY:
        return None
    return Finding(
        "serious",
        "sampling_is_uniform",
        "Sampling flattens the policy until its tokens are nearly random: what is played is not what was learned.",
        f"rollout.temperature is {temperature:g}, and policy/entropy {entropy.mean:.2g} nats in {entropy.steps}, as of "
        f"{math.exp(entropy.mean):.0f} tokens that are as good as each other",
        "rollout.temperature",
        "set it to 1",
    )


def returns_are_clipped(run: RunView) -> Finding | None:
    """Find a clip that makes the returns of a group equal."""
    clip, groups = run.setting("rewards.clip"), run.recent("batch/constant_group_fraction")
    earned = run.recent("rollout/reward_std")
    if clip is None or groups is None or groups.mean < _GREEDY_GROUPS or earned is None or earned.mean <= clip:
        return None
    return Finding(
        "serious",
        "returns_are_clipped",
        "The returns are clipped until those of a group are all the same.",
        f"rewards.clip is {clip:g}, and returns vary by {earned.mean:.2g} before it; in {groups.mean:.0%} of the "
        f"groups of {groups.steps} none is better than another",
        "rewards.clip",
        "leave it out, or set it above the returns that good play earns",
    )


def no_step_taken(run: RunView) -> Finding | None:
    """Find a run in which no batch reached the optimizer."""
    taken, skipped = run.all("optim/num_steps"), run.all("optim/num_nonfinite_steps")
    if taken is None or any((*taken.values, *(() if skipped is None else skipped.values))):
        return None
    masked, groups = run.all("batch/masked_fraction"), run.all("batch/constant_group_fraction")
    if groups is not None and groups.mean >= 1:
        return None  # `groups_are_constant` says why
    if masked is not None and masked.mean >= 1:
        key, reason, advice = (
            "rewards.overlong",
            "every episode was cut off by a limit, and those are left out of the loss",
            'set it to "keep" or "penalize", or raise the limit that cuts them off (rollout.max_turns, '
            "rollout.max_output_tokens, rollout.max_model_len)",
        )
    elif run.setting("correction.level", "none") != "none":
        key, reason, advice = (
            "correction.mode",
            "the correction leaves every token out",
            'set it to "truncate", or widen correction.low and correction.high',
        )
    else:
        key, reason, advice = "rewards", "no token has an advantage", "look at how rewards and advantages are shaped"
    return Finding(
        "serious",
        "no_step_taken",
        f"No optimizer step was taken in the whole run: {reason}.",
        f"optim/num_steps is 0 in {taken.steps}",
        key,
        advice,
    )


def weights_decay(run: RunView) -> Finding | None:
    """Find weight decay that shrinks the weights faster than they learn."""
    decay, rate = run.setting("optimizer.weight_decay", 0.0), run.setting("training.learning_rate", 0.0)
    taken = run.all("optim/num_steps")
    if taken is None or decay * rate * sum(taken.values) <= _MAX_DECAY:
        return None
    lost = -math.expm1(-decay * rate * sum(taken.values))
    return Finding(
        "serious",
        "weights_decay",
        "Weight decay shrinks the weights faster than training can write into them.",
        f"learning rate {rate:g} times weight decay {decay:g} takes {lost:.0%} of every weight in "
        f"{sum(taken.values):.0f} steps",
        "optimizer.weight_decay",
        "set it to 0, or to 0.1 and less",
    )


def entropy_bonus_dominates(run: RunView) -> Finding | None:
    """Find an entropy bonus that outweighs the advantages."""
    coefficient, entropy = run.setting("loss.entropy_coef", 0.0), run.recent("policy/entropy")
    advantage = run.all("advantage/std")
    if not coefficient or entropy is None or advantage is None:
        return None
    largest = max(advantage.values)
    if coefficient * entropy.mean <= largest:
        return None
    return Finding(
        "serious",
        "entropy_bonus_dominates",
        "The bonus for entropy is worth more than any advantage, so that the policy learns to be random.",
        f"{coefficient:g} times an entropy of {entropy.mean:.2g} nats ({entropy.steps}) against advantages of "
        f"{largest:.2g}",
        "loss.entropy_coef",
        f"set it to 0, or to {0.01 * largest / max(entropy.mean, 1.0):.1g} and less",
    )


def kl_term_dominates(run: RunView) -> Finding | None:
    """Find a KL term that outweighs the advantages before the policy has moved."""
    advantage = run.all("advantage/std")
    for key in ("loss.kl_coef", "rewards.kl_coef"):
        coefficient = run.setting(key, 0.0)
        # The gradient of a token's term is kl_coef * |log ratio|, and k3 is half the square of the log ratio.
        if advantage is None or coefficient * math.sqrt(2 * _HELD_KL) <= advantage.mean:
            continue
        kl = run.recent("kl/ref_k3") or run.recent("shaping/kl")
        return Finding(
            "serious",
            "kl_term_dominates",
            "The KL term outweighs the advantages as soon as the policy moves, so that it stays the reference.",
            f"{key} is {coefficient:g}: at {_HELD_KL:g} nats a token from the reference it pulls with "
            f"{coefficient * math.sqrt(2 * _HELD_KL):.2g}, the advantages with {advantage.mean:.2g}"
            + ("" if kl is None else f"; the distance is {kl.mean:.2g} in {kl.steps}"),
            key,
            f"set it to 0, or to {0.1 * advantage.mean:.1g} and less",
        )
    return None


def steps_too_large(run: RunView) -> Finding | None:
    """Find the first step that moved the policy far from the batch."""
    # A metric that was not finite is null in its line.
    lines = [{name: value for name, value in line.items() if value is not None} for line in run.metrics]
    exploded = [line for line in lines if _has_exploded(line)]
    if not exploded:
        return None
    until = [line.get("batch/constant_group_fraction", 0.0) for line in lines if line["step"] <= exploded[0]["step"]]
    if statistics.fmean(until) >= _GREEDY_GROUPS:
        return None  # hardly anything was learned before: one episode alone moved the policy
    rate, epochs = run.setting("training.learning_rate", 0.0), run.setting("training.update_epochs", 1)
    line = exploded[0]
    if epochs >= _MANY_EPOCHS:
        key, advice = "training.update_epochs", "set it to 1, or to 4 and less"
    else:
        wanted = 10 * max(run.setting("loss.clip_low", 0.0), 1e-4)
        # the length of a step of Adam is linear in its rate
        factor = min(0.1, wanted / max(line.get("ratio/log_std", 1.0), wanted))
        key = "training.learning_rate"
        advice = f"lower it to {rate * factor:.1g}, and further until ratio/log_std is near the clip range"
    return Finding(
        "serious",
        "steps_too_large",
        "The steps are too large: within one batch the policy became another one than the one that played it.",
        f"the ratio exploded in step {line['step']}, from {line.get('ratio/min', 1.0):.2g} to "
        f"{line.get('ratio/max', math.inf):.2g} (log s varies by {line.get('ratio/log_std', 0.0):.2g} nats, KL to the "
        f"old policy {line.get('kl/old_k3', 0.0):.2g} nats a token), and in {len(exploded)} of {len(lines)} steps",
        key,
        advice,
    )


def _has_exploded(line: Mapping[str, Any]) -> bool:
    return bool(line.get("ratio/log_std", 0.0) > _EXPLODED_LOG_STD or line.get("kl/old_k3", 0.0) > _EXPLODED_KL)


def clip_is_shut(run: RunView) -> Finding | None:
    """Find a clip range far below the spread of the ratios: only the first step on each batch then has an effect."""
    spread = run.all("ratio/log_std")
    low, high = run.setting("loss.clip_low", 0.0), run.setting("loss.clip_high", 0.0)
    if spread is None or run.setting("loss.unit", "trajectory") == "token":
        return None
    typical = statistics.median(spread.values)
    if typical <= 1e-6 or max(low, high) >= _SHUT_CLIP * typical:
        return None
    return Finding(
        "serious",
        "clip_is_shut",
        "The clip range is nothing beside what the ratios do: what moved in the right direction is clipped at once.",
        f"-{low:g} to +{high:g}, and log s varies by {typical:.2g} nats in {spread.steps}",
        "loss.clip_low",
        f"set it to {0.3 * typical:.1g}, and loss.clip_high to {0.4 * typical:.1g}",
    )


def steps_too_small(run: RunView) -> Finding | None:
    """Find steps that move nothing."""
    constant, taken = run.all("ratio/is_constant"), run.all("optim/num_steps")
    if constant is None or taken is None or min(constant.values) < 1 or statistics.fmean(taken.values) <= 1:
        return None
    rate, limit = run.setting("training.learning_rate", 0.0), run.setting("optimizer.max_grad_norm")
    norm, clipped = run.all("optim/grad_norm"), run.all("advantage/clipped_fraction")
    if clipped is not None and clipped.mean > 0.9 and norm is not None and norm.mean < _LOST_GRADIENT:
        key, why, advice = (
            "advantages.clip",
            f"advantages.clip cuts {clipped.mean:.0%} of the advantages, to {run.setting('advantages.clip'):g}",
            "leave it out, or set it to 5",
        )
    elif limit is not None and limit < _LOST_GRADIENT and norm is not None and norm.mean > limit:
        key, why, advice = (
            "optimizer.max_grad_norm",
            f"gradients of {norm.mean:.2g} are cut to {limit:g}, less than the epsilon of the optimizer",
            f"set it to 1, or to {2 * norm.mean:.1g}",
        )
    else:
        key, why, advice = (
            "training.learning_rate",
            f"a learning rate of {rate:g}",
            f"raise it a hundredfold, to {100 * rate:.1g}, until ratio/log_std comes near the clip range",
        )
    return Finding(
        "serious",
        "steps_too_small",
        "Steps are taken, and the policy does not move.",
        f"{statistics.fmean(taken.values):.1f} steps a batch leave every ratio at 1 in {constant.steps}; {why}",
        key,
        advice,
    )


def training_is_not_evaluation(run: RunView) -> Finding | None:
    """Find training returns above the last evaluation, if evaluations sample at a higher temperature."""
    here, there = run.setting("rollout.temperature", 1.0), run.setting("evaluation.temperature", 1.0)
    trained = run.recent("rollout/reward_mean")
    scores = [event["data"] for event in run.events_of("evaluation")]
    if trained is None or not scores or there <= max(here, _FLAT_TEMPERATURE):
        return None
    interval = scores[-1].get("mean_return_interval")
    if interval is None or trained.mean <= interval[1]:
        return None
    return Finding(
        "serious",
        "training_is_not_evaluation",
        "The evaluation samples otherwise than training, and scores another policy than the one that learns.",
        f"training episodes earn {trained.mean:.3f} in {trained.steps}, the last evaluation {interval[0]:.3f} to "
        f"{interval[1]:.3f}; evaluation.temperature is {there:g}, rollout.temperature {here:g}",
        "evaluation.temperature",
        f"set it to {here:g}, or to 0 (greedy)",
    )


CAUSES: tuple[Check, ...] = (
    sampling_is_greedy,
    sampling_is_uniform,
    returns_are_clipped,
    no_step_taken,
    weights_decay,
    entropy_bonus_dominates,
    kl_term_dominates,
    steps_too_large,
    clip_is_shut,
    steps_too_small,
    training_is_not_evaluation,
)
# What a broken link shows further down. Failures of the infrastructure and of the judge have other causes.
CONSEQUENCES = frozenset(
    {
        "answers_do_not_parse",
        "clips_nothing",
        "clips_too_much",
        "engine_differs_from_learner",
        "entropy_collapsed",
        "episodes_are_cut_off",
        "evaluation_does_not_improve",
        "evaluation_fell",
        "far_from_the_reference",
        "few_effective_samples",
        "gradient_always_clipped",
        "groups_are_constant",
        "noise_reaches_the_clip",
        "ratio_is_constant",
        "reward_does_not_rise",
        "steps_not_finite",
    }
)
# A serious one of these hides the later ones and the trends.
_CHAIN = (
    "actions_exceed_limits",
    "answers_do_not_parse",
    "episodes_are_cut_off",
    "groups_are_constant",
    "steps_not_finite",
)
_TRENDS = frozenset({"evaluation_does_not_improve", "evaluation_fell", "reward_does_not_rise", "entropy_collapsed"})


def consequences(findings: Sequence[Finding]) -> frozenset[str]:
    """Return the names of checks with findings that follow from others in `findings`."""
    names = {check.__name__ for check in CAUSES}
    if any(finding.check in names for finding in findings):
        return CONSEQUENCES
    serious = {finding.check for finding in findings if finding.severity == "serious"}
    for i, name in enumerate(_CHAIN):
        if name in serious:
            return (
                frozenset(_CHAIN[i + 1 :]) | _TRENDS | {"clips_nothing", "gradient_always_clipped", "ratio_is_constant"}
            )
    return frozenset()

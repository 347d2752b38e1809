"""The defaults that follow from other keys, and the rules about the objective: ratio, clip, weights, advantages,
rewards, corrections, the reference.

Wrong mathematics is an error, not a warning. A departure from the papers on purpose is named in algorithm.acknowledge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from gspo_gym.config.record import Rule, RunRecord, acts_with, default_of, idle, no_effect, rule, rules_in, value_at
from gspo_gym.config.words import look_up, show
from gspo_gym.learning.settings import (
    LENGTH_WEIGHTED,
    SAMPLER_KEYS,
    WIDE_CLIP,
    with_following_defaults,
)
from gspo_gym.learning.surrogate_keys import with_following_clips
from gspo_gym.run.settings import adaptive_tasks_problem, constant_groups_problem, forks_problem, staleness_problem

# Values that `algorithm.variety` allows, the default first; keys that are not listed are free.
VARIETIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gspo": {"loss.unit": ("trajectory", "segment"), "advantages.level": ("trajectory",)},
    "gspo_token": {"loss.unit": ("trajectory", "segment", "turn"), "advantages.level": ("turn", "trajectory", "auto")},
    "grpo": {"loss.unit": ("token",), "advantages.level": ("trajectory", "turn", "auto")},
}
# The clip ranges of GRPO are those that the GSPO paper compares with (section 5.1); GSPO's own are LossSettings'.
_GRPO_CLIPS = {"clip_low": 0.2, "clip_high": 0.27}

# The terms that ask for a frozen policy to compare with.
KL_TERMS = ("loss.kl_coef", "rewards.kl_coef", "advantages.kl_shaping_coef")


def with_derived_defaults(values: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a file's values with these sections present and the defaults that depend on other keys.

    Values of a wrong type stay as they are, and are reported later.
    """
    flat_values: dict[str, Any] = {name: {} for name in sections}
    # Copies, because the defaults are written into them: what the file said is still needed, to mark the defaults.
    flat_values |= {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    for follow in DERIVED:
        follow(flat_values)
    return flat_values


def _set_default(values: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    table = values.get(section)
    if isinstance(table, dict) and table.get(name) is None:
        table[name] = value


def _follow_variety(values: dict[str, Any]) -> None:
    """`algorithm.variety` sets `loss.unit` and `advantages.level`, and with "grpo" and surrogate "clip" the clip range,
    0.2 and 0.27.
    """
    variety = look_up(values, "algorithm.variety") or "gspo"
    # A wrong variety is reported later; until then it sets nothing.
    for key, choices in VARIETIES.get(variety, {}).items() if isinstance(variety, str) else ():
        _set_default(values, key, choices[0])
    if variety == "grpo" and look_up(values, "loss.surrogate") in (None, "clip"):
        for name, clip in _GRPO_CLIPS.items():
            _set_default(values, f"loss.{name}", clip)


def _follow_surrogate(values: dict[str, Any]) -> None:
    """`loss.surrogate` sets the clip range: "gmpo" e^-0.4 to e^0.4, "dppo" 0.2 to both sides, and "cispo" with
    `loss.unit = "token"` a cap of 5.
    """
    if isinstance(loss := values.get("loss"), dict):
        values["loss"] = with_following_clips(loss)


def _follow_level(values: dict[str, Any]) -> None:
    """`advantages.level` "turn" or "auto" sets the baseline to "leave_one_out"; a baseline of batch, running, role
    or none sets the scale.
    """
    # The rules must see it, too: they read a file's values before there is a record.
    if isinstance(advantages := values.get("advantages"), dict):
        values["advantages"] = with_following_defaults(advantages)


def _follow_trainer_mode(values: dict[str, Any]) -> None:
    """An adapter's `model.trainer_mode` brings `[training.lora]` along."""
    if look_up(values, "model.trainer_mode") in ("lora", "qlora"):
        _set_default(values, "training.lora", {})  # an adapter has settings, even if the file names none of them


def _follow_vllm(values: dict[str, Any]) -> None:
    """A `[vllm]` section sets `rollout.engine` to "vllm", `rollout.max_model_len` to its own (8192 if it has none), and
    lets a turn fill that.
    """
    # As in vLLM, a turn may fill all that is left of the context.
    vllm, topology = values.get("vllm"), values.get("topology")
    if vllm is not None or topology is not None:
        _set_default(values, "rollout.engine", "vllm")
    if isinstance(vllm, Mapping) or (vllm is None and topology is not None):
        length = (vllm or {}).get("max_model_len") or 8192
        _set_default(values, "rollout.max_model_len", length)
        if isinstance(length, int) and length > 1:
            _set_default(values, "rollout.max_output_tokens", length - 1)


def _follow_topology(values: dict[str, Any]) -> None:
    """`[topology]` sets `rollout.engine` to "vllm", and `vllm.tensor_parallel_size`."""
    topology = values.get("topology")
    if not isinstance(topology, Mapping):
        return
    num_gpus, size = topology.get("gpus_for_vllm"), topology.get("tensor_parallel") or 1
    # Otherwise a rule reports the division.
    if isinstance(num_gpus, int) and isinstance(size, int) and size > 0 and num_gpus > 0 and num_gpus % size == 0:
        _set_default(values, "vllm.tensor_parallel_size", size)


def _follow_kl_terms(values: dict[str, Any]) -> None:
    """A KL term (`loss.kl_coef`, `rewards.kl_coef`, `advantages.kl_shaping_coef`) sets `reference.placement` to
    "shared".
    """
    weights = [look_up(values, key) for key in KL_TERMS]
    if any(isinstance(weight, int | float) and weight > 0 for weight in weights):
        _set_default(values, "reference.placement", "shared")


# In their order: the variety sets the unit, by which a surrogate sets the clip, and the level, which sets the baseline,
# which sets the scale. What each says of itself stands in configs/README.md.
DERIVED = (
    _follow_variety,
    _follow_surrogate,
    _follow_level,
    _follow_trainer_mode,
    _follow_vllm,
    _follow_topology,
    _follow_kl_terms,
)


@rule("loss.unit")
def _unit_fits_variety(c: RunRecord) -> str | None:
    return _fits_variety("loss.unit", c.loss.unit, c.algorithm.variety)


@rule("advantages.level")
def _level_fits_variety(c: RunRecord) -> str | None:
    return _fits_variety("advantages.level", c.advantages.level, c.algorithm.variety)


def _fits_variety(key: str, value: str, variety: str) -> str | None:
    choices = VARIETIES[variety][key]
    if value in choices:
        return None
    other_varieties = [show(name) for name, keys in VARIETIES.items() if value in keys[key]]
    return (
        f"algorithm.variety {show(variety)} takes {' or '.join(map(show, choices))}, got {show(value)}, which belongs "
        f"to variety {' or '.join(other_varieties)}"
    )


def _weighs_by_length(c: RunRecord) -> bool:
    return c.loss.unit != "token" and c.loss.aggregation in LENGTH_WEIGHTED


def _is_wide(c: RunRecord) -> bool:
    # A ratio of single tokens does reach such a clip; that of GMPO is one of tokens in every unit.
    return c.loss.unit != "token" and c.loss.surrogate != "gmpo" and max(c.loss.clip_low, c.loss.clip_high) >= WIDE_CLIP


def _is_biased(c: RunRecord) -> bool:
    # The penalty depends on all tokens before, and the learner has no way to score under it.
    return c.rollout.sampling.is_truncated or c.rollout.repetition_penalty != 1


@rule("loss.aggregation")
def _length_is_meant(c: RunRecord) -> str | None:
    if not _weighs_by_length(c) or "length_weighting" in c.algorithm.acknowledge:
        return None
    return (
        f'expected "seq-mean-token-mean" (or "grpo", the same) with loss.unit {show(c.loss.unit)}, got '
        f"{show(c.loss.aggregation)}, in which an episode weighs by its length; if that is meant, add "
        '"length_weighting" to algorithm.acknowledge'
    )


@rule("loss.clip_low")
def _low_clip_is_meant(c: RunRecord) -> str | None:
    return _clip_is_meant(c, c.loss.clip_low)


@rule("loss.clip_high")
def _high_clip_is_meant(c: RunRecord) -> str | None:
    # Reported once: at the low clip, if both are too wide.
    return None if c.loss.clip_low >= WIDE_CLIP else _clip_is_meant(c, c.loss.clip_high)


def _clip_is_meant(c: RunRecord, clip: float) -> str | None:
    if clip < WIDE_CLIP or not _is_wide(c) or "wide_clip" in c.algorithm.acknowledge:
        return None
    return (
        f"expected less than {WIDE_CLIP:g} with loss.unit {show(c.loss.unit)}, got {clip:g}: the ratio of a sequence "
        "stays within about 1e-3 of 1, so that this clip never acts (the paper has 3e-4 and 4e-4); if that is meant, "
        'add "wide_clip" to algorithm.acknowledge'
    )


@rule("advantages.level")
def _turns_of_a_mean_are_alike(c: RunRecord) -> str | None:
    if c.loss.surrogate != "gmpo" or c.advantages.level == "trajectory" or c.loss.unit == "turn":
        return None
    return (
        'expected "trajectory", or loss.unit "turn", with loss.surrogate "gmpo", which has one advantage for all '
        f"tokens of a unit, got {show(c.advantages.level)} with loss.unit {show(c.loss.unit)}"
    )


@rule("loss.surrogate")
def _tokens_of_a_mean_are_alike(c: RunRecord) -> str | None:
    shaping = (c.rewards.kl_coef, c.advantages.kl_shaping_coef)
    if c.loss.surrogate != "gmpo" or not any(shaping):
        return None
    return (
        '"gmpo" has one advantage for all tokens of a unit, which rewards.kl_coef and advantages.kl_shaping_coef give '
        f"to each token: set them to 0, got {shaping[0]:g} and {shaping[1]:g}"
    )


@rule("loss.surrogate")
def _region_is_around_the_sampler(c: RunRecord) -> str | None:
    if c.loss.surrogate != "dppo" or c.correction.old_logprobs == "rollout":
        return None
    return (
        '"dppo" bounds the distance from the probabilities that the tokens were sampled with: set '
        'correction.old_logprobs = "rollout"'
    )


@rule("algorithm.acknowledge")
def _sampling_is_scored(c: RunRecord) -> str | None:
    penalty = c.rollout.repetition_penalty
    if penalty == 1 or "truncated_sampling" in c.algorithm.acknowledge:
        return None
    return (
        f"rollout.repetition_penalty = {penalty:g}: rollouts would come from another distribution than the one that is "
        'scored; if the bias is meant, add "truncated_sampling" here'
    )


@rule("algorithm.acknowledge")
def _nothing_else_is_acknowledged(c: RunRecord) -> str | None:
    # An acknowledgement that stays behind would hide the departure when it comes back by another change.
    occurs = {
        "length_weighting": _weighs_by_length(c),
        "wide_clip": _is_wide(c),
        "truncated_sampling": _is_biased(c),
    }
    if idle := [name for name in c.algorithm.acknowledge if not occurs[name]]:
        return f"{', '.join(map(show, idle))} does not occur in these settings: remove it"
    return None


@rule("training.group_size")
def _baseline_has_siblings(c: RunRecord) -> str | None:
    baseline, scale = c.advantages.baseline, c.advantages.scale
    compares = baseline in ("group", "leave_one_out")
    if c.training.group_size > 1 or not (compares or scale == "group") or not _learns_from_rewards(c):
        return None
    key, value = ("baseline", baseline) if compares else ("scale", scale)
    return (
        f"expected at least 2 with advantages.{key} {show(value)}, which compares siblings, got {c.training.group_size}"
    )


@rule("training.constant_groups")
def _constant_groups_are_worthless(c: RunRecord) -> str | None:
    return constant_groups_problem(c.training.constant_groups, c.advantages.baseline)


@rule("training.adaptive_tasks")
def _tasks_are_chosen_by_what_teaches(c: RunRecord) -> str | None:
    has_mixture = bool(c.rollout.mixture)
    return adaptive_tasks_problem(c.training.adaptive_tasks, c.advantages.baseline, has_mixture=has_mixture)


@rule("rollout.forks_per_episode")
def _forks_are_compared_with_siblings(c: RunRecord) -> str | None:
    return forks_problem(c.rollout.forks_per_episode, c.advantages)


@rule("rollout.forks_per_episode")
def _turns_of_a_forked_mean_are_alike(c: RunRecord) -> str | None:
    if c.rollout.forks_per_episode == 0 or c.loss.surrogate != "gmpo" or c.loss.unit == "turn":
        return None
    return (
        'gives each turn an advantage of its own, and loss.surrogate "gmpo" has one for all tokens of a unit: set '
        'loss.unit to "turn", or remove this'
    )


@rule("rollout.forks_per_episode")
def _forks_are_played_here(c: RunRecord) -> str | None:
    apps = [source.url_key for source in c.sources if source.task_url is not None]
    if c.rollout.forks_per_episode == 0 or not apps:
        return None
    return f"episodes of a task app cannot be replayed: remove {apps[0]}, or this"


@rule("rollout.forks_per_episode")
def _forks_are_scored_alone(c: RunRecord) -> str | None:
    options = c.judging.options if c.judging.enabled else None
    if c.rollout.forks_per_episode == 0 or options is None or options.mode != "group":
        return None
    return (
        'forks repeat turns of the episodes that judge.options.mode = "group" compares: set that to "auto", or '
        "remove this"
    )


@rule("training.max_staleness")
def _stale_samples_are_weighed(c: RunRecord) -> str | None:
    # With old logprobs of the rollout, or a correction by level, the ratio begins at the weights that sampled; with
    # rescore, no stale samples are allowed at all.
    age, correction = c.training.max_staleness, c.correction
    if age == 0 or correction.old_logprobs == "rollout" or correction.level != "none" or c.rollout.rescore:
        return None
    return (
        f"expected 0, got {age}: samples of earlier weights would be taken for fresh ones; set "
        'correction.old_logprobs = "rollout", so that the ratio begins at the weights that sampled, or a '
        "correction.level"
    )


@rule("training.max_staleness")
def _stale_weights_are_allowed(c: RunRecord) -> str | None:
    # Other engines have no interval, which is reported there.
    return staleness_problem(c.training) if c.rollout.engine == "vllm" or c.has_replicas else None


@rule("reference.placement")
def _reference_fits_terms(c: RunRecord) -> str | None:
    weights = {key: value_at(c, key) for key in KL_TERMS}
    terms = [f"{key} = {weight:g}" for key, weight in weights.items() if weight > 0]
    if c.reference.placement == "none" and terms:
        return f'expected "shared" or "dedicated", because {", ".join(terms)} compares with a reference, got "none"'
    return None


@rule("reference.source")
def _source_fits_trainer_mode(c: RunRecord) -> str | None:
    return c.reference.source_problem(has_adapter=c.model.trainer_mode != "full")


@rule("reference.update_every_n_iters")
def _reference_can_move(c: RunRecord) -> str | None:
    return c.reference.update_problem()


@rule("distillation.feedback")
def _feedback_is_there(c: RunRecord) -> str | None:
    feedback = "none" if c.distillation is None else c.distillation.feedback
    if feedback == "judge" and not c.judging.enabled:
        return 'expected the judge of [judge], whose reasons are the feedback: set judge.enabled = true, got "judge"'
    if feedback != "none" and any(source.task_url is not None for source in c.sources):
        return (
            f'expected "none" with a task app, whose agent writes the prompts, got "{feedback}": feedback cannot be '
            "put into them, nor texts be checked for the hidden answer"
        )
    if feedback == "sibling" and c.training.group_size == 1:
        return (
            'expected training.group_size of at least 2 with "sibling", a successful episode of the same group, got 1, '
            "so that there is no feedback"
        )
    return None


def _is_of_the_sampler(name: str) -> Rule:
    return Rule(f"correction.{name}", lambda c: c.correction.rescored_problem(name) if c.rollout.rescore else None)


def _derived_default(c: RunRecord, key: str) -> Any:
    """Return what a file without this key has there (Any: of any field)."""
    section, name = key.split(".")
    values = {above: dict(record) for above, record in c.sections.items() if isinstance(record, BaseModel)}
    values[section][name] = None
    value = look_up(with_derived_defaults(values, ()), key)
    return default_of(key) if value is None else value


def _learns_from_rewards(c: RunRecord) -> bool:
    return c.distillation is None or c.distillation.reward


_BY_REWARDS = "goes by rewards, which distillation.reward = false does not learn from: remove this, or set that to true"


def _is_by_rewards(key: str) -> Rule:
    def check(c: RunRecord) -> str | None:
        if _learns_from_rewards(c) or value_at(c, key) in (None, _derived_default(c, key)):
            return None
        return _BY_REWARDS

    return Rule(key, check)


@rule("rewards.overlong")
def _penalty_is_learned_from(c: RunRecord) -> str | None:
    return None if _learns_from_rewards(c) or isinstance(c.rewards.overlong, str) else _BY_REWARDS


OBJECTIVE_RULES = (
    *rules_in(globals()),
    *map(
        _is_by_rewards,
        (
            *("training.constant_groups", "training.adaptive_tasks", "rollout.forks_per_episode"),
            *("advantages.level", "advantages.baseline", "advantages.scale", "advantages.discount"),
            *("advantages.whiten", "advantages.clip", "advantages.filter_eps", "advantages.kl_shaping_coef"),
            *("loss.surrogate", "loss.clip_low", "loss.clip_high", "loss.dual_clip", "rewards.clip", "rewards.kl_coef"),
            "correction.off_policy_threshold",  # which looks at the sign of the advantage
        ),
    ),
    idle("training.step_rewards_mode", _learns_from_rewards, _BY_REWARDS, default="env_sparse"),
    idle(
        "loss.aggregation",
        lambda c: _learns_from_rewards(c) or c.loss.kl_coef > 0 or c.loss.entropy_coef > 0,
        "weighs the terms of rewards, KL and entropy, and with distillation.reward = false there is none of them: the "
        "teacher's is a mean over sampled tokens; remove this",
    ),
    *map(_is_of_the_sampler, SAMPLER_KEYS),
    acts_with("reference.source", "reference.placement", "shared"),
    no_effect(
        "reference.update_every_n_iters",
        "reference.placement",
        lambda place: place != "none",
        'set that to "shared"',
    ),
    *(
        no_effect(f"correction.{name}", "correction.level", lambda level: level != "none", "choose a level")
        for name in ("mode", "high")
    ),
    acts_with("correction.low", "correction.mode", "mask"),
)

"""`Rule`, the defaults that follow from other keys, and the rules about the objective: ratio, clip, weights,
advantages, rewards, corrections, the reference.

Wrong mathematics is an error, not a warning. A departure from the papers on purpose is named in algorithm.acknowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_gym.config.nested import POLICY_CONFIG
from gspo_gym.config.words import Problem, look_up, show
from gspo_gym.learning.settings import LENGTH_WEIGHTED, WIDE_CLIP, CorrectionSettings, RewardSettings

# Values that `algorithm.variety` allows, the default first; keys that are not listed are free.
VARIETIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gspo": {"loss.unit": ("trajectory", "segment"), "advantages.level": ("trajectory",)},
    "gspo_token": {"loss.unit": ("trajectory", "segment", "turn"), "advantages.level": ("turn", "trajectory")},
    "grpo": {"loss.unit": ("token",), "advantages.level": ("trajectory", "turn")},
}
# The clip ranges of GRPO are those that the GSPO paper compares with (section 5.1); GSPO's own are LossSettings'.
_GRPO_CLIPS = {"clip_low": 0.2, "clip_high": 0.27}

# The terms that ask for a frozen policy to compare with.
KL_TERMS = ("loss.kl_coef", "rewards.kl_coef", "advantages.kl_shaping_coef")


def with_derived_defaults(values: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a file's values with these sections present and the defaults that depend on other keys.

    Values of a wrong type stay as they are, and are reported later.
    """
    filled: dict[str, Any] = {name: {} for name in sections}
    # Copies, because the defaults are written into them: what the file said is still needed, to mark the defaults.
    filled |= {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    # The variety comes first: it sets the level, which sets the baseline, which sets the scale.
    _follow_variety(filled)
    _follow_level(filled)
    _follow_trainer_mode(filled)
    _follow_policy_config(filled)
    _follow_vllm(filled)
    _follow_topology(filled)
    _follow_kl_terms(filled)
    return filled


def _set_default(values: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    table = values.get(section)
    if isinstance(table, dict) and table.get(name) is None:
        table[name] = value


def _follow_variety(values: dict[str, Any]) -> None:
    variety = look_up(values, "algorithm.variety") or "gspo"
    # A wrong variety is reported later; until then it sets nothing.
    for key, allowed in VARIETIES.get(variety, {}).items() if isinstance(variety, str) else ():
        _set_default(values, key, allowed[0])
    if variety == "grpo":
        for name, clip in _GRPO_CLIPS.items():
            _set_default(values, f"loss.{name}", clip)


def _follow_level(values: dict[str, Any]) -> None:
    # As in `AdvantageSettings`, but the rules must see it, too: they ask a file's values before there is a record.
    if look_up(values, "advantages.level") == "turn":
        _set_default(values, "advantages.baseline", "leave_one_out")
    if (baseline := look_up(values, "advantages.baseline")) in ("batch", "running", "none"):
        _set_default(values, "advantages.scale", baseline)


def _follow_trainer_mode(values: dict[str, Any]) -> None:
    if look_up(values, "model.trainer_mode") in ("lora", "qlora"):
        _set_default(values, "training.lora", {})  # an adapter has settings, even if the file names none of them


def _follow_policy_config(values: dict[str, Any]) -> None:
    policy_config = look_up(values, "rollout.policy_config")
    for theirs, ours in POLICY_CONFIG.items() if isinstance(policy_config, Mapping) else ():
        if policy_config.get(theirs) is not None:
            _set_default(values, f"rollout.{ours}", policy_config[theirs])
    # The hosted trainer's files set top_p: scoring under it keeps them unbiased without another key.
    if isinstance(policy_config, Mapping) and "truncated_sampling" not in _listed(values, "algorithm.acknowledge"):
        top_p, top_k = policy_config.get("top_p"), policy_config.get("top_k")
        if top_p not in (None, 1) or top_k not in (None, 0):
            _set_default(values, "training.score_truncated", True)


def _listed(values: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    value = look_up(values, key)
    return tuple(value) if isinstance(value, list | tuple) else ()


def _follow_vllm(values: dict[str, Any]) -> None:
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
    # The GPUs that generate are shared out to copies of the model of `tensor_parallel` GPUs each: all in one server,
    # or in a cluster in as many servers as there are, each of vllm.data_parallel_size copies.
    topology = values.get("topology")
    if not isinstance(topology, Mapping):
        return
    num_gpus, size = topology.get("gpus_for_vllm"), topology.get("tensor_parallel") or 1
    # Otherwise a rule reports the division.
    if isinstance(num_gpus, int) and isinstance(size, int) and size > 0 and num_gpus > 0 and num_gpus % size == 0:
        _set_default(values, "vllm.tensor_parallel_size", size)
        if topology.get("type") != "cluster":
            _set_default(values, "vllm.data_parallel_size", num_gpus // size)


def _follow_kl_terms(values: dict[str, Any]) -> None:
    weights = [look_up(values, key) for key in KL_TERMS]
    if any(isinstance(weight, int | float) and weight > 0 for weight in weights):
        _set_default(values, "reference.placement", "shared")


OTHER_KEYS = ".*"  # after the name of an open table: those of its keys that are not ours, as a table


@dataclass(frozen=True, slots=True)
class Rule:
    """A check of a few keys against each other; its problem is reported at the first of them.

    A rule runs only if all its keys are valid by themselves: then all problems of a file are reported at once.

    Attributes:
        keys: dotted. The keys of an absent section are None; the name of an optional section has the value true if it
            is given, and with `OTHER_KEYS` after it the value is the table of keys in it that are not ours.
        check: takes the values of all keys; returns the problem as a sentence, or None.
    """

    keys: tuple[str, ...]
    check: Callable[..., str | None]


def find_problem(rule: Rule, values: Mapping[str, Any]) -> Problem | None:
    """Return the problem that the rule finds in values that are valid by themselves, by dotted key."""
    if any(key not in values for key in rule.keys):
        return None
    text = rule.check(*(values[key] for key in rule.keys))
    return None if text is None else Problem(rule.keys[0].removesuffix(OTHER_KEYS), text)


def no_effect(key: str, default: Any, other: str, acts: Callable[[Any], bool], advice: str) -> Rule:
    """Return the rule that `key` keeps its default unless `acts` is true of the other key's value.

    A key without effect is considered a mistake.
    """

    def check(value: Any, other_value: Any) -> str | None:
        if value is None or value == default or acts(other_value):
            return None
        return f"has no effect with {other} = {show(other_value)}: {advice}, or remove this"

    return Rule((key, other), check)


def acts_with(key: str, default: Any, other: str, wanted: str) -> Rule:
    """Return the rule that `key` keeps its default unless the other key has the wanted value."""
    return no_effect(key, default, other, lambda value: value == wanted, f"set that to {show(wanted)}")


def default_of(settings: type[Any], name: str) -> Any:
    """Return the default of a field."""
    return settings.model_fields[name].default


def _unit_fits_variety(unit: str, variety: str) -> str | None:
    return _fits_variety("loss.unit", unit, variety)


def _level_fits_variety(level: str, variety: str) -> str | None:
    return _fits_variety("advantages.level", level, variety)


def _fits_variety(key: str, value: str, variety: str) -> str | None:
    allowed = VARIETIES[variety][key]
    if value in allowed:
        return None
    others = [show(name) for name, keys in VARIETIES.items() if value in keys[key]]
    return (
        f"algorithm.variety {show(variety)} takes {' or '.join(map(show, allowed))}, got {show(value)}, which belongs "
        f"to variety {' or '.join(others)}"
    )


def _weighs_by_length(aggregation: str, unit: str) -> bool:
    return unit != "token" and aggregation in LENGTH_WEIGHTED


def _is_wide(clip_low: float, clip_high: float, unit: str) -> bool:
    # A ratio of single tokens does reach such a clip.
    return unit != "token" and max(clip_low, clip_high) >= WIDE_CLIP


def _is_biased(top_p: float, top_k: int, min_p: float, repetition_penalty: float, score_truncated: bool) -> bool:
    # The penalty depends on all tokens before, and the learner has no way to score under it.
    is_truncated = top_p < 1 or top_k > 0 or min_p > 0
    return (is_truncated and not score_truncated) or repetition_penalty != 1


_TRUNCATIONS = (
    "rollout.top_p",
    "rollout.top_k",
    "rollout.min_p",
    "rollout.repetition_penalty",
    "training.score_truncated",
)


def _length_is_meant(aggregation: str, unit: str, acknowledged: tuple[str, ...]) -> str | None:
    if not _weighs_by_length(aggregation, unit) or "length_weighting" in acknowledged:
        return None
    return (
        f'expected "seq-mean-token-mean" (or "grpo", the same) with loss.unit {show(unit)}, got {show(aggregation)}, '
        'in which an episode weighs by its length; if that is meant, add "length_weighting" to algorithm.acknowledge'
    )


def _low_clip_is_meant(clip_low: float, clip_high: float, unit: str, acknowledged: tuple[str, ...]) -> str | None:
    return _clip_is_meant(clip_low, clip_low, clip_high, unit, acknowledged)


def _high_clip_is_meant(clip_high: float, clip_low: float, unit: str, acknowledged: tuple[str, ...]) -> str | None:
    # Reported once: at the low clip, if both are too wide.
    return None if clip_low >= WIDE_CLIP else _clip_is_meant(clip_high, clip_low, clip_high, unit, acknowledged)


def _clip_is_meant(clip: float, low: float, high: float, unit: str, acknowledged: tuple[str, ...]) -> str | None:
    if clip < WIDE_CLIP or not _is_wide(low, high, unit) or "wide_clip" in acknowledged:
        return None
    return (
        f"expected less than {WIDE_CLIP:g} with loss.unit {show(unit)}, got {clip:g}: the ratio of a sequence stays "
        "within about 1e-3 of 1, so that this clip never acts (the paper has 3e-4 and 4e-4); if that is meant, add "
        '"wide_clip" to algorithm.acknowledge'
    )


def _sampling_is_scored(acknowledged: tuple[str, ...], *sampling: Any) -> str | None:
    if not _is_biased(*sampling) or "truncated_sampling" in acknowledged:
        return None
    top_p, top_k, min_p, penalty, score_truncated = sampling
    values = {"top_p": (top_p, 1), "top_k": (top_k, 0), "min_p": (min_p, 0), "repetition_penalty": (penalty, 1)}
    if score_truncated:
        values = {"repetition_penalty": (penalty, 1)}
    used = ", ".join(f"rollout.{name} = {value:g}" for name, (value, off) in values.items() if value != off)
    remedy = "training.score_truncated = true scores under top_p, top_k and min_p; " if penalty == 1 else ""
    return (
        f"{used}: rollouts would come from another distribution than the one that is scored. {remedy}if the bias is "
        'meant, add "truncated_sampling" here'
    )


def _nothing_else_is_acknowledged(
    acknowledged: tuple[str, ...], aggregation: str, unit: str, clip_low: float, clip_high: float, *sampling: Any
) -> str | None:
    # An acknowledgement that stays behind would hide the departure when it comes back by another change.
    occurs = {
        "length_weighting": _weighs_by_length(aggregation, unit),
        "wide_clip": _is_wide(clip_low, clip_high, unit),
        "truncated_sampling": _is_biased(*sampling),
    }
    if idle := [name for name in acknowledged if not occurs[name]]:
        return f"{', '.join(map(show, idle))} does not occur in these settings: remove it"
    return None


def _stale_samples_are_weighed(max_staleness: int, old_logprobs: str, level: str, rescore: bool) -> str | None:
    # With old logprobs of the rollout, or a correction by level, the ratio begins at the weights that sampled; with
    # rescore, no stale samples are allowed at all.
    if max_staleness == 0 or old_logprobs == "rollout" or level != "none" or rescore:
        return None
    return (
        f"expected 0, got {max_staleness}: samples of earlier weights would be taken for fresh ones; set "
        'correction.old_logprobs = "rollout", so that the ratio begins at the weights that sampled, or a '
        "correction.level"
    )


def _dual_clip_is_outside(dual_clip: float | None, clip_high: float) -> str | None:
    if dual_clip is None or dual_clip > 1 + clip_high:
        return None
    return f"expected more than 1 + loss.clip_high = {1 + clip_high:g}, where the other clip is, got {dual_clip:g}"


def _truncation_is_there(score_truncated: bool, top_p: float, top_k: int, min_p: float) -> str | None:
    if not score_truncated or top_p < 1 or top_k > 0 or min_p > 0:
        return None
    return "has no effect without rollout.top_p, rollout.top_k or rollout.min_p: remove it"


def _baseline_has_siblings(group_size: int, baseline: str, scale: str) -> str | None:
    if group_size > 1 or not (baseline in ("group", "leave_one_out") or scale == "group"):
        return None
    key, value = ("scale", scale) if baseline not in ("group", "leave_one_out") else ("baseline", baseline)
    return f"expected at least 2 with advantages.{key} {show(value)}, which compares siblings, got {group_size}"


def _constant_groups_are_worthless(constant_groups: str, baseline: str) -> str | None:
    # Only a baseline of siblings makes equal rewards advantages of 0.
    if constant_groups == "keep" or baseline in ("group", "leave_one_out"):
        return None
    return (
        f"{show(constant_groups)} leaves out groups that teach nothing, but with advantages.baseline "
        f'{show(baseline)} they do: set "keep"'
    )


def _switch_has_a_mode(enabled: bool | None, mode: str | None) -> str | None:
    if enabled is True and mode in (None, "off"):
        return f'true demands training.step_rewards_mode "decision_stepwise" or "env_sparse", got {show(mode)}'
    return None


def _reference_fits_terms(placement: str, *weights: float) -> str | None:
    used = [f"{key} = {weight:g}" for key, weight in zip(KL_TERMS, weights, strict=True) if weight > 0]
    if placement == "none" and used:
        return f'expected "shared" or "dedicated", because {", ".join(used)} compares with a reference, got "none"'
    return None


def _source_fits_trainer_mode(source: str, trainer_mode: str) -> str | None:
    if source not in ("base", "adapter") or trainer_mode != "full":
        return None
    return f'{show(source)} needs an adapter (model.trainer_mode "lora" or "qlora"): set "copy" or "auto"'


def _reference_can_move(update_every_n_iters: int, source: str) -> str | None:
    if update_every_n_iters == 0 or source != "base":
        return None
    return (
        "cannot move the frozen weights under the adapter, which are this reference: set reference.source to "
        '"adapter" or "copy"'
    )


_SHAPE = ("loss.aggregation", "loss.unit", "loss.clip_low", "loss.clip_high")

OBJECTIVE_RULES = (
    Rule(("loss.unit", "algorithm.variety"), _unit_fits_variety),
    Rule(("advantages.level", "algorithm.variety"), _level_fits_variety),
    Rule(("loss.aggregation", "loss.unit", "algorithm.acknowledge"), _length_is_meant),
    Rule(("loss.clip_low", "loss.clip_high", "loss.unit", "algorithm.acknowledge"), _low_clip_is_meant),
    Rule(("loss.clip_high", "loss.clip_low", "loss.unit", "algorithm.acknowledge"), _high_clip_is_meant),
    Rule(("algorithm.acknowledge", *_TRUNCATIONS), _sampling_is_scored),
    Rule(("algorithm.acknowledge", *_SHAPE, *_TRUNCATIONS), _nothing_else_is_acknowledged),
    Rule(("loss.dual_clip", "loss.clip_high"), _dual_clip_is_outside),
    Rule(("training.score_truncated", "rollout.top_p", "rollout.top_k", "rollout.min_p"), _truncation_is_there),
    Rule(("training.group_size", "advantages.baseline", "advantages.scale"), _baseline_has_siblings),
    Rule(("training.constant_groups", "advantages.baseline"), _constant_groups_are_worthless),
    acts_with("training.max_refill_rounds", 10, "training.constant_groups", "refill"),
    acts_with(
        "rewards.overlong_penalty", default_of(RewardSettings, "overlong_penalty"), "rewards.overlong", "penalize"
    ),
    no_effect(
        "rewards.kl_horizon",
        default_of(RewardSettings, "kl_horizon"),
        "rewards.kl_target",
        lambda target: target is not None,
        "set that",
    ),
    Rule(("training.step_rewards_enabled", "training.step_rewards_mode"), _switch_has_a_mode),
    Rule(
        ("training.max_staleness", "correction.old_logprobs", "correction.level", "rollout.rescore"),
        _stale_samples_are_weighed,
    ),
    Rule(("reference.placement", *KL_TERMS), _reference_fits_terms),
    Rule(("reference.source", "model.trainer_mode"), _source_fits_trainer_mode),
    Rule(("reference.update_every_n_iters", "reference.source"), _reference_can_move),
    acts_with("reference.source", "auto", "reference.placement", "shared"),
    no_effect(
        "reference.update_every_n_iters",
        0,
        "reference.placement",
        lambda place: place != "none",
        'set that to "shared"',
    ),
    *(
        no_effect(
            f"correction.{name}",
            default_of(CorrectionSettings, name),
            "correction.level",
            lambda level: level != "none",
            "choose a level",
        )
        for name in ("mode", "high")
    ),
    acts_with("correction.low", default_of(CorrectionSettings, "low"), "correction.mode", "mask"),
)

"""Rules about batches, lengths, model, optimizer and evaluation; `find_contradictions` applies the rules of all files.

Notices are about settings that have no effect, or another one than it may seem. They are accepted, because the hosted
trainer's files cannot leave most of them out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo_gym.base.settings import parse_seeds
from gspo_gym.config.nested import POLICY_CONFIG
from gspo_gym.config.rules.judge import APP_KEYS_SAID_FOR_EACH_ROLLOUT, APP_RULES, JUDGE_RULES
from gspo_gym.config.rules.objective import (
    KL_TERMS,
    OBJECTIVE_RULES,
    OTHER_KEYS,
    Rule,
    acts_with,
    default_of,
    find_problem,
    no_effect,
)
from gspo_gym.config.rules.services import RESCORE_RULES, SERVICE_RULES, TRANSFER_RULES
from gspo_gym.config.sections import SIZE_KEYS, PolicyConfigSection, parse_source
from gspo_gym.config.words import Problem, show
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.learning.settings import OptimizerSettings, ReferenceSettings, StepRewardSettings
from gspo_gym.policy.bases import parse_hub_id
from gspo_gym.run.settings import RunSize


def find_contradictions(values: Mapping[str, Any]) -> list[Problem]:
    """Return the problems between keys; `values` holds the values that are valid by themselves, by dotted key."""
    return _ask(
        (*_RULES, *OBJECTIVE_RULES, *SERVICE_RULES, *RESCORE_RULES, *TRANSFER_RULES, *APP_RULES, *JUDGE_RULES), values
    )


def find_notices(values: Mapping[str, Any]) -> list[Problem]:
    """Return the notices on a valid configuration; `values` as above."""
    return _ask(NOTICE_RULES, values)


def _ask(rules: Sequence[Rule], values: Mapping[str, Any]) -> list[Problem]:
    found = (find_problem(rule, values) for rule in rules)
    return [problem for problem in found if problem is not None]


def _batch_holds_whole_groups(episodes_per_batch: int, group_size: int, batches_per_step: int) -> str | None:
    # A group may lie across the batches of one iteration, which are learned from together.
    if episodes_per_batch * batches_per_step % group_size == 0:
        return None
    product = f" x rollout.batches_per_step = {batches_per_step}" if batches_per_step > 1 else ""
    return f"expected a multiple of training.group_size = {group_size}, got {episodes_per_batch}{product}"


def _batch_splits_evenly(batch_size: int, episodes_per_batch: int, batches_per_step: int) -> str | None:
    episodes = episodes_per_batch * batches_per_step
    if episodes % batch_size == 0:
        return None
    product = f" x rollout.batches_per_step = {episodes}" if batches_per_step > 1 else f" = {episodes}"
    return f"expected a divisor of rollout.episodes_per_batch{product}, got {batch_size}"


def _accumulated_batches_split_evenly(
    accumulated: int | None, batch_size: int, episodes_per_batch: int, batches_per_step: int, most: int | None
) -> str | None:
    if accumulated is None:
        return None
    accumulated = min(accumulated, most or accumulated)
    # A batch that does not split into minibatches is reported at training.batch_size.
    episodes = episodes_per_batch * batches_per_step
    if episodes % batch_size != 0 or episodes % (batch_size * accumulated) == 0:
        return None
    return (
        f"expected a divisor of the iteration's {episodes // batch_size} batches of training.batch_size = "
        f"{batch_size}, got {accumulated}"
    )


def _clip_of_ppo_can_act(method: str, *size: Any) -> str | None:
    if method != "ppo" or RunSize(*size).steps_per_iteration > 1:
        return None
    return (
        '"ppo" says that the clip acts, but each batch is used for one optimizer step, in which the ratio is 1: lower '
        'training.batch_size, raise training.update_epochs, or set "policy_gradient"'
    )


def _ops_fit_the_turns(ops: tuple[str, ...], max_turns: int) -> str | None:
    if len(ops) // 2 <= max_turns:
        return None
    return f"expected at most rollout.max_turns = {max_turns} pairs, got {len(ops) // 2}"


def _output_leaves_room_for_a_prompt(max_output_tokens: int, max_model_len: int) -> str | None:
    if max_output_tokens < max_model_len:
        return None
    return f"expected less than rollout.max_model_len = {max_model_len} (a prompt needs room), got {max_output_tokens}"


def _output_may_reach_its_minimum(min_output_tokens: int, max_output_tokens: int) -> str | None:
    if min_output_tokens < max_output_tokens:
        return None
    return (
        f"expected less than rollout.max_output_tokens = {max_output_tokens} (the stop token needs room), got "
        f"{min_output_tokens}"
    )


def _said_once(theirs: str, ours: str) -> Rule:
    def check(their_value: Any, our_value: Any) -> str | None:
        if their_value is None or their_value == our_value:
            return None
        return f"is the same as rollout.{ours}, which is {show(our_value)}: give one of them, got {show(their_value)}"

    return Rule((f"rollout.policy_config.{theirs}", f"rollout.{ours}"), check)


def _has_one_origin(base: str | None, source: str | None) -> str | None:
    if (base is None) != (source is None):
        return None
    if base is None:
        return "required, but not given: a hub id, a folder, or tiny:NAME (or model.source, an earlier run)"
    return f"contradicts model.source = {show(source)}: give one of them, got {show(base)}"


def _source_is_another_run(source: str | None, label: str) -> str | None:
    # It would read the folder that it is about to write.
    if source is None or parse_source(source)[0] != label:
        return None
    return f"is this run's own model.label {show(label)}: choose another label, or go on with it by --resume"


def _revision_is_of_the_hub(revision: str | None, base: str | None) -> str | None:
    if revision is None:
        return None
    if base is None or parse_hub_id(base) is None:
        return f"{show(revision)} is of a repository of the hub, and model.base = {show(base)} names none: remove it"
    return f"is said twice: model.base = {show(base)} names one, too" if "@" in base else None


def _flash_attention_has_16_bits(attention: str | None, dtype: str) -> str | None:
    if attention != "flash_attention_2" or dtype != "float32":
        return None
    return (
        f'{show(attention)} computes in 16 bits only: set model.dtype = "bfloat16" (with lora or qlora), or take '
        '"sdpa", got float32'
    )


def _prefixes_are_shared_with_sdpa(share: bool | str, attention: str | None) -> str | None:
    if share is not True or attention in (None, "sdpa"):
        return None
    return f'true needs model.attn_implementation "sdpa", got {show(attention)}: write false or "auto", or take that'


def _adapter_is_asked_for(is_given: bool, trainer_mode: str) -> str | None:
    if not is_given or trainer_mode != "full":
        return None
    return f'has no effect with model.trainer_mode {show(trainer_mode)}: set that to "lora", or remove this'


def _trained_weights_are_float32(dtype: str, trainer_mode: str) -> str | None:
    if dtype == "float32" or trainer_mode != "full":
        return None
    return (
        f"{show(dtype)} weights cannot be trained (steps smaller than 1/256 of a weight round away): set "
        '"float32", or model.trainer_mode = "lora", whose own weights are float32'
    )


def _evaluation_has_seeds(instances: int | None, seeds: tuple[int, ...] | list[int] | str | None) -> str | None:
    if instances is None and seeds is None:
        return 'required, but not given: a number of evaluation tasks (or evaluation.seeds, such as "0:100")'
    return None


def _decay_has_room(schedule: str, num_warmup_steps: int, warmup_fraction: float | None, *size: Any) -> str | None:
    steps = RunSize(*size).num_optimizer_steps
    said, settings = f"num_warmup_steps = {num_warmup_steps}", OptimizerSettings(num_warmup_steps=num_warmup_steps)
    if warmup_fraction is not None:
        said, settings = f"warmup_fraction = {warmup_fraction:g}", OptimizerSettings(warmup_fraction=warmup_fraction)
    if schedule == "constant" or steps > settings.warmup_steps(steps):
        return None
    return f"no step is left for the {schedule}: optimizer.{said}, and the run has {steps} optimizer steps"


def _restore_has_a_source(restore: tuple[str, ...], restore_from: str | None) -> str | None:
    if len(set(restore)) < len(restore):
        return f"names a part twice: {show(list(restore))}"
    if restore and restore_from is None:
        return "expected run.restore_from with it, the run or checkpoint whose parts these are"
    if restore_from is not None and not restore:
        return f'expected the parts of run.restore_from = {show(restore_from)}, such as ["weights"]'
    return None


_RULES = (
    Rule(("run.restore", "run.restore_from"), _restore_has_a_source),
    Rule(("rollout.episodes_per_batch", "training.group_size", "rollout.batches_per_step"), _batch_holds_whole_groups),
    Rule(("training.batch_size", "rollout.episodes_per_batch", "rollout.batches_per_step"), _batch_splits_evenly),
    Rule(
        (
            "training.gradient_accumulation_steps",
            "training.batch_size",
            "rollout.episodes_per_batch",
            "rollout.batches_per_step",
            "training.max_accumulated_minibatch",
        ),
        _accumulated_batches_split_evenly,
    ),
    Rule(("algorithm.method", *SIZE_KEYS), _clip_of_ppo_can_act),
    Rule(("rollout.ops", "rollout.max_turns"), _ops_fit_the_turns),
    Rule(("rollout.max_output_tokens", "rollout.max_model_len"), _output_leaves_room_for_a_prompt),
    Rule(("rollout.min_output_tokens", "rollout.max_output_tokens"), _output_may_reach_its_minimum),
    *(_said_once(theirs, ours) for theirs, ours in POLICY_CONFIG.items()),
    Rule(("model.base", "model.source"), _has_one_origin),
    Rule(("model.source", "model.label"), _source_is_another_run),
    Rule(("model.revision", "model.base"), _revision_is_of_the_hub),
    Rule(("model.attn_implementation", "model.dtype"), _flash_attention_has_16_bits),
    Rule(("training.share_prefixes", "model.attn_implementation"), _prefixes_are_shared_with_sdpa),
    Rule(("training.lora", "model.trainer_mode"), _adapter_is_asked_for),
    Rule(("model.dtype", "model.trainer_mode"), _trained_weights_are_float32),
    acts_with("model.quantization", "nf4", "model.trainer_mode", "qlora"),
    Rule(("evaluation.instances", "evaluation.seeds"), _evaluation_has_seeds),
    no_effect(
        "optimizer.min_lr_fraction",
        default_of(OptimizerSettings, "min_lr_fraction"),
        "optimizer.schedule",
        lambda schedule: schedule != "constant",
        'set that to "linear" or "cosine"',
    ),
    Rule(
        ("optimizer.schedule", "optimizer.num_warmup_steps", "optimizer.warmup_fraction", *SIZE_KEYS), _decay_has_room
    ),
)


_POLICY_CONFIG = f"rollout.policy_config{OTHER_KEYS}"
_VISION = ("use_vision", "image_only_mode")


def _switch_wins(enabled: bool | None, mode: str | None) -> str | None:
    # The hosted trainer's files have both, and the switch wins there.
    if enabled is not False or mode in (None, "off"):
        return None
    return f"false switches step rewards off, so that training.step_rewards_mode = {show(mode)} has no effect"


def _of_decisions(key: str, default: Any) -> Rule:
    # A notice and no error: the hosted trainer's files have these keys with every mode.
    def check(value: Any, mode: str | None, enabled: bool | None) -> str | None:
        used = "off" if enabled is False else mode or default_of(StepRewardSettings, "mode")
        if value is None or value == default or used == "decision_stepwise":
            return None
        return f'has no effect with step rewards {show(used)}, only with "decision_stepwise"'

    return Rule((f"training.{key}", "training.step_rewards_mode", "training.step_rewards_enabled"), check)


def _reference_is_asked(placement: str, *weights: float) -> str | None:
    if placement == "none" or any(weight > 0 for weight in weights):
        return None
    return f"{show(placement)} has no effect without a KL term ({', '.join(KL_TERMS)}): nothing is loaded or started"


def _reference_is_the_start(
    source: str, has_warmup: bool, base: str | None, model_source: str | None, *weights: float
) -> str | None:
    if not any(weight > 0 for weight in weights) or source != "base":
        return None
    # A new adapter changes nothing, and then the base is the start.
    is_adapter = base is not None and (Path(base).expanduser() / "adapter_config.json").is_file()
    if not (has_warmup or is_adapter or model_source is not None):
        return None
    trained = "[warmup]" if has_warmup else "model.base" if is_adapter else "model.source"
    return f'{show(source)} is not where this run starts, because of {trained}: the first KL is not 0, as with "auto"'


def _shorter_turns_count(max_turns: int | None, most: int) -> str | None:
    if max_turns is None or max_turns <= most:
        return None
    return f"{max_turns} is more than rollout.max_turns = {most}, at which episodes end"


def _cap_counts(accumulated: int | None, most: int | None) -> str | None:
    if accumulated is None or most is None or accumulated <= most:
        return None
    return f"{accumulated} is cut to training.max_accumulated_minibatch = {most}"


def _seeds_count(instances: int | None, seeds: tuple[int, ...] | list[int] | str | None) -> str | None:
    if instances is None or seeds is None or len(parse_seeds(seeds)) == instances:
        return None
    given = len(parse_seeds(seeds))
    played = f"the first {instances} are played" if instances < given else f"each of these {given} is played once"
    return f"{instances}, but evaluation.seeds has {given} seeds: {played}"


def _judge_is_on(url: str | None, has_judge: bool) -> str | None:
    if url is None or has_judge:
        return None
    return "is not asked without [judge] and enabled = true there"


def _weighs_a_judge(name: str) -> Rule:
    default = default_of(RewardBlend, name)

    def check(weight: float | None, enabled: bool | None) -> str | None:
        if enabled or weight is None or weight == default:
            return None
        return f"{weight:g} has no effect while judge.enabled is false: the environment's reward counts as it is"

    return Rule((f"judge.reward_blend.{name}", "judge.enabled"), check)


def _own_keys_are_spelled_right(others: Mapping[str, Any] | None) -> str | None:
    ours = [name for name in PolicyConfigSection.model_fields if name not in ("top_p", "top_k")]
    for name in others or {}:
        if meant := difflib.get_close_matches(name, ours, n=1, cutoff=0.8):
            return f"{name} is sent to the task app and nothing here reads it; did you mean {meant[0]!r}?"
    return None


def _each_rollout_has_its_own(others: Mapping[str, Any] | None) -> str | None:
    given = [name for name in APP_KEYS_SAID_FOR_EACH_ROLLOUT if name in (others or {})]
    if not given:
        return None
    return f"{', '.join(given)}: not sent as written, because every rollout is told where to ask the policy itself"


def _images_are_refused(others: Mapping[str, Any] | None) -> str | None:
    asked = [name for name in _VISION if (others or {}).get(name) is True]
    if not asked:
        return None
    return (
        f"{', '.join(asked)} = true is sent to the task app; the policy reads text, and calls with images are refused"
    )


def _both_score_steps(mode: str | None, enabled: bool | None, env_config: Mapping[str, Any]) -> str | None:
    theirs = env_config.get("step_rewards")
    # The app's own shape of this table is not known here: only its mode is compared, if there is one.
    if not isinstance(theirs, Mapping) or not isinstance(theirs.get("mode"), str):
        return None
    ours = "off" if enabled is False else mode or "off"
    used = theirs["mode"].lower() if theirs.get("enabled", True) is not False else "off"
    if used == ours:
        return None
    return f"{show(ours)} is what is learned from, and rollout.env_config.step_rewards asks for {show(used)}"


def _truncation_is_scored(score_truncated: bool, *asked: Any) -> str | None:
    given = [f"{name} = {value}" for name, value in zip(POLICY_CONFIG, asked, strict=True) if value is not None]
    cut = ", ".join(text for text in given if text.startswith(("top_p", "top_k")))
    if not score_truncated or not cut:
        return None
    return f"true: the learner scores under the same truncation as rollout.policy_config ({cut})"


NOTICE_RULES: Sequence[Rule] = (
    Rule(("training.step_rewards_enabled", "training.step_rewards_mode"), _switch_wins),
    _of_decisions("step_rewards_beta", 0.0),
    _of_decisions("step_rewards_indicator_lambda", 0.0),
    _of_decisions("step_rewards_strategy", None),
    _of_decisions("event_rewards_kind", None),
    *(
        acts_with(f"training.{name}", {}, "training.step_rewards_strategy", "per_achievement")
        for name in ("step_rewards_weights", "step_rewards_k_limits")
    ),
    no_effect(
        "training.event_rewards_kind",
        "unique",
        "training.step_rewards_strategy",
        lambda strategy: strategy != "per_achievement",
        "each event has its limit in step_rewards_k_limits; choose another strategy",
    ),
    Rule(("training.step_rewards_mode", "training.step_rewards_enabled", "rollout.env_config"), _both_score_steps),
    Rule(("reference.placement", *KL_TERMS), _reference_is_asked),
    Rule(
        ("reference.source", "warmup", "model.base", "model.source", *KL_TERMS),
        _reference_is_the_start,
    ),
    *(
        acts_with(f"reference.{name}", default_of(ReferenceSettings, name), "reference.placement", "dedicated")
        for name in ("port", "tp", "health_max_wait_s", "health_interval_ms")
    ),
    Rule(("training.max_turns", "rollout.max_turns"), _shorter_turns_count),
    Rule(("training.gradient_accumulation_steps", "training.max_accumulated_minibatch"), _cap_counts),
    Rule(("evaluation.instances", "evaluation.seeds"), _seeds_count),
    Rule(("services.judge_url", "judge"), _judge_is_on),
    *(_weighs_a_judge(name) for name in RewardBlend.model_fields),
    Rule((_POLICY_CONFIG,), _own_keys_are_spelled_right),
    Rule((_POLICY_CONFIG,), _each_rollout_has_its_own),
    Rule((_POLICY_CONFIG,), _images_are_refused),
    Rule(
        ("training.score_truncated", *(f"rollout.policy_config.{name}" for name in POLICY_CONFIG)),
        _truncation_is_scored,
    ),
)

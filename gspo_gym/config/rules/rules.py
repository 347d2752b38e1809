"""Rules about batches, lengths, model, optimizer and evaluation; `find_contradictions` asks those of all files.

`notices.py` has the rules with findings that are accepted and only reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.config.nested import POLICY_CONFIG
from gspo_gym.config.rules.judge import APP_RULES, JUDGE_RULES
from gspo_gym.config.rules.notices import NOTICE_RULES
from gspo_gym.config.rules.objective import OBJECTIVE_RULES, Rule, acts_with, default_of, find_problem, no_effect
from gspo_gym.config.rules.services import RESCORE_RULES, SERVICE_RULES, TRANSFER_RULES
from gspo_gym.config.sections import SIZE_KEYS, parse_source
from gspo_gym.config.words import Problem, show
from gspo_gym.learning.settings import OptimizerSettings
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
    if source is None or parse_source(source)[0] != label:
        return None
    return f"is this run's own model.label {show(label)}: choose another label, or go on with it by --resume"


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


_RULES = (
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

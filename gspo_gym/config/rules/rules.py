"""Rules about batches, lengths, model, optimizer and evaluation; `find_contradictions` applies the rules of all files.

Notices are about settings that have no effect, or another one than it may seem. They are accepted, because the hosted
trainer's files cannot leave most of them out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_gym.config.nested import STEP_REWARDS
from gspo_gym.config.record import (
    Rule,
    RunRecord,
    acts_with,
    default_of,
    idle,
    no_effect,
    problems_of,
    rule,
    rules_in,
    value_at,
)
from gspo_gym.config.rules.judge import APP_KEYS_SAID_FOR_EACH_ROLLOUT, APP_RULES, JUDGE_RULES
from gspo_gym.config.rules.objective import KL_TERMS, OBJECTIVE_RULES
from gspo_gym.config.rules.services import SERVICE_RULES
from gspo_gym.config.sections import PolicyConfigSection, parse_source
from gspo_gym.config.words import Problem, show
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.learning.step_rewards import StepRewardSettings, idle_step_rewards
from gspo_gym.policy.bases import parse_hub_id
from gspo_gym.types import Sampling


def find_contradictions(record: RunRecord) -> list[Problem]:
    """Return the problems between keys, of those values that the record has."""
    return problems_of(CONTRADICTIONS, record)


def find_notices(record: RunRecord) -> list[Problem]:
    """Return the notices on a valid configuration."""
    return problems_of(NOTICES, record)


@rule("run.restore")
def _restore_has_a_source(c: RunRecord) -> str | None:
    restore, origin = c.run.restore, c.run.restore_from
    if len(set(restore)) < len(restore):
        return f"names a part twice: {show(list(restore))}"
    if restore and origin is None:
        return "expected run.restore_from with it, the run or checkpoint whose parts these are"
    if origin is not None and not restore:
        return f'expected the parts of run.restore_from = {show(origin)}, such as ["weights"]'
    return None


@rule("rollout.episodes_per_batch")
def _batch_holds_whole_groups(c: RunRecord) -> str | None:
    num, size = c.rollout.episodes_per_batch, c.training.group_size
    return None if num % size == 0 else f"expected a multiple of training.group_size = {size}, got {num}"


@rule("training.batch_size")
def _batch_splits_evenly(c: RunRecord) -> str | None:
    episodes, size = c.rollout.episodes_per_batch, c.training.batch_size
    if episodes % size == 0:
        return None
    return f"expected a divisor of rollout.episodes_per_batch = {episodes}, got {size}"


@rule("rollout.max_output_tokens")
def _output_leaves_room_for_a_prompt(c: RunRecord) -> str | None:
    num, most = c.rollout.max_output_tokens, c.rollout.max_model_len
    return None if num < most else f"expected less than rollout.max_model_len = {most} (a prompt needs room), got {num}"


@rule("rollout.min_output_tokens")
def _output_may_reach_its_minimum(c: RunRecord) -> str | None:
    num, most = c.rollout.min_output_tokens, c.rollout.max_output_tokens
    if num < most:
        return None
    return f"expected less than rollout.max_output_tokens = {most} (the stop token needs room), got {num}"


@rule("model.base")
def _has_one_origin(c: RunRecord) -> str | None:
    base, source = c.model.base, c.model.source
    if (base is None) != (source is None):
        return None
    if base is None:
        return "required, but not given: a hub id, a folder, or tiny:NAME (or model.source, an earlier run)"
    return f"contradicts model.source = {show(source)}: give one of them, got {show(base)}"


@rule("model.source")
def _source_is_another_run(c: RunRecord) -> str | None:
    # It would read the folder that it is about to write.
    if c.model.source is None or parse_source(c.model.source)[0] != c.model.label:
        return None
    return f"is this run's own model.label {show(c.model.label)}: choose another label, or go on with it by --resume"


@rule("model.revision")
def _revision_is_of_the_hub(c: RunRecord) -> str | None:
    revision, base = c.model.revision, c.model.base
    if revision is None:
        return None
    if base is None or parse_hub_id(base) is None:
        return f"{show(revision)} is of a repository of the hub, and model.base = {show(base)} names none: remove it"
    return f"is said twice: model.base = {show(base)} names one, too" if "@" in base else None


@rule("model.attn_implementation")
def _flash_attention_has_16_bits(c: RunRecord) -> str | None:
    attention = c.model.attn_implementation
    if attention != "flash_attention_2" or c.model.dtype != "float32":
        return None
    return (
        f'{show(attention)} computes in 16 bits only: set model.dtype = "bfloat16" (with lora or qlora), or take '
        '"sdpa", got float32'
    )


@rule("training.share_prefixes")
def _prefixes_are_shared_with_sdpa(c: RunRecord) -> str | None:
    attention = c.model.attn_implementation
    if c.training.share_prefixes is not True or attention in (None, "sdpa"):
        return None
    return f'true needs model.attn_implementation "sdpa", got {show(attention)}: write false or "auto", or take that'


@rule("model.dtype")
def _trained_weights_are_float32(c: RunRecord) -> str | None:
    if c.model.dtype == "float32" or c.model.trainer_mode != "full":
        return None
    return (
        f"{show(c.model.dtype)} weights cannot be trained (steps smaller than 1/256 of a weight round away): set "
        '"float32", or model.trainer_mode = "lora", whose own weights are float32'
    )


@rule("evaluation.seeds")
def _evaluation_has_seeds(c: RunRecord) -> str | None:
    return "required, but not given: the evaluation's tasks, such as 0:100" if c.evaluation.seeds is None else None


@rule("evaluation.samples_per_task")
def _samples_of_a_task_differ(c: RunRecord) -> str | None:
    if c.evaluation.samples_per_task == 1 or c.evaluation.temperature > 0:
        return None
    return (
        "expected 1 with evaluation.temperature = 0, which plays the same episode again, got "
        f"{c.evaluation.samples_per_task}: raise the temperature, or remove this"
    )


@rule("optimizer.schedule")
def _decay_has_room(c: RunRecord) -> str | None:
    return c.optimizer.decay_problem(c.size.num_optimizer_steps)


CONTRADICTIONS = (
    *rules_in(globals()),
    acts_with("model.quantization", "model.trainer_mode", "qlora"),
    idle(
        "training.lora",
        lambda c: c.model.trainer_mode != "full",
        lambda c: (
            f'has no effect with model.trainer_mode {show(c.model.trainer_mode)}: set that to "lora", or remove this'
        ),
    ),
    no_effect(
        "optimizer.min_lr_fraction",
        "optimizer.schedule",
        lambda schedule: schedule != "constant",
        'set that to "linear" or "cosine"',
    ),
    *OBJECTIVE_RULES,
    *SERVICE_RULES,
    *APP_RULES,
    *JUDGE_RULES,
)


_VISION = ("use_vision", "image_only_mode")


def _is_read(name: str, key: str) -> Rule:
    # A notice and no error: the hosted trainer's files have these keys with every mode.
    def check(c: RunRecord) -> str | None:
        value, mode = getattr(c.training, key), c.step_rewards_mode
        reason = idle_step_rewards(mode, c.training.step_rewards_strategy).get(name)
        is_default = mode == "decision_stepwise" and value == StepRewardSettings.model_fields[name].default
        return None if reason is None or not value or is_default else f"has no effect, because {reason}"

    return Rule(f"training.{key}", check)


@rule("training.step_rewards_mode")
def _both_score_steps(c: RunRecord) -> str | None:
    theirs = c.rollout.env_config.get("step_rewards")
    # The app's own shape of this table is not known here: only its mode is compared, if there is one.
    if not isinstance(theirs, Mapping) or not isinstance(theirs.get("mode"), str):
        return None
    ours = c.step_rewards_mode
    their_mode = theirs["mode"].lower() if theirs.get("enabled", True) is not False else "off"
    if their_mode == ours:
        return None
    return f"{show(ours)} is what is learned from, and rollout.env_config.step_rewards asks for {show(their_mode)}"


@rule("reference.source")
def _reference_is_the_start(c: RunRecord) -> str | None:
    source, base = c.reference.source, c.model.base
    if not c.has_reference or source != "base":
        return None
    # A new adapter changes nothing, and then the base is the start.
    is_adapter = base is not None and (Path(base).expanduser() / "adapter_config.json").is_file()
    if c.warmup is None and not is_adapter and c.model.source is None:
        return None
    cause = "[warmup]" if c.warmup is not None else "model.base" if is_adapter else "model.source"
    return f'{show(source)} is not where this run starts, because of {cause}: the first KL is not 0, as with "auto"'


@rule("distillation.teacher")
def _teacher_is_asked_of_another_law(c: RunRecord) -> str | None:
    sampling = c.rollout.sampling
    if c.distillation is None or c.distillation.divergence != "sampled" or sampling == Sampling():
        return None
    return (
        "is asked at temperature 1 and of the whole vocabulary, as the policy is for it; [rollout] samples from "
        "another distribution (temperature, top_p, top_k, min_p or a penalty), so that the mean of the "
        "teacher's advantages estimates no KL"
    )


@rule("training.max_turns")
def _shorter_turns_count(c: RunRecord) -> str | None:
    max_turns, most = c.training.max_turns, c.rollout.max_turns
    if max_turns is None or max_turns <= most:
        return None
    return f"{max_turns} is more than rollout.max_turns = {most}, at which episodes end"


def _weighs_a_judge(name: str) -> Rule:
    key = f"judge.reward_blend.{name}"

    def check(c: RunRecord) -> str | None:
        weight = value_at(c, key)
        if c.judging.enabled or weight is None or weight == default_of(key):
            return None
        return f"{weight:g} has no effect while judge.enabled is false: the environment's reward counts as it is"

    return Rule(key, check)


def _app_keys(c: RunRecord) -> Mapping[str, Any]:
    return {} if c.rollout.policy_config is None else c.rollout.policy_config.others


@rule("rollout.policy_config")
def _own_keys_are_spelled_right(c: RunRecord) -> str | None:
    ours = [*PolicyConfigSection.model_fields, "temperature", "max_tokens"]
    for name in _app_keys(c):
        if matches := difflib.get_close_matches(name, ours, n=1, cutoff=0.8):
            return f"{name} is sent to the task app and nothing here reads it; did you mean {matches[0]!r}?"
    return None


@rule("rollout.policy_config")
def _each_rollout_has_its_own(c: RunRecord) -> str | None:
    if names := [name for name in APP_KEYS_SAID_FOR_EACH_ROLLOUT if name in _app_keys(c)]:
        return f"{', '.join(names)}: not sent as written, because every rollout is told where to ask the policy itself"
    return None


@rule("rollout.policy_config")
def _images_are_refused(c: RunRecord) -> str | None:
    names = [name for name in _VISION if _app_keys(c).get(name) is True]
    if not names:
        return None
    return (
        f"{', '.join(names)} = true is sent to the task app; the policy reads text, and calls with images are refused"
    )


NOTICES = (
    *(one for one in rules_in(globals()) if one not in CONTRADICTIONS),
    *(_is_read(name, key) for name, key in STEP_REWARDS.items()),
    *map(_weighs_a_judge, RewardBlend.model_fields),
    idle(
        "reference.placement",
        lambda c: c.has_reference,
        lambda c: (
            f"{show(c.reference.placement)} has no effect without a KL term ({', '.join(KL_TERMS)}): nothing is "
            "loaded or started"
        ),
    ),
    idle(
        "services.judge_url",
        lambda c: c.judge is not None,
        "is not asked without [judge] and enabled = true there",
    ),
)

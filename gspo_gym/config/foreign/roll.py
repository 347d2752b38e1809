"""Rules of ROLL's keys that depend on each other, and its tables of workers; roll.toml has the other keys."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from gspo_gym.config.foreign.reader import Draft, read_system
from gspo_gym.errors import ConfigError

_DTYPES = {"fp32": None, "bf16": "bfloat16", "fp16": "bfloat16"}
# The statistics that a method of the agentic pipeline takes.
_METHODS = {"identity": "", "mean": "mean", "mean_std": "mean and std", "asym_clip": "mean and std"}
_STATISTICS = {name: name for name in ("batch", "group", "running")}
# Tables of workers with settings that have a counterpart, and what ROLL overwrites in them with the pipeline's own.
_NESTED = {"actor_train": ("training_args", "model_args"), "actor_infer": ("generating_args",)}
_OVERWRITTEN = {"max_steps": "max_steps", "seed": "seed", "output_dir": "output_dir",
                "num_return_sequences": "num_return_sequences_in_group"}  # fmt: skip
_AGENTIC = ("train_env_manager", "val_env_manager", "custom_envs", "reward_normalization", "ratio_type")
_RANGE = re.compile(r"range\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_RESPONSE = 1024  # tokens of an answer, as a placeholder


def _flatten(draft: Draft, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat keys with those of the actor's tables, which go over them; the rest of a table stays one."""
    flat = {key: value for key, value in values.items() if key not in _NESTED}
    workers = {name: _table(values, name) for name in (*_NESTED, "train_env_manager")}
    sampling = workers["train_env_manager"].get("generating_args")
    if sampling and not workers["actor_infer"].get("generating_args"):  # else those of actor_infer count there
        workers["actor_infer"] = {**workers["actor_infer"], "generating_args": sampling}
        flat["train_env_manager"] = {k: v for k, v in flat["train_env_manager"].items() if k != "generating_args"}
    for worker, tables in _NESTED.items():
        for table in tables:
            _merge(draft, flat, f"{worker}.{table}", _table(workers[worker], table, of=f"{worker}."))
        if other_keys := {key: value for key, value in workers[worker].items() if key not in tables}:
            flat[worker] = other_keys
    for key in [key for key, value in flat.items() if isinstance(value, str) and "${" in value]:
        draft.report(key, flat.pop(key), "what it stands for is not in this file")
    return flat


def _merge(draft: Draft, flat: dict[str, Any], path: str, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if key in _OVERWRITTEN:
            if value not in (None, flat.get(_OVERWRITTEN[key])):
                draft.note(f"{path}.{key} = {value!r} has no effect there: the pipeline's own takes its place")
        else:
            if flat.get(key) not in (None, value):
                draft.note(f"{key} = {flat[key]!r} at the top has no effect there: {path} has its own")
            flat[key] = value


def _table(values: Mapping[str, Any], key: str, *, of: str = "") -> Mapping[str, Any]:
    """Return the table under a key, empty if the key is missing."""
    table = values.get(key) or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"ROLL: {of}{key}: expected a table, got {table!r}")
    return table


def _is_agentic(draft: Draft) -> bool:
    return any(draft.entries.get(key) is not None for key in _AGENTIC)


def model(draft: Draft) -> None:
    """Set the base, its dtype, and the adapter that lora_target asks for."""
    draft.set("model.base", next((name for name in map(draft.get, ("pretrain", "model_name_or_path")) if name), None))
    is_disabled, is_enabled = draft.flag("disable_gradient_checkpointing"), draft.flag("gradient_checkpointing")
    draft.set("model.gradient_checkpointing", None if is_disabled and not is_enabled else True)
    rank, alpha, modules = draft.positive("lora_rank"), draft.number("lora_alpha"), draft.get("lora_target")
    dtype = draft.choice("dtype", _DTYPES)
    if modules is None:
        if dtype is not None:
            draft.note(f"dtype = {draft.get('dtype')!r}: weights that are trained stay float32 here")
        return
    if isinstance(modules, str) and any(sign in modules for sign in "*$|("):
        raise ConfigError(f"ROLL: lora_target: a pattern has no counterpart: name the modules, got {modules!r}")
    names = [name.strip() for name in modules.split(",")] if isinstance(modules, str) else draft.names("lora_target")
    assert rank is not None, "lora_rank has a default"
    draft.set("model.trainer_mode", "lora")
    draft.set("model.dtype", dtype)
    draft.set("training.lora.r", rank)
    draft.set("training.lora.alpha", alpha or 2.0 * rank)
    is_all = any(name in ("all", "all-linear") for name in names)
    draft.set("training.lora.target_modules", "all-linear" if is_all else names)


def batches(draft: Draft) -> None:
    """Set how many episodes a batch and an optimizer step have."""
    size, group = draft.require_count("rollout_batch_size"), draft.require_count("num_return_sequences_in_group")
    episodes = size * group
    if _is_agentic(draft):
        manager = draft.part("train_env_manager", group_size=1)
        group, episodes = manager.require_count("group_size"), size
        draft.report_rest("train_env_manager", manager, "belongs to its launcher")
    micro, devices = draft.require_count("per_device_train_batch_size"), _devices(draft)
    if draft.get("eval_steps") == 0:
        draft.report("eval_steps", 0, "evaluations are always made, every evaluation.every_n_iters")
    draft.set("training.group_size", group)
    draft.set("rollout.episodes_per_batch", episodes)
    draft.set("training.batch_size", micro * devices * draft.require_count("gradient_accumulation_steps"))
    draft.note(
        f"per_device_train_batch_size = {micro} is of each of the devices that share the episodes there, which are "
        f"{devices}: device_mapping without those that share a model, or --devices"
    )


def _devices(draft: Draft) -> int:
    """Return how many devices hold other episodes than the others."""
    worker = _table(draft.entries, "actor_train")
    mapping = worker.get("device_mapping")
    if isinstance(mapping, str):
        device_ranges = [range(int(first), int(end)) for first, end in _RANGE.findall(mapping)]
        mapping = [device for devices in device_ranges for device in devices] or re.findall(r"\d+", mapping)
    if not isinstance(mapping, list) or not mapping:
        return draft.devices
    strategy = _table(worker, "strategy_args").get("strategy_config")
    shares = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = [strategy.get(name, 1) for name in shares] if isinstance(strategy, Mapping) else []
    sizes.append(draft.entries.get("ulysses_size") or 1)
    return max(1, len(mapping) // math.prod(size for size in sizes if isinstance(size, int) and size > 0))


def objective(draft: Draft) -> None:
    """Set what depends on the clip and on the lengths."""
    if draft.flag("dual_clip_loss"):
        draft.set("loss.dual_clip", 1 + 2 * draft.require_number("pg_clip"))
    if draft.get("loss_agg_mode") == "seq-mean-token-sum-norm":
        draft.set("loss.norm_length", _total_length(draft))
    if draft.get("loss_agg_mode") == "token-mean":
        draft.note(
            "loss_agg_mode 'token-mean' leaves environment tokens and masked episodes out here; ROLL sums without its "
            "mask (ROLL#444), which adds the entropy of environment tokens and the loss of masked episodes"
        )


def rewards(draft: Draft) -> None:
    """Set the normalisation of rewards, their clip, the estimator, whitening and the second clip, in this order."""
    estimator = draft.get("adv_estimator")
    if estimator == "gigpo":
        draft.leave_out("adv_estimator", "its groups of steps are not here; groups of episodes take their place")
        baseline, scale = "group", "group"
    else:
        baseline, scale = draft.choice("adv_estimator", draft.values("adv_estimator"))
    if estimator == "step_reinforce":
        draft.set("advantages.level", "turn")
        draft.note(
            "adv_estimator 'step_reinforce': each step is a sample of its own there, and here a turn of its episode"
        )
    if estimator == "gae":
        draft.note("adv_estimator 'gae' needs a value function, which is not here: returns without a baseline are used")
    baseline, scale = (_agentic_statistics if _is_agentic(draft) else _statistics)(draft, baseline, scale)
    draft.set("advantages.baseline", baseline)
    draft.set("advantages.scale", scale)
    if baseline == "none" and scale == "none":
        draft.note("no group baseline: that is what its settings say; only whitening centres returns then")
    if draft.flag("add_token_level_kl"):
        draft.leave_out("kl_penalty", "the penalty is log(old / reference) here", default="kl")
    draft.flag("use_kl_loss")
    limit = draft.number("advantage_clip")
    draft.set("advantages.clip", limit)
    _reward_clip(draft, is_normalised=baseline != "none" or scale != "none", limit=limit)


def _statistics(draft: Draft, baseline: str, scale: str) -> tuple[str, str]:
    """Return the baseline and the scale in the pipeline of single answers."""
    norm = draft.choice("reward_norm", _STATISTICS)
    shift, divide = draft.flag("reward_shift"), draft.flag("reward_scale")
    mean, std = draft.choice("norm_mean_type", _STATISTICS), draft.choice("norm_std_type", _STATISTICS)
    if draft.get("adv_estimator") == "grpo":
        if {mean, std} - {None, "group"}:
            draft.note("adv_estimator 'grpo' sets norm_mean_type and norm_std_type to 'group' there, whatever they are")
        return baseline, scale
    if norm is not None:
        baseline, scale = ("none" if divide else norm), ("none" if shift else norm)
    return mean or baseline, std or scale


def _agentic_statistics(draft: Draft, *_: str) -> tuple[str, str]:
    """Return the baseline and the scale in the agentic pipeline, where adv_estimator 'grpo' does not normalise."""
    part = draft.part("reward_normalization", method="identity")
    for key in ("norm_mean_type", "norm_std_type"):
        draft.leave_out(key, "reward_normalization decides in the agentic pipeline")
    statistics = part.choice("method", _METHODS)
    if statistics and part.get("grouping") is None:
        draft.note("reward_normalization.grouping is 'state' by default in this version, and 'batch' in later ones")
    # Without a key of its own, an episode's group is all that shares its task; "tags" are environments.
    group = "batch" if part.get("grouping") in ("batch", "tags") else "group"
    if part.get("method") == "asym_clip":
        draft.report("reward_normalization.method", "asym_clip", "its clip from -1 to 3 is not here")
    baseline = part.choice("norm_mean_type", _STATISTICS) or (group if "mean" in statistics else "none")
    scale = part.choice("norm_std_type", _STATISTICS) or (group if "std" in statistics else "none")
    draft.report_rest("reward_normalization", part, "has no counterpart")
    return baseline, scale


def _reward_clip(draft: Draft, *, is_normalised: bool, limit: float | None) -> None:
    """Set what reward_clip cuts, with which ROLL cuts rewards after their normalisation; 0 is none."""
    clip = draft.number("reward_clip")
    if not clip:
        return
    if draft.flag("add_token_level_kl"):
        draft.note(f"reward_clip = {clip:g} cuts each token's reward after its KL penalty, too, there")
    if not is_normalised:
        draft.set("rewards.clip", clip)
    elif draft.flag("whiten_advantages"):
        why = "cuts normalised rewards before they are whitened; advantages are cut after that here"
        draft.leave_out("reward_clip", why)
    else:  # in ROLL, a normalised reward is the advantage
        draft.set("advantages.clip", clip if limit is None else min(clip, limit))
        draft.note(f"reward_clip = {clip:g} cuts normalised rewards there, which are advantages here: advantages.clip")


def _total_length(draft: Draft) -> int:
    """Return sequence_length, which wins in ROLL, or the sum of the two parts."""
    parts = draft.require_count("prompt_length") + (draft.positive("response_length") or _RESPONSE)
    return draft.positive("sequence_length") or parts


def lengths(draft: Draft) -> None:
    """Give an answer what the prompt leaves, except in the agentic pipeline, which has a limit for each turn."""
    total, prompt, turn = (
        _total_length(draft),
        draft.require_count("prompt_length"),
        draft.require_count("max_new_tokens"),
    )
    if draft.get("sequence_length") is None and draft.get("response_length") is None:
        draft.note(
            f"rollout.max_output_tokens = {_RESPONSE} is a placeholder: ROLL refuses a file with neither "
            "response_length nor sequence_length"
        )
    response = min(turn, total - 1) if _is_agentic(draft) else total - prompt  # a prompt needs room
    if not _is_agentic(draft) and turn != response and not draft.is_default("max_new_tokens"):
        draft.note(f"max_new_tokens: the pipeline makes it sequence_length - prompt_length = {response} there")
    draft.set("rollout.max_output_tokens", response)
    draft.set("rollout.max_model_len", total)


ROLL = read_system("roll", model, batches, objective, rewards, lengths, flatten=_flatten, interpolates=True)

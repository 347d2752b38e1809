"""ROLL's pipeline files (alibaba/ROLL): the flat keys, and the worker tables that hold the optimizer and the sampler.

Keys of its older reward API (reward_norm, reward_shift, reward_scale), which ROLL itself now ignores, are read with the
meaning that they had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_gym.config.foreign.common import (
    take_aggregation,
    take_clip,
    take_policy_config,
    take_sampling,
    take_single_step_note,
    take_trainer_arguments,
)
from gspo_gym.config.foreign.draft import Draft, label_of
from gspo_gym.errors import ConfigError

DEFAULTS = {
    "adv_estimator": "gae",
    "importance_sampling": "token",
    "pg_clip": 0.2,
    "ppo_epochs": 1,
    "loss_agg_mode": "seq-mean-token-mean",
    "rollout_batch_size": 128,
    "num_return_sequences_in_group": 1,
    "prompt_length": 1024,
    "response_length": 1024,
}
_UNITS = {"seq": ("gspo", "trajectory"), "token": ("grpo", "token"), "segment": ("gspo_token", "turn")}
_ESTIMATORS = {"reinforce": ("none", "none"), "grpo": ("group", "group")}
_STATISTICS = {"batch": "batch", "group": "group", "running": "running"}
_AGGREGATIONS = {
    name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}
# Tables of workers, and the part of each that holds settings we have.
_NESTED = {
    "actor_train": ("training_args", "model_args"),
    "actor_infer": ("generating_args",),
}


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys with those of the actor's tables beside them, where a flat one does not say otherwise (Any: read
    from a file)."""
    flat = {key: value for key, value in values.items() if key not in _NESTED}
    for worker, tables in _NESTED.items():
        for table in tables:
            inner = (values.get(worker) or {}).get(table) or {}
            if not isinstance(inner, Mapping):
                raise ConfigError(f"ROLL: {worker}.{table}: expected a table, got {inner!r}")
            for key, value in inner.items():
                flat.setdefault(key, value)
    return flat


def translate(draft: Draft) -> None:
    """Read every key out of the draft and set ours."""
    take_trainer_arguments(draft)
    draft.set("model.base", draft.first("pretrain", "model_name_or_path"))
    name = draft.get("exp_name")
    draft.set("model.label", None if name is None else label_of(str(name)))
    _take_batches(draft)
    _take_objective(draft)
    _take_rewards(draft)
    _take_kl(draft)
    _take_lengths(draft)
    take_sampling(draft)
    take_policy_config(draft)
    draft.set("training.iterations_per_epoch", draft.count("max_steps"))
    draft.set("evaluation.every_n_iters", draft.count("eval_steps"))
    for key in (
        "track_with",
        "tracker_kwargs",
        "logging_dir",
        "output_dir",
        "hydra",
        "num_gpus_per_node",
        "strategy_args",
    ):
        draft.leave_out(key, "belongs to its launcher")


def _take_batches(draft: Draft) -> None:
    prompts, group = draft.require_count("rollout_batch_size"), draft.require_count("num_return_sequences_in_group")
    micro = draft.first_count("per_device_train_batch_size")
    accumulated = draft.first_count("gradient_accumulation_steps") or 1
    episodes = prompts * group
    draft.set("training.group_size", group)
    draft.set("rollout.episodes_per_batch", episodes)
    draft.set("training.batch_size", micro or episodes)
    draft.set("training.gradient_accumulation_steps", accumulated if micro else None)
    epochs = draft.require_count("ppo_epochs")
    draft.set("training.update_epochs", epochs)
    take_single_step_note(draft, num_steps=max(1, episodes // ((micro or episodes) * accumulated)) * epochs)


def _take_objective(draft: Draft) -> None:
    key = "ratio_type" if draft.given.get("ratio_type") is not None else "importance_sampling"
    variety, unit = draft.choice(key, _UNITS)
    is_sequence = unit != "token"
    draft.set("algorithm.variety", variety)
    draft.set("loss.unit", unit)
    if key == "ratio_type":
        draft.get("importance_sampling")
        draft.note("ratio_type 'segment' is a run of sampled tokens; here it is a turn, whatever masks do inside it")
    clip = draft.require_number("pg_clip")
    low, high = draft.number("pg_clip_low"), draft.number("pg_clip_high")
    uses_range = draft.flag("use_pg_clip_range")
    take_clip(
        draft,
        low if uses_range and low is not None else clip,
        high if uses_range and high is not None else clip,
        is_sequence=is_sequence,
    )
    if draft.flag("dual_clip_loss"):
        draft.set("loss.dual_clip", 1 + 2 * clip)
    aggregation = draft.choice("loss_agg_mode", _AGGREGATIONS)
    take_aggregation(draft, aggregation, is_sequence=is_sequence, norm_length=_total_length(draft))
    if aggregation == "token-mean":
        draft.note("loss_agg_mode 'token-mean' leaves environment tokens out here; ROLL sums over them, too (ROLL#444)")
    draft.set("loss.entropy_coef", draft.number("entropy_loss_coef"))


def _take_rewards(draft: Draft) -> None:
    """Reward normalisation, then clip, then the estimator, then whitening, then clip, as there."""
    baseline, scale = draft.choice("adv_estimator", _ESTIMATORS | {"gae": ("none", "none")})
    if draft.get("adv_estimator") == "gae":
        draft.note("adv_estimator 'gae' needs a value function, which is not here: returns without a baseline are used")
    norm = draft.choice("reward_norm", _STATISTICS)
    shift, divide = draft.flag("reward_shift"), draft.flag("reward_scale")
    if norm is not None and baseline == "none":
        baseline, scale = ("none" if divide else norm), ("none" if shift else norm)
    mean, std = draft.choice("norm_mean_type", _STATISTICS), draft.choice("norm_std_type", _STATISTICS)
    baseline, scale = mean or baseline, std or scale
    draft.set("advantages.baseline", baseline)
    draft.set("advantages.scale", scale)
    if baseline == "none" and scale == "none":
        draft.note("no group baseline: that is what adv_estimator 'reinforce' does; only whitening centres it")
    whitens, limit = draft.flag("whiten_advantages"), draft.number("advantage_clip")
    if whitens:
        draft.set("advantages.whiten", "tokens")
    draft.set("advantages.clip", limit)
    _take_reward_clip(draft, is_normalised=baseline != "none" or scale != "none", whitens=whitens, limit=limit)


def _take_reward_clip(draft: Draft, *, is_normalised: bool, whitens: bool, limit: float | None) -> None:
    """Take reward_clip, which cuts rewards after they were normalised, there."""
    clip = draft.number("reward_clip")
    if clip is None:
        return
    if not is_normalised:
        draft.set("rewards.clip", clip)
    elif whitens:
        draft.leave_out(
            "reward_clip", "cuts normalised rewards before they are whitened; advantages are cut after that here"
        )
    else:  # a normalised reward is the advantage, there
        draft.set("advantages.clip", clip if limit is None else min(clip, limit))
        draft.note(f"reward_clip = {clip:g} cuts normalised rewards there, which are advantages here: advantages.clip")


def _take_kl(draft: Draft) -> None:
    coefficient = draft.number("kl_loss_coef")
    if draft.flag("use_kl_loss"):
        draft.set("loss.kl_coef", coefficient)
    elif coefficient:
        draft.note(f"kl_loss_coef = {coefficient:g} has no effect without use_kl_loss, there as here")
    initial, target, horizon = draft.number("init_kl_coef"), draft.number("target_kl"), draft.count("kl_horizon")
    if draft.flag("add_token_level_kl"):
        draft.set("rewards.kl_coef", 0.2 if initial is None else initial)
        draft.set("rewards.kl_target", target)
        draft.set("rewards.kl_horizon", horizon if target is not None else None)


def _total_length(draft: Draft) -> int:
    """sequence_length, which wins there where both are given, or the sum of its two parts."""
    parts = draft.require_count("prompt_length") + draft.require_count("response_length")
    return draft.first_count("sequence_length") or parts


def _take_lengths(draft: Draft) -> None:
    total = _total_length(draft)
    response = draft.first_count("max_new_tokens", "response_length")
    draft.set("rollout.max_output_tokens", response)
    draft.set("rollout.max_model_len", total)
    sequences = draft.count("num_return_sequences")
    if sequences is not None and sequences != draft.count("num_return_sequences_in_group"):
        draft.note(f"num_return_sequences = {sequences}: num_return_sequences_in_group decides the group's size")

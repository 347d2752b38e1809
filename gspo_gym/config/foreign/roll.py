"""ROLL's pipeline files (alibaba/ROLL): the flat keys, and the worker tables that hold the optimizer and the sampler.

A file with `train_env_manager` or another key of its agentic pipeline is read like that pipeline:
`rollout_batch_size` counts episodes and not prompts, `reward_normalization` decides in place of `norm_mean_type`. Keys
of the older reward API (reward_norm, reward_shift, reward_scale), which ROLL now ignores, keep their old meaning.

ROLL is not on PyPI. Read in alibaba/ROLL, main of 2026: roll/configs/base_config.py at 0a6a47e5,
roll/pipeline/rlvr/rlvr_config.py at 2f732c04, roll/configs/model_args.py at 1d3b9ae2; training_args.py and
generating_args.py of roll/configs as a copy of that state holds them (jangyicheng/SE-ROLLGUI, ed0657e2). Rewards,
advantages and losses: roll/utils/functionals.py at 090ac946 and roll/pipeline/base_worker.py at 015a111b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gspo_gym.config.foreign.draft import (
    OF_BATCHES,
    POLICY,
    TRAINER_ARGUMENTS,
    Draft,
    Row,
    System,
    by,
    count,
    label_of,
    plain,
    switch,
    take_aggregation,
    take_clip,
    take_kept,
    take_single_step_note,
    with_defaults,
    without,
)
from gspo_gym.errors import ConfigError

_UNITS = {"seq": ("gspo", "trajectory"), "token": ("grpo", "token"), "segment": ("gspo_token", "turn")}
_ESTIMATORS = {"reinforce": ("none", "none"), "grpo": ("group", "group"), "gae": ("none", "none")}
_STATISTICS = {"batch": "batch", "group": "group", "running": "running"}
_METHODS = {  # of the agentic pipeline: (the mean is subtracted, the std divides)
    "identity": (False, False),
    "mean": (True, False),
    "mean_std": (True, True),
    "asym_clip": (True, True),
}
_AGGREGATIONS = {
    name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Tables of workers, and the parts of each with settings that have a counterpart.
_NESTED = {"actor_train": ("training_args", "model_args"), "actor_infer": ("generating_args",)}
_AGENTIC = ("train_env_manager", "val_env_manager", "custom_envs", "reward_normalization", "ratio_type")
_RESPONSE = 1024  # tokens of an answer, as a placeholder


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat keys, and those of the actor's tables that have no flat one.

    Other keys of such a table stay a table.
    """
    flat = {key: value for key, value in values.items() if key not in _NESTED}
    for worker, tables in _NESTED.items():
        given = _table(values, worker)
        for table in tables:
            settings = _table(given, table, of=f"{worker}.")
            flat = {**{key: value for key, value in settings.items() if key not in OVERWRITTEN}, **flat}
        if rest := {key: value for key, value in given.items() if key not in tables}:
            flat[worker] = rest
    return flat


def _is_agentic(draft: Draft) -> bool:
    return any(draft.given.get(key) is not None for key in _AGENTIC)


def _take_label(draft: Draft) -> None:
    name = draft.get("exp_name")
    draft.set("model.label", None if name is None else label_of(str(name)))


def _table(values: Mapping[str, Any], key: str, *, of: str = "") -> Mapping[str, Any]:
    """Return the table under a key, empty if the key is missing."""
    table = values.get(key) or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"ROLL: {of}{key}: expected a table, got {table!r}")
    return table


def _take_model(draft: Draft) -> None:
    """Take the base, its dtype, and the adapter that lora_target asks for."""
    draft.set("model.base", draft.first("pretrain", "model_name_or_path"))
    draft.set("model.gradient_checkpointing", True if not draft.flag("disable_gradient_checkpointing") else None)
    r, alpha, dropout = draft.first_count("lora_rank"), draft.number("lora_alpha"), draft.number("lora_dropout")
    modules, dtype = draft.get("lora_target"), draft.choice("dtype", _DTYPES)
    if modules is None:
        if dtype != "float32":
            draft.note(f"dtype = {draft.get('dtype')!r}: weights that are trained stay float32 here")
        return
    if isinstance(modules, str):
        if any(sign in modules for sign in "*$|("):
            raise ConfigError(f"ROLL: lora_target: a pattern has no counterpart: name the modules, got {modules!r}")
        modules = [name.strip() for name in modules.split(",")]
    else:
        modules = draft.names("lora_target")
    assert r is not None, "lora_rank has a default"
    draft.set("model.trainer_mode", "lora")
    draft.set("model.dtype", None if dtype == "float32" else dtype)
    draft.set("training.lora.r", r)
    draft.set("training.lora.alpha", alpha or 2.0 * r)
    draft.set("training.lora.dropout", dropout)
    is_all = any(name in ("all", "all-linear") for name in modules)
    draft.set_modules("all-linear" if is_all else modules)


def _take_batches(draft: Draft) -> None:
    is_agentic = _is_agentic(draft)
    size, group = draft.require_count("rollout_batch_size"), draft.require_count("num_return_sequences_in_group")
    if is_agentic:
        manager = _table(draft.given, "train_env_manager")
        draft.get("train_env_manager")
        group = Draft(draft.system, manager, {"group_size": 1}).require_count("group_size")
        for part, value in manager.items():
            if part != "group_size":
                draft.leave_out_part("train_env_manager", part, value, "belongs to its launcher")
    episodes = size if is_agentic else size * group
    micro = draft.require_count("per_device_train_batch_size")
    accumulated = draft.require_count("gradient_accumulation_steps")
    draft.set("training.group_size", group)
    draft.set("rollout.episodes_per_batch", episodes)
    draft.set("training.batch_size", micro)
    draft.set("training.gradient_accumulation_steps", accumulated)
    epochs = draft.require_count("ppo_epochs")
    draft.set("training.update_epochs", epochs)
    take_single_step_note(draft, num_steps=max(1, episodes // (micro * accumulated)) * epochs)
    draft.note(
        f"per_device_train_batch_size = {micro} is of each device there: with n of them an optimizer step has n times "
        "as many episodes"
    )


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
    low, high = draft.require_number("pg_clip_low"), draft.require_number("pg_clip_high")
    uses_range = draft.flag("use_pg_clip_range")
    take_clip(draft, low if uses_range else clip, high if uses_range else clip, is_sequence=is_sequence)
    if draft.flag("dual_clip_loss"):
        draft.set("loss.dual_clip", 1 + 2 * clip)
    aggregation, entropy = draft.choice("loss_agg_mode", _AGGREGATIONS), draft.require_number("entropy_loss_coef")
    take_aggregation(draft, aggregation, is_sequence=is_sequence, norm_length=_total_length(draft))
    if aggregation == "token-mean":
        draft.note(
            "loss_agg_mode 'token-mean' leaves environment tokens and masked episodes out here; ROLL sums without its "
            "mask (ROLL#444), which adds the entropy of environment tokens and the loss of masked episodes"
        )
    draft.set("loss.entropy_coef", entropy or None)


def _take_rewards(draft: Draft) -> None:
    """Take the normalisation of rewards, their clip, the estimator, whitening and the second clip, in this order."""
    baseline, scale = draft.choice("adv_estimator", _ESTIMATORS)
    if draft.get("adv_estimator") == "gae":
        draft.note("adv_estimator 'gae' needs a value function, which is not here: returns without a baseline are used")
    if _is_agentic(draft):
        baseline, scale = _agentic_statistics(draft)
    else:
        baseline, scale = _statistics(draft, baseline, scale)
    draft.set("advantages.baseline", baseline)
    draft.set("advantages.scale", scale)
    if baseline == "none" and scale == "none":
        draft.note("no group baseline: that is what its settings say; only whitening centres returns then")
    whitens, limit = draft.flag("whiten_advantages"), draft.number("advantage_clip")
    if whitens:
        draft.set("advantages.whiten", "tokens")
    draft.set("advantages.clip", limit)
    _take_reward_clip(draft, is_normalised=baseline != "none" or scale != "none", whitens=whitens, limit=limit)


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


def _agentic_statistics(draft: Draft) -> tuple[str, str]:
    """Return the baseline and the scale in the agentic pipeline, where adv_estimator 'grpo' does not normalise."""
    table = _table(draft.given, "reward_normalization")
    draft.get("reward_normalization")
    for key in ("norm_mean_type", "norm_std_type"):
        draft.leave_out(key, "reward_normalization decides in the agentic pipeline")
    part = Draft(f"{draft.system}: reward_normalization", table, {"method": "identity"})
    subtracts, divides = part.choice("method", _METHODS)
    # Without a key of its own, an episode's group is all that shares its task; "tags" are environments.
    group = "batch" if part.get("grouping") in ("batch", "tags") else "group"
    if part.get("method") == "asym_clip":
        draft.leave_out_part("reward_normalization", "method", "asym_clip", "its clip from -1 to 3 is not here")
    baseline = part.choice("norm_mean_type", _STATISTICS) or (group if subtracts else "none")
    return baseline, part.choice("norm_std_type", _STATISTICS) or (group if divides else "none")


def _take_reward_clip(draft: Draft, *, is_normalised: bool, whitens: bool, limit: float | None) -> None:
    """Take reward_clip, with which ROLL cuts rewards after their normalisation; 0 is none."""
    clip = draft.number("reward_clip")
    if not clip:
        return
    if draft.flag("add_token_level_kl"):
        draft.note(f"reward_clip = {clip:g} cuts each token's reward after its KL penalty, too, there")
    if not is_normalised:
        draft.set("rewards.clip", clip)
    elif whitens:
        draft.leave_out(
            "reward_clip", "cuts normalised rewards before they are whitened; advantages are cut after that here"
        )
    else:  # in ROLL, a normalised reward is the advantage
        draft.set("advantages.clip", clip if limit is None else min(clip, limit))
        draft.note(f"reward_clip = {clip:g} cuts normalised rewards there, which are advantages here: advantages.clip")


def _take_kl(draft: Draft) -> None:
    coefficient = draft.require_number("kl_loss_coef")
    if draft.flag("use_kl_loss"):
        draft.set("loss.kl_coef", coefficient)
    elif coefficient:
        draft.note(f"kl_loss_coef = {coefficient:g} has no effect without use_kl_loss, there as here")
    initial, target, horizon = draft.number("init_kl_coef"), draft.number("target_kl"), draft.count("kl_horizon")
    if draft.flag("add_token_level_kl"):
        draft.leave_out("kl_penalty", "the penalty is log(old / reference) here", default="kl")
        draft.set("rewards.kl_coef", initial)
        draft.set("rewards.kl_target", target)
        draft.set("rewards.kl_horizon", horizon if target is not None else None)
    else:
        draft.get("kl_penalty")


def _total_length(draft: Draft) -> int:
    """Return sequence_length, which wins in ROLL, or the sum of the two parts."""
    parts = draft.require_count("prompt_length") + (draft.first_count("response_length") or _RESPONSE)
    return draft.first_count("sequence_length") or parts


def _take_lengths(draft: Draft) -> None:
    """Give an answer what the prompt leaves, except in the agentic pipeline, which has a limit for each turn."""
    total, prompt, turn = _total_length(draft), draft.require_count("prompt_length"), draft.count("max_new_tokens")
    if draft.first_count("sequence_length", "response_length") is None:
        draft.note(
            f"rollout.max_output_tokens = {_RESPONSE} is a placeholder: ROLL refuses a file with neither "
            "response_length nor sequence_length"
        )
    response = total - prompt
    if _is_agentic(draft):
        assert turn is not None, "max_new_tokens has a default"
        response = min(turn, total - 1)  # a prompt needs room
    elif draft.given.get("max_new_tokens") not in (None, response):
        draft.note(f"max_new_tokens: the pipeline makes it sequence_length - prompt_length = {response} there")
    draft.set("rollout.max_output_tokens", response)
    draft.set("rollout.max_model_len", total)


# Fields of its tables that ROLL overwrites with those of the pipeline: a file's have no effect.
OVERWRITTEN = ("max_steps", "seed", "output_dir", "num_return_sequences")
_LAUNCHER = "belongs to its launcher"
_VALIDATION = "an evaluation plays each of evaluation.seeds once; [evaluation] has its sampling"
_LOSS = "belongs to a loss that is not here"
_STEPS = "belongs to GiGPO and step_reinforce, which are not here"
_WORKERS = "how its workers are placed and what else they do belongs to its launcher"
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, str]] = {
    **without(_WORKERS, "actor_train", "actor_infer"),
    **without(
        _LAUNCHER, "tracker_kwargs", "logging_dir", "output_dir", "base_dir", "rollout_dump_dir", "hydra", "defaults",
        "strategy_args", "checkpoint_config", "system_envs", "model_download_type", "rollout_mock", "router_args",
        "save_logging_board_dir", "render_save_dir", "metrics_dump_dir", "user_defined_rollout_loop_cls", "local_rank",
        "num_nodes", "rpc_timeout", "profiler_timeline", "profiler_memory", "profiler_output_dir",
        "length_profiler_dir", "report_length_and_rewards", "is_offload_states",
        "is_offload_optimizer_states_in_train_step", "model_update_buffer_size_mb", "num_gpus_per_node",
        "resume_from_checkpoint", "track_with", generate_opt_level=1,
        is_num_return_sequences_expand=False, balance_length=False, minibatch_data_iter_num=1, ulysses_size=1,
        vision_dp=False,
    ),
    **without(
        _VALIDATION, "validation", "val_batch_size", "val_prompt_length", "val_sequence_length", "val_greedy",
        "val_env_manager", val_n_sample=1,
    ),
    "gamma": (1, "an episode's return is undiscounted; between turns advantages.discount is (level 'turn')"),
    **without("belongs to a value function, which is not here", "value_clip", lambd=0.95),
    **without("there is no value function here", "critic", critic_warmup=0),
    "whiten_rewards": (False, "rewards of tokens are not whitened here; advantages.whiten whitens advantages"),
    **without("without effect there, too", use_reward_scaling=False, use_reward_norm=False, add_len_reward=False),
    "l2": (0.0, "without effect there, too: write weight_decay"),
    "train_infer_correction": (None, "write [correction]"),
    "async_generation_ratio": (0, "write training.max_staleness: episodes are played while the learner works"),
    "enable_reference": (False, "a KL term asks for the reference by itself"),
    "reference": (None, "write [reference]"),
    **without(
        "the trainer always scores the old logprobs", enable_old_logprobs_recompute=False,
        force_disable_old_logprobs_recompute=False,
    ),
    "max_running_requests": (128, "rollout.max_concurrent_rollouts bounds what is played at once"),
    **without("write training.constant_groups", is_use_additional_prompts=False, difficulty_mask=False),
    "max_additional_running_prompts": (16, "acts with is_use_additional_prompts only"),
    **without("the environment rewards", "reward", "rewards"),
    **without("the environment rewards, or a [judge]", "reward_model", "reward_pretrain"),
    "custom_envs": (None, "rollout.env_name and rollout.max_turns take its place: --env, --max-turns"),
    "global_template": (None, "the model's own chat template is used"),
    **without("an environment takes the data set's place", "dataset_filter", dataloader_num_workers=0),
    "vlm_filter": (None, "policies read text"),
    **without(_LOSS, use_policy_loss_type="PPO", use_topr_loss=False, use_topr_neg_loss_coef=0.0, postive_loss_coef=0),
    "rl_loss_coef": (1.0, "has no counterpart: scale the other terms' coefficients"),
    **without("has no counterpart: one episode weighs one", difficulty_loss_weight=False, length_loss_weight=False),
    **without("acts with difficulty_mask only", difficulty_low_threshold=0.0, difficulty_high_threshold=1.0),
    **without("has no counterpart", "model_config_kwargs", error_max_len_clip=False),
    "error_max_len_threshold": (9999999999, "acts with error_max_len_clip only"),
    "mask_type": ("loss", "a masked episode stays in the statistics of its group here"),
    "batch_adjust_mode": ("copy", "batches need not be divisible here, so that no episode is copied"),
    **without(_STEPS, episode_reward_weight=1.0, step_reward_weight=1.0, step_reward_gamma=0.95),
    "num_train_epochs": (1.0, "max_steps decides there, too"),
    "data_seed": (None, "run.seed draws the tasks"),
    "fp16": (False, "16-bit floats with a loss scale are not supported; use bfloat16"),
    "bf16": (False, "model.dtype chooses"),
    "tf32": (None, "has no counterpart: set it in torch"),
    **without("rollouts are always sampled", do_sample=True, num_beams=1),
    "max_length": (8192, "acts without max_new_tokens only"),
    "length_penalty": (1.0, "belongs to beam search"),
    "stop_strings": (None, "has no counterpart: a turn ends with the template's stop tokens"),
    "include_stop_str_in_output": (None, "what was sampled is kept whole"),
    "additional_target": (None, "an adapter is all that is trained"),
    "autocast_adapter_dtype": (True, "adapters are trained in float32"),
    "adapter_name_or_path": (None, "write model.base = the adapter's folder"),
    "moe_aux_loss_coef": (None, "has no counterpart: there is no auxiliary loss of routers"),
    "gradient_checkpointing_use_reentrant": (None, "never reentrant here"),
    "device_map": ("balanced", "model.device chooses"),
    **without("policies are causal language models", "model_type", num_labels=1),
    "freeze_module_prefix": (None, "has no counterpart: all weights are trained, or an adapter"),
}  # fmt: skip
_EPISODES = "rollout.episodes_per_batch"
_CLIP = ("loss.clip_low", "loss.clip_high")
_BASELINE, _SCALE = "advantages.baseline", "advantages.scale"
_TOKEN_KL: Mapping[str, Any] = {"add_token_level_kl": True}
_LORA: Mapping[str, Any] = {"lora_target": "q_proj, v_proj"}
_LORA_KEYS = ("training.lora.r", "training.lora.alpha", "training.lora.dropout")
ROWS: Mapping[str, Row] = {
    **with_defaults(
        TRAINER_ARGUMENTS, save_steps=50, logging_steps=1, seed=42, max_grad_norm=1.0, learning_rate=5e-5,
        lr_scheduler_type="linear", weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999,
    ),
    "gradient_checkpointing": replace(
        TRAINER_ARGUMENTS["gradient_checkpointing"], beside={"disable_gradient_checkpointing": True}
    ),
    "exp_name": by(_take_label, "model.label"),
    "attn_implementation": plain("model.attn_implementation"),
    "pretrain": by(_take_model, "model.base"),
    "model_name_or_path": by(_take_model, "model.base"),
    "disable_gradient_checkpointing": by(
        _take_model, "model.gradient_checkpointing", advice={True: "model.gradient_checkpointing = false"}
    ),
    "lora_target": by(
        _take_model, "training.lora.target_modules", also=("model.trainer_mode", "model.dtype", *_LORA_KEYS)
    ),
    "lora_rank": by(_take_model, "training.lora.r", beside=_LORA, also=("training.lora.alpha",), default=8),
    "lora_alpha": by(_take_model, "training.lora.alpha", beside=_LORA),
    "lora_dropout": by(_take_model, "training.lora.dropout", beside=_LORA, default=0.0),
    "dtype": by(_take_model, "model.dtype", beside=_LORA, note="weights that are trained stay float32", default="bf16"),
    "rollout_batch_size": by(_take_batches, _EPISODES, note=OF_BATCHES, default=128),
    "num_return_sequences_in_group": by(_take_batches, "training.group_size", also=(_EPISODES,), default=1),
    "train_env_manager": by(
        _take_batches, "training.group_size", also=("rollout.max_output_tokens",),
        advice="write training.group_size = group_size",
    ),
    "per_device_train_batch_size": by(_take_batches, "training.batch_size", note="of each device there", default=8),
    "gradient_accumulation_steps": by(_take_batches, "training.gradient_accumulation_steps", default=1),
    "ppo_epochs": by(_take_batches, "training.update_epochs", default=1),
    "importance_sampling": by(_take_objective, "algorithm.variety", "loss.unit", values=_UNITS, default="token"),
    "ratio_type": by(
        _take_objective, "algorithm.variety", "loss.unit", values=_UNITS, also=("rollout.max_output_tokens",)
    ),
    "pg_clip": by(_take_objective, *_CLIP, default=0.2),
    "pg_clip_low": by(_take_objective, "loss.clip_low", beside={"use_pg_clip_range": True}, default=0.2),
    "pg_clip_high": by(_take_objective, "loss.clip_high", beside={"use_pg_clip_range": True}, default=0.2),
    "use_pg_clip_range": by(
        _take_objective, *_CLIP, beside={"pg_clip": 0.1},
        advice="loss.clip_low and loss.clip_high always count: remove it",
    ),
    "dual_clip_loss": by(_take_objective, "loss.dual_clip", advice={True: "loss.dual_clip = 1 + 2 * pg_clip"}),
    "loss_agg_mode": by(
        _take_objective, "loss.aggregation", values=_AGGREGATIONS, also=("loss.norm_length",),
        default="seq-mean-token-mean",
        advice={"seq-mean-token-sum-norm":
                'loss.aggregation = "seq-mean-token-sum-norm", loss.norm_length = response_length'},
    ),
    "entropy_loss_coef": by(_take_objective, "loss.entropy_coef", default=0.0),
    "adv_estimator": by(
        _take_rewards, _BASELINE, _SCALE, values=_ESTIMATORS,
        advice={"rloo": 'advantages.baseline = "leave_one_out", advantages.scale = "none"'}, default="gae",
    ),
    "reward_normalization": by(
        _take_rewards, _BASELINE, _SCALE, also=("rollout.max_output_tokens",),
        advice="write advantages.baseline and advantages.scale",
    ),
    "reward_norm": by(
        _take_rewards, _BASELINE, _SCALE,
        values={None: ("none", "none"), **{name: (name, name) for name in _STATISTICS}},
    ),
    "reward_shift": by(
        _take_rewards, _SCALE, values={True: "none"}, beside={"reward_norm": "group"},
        advice={False: "nothing: both mean and std are the default"},
    ),
    "reward_scale": by(
        _take_rewards, _BASELINE, values={True: "none"}, beside={"reward_norm": "group"},
        advice={False: "nothing: both mean and std are the default"},
    ),
    "norm_mean_type": by(_take_rewards, _BASELINE, values=_STATISTICS),
    "norm_std_type": by(_take_rewards, _SCALE, values=_STATISTICS),
    "reward_clip": by(_take_rewards, "rewards.clip", note="of normalised rewards it is advantages.clip; 0 is none"),
    "whiten_advantages": by(
        _take_rewards, "advantages.whiten", values={True: "tokens"},
        advice={True: 'advantages.whiten = "tokens" (ROLL) or "trajectories" (AgileRL)'},
    ),
    "advantage_clip": by(_take_rewards, "advantages.clip"),
    "max_len_mask": switch("rewards.overlong", "mask"),
    "use_kl_loss": by(
        _take_kl, "loss.kl_coef",
        advice={True: "loss.kl_coef = kl_loss_coef", False: "nothing: loss.kl_coef is 0 by default"},
    ),
    "kl_loss_coef": by(_take_kl, "loss.kl_coef", beside={"use_kl_loss": True}, default=0.0),
    "add_token_level_kl": by(
        _take_kl, "rewards.kl_coef",
        advice={True: "rewards.kl_coef = init_kl_coef", False: "nothing: rewards.kl_coef is 0 by default"},
    ),
    "init_kl_coef": by(_take_kl, "rewards.kl_coef", beside=_TOKEN_KL, default=0.2),
    "target_kl": by(_take_kl, "rewards.kl_target", beside=_TOKEN_KL, also=("rewards.kl_horizon",)),
    "kl_horizon": by(_take_kl, "rewards.kl_horizon", beside={**_TOKEN_KL, "target_kl": 0.5}, default=10000),
    "kl_penalty": by(_take_kl, note="the penalty is log(old / reference)"),
    "prompt_length": by(
        _take_lengths, "rollout.max_model_len",
        advice="prompts are not cut; rollout.max_model_len bounds prompt and answers together", default=1024,
    ),
    "response_length": by(_take_lengths, "rollout.max_output_tokens", also=("rollout.max_model_len",)),
    "sequence_length": by(_take_lengths, "rollout.max_model_len", also=("rollout.max_output_tokens",)),
    "max_new_tokens": by(
        _take_lengths, "rollout.max_output_tokens", beside={"train_env_manager": {"group_size": 8}},
        note="of a turn in the agentic pipeline; what the prompt leaves in the other", default=8192,
    ),
    **with_defaults(POLICY, temperature=0.95, top_p=0.7, top_k=50),
    "max_steps": count("training.iterations_per_epoch", default=500),
    "eval_steps": count("evaluation.every_n_iters", default=10),
    "max_ckpt_to_keep": by(
        lambda draft: take_kept(draft, "max_ckpt_to_keep"), "training.keep_last", also=("training.keep_best",),
    ),
}  # fmt: skip
ROLL = System("ROLL", ROWS, WITHOUT_COUNTERPART, flatten)

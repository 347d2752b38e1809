"""Names that other trainers, or this one before, have for our keys, and names under which a secret would be written.

`explain` says which key of ours is meant and with which value; `secret_problem` which environment variable. Called by
`problems.py` for keys that are unknown anyway, so nothing here makes a key legal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo_gym.config.words import show


@dataclass(frozen=True, slots=True)
class Foreign:
    """Another system's key.

    Attributes:
        origin: whose name it is.
        keys: ours that together say the same; none: there is no counterpart.
        values: what to write for a value of theirs, in full; for other values, the same value goes into each key.
        note: what changes in meaning, or why there is no counterpart.
    """

    origin: str
    keys: tuple[str, ...] = ()
    values: Mapping[Any, str] = field(default_factory=dict)
    note: str = ""


def _renamed(origin: str, key: str, note: str = "") -> Foreign:
    return Foreign(origin, (key,), note=note)


_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_TRL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
_MANY_TRAINERS = "TRL and others"
_OF_BATCHES = "one prompt has training.group_size episodes, so multiply by that"

FOREIGN: Mapping[str, Foreign] = {
    # groups and batches
    "num_generations": _renamed("TRL", "training.group_size"),
    "num_return_sequences_in_group": _renamed("ROLL", "training.group_size"),
    "n_sample": _renamed("verl", "training.group_size"),
    "G": _renamed("the paper", "training.group_size"),
    "rollout_batch_size": _renamed("ROLL", "rollout.episodes_per_batch", _OF_BATCHES),
    "generations_per_iteration": _renamed("stateset-agents", "rollout.episodes_per_batch", _OF_BATCHES),
    "data_batch_size_per_gpu": _renamed("AgileRL", "rollout.episodes_per_batch", _OF_BATCHES),
    "generation_batch_size": _renamed("TRL", "rollout.episodes_per_batch"),
    "steps_per_generation": Foreign(
        "TRL", ("rollout.episodes_per_batch",), note="that many times training.batch_size episodes"
    ),
    "per_device_train_batch_size": _renamed(_MANY_TRAINERS, "training.batch_size"),
    "mini_batch_size": _renamed("stateset-agents", "training.batch_size"),
    "ppo_mini_batch_size": _renamed("verl", "training.batch_size"),
    "micro_batch_size_per_gpu": Foreign(
        "AgileRL", ("training.max_tokens_per_microbatch",), note="memory is bounded in tokens; the update is the same"
    ),
    "ppo_epochs": _renamed("ROLL", "training.update_epochs"),
    "num_iterations": Foreign(
        "TRL", ("training.update_epochs",), note="passes over a batch; training.iterations_per_epoch counts batches"
    ),
    "num_inner_steps": _renamed("the hosted trainer's old form", "training.update_epochs"),
    "num_gradient_updates": _renamed("stateset-agents", "training.update_epochs"),
    "num_outer_iterations": _renamed("stateset-agents", "training.iterations_per_epoch"),
    "max_steps": Foreign(
        _MANY_TRAINERS, ("training.iterations_per_epoch",), note="ours counts batches of episodes, not optimizer steps"
    ),
    "num_train_epochs": _renamed("TRL", "training.num_epochs"),
    "gradient_accumulation": _renamed("others", "training.gradient_accumulation_steps"),
    # ratio and clip
    "importance_sampling_level": Foreign(
        "TRL",
        ("algorithm.variety",),
        {"sequence": 'algorithm.variety = "gspo"', "token": 'algorithm.variety = "grpo"',
         "sequence_token": 'algorithm.variety = "gspo_token"'},
    ),
    "importance_sampling": Foreign(
        "ROLL", ("algorithm.variety",),
        {"seq": 'algorithm.variety = "gspo"', "token": 'algorithm.variety = "grpo"'},
    ),
    "ratio_type": Foreign(
        "ROLL", ("loss.unit",), {"token": 'algorithm.variety = "grpo"', "segment": 'loss.unit = "turn"'}
    ),
    "use_gspo_token": Foreign(
        "stateset-agents", ("algorithm.variety",),
        {True: 'algorithm.variety = "gspo_token"', False: 'algorithm.variety = "gspo"'},
    ),
    "objective": _renamed("stateset-agents", "algorithm.variety"),
    "epsilon": Foreign("TRL", ("loss.clip_low", "loss.clip_high")),
    "epsilon_low": _renamed("others", "loss.clip_low"),
    "epsilon_high": _renamed("TRL", "loss.clip_high"),
    "clip_range_left": _renamed("stateset-agents", "loss.clip_low"),
    "clip_range_right": _renamed("stateset-agents", "loss.clip_high"),
    "clip_range": Foreign("others", ("loss.clip_low", "loss.clip_high")),
    "clip_epsilon": Foreign("the hosted trainer's old form", ("loss.clip_low", "loss.clip_high")),
    "clip_ratio": Foreign("verl", ("loss.clip_low", "loss.clip_high")),
    "clip_ratio_low": _renamed("verl", "loss.clip_low"),
    "clip_ratio_high": _renamed("verl", "loss.clip_high"),
    "clip_coef": Foreign(
        "AgileRL", ("loss.clip_low", "loss.clip_high"), note="two numbers are the ratio's bounds there, distances here"
    ),
    "pg_clip": Foreign("ROLL", ("loss.clip_low", "loss.clip_high")),
    "pg_clip_low": _renamed("ROLL", "loss.clip_low"),
    "pg_clip_high": _renamed("ROLL", "loss.clip_high"),
    "use_pg_clip_range": Foreign("ROLL", note="loss.clip_low and loss.clip_high always count: remove it"),
    "delta": _renamed("TRL", "loss.dual_clip"),
    "dual_clip_loss": Foreign(
        "ROLL", ("loss.dual_clip",), {True: "loss.dual_clip = 1 + 2 * pg_clip", False: "nothing: it is off"}
    ),
    "clip_ratio_c": _renamed("verl", "loss.dual_clip"),
    # aggregation
    "loss_type": Foreign(
        "TRL", ("loss.aggregation",),
        {**{name: f'loss.aggregation = "{name}"' for name in _TRL_LOSSES},
         "dr_grpo": 'loss.aggregation = "dr_grpo", loss.norm_length = max_completion_length'},
    ),
    "loss_agg_mode": Foreign(
        "ROLL", ("loss.aggregation",),
        {**{name: f'loss.aggregation = "{name}"' for name in _AGGREGATIONS},
         "seq-mean-token-sum-norm": 'loss.aggregation = "seq-mean-token-sum-norm", loss.norm_length = response_length'},
    ),
    # KL and reference
    "beta": _renamed("TRL", "loss.kl_coef"),
    "kl_penalty": _renamed("others", "loss.kl_coef"),
    "kl_loss_coef": _renamed("ROLL", "loss.kl_coef"),
    "use_kl_loss": Foreign(
        "ROLL", ("loss.kl_coef",),
        {True: "loss.kl_coef = kl_loss_coef", False: "nothing: loss.kl_coef is 0 by default"},
    ),
    "kl_loss_type": Foreign(
        "verl", ("loss.kl_estimator",),
        {"low_var_kl": 'loss.kl_estimator = "k3"', "kl": 'loss.kl_estimator = "k1"', "mse": 'loss.kl_estimator = "k2"'},
    ),
    "use_bias_correction_kl": _renamed("TRL", "loss.kl_importance_weighted"),
    "add_token_level_kl": Foreign(
        "ROLL", ("rewards.kl_coef",),
        {True: "rewards.kl_coef = init_kl_coef", False: "nothing: rewards.kl_coef is 0 by default"},
    ),
    "init_kl_coef": _renamed("ROLL", "rewards.kl_coef"),
    "target_kl": _renamed("ROLL", "rewards.kl_target"),
    "use_kl_advantage_shaping": Foreign(
        "AgileRL", ("advantages.kl_shaping_coef",),
        {True: "advantages.kl_shaping_coef = beta", False: "nothing: advantages.kl_shaping_coef is 0 by default"},
    ),
    "use_separate_reference_adapter": Foreign(
        "AgileRL", ("reference.source",), {True: 'reference.source = "adapter"', False: 'reference.source = "base"'}
    ),
    "enable_reference": Foreign("ROLL", note="a KL term asks for the reference by itself: remove it"),
    "sync_ref_model": Foreign(
        "TRL", ("reference.update_every_n_iters",),
        {True: 'reference.update_every_n_iters = 1 or more, reference.source = "copy"',
         False: "nothing: the reference is frozen by default"},
    ),
    "ref_model_sync_steps": _renamed("TRL", "reference.update_every_n_iters", "ours counts iterations"),
    "update_reference_interval": _renamed("the hosted trainer's old form", "reference.update_every_n_iters"),
    "entropy_loss_coef": _renamed("ROLL", "loss.entropy_coef"),
    # rewards and advantages
    "adv_estimator": Foreign(
        "ROLL", ("advantages.baseline",),
        {"reinforce": 'advantages.baseline = "none", advantages.scale = "none"',
         "grpo": 'advantages.baseline = "group", advantages.scale = "group"',
         "rloo": 'advantages.baseline = "leave_one_out", advantages.scale = "none"'},
    ),
    "adv_norm": Foreign(
        "AgileRL", ("advantages.scale",),
        {"mean_std": 'advantages.scale = "group"', "mean_only": 'advantages.scale = "none"'},
    ),
    "scale_rewards": Foreign(
        "TRL", ("advantages.scale",),
        {True: 'advantages.scale = "group"', False: 'advantages.scale = "none"',
         **{name: f'advantages.scale = "{name}"' for name in ("group", "batch", "none")}},
    ),
    "normalize_std": Foreign(
        "an earlier version", ("advantages.scale",),
        {True: 'advantages.scale = "group"', False: 'advantages.scale = "none"'},
    ),
    "reward_norm": Foreign(
        "ROLL", ("advantages.baseline", "advantages.scale"),
        {**{name: f'advantages.baseline = "{name}", advantages.scale = "{name}"'
            for name in ("group", "batch", "running")},
         None: 'advantages.baseline = "none", advantages.scale = "none"'},
    ),
    "norm_mean_type": _renamed("ROLL", "advantages.baseline"),
    "norm_std_type": _renamed("ROLL", "advantages.scale"),
    "reward_shift": Foreign(
        "ROLL", ("advantages.scale",),
        {True: 'advantages.scale = "none"', False: "nothing: both mean and std are the default"},
    ),
    "reward_scale": Foreign(
        "ROLL", ("advantages.baseline",),
        {True: 'advantages.baseline = "none"', False: "nothing: both mean and std are the default"},
    ),
    "reward_clip": _renamed("ROLL", "rewards.clip"),
    "advantage_clip": _renamed("ROLL", "advantages.clip"),
    "adv_clip_range": _renamed("AgileRL", "advantages.clip"),
    "whiten_advantages": Foreign(
        "ROLL", ("advantages.whiten",),
        {True: 'advantages.whiten = "tokens" (ROLL) or "trajectories" (AgileRL)', False: "nothing: it is off"},
    ),
    "filter_zero_adv": Foreign(
        "AgileRL", ("advantages.filter_eps",),
        {True: "advantages.filter_eps = adv_filter_eps", False: "nothing: it is off"},
    ),
    "adv_filter_eps": _renamed("AgileRL", "advantages.filter_eps"),
    "gamma": _renamed("others", "advantages.discount"),
    "group_normalization": Foreign(
        "the hosted trainer's old form", ("advantages.baseline",),
        {True: 'advantages.baseline = "group"', False: 'advantages.baseline = "none"'},
    ),
    "advantage_normalization": Foreign(
        "the hosted trainer's old form", ("advantages.scale",),
        {True: 'advantages.scale = "group"', False: 'advantages.scale = "none"'},
    ),
    "mask_truncated_completions": Foreign(
        "TRL", ("rewards.overlong",), {True: 'rewards.overlong = "mask"', False: "nothing: it is off"}
    ),
    "dynamic_sampling": Foreign(
        "others", ("training.constant_groups",),
        {True: 'training.constant_groups = "refill"', False: "nothing: it is off"},
    ),
    # correction
    "vllm_importance_sampling_correction": Foreign(
        "TRL", ("correction.level",), {True: 'correction.level = "trajectory"', False: "nothing: it is off"},
        "a geometric mean here, not a product",
    ),
    "vllm_importance_sampling_cap": _renamed("TRL", "correction.high"),
    "off_policy_mask_threshold": _renamed("TRL", "correction.off_policy_threshold"),
    "old_logprobs_source": Foreign(
        "AgileRL", ("correction.old_logprobs",),
        {"trainer": 'correction.old_logprobs = "recompute"', "recompute": 'correction.old_logprobs = "recompute"',
         "rollout": 'correction.old_logprobs = "rollout"', "sampler": 'correction.old_logprobs = "rollout"'},
    ),
    # optimizer
    "lr": _renamed("AgileRL", "training.learning_rate"),
    "optim": Foreign(
        "TRL", ("optimizer.kind",),
        {"adamw_8bit": 'optimizer.kind = "adamw_8bit"', "paged_adamw_8bit": 'optimizer.kind = "paged_adamw_8bit"',
         "adamw_torch": 'optimizer.kind = "adamw"', "adamw_torch_fused": 'optimizer.kind = "adamw_fused"'},
    ),
    "adam_beta1": Foreign("TRL", note="write optimizer.betas = [adam_beta1, adam_beta2]"),
    "adam_beta2": Foreign("TRL", note="write optimizer.betas = [adam_beta1, adam_beta2]"),
    "adam_epsilon": _renamed("TRL", "optimizer.eps"),
    "warmup_ratio": _renamed("TRL", "optimizer.warmup_fraction"),
    "warmup_proportion": _renamed("AgileRL", "optimizer.warmup_fraction"),
    "warmup_steps": _renamed("TRL", "optimizer.num_warmup_steps"),
    "lr_scheduler_type": Foreign(
        "TRL", ("optimizer.schedule",),
        {"constant": 'optimizer.schedule = "constant"',
         "linear": 'optimizer.schedule = "linear", optimizer.min_lr_fraction = 0.0',
         "cosine": 'optimizer.schedule = "cosine", optimizer.min_lr_fraction = 0.0'},
    ),
    "cosine_lr_schedule_config": Foreign(
        "AgileRL", note='write optimizer.schedule = "cosine" and optimizer.warmup_fraction = warmup_proportion'
    ),
    # lengths and sampling
    "max_completion_length": _renamed(
        "TRL", "rollout.max_output_tokens", "ours is per turn; rollout.max_model_len bounds the episode"
    ),
    "response_length": _renamed("ROLL", "rollout.max_output_tokens"),
    "max_completion_tokens": _renamed("the hosted trainer's old form", "rollout.max_output_tokens"),
    "max_new_tokens": _renamed("transformers", "rollout.max_output_tokens"),
    "max_prompt_length": Foreign(
        "TRL", note="prompts are not cut; rollout.max_model_len bounds prompt and answers together"
    ),
    "prompt_length": Foreign(
        "ROLL", note="prompts are not cut; rollout.max_model_len bounds prompt and answers together"
    ),
    "sequence_length": _renamed("ROLL", "rollout.max_model_len"),
    "max_seq_length": _renamed("Unsloth", "rollout.max_model_len"),
    "hf_generate_chunk_size": _renamed("AgileRL", "rollout.max_concurrent_rollouts"),
    "seed_count": _renamed("others", "evaluation.instances"),
    # model
    "model_name": _renamed("stateset-agents", "model.base"),
    "model_name_or_path": _renamed("TRL", "model.base"),
    "use_lora": Foreign(
        "stateset-agents", ("model.trainer_mode",),
        {True: 'model.trainer_mode = "lora"', False: 'model.trainer_mode = "full"'},
    ),
    "use_4bit": Foreign(
        "stateset-agents", ("model.trainer_mode",), {True: 'model.trainer_mode = "qlora"', False: "nothing: it is off"}
    ),
    "load_in_4bit": Foreign(
        "Unsloth", ("model.trainer_mode",), {True: 'model.trainer_mode = "qlora"', False: "nothing: it is off"}
    ),
    "use_8bit": Foreign(
        "stateset-agents", ("model.quantization",),
        {True: 'model.quantization = "int8", with model.trainer_mode = "qlora"', False: "nothing: it is off"},
    ),
    "lora_r": _renamed("stateset-agents", "training.lora.r"),
    "lora_alpha": _renamed("stateset-agents", "training.lora.alpha"),
    "lora_dropout": _renamed("stateset-agents", "training.lora.dropout"),
    "lora_target_modules": _renamed("stateset-agents", "training.lora.target_modules"),
    "merge_lora_configs": Foreign(
        "AgileRL", ("training.lora.on_mismatch",),
        {True: 'training.lora.on_mismatch = "merge"', False: "nothing: a mismatch is an error by default"},
    ),
    "use_liger_loss": Foreign(
        "AgileRL", ("model.liger_kernels",), {True: "model.liger_kernels = true", False: "nothing: it is off"}
    ),
    "use_liger_kernel": _renamed("TRL", "model.liger_kernels"),
    "torch_compiler": Foreign("AgileRL", note="write model.torch_compile = true"),
    "torch_dtype": _renamed("transformers", "model.dtype"),
    "bf16": Foreign(
        "TRL", ("model.dtype",), {True: 'model.dtype = "bfloat16" (with lora)', False: "nothing: it is off"}
    ),
    "cast_logprobs_to_fp32": Foreign("AgileRL", note="logprobs are always computed in float32: remove it"),
    "use_fused_linear_logprobs": Foreign(
        "AgileRL", note="logprobs are always computed in chunks of training.scoring_chunk_tokens: remove it"
    ),
    "reduce_memory_peak": Foreign("AgileRL", note="it has no effect there either: remove it"),
    # recording
    "logging_steps": _renamed("TRL", "training.log_interval"),
    "save_steps": _renamed("TRL", "training.checkpoint_every_n_iters"),
    "eval_steps": _renamed("TRL", "evaluation.every_n_iters"),
    "evaluation_interval": _renamed("AgileRL", "evaluation.every_n_iters"),
    "output_dir": Foreign("TRL", ("model.label",), note="a run is written into run.folder / model.label"),
    "log_completions": Foreign(
        "TRL", ("run.log_episodes_every_n_iters",),
        {True: "run.log_episodes_every_n_iters = 1", False: "run.log_episodes_every_n_iters = 0"},
    ),
    # whole sections of the hosted trainer's older forms
    "smoke": Foreign("the hosted trainer", note="settings of its smoke command: remove it"),
    "data": Foreign("the hosted trainer's old form", note="write what the app reads into [rollout.env_config]"),
    "inference_url": Foreign("the hosted trainer's old form", note="each rollout is told its own URL: remove it"),
    "hyperparams": Foreign("the hosted trainer's old form", note="write [training] and [loss]"),
    "step_rewards": Foreign("the hosted trainer's old form", note="write training.step_rewards_mode and so on"),
    "checkpoint": Foreign("the hosted trainer's old form", note="write training.checkpoint_every_n_iters"),
    "verifier": Foreign("the hosted trainer's later form", note="write [judge]"),
    # images
    **dict.fromkeys(
        ("supports_vision", "max_images_per_message", "limit_mm_per_prompt"),
        Foreign("the hosted trainer", note="policies here read and write text, so that images are refused: remove it"),
    ),
}  # fmt: skip

_SECRET = re.compile(r"(^|_)(api_?keys?|secret(_key)?|password|passwd|(access|auth|bearer|hf|hub|wandb)_?token)$", re.I)
_SECRET_VALUE = re.compile(r"(sk|gsk|hf|xai|ghp|wandb)[-_][A-Za-z0-9_-]{16,}|AIza[A-Za-z0-9_-]{20,}")
_VARIABLES = {
    "openai": "OPENAI_API_KEY",
    "groq": "GROQ_API_KEY",
    "gemini": "GEMINI_API_KEY",
    "wandb": "WANDB_API_KEY",
    "tracking": "WANDB_API_KEY",
    "hf": "HF_TOKEN",
    "hub": "HF_TOKEN",
    "environment": "ENVIRONMENT_API_KEY",
    "task": "ENVIRONMENT_API_KEY",
    "services": "ENVIRONMENT_API_KEY",
    "judge": "JUDGE_API_KEY",
}


def explain(key: str, value: Any) -> str | None:
    """What to write instead of an unknown key with this value (Any: as read); None: it is no known name.

    >>> explain("loss.epsilon_high", 4e-4)
    'epsilon_high is what TRL calls it: write loss.clip_high = 0.0004'
    """
    name = key.rsplit(".", 1)[-1]
    foreign = FOREIGN.get(name)
    if foreign is None:
        return None
    text = f"{name} is what {foreign.origin} calls it: "
    if not foreign.keys:
        return f"{name} is of {foreign.origin}: {foreign.note}"
    is_known = isinstance(value, str | bool | None) and value in foreign.values
    if is_known:
        instead = foreign.values[value]
    elif foreign.values or isinstance(value, Mapping | list | tuple) or foreign.origin == "":
        instead = " and ".join(foreign.keys)
    else:
        instead = ", ".join(f"{ours} = {show(value)}" for ours in foreign.keys)
    return text + f"write {instead}" + (f" ({foreign.note})" if foreign.note else "")


def secret_problem(key: str, value: Any) -> str | None:
    """Why a key with this value (Any: as read) must not be in a file; None: it is no secret. Never shows the value.

    >>> secret_problem("judge.options.openai_api_key", "...").rsplit(" ", 1)[-1]
    'OPENAI_API_KEY'
    """
    *above, name = key.lower().split(".")
    is_value = isinstance(value, str) and _SECRET_VALUE.fullmatch(value) is not None
    if not _SECRET.search(name) and not is_value:
        return None
    hints = [variable for hint, variable in _VARIABLES.items() if hint in name]
    hints += [variable for part in reversed(above) for hint, variable in _VARIABLES.items() if hint in part]
    variable = hints[0] if hints else re.sub(r"\W", "_", name).upper()
    return (
        "a secret does not belong into a configuration, which is copied beside the run: set the environment variable "
        f"{variable}"
    )

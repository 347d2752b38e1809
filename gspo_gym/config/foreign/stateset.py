"""stateset-agents' GSPOConfig, all fields of it; tests/foreign compares them with the installed package, 0.69.0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gspo_gym.config.foreign.draft import (
    LORA_DEFAULTS,
    OF_BATCHES,
    POLICY,
    REPORTING,
    TRAINER_ARGUMENTS,
    Draft,
    Row,
    System,
    by,
    count,
    number,
    revision,
    take_clip,
    take_single_step_note,
    take_sinks,
    take_truncation,
    with_defaults,
    without,
)


def _take_name(draft: Draft) -> None:
    name = draft.get("model_name")
    draft.set("model.base", "openai-community/gpt2" if name == "gpt2" else name)  # its whole name on the hub


def _take_variety(draft: Draft) -> None:
    is_token = draft.flag("use_gspo_token")
    draft.set("algorithm.variety", "gspo_token" if is_token else "gspo")
    if is_token:
        draft.set("advantages.level", "turn")
        draft.note("use_gspo_token: every token has its episode's advantage there; here each turn has its own")
    take_clip(
        draft, draft.require_number("clip_range_left"), draft.require_number("clip_range_right"), is_sequence=True
    )


def _take_kl(draft: Draft) -> None:
    beta, has_reference = draft.require_number("beta"), draft.flag("use_reference_model")
    if not has_reference:
        draft.leave_out("beta", "acts with use_reference_model only, there: write loss.kl_coef for a KL term")
    elif beta:
        draft.set("loss.kl_coef", beta)
        draft.note(
            f"beta = {beta:g} weighs the k3 estimate of an episode's mean log-ratio there, and the mean of its tokens' "
            "estimates here, which is much larger: choose it anew"
        )


def _take_tracking(draft: Draft) -> None:
    sinks, project = draft.names("report_to"), draft.get("wandb_project")
    if project is None and "wandb" in sinks:
        draft.note("report_to = 'wandb' logs nothing without wandb_project, there as here")
        sinks.remove("wandb")
    take_sinks(draft, sinks)
    draft.set("tracking.wandb_project", project)
    draft.set("tracking.wandb_tags", draft.names("wandb_tags") or None)
    draft.set("tracking.run_name", draft.first("run_name", "wandb_run_name"))


def _take_batches(draft: Draft) -> None:
    episodes = draft.require_count("num_generations") * draft.require_count("generations_per_iteration")
    draft.set("training.group_size", draft.require_count("num_generations"))
    draft.set("rollout.episodes_per_batch", episodes)
    updates = draft.require_count("num_iterations")
    draft.set("training.update_epochs", updates)
    draft.set("training.batch_size", episodes)  # its trainer takes no smaller batches
    take_single_step_note(draft, num_steps=updates)


def _take_rate(draft: Draft) -> None:
    draft.set("training.learning_rate", draft.require_number("learning_rate"))
    draft.set("optimizer.schedule", "cosine")  # the only one of its trainer
    draft.set("optimizer.min_lr_fraction", 0.0)


def _take_model(draft: Draft) -> None:
    r, alpha, dropout = draft.count("lora_r"), draft.number("lora_alpha"), draft.number("lora_dropout")
    modules = draft.names("lora_target_modules")
    in_halves = {"float16": draft.flag("fp16"), "bfloat16": draft.flag("bf16")}
    dtype = next((name for name, is_on in in_halves.items() if is_on), None)
    in_8_bits, in_4_bits, is_lora = draft.flag("use_8bit"), draft.flag("use_4bit"), draft.flag("use_lora")
    if in_4_bits or in_8_bits:
        draft.set("model.trainer_mode", "qlora")
        draft.set("model.quantization", "int8" if in_8_bits else None)
    elif is_lora:
        draft.set("model.trainer_mode", "lora")
    else:
        draft.set("model.trainer_mode", "full")
        if dtype is not None:
            draft.note(f"{dtype} weights are trained there; weights that are trained stay float32 here")
        return
    draft.set("model.dtype", dtype)
    draft.set("training.lora.r", r)
    draft.set("training.lora.alpha", alpha)
    draft.set("training.lora.dropout", dropout)
    draft.set("training.lora.target_modules", modules or _modules_of(draft.model or str(draft.get("model_name"))))


def _modules_of(model: str) -> list[str]:
    """Return the modules that it adapts if none are named, which follow the model's name."""
    name = model.lower()
    if "gpt2" in name:
        return ["c_attn", "c_proj"]
    return ["q_proj", "k_proj", "v_proj", "o_proj"] if "llama" in name or "qwen" in name else ["q_proj", "v_proj"]


def _take_sampling(draft: Draft) -> None:
    """Set the sampling of rollouts, of which its vLLM backend takes temperature and top_p only."""
    if not draft.flag("use_vllm"):
        take_truncation(draft)
        return
    take_truncation(draft, "top_p")
    for key in ("top_k", "min_p", "repetition_penalty"):
        draft.leave_out(key, "without effect with use_vllm, there")


def _take_vllm(draft: Draft) -> None:
    settings = {
        "vllm.gpu_memory_utilization": draft.number("vllm_gpu_memory_utilization"),
        "vllm.tensor_parallel_size": draft.count("vllm_tensor_parallel_size"),
    }
    if draft.flag("use_vllm"):
        draft.set("rollout.engine", "vllm")
        for ours, value in settings.items():
            draft.set(ours, value)
        return
    for key in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_len"):
        draft.leave_out(key, "acts with use_vllm only")


def _take_lengths(draft: Draft) -> None:
    prompt, completion = draft.require_count("max_prompt_length"), draft.require_count("max_completion_length")
    draft.set("rollout.max_output_tokens", completion)
    length = draft.count("vllm_max_model_len") if draft.flag("use_vllm") else None
    draft.set("rollout.max_model_len", length or prompt + completion)
    draft.note(f"max_prompt_length = {prompt}: a longer prompt is not cut here; it counts towards max_model_len")


_IGNORED = "its GSPO trainer ignores this key"
_OTHER_TRAINERS = f"belongs to its other trainers: {_IGNORED}"
_CONTINUAL = "continual learning belongs to its other trainers"
_OUTER = f"{_IGNORED}: num_outer_iterations counts"
_OBJECTIVE = "has no counterpart: write algorithm.variety, [loss] and [advantages]"
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, str]] = {
    "trust_remote_code": (False, "code of a model's folder is never run here"),
    **without(_OUTER, "max_steps_per_episode", num_episodes=1000, num_epochs=1),
    **without(_OBJECTIVE, "objective", "objective_overrides"),
    **without(
        _OTHER_TRAINERS, batched_rollouts=True, nonfinite_grad_policy="raise", max_consecutive_nonfinite_skips=3,
        generation_batch_size=4, rollout_concurrency=1, use_cpu=False, auto_adjust=True, early_stopping=False,
        patience=50, gamma=0.99, gae_lambda=0.95, advantage_normalization=True, baseline_type="group_mean",
        clip_ratio=0.2, seq_clip_ratio=3e-4, value_clip=0.2, num_gradient_updates=1, rollout_sync=True,
        old_logprobs_source="recompute", allow_sequence_fallback=False, allow_missing_sampler_logprobs=False,
        zero_signal_patience=5, disable_dropout=False,
    ),
    **without(
        f"{_IGNORED}: each of its steps is over the full batch; write training.batch_size",
        "batch_size", mini_batch_size=1, per_device_train_batch_size=1,
    ),
    "gradient_accumulation_steps": (4, f"{_IGNORED}: each of its steps is over the full batch"),
    "lr_scheduler_type": ("cosine", f"{_IGNORED}: its schedule is a cosine to 0; write optimizer.schedule"),
    "reward_clip": (10.0, f"{_IGNORED}: it clips no rewards; write rewards.clip"),
    "logging_steps": (10, f"{_IGNORED}; write training.log_interval"),
    "seed": (42, f"{_IGNORED}: it seeds nothing; write run.seed"),
    "entropy_coef": (0.01, f"{_OTHER_TRAINERS}; write loss.entropy_coef"),
    "save_total_limit": (3, f"{_OTHER_TRAINERS}; write training.keep_last"),
    **without(f"{_OTHER_TRAINERS}; write [evaluation]", eval_steps=50, eval_num_generations=4),
    **without(
        _CONTINUAL, "task_schedule", continual_strategy="none", replay_buffer_size=2000, replay_ratio=0.5,
        replay_min_size=100, replay_sampling="uniform", replay_storage="reservoir", continual_kl_beta=0.0,
        ewc_lambda=0.0, ewc_num_samples=64, ewc_decay=0.9, task_id_key="task_id", task_switch_steps=0,
    ),
    **without(
        "an environment takes the data set's place", "max_examples", dataloader_num_workers=0,
        dataloader_pin_memory=True, eval_split_size=0.1, stratify_by_task=True, data_format="jsonl",
        remove_unused_columns=False,
    ),
    **without(
        "an evaluation is [evaluation] here", run_post_eval=True, post_eval_samples=5, post_eval_detailed=True
    ),
    **without("wandb's own settings are its environment variables here", "wandb_entity", "wandb_notes"),
    **without(
        "how a run is started belongs to the command line here", "resume_from_checkpoint", overwrite_output_dir=True,
        disable_tqdm=False,
    ),
    "compute_cost_per_hour": (None, "has no counterpart"),
    "vllm_quantization": (None, "has no counterpart: the engine samples with the weights that are trained"),
    "vllm_enable_prefix_caching": (True, "always so here"),
    "vllm_enable_chunked_prefill": (True, "vLLM chooses"),
}  # fmt: skip
_EPISODES = "rollout.episodes_per_batch"
_VLLM: Mapping[str, Any] = {"use_vllm": True}
_LORA_KEYS = tuple(f"training.lora.{name}" for name in LORA_DEFAULTS)
ROWS: Mapping[str, Row] = {
    "model_revision": revision(),
    "model_name": by(_take_name, "model.base", also=("training.lora.target_modules",), default="gpt2"),
    "use_gspo_token": by(
        _take_variety, "algorithm.variety", values={True: "gspo_token", False: "gspo"}, also=("advantages.level",),
        note="each turn has its own advantage",
    ),
    "clip_range_left": by(_take_variety, "loss.clip_low", default=3e-4),
    "clip_range_right": by(_take_variety, "loss.clip_high", default=4e-4),
    **with_defaults(
        {key: row for key, row in TRAINER_ARGUMENTS.items() if key not in WITHOUT_COUNTERPART},
        adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.01, max_grad_norm=1.0, warmup_ratio=0.1,
        gradient_checkpointing=True, save_steps=100,
    ),
    "learning_rate": by(
        _take_rate, "training.learning_rate", default=5e-6,
        note="its schedule is always a cosine to 0: optimizer.schedule and min_lr_fraction",
    ),
    "output_dir": replace(REPORTING["output_dir"], default="./outputs"),
    "report_to": by(_take_tracking, "tracking.report_to", note="wandb asks for wandb_project", default="wandb"),
    "run_name": by(_take_tracking, "tracking.run_name"),
    "wandb_run_name": by(_take_tracking, "tracking.run_name"),
    "wandb_project": by(_take_tracking, "tracking.wandb_project", also=("tracking.report_to",)),
    "wandb_tags": by(_take_tracking, "tracking.wandb_tags"),
    "num_generations": by(_take_batches, "training.group_size", also=(_EPISODES, "training.batch_size"), default=4),
    "generations_per_iteration": by(
        _take_batches, _EPISODES, also=("training.batch_size",), note=OF_BATCHES, default=100
    ),
    "num_iterations": by(_take_batches, "training.update_epochs", default=1),
    "num_outer_iterations": count("training.iterations_per_epoch", default=1),
    "use_lora": by(
        _take_model, "model.trainer_mode", values={True: "lora", False: "full"}, also=(*_LORA_KEYS, "model.dtype"),
        default=True,
    ),
    "use_4bit": by(_take_model, "model.trainer_mode", values={True: "qlora"}),
    "use_8bit": by(_take_model, "model.quantization", "model.trainer_mode", values={True: ("int8", "qlora")}),
    **{
        f"lora_{name}": by(_take_model, f"training.lora.{name}", default=default)
        for name, default in LORA_DEFAULTS.items()
    },
    "bf16": by(
        _take_model, "model.dtype", values={True: "bfloat16"}, note="of a LoRA's base: trained weights stay float32",
        default=True,
    ),
    "fp16": by(
        _take_model, "model.dtype", values={True: "float16"}, note="of a LoRA's base: trained weights stay float32"
    ),
    **{name: POLICY[name] for name in ("system_prompt", "chat_template_kwargs")},
    "temperature": number("rollout.temperature", default=0.7),
    "top_p": by(_take_sampling, "rollout.top_p", default=0.9),
    "top_k": by(_take_sampling, "rollout.top_k", default=50),
    "min_p": by(_take_sampling, "rollout.min_p"),
    "repetition_penalty": by(_take_sampling, "rollout.repetition_penalty", default=1.1),
    "use_vllm": by(
        _take_vllm, "rollout.engine", values={True: "vllm"}, default=False,
        also=(
            "vllm.gpu_memory_utilization", "vllm.tensor_parallel_size", "rollout.top_k", "rollout.repetition_penalty",
        ),
    ),
    "vllm_gpu_memory_utilization": by(_take_vllm, "vllm.gpu_memory_utilization", beside=_VLLM, default=0.85),
    "vllm_tensor_parallel_size": by(_take_vllm, "vllm.tensor_parallel_size", beside=_VLLM, default=1),
    "vllm_max_model_len": by(_take_lengths, "rollout.max_model_len", beside=_VLLM),
    "rescore_old_log_probs": Row(
        ("correction.old_logprobs",), lambda draft, theirs: None if draft.flag(theirs) else "rollout",
        values={False: "rollout"}, default=True,
    ),
    "max_completion_length": by(
        _take_lengths, "rollout.max_output_tokens", also=("rollout.max_model_len",), default=256
    ),
    "max_prompt_length": by(_take_lengths, "rollout.max_model_len", note="prompts are not cut", default=256),
    "beta": by(
        _take_kl, "loss.kl_coef", beside={"use_reference_model": True}, default=0.0,
        note="our estimate of the KL is much larger: choose it anew",
    ),
    "use_reference_model": by(
        _take_kl, "loss.kl_coef", beside={"beta": 0.01},
        advice={True: "loss.kl_coef = beta", False: "nothing: loss.kl_coef is 0 by default"}, default=False,
    ),
}  # fmt: skip
STATESET = System("stateset-agents", ROWS, WITHOUT_COUNTERPART)

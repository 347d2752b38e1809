"""TRL's GRPOConfig with the ModelConfig and ScriptArguments of its scripts, and Unsloth's, which is the same class.

Read in TRL 1.16.0 and Unsloth 2026.10; their defaults are in `config/foreign/trl.py`.

What TRL 1.16.0 takes (GRPOConfig, ModelConfig, ScriptArguments) and does where a file is silent.

Read from the package's dataclasses, and from those of transformers 5.19 that they extend; tests/foreign compares them
with the installed packages. Unsloth's configuration is the same class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gspo_gym.config.foreign.draft import (
    PEFT_MODULES,
    Draft,
    take_aggregation,
    take_clip,
    take_policy_config,
    take_reporting,
    take_sampling,
    take_single_step_note,
    take_trainer_arguments,
)

_VARIETIES = {"token": "grpo", "sequence": "gspo", "sequence_token": "gspo_token"}
_AGGREGATIONS = {
    **{name: name for name in ("grpo", "bnpo", "dr_grpo", "dapo")},
    "luspo": "seq-mean-token-sum",  # the mean over episodes of the sum over their tokens
}
_OTHER_SURROGATES = {  # loss types whose surrogate is not here, and the aggregation that they have
    "cispo": "dapo",
    "vespo": "dapo",
    "sapo": "grpo",
}
_SCALES = {"group": "group", True: "group", "batch": "batch", "none": "none", False: "none"}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "auto": None}
_CORRECTIONS = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("trajectory", "truncate"),
    "sequence_mask": ("trajectory", "mask"),
}
_NO_BOUND = 1e6  # a ratio that no episode reaches


def translate(draft: Draft) -> None:
    """Read every key of the three classes out of the draft and set ours."""
    take_trainer_arguments(draft)
    take_reporting(draft)
    take_policy_config(draft)
    _take_model(draft)
    _take_batches(draft)
    _take_objective(draft)
    _take_lengths(draft)
    take_sampling(draft)
    _take_reference(draft)
    _take_vllm(draft)
    if draft.flag("bf16"):
        draft.note('bf16: autocast has no counterpart; model.dtype = "bfloat16" stores a LoRA\'s base so')
    if draft.flag("torch_compile"):
        draft.set("model.torch_compile", True)
    if any([draft.flag("use_liger_kernel"), draft.flag("use_liger_loss")]):  # a list, so that both are read
        draft.set("model.liger_kernels", True)
    draft.set("run.log_episodes_every_n_iters", 1 if draft.flag("log_completions") else None)
    turns = draft.count("max_tool_calling_iterations")
    if turns is not None:
        draft.set("rollout.max_turns", turns + 1)
        draft.note(f"max_tool_calling_iterations = {turns}: so many answers with tool calls, and one after them")
    evaluations = draft.number("eval_steps")
    if evaluations is not None and evaluations >= 1:
        draft.set("evaluation.every_n_iters", int(evaluations))
        draft.note("eval_steps counts optimizer steps there, and iterations here")
    for key, (default, why) in WITHOUT_COUNTERPART.items():
        draft.leave_out(key, why, default=default)


def _take_model(draft: Draft) -> None:
    """ModelConfig: the base, its dtype, quantization and adapter."""
    draft.set("model.base", draft.get("model_name_or_path"))
    r, alpha, dropout = draft.count("lora_r"), draft.number("lora_alpha"), draft.number("lora_dropout")
    modules, dtype = draft.get("lora_target_modules"), draft.choice("dtype", _DTYPES)
    in_4_bits, in_8_bits = draft.flag("load_in_4bit"), draft.flag("load_in_8bit")
    if not draft.flag("use_peft"):
        draft.set("model.trainer_mode", "full")
        if in_4_bits or in_8_bits:
            draft.note("load_in_4bit and load_in_8bit: quantized weights cannot be trained without use_peft; left out")
        if dtype is not None and dtype != "float32":
            draft.note(f"dtype = {dtype!r}: weights that are trained stay float32 here")
        return
    draft.set("model.trainer_mode", "qlora" if in_4_bits or in_8_bits else "lora")
    draft.set("model.quantization", "int8" if in_8_bits else None)
    draft.set("model.dtype", None if dtype == "float32" else dtype)
    draft.set("training.lora.r", r)
    draft.set("training.lora.alpha", alpha)
    draft.set("training.lora.dropout", dropout)
    draft.set_modules(modules, PEFT_MODULES)


def _take_batches(draft: Draft) -> None:
    """Trajectories per forward, per optimizer step, and per rollout batch."""
    micro = draft.require_count("per_device_train_batch_size")
    accumulated = draft.require_count("gradient_accumulation_steps")
    generation = draft.count("generation_batch_size")
    micro_per_batch = draft.count("steps_per_generation") or accumulated
    episodes = generation if generation is not None else micro * micro_per_batch
    updates = draft.require_count("num_iterations")
    draft.set("training.group_size", draft.count("num_generations"))
    draft.set("training.batch_size", micro)
    draft.set("training.gradient_accumulation_steps", accumulated)
    draft.set("training.update_epochs", updates)
    draft.set("rollout.episodes_per_batch", episodes)
    steps = max(1, episodes // (micro * accumulated)) * updates
    take_single_step_note(draft, num_steps=steps)
    max_steps = draft.count("max_steps")
    if max_steps is not None and max_steps > 0:
        draft.set("training.iterations_per_epoch", math.ceil(max_steps / steps))
    epochs = draft.number("num_train_epochs")
    if epochs is not None and not (max_steps is not None and max_steps > 0):
        draft.set("training.num_epochs", max(1, round(epochs)))
        draft.note(
            f"num_train_epochs = {epochs:g} counts passes over a data set; here an epoch is "
            "training.iterations_per_epoch batches, which --iterations sets"
        )


def _take_objective(draft: Draft) -> None:
    """Ratio, clip, aggregation, advantages."""
    variety = draft.choice("importance_sampling_level", _VARIETIES)
    is_sequence = variety != "grpo"
    draft.set("algorithm.variety", variety)
    if variety == "gspo":
        draft.note(
            "the ratio has a stop-gradient form here; value and gradient are the same for one advantage per episode"
        )
    low, high = draft.require_number("epsilon"), draft.number("epsilon_high")
    kind = draft.get("loss_type")
    if kind in _OTHER_SURROGATES:
        draft.leave_out("loss_type", "its surrogate is not here; the clipped one of PPO takes its place")
        draft.leave_out("epsilon_high", f"bounds the weights of {kind}, and is no distance of a clip from 1")
        high = None
    take_clip(draft, low, low if high is None else high, is_sequence=is_sequence)
    draft.set("loss.dual_clip", draft.number("delta"))
    aggregation = _OTHER_SURROGATES.get(kind) or draft.choice("loss_type", _AGGREGATIONS)
    take_aggregation(draft, aggregation, is_sequence=is_sequence, norm_length=draft.count("max_completion_length"))
    scale = draft.choice("scale_rewards", _SCALES)
    if aggregation == "dr_grpo" and draft.given.get("scale_rewards") is None:
        scale = "none"
        draft.note("loss_type = 'dr_grpo': advantages are not divided by a std (arXiv 2503.20783; Unsloth forces it)")
    draft.set("advantages.scale", scale)
    if draft.flag("mask_truncated_completions"):
        draft.set("rewards.overlong", "mask")
    entropy = draft.require_number("entropy_coef")
    draft.set("loss.entropy_coef", entropy or None)
    if entropy:
        draft.note(f"entropy_coef = {entropy:g}: the mean over tokens there, and aggregated as the loss is here")
    draft.set("correction.off_policy_threshold", draft.number("off_policy_mask_threshold"))


def _take_lengths(draft: Draft) -> None:
    prompt, completion = draft.count("max_prompt_length"), draft.require_count("max_completion_length")
    draft.set("rollout.max_output_tokens", completion)
    draft.set("rollout.max_model_len", completion + (prompt or 1024))
    draft.note(
        f"max_completion_length = {completion} is one budget for all turns and their tool results there, and the most "
        "tokens of one turn here; rollout.max_model_len bounds the whole episode"
    )
    if prompt is not None:
        draft.note(f"max_prompt_length = {prompt}: a longer prompt is not cut here; it counts towards max_model_len")


def _take_reference(draft: Draft) -> None:
    beta, is_weighted = draft.require_number("beta"), draft.flag("use_bias_correction_kl")
    draft.set("loss.kl_coef", beta or None)
    if beta and is_weighted:
        draft.set("loss.kl_importance_weighted", True)
    if not draft.flag("sync_ref_model"):
        for key in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
            draft.leave_out(key, "acts with sync_ref_model only")
        return
    mixup = draft.number("ref_model_mixup_alpha")
    draft.set("reference.update_every_n_iters", draft.count("ref_model_sync_steps") or 512)
    draft.set("reference.source", "copy")
    draft.note("ref_model_sync_steps counts optimizer steps there and iterations here")
    if mixup is not None and mixup < 1:
        draft.note(f"ref_model_mixup_alpha = {mixup:g}: the reference becomes the policy here, without mixing")


def _take_vllm(draft: Draft) -> None:
    """Where it samples, and what is done about a sampler whose logprobs are not quite the trainer's."""
    mode, host = draft.get("vllm_mode"), draft.get("vllm_server_host")
    port, url = draft.count("vllm_server_port"), draft.get("vllm_server_base_url")
    settings = {
        "vllm.gpu_memory_utilization": draft.number("vllm_gpu_memory_utilization"),
        "vllm.tensor_parallel_size": draft.count("vllm_tensor_parallel_size"),
        "vllm.sleep_while_learning": draft.flag("vllm_enable_sleep_mode") or None,
    }
    length = draft.count("vllm_max_model_length")
    uses_vllm = draft.flag("use_vllm")
    _take_correction(draft, acts=uses_vllm)
    if not uses_vllm:
        for key in [key for key in draft.given if key.startswith("vllm_") and key not in WITHOUT_COUNTERPART]:
            draft.leave_out(key, "acts with use_vllm only")
        return
    draft.set("rollout.engine", "vllm")
    draft.set("rollout.max_model_len", length)
    if mode == "server":
        host = "127.0.0.1" if host == "0.0.0.0" else host  # every address is none to call
        draft.set("services.engine_urls", [url or f"http://{host}:{port}"])
        draft.note("vllm_mode = 'server': start it with `gspo-gym serve --engine vllm`, which takes our weights")
        return
    for ours, value in settings.items():
        draft.set(ours, value)


def _take_correction(draft: Draft, *, acts: bool) -> None:
    level, how = draft.choice("vllm_importance_sampling_mode", _CORRECTIONS)
    cap, low = draft.number("vllm_importance_sampling_cap"), draft.number("vllm_importance_sampling_clip_min")
    high = draft.number("vllm_importance_sampling_clip_max")
    if draft.is_null("vllm_importance_sampling_clip_max"):
        high = _NO_BOUND
    high = high if cap is None else cap  # the older name wins there, too
    if not (acts and draft.flag("vllm_importance_sampling_correction")):
        return
    draft.set("correction.level", level)
    draft.set("correction.mode", how)
    draft.set("correction.high", high)
    if how == "mask":
        draft.set("correction.low", low or 0.0)
    else:
        draft.leave_out("vllm_importance_sampling_clip_min", "a ratio that is truncated has no lower bound here")
    if level == "trajectory":
        draft.note(
            "vllm_importance_sampling_mode: a sequence's weight is the exp of a sum there and the geometric mean "
            "here (the product leaves out nearly every long episode)"
        )


# Of keys that decide something here.
DEFAULTS: Mapping[str, Any] = {
    "importance_sampling_level": "token",
    "loss_type": "dapo",
    "epsilon": 0.2,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "ref_model_sync_steps": 512,
    "ref_model_mixup_alpha": 0.6,
    "entropy_coef": 0.0,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "scale_rewards": "group",
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "learning_rate": 1e-6,
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "seed": 42,
    "logging_steps": 10,
    "save_steps": 500,
    "gradient_checkpointing": True,
    "log_completions": False,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    # ModelConfig
    "dtype": "float32",
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
}
_TRAINER = "belongs to transformers' Trainer"
_LOSS = "belongs to a loss_type that is not here"
_ENTROPY = "belongs to use_adaptive_entropy, which is not here: loss.entropy_coef is constant"
_DATA = "an environment takes the data set's place; the bundled one Dataset reads a file or a hub data set"
# Arguments of transformers' Trainer that are None, false (or 0), and true if nobody sets them.
_ABSENT = (
    "optim_args", "optim_target_modules", "gradient_checkpointing_kwargs", "torch_compile_backend",
    "torch_compile_mode", "liger_kernel_config", "neftune_noise_alpha", "torch_empty_cache_steps", "disable_tqdm",
    "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_accumulation_steps",
    "save_total_limit", "hub_token", "hub_private_repo", "hub_model_id", "hub_revision", "metric_for_best_model",
    "greater_is_better", "data_seed", "accelerator_config", "parallelism_config", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "label_names", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "fsdp", "fsdp_config", "deepspeed",
    "resume_from_checkpoint",
)  # fmt: skip
_OFF = (
    "label_smoothing_factor", "bf16_full_eval", "fp16_full_eval", "use_cache", "auto_find_batch_size",
    "logging_first_step", "eval_delay", "prediction_loss_only", "eval_on_start", "eval_use_gather_object",
    "batch_eval_metrics", "save_only_model", "save_on_each_node", "enable_jit_checkpoint", "push_to_hub",
    "hub_always_push", "load_best_model_at_end", "ignore_data_skip", "restore_callback_states_from_checkpoint",
    "full_determinism", "use_cpu", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_persistent_workers", "remove_unused_columns", "do_train", "do_eval", "do_predict",
)  # fmt: skip
_ON = (
    "average_tokens_across_devices", "log_on_each_node", "logging_nan_inf_filter", "eval_do_concat_batches",
    "dataloader_pin_memory", "dataloader_in_order", "skip_memory_metrics",
)  # fmt: skip
# Of keys without a counterpart: what they are if nobody sets them, and why there is none.
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, str]] = {
    "top_entropy_quantile": (1.0, "has no counterpart: all sampled tokens are learned from"),
    "reward_weights": (None, "has no counterpart: an environment adds its own reward terms up"),
    "multi_objective_aggregation": ("sum_then_normalize", "has no counterpart: an environment's terms are summed"),
    "shuffle_dataset": (True, "has no counterpart: tasks are drawn by seed"),
    "cast_lm_head_to_fp32": (False, "logprobs are always computed in float32"),
    "fp16": (False, "16-bit floats with a loss scale are not supported; use bfloat16"),
    "tf32": (None, "has no counterpart: set it in torch"),
    "disable_dropout": (False, "only an adapter's dropout acts here, with the same masks in both passes"),
    "router_aux_loss_coef": (None, "has no counterpart: there is no auxiliary loss of routers"),
    "use_adaptive_entropy": (False, _ENTROPY),
    "entropy_coef_min": (0.0, _ENTROPY),
    "entropy_coef_max": (1.0, _ENTROPY),
    "entropy_coef_delta": (0.005, _ENTROPY),
    "entropy_target": (0.2, _ENTROPY),
    "sapo_temperature_neg": (1.05, _LOSS),
    "sapo_temperature_pos": (1.0, _LOSS),
    "vespo_k_pos": (2.0, _LOSS),
    "vespo_lambda_pos": (3.0, _LOSS),
    "vespo_k_neg": (3.0, _LOSS),
    "vespo_lambda_neg": (2.0, _LOSS),
    "generation_kwargs": (None, "has no counterpart: set the keys of [rollout]"),
    "num_generations_eval": (None, "an evaluation plays each of evaluation.seeds once"),
    "cache_implementation": (None, "belongs to transformers' generate"),
    "use_transformers_paged": (False, "belongs to transformers' generate"),
    "use_transformers_continuous_batching": (False, "always so here"),
    "transformers_continuous_batching_config": (None, "belongs to transformers' generate"),
    "pad_to_multiple_of": ("auto", "rows are padded to the longest of their micro-batch"),
    "ds3_gather_for_generation": (True, "belongs to DeepSpeed"),
    "model_init_kwargs": (None, "belongs to transformers' from_pretrained; model.dtype and model.quantization choose"),
    "trust_remote_code": (False, "code of a model's folder is never run here"),
    "vllm_model_impl": ("vllm", "vLLM's own models are used"),
    "vllm_structured_outputs_regex": (None, "would sample from another distribution than the one that is scored"),
    "vllm_server_timeout": (240.0, "belongs to TRL's server"),
    "vllm_group_port": (51216, "belongs to TRL's server"),
    "log_multimodal": (True, "policies read text"),
    "num_completions_to_print": (None, "episodes are in the run's folder"),
    "log_unique_prompts": (False, "episodes are in the run's folder"),
    "log_completions_hub_repo": (None, "episodes are in the run's folder"),
    "lr_scheduler_kwargs": (None, "write optimizer.min_lr_fraction"),
    # ModelConfig and ScriptArguments
    "model_revision": ("main", "the hub's main revision is loaded: give a folder"),
    "attn_implementation": (None, "transformers chooses"),
    "lora_target_parameters": (None, "training.lora.target_modules names modules"),
    "lora_modules_to_save": (None, "an adapter is all that is trained"),
    "lora_task_type": ("CAUSAL_LM", "policies are causal language models"),
    "use_rslora": (False, "has no counterpart: an adapter's output is scaled by alpha / r"),
    "use_dora": (False, "has no counterpart"),
    "use_bnb_nested_quant": (False, "4-bit weights always have nested quantization here"),
    "bnb_4bit_quant_type": ("nf4", "4-bit weights are NF4 here"),
    "bnb_4bit_quant_storage": (None, "bitsandbytes chooses"),
    "dataset_name": (None, _DATA),
    "dataset_config": (None, _DATA),
    "dataset_train_split": ("train", _DATA),
    "dataset_test_split": ("test", _DATA),
    "dataset_streaming": (False, _DATA),
    "datasets": (None, _DATA),
    "streaming": (False, _DATA),
    "test_split_size": (None, _DATA),
    "reward_funcs": (None, "the environment rewards"),
    "reward_model_name_or_path": (None, "the environment rewards, or a [judge]"),
    "ignore_bias_buffers": (False, _TRAINER),
    # transformers.TrainingArguments
    **dict.fromkeys(_ABSENT, (None, _TRAINER)),
    **dict.fromkeys(_OFF, (False, _TRAINER)),
    **dict.fromkeys(_ON, (True, _TRAINER)),
    "logging_strategy": ("steps", _TRAINER),
    "save_strategy": ("steps", _TRAINER),
    "eval_strategy": ("no", "evaluations are always made, every evaluation.every_n_iters"),
    "per_device_eval_batch_size": (8, "rollout.max_concurrent_rollouts bounds what is played at once"),
    "include_num_input_tokens_seen": ("no", _TRAINER),
    "include_for_metrics": ([], _TRAINER),
    "log_level": ("passive", _TRAINER),
    "log_level_replica": ("warning", _TRAINER),
    "project": ("huggingface", "belongs to Trackio; write tracking.wandb_project"),
    "hub_strategy": ("every_save", _TRAINER),
    "train_sampling_strategy": ("random", _TRAINER),
    "length_column_name": ("length", _TRAINER),
    "ddp_timeout": (1800, _TRAINER),
    "debug": ("", _TRAINER),
    "local_rank": (-1, _TRAINER),
}  # fmt: skip

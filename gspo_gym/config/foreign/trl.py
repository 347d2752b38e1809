"""TRL's GRPOConfig with the ModelConfig and ScriptArguments of TRL's scripts, and Unsloth's GRPOConfig, the same class.

Keys and defaults are those of TRL 1.16.0, Unsloth 2026.10 and transformers 5.19, the base of TRL's dataclasses;
tests/foreign compares them with the installed packages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gspo_gym.config.foreign.draft import (
    LORA_DEFAULTS,
    POLICY,
    REPORTING,
    TRAINER_ARGUMENTS,
    Draft,
    Row,
    System,
    by,
    count,
    number,
    plain,
    revision,
    switch,
    take_aggregation,
    take_clip,
    take_kept,
    take_single_step_note,
    with_defaults,
    without,
)

_VARIETIES = {"token": "grpo", "sequence": "gspo", "sequence_token": "gspo_token"}
_AGGREGATIONS = {
    **{name: name for name in ("grpo", "bnpo", "dr_grpo", "dapo")},
    "luspo": "seq-mean-token-sum",  # the mean over episodes of the sum over their tokens
}
_OTHER_SURROGATES = {  # loss types with a surrogate that is not here, and their aggregation
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


def _take_model(draft: Draft) -> None:
    """Take the dtype, the quantization and the adapter of ModelConfig."""
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
    draft.set_modules(modules)


def _take_batches(draft: Draft) -> None:
    micro = draft.require_count("per_device_train_batch_size")
    accumulated = draft.require_count("gradient_accumulation_steps")
    generation = draft.count("generation_batch_size")
    micro_per_batch = draft.count("steps_per_generation") or accumulated
    episodes = generation if generation is not None else micro * micro_per_batch
    updates = draft.require_count("num_iterations")
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
    variety = draft.choice("importance_sampling_level", _VARIETIES)
    is_sequence = variety != "grpo"
    draft.set("algorithm.variety", variety)
    if variety == "gspo":
        draft.note(
            "the ratio has a stop-gradient form here; value and gradient are the same for one advantage per episode"
        )
    low, high = draft.require_number("epsilon"), draft.number("epsilon_high")
    kind = draft.get("loss_type")
    if is_other := isinstance(kind, str) and kind in _OTHER_SURROGATES:
        draft.leave_out("loss_type", "its surrogate is not here; the clipped one of PPO takes its place")
        draft.leave_out("epsilon_high", f"bounds the weights of {kind}, and is no distance of a clip from 1")
        high = None
    take_clip(draft, low, low if high is None else high, is_sequence=is_sequence)
    aggregation = _OTHER_SURROGATES[kind] if is_other else draft.choice("loss_type", _AGGREGATIONS)
    take_aggregation(draft, aggregation, is_sequence=is_sequence, norm_length=draft.count("max_completion_length"))
    scale = draft.choice("scale_rewards", _SCALES)
    if aggregation == "dr_grpo" and draft.given.get("scale_rewards") is None:
        scale = "none"
        draft.note("loss_type = 'dr_grpo': advantages are not divided by a std (arXiv 2503.20783; Unsloth forces it)")
    draft.set("advantages.scale", scale)
    entropy = draft.require_number("entropy_coef")
    draft.set("loss.entropy_coef", entropy or None)
    if entropy:
        draft.note(f"entropy_coef = {entropy:g}: the mean over tokens there, and aggregated as the loss is here")


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
    """Set the engine, and the correction for a sampler with logprobs that are not quite the trainer's."""
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
    high = high if cap is None else cap  # as in TRL, the older name wins
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


def _take_precision(draft: Draft) -> None:
    if draft.flag("bf16"):
        draft.note('bf16: autocast has no counterpart; model.dtype = "bfloat16" stores a LoRA\'s base so')


def _take_tool_turns(draft: Draft) -> None:
    turns = draft.count("max_tool_calling_iterations")
    if turns is not None:
        draft.set("rollout.max_turns", turns + 1)
        draft.note(f"max_tool_calling_iterations = {turns}: so many answers with tool calls, and one after them")


def _take_evaluations(draft: Draft) -> None:
    evaluations = draft.number("eval_steps")
    if evaluations is not None and evaluations >= 1:
        draft.set("evaluation.every_n_iters", int(evaluations))
        draft.note("eval_steps counts optimizer steps there, and iterations here")


def _take_checkpoints(draft: Draft) -> None:
    """Take how often the Trainer saves, and which checkpoints stay."""
    steps, keeps_best = draft.require_number("save_steps"), draft.flag("load_best_model_at_end")
    strategy = draft.choice("save_strategy", {name: name for name in ("no", "steps", "epoch", "best")})
    if strategy not in (None, "steps"):
        draft.leave_out(
            "save_strategy", "checkpoints are saved every training.checkpoint_every_n_iters, and at the end"
        )
        draft.leave_out("save_steps", "acts with save_strategy = 'steps' only")
    elif steps < 1:
        draft.leave_out("save_steps", "a fraction of all steps: write training.checkpoint_every_n_iters")
    else:
        draft.set("training.checkpoint_every_n_iters", draft.count("save_steps"))
    _take_best(draft, acts=keeps_best)
    take_kept(draft, "save_total_limit", keeps_best=keeps_best)


def _take_best(draft: Draft, *, acts: bool) -> None:
    metric, is_larger_better = draft.get("metric_for_best_model"), draft.get("greater_is_better")
    if not acts:
        for key in ("metric_for_best_model", "greater_is_better"):
            draft.leave_out(key, "acts with load_best_model_at_end only")
        return
    draft.set("training.keep_best", 1)
    draft.note("load_best_model_at_end: a run ends with its last weights here; `gspo-gym models` takes RUN@best")
    if isinstance(metric, str) and metric in _METRICS:
        draft.set("training.keep_best_metric", _METRICS[metric])
        draft.set("training.keep_best_direction", "min" if is_larger_better is False else None)
        return
    draft.note(f"metric_for_best_model = {metric or 'loss'!r}: the best is that of the best score here")
    draft.leave_out("greater_is_better", "the best score is the largest")


_METRICS = dict.fromkeys(("reward", "eval_reward"), "mean_return")
_TRAINER = "belongs to transformers' Trainer"
_LOSS = "belongs to a loss_type that is not here"
_ENTROPY = "belongs to use_adaptive_entropy, which is not here: loss.entropy_coef is constant"
_DATA = "an environment takes the data set's place; the bundled one Dataset reads a file or a hub data set"
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
    **without(
        _ENTROPY, use_adaptive_entropy=False, entropy_coef_min=0.0, entropy_coef_max=1.0, entropy_coef_delta=0.005,
        entropy_target=0.2,
    ),
    **without(
        _LOSS, sapo_temperature_neg=1.05, sapo_temperature_pos=1.0, vespo_k_pos=2.0, vespo_lambda_pos=3.0,
        vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    ),
    "generation_kwargs": (None, "has no counterpart: set the keys of [rollout]"),
    "num_generations_eval": (None, "an evaluation plays each of evaluation.seeds once"),
    **without(
        "belongs to transformers' generate", "cache_implementation", "transformers_continuous_batching_config",
        use_transformers_paged=False,
    ),
    "use_transformers_continuous_batching": (False, "always so here"),
    "pad_to_multiple_of": ("auto", "rows are padded to the longest of their micro-batch"),
    "ds3_gather_for_generation": (True, "belongs to DeepSpeed"),
    "model_init_kwargs": (None, "belongs to transformers' from_pretrained; model.dtype and model.quantization choose"),
    "trust_remote_code": (False, "code of a model's folder is never run here"),
    "vllm_model_impl": ("vllm", "vLLM's own models are used"),
    "vllm_structured_outputs_regex": (None, "would sample from another distribution than the one that is scored"),
    **without("belongs to TRL's server", vllm_server_timeout=240.0, vllm_group_port=51216),
    "log_multimodal": (True, "policies read text"),
    **without(
        "episodes are in the run's folder", "num_completions_to_print", "log_completions_hub_repo",
        log_unique_prompts=False,
    ),
    "lr_scheduler_kwargs": (None, "write optimizer.min_lr_fraction"),
    "lora_target_parameters": (None, "training.lora.target_modules names modules"),
    "lora_modules_to_save": (None, "an adapter is all that is trained"),
    "lora_task_type": ("CAUSAL_LM", "policies are causal language models"),
    "use_rslora": (False, "has no counterpart: an adapter's output is scaled by alpha / r"),
    "use_dora": (False, "has no counterpart"),
    "use_bnb_nested_quant": (False, "4-bit weights always have nested quantization here"),
    "bnb_4bit_quant_type": ("nf4", "4-bit weights are NF4 here"),
    "bnb_4bit_quant_storage": (None, "bitsandbytes chooses"),
    **without(
        _DATA, "dataset_name", "dataset_config", "datasets", "test_split_size", dataset_train_split="train",
        dataset_test_split="test", dataset_streaming=False, streaming=False,
    ),
    "reward_funcs": (None, "the environment rewards"),
    "reward_model_name_or_path": (None, "the environment rewards, or a [judge]"),
    **without(
        _TRAINER, "optim_args", "optim_target_modules", "gradient_checkpointing_kwargs", "torch_compile_backend",
        "torch_compile_mode", "liger_kernel_config", "neftune_noise_alpha", "torch_empty_cache_steps", "disable_tqdm",
        "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_accumulation_steps",
        "hub_token", "hub_private_repo", "hub_model_id", "hub_revision", "data_seed", "accelerator_config",
        "parallelism_config", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
        "label_names", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "fsdp", "fsdp_config", "deepspeed",
        "resume_from_checkpoint", ignore_bias_buffers=False, label_smoothing_factor=False, bf16_full_eval=False,
        fp16_full_eval=False, use_cache=False, auto_find_batch_size=False, logging_first_step=False, eval_delay=False,
        prediction_loss_only=False, eval_on_start=False, eval_use_gather_object=False, batch_eval_metrics=False,
        save_only_model=False, save_on_each_node=False, enable_jit_checkpoint=False, push_to_hub=False,
        hub_always_push=False, ignore_data_skip=False,
        restore_callback_states_from_checkpoint=False, full_determinism=False, use_cpu=False,
        dataloader_drop_last=False, dataloader_num_workers=False, dataloader_persistent_workers=False,
        remove_unused_columns=False, do_train=False, do_eval=False, do_predict=False,
        average_tokens_across_devices=True, log_on_each_node=True, logging_nan_inf_filter=True,
        eval_do_concat_batches=True, dataloader_pin_memory=True, dataloader_in_order=True, skip_memory_metrics=True,
        logging_strategy="steps", include_num_input_tokens_seen="no", include_for_metrics=[],
        log_level="passive", log_level_replica="warning", hub_strategy="every_save", train_sampling_strategy="random",
        length_column_name="length", ddp_timeout=1800, debug="", local_rank=-1,
    ),
    "eval_strategy": ("no", "evaluations are always made, every evaluation.every_n_iters"),
    "per_device_eval_batch_size": (8, "rollout.max_concurrent_rollouts bounds what is played at once"),
    "project": ("huggingface", "belongs to Trackio; write tracking.wandb_project"),
}  # fmt: skip

_BEST: Mapping[str, Any] = {"load_best_model_at_end": True}
_PEFT: Mapping[str, Any] = {"use_peft": True}
_SYNC: Mapping[str, Any] = {"sync_ref_model": True}
_VLLM: Mapping[str, Any] = {"use_vllm": True}
_SERVER: Mapping[str, Any] = {"use_vllm": True, "vllm_mode": "server"}
_EPISODES = "rollout.episodes_per_batch"
_URLS = "services.engine_urls"
ROWS: Mapping[str, Row] = {
    **with_defaults(
        TRAINER_ARGUMENTS, learning_rate=1e-6, max_grad_norm=1.0, weight_decay=0.0, optim="adamw_torch_fused",
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, lr_scheduler_type="linear", warmup_steps=0, seed=42,
        logging_steps=10, gradient_checkpointing=True,
    ),
    **REPORTING,
    "model_name_or_path": plain("model.base"),
    "model_revision": revision(),
    "attn_implementation": plain("model.attn_implementation"),
    "use_peft": by(
        _take_model, "model.trainer_mode", values={True: "lora", False: "full"}, default=False,
        also=tuple(f"training.lora.{name}" for name in LORA_DEFAULTS),
    ),
    **{
        f"lora_{name}": by(_take_model, f"training.lora.{name}", beside=_PEFT, default=default)
        for name, default in LORA_DEFAULTS.items()
    },
    "dtype": by(_take_model, "model.dtype", beside=_PEFT, note="trained weights stay float32", default="float32"),
    "load_in_4bit": by(_take_model, "model.trainer_mode", values={True: "qlora"}, beside=_PEFT),
    "load_in_8bit": by(
        _take_model, "model.quantization", "model.trainer_mode", values={True: ("int8", "qlora")}, beside=_PEFT
    ),
    "num_generations": count("training.group_size", default=8),
    "per_device_train_batch_size": by(_take_batches, "training.batch_size", also=(_EPISODES,), default=8),
    "gradient_accumulation_steps": by(
        _take_batches, "training.gradient_accumulation_steps", also=(_EPISODES,), default=1
    ),
    "generation_batch_size": by(_take_batches, _EPISODES),
    "steps_per_generation": by(_take_batches, _EPISODES, note="that many times training.batch_size episodes"),
    "num_iterations": by(
        _take_batches, "training.update_epochs",
        note="passes over a batch; training.iterations_per_epoch counts batches", default=1,
    ),
    "max_steps": by(
        _take_batches, "training.iterations_per_epoch", also=("training.num_epochs",),
        note="ours counts batches of episodes, not optimizer steps", default=-1,
    ),
    "num_train_epochs": by(
        _take_batches, "training.num_epochs", default=3.0,
        note="an epoch here is training.iterations_per_epoch batches",
    ),
    "importance_sampling_level": by(_take_objective, "algorithm.variety", values=_VARIETIES, default="token"),
    "epsilon": by(_take_objective, "loss.clip_low", "loss.clip_high", default=0.2),
    "epsilon_high": by(_take_objective, "loss.clip_high"),
    "loss_type": by(
        _take_objective, "loss.aggregation", values=_AGGREGATIONS, also=("loss.norm_length", "advantages.scale"),
        advice={"dr_grpo": 'loss.aggregation = "dr_grpo", loss.norm_length = max_completion_length'}, default="dapo",
    ),
    "delta": number("loss.dual_clip"),
    "scale_rewards": by(_take_objective, "advantages.scale", values=_SCALES, default="group"),
    "entropy_coef": by(_take_objective, "loss.entropy_coef", default=0.0),
    "mask_truncated_completions": switch("rewards.overlong", "mask"),
    "off_policy_mask_threshold": number("correction.off_policy_threshold"),
    "max_completion_length": by(
        _take_lengths, "rollout.max_output_tokens", also=("rollout.max_model_len",),
        note="ours is per turn; rollout.max_model_len bounds the episode", default=512,
    ),
    "max_prompt_length": by(
        _take_lengths, "rollout.max_model_len",
        advice="prompts are not cut; rollout.max_model_len bounds prompt and answers together",
    ),
    **with_defaults(POLICY, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0),
    "beta": by(_take_reference, "loss.kl_coef", also=("loss.kl_importance_weighted",), default=0.0),
    "use_bias_correction_kl": by(_take_reference, "loss.kl_importance_weighted", beside={"beta": 0.04}, default=True),
    "sync_ref_model": by(
        _take_reference, "reference.update_every_n_iters", "reference.source",
        advice={True: 'reference.update_every_n_iters = 1 or more, reference.source = "copy"',
                False: "nothing: the reference is frozen by default"},
    ),
    "ref_model_sync_steps": by(
        _take_reference, "reference.update_every_n_iters", beside=_SYNC, note="ours counts iterations", default=512,
    ),
    "ref_model_mixup_alpha": by(_take_reference, note="the reference becomes the policy, unmixed", default=0.6),
    "use_vllm": by(
        _take_vllm, "rollout.engine", values={True: "vllm"},
        also=("vllm.gpu_memory_utilization", "vllm.tensor_parallel_size", "correction.level", "correction.mode",
              "correction.high", "correction.low"),
    ),
    "vllm_mode": by(
        _take_vllm, _URLS, beside=_VLLM, also=("vllm.gpu_memory_utilization", "vllm.tensor_parallel_size"),
        advice='write services.engine_urls for "server"; vLLM in this process is the other', default="colocate",
    ),
    **{
        f"vllm_server_{name}": by(
            _take_vllm, _URLS, beside=_SERVER, default=default,
            advice='write services.engine_urls = ["http://HOST:PORT"]',
        )
        for name, default in (("host", "0.0.0.0"), ("port", 8000), ("base_url", None))
    },
    "vllm_gpu_memory_utilization": by(_take_vllm, "vllm.gpu_memory_utilization", beside=_VLLM, default=0.3),
    "vllm_tensor_parallel_size": by(_take_vllm, "vllm.tensor_parallel_size", beside=_VLLM, default=1),
    "vllm_enable_sleep_mode": by(_take_vllm, "vllm.sleep_while_learning", beside=_VLLM),
    "vllm_max_model_length": by(_take_vllm, "rollout.max_model_len", beside=_VLLM),
    "vllm_importance_sampling_correction": by(
        _take_vllm, "correction.level", beside=_VLLM, also=("correction.mode", "correction.high", "correction.low"),
        advice={True: 'correction.level = "trajectory"'}, note="a geometric mean here, not a product", default=True,
    ),
    "vllm_importance_sampling_mode": by(
        _take_vllm, "correction.level", "correction.mode", values=_CORRECTIONS, beside=_VLLM,
        also=("correction.low",), default="sequence_mask",
    ),
    "vllm_importance_sampling_cap": by(_take_vllm, "correction.high", beside=_VLLM),
    "vllm_importance_sampling_clip_max": by(_take_vllm, "correction.high", beside=_VLLM, default=3.0),
    "vllm_importance_sampling_clip_min": by(_take_vllm, "correction.low", beside=_VLLM),
    "bf16": by(
        _take_precision, advice={True: 'model.dtype = "bfloat16" (with lora)'}, note="autocast has no counterpart"
    ),
    "torch_compile": switch("model.torch_compile", True),
    "use_liger_kernel": switch("model.liger_kernels", True),
    "use_liger_loss": switch("model.liger_kernels", True),
    "log_completions": switch("run.log_episodes_every_n_iters", 1, default=False),
    "max_tool_calling_iterations": by(
        _take_tool_turns, "rollout.max_turns", note="so many answers with tool calls, and one after them"
    ),
    "save_steps": by(_take_checkpoints, "training.checkpoint_every_n_iters", default=500),
    "save_strategy": by(
        _take_checkpoints, "training.checkpoint_every_n_iters",
        advice="checkpoints are saved every training.checkpoint_every_n_iters, and at the end",
    ),
    "save_total_limit": by(
        _take_checkpoints, "training.keep_last", also=("training.keep_best",), note="the best is kept besides here"
    ),
    "load_best_model_at_end": by(
        _take_checkpoints, "training.keep_best", values={True: 1}, note="a run ends with its last weights here",
    ),
    "metric_for_best_model": by(_take_checkpoints, "training.keep_best_metric", values=_METRICS, beside=_BEST),
    "greater_is_better": by(
        _take_checkpoints, "training.keep_best_direction", values={False: "min"},
        beside={**_BEST, "metric_for_best_model": "eval_reward"},
    ),
    "eval_steps": by(_take_evaluations, "evaluation.every_n_iters", note="ours counts iterations"),
}  # fmt: skip
TRL = System("TRL", ROWS, WITHOUT_COUNTERPART)

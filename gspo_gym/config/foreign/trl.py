"""TRL's GRPOConfig with the ModelConfig and ScriptArguments of its scripts, and Unsloth's, which is the same class.

Read in TRL 1.16.0 and Unsloth 2026.10; their defaults are in `trl_arguments.py`.
"""

from __future__ import annotations

import math

from gspo_gym.config.foreign.common import (
    PEFT_MODULES,
    take_aggregation,
    take_clip,
    take_policy_config,
    take_reporting,
    take_sampling,
    take_single_step_note,
    take_trainer_arguments,
)
from gspo_gym.config.foreign.draft import Draft
from gspo_gym.config.foreign.trl_arguments import WITHOUT_COUNTERPART

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

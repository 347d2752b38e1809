"""TRL's GRPOConfig, and Unsloth's, which is the same class (read in TRL 1.16 and Unsloth 2026.10)."""

from __future__ import annotations

import math

from gspo_gym.translate.common import (
    take_aggregation,
    take_clip,
    take_reporting,
    take_sampling,
    take_single_step_note,
    take_trainer_arguments,
)
from gspo_gym.translate.draft import Draft

# What GRPOConfig does where a file is silent. `beta` has no single default: 0 for dapo and dr_grpo, 0.001 before.
DEFAULTS = {
    "importance_sampling_level": "token",
    "loss_type": "dapo",
    "epsilon": 0.2,
    "beta": 0.0,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "scale_rewards": "group",
    "max_completion_length": 256,
    "temperature": 1.0,
    "learning_rate": 1e-6,
    "max_grad_norm": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
}
_VARIETIES = {"token": "grpo", "sequence": "gspo", "sequence_token": "gspo_token"}
_AGGREGATIONS = {name: name for name in ("grpo", "bnpo", "dr_grpo", "dapo")}
_SCALES = {"group": "group", True: "group", "batch": "batch", "none": "none", False: "none"}
_CORRECTIONS = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("trajectory", "truncate"),
    "sequence_mask": ("trajectory", "mask"),
    "geometric_truncate": ("trajectory", "truncate"),
    "geometric_mask": ("trajectory", "mask"),
}
_OF_VLLM = "this version samples in the trainer's process"


def translate(draft: Draft) -> None:
    """Read every key of a GRPOConfig out of the draft and set ours."""
    take_trainer_arguments(draft)
    take_reporting(draft)
    _take_batches(draft)
    _take_objective(draft)
    _take_lengths(draft)
    take_sampling(draft)
    _take_reference(draft)
    _take_correction(draft)
    if draft.flag("bf16"):
        draft.note('bf16: autocast has no counterpart; model.dtype = "bfloat16" stores a LoRA\'s base so')
    if draft.flag("torch_compile"):
        draft.set("model.torch_compile", True)
    if any([draft.flag("use_liger_kernel"), draft.flag("use_liger_loss")]):  # a list, so that both are read
        draft.set("model.liger_kernels", True)
    if draft.get("log_completions") is not None:
        draft.set("run.log_episodes_every_n_iters", 1 if draft.flag("log_completions") else 0)
    for key in (
        "top_entropy_quantile",
        "shuffle_dataset",
        "reward_weights",
        "use_transformers_paged",
        "cast_lm_head_to_fp32",
    ):
        draft.leave_out(key, "has no counterpart")
    draft.leave_out("fp16", "16-bit floats with a loss scale are not supported; use bfloat16")


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
    take_clip(draft, low, low if high is None else high, is_sequence=is_sequence)
    draft.set("loss.dual_clip", draft.number("delta"))
    aggregation = draft.choice("loss_type", _AGGREGATIONS)
    take_aggregation(draft, aggregation, is_sequence=is_sequence, norm_length=draft.count("max_completion_length"))
    scale = draft.choice("scale_rewards", _SCALES)
    if aggregation == "dr_grpo" and draft.given.get("scale_rewards") is None:
        scale = "none"
        draft.note("loss_type = 'dr_grpo': advantages are not divided by a std (arXiv 2503.20783; Unsloth forces it)")
    draft.set("advantages.scale", scale)
    if draft.flag("mask_truncated_completions"):
        draft.set("rewards.overlong", "mask")
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


def _take_correction(draft: Draft) -> None:
    if not draft.flag("use_vllm"):
        for key in draft.given:
            if key.startswith("vllm_"):
                is_correction = key.startswith("vllm_importance_sampling")
                draft.leave_out(key, "acts with use_vllm only" if is_correction else _OF_VLLM)
        return
    mode = draft.get("vllm_importance_sampling_mode")
    cap = draft.number("vllm_importance_sampling_cap")
    wants = draft.get("vllm_importance_sampling_correction")
    if wants is not False:
        level, how = _CORRECTIONS.get(str(mode or "sequence_mask"), ("trajectory", "mask"))
        draft.set("correction.level", level)
        draft.set("correction.mode", how)
        draft.set("correction.high", 3.0 if cap is None else cap)
        if how == "mask":
            draft.set("correction.low", 0.0)
        if level == "trajectory":
            draft.note(
                "vllm_importance_sampling_mode: a sequence's weight is the exp of a sum there and the geometric mean "
                "here (the product leaves out nearly every long episode)"
            )
    draft.leave_out("use_vllm", _OF_VLLM)
    for key in draft.given:
        if key.startswith("vllm_") and not key.startswith("vllm_importance_sampling"):
            draft.leave_out(key, _OF_VLLM)

"""Rules of stateset-agents' keys that depend on each other; stateset.toml has the others."""

from __future__ import annotations

from gspo_gym.config.foreign.reader import Draft, read_system


def batches(draft: Draft) -> None:
    """Set the variety, how many episodes a batch has, and what its trainer always does."""
    is_token = draft.flag("use_gspo_token")
    draft.set("algorithm.variety", "gspo_token" if is_token else "gspo")
    draft.set("advantages.level", "turn" if is_token else None)
    episodes = draft.require_count("num_generations") * draft.require_count("generations_per_iteration")
    draft.set("training.group_size", draft.require_count("num_generations"))
    draft.set("rollout.episodes_per_batch", episodes)
    draft.set("training.batch_size", episodes)  # its trainer takes no smaller batches
    draft.set("optimizer.schedule", "cosine")  # the only one of its trainer
    draft.set("optimizer.min_lr_fraction", 0.0)


def adapter(draft: Draft) -> None:
    """Set the model, and the adapter that is trained."""
    name = draft.get("model_name")
    draft.flag("use_reference_model")  # which says whether beta acts
    draft.set("model.base", "openai-community/gpt2" if name == "gpt2" else name)  # its whole name on the hub
    r, alpha, dropout = draft.count("lora_r"), draft.number("lora_alpha"), draft.number("lora_dropout")
    modules = draft.names("lora_target_modules")
    is_float16, is_bfloat16 = draft.flag("fp16"), draft.flag("bf16")
    dtype = "bfloat16" if is_float16 or is_bfloat16 else None
    in_8_bits, is_quantized = draft.flag("use_8bit"), draft.flag("use_4bit") or draft.flag("use_8bit")
    if not draft.flag("use_lora") and not is_quantized:
        draft.set("model.trainer_mode", "full")
        if dtype is not None:
            draft.note("weights of 16 bits are trained there; weights that are trained stay float32 here")
        return
    if is_float16:
        draft.note("fp16 = True: the base of an adapter is in bfloat16 here, the only type of 16 bits")
    if not draft.flag("use_lora"):
        draft.note(
            "use_lora = False: quantized weights cannot be trained, so that an adapter is; there nothing would be"
        )
    draft.set("model.trainer_mode", "qlora" if is_quantized else "lora")
    draft.set("model.quantization", "int8" if in_8_bits else None)
    draft.set("model.dtype", dtype)
    draft.set("training.lora.r", r)
    draft.set("training.lora.alpha", alpha)
    draft.set("training.lora.dropout", dropout)
    base = str(name) if draft.model is None or draft.source_of("model.base") else draft.model
    draft.set("training.lora.target_modules", modules or _modules_of(base))


def _modules_of(model: str) -> list[str]:
    """Return the modules that it adapts if none are named, which follow the model's name."""
    name = model.lower()
    if "gpt2" in name:
        return ["c_attn", "c_proj"]
    return ["q_proj", "k_proj", "v_proj", "o_proj"] if "llama" in name or "qwen" in name else ["q_proj", "v_proj"]


def lengths(draft: Draft) -> None:
    """Set the lengths of an answer and of an episode."""
    prompt, completion = draft.require_count("max_prompt_length"), draft.require_count("max_completion_length")
    draft.set("rollout.max_output_tokens", completion)
    draft.set("rollout.max_model_len", prompt + completion)
    if draft.flag("use_vllm"):
        draft.set("rollout.max_model_len", draft.count("vllm_max_model_len"))


STATESET = read_system("stateset", batches, adapter, lengths)

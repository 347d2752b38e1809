"""AgileRL's GSPO (read in 2.7.0): the constructor's arguments, or a file with INIT_HP and MUTATION_PARAMS tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.config.foreign.draft import (
    PEFT_MODULES,
    Draft,
    take_clip,
    take_policy_config,
    take_sampling,
    take_single_step_note,
)
from gspo_gym.errors import ConfigError

DEFAULTS = {
    "batch_size": 16,
    "beta": 0.001,
    "lr": 5e-7,
    "clip_coef": 0.2,
    "max_grad_norm": 0.1,
    "update_epochs": 1,
    "group_size": 8,
    "temperature": 0.9,
    "repetition_penalty": 1.0,
    "top_p": 0.95,
    "top_k": 50,
    "min_p": 0.0,
    "max_model_len": 1024,
    "use_vllm": False,
    "seed": 42,
    "gradient_checkpointing": True,
    "use_liger_loss": False,
    "use_kl_advantage_shaping": False,
    "adv_norm": "mean_std",
    "use_separate_reference_adapter": True,
    "whiten_advantages": False,
    "filter_zero_adv": False,
    "adv_filter_eps": 0.0,
}
# The adapter without lora_config; with one, what peft 0.21 takes where it is silent; and that of an INIT_HP table.
OWN_LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
PEFT_LORA = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": None}
INIT_HP_LORA = {"r": 16, "lora_alpha": 64, "lora_dropout": 0.0}
# VLLMConfig where it is silent.
VLLM = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.3, "sleep_mode": False}
_NORMS = {"mean_std": ("group", "group"), "mean_only": ("group", "none")}
# What these do is always so here, or means nothing to text; `why` says which.
_ALWAYS = {
    "cast_logprobs_to_fp32": "logprobs are always computed in float32",
    "use_fused_linear_logprobs": "logprobs are always computed in chunks (training.scoring_chunk_tokens)",
    "calc_position_embeddings": "rows are padded on the right, so that positions need no correction",
    "reduce_memory_peak": "deprecated and without effect there, too",
    "pad_token_id": "padding is by mask here, whatever the id: an end-of-turn token is trained on even if it pads",
    "pad_token": "padding is by mask here, whatever the id",
    "clone": "internal",
    "wrap": "internal",
    "index": "internal: the member's number in a population",
    "accelerator": "distributed training is not in this version",
    "hf_generate_chunk_size": "rollout.max_concurrent_rollouts bounds what is generated at once",
    "use_memory_efficient_params": "write vllm.sleep_while_learning, which frees the GPU while the learner works",
}


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """INIT_HP in small letters, or the file as it is (Any: read from a file). MUTATION_PARAMS stay one value."""
    if "INIT_HP" not in values:
        return {str(key): value for key, value in values.items()}
    table = values["INIT_HP"]
    if not isinstance(table, Mapping):
        raise ConfigError(f"AgileRL: INIT_HP: expected a table, got {table!r}")
    flat = {str(key).lower(): value for key, value in table.items()}
    flat |= {"mutation_params": values["MUTATION_PARAMS"]} if "MUTATION_PARAMS" in values else {}
    return flat


def translate(draft: Draft) -> None:
    """Read every key out of the draft and set ours."""
    network, options = draft.get("actor_network"), draft.get("model_config")
    named = network if isinstance(network, str) else None
    draft.set("model.base", draft.first("model_name", "pretrained_model_name_or_path") or named)
    if named is None:
        draft.leave_out("actor_network", "a model in memory cannot be in a file: give model.base, or --model")
    _take_model_config(draft, options)
    take_policy_config(draft)
    draft.set("algorithm.variety", "gspo")
    if draft.get("algo") not in (None, "GSPO"):
        draft.note(f"algo = {draft.get('algo')!r}: translated as GSPO")
    draft.set("training.learning_rate", draft.number("lr"))
    draft.set("optimizer.max_grad_norm", draft.number("max_grad_norm"))
    draft.set("run.seed", draft.count("seed"))
    _take_batches(draft)
    _take_objective(draft)
    _take_advantages(draft)
    _take_lora(draft)
    _take_vllm(draft)
    _take_schedule(draft)
    take_sampling(draft)
    draft.note("top_p and top_k are on by default there, and its ratio is computed under the whole softmax")
    _take_lengths(draft)
    for key, why in _ALWAYS.items():
        draft.leave_out(key, why)
    draft.leave_out("device", "ignored there; model.device chooses here")
    for key in ("hp_config", "pop_size", "tournament_size", "elitism", "mutation_params"):
        draft.leave_out(key, "a population is a search here: `gspo-gym search`")


def _take_batches(draft: Draft) -> None:
    size, micro = draft.require_count("batch_size"), draft.first_count("micro_batch_size_per_gpu")
    group, updates = draft.require_count("group_size"), draft.require_count("update_epochs")
    if micro is not None:
        draft.note(f"micro_batch_size_per_gpu = {micro} takes batch_size's place there (without DeepSpeed), as here")
    step = micro or size
    episodes = draft.count("data_batch_size_per_gpu")
    total = step if episodes is None else episodes * group
    draft.set("training.group_size", group)
    draft.set("training.batch_size", step)
    draft.set("training.update_epochs", updates)
    draft.set("rollout.episodes_per_batch", total)
    take_single_step_note(draft, num_steps=max(1, total // step) * updates)


def _take_objective(draft: Draft) -> None:
    clip = draft.get("clip_coef")
    if isinstance(clip, Sequence) and not isinstance(clip, str):
        bounds = sorted(float(bound) for bound in clip)
        if len(bounds) != 2 or not 0 < bounds[0] < 1 < bounds[1]:
            raise ConfigError(f"AgileRL: clip_coef: expected a number or two bounds around 1, got {clip!r}")
        low, high = 1 - bounds[0], bounds[1] - 1
        draft.note(f"clip_coef = {clip!r} are the ratio's bounds there, and distances from 1 here")
    else:
        low = high = draft.require_number("clip_coef")
    take_clip(draft, low, high, is_sequence=True)
    beta = draft.require_number("beta")
    if draft.flag("use_kl_advantage_shaping"):
        draft.set("advantages.kl_shaping_coef", beta or None)
        draft.note("use_kl_advantage_shaping: the shaped advantage reaches its own token here; there it averages out")
    elif beta:
        draft.set("loss.kl_coef", beta)
        draft.note(
            f"beta = {beta:g}: its estimate of the KL is reversed there (up to 2.9.1); ours is the right way round"
        )
    if draft.flag("use_liger_loss"):
        draft.set("model.liger_kernels", True)
    if draft.flag("gradient_checkpointing"):
        draft.set("model.gradient_checkpointing", True)
    if draft.get("torch_compiler") is not None:
        draft.set("model.torch_compile", True)


def _take_advantages(draft: Draft) -> None:
    baseline, scale = draft.choice("adv_norm", _NORMS)
    draft.set("advantages.baseline", baseline)
    draft.set("advantages.scale", scale)
    if draft.flag("whiten_advantages"):
        draft.set("advantages.whiten", "trajectories")
    limit = draft.get("adv_clip_range")
    if isinstance(limit, Sequence) and not isinstance(limit, str):
        limit = max(abs(float(bound)) for bound in limit)
        draft.note(f"adv_clip_range: cut to +-{limit:g}, the larger of the two")
    draft.set("advantages.clip", None if limit is None else float(limit))
    eps = draft.number("adv_filter_eps")
    if draft.flag("filter_zero_adv"):
        draft.set("advantages.filter_eps", eps or 0.0)


def _take_model_config(draft: Draft, options: Any) -> None:
    """Take the dtype of what transformers' from_pretrained is told (Any: as read); nothing else of it has a key."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ConfigError(f"AgileRL: model_config: expected a table, got {options!r}")
    dtype = str(options.get("dtype") or options.get("torch_dtype") or "").removeprefix("torch.")
    draft.set("model.dtype", dtype if dtype in ("float32", "bfloat16") else None)
    for key, value in options.items():
        if key not in ("dtype", "torch_dtype") or (dtype not in ("", "float32", "bfloat16")):
            draft.leave_out_part("model_config", key, value, "belongs to transformers' from_pretrained")


def _take_lora(draft: Draft) -> None:
    given = draft.get("lora_config")
    from_table = {
        key: draft.get(name)
        for key, name in (("r", "lora_r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout"))
    }
    modules = draft.first("lora_target_modules", "target_modules")
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"AgileRL: lora_config: expected a table, got {given!r}")
    if given is not None:
        lora = {**PEFT_LORA, **given}
    elif modules is not None:
        named = [modules] if isinstance(modules, str) else modules
        lora = {**INIT_HP_LORA, **{key: value for key, value in from_table.items() if value is not None}}
        lora["target_modules"] = named
    else:
        lora = OWN_LORA
        for name in ("lora_r", "lora_alpha", "lora_dropout"):
            draft.leave_out(name, "acts with LORA_TARGET_MODULES only, there")
    draft.set("model.trainer_mode", "lora")
    draft.set("training.lora.r", lora["r"])
    draft.set("training.lora.alpha", float(lora["lora_alpha"]))
    draft.set("training.lora.dropout", float(lora["lora_dropout"]))
    draft.set_modules(lora["target_modules"], PEFT_MODULES)
    for key, value in lora.items():
        if key not in PEFT_LORA and value not in (None, False, "none", "CAUSAL_LM", [], {}):
            draft.leave_out_part("lora_config", key, value, "has no counterpart")
    draft.note("dropout has the same masks in the old and the present pass here; there it is off in one of them")
    uses_reference = bool(draft.number("beta"))
    if draft.get("use_separate_reference_adapter") is True and uses_reference:
        draft.set("reference.source", "adapter")


def _take_vllm(draft: Draft) -> None:
    options = draft.get("vllm_config")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"AgileRL: vllm_config: expected a table, got {options!r}")
    if not draft.flag("use_vllm"):
        draft.leave_out("vllm_config", "acts with use_vllm only")
        return
    vllm = {**VLLM, **(options or {})}
    draft.set("rollout.engine", "vllm")
    draft.set("vllm.tensor_parallel_size", vllm["tensor_parallel_size"])
    draft.set("vllm.gpu_memory_utilization", vllm["gpu_memory_utilization"])
    draft.set("vllm.sleep_while_learning", vllm["sleep_mode"] or None)
    draft.set("vllm.dtype", vllm.get("dtype"))
    for key, value in vllm.items():
        if key not in VLLM and key != "dtype" and value is not None:
            draft.leave_out_part("vllm_config", key, value, "has no counterpart")


def _take_schedule(draft: Draft) -> None:
    schedule = draft.get("cosine_lr_schedule_config")
    if schedule is None:
        return
    if not isinstance(schedule, Mapping):
        raise ConfigError(f"AgileRL: cosine_lr_schedule_config: expected a table, got {schedule!r}")
    draft.set("optimizer.schedule", "cosine")
    draft.set("optimizer.min_lr_fraction", 0.0)
    draft.set("optimizer.warmup_fraction", schedule.get("warmup_proportion") or None)
    draft.note("cosine_lr_schedule_config.num_epochs counts optimizer steps there; here the cosine ends with the run")


def _take_lengths(draft: Draft) -> None:
    output, length = draft.count("max_output_tokens"), draft.count("max_model_len")
    if output is None and length is None:
        raise ConfigError("AgileRL: expected max_output_tokens or max_model_len, got neither")
    total = length or output or 0
    draft.set("rollout.max_model_len", total)
    draft.set("rollout.max_output_tokens", min(output or total, total - 1))
    draft.set("rollout.min_output_tokens", draft.count("min_output_tokens"))
    draft.set("rollout.max_turns", draft.count("max_turns"))
    turns, evaluate = draft.count("max_steps"), draft.count("evaluation_interval")
    draft.set("evaluation.every_n_iters", evaluate)
    if turns is not None:
        draft.note(f"max_steps = {turns} counts turns or prompts there; --iterations sets the length of the run here")

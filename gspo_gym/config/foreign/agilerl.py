"""AgileRL's GSPO (read in 2.7.0): its constructor's arguments, or a file with INIT_HP and MUTATION_PARAMS tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.config.foreign.draft import (
    OF_BATCHES,
    POLICY,
    Draft,
    Row,
    System,
    by,
    choice,
    count,
    number,
    switch,
    take_clip,
    take_single_step_note,
    with_defaults,
    without,
)
from gspo_gym.errors import ConfigError

# The adapter without lora_config; what peft 0.21 takes for keys that one lacks; the adapter of an INIT_HP table.
OWN_LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
PEFT_LORA = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": None}
INIT_HP_LORA = {"r": 16, "lora_alpha": 64, "lora_dropout": 0.0}
# The defaults of VLLMConfig.
VLLM = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.3, "sleep_mode": False}


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return INIT_HP in small letters, or the file as it is; MUTATION_PARAMS stay one value."""
    if "INIT_HP" not in values:
        return {str(key): value for key, value in values.items()}
    table = values["INIT_HP"]
    if not isinstance(table, Mapping):
        raise ConfigError(f"AgileRL: INIT_HP: expected a table, got {table!r}")
    flat = {str(key).lower(): value for key, value in table.items()}
    flat |= {"mutation_params": values["MUTATION_PARAMS"]} if "MUTATION_PARAMS" in values else {}
    return flat


def _take_model(draft: Draft) -> None:
    network = draft.get("actor_network")
    named = network if isinstance(network, str) else None
    draft.set("model.base", draft.first("model_name", "pretrained_model_name_or_path") or named)
    if named is None:
        draft.leave_out("actor_network", "a model in memory cannot be in a file: give model.base, or --model")
    draft.set("algorithm.variety", "gspo")
    if draft.get("algo") not in (None, "GSPO"):
        draft.note(f"algo = {draft.get('algo')!r}: translated as GSPO")
    draft.note("top_p and top_k are on by default there, and its ratio is computed under the whole softmax")


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
        bounds = sorted(draft.as_number("clip_coef", bound) for bound in clip)
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
    if draft.get("torch_compiler") is not None:
        draft.set("model.torch_compile", True)


def _take_advantages(draft: Draft) -> None:
    draft.set("advantages.baseline", "group")
    limit = draft.get("adv_clip_range")
    if limit and isinstance(limit, Sequence) and not isinstance(limit, str):
        limit = max(abs(draft.as_number("adv_clip_range", bound)) for bound in limit)
        draft.note(f"adv_clip_range: cut to +-{limit:g}, the larger of the two")
    draft.set("advantages.clip", None if limit is None else draft.as_number("adv_clip_range", limit))
    eps = draft.number("adv_filter_eps")
    if draft.flag("filter_zero_adv"):
        draft.set("advantages.filter_eps", eps or 0.0)


def _take_model_config(draft: Draft) -> None:
    """Take the dtype among the arguments of transformers' from_pretrained; no other has a key here."""
    options = draft.table("model_config") or {}
    dtype = str(options.get("dtype") or options.get("torch_dtype") or "").removeprefix("torch.")
    draft.set("model.dtype", dtype if dtype in ("float32", "bfloat16") else None)
    for key, value in options.items():
        if key not in ("dtype", "torch_dtype") or (dtype not in ("", "float32", "bfloat16")):
            draft.leave_out_part("model_config", key, value, "belongs to transformers' from_pretrained")


def _take_lora(draft: Draft) -> None:
    given = draft.table("lora_config")
    from_table = {
        key: draft.get(name)
        for key, name in (("r", "lora_r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout"))
    }
    modules = draft.first("lora_target_modules", "target_modules")
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
    draft.set("training.lora.alpha", draft.as_number("lora_alpha", lora["lora_alpha"]))
    draft.set("training.lora.dropout", draft.as_number("lora_dropout", lora["lora_dropout"]))
    draft.set_modules(lora["target_modules"])
    for key, value in lora.items():
        if key not in PEFT_LORA and value not in (None, False, "none", "CAUSAL_LM", [], {}):
            draft.leave_out_part("lora_config", key, value, "has no counterpart")
    draft.note("dropout has the same masks in the old and the present pass here; there it is off in one of them")
    uses_reference = bool(draft.number("beta"))  # without a KL term, reference.source would have no effect
    if uses_reference:
        draft.set("reference.source", "adapter" if draft.get("use_separate_reference_adapter") is True else "base")


def _take_vllm(draft: Draft) -> None:
    options = draft.table("vllm_config")
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
    schedule = draft.table("cosine_lr_schedule_config")
    if schedule is None:
        return
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
    draft.set("rollout.max_output_tokens", min(output or total, total - 1))  # a prompt needs room
    turns = draft.count("max_steps")
    if turns is not None:
        draft.note(f"max_steps = {turns} counts turns or prompts there; --iterations sets the length of the run here")


_PADDING = "padding is by mask here, whatever the id"
_POPULATION = "a population is a search here: `gspo-gym search`"
# Most of these are always on here, or mean nothing for text.
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, str]] = {
    "cast_logprobs_to_fp32": (True, "logprobs are always computed in float32"),
    "use_fused_linear_logprobs": (False, "logprobs are always computed in chunks (training.logits_memory_mib)"),
    "calc_position_embeddings": (True, "rows are padded on the right, so that positions need no correction"),
    "reduce_memory_peak": (False, "deprecated and without effect there, too"),
    "pad_token_id": (None, f"{_PADDING}: an end-of-turn token is trained on even if it pads"),
    "pad_token": (None, _PADDING),
    **without("internal", clone=False, wrap=True),
    "index": (0, "internal: the member's number in a population"),
    "accelerator": (None, "distributed training is not in this version"),
    "hf_generate_chunk_size": (None, "rollout.max_concurrent_rollouts bounds what is generated at once"),
    "use_memory_efficient_params": (
        True, "write vllm.sleep_while_learning, which frees the GPU while the learner works",
    ),
    "device": ("cpu", "ignored there; model.device chooses here"),
    **without(_POPULATION, "hp_config", "pop_size", "tournament_size", "elitism", "mutation_params"),
}  # fmt: skip
_LORA_KEYS = ("training.lora.r", "training.lora.alpha", "training.lora.dropout", "training.lora.target_modules")
ROWS: Mapping[str, Row] = {
    "model_name": by(_take_model, "model.base"),
    "pretrained_model_name_or_path": by(_take_model, "model.base"),
    "actor_network": by(_take_model, "model.base", note="a model in memory cannot be in a file"),
    "model_config": by(_take_model_config, "model.dtype", advice="write model.dtype", note="other keys are left out"),
    "algo": by(_take_model, note="always translated as GSPO"),
    "lr": number("training.learning_rate", default=5e-7),
    "max_grad_norm": number("optimizer.max_grad_norm", default=0.1),
    "seed": count("run.seed", default=42),
    "batch_size": by(_take_batches, "training.batch_size", also=("rollout.episodes_per_batch",), default=16),
    "micro_batch_size_per_gpu": by(
        _take_batches, "training.batch_size", also=("rollout.episodes_per_batch",),
        note="memory is bounded by training.max_tokens_per_microbatch, and the update stays the same",
    ),
    "data_batch_size_per_gpu": by(_take_batches, "rollout.episodes_per_batch", note=OF_BATCHES),
    "group_size": by(_take_batches, "training.group_size", default=8),
    "update_epochs": by(_take_batches, "training.update_epochs", default=1),
    "clip_coef": by(
        _take_objective, "loss.clip_low", "loss.clip_high",
        note="two numbers are the ratio's bounds there, distances here", default=0.2,
    ),
    "beta": by(_take_objective, "loss.kl_coef", note="k3 the right way round", default=0.001),
    "use_kl_advantage_shaping": by(
        _take_objective, "advantages.kl_shaping_coef", also=("loss.kl_coef",),
        advice={True: "advantages.kl_shaping_coef = beta",
                False: "nothing: advantages.kl_shaping_coef is 0 by default"}, default=False,
    ),
    "torch_compiler": by(_take_objective, "model.torch_compile", advice="write model.torch_compile = true"),
    "use_liger_loss": switch("model.liger_kernels", True, default=False),
    "gradient_checkpointing": switch("model.gradient_checkpointing", True, default=True),
    "adv_norm": choice({"mean_std": "group", "mean_only": "none"}, "advantages.scale", default="mean_std"),
    "whiten_advantages": switch("advantages.whiten", "trajectories", default=False),
    "adv_clip_range": by(_take_advantages, "advantages.clip"),
    "filter_zero_adv": by(
        _take_advantages, "advantages.filter_eps", default=False,
        advice={True: "advantages.filter_eps = adv_filter_eps"},
    ),
    "adv_filter_eps": by(_take_advantages, "advantages.filter_eps", beside={"filter_zero_adv": True}, default=0.0),
    "lora_config": by(_take_lora, *_LORA_KEYS, advice="write [training.lora]"),
    "lora_target_modules": by(_take_lora, "training.lora.target_modules", also=_LORA_KEYS[1:3]),
    "target_modules": by(_take_lora, "training.lora.target_modules", also=_LORA_KEYS[1:3]),
    **{
        f"lora_{name}": by(_take_lora, f"training.lora.{name}", beside={"lora_target_modules": ["q_proj"]})
        for name in ("r", "alpha", "dropout")
    },
    "use_separate_reference_adapter": by(
        _take_lora, "reference.source",
        advice={True: 'reference.source = "adapter"', False: 'reference.source = "base"'}, default=True,
    ),
    "use_vllm": by(
        _take_vllm, "rollout.engine", values={True: "vllm"},
        also=("vllm.tensor_parallel_size", "vllm.gpu_memory_utilization"), default=False,
    ),
    "vllm_config": by(
        _take_vllm, "vllm.tensor_parallel_size", "vllm.gpu_memory_utilization", "vllm.sleep_while_learning",
        "vllm.dtype", beside={"use_vllm": True}, advice="write [vllm]",
    ),
    "cosine_lr_schedule_config": by(
        _take_schedule, "optimizer.schedule", "optimizer.min_lr_fraction", "optimizer.warmup_fraction",
        advice='write optimizer.schedule = "cosine" and optimizer.warmup_fraction = warmup_proportion',
    ),
    **with_defaults(POLICY, temperature=0.9, repetition_penalty=1.0, top_p=0.95, top_k=50, min_p=0.0),
    "max_output_tokens": by(_take_lengths, "rollout.max_output_tokens"),
    "max_model_len": by(_take_lengths, "rollout.max_model_len", also=("rollout.max_output_tokens",), default=1024),
    "max_steps": by(_take_lengths, note="counts turns or prompts there; --iterations sets the length of the run"),
    "min_output_tokens": count("rollout.min_output_tokens"),
    "max_turns": count("rollout.max_turns"),
    "evaluation_interval": count("evaluation.every_n_iters"),
}  # fmt: skip
AGILERL = System("AgileRL", ROWS, WITHOUT_COUNTERPART, flatten)

"""Rules of AgileRL's keys that depend on each other, and the shapes of its files; agilerl.toml has the other keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.config.foreign.reader import Draft, read_system
from gspo_gym.config.foreign.readings import PEFT_MODULES, same
from gspo_gym.errors import ConfigError

_SECTIONS = ("algorithm", "environment", "training", "network")  # of a manifest; the first and the last have no prefix
# The adapter without lora_config; what peft 0.21 takes for keys that one lacks; the adapter of an INIT_HP table.
OWN_LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
PEFT_LORA = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": None}
INIT_HP_LORA = {"r": 16, "lora_alpha": 64, "lora_dropout": 0.0}
# The defaults of VLLMConfig, and what a manifest without one has.
VLLM = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.3, "sleep_mode": False}
COLOCATED_VLLM = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "sleep_mode": True}
_NO_BOUND = 1e6  # nats that no estimate reaches


def is_manifest(values: Mapping[str, Any]) -> bool:
    """Return whether a file has the sections of 2.58.0."""
    return "algorithm" in values


def flatten_manifest(_: Draft, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a manifest's sections, those of `environment` and `training` with their section's name."""
    flat = {key: value for key, value in values.items() if key not in _SECTIONS}
    for section in _SECTIONS:
        table = values.get(section) or {}
        if not isinstance(table, Mapping):
            raise ConfigError(f"AgileRL: {section}: expected a table, got {table!r}")
        prefix = "" if section in ("algorithm", "network") else f"{section}."
        for key, value in table.items():
            if flat.setdefault(f"{prefix}{key}", value) != value:  # AgileRL refuses that
                raise ConfigError(f"AgileRL: {section}.{key} = {value!r} disagrees with another section")
    return flat


def is_flat(values: Mapping[str, Any]) -> bool:
    """Return whether a file is of 2.7.0: INIT_HP, or keys of the constructor; an empty one is its defaults."""
    names = {*AGILERL_2_7.rows, *AGILERL_2_7.without_counterpart}
    return not values or "INIT_HP" in values or any(str(key) in names for key in values)


def flatten_init_hp(_: Draft, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return INIT_HP in small letters, or the file as it is; MUTATION_PARAMS stay one value."""
    if "INIT_HP" not in values:
        return {str(key): value for key, value in values.items()}
    table = values["INIT_HP"]
    if not isinstance(table, Mapping):
        raise ConfigError(f"AgileRL: INIT_HP: expected a table, got {table!r}")
    rest_of_file = {key: value for key, value in values.items() if key not in ("INIT_HP", "MUTATION_PARAMS")}
    mutation = {"mutation_params": values["MUTATION_PARAMS"]} if "MUTATION_PARAMS" in values else {}
    return {str(key).lower(): value for key, value in table.items()} | mutation | rest_of_file


def _is_new(draft: Draft) -> bool:
    return "name" in draft.defaults


def model(draft: Draft) -> None:
    """Set the model where it is none of the rows' texts, its dtype and its quantization."""
    network = draft.get("actor_network")
    if isinstance(network, str):
        draft.fill("model.base", network)
    else:
        draft.leave_out("actor_network", "a model in memory cannot be in a file: give model.base, or --model")
    draft.set("model.torch_compile", None if draft.get("torch_compiler") is None else True)
    options = draft.table("model_config") or {}
    dtype = str(options.get("dtype") or options.get("torch_dtype") or "").removeprefix("torch.")
    draft.set("model.dtype", dtype if dtype in ("float32", "bfloat16") else None)
    for key, value in options.items():
        if key not in ("dtype", "torch_dtype") or (dtype not in ("", "float32", "bfloat16")):
            draft.report(f"model_config.{key}", value, "belongs to transformers' from_pretrained")


def batches(draft: Draft) -> None:
    """Set how many episodes a batch and an optimizer step have."""
    size, micro = draft.require_count("batch_size"), draft.positive("micro_batch_size_per_gpu")
    group = draft.require_count("group_size")
    draft.set("training.group_size", group)
    if not _is_new(draft):
        if micro is not None:
            draft.note(f"micro_batch_size_per_gpu = {micro} takes the place of batch_size = {size} there, as here")
        prompts = draft.count("data_batch_size_per_gpu")
        draft.set("training.batch_size", micro or size)
        draft.set("rollout.episodes_per_batch", (prompts or 0) * group or math.lcm(micro or size, group))
        if prompts is None:
            draft.note("rollout.episodes_per_batch is a placeholder: data_batch_size_per_gpu is of its environment")
        return
    gpus, mini = draft.require_count("training.training_gpus_per_agent"), draft.positive("mini_batch_size")
    if micro is not None and mini is not None:
        draft.note(f"micro_batch_size_per_gpu = {micro}: training.max_tokens_per_microbatch bounds memory here")
    groups, step = draft.count("training.rollout_batch_size"), mini or micro
    episodes = ((groups or 1) if draft.get("training.rollout_mode") == "async" else size) * group
    draft.set("rollout.episodes_per_batch", episodes)
    draft.set("training.batch_size", episodes if step is None else step * max(gpus, draft.devices))


def objective(draft: Draft) -> None:
    """Set the ratio, its clip, and the term that holds the policy near the reference."""
    key = "name" if _is_new(draft) else "algo"
    name = str(draft.get(key) or "GSPO").upper()
    if name == "CISPO":
        draft.set("loss.surrogate", "cispo")
    elif name not in ("GSPO", "GRPO"):
        raise ConfigError(f"AgileRL: {key}: expected GSPO, GRPO or CISPO, got {draft.get(key)!r}")
    level = draft.choice("importance_sampling_level", {n: n for n in ("token", "turn", "trajectory")}) or "token"
    if name == "GSPO":
        if draft.get("importance_sampling_level") not in (None, "trajectory"):
            draft.note(f"importance_sampling_level = {level!r} has no effect there: GSPO's is 'trajectory'")
        level = "trajectory"
    draft.set("algorithm.variety", {"token": "grpo", "turn": "gspo_token", "trajectory": "gspo"}[level])
    draft.set("loss.unit", "turn" if level == "turn" else None)
    _clip(draft, name)
    beta, is_shaped = draft.require_number("beta"), draft.flag("use_kl_advantage_shaping")
    clamp, is_weighted = draft.number("kl_clamp"), draft.flag("use_bias_correction_kl")
    if is_shaped:
        draft.set("advantages.kl_shaping_coef", beta or None)
    elif beta:
        draft.set("loss.kl_coef", beta)
        draft.set("loss.kl_importance_weighted", True if is_weighted else None)
        if not draft.is_default("kl_clamp") or draft.is_null("kl_clamp"):
            draft.set("loss.kl_clamp", _NO_BOUND if draft.is_null("kl_clamp") else clamp)
        if not _is_new(draft):
            draft.note(
                f"beta = {beta:g}: its estimate of the KL is reversed there (up to 2.9.1); ours is the right way round"
            )


def _clip(draft: Draft, name: str) -> None:
    clip = draft.get("clip_coef")
    if isinstance(clip, Sequence) and not isinstance(clip, str):
        bounds = sorted(draft.as_number("clip_coef", limit) for limit in clip)
        if len(bounds) != 2 or not 0 < bounds[0] < 1 < bounds[1]:
            raise ConfigError(f"AgileRL: clip_coef: expected a number or two bounds around 1, got {clip!r}")
        low, high = round(1 - bounds[0], 12), round(bounds[1] - 1, 12)
        draft.note(f"clip_coef = {clip!r} are the ratio's bounds there, and distances from 1 here")
    else:
        low = high = draft.require_number("clip_coef")
    draft.set("loss.clip_low", None if name == "CISPO" else low)  # whose weights have no floor, there neither
    draft.set("loss.clip_high", high)


def advantages(draft: Draft) -> None:
    """Set whose return is subtracted, and what happens to advantages."""
    draft.set("advantages.baseline", "group")
    limit = draft.get("adv_clip_range")
    if limit and isinstance(limit, Sequence) and not isinstance(limit, str):
        limit = max(abs(draft.as_number("adv_clip_range", end)) for end in limit)
        draft.note(f"adv_clip_range: cut to +-{limit:g}, the larger of the two")
    draft.set("advantages.clip", None if limit is None else draft.as_number("adv_clip_range", limit))
    if draft.flag("filter_zero_adv"):
        draft.fill("advantages.filter_eps", 0.0)
    granularity = draft.choice("advantage_granularity", {name: name for name in ("auto", "trajectory", "turn")})
    turns = draft.count("environment.max_turns") or 1
    if granularity == "turn" or (granularity == "auto" and turns > 1):
        draft.set("advantages.level", "turn")
        draft.note("a turn's advantage is of its own reward there, and of the rewards from it on here")


def adapter(draft: Draft) -> None:
    """Set the adapter, which all of its trainers have, and the reference."""
    options, modules = draft.table("lora_config"), draft.get("lora_target_modules") or draft.get("target_modules")
    from_table = {key: draft.get("lora_" + key.removeprefix("lora_")) for key in INIT_HP_LORA}
    lora: dict[str, Any] = dict(OWN_LORA)
    if options is not None:
        base = OWN_LORA if _is_new(draft) else PEFT_LORA
        lora = {**base, **{"r" if key == "lora_r" else key: value for key, value in options.items()}}
    elif modules is not None:
        lora = {**INIT_HP_LORA, **{key: value for key, value in from_table.items() if value is not None}}
        lora["target_modules"] = [modules] if isinstance(modules, str) else modules
    elif from_table != dict.fromkeys(from_table):
        draft.note("lora_r, lora_alpha and lora_dropout act with target modules only, there")
    draft.fill("model.trainer_mode", "lora")
    draft.set("training.lora.r", lora["r"])
    draft.set("training.lora.alpha", draft.as_number("lora_alpha", lora["lora_alpha"]))
    draft.set("training.lora.dropout", draft.as_number("lora_dropout", lora["lora_dropout"]))
    names = list(PEFT_MODULES) if lora["target_modules"] is None else lora["target_modules"]
    draft.set("training.lora.target_modules", [names] if isinstance(names, str) and names != "all-linear" else names)
    for key, value in lora.items():
        if key not in PEFT_LORA and value not in (None, False, "none", "CAUSAL_LM", [], {}):
            draft.report(f"lora_config.{key}", value, "has no counterpart")
    draft.note("dropout has the same masks in the old and the present pass here; there it is off in one of them")
    is_separate = draft.flag("use_separate_reference_adapter")
    if draft.number("beta"):  # without a KL term, reference.source would have no effect
        draft.set("reference.source", "adapter" if is_separate else "base")


def vllm(draft: Draft) -> None:
    """Set the engine, and the correction for logprobs that are not quite the trainer's."""
    is_new, options = _is_new(draft), draft.table("vllm_config")
    if not is_new and not draft.flag("use_vllm"):
        return
    settings = {**(COLOCATED_VLLM if is_new and options is None else VLLM), **(options or {})}
    draft.set("rollout.engine", "vllm")
    draft.set("vllm.tensor_parallel_size", settings["tensor_parallel_size"])
    draft.set("vllm.gpu_memory_utilization", settings["gpu_memory_utilization"])
    draft.set("vllm.sleep_while_learning", settings["sleep_mode"] or None)
    draft.set("vllm.dtype", settings.get("dtype"))
    for key, value in settings.items():
        if key not in VLLM and key != "dtype" and value is not None:
            draft.report(f"vllm_config.{key}", value, "has no counterpart")
    if is_new:
        _correction(draft)


def _correction(draft: Draft) -> None:
    is_async = draft.choice("training.rollout_mode", {"colocated": False, "async": True})
    source = draft.choice("old_logprobs_source", {"trainer": "trainer", "rollout": "rollout"})
    corrects, cap = (
        draft.flag("vllm_importance_sampling_correction"),
        draft.require_number("vllm_importance_sampling_cap"),
    )
    threshold, bounds = draft.number("off_policy_sequence_mask_threshold"), draft.get("off_policy_token_mask_bounds")
    if is_async:
        draft.leave_out(
            "training.rollout_mode", "write training.max_staleness: episodes are played while the learner works"
        )
    if (source or ("rollout" if is_async else "trainer")) == "rollout":
        draft.set("correction.old_logprobs", "rollout")
    elif corrects and not is_async:
        draft.set("correction.level", "token")
        draft.set("correction.mode", "truncate")
        draft.set("correction.high", cap)
    if not draft.is_null("off_policy_sequence_mask_threshold"):
        draft.set("correction.off_policy_threshold", threshold)
    if not draft.is_null("off_policy_token_mask_bounds"):
        why = "tokens whose ratio to the present policy is outside stay in the loss here"
        draft.leave_out("off_policy_token_mask_bounds", why)
        if same(bounds, [0.5, 5.0]):
            draft.note(f"off_policy_token_mask_bounds = {bounds!r}, which is on by default there: {why}")


def schedule(draft: Draft) -> None:
    """Set the schedule of the learning rate."""
    options = draft.part("cosine_lr_schedule_config", **({"min_lr_ratio": 0.1} if _is_new(draft) else {}))
    if not options.entries:
        return
    draft.set("optimizer.schedule", "cosine")
    draft.set("optimizer.min_lr_fraction", options.number("min_lr_ratio") or 0.0)
    draft.set("optimizer.warmup_fraction", options.number("warmup_proportion") or None)
    for key in [key for key in ("num_epochs", "num_steps") if key in options.entries]:
        length = options.count(key)
        draft.note(f"cosine_lr_schedule_config.{key} = {length} is its length there; here the cosine ends with the run")
    draft.report_rest("cosine_lr_schedule_config", options, "has no counterpart")


def lengths(draft: Draft) -> None:
    """Set the lengths of an answer and of an episode."""
    output, length = draft.count("max_output_tokens"), draft.count("max_context_length") or draft.count("max_model_len")
    draft.get("max_model_len")
    total = length or output or 0
    draft.set("rollout.max_model_len", total)
    draft.set("rollout.max_output_tokens", min(output or total, total - 1))  # a prompt needs room


_RULES = (model, batches, objective, advantages, adapter, vllm, schedule, lengths)
AGILERL_2_7 = read_system("agilerl", *_RULES, version="2.7.0", flatten=flatten_init_hp, is_own_file=is_flat)
AGILERL = read_system(
    "agilerl", *_RULES, version="2.58.0", flatten=flatten_manifest, is_own_file=is_manifest, earlier=AGILERL_2_7
)

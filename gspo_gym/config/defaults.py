"""Defaults that follow from other keys. Values in the file are neither changed nor judged here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gspo_gym.config.nested import POLICY_CONFIG
from gspo_gym.config.words import look_up

# Values that `algorithm.variety` allows, the default first; keys that are not listed are free.
VARIETIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gspo": {"loss.unit": ("trajectory", "segment"), "advantages.level": ("trajectory",)},
    "gspo_token": {"loss.unit": ("trajectory", "segment", "turn"), "advantages.level": ("turn", "trajectory")},
    "grpo": {"loss.unit": ("token",), "advantages.level": ("trajectory", "turn")},
}
# The clip ranges of GRPO are those that the GSPO paper compares with (section 5.1); GSPO's own are LossSettings'.
_GRPO_CLIPS = {"clip_low": 0.2, "clip_high": 0.27}

# The terms that ask for a frozen policy to compare with.
KL_TERMS = ("loss.kl_coef", "rewards.kl_coef", "advantages.kl_shaping_coef")


def with_derived_defaults(values: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a file's values with these sections present and the defaults that depend on other keys.

    Values of a wrong type stay as they are, and are reported later.
    """
    filled: dict[str, Any] = {name: {} for name in sections}
    # Copies, because the defaults are written into them: what the file said is still needed, to mark the defaults.
    filled |= {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    # The variety comes first: it sets the level, which sets the baseline, which sets the scale.
    _follow_variety(filled)
    _follow_level(filled)
    _follow_trainer_mode(filled)
    _follow_policy_config(filled)
    _follow_vllm(filled)
    _follow_topology(filled)
    _follow_kl_terms(filled)
    return filled


def _set_default(values: dict[str, Any], key: str, value: Any) -> None:
    section, name = key.split(".")
    table = values.get(section)
    if isinstance(table, dict) and table.get(name) is None:
        table[name] = value


def _follow_variety(values: dict[str, Any]) -> None:
    variety = look_up(values, "algorithm.variety") or "gspo"
    # A wrong variety is reported later; until then it sets nothing.
    for key, allowed in VARIETIES.get(variety, {}).items() if isinstance(variety, str) else ():
        _set_default(values, key, allowed[0])
    if variety == "grpo":
        for name, clip in _GRPO_CLIPS.items():
            _set_default(values, f"loss.{name}", clip)


def _follow_level(values: dict[str, Any]) -> None:
    # As in `AdvantageSettings`, but the rules must see it, too: they ask a file's values before there is a record.
    if look_up(values, "advantages.level") == "turn":
        _set_default(values, "advantages.baseline", "leave_one_out")
    if (baseline := look_up(values, "advantages.baseline")) in ("batch", "running", "none"):
        _set_default(values, "advantages.scale", baseline)


def _follow_trainer_mode(values: dict[str, Any]) -> None:
    if look_up(values, "model.trainer_mode") in ("lora", "qlora"):
        _set_default(values, "training.lora", {})  # an adapter has settings, even if the file names none of them


def _follow_policy_config(values: dict[str, Any]) -> None:
    policy_config = look_up(values, "rollout.policy_config")
    for theirs, ours in POLICY_CONFIG.items() if isinstance(policy_config, Mapping) else ():
        if policy_config.get(theirs) is not None:
            _set_default(values, f"rollout.{ours}", policy_config[theirs])
    # The hosted trainer's files set top_p: scoring under it keeps them unbiased without another key.
    if isinstance(policy_config, Mapping) and "truncated_sampling" not in _listed(values, "algorithm.acknowledge"):
        top_p, top_k = policy_config.get("top_p"), policy_config.get("top_k")
        if top_p not in (None, 1) or top_k not in (None, 0):
            _set_default(values, "training.score_truncated", True)


def _listed(values: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    value = look_up(values, key)
    return tuple(value) if isinstance(value, list | tuple) else ()


def _follow_vllm(values: dict[str, Any]) -> None:
    # As in vLLM, a turn may fill all that is left of the context.
    vllm, topology = values.get("vllm"), values.get("topology")
    if vllm is not None or topology is not None:
        _set_default(values, "rollout.engine", "vllm")
    if isinstance(vllm, Mapping) or (vllm is None and topology is not None):
        length = (vllm or {}).get("max_model_len") or 8192
        _set_default(values, "rollout.max_model_len", length)
        if isinstance(length, int) and length > 1:
            _set_default(values, "rollout.max_output_tokens", length - 1)


def _follow_topology(values: dict[str, Any]) -> None:
    # The GPUs that generate are shared out to copies of the model of `tensor_parallel` GPUs each: all in one server,
    # or in a cluster in as many servers as there are, each of vllm.data_parallel_size copies.
    topology = values.get("topology")
    if not isinstance(topology, Mapping):
        return
    num_gpus, size = topology.get("gpus_for_vllm"), topology.get("tensor_parallel") or 1
    # Otherwise a rule reports the division.
    if isinstance(num_gpus, int) and isinstance(size, int) and size > 0 and num_gpus > 0 and num_gpus % size == 0:
        _set_default(values, "vllm.tensor_parallel_size", size)
        if topology.get("type") != "cluster":
            _set_default(values, "vllm.data_parallel_size", num_gpus // size)


def _follow_kl_terms(values: dict[str, Any]) -> None:
    weights = [look_up(values, key) for key in KL_TERMS]
    if any(isinstance(weight, int | float) and weight > 0 for weight in weights):
        _set_default(values, "reference.placement", "shared")

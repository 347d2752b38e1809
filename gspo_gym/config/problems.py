"""What is wrong with a configuration, in sentences: which key, what was expected, what came, and the nearest name.

Turns pydantic's errors into `Problem`s.

Defaults that follow from other keys. Nothing that a file says is changed here, and nothing is judged.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gspo_gym.config.nested import POLICY_CONFIG
from gspo_gym.config.retired import explain, secret_problem
from gspo_gym.config.words import (
    Problem,
    bounds_in_words,
    describe,
    entry_model,
    look_up,
    section_model,
    sections_of,
    show,
)
from gspo_gym.errors import nearest_name

_PASSED_ON = ("env_config", "policy_config")


def find_problems(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> list[Problem]:
    """pydantic's errors about `values` as problems, one a key, in the order of the file's sections.

    Errors of validators that saw the whole model are left out (their location is empty). Any: `values` is whatever was
    read from a file.
    """
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        if not detail["loc"]:
            continue
        key, parent, info = _locate(model, detail["loc"])
        if detail["type"] == "extra_forbidden":
            text = explain(key, _look_up(values, key)) or _unknown(key, parent, model)
        elif detail["type"] == "value_error":
            key, text = _blame(key, str(detail["ctx"]["error"]), info)
        elif detail["type"] == "missing" and key.count(".") + 1 == len(detail["loc"]):
            text = f"required, but not given: expected {describe(info)}" + _meaning(info)
        else:
            expected = describe(info)
            if isinstance(detail["loc"][-1], int) and (bounds := bounds_in_words(detail.get("ctx", {}))):
                expected += f", each {bounds}"
            text = f"expected {expected}, got {show(_look_up(values, key))}"
        problems.setdefault(key, Problem(key, text))
    return list(problems.values())


def find_secrets(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Keys and values (Any: as read), however deep, that look like an API key or a password."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from find_secrets(value, f"{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
            yield from find_secrets(dict(enumerate(value)), f"{key}.")  # type: ignore[arg-type]
        elif value not in (None, "") and (text := secret_problem(key, value)) is not None:
            yield Problem(key, text)


def find_nul(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Keys whose text (Any: as read) holds the NUL character, which no path, name or URL may have.

    What is passed on to environments and apps is theirs.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from () if name in _PASSED_ON else find_nul(value, f"{key}.")
        elif isinstance(value, list | tuple):
            yield from find_nul({str(number): entry for number, entry in enumerate(value)}, f"{key}.")
        elif isinstance(value, str) and "\0" in value:
            yield Problem(key, f"expected a text without the character NUL, got {show(value)}")


def _locate(model: type[BaseModel], location: Sequence[str | int]) -> tuple[str, type[BaseModel], FieldInfo | None]:
    """The dotted key of an error, the model that it is in, and the field; what pydantic adds below a field is cut."""
    parts: list[str] = []
    info: FieldInfo | None = None
    for part in location:
        parts.append(str(part))
        if isinstance(part, int):  # an entry of a list of tables, whose keys come next
            continue
        info = model.model_fields.get(part)
        nested = None if info is None else section_model(info.annotation) or entry_model(info.annotation)
        if nested is None or len(parts) == len(location):
            break
        model = nested
    return ".".join(parts), model, info


def _blame(key: str, text: str, info: FieldInfo | None) -> tuple[str, str]:
    """A validator's key and sentence: one that saw a whole section begins with the name of the field it means."""
    section = section_model(info.annotation) if info is not None else None
    match = re.match(r"(\w+)(: )?", text)
    if section is None or match is None or match[1] not in section.model_fields:
        return key, text.removeprefix("seeds: ")
    return f"{key}.{match[1]}", text[match.end() :] if match[2] else text


def _unknown(key: str, parent: type[BaseModel], root: type[BaseModel]) -> str:
    """Says that a key or section is unknown, and which one was probably meant."""
    *above, name = key.split(".")
    everywhere = [(field, f"{section}.{field}") for section, model in sections_of(root) for field in model.model_fields]
    meant = name if name in dict(everywhere) else ""
    if not meant and above and not difflib.get_close_matches(name, parent.model_fields):
        meant = next(iter(difflib.get_close_matches(name, dict(everywhere))), "")
    if meant:
        return f"unknown key; did you mean {' or '.join(repr(full) for field, full in everywhere if field == meant)}?"
    return f"unknown {'key' if above else 'section'}; {nearest_name(name, parent.model_fields)}"


def _meaning(info: FieldInfo | None) -> str:
    return f" ({info.description})" if info is not None and info.description else ""


def _look_up(values: Any, key: str) -> Any:
    """The value at a dotted key, or the first thing on the way that is not a table. Any: read from a file."""
    for part in key.split("."):
        if isinstance(values, list | tuple) and part.isdecimal():
            values = values[int(part)]
            continue
        if not isinstance(values, Mapping) or part not in values:
            break
        values = values[part]
    return values


# What `algorithm.variety` means. A key that is not here is free; the first value is the default.
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
    """A copy of what was read (hence Any), with these sections present and the defaults that depend on other keys.

    Values may be of any type: what is no table is left for others to complain about.
    """
    filled: dict[str, Any] = {name: {} for name in sections}
    filled |= {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    _follow_variety(filled)
    _follow_level(filled)
    _follow_trainer_mode(filled)
    _follow_policy_config(filled)
    _follow_vllm(filled)
    _follow_topology(filled)
    _follow_kl_terms(filled)
    return filled


def _set_default(values: dict[str, Any], key: str, value: Any) -> None:
    """Give a key a value (Any: of its type) if it has none and its section is a table."""
    section, name = key.split(".")
    table = values.get(section)
    if isinstance(table, dict) and table.get(name) is None:
        table[name] = value


def _follow_variety(values: dict[str, Any]) -> None:
    variety = look_up(values, "algorithm.variety") or "gspo"
    for key, allowed in VARIETIES.get(variety, {}).items() if isinstance(variety, str) else ():
        _set_default(values, key, allowed[0])
    if variety == "grpo":
        for name, clip in _GRPO_CLIPS.items():
            _set_default(values, f"loss.{name}", clip)


def _follow_level(values: dict[str, Any]) -> None:
    """As `AdvantageSettings` says, but here, so that the rules see it, too."""
    if look_up(values, "advantages.level") == "turn":
        _set_default(values, "advantages.baseline", "leave_one_out")
    if (baseline := look_up(values, "advantages.baseline")) in ("batch", "running", "none"):
        _set_default(values, "advantages.scale", baseline)


def _follow_trainer_mode(values: dict[str, Any]) -> None:
    if look_up(values, "model.trainer_mode") in ("lora", "qlora"):
        _set_default(values, "training.lora", {})


def _follow_policy_config(values: dict[str, Any]) -> None:
    policy_config = look_up(values, "rollout.policy_config")
    for theirs, ours in POLICY_CONFIG.items() if isinstance(policy_config, Mapping) else ():
        if policy_config.get(theirs) is not None:
            _set_default(values, f"rollout.{ours}", policy_config[theirs])
    if isinstance(policy_config, Mapping) and "truncated_sampling" not in _listed(values, "algorithm.acknowledge"):
        top_p, top_k = policy_config.get("top_p"), policy_config.get("top_k")
        if top_p not in (None, 1) or top_k not in (None, 0):
            _set_default(values, "training.score_truncated", True)


def _listed(values: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    """Return the entries of a list (Any: as read); () for what is none."""
    value = look_up(values, key)
    return tuple(value) if isinstance(value, list | tuple) else ()


def _follow_vllm(values: dict[str, Any]) -> None:
    """A [vllm] section chooses the engine and the context; a turn may then fill what is left of it, as in vLLM."""
    vllm, topology = values.get("vllm"), values.get("topology")
    if vllm is not None or topology is not None:
        _set_default(values, "rollout.engine", "vllm")
    if isinstance(vllm, Mapping) or (vllm is None and topology is not None):
        length = (vllm or {}).get("max_model_len") or 8192
        _set_default(values, "rollout.max_model_len", length)
        if isinstance(length, int) and length > 1:
            _set_default(values, "rollout.max_output_tokens", length - 1)


def _follow_topology(values: dict[str, Any]) -> None:
    """A [topology] says how many GPUs each copy of the model has, and so how many copies there are."""
    topology = values.get("topology")
    if not isinstance(topology, Mapping):
        return
    num_gpus, size = topology.get("gpus_for_vllm"), topology.get("tensor_parallel") or 1
    if isinstance(num_gpus, int) and isinstance(size, int) and size > 0 and num_gpus > 0 and num_gpus % size == 0:
        _set_default(values, "vllm.tensor_parallel_size", size)
        _set_default(values, "vllm.data_parallel_size", num_gpus // size)


def _follow_kl_terms(values: dict[str, Any]) -> None:
    weights = [look_up(values, key) for key in KL_TERMS]
    if any(isinstance(weight, int | float) and weight > 0 for weight in weights):
        _set_default(values, "reference.placement", "shared")

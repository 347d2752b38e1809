"""A configuration in words: a problem, a value as one line of TOML, and what a key takes. Decides nothing."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gspo_gym.errors import shortened

_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_MAX_SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the dotted key (a section's name, where a whole section is meant) and a sentence."""

    key: str
    text: str


def field_of(key: str) -> str:
    """Return the key that a file gives a value to, where `key` may be of an entry of a list of tables.

    >>> field_of("rollout.mixture.0.share"), field_of("rollout.top_p")
    ('rollout.mixture', 'rollout.top_p')
    """
    return re.split(r"\.\d+(?:\.|$)", key)[0]


def show(value: Any) -> str:
    """Return a value as a user would write it, shortened.

    >>> show("five"), show(True), show([1, 2])
    ('"five"', 'true', '[1, 2]')
    """
    return shortened(json.dumps(value, default=str, ensure_ascii=False), _MAX_SHOWN)


def look_up(values: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key, or the default where tables do not lead there.

    >>> look_up({"model": {"base": "m"}}, "model.base"), look_up({"model": 3}, "model.base")
    ('m', None)
    """
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return default
        values = values[part]
    return values


def with_known_spelling(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return `values` with the names of a `Literal` spelled as there, in any case."""
    # The hosted trainer's files write some names in capitals. Other texts, such as paths, stay as they are.
    spelled = dict(values)
    for key, value in values.items():
        info = model.model_fields.get(key)
        if info is None:
            continue
        section, entry = section_model(info.annotation), entry_model(info.annotation)
        if section is not None and isinstance(value, Mapping):
            spelled[key] = with_known_spelling(value, section)
        elif entry is not None and isinstance(value, list | tuple):
            entries = [with_known_spelling(one, entry) if isinstance(one, Mapping) else one for one in value]
            spelled[key] = type(value)(entries)
        elif names := _names_of(info.annotation):
            is_list = isinstance(value, list | tuple)  # of names, such as algorithm.acknowledge
            spelled[key] = type(value)(_spelled(one, names) for one in value) if is_list else _spelled(value, names)
    return spelled


def _names_of(annotation: Any) -> dict[str, str]:
    if get_origin(annotation) is Literal:
        return {name.lower(): name for name in get_args(annotation) if isinstance(name, str)}
    return {low: name for part in get_args(annotation) for low, name in _names_of(part).items()}


def _spelled(value: Any, names: Mapping[str, str]) -> Any:
    return names.get(value.strip().lower(), value) if isinstance(value, str) else value


def sections_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the sections of a settings model by dotted name, nested ones after their parents."""
    for name, info in model.model_fields.items():
        if (section := section_model(info.annotation)) is not None:
            yield prefix + name, section
            yield from sections_of(section, f"{prefix}{name}.")


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class in an annotation like `X` or `X | None`."""
    candidates = get_args(annotation) if _is_union(annotation) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def entry_model(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class of the entries in an annotation like `tuple[X, ...]`, a list of tables."""
    parts = get_args(annotation) if get_origin(annotation) is tuple else ()
    return section_model(parts[0]) if parts else None


def describe(info: FieldInfo | None) -> str:
    """Return what a field takes, such as "an integer > 0" or "'full' or 'lora'"."""
    if info is None:
        return "something else"
    bounds = bounds_of(info)
    noun = _noun(info.annotation)
    if any(getattr(m, "min_length", 0) for m in info.metadata):
        noun = noun.replace("a ", "a non-empty ", 1)
    return f"{noun} {bounds}".rstrip()


def bounds_of(info: FieldInfo) -> str:
    """Return the range of a field, such as "> 0 and <= 1"; empty: any value."""
    return bounds_in_words({name: getattr(m, name) for m in info.metadata for name in _SIGNS if hasattr(m, name)})


def bounds_in_words(bounds: Mapping[str, Any]) -> str:
    """Return pydantic's names of bounds in words; other names are left out.

    >>> bounds_in_words({"ge": 0, "lt": 1.0})
    '>= 0 and < 1'
    """
    return " and ".join(f"{sign} {bounds[name]:g}" for name, sign in _SIGNS.items() if name in bounds)


def _noun(annotation: Any) -> str:
    if _is_union(annotation):
        return " or ".join(_noun(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        *others, last = [f'"{value}"' for value in get_args(annotation)]
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) is Annotated:
        return _noun(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        kind, *rest = get_args(annotation)
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind  # numbers with a range
        if section_model(kind) is not None:
            return "a list of tables"
        count = "" if rest == [...] else f"{1 + len(rest)} "
        return f"a list of {count}{_PLURALS[kind] if kind in _PLURALS else _noun(kind)}"
    if get_origin(annotation) is dict and get_args(annotation)[1] in _PLURALS:
        return f"a table of {_PLURALS[get_args(annotation)[1]]}"
    return _NOUNS.get(annotation, "a table")


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def inline(value: Any) -> str:
    """Return a value as TOML on one line, which `tomli_w` spreads over several.

    >>> inline({"a": (1, 2.5), "b c": {"d": True}})
    '{ a = [1, 2.5], "b c" = { d = true } }'
    """
    if isinstance(value, Mapping):
        # A dumped key has quotes where it needs them.
        keys = [tomli_w.dumps({key: 0}).removesuffix(" = 0\n") for key in value]
        entries = [f"{key} = {inline(entry)}" for key, entry in zip(keys, value.values(), strict=True)]
        return "{ " + ", ".join(entries) + " }" if entries else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(entry) for entry in value) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")

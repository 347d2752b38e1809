"""What is wrong with a configuration, in sentences: which key, what was expected, what came, and the nearest name.

Turns pydantic's errors into `Problem`s. Called by `config.py`; decides nothing.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gspo_gym.errors import nearest_name

_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_MAX_SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the dotted key (a section's name, where a whole section is meant) and a sentence."""

    key: str
    text: str


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
            text = _unknown(key, parent, model)
        elif detail["type"] == "value_error":
            text = str(detail["ctx"]["error"]).removeprefix("seeds: ")
        elif detail["type"] == "missing" and key.count(".") + 1 == len(detail["loc"]):
            text = f"required, but not given: expected {_describe(info)}" + _meaning(info)
        else:
            text = f"expected {_describe(info)}, got {show(_look_up(values, key))}"
        problems.setdefault(key, Problem(key, text))
    return list(problems.values())


def show(value: Any) -> str:
    """A value (Any: from a file) as a user would write it, shortened.

    >>> show("five"), show(True), show([1, 2])
    ('"five"', 'true', '[1, 2]')
    """
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def sections_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections of a settings model by dotted name, nested ones after their parents."""
    for name, info in model.model_fields.items():
        if (section := _section_model(info.annotation)) is not None:
            yield prefix + name, section
            yield from sections_of(section, f"{prefix}{name}.")


def _section_model(annotation: Any) -> type[BaseModel] | None:
    """The settings class in an annotation (Any: there is no type of all annotations) like `X` or `X | None`."""
    candidates = get_args(annotation) if _is_union(annotation) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _locate(model: type[BaseModel], location: Sequence[str | int]) -> tuple[str, type[BaseModel], FieldInfo | None]:
    """The dotted key of an error, the model that it is in, and the field; what pydantic adds below a field is cut."""
    parts: list[str] = []
    info: FieldInfo | None = None
    for part in location:
        parts.append(str(part))
        info = model.model_fields.get(str(part))
        nested = _section_model(info.annotation) if info is not None else None
        if nested is None or len(parts) == len(location):
            break
        model = nested
    return ".".join(parts), model, info


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


def _describe(info: FieldInfo | None) -> str:
    """What a field takes, such as "an integer > 0" or "'full' or 'lora'"."""
    if info is None:
        return "something else"
    bounds = [
        f"{sign} {getattr(m, name):g}" for m in info.metadata for name, sign in _SIGNS.items() if hasattr(m, name)
    ]
    noun = _noun(info.annotation)
    if any(getattr(m, "min_length", 0) for m in info.metadata):
        noun = noun.replace("a ", "a non-empty ", 1)
    return f"{noun} {' and '.join(bounds)}".rstrip()


def _noun(annotation: Any) -> str:
    """A type in words (Any: there is no type of all annotations)."""
    if _is_union(annotation):
        return " or ".join(_noun(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        *others, last = [f'"{value}"' for value in get_args(annotation)]
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) is tuple:
        kind, *rest = get_args(annotation)
        count = "" if rest == [...] else f"{1 + len(rest)} "
        return f"a list of {count}{_PLURALS[kind]}"
    return _NOUNS.get(annotation, "a table")


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _meaning(info: FieldInfo | None) -> str:
    return f" ({info.description})" if info is not None and info.description else ""


def _look_up(values: Any, key: str) -> Any:
    """The value at a dotted key, or the first thing on the way that is not a table. Any: read from a file."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            break
        values = values[part]
    return values

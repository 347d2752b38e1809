"""What is wrong with a configuration, in sentences: which key, what was expected, what came, and the nearest name.

Turns pydantic's errors into `Problem`s. Called by `config.py`; decides nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gspo_gym.config.retired import explain, secret_problem
from gspo_gym.config.words import Problem, describe, entry_model, section_model, sections_of, show
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
            text = f"expected {describe(info)}, got {show(_look_up(values, key))}"
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

"""Problems of a configuration in sentences: the key, what was expected, what was given, and the nearest name.

They come from pydantic's errors, from other trainers' names (`foreign/table.py`) and from secrets in a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gspo_gym.config.foreign.table import HINTS
from gspo_gym.config.words import Problem, bounds_in_words, describe, entry_model, section_model, sections_of, show
from gspo_gym.errors import nearest_name

_PASSED_ON = ("env_config", "policy_config")  # to environments and apps, which may take any text


def find_problems(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> list[Problem]:
    """Return pydantic's errors about `values` as problems, one a key, in the order of the file's sections."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        if not detail["loc"]:  # of a validator of the whole model: `find_contradictions` finds these one by one
            continue
        key, parent, info = _locate(model, detail["loc"])
        if detail["type"] == "extra_forbidden":
            text = explain(key, _nearest_value(values, key)) or _unknown(key, parent, model)
        elif detail["type"] == "value_error":
            key, text = _blame(key, str(detail["ctx"]["error"]), info)
        # Deeper, a missing part is a wrong value of the key, such as a list that is too short.
        elif detail["type"] == "missing" and key.count(".") + 1 == len(detail["loc"]):
            meaning = f" ({info.description})" if info is not None and info.description else ""
            text = f"required, but not given: expected {describe(info)}{meaning}"
        else:
            expected = describe(info)
            # The bounds of the whole are in the description; here an entry of a list is out of its own.
            if isinstance(detail["loc"][-1], int) and (bounds := bounds_in_words(detail.get("ctx", {}))):
                expected += f", each {bounds}"
            text = f"expected {expected}, got {show(_nearest_value(values, key))}"
        problems.setdefault(key, Problem(key, text))  # of a union, pydantic reports every branch; the first is enough
    return list(problems.values())


def find_secrets(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each key or value, however deep, that looks like an API key or a password."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from find_secrets(value, f"{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
            # Entries are named by their number, as pydantic names them.
            yield from find_secrets(dict(enumerate(value)), f"{key}.")  # type: ignore[arg-type]
        elif value not in (None, "") and (text := secret_problem(key, value)) is not None:
            yield Problem(key, text)


def find_nul(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each key with a text that holds the NUL character, which no path, name or URL may have."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from () if name in _PASSED_ON else find_nul(value, f"{key}.")
        elif isinstance(value, list | tuple):
            yield from find_nul({str(number): entry for number, entry in enumerate(value)}, f"{key}.")
        elif isinstance(value, str) and "\0" in value:
            yield Problem(key, f"expected a text without the character NUL, got {show(value)}")


def explain(key: str, value: Any) -> str | None:
    """Return what to write instead of an unknown key with this value, None if no trainer has such a key.

    >>> explain("loss.epsilon_high", 4e-4)
    'epsilon_high is what TRL calls it: write loss.clip_high = 0.0004'
    """
    name = key.rsplit(".", 1)[-1]
    origin, row = HINTS.get(name, ("", None))
    if row is None:
        return None
    is_name = isinstance(value, str | bool | None)  # 1 == True: a number must not be looked up
    if isinstance(row.advice, str):
        return f"{name} is of {origin}: {row.advice}"
    if is_name and value in row.advice:
        instead = row.advice[value]
    elif is_name and value in row.values:
        instead = ", ".join(f"{ours} = {show(part)}" for ours, part in row.assigned(value).items())
    elif value is False and True in (*row.values, *row.advice):
        instead = "nothing: it is off"
    elif not row.ours:
        is_advice = "write " in row.note or row.note.endswith("remove it")
        return f"{name} is of {origin}: {row.note}" + ("" if is_advice else ": remove it")
    elif row.values or row.advice or isinstance(value, Mapping | list | tuple):
        instead = " and ".join(row.ours)
    else:
        instead = ", ".join(f"{ours} = {show(value)}" for ours in row.ours)
    return f"{name} is what {origin} calls it: write {instead}" + (f" ({row.note})" if row.note else "")


# Names and values that a key would have; the prefixes are those of OpenAI, Groq, Hugging Face, xAI, GitHub and W&B.
_SECRET = re.compile(r"(^|_)(api_?keys?|secret(_key)?|password|passwd|(access|auth|bearer|hf|hub|wandb)_?token)$", re.I)
_SECRET_VALUE = re.compile(r"(sk|gsk|hf|xai|ghp|wandb)[-_][A-Za-z0-9_-]{16,}|AIza[A-Za-z0-9_-]{20,}")
_VARIABLES = {
    "openai": "OPENAI_API_KEY",
    "groq": "GROQ_API_KEY",
    "gemini": "GEMINI_API_KEY",
    "wandb": "WANDB_API_KEY",
    "tracking": "WANDB_API_KEY",
    "hf": "HF_TOKEN",
    "hub": "HF_TOKEN",
    "environment": "ENVIRONMENT_API_KEY",
    "task": "ENVIRONMENT_API_KEY",
    "services": "ENVIRONMENT_API_KEY",
    "judge": "JUDGE_API_KEY",
}


def secret_problem(key: str, value: Any) -> str | None:
    """Return why a key with this value must not be in a file, without showing the value; None if it is no secret.

    >>> secret_problem("judge.options.openai_api_key", "...").rsplit(" ", 1)[-1]
    'OPENAI_API_KEY'
    """
    *above, name = key.lower().split(".")
    is_value = isinstance(value, str) and _SECRET_VALUE.fullmatch(value) is not None
    if not _SECRET.search(name) and not is_value:
        return None
    # The key's own name says most, then the nearest table.
    hints = [variable for hint, variable in _VARIABLES.items() if hint in name]
    hints += [variable for part in reversed(above) for hint, variable in _VARIABLES.items() if hint in part]
    variable = hints[0] if hints else re.sub(r"\W", "_", name).upper()
    return (
        "a secret does not belong into a configuration, which is copied beside the run: set the environment variable "
        f"{variable}"
    )


def _locate(model: type[BaseModel], location: Sequence[str | int]) -> tuple[str, type[BaseModel], FieldInfo | None]:
    """Return the dotted key of an error without the parts below a field, its model, and the field."""
    parts: list[str] = []
    info: FieldInfo | None = None
    for part in location:
        parts.append(str(part))
        if isinstance(part, int):  # an entry of a list of tables, whose keys come next
            continue
        info = model.model_fields.get(part)
        nested = None if info is None else section_model(info.annotation) or entry_model(info.annotation)
        if nested is None or len(parts) == len(location):  # below a field are pydantic's own parts: indices, types
            break
        model = nested
    return ".".join(parts), model, info


def _blame(key: str, text: str, info: FieldInfo | None) -> tuple[str, str]:
    section = section_model(info.annotation) if info is not None else None
    match = re.match(r"(\w+)(: )?", text)
    # A validator of a section begins its sentence with the field's name, because pydantic reports the section.
    if section is None or match is None or match[1] not in section.model_fields:
        return key, text.removeprefix("seeds: ")
    return f"{key}.{match[1]}", text[match.end() :] if match[2] else text


def _unknown(key: str, parent: type[BaseModel], root: type[BaseModel]) -> str:
    *above, name = key.split(".")
    everywhere = [(field, f"{section}.{field}") for section, model in sections_of(root) for field in model.model_fields]
    # A key of another section beats a similar one of this section: it was spelled right.
    meant = name if name in dict(everywhere) else ""
    if not meant and above and not difflib.get_close_matches(name, parent.model_fields):
        meant = next(iter(difflib.get_close_matches(name, dict(everywhere))), "")
    if meant:
        return f"unknown key; did you mean {' or '.join(repr(full) for field, full in everywhere if field == meant)}?"
    return f"unknown {'key' if above else 'section'}; {nearest_name(name, parent.model_fields)}"


def _nearest_value(values: Any, key: str) -> Any:
    """Return the value at a dotted key, or the first value on the way that is no table."""
    for part in key.split("."):
        if isinstance(values, list | tuple) and part.isdecimal():
            values = values[int(part)]
            continue
        if not isinstance(values, Mapping) or part not in values:
            break
        values = values[part]
    return values

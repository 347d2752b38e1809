"""The tables of configs/README.md as a promise that settings keep: each default, and the ends of each range."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gspo_gym.base.settings import Settings

README = Path(__file__).parents[2] / "configs" / "README.md"
NO_VALUE = {"absent": None, "required": ...}


def check_promises(settings: type[Settings], section: str, renamed: Mapping[str, str] | None = None) -> set[str]:
    """Assert that the fields of `settings` are as the table of the section says; return those that it has.

    `renamed`: keys of the table that have another name in `settings`.
    """
    checked = set()
    for key, kind, default in _rows(section):
        name = (renamed or {}).get(key, key)
        if name not in settings.model_fields:
            continue
        checked.add(name)
        field = settings.model_fields[name]
        promised = NO_VALUE[default] if default in NO_VALUE else tomllib.loads(f"value = {default.strip('`')}")["value"]
        actual = ... if field.is_required() else field.default
        assert (list(actual) if isinstance(actual, tuple) else actual) == promised, f"{section}.{key}: {actual}"
        taken = TypeAdapter(
            Annotated[(field.annotation, Field(), *field.metadata)], config=ConfigDict(strict=True, allow_inf_nan=False)
        )
        for value, is_taken in _ends(kind):
            assert _takes(taken, value) is is_taken, f"{section}.{key}: {kind}, and {value} is taken: {not is_taken}"
    return checked


def _rows(section: str) -> Iterator[tuple[str, str, str]]:
    """Key, type and default of each row."""
    text = README.read_text(encoding="utf-8").split(f"\n## [{section}]\n")[1].split("\n## ")[0]
    for line in text.splitlines():
        if line.startswith("| `"):
            key, kind, default, *_ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            yield key.strip("`"), kind, default


def _ends(kind: str) -> Iterator[tuple[float, bool]]:
    """The values at and beside the bounds of a type such as "a number, > 0 and <= 1", and whether each is taken."""
    for sign, number in re.findall(r"([<>]=?) (-?\d+)", kind):
        bound = int(number)
        inwards = 1 if ">" in sign else -1
        is_integer = "integer" in kind
        beside = [bound + d if is_integer else math.nextafter(bound, d * math.inf) for d in (inwards, -inwards)]
        yield from ((bound, "=" in sign), (beside[0], True), (beside[1], False))


def _takes(adapter: TypeAdapter[Any], value: float) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True

"""Command-line texts as plain values over what a file says (`gspo_gym.base.tables` reads the file)."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from gspo_gym.config.nested import flatten
from gspo_gym.config.words import Problem, look_up, show

_ABSENT = object()  # where None may be a value
_OVERRIDE = re.compile(r"\s*(?P<key>[\w-]+(\.[\w-]+)+)\s*=(?P<value>.*)", re.DOTALL)


def apply_override(values: dict[str, Any], text: str) -> tuple[str, Problem | None]:
    """Put one `section.key=value` over `values` (Any: as read; the flat form); gives its key and what is wrong.

    A key of the nested form goes where the flat form has it.
    """
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        return text, Problem(text, "expected section.key=value")
    key, value = match["key"], _parse_value(match["value"].strip())
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    flat = flatten(nested)
    if flat.problems:
        return key, flat.problems[0]
    targets = [target for target in flat.written if look_up(flat.values, target, _ABSENT) is not _ABSENT] or [key]
    for target in targets:
        entry = look_up(flat.values, target)
        if isinstance(entry, dict) and target != key and look_up(values, target, _ABSENT) is not _ABSENT:
            continue  # the section itself, whose keys follow
        if (problem := _set(values, target, entry)) is not None:
            return targets[-1], problem
    return targets[-1], None


def _set(values: dict[str, Any], key: str, value: Any) -> Problem | None:
    """Give a key its value (Any: as read), making tables on the way."""
    *above, name = key.split(".")
    table = values
    for part in above:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(key, f"{part} is not a table that could hold it, but {show(table)}")
    table[name] = value
    return None


def _parse_value(text: str) -> Any:
    """A TOML value (Any: of all its types), or the text itself where it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if list(parsed) == ["value"] else text

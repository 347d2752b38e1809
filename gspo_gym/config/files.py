"""Files and command-line texts as plain values: TOML, YAML and JSON, with every key at most once.

YAML is read as version 1.2 has it: `off`, `no` and `on` are texts (a mode is called "off"), and 1e-5 is a number.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gspo_gym.config.nested import flatten
from gspo_gym.config.words import Problem, look_up, show
from gspo_gym.errors import ConfigError, nearest_name

_ABSENT = object()  # where None may be a value
_OVERRIDE = re.compile(r"\s*(?P<key>[\w-]+(\.[\w-]+)+)\s*=(?P<value>.*)", re.DOTALL)


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml is untyped
    """Safe YAML with the scalars of version 1.2, in which a key stands once."""


# Scalars that are not texts, and the characters that one may begin with.
_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ("~", "n", "N", "")),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


def _construct_int(_loader: _StrictLoader, node: Any) -> int:
    return int(node.value)  # 017 is seventeen, and not octal as in version 1.1


def _construct_table(loader: _StrictLoader, node: Any) -> dict[Any, Any]:
    table: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ValueError(f"line {key_node.start_mark.line + 1}: expected a text as key, got {key!r}")
        if key in table:
            raise ValueError(f"line {key_node.start_mark.line + 1}: {key!r} is given twice")
        table[key] = loader.construct_object(value_node, deep=True)
    return table


_StrictLoader.yaml_implicit_resolvers = {}  # none of version 1.1's
for _name, (_pattern, _first) in _SCALARS.items():
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_StrictLoader.add_constructor("tag:yaml.org,2002:map", _construct_table)


def _parse_yaml(text: str) -> Any:
    """The document (Any: as read); nothing at all is an empty table."""
    try:
        document = _StrictLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return {} if document is None else document


def _parse_json(text: str) -> Any:
    """The document (Any: as read)."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [key for key, _ in pairs]
            raise ValueError(f"{next(key for key in names if names.count(key) > 1)!r} is given twice")
        return table

    return json.loads(text, object_pairs_hook=once)


_PARSERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("TOML", tomllib.loads),
    ".yaml": ("YAML", _parse_yaml),
    ".yml": ("YAML", _parse_yaml),
    ".json": ("JSON", _parse_json),
}


def read_file(path: Path) -> dict[str, Any]:
    """The table in a TOML, YAML or JSON file (Any: unchecked); a file of another name is taken as TOML.

    Raises:
        ConfigError: there is no such file, it is not of that format, or it holds no table.
    """
    kind, parse = _PARSERS.get(path.suffix.lower(), _PARSERS[".toml"])
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        folder = path.parent
        siblings = [str(folder / p.name) for p in folder.iterdir() if p.suffix in _PARSERS] if folder.is_dir() else []
        raise ConfigError(f"{path}: there is no such file; {nearest_name(str(path), siblings)}") from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not of that format, or a number without end
        raise ConfigError(f"{path}: cannot be read as {kind}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a table of sections, got {show(document)}")
    return document


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

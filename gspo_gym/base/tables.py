"""Files that people write, as plain values: TOML, YAML and JSON, with every key at most once.

YAML is read as version 1.2 has it: `off`, `no` and `on` are texts (a mode is called "off"), and 1e-5 is a number.
Called by configurations and by rubrics; knows nothing of what is in a file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gspo_gym.errors import ConfigError, nearest_name

_MAX_SHOWN = 60  # characters of a wrong value


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
        raise ConfigError(f"{path}: expected a table of sections, got {_show(document)}")
    return document


def _show(document: Any) -> str:
    text = json.dumps(document, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."

"""Values as TOML: on one line, which `tomli_w` spreads over several, and as they read back."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w


def inline(value: Any) -> str:
    """A value (Any: whatever TOML holds) as TOML on one line.

    >>> inline({"a": (1, 2.5), "b c": {"d": True}})
    '{ a = [1, 2.5], "b c" = { d = true } }'
    """
    if isinstance(value, Mapping):
        entries = [f"{_key(key)} = {inline(entry)}" for key, entry in value.items()]
        return "{ " + ", ".join(entries) + " }" if entries else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(entry) for entry in value) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def as_toml_holds_it(table: dict[str, Any]) -> dict[str, Any]:
    """The table (Any: free) as it reads back from a TOML file.

    Raises:
        ValueError: TOML cannot hold it.
    """
    try:
        return tomllib.loads(tomli_w.dumps(table))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"expected values that TOML can hold (config.toml will hold them): {error}") from error


def _key(key: str) -> str:
    """A key with quotes where it needs them."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")

"""A value as TOML on one line, which `tomli_w` spreads over several."""

from __future__ import annotations

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


def _key(key: str) -> str:
    """A key with quotes where it needs them."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")

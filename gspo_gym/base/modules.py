"""Import what a name in a file or on a command line means."""

from __future__ import annotations

import difflib
import importlib
from pathlib import PurePath
from types import ModuleType
from typing import Any

from gspo_gym.errors import UnknownNameError


def named_module(name: str, module_name: str) -> ModuleType:
    """Import and return a module, which is a part of the name that a user gave.

    Raises:
        UnknownNameError: there is none; `name`, with what it is the name of, begins the text.
    """
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        hint = file_hint(module_name)
        raise UnknownNameError(f"{name}: cannot import {module_name!r}: {error}{hint}") from error


def named_object(name: str, what: str) -> Any:
    """Import and return MODULE:NAME, or raise an UnknownNameError; `what` describes its use in errors.

    >>> named_object("math:pi", "a number") > 3
    True
    """
    module_name, _, path = name.partition(":")
    if not path:
        raise UnknownNameError(f"{what} {name!r}: expected MODULE:NAME{file_hint(name)}")
    value: Any = named_module(f"{what} {name!r}", module_name)
    for part in path.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, dir(value), n=1)  # a module has too many names to list all
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownNameError(f"{what} {name!r}: {module_name} has no {part!r}{hint}")
        value = getattr(value, part)
    return value


def file_hint(name: str) -> str:
    """Return how a file of Python is named as a module; "" for what is none.

    >>> file_hint("games/mine.py")
    '; a file is named as a module, from a folder where it can be imported: games.mine:NAME'
    """
    path = PurePath(name)
    if path.suffix != ".py":
        return ""
    parts = [path.stem] if path.is_absolute() else path.with_suffix("").parts
    return f"; a file is named as a module, from a folder where it can be imported: {'.'.join(parts)}:NAME"

"""The program that runs inside the sandbox: imports the model's module and answers calls; judges nothing.

Started as a script in a fresh folder, with a Python literal on standard input: (nonce, module's name, calls). Each call
is answered by one line "nonce index literal" on standard output. What is expected of a call never comes here, so there
is nothing to read and nothing to forge: only the right value is worth printing.

The sandbox keeps the module from the disk, where the working version of every module lies. Calls are also answered in
the process of the environment, for code that is trusted (`trusted.py`). No imports but sys: every millisecond is paid
for at each run of the tests.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own costs 5 ms
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .cases import Call

_PLAIN = (int, str, bool, float, type(None))


def answer(namespace: Mapping[str, Any], call: Call) -> tuple[str, Any]:
    """("returned", value) or ("raised", name of a built-in exception); an object is told by its type's name."""
    name, arguments, steps = call
    try:
        made = namespace[name](*arguments)
        if steps is None:
            return "returned", literal(made)
        return "returned", [literal(getattr(made, method)(*values)) for method, values in steps]
    except TooManySteps:
        raise
    except BaseException as error:  # a SystemExit of the module's, too, is its answer to this call
        return "raised", next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


class TooManySteps(BaseException):
    """Trusted code ran for longer than it may."""


def literal(value: Any, depth: int = 20) -> Any:
    """A copy made of plain values, without a call of any method that the module may have written (Any: it made it)."""
    kind = type(value)
    if kind in _PLAIN or depth == 0:
        return value if kind in _PLAIN else "..."
    if kind in (list, tuple, set, frozenset):
        parts = [literal(part, depth - 1) for part in value]
        return tuple(parts) if kind is tuple else parts if kind is list else ("set", sorted(parts, key=repr))
    if kind is dict:
        return {str(literal(key, depth - 1)): literal(part, depth - 1) for key, part in value.items()}
    return ("object", str(kind.__name__))


def main() -> None:
    """Answer the calls on standard input."""
    import os

    nonce, name, calls = eval(sys.stdin.read())  # a literal that the environment wrote
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)  # what the module prints is no answer
    sys.path.insert(0, os.getcwd())
    try:
        namespace = vars(__import__(name))
    except BaseException as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        message = error.msg if isinstance(error, SyntaxError) else error
        output.write(f"{nonce} import {f'{type(error).__name__}: {message}{where}'!r}\n")
        output.flush()
        os._exit(0)
    for index, call in enumerate(calls):
        output.write(f"{nonce} {index} {answer(namespace, call)!r}\n")
        output.flush()
    os._exit(0)  # nothing that the module left for the end runs


if __name__ == "__main__":
    main()

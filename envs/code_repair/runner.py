"""The program that runs inside the sandbox: imports the model's module and answers calls; judges nothing.

Started as a script in a fresh folder, with a Python literal on standard input: (nonce, module's name, calls). Each call
is answered by one line "nonce index literal" on standard output. What is expected of a call never comes here, so there
is nothing to read and nothing to forge: only the right value is worth printing.

The audit hook keeps the module from reading files beyond the standard library and from starting programs, because the
working version of every module lies on this disk. Calls are also answered in the process of the environment, for code
that is trusted (`trusted.py`). No imports but sys: every millisecond is paid for at each run of the tests.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own costs 5 ms
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from .cases import Call

_PLAIN = (int, str, bool, float, type(None))
_REFUSED_EVENTS = (
    "subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.chdir", "os.fchdir", "os.link",
    "os.symlink", "os.rename", "ctypes.", "socket.", "gc.", "sqlite3.", "mmap.", "pty.", "cpython.", "sys.addaudithook",
    "time.sleep",
)  # fmt: skip
_REFUSED_IMPORTS = ("ctypes", "_ctypes", "_posixsubprocess", "readline", "_sqlite3", "_imp", "mmap", "gspo_gym_envs")


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


def guard(*folders: str) -> Any:
    """The audit hook (Any: its signature is Python's). All that it uses is bound here, where nothing can patch it."""

    inside = tuple(folder + "/" for folder in folders)

    def hook(
        event: str,
        arguments: Sequence[Any],
        *,
        refused: tuple[str, ...] = _REFUSED_EVENTS,
        imports: tuple[str, ...] = _REFUSED_IMPORTS,
        kind: type = type,
        text: type = str,
        number: type = int,
        denied: type[BaseException] = PermissionError,
    ) -> None:
        if event.startswith(refused) or (event == "import" and arguments[0].startswith(imports)):
            raise denied(event)
        if event not in ("open", "os.listdir", "os.scandir"):
            return
        path = arguments[0]
        if kind(path) is number or path is None:
            return
        if kind(path) is not text or ".." in path or "-packages" in path:
            raise denied(event)
        if path.startswith("/") and path not in folders and not path.startswith(inside):
            raise denied(event)

    return hook


def main() -> None:
    """Answer the calls on standard input."""
    import os

    nonce, name, calls = eval(sys.stdin.read())  # a literal that the environment wrote
    output = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)  # what the module prints is no answer
    sys.path.insert(0, os.getcwd())
    sys.addaudithook(guard(os.getcwd(), os.path.dirname(os.__file__)))
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

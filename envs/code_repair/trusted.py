"""Runs the library's own code, whole or mutated, in this process: quick, and stopped by a count of steps.

Only for text that comes from this package. What a model wrote runs in the sandbox (`grading.py`).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

from .cases import Call
from .runner import TooManySteps, answer
from .syntax import compiled, literal, parse

MAX_STEPS = 20_000  # of one call; the library's calls take some hundreds
_TICK = "__tick__"

Answer = tuple[str, Any]  # ("returned", a literal) or ("raised", the name of an exception)


def answers_of(source: str, calls: Sequence[Call]) -> tuple[Answer, ...] | None:
    """What the module answers to the calls, in order; None if one of them does not end or it cannot be loaded.

    Counting steps, and not time, makes the answer the same on every machine.
    """
    steps = 0

    def tick() -> None:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            raise TooManySteps

    answers = []
    try:
        namespace = _namespace(source, tick)
        for call in calls:
            steps = 0
            answers.append(answer(namespace, _fresh(call)))
    except (TooManySteps, Exception):  # Exception: only loading can raise one
        return None
    return tuple(answers)


def _namespace(source: str, tick: Callable[[], None]) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "trusted", _TICK: tick}
    exec(_compiled(source), namespace)
    return namespace


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> Any:
    tree = parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While | ast.FunctionDef):
            call = ast.Expr(ast.Call(ast.Name(_TICK, ast.Load()), [], []))
            node.body.insert(0, call)
    return compiled(tree, "<library>")


def _fresh(call: Call) -> Call:
    """A copy, because modules may change their arguments."""
    fresh: Call = literal(repr(call))
    return fresh

"""The hand-written players of CodeRepair. They call only tools, and make no mistakes in calling them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message, ToolCall

from .mutations import edits_of
from .tiny import FAMILIES, operator_in, operators_of_kind

Call = tuple[str, Mapping[str, Any]]


def undo_the_bugs(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Reads the file, puts the lines of the working module back, runs the tests and submits.

    `env` is a `CodeRepair` after `reset` (Any: `PolicyFactory` fixes the type).
    """
    task = env.task
    if env.level == "tiny":
        old, new = operator_in(task.source), operator_in(task.solution)
        if "fix" in _offered(env):
            return _plan(env, [("fix", {"new": new})])
    else:
        old, new = smallest_change(task.source, task.solution)
    edit = _edit(env, old, new, is_whole=False)
    return _plan(env, [("read_file", {"path": env.path}), edit, ("run_tests", {}), ("submit", {})])


def random_change(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Reads, makes one random small change, runs the tests with one chance in two, and submits.

    One file in two is written whole, so that every tool for editing has a player. At level tiny the change is to
    another operator of the same family.
    """
    if env.level == "tiny":
        return _change_operator(env, tuple(FAMILIES[_function(env)].operators.values()), rng)
    source = env.task.source
    changes = [change for found in edits_of(source).values() for change in found]
    old, new = smallest_change(source, changes[int(rng.integers(len(changes)))].applied_to(source))
    return _change(env, old, new, rng)


def right_kind(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """As `random_change`; at level tiny the operator gives what the function's name asks for, a number or a truth."""
    if env.level == "tiny":
        return _change_operator(env, operators_of_kind(_function(env)), rng)
    return random_change(env, rng)


def _function(env: Any) -> str:
    name: str = env.task.visible[0].call[0]
    return name


def _change_operator(env: Any, operators: Sequence[str], rng: np.random.Generator) -> ScriptedPolicy:
    old = operator_in(env.task.source)
    new = str(rng.choice([each for each in operators if each != old]))
    return _plan(env, [("fix", {"new": new})]) if "fix" in _offered(env) else _change(env, old, new, rng)


def _change(env: Any, old: str, new: str, rng: np.random.Generator) -> ScriptedPolicy:
    tests: list[Call] = [("run_tests", {})] if rng.random() < 0.5 else []
    edit = _edit(env, old, new, is_whole=bool(rng.random() < 0.5))
    return _plan(env, [("read_file", {"path": env.path}), edit, *tests, ("submit", {})])


def _edit(env: Any, old: str, new: str, *, is_whole: bool) -> Call:
    """The call that makes a change, by the tool that is wanted if both are offered."""
    offered = _offered(env)
    if "replace" not in offered or (is_whole and "write_file" in offered):
        return "write_file", {"path": env.path, "text": env.task.source.replace(old, new)}
    return "replace", {"path": env.path, "old": old, "new": new}


def smallest_change(source: str, target: str) -> tuple[str, str]:
    """(old, new): whole lines that make `target` of `source`, with as many around as make `old` occur once."""
    a, b = source.splitlines(keepends=True), target.splitlines(keepends=True)
    shorter = min(len(a), len(b))
    start = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - start) if a[-1 - i] != b[-1 - i]), shorter - start)
    while source.count("".join(a[start : len(a) - tail])) != 1:
        start, tail = max(0, start - 1), max(0, tail - 1)
    return "".join(a[start : len(a) - tail]), "".join(b[start : len(b) - tail])


def _offered(env: Any) -> set[str]:
    return {tool.name for tool in env.tools}


def _plan(env: Any, calls: Sequence[Call]) -> ScriptedPolicy:
    """Makes the calls one a turn; leaves out tools that are not offered."""
    offered = _offered(env)
    planned = [call for call in calls if call[0] in offered]

    def play(messages: Sequence[Message]) -> Message:
        turn = sum(message.role == "assistant" for message in messages)
        name, arguments = planned[min(turn, len(planned) - 1)]
        return Message("assistant", "", tool_calls=(ToolCall(f"call_{turn}", name, arguments),))

    return play

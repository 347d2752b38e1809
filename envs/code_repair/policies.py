"""The hand-written players of CodeRepair. They call only tools, and make no mistakes in calling them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message, ToolCall

from .mutations import edits_of

Call = tuple[str, Mapping[str, Any]]


def undo_the_bugs(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Reads the file, puts the lines of the working module back, runs the tests and submits.

    `env` is a `CodeRepair` after `reset` (Any: `PolicyFactory` fixes the type).
    """
    task = env.task
    old, new = smallest_change(task.source, task.solution)
    return _plan(
        [
            ("read_file", {"path": env.path}),
            ("replace", {"path": env.path, "old": old, "new": new}),
            ("run_tests", {}),
            ("submit", {}),
        ]
    )


def random_change(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Reads, makes one random small change, runs the tests with one chance in two, and submits.

    One file in two is written whole, so that every tool for editing has a player.
    """
    changes = [change for found in edits_of(env.task.source).values() for change in found]
    changed = changes[int(rng.integers(len(changes)))].applied_to(env.task.source)
    old, new = smallest_change(env.task.source, changed)
    tests: list[Call] = [("run_tests", {})] if rng.random() < 0.5 else []
    edit: Call = ("replace", {"path": env.path, "old": old, "new": new})
    if rng.random() < 0.5:
        edit = ("write_file", {"path": env.path, "text": changed})
    return _plan([("read_file", {"path": env.path}), edit, *tests, ("submit", {})])


def smallest_change(source: str, target: str) -> tuple[str, str]:
    """(old, new): whole lines that make `target` of `source`, with as many around as make `old` occur once."""
    a, b = source.splitlines(keepends=True), target.splitlines(keepends=True)
    shorter = min(len(a), len(b))
    start = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - start) if a[-1 - i] != b[-1 - i]), shorter - start)
    while source.count("".join(a[start : len(a) - tail])) != 1:
        start, tail = max(0, start - 1), max(0, tail - 1)
    return "".join(a[start : len(a) - tail]), "".join(b[start : len(b) - tail])


def _plan(calls: Sequence[Call]) -> ScriptedPolicy:
    def play(messages: Sequence[Message]) -> Message:
        turn = sum(message.role == "assistant" for message in messages)
        name, arguments = calls[min(turn, len(calls) - 1)]
        return Message("assistant", "", tool_calls=(ToolCall(f"call_{turn}", name, arguments),))

    return play

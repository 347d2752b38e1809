"""The hand-written players of Countdown; they see the numbers and the target, not the task's own solution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message

from .arithmetic import OPERATIONS, ExpressionError, combined, solve


def search(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Makes the target in the fewest operations, one a turn; takes a step back where the rest no longer allows it.

    `env` is a `Countdown` after `reset` (Any: `PolicyFactory` fixes the type).
    """

    def play(_messages: Sequence[Message]) -> str:
        steps = solve(env.pool, env.target)
        return "".join(map(str, steps[0])) if steps else "undo"

    return play


def random_steps(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Two of the numbers and a legal operation, uniformly; takes a step back when one number is left."""

    def play(_messages: Sequence[Message]) -> str:
        legal = [
            f"{a}{operation}{b}"
            for i, a in enumerate(env.pool)
            for j, b in enumerate(env.pool)
            for operation in OPERATIONS
            if i != j and _is_legal(a, operation, b)
        ]
        return str(rng.choice(legal)) if legal else "undo"

    return play


def _is_legal(a: int, operation: str, b: int) -> bool:
    try:
        combined(a, operation, b)
    except ExpressionError:
        return False
    return True

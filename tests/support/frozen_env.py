"""An environment in a thread that matches actions against a pattern which for one task's action never ends.

Matching holds the interpreter's lock.
"""

from __future__ import annotations

import re
from typing import Any

from gspo_gym.env.core import PolicyFactory, TextEnv
from gspo_gym.env.registry import register

FROZEN_SEED = 2
HARMLESS, CATASTROPHIC = "go", "a" * 64


def catastrophe(text: str) -> None:
    """Match `text`; for the catastrophic one never return, nor let any other thread of the process run."""
    re.match(r"(a+)+b", text)


def _says(env: Any, rng: Any) -> Any:
    return lambda messages: CATASTROPHIC if messages[-1].content == f"task {FROZEN_SEED}" else HARMLESS


class Patterns(TextEnv):
    """Returns 1 for every answer that it comes to."""

    isolation = "thread"
    reward_range = (-1.0, 1.0)
    policies: dict[str, PolicyFactory] = {"random": _says}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return f"task {seed}", {}

    def step(self, action: str) -> Any:
        catastrophe(action)
        return "", 1.0, True, False, {}


register("Patterns-v0", entry_point=Patterns)

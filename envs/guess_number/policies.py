"""The hand-written players of GuessNumber. Neither reads the hidden number: what they know is in the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message


def binary_search(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Guesses the middle of what the hints leave; always finds one of n numbers in floor(log2 n) + 1 guesses.

    `env` is any object with the integers `low` and `high` (Any: `PolicyFactory` fixes the type).
    """
    low, high = env.low, env.high

    def play(messages: Sequence[Message]) -> str:
        smallest, largest = bounds_from_hints(messages, low, high)
        return str((smallest + largest) // 2)

    return play


def random_guess(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Guesses uniformly from the whole range every time and ignores the hints."""
    low, high = env.low, env.high

    def play(_messages: Sequence[Message]) -> str:
        return str(int(rng.integers(low, high + 1)))

    return play


def bounds_from_hints(messages: Sequence[Message], low: int, high: int) -> tuple[int, int]:
    """The smallest and largest number that the hints in a conversation have not ruled out.

    >>> said = [Message("user", "Guess 1-8. 4 tries."), Message("assistant", "4"), Message("user", "higher")]
    >>> bounds_from_hints(said, 1, 8)
    (5, 8)
    """
    for said, heard in pairwise(messages):
        if said.role != "assistant" or heard.role != "user":
            continue
        if "higher" in heard.content:
            low = max(low, int(said.content) + 1)
        elif "lower" in heard.content:
            high = min(high, int(said.content) - 1)
    return low, high

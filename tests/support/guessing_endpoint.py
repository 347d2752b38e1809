"""A model behind an OpenAI-compatible endpoint that gives text only, and plays GuessNumber: well, or at random.

`FaultyServer(dialect="text", write=...)` serves it. What it says depends on the request alone, its seed included.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

# A guess and what the game said to it, in the chat format of the tiny models.
_ANSWERED = re.compile(r"assistant\n(\d+)<\|im_end\|>\n<\|im_start\|>user\n(higher|lower)")


def guessing(share_of_search: float) -> Callable[[dict[str, Any]], str]:
    """Halves the range in that share of the answers, and guesses any number of the game's range in the others."""

    def write(body: dict[str, Any]) -> str:
        rng = np.random.default_rng(body["seed"])
        low, high = game = _range(body["prompt"])
        for guess, hint in _ANSWERED.findall(body["prompt"]):
            low, high = (max(low, int(guess) + 1), high) if hint == "higher" else (low, min(high, int(guess) - 1))
        if rng.random() < share_of_search:
            return str((low + high) // 2)
        return str(rng.integers(game[0], game[1] + 1))

    return write


def _range(prompt: str) -> tuple[int, int]:
    """Of the game; of a probe, which is no game, any."""
    found = re.search(r"Guess (\d+)-(\d+)\.", prompt)
    return (int(found[1]), int(found[2])) if found else (1, 8)

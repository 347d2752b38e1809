"""Calls that test the library: for every module some fixed ones at its edges, and a generator of any number of others.

A `Draw` gives random arguments; what a call should return is not written here, the working module says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# A call: (function, arguments, None), or of a class (name, arguments, ((method, arguments), ...)); literals throughout.
Call = tuple[str, tuple[Any, ...], "tuple[tuple[str, tuple[Any, ...]], ...] | None"]


class Draw:
    """Small random arguments."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def number(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return int(self._rng.integers(low, high + 1))

    def numbers(self, most: int, low: int, high: int, *, least: int = 0) -> list[int]:
        """A list of `least` to `most` of them."""
        return [self.number(low, high) for _ in range(self.number(least, most))]

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Any of them (Any: whatever they are)."""
        return choices[self.number(0, len(choices) - 1)]

    def text(self, letters: str, most: int, *, least: int = 0) -> str:
        """Random letters."""
        return "".join(self.one_of(letters) for _ in range(self.number(least, most)))

    def texts(self, letters: str, most: int, length: int, *, least: int = 0) -> list[str]:
        """A list of non-empty texts."""
        return [self.text(letters, length, least=1) for _ in range(self.number(least, most))]

    def grid(self, letters: str, most: int) -> list[str]:
        """Rows of equal length."""
        width = self.number(1, most)
        return [self.text(letters, width, least=width) for _ in range(self.number(1, most))]

    def matrix(self, height: int, width: int) -> list[list[int]]:
        """Small integers."""
        return [[self.number(-4, 9) for _ in range(width)] for _ in range(height)]


def call(name: str, *arguments: Any) -> Call:
    """A call of a function (Any: literals)."""
    return name, arguments, None


@dataclass(frozen=True, slots=True)
class Cases:
    """The tests of a module: `fixed` calls and `draw`, which makes one more each time."""

    fixed: tuple[Call, ...]
    draw: Callable[[Draw], Call]


def choosing(*makers: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
    """A draw of one of several kinds of calls."""

    def draw(d: Draw) -> Call:
        made: Call = d.one_of(makers)(d)
        return made

    return draw

"""Tasks of Countdown: numbers, and a target that can be made of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gspo_gym.errors import ConfigError

from .arithmetic import OPERATIONS, ExpressionError, combined

_MAX_DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Task:
    """Numbers in rising order, and what is to be made of them."""

    numbers: tuple[int, ...]
    target: int


@dataclass(frozen=True, slots=True)
class TaskRanges:
    """What tasks are drawn from.

    Attributes:
        num_numbers: how many are given.
        max_number: they are uniform in 1 .. max_number.
        min_target, max_target: where the target lies, both included.
    """

    num_numbers: int
    max_number: int
    min_target: int
    max_target: int

    def draw(self, rng: np.random.Generator) -> Task:
        """A solvable task: its target is made of its numbers, all of them, by random operations.

        Raises:
            ConfigError: none is found, because the ranges leave hardly any.
        """
        for _ in range(_MAX_DRAWS):
            numbers = sorted(int(number) for number in rng.integers(1, self.max_number + 1, size=self.num_numbers))
            target = _made_of(numbers, rng)
            if target is not None and target not in numbers and self.min_target <= target <= self.max_target:
                return Task(tuple(numbers), target)
        raise ConfigError(
            f"Countdown: expected ranges in which there are tasks, found none in {_MAX_DRAWS} with {self}"
        )


def _made_of(numbers: list[int], rng: np.random.Generator) -> int | None:
    """The value of a random expression over all of the numbers; None: one of its operations is illegal or idle."""
    pool = list(numbers)
    while len(pool) > 1:
        a, b = (pool.pop(int(rng.integers(len(pool)))) for _ in range(2))
        try:
            value = combined(a, OPERATIONS[int(rng.integers(len(OPERATIONS)))], b)
        except ExpressionError:
            return None
        if value in (a, b):
            return None  # an operation that changes nothing makes an easier task than the numbers promise
        pool.append(value)
    return pool[0]

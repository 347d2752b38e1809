"""The arithmetic of Countdown: reading an expression, the rules of its four operations, and finding a solution.

Nothing is evaluated as Python: an expression is read token by token by the grammar in `read_expression`, over whole
numbers from 1 up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

OPERATIONS = "+-*/"
_MAX_CHARACTERS = 100  # far more than six numbers need; what is read is bounded before it is looked at
_MAX_DEPTH = 10  # brackets in brackets; six numbers need four
_TOKEN = re.compile(r"\s*([0-9]{1,9}|[-+*/()])", re.ASCII)  # nine digits: no number of a task has more


class ExpressionError(ValueError):
    """Text that is no legal expression; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Expression:
    """What was read: its value, and the numbers in it from left to right."""

    value: int
    operands: tuple[int, ...]


def combined(a: int, operation: str, b: int) -> int:
    """The result of one operation, a whole number from 1 up like everything in this game.

    Raises:
        ExpressionError: a difference below 1, or a quotient that is not whole.

    >>> combined(8, "/", 2), combined(8, "-", 2)
    (4, 6)
    """
    if operation == "+":
        return a + b
    if operation == "*":
        return a * b
    if operation == "-":
        if a <= b:
            raise ExpressionError(f"{a}-{b} is below 1")
        return a - b
    if a % b:
        raise ExpressionError(f"{a}/{b} is not whole")
    return a // b


def read_expression(text: str) -> Expression:
    """Read `sum := product {(+|-) product}; product := atom {(*|/) atom}; atom := number | ( sum )`.

    Raises:
        ExpressionError: the text is anything else, too long, too deep, has no operation, or breaks a rule on the way.

    >>> read_expression("(8-2) * 7")
    Expression(value=42, operands=(8, 2, 7))
    """
    if len(text) > _MAX_CHARACTERS:
        raise ExpressionError("too long")
    reader = _Reader(tuple(_tokens(text.strip())))
    value = reader.sum(0)
    if reader.peek():
        raise ExpressionError("not an expression")
    if len(reader.operands) < 2:
        raise ExpressionError("no operation")
    return Expression(value, tuple(reader.operands))


def solve(numbers: Sequence[int], target: int) -> list[tuple[int, str, int]] | None:
    """The fewest operations (a, operation, b) that make the target, each on what those before leave; None: impossible.

    Exhaustive, by depth: every pool of numbers that can be reached is looked at once a depth. Operations that change
    no number (times or by 1, a - b = b) are left out, because a shorter way does without them.

    >>> solve([2, 7, 8], 42)
    [(8, '-', 2), (7, '*', 6)]
    """
    for num_operations in range(len(numbers)):
        found = _solve(tuple(sorted(numbers)), target, num_operations, set())
        if found is not None:
            return found
    return None


def without(pool: Sequence[int], used: Sequence[int]) -> tuple[int, ...]:
    """The pool without the numbers used, each as often as it was used.

    Raises:
        ExpressionError: one is not there, or not that often.
    """
    left = list(pool)
    for number in used:
        if number not in left:
            raise ExpressionError(f"no {number} left" if number in pool else f"there is no {number}")
        left.remove(number)
    return tuple(left)


def _tokens(text: str) -> Iterator[str]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError("not an expression")
        yield match[1]
        position = match.end()


class _Reader:
    """A recursive descent over tokens; `operands` are the numbers met so far."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens, self._position = tokens, 0
        self.operands: list[int] = []

    def peek(self) -> str:
        """The next token; "" at the end."""
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def sum(self, depth: int) -> int:
        value = self._product(depth)
        while self.peek() in ("+", "-"):
            value = combined(value, self._take(), self._product(depth))
        return value

    def _product(self, depth: int) -> int:
        value = self._atom(depth)
        while self.peek() in ("*", "/"):
            value = combined(value, self._take(), self._atom(depth))
        return value

    def _atom(self, depth: int) -> int:
        token = self._take()
        if token == "(" and depth < _MAX_DEPTH:
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ExpressionError("not an expression")
            return value
        if not token.isdecimal() or int(token) == 0:
            raise ExpressionError("not an expression")
        self.operands.append(int(token))
        return self.operands[-1]

    def _take(self) -> str:
        token = self.peek()
        self._position += 1
        return token


def _solve(
    pool: tuple[int, ...], target: int, num_operations: int, seen: set[tuple[int, ...]]
) -> list[tuple[int, str, int]] | None:
    """As `solve`, in exactly so many operations; `pool` is sorted and `seen` holds pools that lead nowhere."""
    if num_operations == 0:
        return [] if target in pool else None
    if pool in seen:
        return None
    seen.add(pool)
    for i, j in combinations(range(len(pool)), 2):
        rest = (*pool[:i], *pool[i + 1 : j], *pool[j + 1 :])
        for step, result in _useful_steps(pool[i], pool[j]):
            if num_operations == 1 and result != target:
                continue
            found = _solve(tuple(sorted((*rest, result))), target, num_operations - 1, seen)
            if found is not None:
                return [step, *found]
    return None


def _useful_steps(small: int, large: int) -> Iterator[tuple[tuple[int, str, int], int]]:
    yield (large, "+", small), large + small
    if large - small not in (0, small):
        yield (large, "-", small), large - small
    if small > 1:
        yield (large, "*", small), large * small
        if large % small == 0:
            yield (large, "/", small), large // small

"""Level tiny: a function of two lines whose name says what it returns, with the wrong operator in it.

The functions with an operator between two numbers are one family, those that call a built-in function on a list are
the other. A bug puts another operator of the same family in, so every file that can arise by a bug or by its repair is
known beforehand: `Task.own_texts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .cases import Call, Draw, call
from .tasks import Task, Test, num_right
from .trusted import answers_of

MODULE = "f"
NUM_HIDDEN = 9
_MIN_HIDDEN_FAILURES = 2  # of each other operator of the family
_LETTERS = "abcdghkmnpqstuvwxyz"  # names of arguments
_MAX_DRAWS = 1_000  # of tests until they tell the operators apart; some 2 are needed


@dataclass(frozen=True, slots=True)
class Family:
    """Functions whose operators can stand in for each other.

    Attributes:
        bug: the kind of bug, as the full level names it.
        text: of the file, with the places {name}, {operator}, {x} and {y}.
        operators: by the name of the function.
        held_out: a held-out task has the wrong operator that is so many places behind the right one, a training task
            any other.
    """

    bug: str
    text: str
    operators: Mapping[str, str]
    held_out: int


OF_TWO = Family(
    "operator",
    "def {name}({x}, {y}):\n    return {x} {operator} {y}\n",
    {
        "sum": "+",
        "difference": "-",
        "product": "*",
        "quotient": "//",
        "remainder": "%",
        "below": "<",
        "above": ">",
        "same": "==",
    },
    held_out=3,
)
OF_LIST = Family(
    "wrong function",
    "def {name}({x}):\n    return {operator}({x})\n",
    {"largest": "max", "smallest": "min", "total": "sum", "length": "len"},
    held_out=2,
)
_OF_TRUTH = ("<", ">", "==")
FAMILIES: Mapping[str, Family] = {name: family for family in (OF_TWO, OF_LIST) for name in family.operators}
FUNCTIONS = tuple(FAMILIES)


def draw_tiny_task(rng: np.random.Generator, names: tuple[str, ...], *, is_held_out: bool) -> Task:
    """Return a task of one of these functions: one shown test, which fails, and `NUM_HIDDEN` hidden ones."""
    name = names[int(rng.integers(len(names)))]
    family = FAMILIES[name]
    x, y = (_LETTERS[int(index)] for index in rng.choice(len(_LETTERS), 2, replace=False))
    texts = {each: family.text.format(name=name, operator=each, x=x, y=y) for each in family.operators.values()}
    right = family.operators[name]
    wrongs = wrong_operators(name, is_held_out=is_held_out)
    wrong = wrongs[int(rng.integers(len(wrongs)))]
    for _ in range(_MAX_DRAWS):
        shown, *hidden = _draw_tests(name, texts[right], rng)
        failures = {each: len(hidden) - num_right(text, tuple(hidden)) for each, text in texts.items() if each != right}
        if num_right(texts[wrong], (shown,)) == 0 and min(failures.values()) >= _MIN_HIDDEN_FAILURES:
            own_texts = frozenset(texts.values())
            return Task(MODULE, texts[wrong], texts[right], (family.bug,), (shown,), tuple(hidden), 0, own_texts)
    raise AssertionError(f"{name}: none of {_MAX_DRAWS} draws of tests tells the operators apart")


def wrong_operators(name: str, *, is_held_out: bool) -> tuple[str, ...]:
    """Return the operators that tasks of a function have in place of the right one."""
    family = FAMILIES[name]
    operators = list(family.operators.values())
    right = operators.index(family.operators[name])
    held_out = operators[(right + family.held_out) % len(operators)]
    return (held_out,) if is_held_out else tuple(each for each in operators if each not in (operators[right], held_out))


def operators_of_kind(name: str) -> tuple[str, ...]:
    """Return the operators that give the kind of value that a function is named for: a number or a truth.

    >>> operators_of_kind("below"), operators_of_kind("total")
    (('<', '>', '=='), ('max', 'min', 'sum', 'len'))
    """
    operators = tuple(FAMILIES[name].operators.values())
    return tuple(each for each in operators if (each in _OF_TRUTH) == (FAMILIES[name].operators[name] in _OF_TRUTH))


def operator_in(source: str) -> str:
    """Return the operator of a level-tiny file.

    >>> operator_in("def sum(a, b):\\n    return a - b\\n"), operator_in("def largest(a):\\n    return min(a)\\n")
    ('-', 'min')
    """
    expression = source.partition("return ")[2]
    return expression.split()[1] if " " in expression else expression.partition("(")[0]


def _draw_tests(name: str, solution: str, rng: np.random.Generator) -> list[Test]:
    """Return one more test than `NUM_HIDDEN`, each of another call."""
    draw = Draw(rng)
    calls: dict[str, Call] = {}
    while len(calls) < 1 + NUM_HIDDEN:
        made = _draw_call(name, draw)
        calls.setdefault(repr(made), made)
    answers = answers_of(solution, list(calls.values()))
    assert answers is not None, f"{name}: the working file does not work"
    return [Test(each, answer) for each, answer in zip(calls.values(), answers, strict=True)]


def _draw_call(name: str, draw: Draw) -> Call:
    if FAMILIES[name] is OF_LIST:
        return call(name, draw.numbers(4, 1, 9, least=2))
    first = draw.number(1, 9)
    return call(name, first, first if draw.number(0, 3) == 0 else draw.number(1, 9))  # equal ones, for "same"

"""A task: a module of the library with bugs in it, the tests that are shown, and the hidden ones that decide.

Everything follows from the generator. Bugs are taken only if shown and hidden tests fail on them; this is found out by
running them here, on our own code, with a count of steps for a clock (`trusted.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .cases import Call, Cases, Draw
from .cases_of_numbers import OF_NUMBERS
from .cases_of_structures import OF_STRUCTURES
from .cases_of_text import OF_TEXT
from .mutations import edits_of
from .trusted import Answer, answers_of

CASES: Mapping[str, Cases] = {**OF_TEXT, **OF_NUMBERS, **OF_STRUCTURES}

# Never seen in training: one or two of each sort.
HELD_OUT = ("run_length", "word_wrap", "durations", "stack_machine", "calendar_days", "intervals", "maze", "min_heap")
TRAINING = tuple(sorted(set(CASES) - set(HELD_OUT)))

NUM_VISIBLE = 8
NUM_HIDDEN = 24
_MIN_HIDDEN_FAILURES = 2
_MAX_TRIES = 400  # bugs tried before a module is given up; every module has some (a test counts them)


@dataclass(frozen=True, slots=True)
class Test:
    """A call and its right answer."""

    call: Call
    expected: Answer

    @property
    def text(self) -> str:
        """As the model reads it, such as "to_roman(4) -> 'IV'"."""
        return f"{shown_call(self.call)} -> {shown_answer(self.expected)}"


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be repaired.

    Attributes:
        name: of the module, without ".py".
        source: with the bugs. solution: without them.
        bugs: their kinds.
        visible, hidden: the tests; no call is in both.
        num_passing: of the visible ones at the start.
        own_texts: texts of the file that this package wrote; what is equal to one needs no sandbox.
    """

    name: str
    source: str
    solution: str
    bugs: tuple[str, ...]
    visible: tuple[Test, ...]
    hidden: tuple[Test, ...]
    num_passing: int
    own_texts: frozenset[str] = frozenset()


def draw_task(rng: np.random.Generator, names: tuple[str, ...], *, num_bugs: int) -> Task:
    """A task of one of these modules."""
    name = names[int(rng.integers(len(names)))]
    solution = source_of(name)
    visible, hidden = _draw_tests(name, solution, rng)
    for _ in range(_MAX_TRIES):
        source, bugs = _with_bugs(solution, rng, num_bugs)
        num_passing, failing = num_right(source, visible), len(hidden) - num_right(source, hidden)
        if 0 <= num_passing < len(visible) and _MIN_HIDDEN_FAILURES <= failing <= len(hidden):
            return Task(name, source, solution, bugs, visible, hidden, num_passing)
    raise AssertionError(f"{name}: none of {_MAX_TRIES} bugs is found by its tests")


@functools.cache
def source_of(name: str) -> str:
    """The working module's text."""
    return (Path(__file__).parent / "library" / f"{name}.py").read_text(encoding="utf-8")


def num_right(source: str, tests: tuple[Test, ...]) -> int:
    """How many tests our own module passes; -1 if it does not load or end."""
    answers = answers_of(source, [test.call for test in tests])
    if answers is None:
        return -1
    return sum(is_right(answer, test) for answer, test in zip(answers, tests, strict=True))


def is_right(answer: Answer, test: Test) -> bool:
    """Whether an answer is the expected one, types included: 1 is not True, and a tuple is no list."""
    return repr(answer) == repr(test.expected)


def shown_call(call: Call) -> str:
    """A call as Python, and the steps of an object's life in brackets."""
    name, arguments, steps = call
    text = f"{name}({', '.join(map(repr, arguments))})"
    if steps is None:
        return text
    return f"{text} [{'; '.join(shown_call((method, values, None)) for method, values in steps)}]"


def shown_answer(answer: Answer) -> str:
    """A value as Python, or "raises ValueError"."""
    kind, value = answer
    return repr(value) if kind == "returned" else f"raises {value}"


def _draw_tests(name: str, solution: str, rng: np.random.Generator) -> tuple[tuple[Test, ...], tuple[Test, ...]]:
    cases, draw = CASES[name], Draw(rng)
    fixed = [cases.fixed[int(index)] for index in rng.permutation(len(cases.fixed))]
    calls = {repr(call): call for call in fixed}
    while len(calls) < NUM_VISIBLE + NUM_HIDDEN:
        call = cases.draw(draw)
        calls.setdefault(repr(call), call)
    drawn = list(calls.values())
    # Half of the edges and some random calls are shown; the other edges and more random calls are hidden.
    half = min(len(fixed) // 2, NUM_VISIBLE // 2)
    others = drawn[len(fixed) :]
    shown = drawn[:half] + others[: NUM_VISIBLE - half]
    kept = drawn[half : len(fixed)] + others[NUM_VISIBLE - half :]
    answers = answers_of(solution, [*shown, *kept])
    assert answers is not None, f"{name}: the working module does not work"
    tests = [Test(call, answer) for call, answer in zip([*shown, *kept], answers, strict=True)]
    return tuple(tests[:NUM_VISIBLE]), tuple(tests[NUM_VISIBLE:])


def _with_bugs(source: str, rng: np.random.Generator, count: int) -> tuple[str, tuple[str, ...]]:
    """The text after so many edits: first their kind is drawn, then their place, so that no kind is crowded out."""
    kinds = []
    for _ in range(count):
        edits = edits_of(source)
        kind = sorted(edits)[int(rng.integers(len(edits)))]
        source = edits[kind][int(rng.integers(len(edits[kind])))].applied_to(source)
        kinds.append(kind)
    return source, tuple(kinds)

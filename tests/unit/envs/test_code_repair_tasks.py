"""The library works, its bugs are found by its tests, and the two sides share no module."""

from __future__ import annotations

import ast
import calendar
import datetime
import doctest
import gc
import heapq
import importlib
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gspo_gym_envs.code_repair.cases import Draw
from gspo_gym_envs.code_repair.mutations import edits_of
from gspo_gym_envs.code_repair.policies import smallest_change
from gspo_gym_envs.code_repair.tasks import CASES, HELD_OUT, TRAINING, draw_task, num_right, source_of
from gspo_gym_envs.code_repair.trusted import answers_of


def library(name: str) -> Any:
    return importlib.import_module(f"gspo_gym_envs.code_repair.library.{name}")


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_module_does_what_its_docstrings_show(name: str) -> None:
    result = doctest.testmod(library(name))
    assert result.attempted >= 2
    assert result.failed == 0


def polynomial(text: str) -> int:
    return int(eval(text.replace("/", "//")))


@lru_cache
def edits(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(edits(a[1:], b) + 1, edits(a, b[1:]) + 1, edits(a[1:], b[1:]) + (a[0] != b[0]))


def days(start: tuple[int, int, int], more: int) -> list[int]:
    day = datetime.date(*start) + datetime.timedelta(days=more)
    return [day.year, day.month, day.day]


# Other people's implementations, or the definition, of what the library computes.
INDEPENDENT = {
    ("calendar_days", "is_leap"): calendar.isleap,
    ("calendar_days", "days_in_month"): lambda year, month: calendar.monthrange(year, month)[1],
    ("calendar_days", "day_of_year"): lambda *day: datetime.date(*day).timetuple().tm_yday,
    ("calendar_days", "next_day"): lambda *day: days(day, 1),
    ("calculator", "evaluate"): polynomial,
    ("edit_distance", "distance"): edits,
    ("matrix", "multiply"): lambda a, b: (np.array(a) @ np.array(b)).tolist(),
    ("matrix", "determinant"): lambda m: round(np.linalg.det(np.array(m))),
    ("matrix", "transpose"): lambda m: np.array(m).T.tolist(),
    ("spiral", "rotate"): lambda m: np.rot90(np.array(m), -1).tolist(),
    ("merge_sort", "merge"): lambda a, b: list(heapq.merge(a, b)),
    ("merge_sort", "merge_sort"): sorted,
    ("ratios", "add"): lambda a, b: list((Fraction(*a) + Fraction(*b)).as_integer_ratio()),
    ("ratios", "is_less"): lambda a, b: Fraction(*a) < Fraction(*b),
    ("primes", "primes_below"): lambda n: [p for p in range(2, n) if all(p % d for d in range(2, p))],
    ("primes", "divisors"): lambda n: [d for d in range(1, n + 1) if n % d == 0],
    ("bases", "from_base"): int,
    ("bases", "to_base"): lambda n, base: np.base_repr(n, base).lower(),
    ("intervals", "covered"): lambda intervals: len({n for a, b in intervals for n in range(a, b + 1)}),
    ("word_wrap", "wrap"): lambda text, width: textwrap.wrap(text, width, break_long_words=False),
    ("windows", "window_sums"): lambda ns, k: np.convolve(ns, [1] * k, "valid").tolist() if 0 < k <= len(ns) else [],
    ("windows", "best_run"): lambda ns: max([sum(ns[i:j]) for j in range(len(ns) + 1) for i in range(j)], default=0),
    ("lists", "unique"): lambda items: list(dict.fromkeys(items)),
    ("word_counts", "most_common"): lambda text, n: [
        word
        for word, _ in sorted(
            Counter("".join(c if c.isalpha() else " " for c in text.lower()).split()).items(),
            key=lambda item: (-item[1], item[0]),
        )
    ][:n],
}


@pytest.mark.parametrize(("module", "function"), sorted(INDEPENDENT))
def test_the_library_agrees_with_an_independent_implementation(module: str, function: str) -> None:
    draw, compared = Draw(np.random.default_rng(0)), 0
    for _ in range(400):
        call = CASES[module].draw(draw)
        if call[0] != function:
            continue
        [(kind, value)] = answers_of(source_of(module), [call]) or ()
        if kind == "returned":
            assert value == INDEPENDENT[module, function](*call[1]), call
            compared += 1
    assert compared >= 20


def test_there_are_many_modules_and_the_sides_share_none() -> None:
    assert (len(HELD_OUT), len(TRAINING)) == (8, 26)
    assert set(HELD_OUT) | set(TRAINING) == set(CASES)
    assert not set(HELD_OUT) & set(TRAINING)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_task_s_bug_is_found_by_shown_and_by_hidden_tests_and_by_nothing_else(name: str) -> None:
    for seed in range(3):
        task = draw_task(np.random.default_rng(seed), (name,), num_bugs=1)
        ast.parse(task.source)
        assert task.source != task.solution == source_of(name)
        assert (len(task.visible), len(task.hidden)) == (8, 24)
        assert num_right(task.solution, task.visible) == 8
        assert num_right(task.solution, task.hidden) == 24
        assert task.num_passing == num_right(task.source, task.visible) < 8
        assert num_right(task.source, task.hidden) <= 22
        assert not {repr(test.call) for test in task.visible} & {repr(test.call) for test in task.hidden}


@pytest.mark.slow
def test_seeds_give_many_different_tasks_of_many_kinds_and_the_same_seed_the_same() -> None:
    tasks = [draw_task(np.random.default_rng(seed), TRAINING, num_bugs=1) for seed in range(150)]
    assert len({task.source for task in tasks}) >= 110  # of some 900 (module, bug); 150 draws by kind repeat some
    assert len({bug for task in tasks for bug in task.bugs}) >= 9
    assert draw_task(np.random.default_rng(7), TRAINING, num_bugs=1) == tasks[7]


def test_two_bugs_are_two_edits() -> None:
    task = draw_task(np.random.default_rng(0), ("spiral",), num_bugs=2)
    assert len(task.bugs) == 2
    assert num_right(task.solution, task.hidden) == 24


def test_every_edit_leaves_a_program_and_spares_docstrings_and_annotations() -> None:
    for name in CASES:
        source = source_of(name)
        for found in edits_of(source).values():
            for edit in found:
                mutant = edit.applied_to(source)
                assert texts_of(mutant) == texts_of(source), (name, edit)


def texts_of(source: str) -> list[str]:
    """Docstrings and annotations, which no bug should touch."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = [
        ast.get_docstring(n) or "" for n in nodes if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef)
    ]
    return documented + [ast.unparse(n.annotation) for n in nodes if isinstance(n, ast.arg) and n.annotation]


@pytest.mark.parametrize(
    ("source", "kind", "expected"),
    [
        ("def f(a):\n    return a < 1", "boundary", ["def f(a):\n    return a <= 1"]),
        ("def f(a):\n    return a < 1", "condition", ["def f(a):\n    return a > 1"]),
        ("def f(a):\n    return a < 1", "off by one", ["def f(a):\n    return a < 2", "def f(a):\n    return a < 0"]),
        ("def f(a):\n    return a", "missing return", ["def f(a):\n    a"]),
        ("x = g(a, b)", "swapped arguments", ["x = g(b, a)"]),
        ("x += 1", "operator", ["x -= 1"]),
        ("x = min(a)", "wrong function", ["x = max(a)"]),
        ("x = a[b:c]", "boundary", ["x = a[b + 1:c]"]),
        ("x = not a", "condition", ["x = a"]),
        ("x = a and b", "missing part", ["x = a", "x = b"]),
        ("x = True", "wrong value", ["x = False"]),
        ("g()", "missing statement", ["pass"]),
    ],
)
def test_a_kind_of_bug_is_exactly_this(source: str, kind: str, expected: list[str]) -> None:
    assert [edit.applied_to(source) for edit in edits_of(source)[kind]] == expected


def test_code_that_does_not_end_is_stopped_by_the_count_of_steps_and_has_no_answer() -> None:
    endless = "def f():\n    while True:\n        pass"
    assert answers_of(endless, [("f", (), None)]) is None
    recursive = "def f():\n    return f()"
    assert answers_of(recursive, [("f", (), None)]) == (("raised", "RecursionError"),)
    assert answers_of("1 +", [("f", (), None)]) is None


def test_threads_do_not_disturb_each_others_answers() -> None:
    """CPython 3.11 counts the depth of syntax trees for the whole process; collected garbage lets threads change."""

    def let_others_run(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    calls = [("f", ([number, [{"key": (number, "text")}] * 30],), None) for number in range(4)]
    right = tuple(("returned", call[1][0][0]) for call in calls)
    thresholds = gc.get_threshold()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: answers_of("def f(x):\n    return x[0]", calls), range(250)))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_others_run)
    assert found == [right] * 250


def test_arguments_that_a_module_changes_stay_whole_for_others() -> None:
    call = ("f", ([1, 2],), None)
    assert answers_of("def f(x):\n    x.append(3)\n    return x", [call, call]) == (("returned", [1, 2, 3]),) * 2
    assert call[1] == ([1, 2],)


def test_the_smallest_change_is_unique_and_makes_the_target() -> None:
    for old, new in pairwise(["a\nb\na\nc\n", "a\nb\nx\nc\n", "a\nc\n", "a\nc\nc\n", "c\nc\n"]):
        before, after = smallest_change(old, new)
        assert old.count(before) == 1
        assert old.replace(before, after) == new

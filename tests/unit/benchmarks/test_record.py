"""Kept numbers: a line comes back as it was, and what became slower beyond the noise of its rounds is said."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.record import Line, Machine, Value, compare, finish, keep, render

_MACHINE = Machine("CPU", 2, "2.13.0", 1)


def _line(*values: Value, machine: Machine = _MACHINE, benchmark: str = "quick") -> Line:
    return Line(benchmark, "2026-01-01T00:00:00+00:00", machine, (0.5, 1.0), values)


def test_a_kept_line_comes_back_as_it_was() -> None:
    line = _line(Value("step", (1.0, 2.0), (3.0, 4.0), "TRL", goal=2.2), Value("head", (5.0,), unit="MiB"))
    assert Line.of_json(line.to_json()) == line


def test_the_last_line_of_the_same_benchmark_and_machine_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.jsonl"
    first, second = _line(Value("a", (1.0,))), _line(Value("a", (2.0,)))
    assert keep(path, first) is None
    assert keep(path, second) == first
    assert keep(path, _line(machine=Machine("CPU", 2, "2.13.0", 2))) is None  # other threads
    assert keep(path, _line(benchmark="head")) is None
    assert keep(path, first) == second
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("before", "now", "is_slower"),
    [
        ((1.0, 1.1, 1.2), (1.3, 1.4, 1.5), True),  # 1.4 / 1.1 = 1.27
        ((1.0, 1.1, 1.2), (1.15, 1.4, 1.5), False),  # a round as fast as before
        ((1.0, 1.001, 1.002), (1.01, 1.02, 1.03), False),  # 1.9 % is no change
        ((1.3, 1.4, 1.5), (1.0, 1.1, 1.2), False),  # faster
    ],
)
def test_slower_is_that_every_round_costs_more_than_every_round_before(
    before: tuple[float, ...], now: tuple[float, ...], is_slower: bool
) -> None:
    slower, unjudged = compare(_line(Value("step", before)), _line(Value("step", now)))
    assert unjudged == []
    assert len(slower) == int(is_slower)
    if is_slower:
        assert slower == ["step: 1.27 times the cost (1.000 to 1.200 before, 1.300 to 1.500 now s)"]


def test_a_machine_that_is_busy_for_both_sides_makes_nothing_slower() -> None:
    before = Value("step", (1.0, 1.0, 1.0), (2.0, 2.0, 2.0), "TRL")
    busy = Value("step", (3.0, 3.0, 3.0), (6.0, 6.0, 6.0), "TRL")
    assert compare(_line(before), _line(busy)) == ([], [])
    alone = Value("step", (1.5, 1.5, 1.5), (2.0, 2.0, 2.0), "TRL")
    slower, _ = compare(_line(before), _line(alone))
    assert slower == ["step beside TRL: 1.50 times the cost (0.500 to 0.500 before, 0.750 to 0.750 now)"]
    ours = Value("step", (1.0, 1.0, 1.0), (2.0, 2.0, 2.0), "row by row")
    both = Value("step", (3.0, 3.0, 3.0), (6.0, 6.0, 6.0), "row by row")  # also this project's code
    assert len(compare(_line(ours), _line(both))[0]) == 1
    without = Value("step", (1.5, 1.5, 1.5))
    assert len(compare(_line(before), _line(without))[0]) == 1  # seconds with seconds


def test_fewer_than_three_rounds_and_new_values_are_not_judged() -> None:
    slower, unjudged = compare(_line(Value("a", (1.0, 1.0))), _line(Value("a", (9.0,) * 3), Value("b", (9.0,) * 3)))
    assert (slower, unjudged) == ([], ["a", "b"])


def test_a_benchmark_that_became_slower_says_so_and_returns_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.jsonl"
    for seconds, status in ((1.0, 0), (2.0, 1), (2.0, 0)):
        values = [Value("step", (seconds,) * 3, goal=2.2)]
        assert finish("quick", values, machine=_MACHINE, loads=[0.5, 0.7], path=path) == status
    printed = capsys.readouterr().out
    assert "the first line of this benchmark on this machine" in printed
    assert "slower: step: 2.00 times the cost" in printed
    assert "1 of 1 became slower since" in printed
    assert "0 of 1 became slower since" in printed


def test_the_table_pairs_the_rounds_and_says_where_no_peer_is() -> None:
    shown = io.StringIO()
    # by round 4, 1 and 3 times faster: the median is 3, while that of the seconds is 4 / 2 = 2
    values = [Value("step", (1.0, 2.0, 2.0), (4.0, 2.0, 6.0), "TRL", goal=2.2), Value("alone", (0.25,))]
    Console(file=shown, width=160).print(render(values))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.getvalue().splitlines()]
    assert ["step", "2.000 s", "4.000 s", "TRL", "3.00x (1.00 to 4.00)", "2.20x"] in rows
    assert ["alone", "0.250 s", "not there", "", "", ""] in rows

"""A night of trainings: the page by hand, the cells with a script in the trainer's place, and one real grid."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.main import main
from benchmarks.night import GAMES, METHODS, Plan, run_night
from benchmarks.night_page import Cell, Point, cell_lines, page, rank, read_cells
from gspo_gym.config.run_config import load_config
from gspo_gym.errors import UsageError

# Stands in for `python -m gspo_gym.train GAME key=value ...`. Success after 10 steps is 0.9 with method gspo, else 0.8;
# `fault` names the cell in which something happens.
TRAINER = """
import json, os, pathlib, signal, sys
options = dict(text.split("=", 1) for text in sys.argv[2:] if "=" in text)
label, above = json.loads(options["model.label"]), pathlib.Path(json.loads(options["run.folder"]))
folder, name = above / label, f"{sys.argv[1]} {above.name} {label}"
with open(above.parents[1] / "starts.txt", "a") as file:
    file.write(name + "\\n")
kind, _, cell = (above.parents[1] / "fault.txt").read_text().partition(": ")
folder.mkdir(parents=True, exist_ok=True)
(folder / "events.jsonl").write_text("")
if (kind, cell) == ("crash", name):
    sys.exit("out of memory")
if (kind, cell) == ("stop", name):
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
end = 0.9 if above.name == "gspo" else 0.8
for step, success in ((0, 0.5), (10, end)):
    with open(folder / "events.jsonl", "a") as file:
        data = {"success_rate": success, "mean_return": success}
        file.write(json.dumps({"schema": 1, "kind": "evaluation", "step": step, "data": data}) + "\\n")
with open(folder / "metrics.jsonl", "w") as file:
    for step in range(1, 11):
        values = {"rollout/sampled_tokens": 100.0, "time/step_seconds": 0.5}
        file.write(json.dumps({"schema": 1, "step": step, **values}) + "\\n")
status = "failed" if (kind, cell) == ("failure", name) else "completed"
summary = {"status": status, "error": "NonFiniteError: the loss is nan" if status == "failed" else None}
(folder / "summary.json").write_text(json.dumps(summary))
sys.exit(status == "failed")
"""
STARTS = ["quickstart default seed_0", "quickstart gspo seed_0", "quickstart default seed_1", "quickstart gspo seed_1"]


def cell(method: str, *successes: float, seed: int = 0, status: str = "finished", step_tokens: int = 100) -> Cell:
    """A run with these evaluations, one every 10 steps, each after so many tokens more and 2 seconds more."""
    points = tuple(Point(10 * n, value, n * step_tokens, 2.0 * n) for n, value in enumerate(successes))
    error = None if status == "finished" else "it fell | over"
    return Cell("quickstart", method, seed, METHODS.get(method, ()), 0.9, status, error, points)  # type: ignore[arg-type]


def make_plan(folder: Path, fault: str = "") -> Plan:
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "fault.txt").write_text(fault)
    command = (sys.executable, "-S", str(folder / "trainer.py"))
    return Plan(folder, ("default", "gspo"), ("quickstart",), 2, num_parallel=1, command=command, poll_seconds=0.02)


def starts(folder: Path) -> list[str]:
    return (folder / "starts.txt").read_text().splitlines()


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of the tables."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_a_score_is_the_mean_success_over_the_tokens_of_the_budget() -> None:
    run = cell("gspo", 0.2, 0.6, 0.8)  # after 0, 100 and 200 tokens
    # to 150: 100 x 0.4 and, up to 0.7, 50 x 0.65; to 400: 100 x 0.4, 100 x 0.7, and 200 x the last
    assert run.score(150) == pytest.approx((40 + 32.5) / 150)
    assert run.score(400) == pytest.approx((40 + 70 + 160) / 400)
    assert cell("gspo", 0.2, 0.6, status="failed").score(150) == 0


def test_methods_are_ranked_by_the_interval_first_and_by_the_mean_then() -> None:
    cells = [cell("default", 0.5, 0.5, seed=seed) for seed in range(6)]
    cells += [cell("best", value, value, seed=seed) for seed, value in enumerate((0.8, 0.9, 0.7) * 2)]
    cells += [cell("good", value, value, seed=seed) for seed, value in enumerate((0.51, 0.52, 0.51) * 2)]
    cells += [cell("wild", value, value, seed=seed) for seed, value in enumerate((0.0, 1.0, 1.0) * 2)]
    cells += [cell("bad", 0.4, 0.4, seed=seed) for seed in range(4)]
    cells += [cell("bad", 1.0, seed=seed, status="failed") for seed in (4, 5)]
    cells += [cell("late", 0.9, 0.9, seed=seed, status="finished" if seed else "unfinished") for seed in range(6)]
    standings = rank(cells)
    # "wild" has the mean 1/6 with differences of -0.5 and 0.5; a failed run scores 0
    assert [(s.method, s.side, round(s.mean, 4)) for s in standings] == [
        ("best", "better", 0.3),
        ("good", "better", 0.0133),
        ("wild", "no difference found", 0.1667),
        ("bad", "worse", -0.2333),
        ("late", "too few pairs", 0.4),
    ]
    assert [len(s.differences) for s in standings] == [6, 6, 6, 6, 5]
    places = [row[:2] for row in rows(page(cells))[1:7]]
    names = ["best", "good", "default", "wild", "bad", "late"]
    assert places == [[str(place), name] for place, name in enumerate(names, start=1)]


def test_the_budget_is_that_of_the_default_with_the_same_run_seed() -> None:
    short = cell("default", 0.0, 1.0, step_tokens=100)  # its score over 100 tokens is 0.5
    slow = cell("gspo", 0.0, 1.0, step_tokens=200)  # it has reached 0.5 by then: 0.25
    assert rank([short, slow])[0].differences == (pytest.approx(-0.25),)
    assert rank([cell("default", 0.5, 0.5, status="unfinished"), slow])[0].differences == ()


def test_forks_are_compared_with_the_same_method_without_them() -> None:
    """Scores over the other's 200 tokens: half of (0.6 + 0.9) / 2 and half of 0.9, less 0.6, or (0.6 + 0.75) / 2."""
    cells = [cell("siblings", 0.6, 0.6, 0.6), cell("siblings", 0.6, 0.6, 0.9, seed=1)]  # 1 reaches 0.9 after 200
    cells += [cell("forks", 0.6, 0.9, 0.9), cell("forks", 0.6, 0.9, 0.9, seed=1)]  # after 100
    cells += [cell("forks", 0.6, 0.9, 0.9, seed=2)]  # which no run of siblings is beside
    difference = 0.825 - 0.6, 0.825 - (0.6 + 0.75) / 2
    (row,) = [row for row in rows(page(cells)) if row[0] == "forks less siblings"]
    assert row[1] == "quickstart"
    assert row[2] == f"{sum(difference) / 2:+.3f} ({difference[1]:+.3f} to {difference[0]:+.3f})"
    assert row[3].startswith("+0.150 ")  # 0.3 and 0
    assert row[4].startswith("0.50 of 1")
    assert row[5].startswith("0.50 of 1")


def test_a_game_s_table_is_arithmetic_over_the_seeds() -> None:
    cells = [cell("default", 0.2, 0.9, 0.9), cell("default", 0.2, 0.6, 0.9, seed=1)]  # the goal after 100, 200 tokens
    cells += [
        cell("gspo", 0.2, 0.8, 0.95),
        cell("gspo", 0.2, 0.5, 0.7, seed=1),
        cell("gspo", 0.2, seed=2, status="failed"),
    ]
    text = page(cells)
    header, default, gspo = rows(text[text.index("## quickstart") : text.index("## What did not")])
    assert header[0] == "method"
    assert default == ["default", "0.900 of 2", "", "2 of 2", "150", "", "3"]
    # 0.95 - 0.9 and 0.7 - 0.9: any two of these again have means from -0.2 to 0.05; one pair reaches it: 200 / 100
    assert gspo == [
        "gspo",
        "0.825 of 2",
        "-0.075 (-0.200 to +0.050)",
        "1 of 2",
        "not reached",
        "2.00 of 1",
        "not reached",
    ]
    assert "The goal is a success of 0.9." in text
    assert "5 cells: 4 finished, 1 failed, 0 unfinished." in text
    assert rows(text)[-1] == ["quickstart", "gspo", "2", "failed", "it fell / over"]


def test_the_rule_stands_on_the_page_and_cells_read_back(tmp_path: Path) -> None:
    cells = [cell("default", 0.5, 0.6), cell("gspo", 0.5, status="failed")]
    (tmp_path / "cells.jsonl").write_text(cell_lines(cells))
    assert read_cells(tmp_path / "cells.jsonl") == cells
    for words in ("**Score.** A cell's score", "*better*: the interval lies above 0", "before the first cell was run"):
        assert words in page([])
    assert "0 cells" in page([])


def test_cells_run_seed_by_seed_and_their_numbers_are_those_of_the_runs(tmp_path: Path) -> None:
    assert run_night(make_plan(tmp_path)) == 0
    assert starts(tmp_path) == STARTS
    cells = read_cells(tmp_path / "cells.jsonl")
    assert [(c.method, c.seed, c.status, c.error) for c in cells] == [
        ("default", 0, "finished", None),
        ("gspo", 0, "finished", None),
        ("default", 1, "finished", None),
        ("gspo", 1, "finished", None),
    ]
    assert cells[1].points == (Point(0, 0.5, 0.0, 0.0), Point(10, 0.9, 1000.0, 5.0))
    # (0.5 + 0.9) / 2 less (0.5 + 0.8) / 2
    row = rows((tmp_path / "night.md").read_text())[2]
    assert row[:5] == ["2", "gspo", "+0.050, too few pairs", "+0.050 to +0.050", "2"]


def test_a_night_that_is_stopped_goes_on_with_what_was_not_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_night(make_plan(tmp_path, f"stop: {STARTS[2]}"))
    assert starts(tmp_path) == STARTS[:3]
    assert run_night(make_plan(tmp_path)) == 0
    assert starts(tmp_path) == [*STARTS[:3], *STARTS[2:]]
    assert "4 cells: 4 finished" in (tmp_path / "night.md").read_text()


def test_a_failed_cell_is_a_row_that_says_so_and_is_not_run_again(tmp_path: Path) -> None:
    assert run_night(make_plan(tmp_path, f"failure: {STARTS[1]}")) == 1
    assert run_night(make_plan(tmp_path)) == 1
    assert starts(tmp_path) == STARTS
    last = rows((tmp_path / "night.md").read_text())[-1]
    assert last == ["quickstart", "gspo", "0", "failed", "NonFiniteError: the loss is nan"]


def test_a_cell_that_crashed_is_run_again(tmp_path: Path) -> None:
    assert run_night(make_plan(tmp_path, f"crash: {STARTS[1]}")) == 1
    last = rows((tmp_path / "night.md").read_text())[-1]
    assert last == ["quickstart", "gspo", "0", "unfinished", "exit status 1: out of memory"]
    assert run_night(make_plan(tmp_path)) == 0
    assert starts(tmp_path) == [*STARTS, STARTS[1]]


def test_a_later_command_in_the_same_folder_keeps_the_cells_of_the_first(tmp_path: Path) -> None:
    run_night(make_plan(tmp_path))
    plan = make_plan(tmp_path)
    assert (
        run_night(Plan(**{name: getattr(plan, name) for name in plan.__slots__} | {"first_seed": 2, "num_seeds": 1}))
        == 0
    )
    assert [c.seed for c in read_cells(tmp_path / "cells.jsonl")] == [0, 0, 1, 1, 2, 2]


def test_a_run_of_other_settings_is_not_taken_for_a_cell(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart" / "gspo" / "seed_0"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[training]\ngroup_size = 8\nbatch_size = 7\n")
    with pytest.raises(UsageError, match=r"seed_0: was trained with training.batch_size = 7, and is now to have 48"):
        run_night(make_plan(tmp_path))


@pytest.mark.parametrize("game", GAMES)
def test_every_method_goes_with_every_game(game: str) -> None:
    for overrides in METHODS.values():
        load_config(game, overrides)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "gsop"], "night: there is no method 'gsop'; did you mean 'gspo'?"),
        (["--games", "chess"], "night: there is no game 'chess'"),
        (["--seeds", "0"], "--seeds: expected at least 1 run seed, got 0"),
        (["loss.surrogate=sapo", "--methods", "gspo"], "night: method 'default' does not go with quickstart"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["night", *words, "--folder", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


LESS = ["rollout.episodes_per_batch=16", "training.batch_size=8", "training.iterations_per_epoch=4",
        "evaluation.every_n_iters=2", "evaluation.seeds=0:16", "warmup.num_episodes=64"]  # fmt: skip


def start(folder: Path) -> subprocess.Popen[str]:
    words = ["--methods", "gspo", "--games", "quickstart", "--seeds", "2", "--folder", str(folder), *LESS]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "night", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
    )


@pytest.mark.slow
def test_a_real_grid_that_is_stopped_ends_as_one_that_is_not(tmp_path: Path) -> None:
    with start(tmp_path / "whole") as whole:
        text, _ = whole.communicate()
    assert whole.returncode == 0, text
    assert "4 of 4 cells to run, 2 at a time: about 3 minutes" in text  # 4 x 1.5 / 2
    with start(tmp_path / "stopped") as first:
        assert first.stdout is not None
        next(line for line in first.stdout if re.match(r"quickstart, \w+, seed \d: finished", line))
        first.send_signal(signal.SIGTERM)
    assert first.returncode == 128 + signal.SIGTERM
    before = read_cells(tmp_path / "stopped" / "cells.jsonl")
    assert 1 <= sum(cell.status == "finished" for cell in before) < 4
    with start(tmp_path / "stopped") as second:
        text, _ = second.communicate()
    assert second.returncode == 0, text

    def curves(folder: Path) -> dict[tuple[str, str, int], list[tuple[int, float, float]]]:
        return {c.name: [tuple(point[:3]) for point in c.points] for c in read_cells(folder / "cells.jsonl")}  # type: ignore[misc]

    assert curves(tmp_path / "stopped") == curves(tmp_path / "whole")
    assert len({json.dumps(curve) for curve in curves(tmp_path / "whole").values()}) == 4

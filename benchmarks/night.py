"""Methods compared by training: `python -m benchmarks night [--methods A B --games X Y --seeds 5] [section.key=value]`.

A cell is one `gspo-gym train GAME` with a method's keys and a run seed, in a process with one thread; two at a time.
Cells come seed by seed, so that a night that was stopped compares fewer seeds. Each is a run in a folder, so that the
same command goes on where it was: a finished run is not run again, nor one whose training failed, until its folder is
removed. FOLDER/cells.jsonl and FOLDER/night.md hold what is known after every cell.

By which rule methods are ranked stands in `night_page.py`, and on the page.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from rich.console import Console

from benchmarks.night_page import DEFAULT, Cell, Point, cell_lines, page, read_cells
from gspo_gym.base.files import flat_items, make_folder, replace_file
from gspo_gym.base.loops import run_to_end
from gspo_gym.cli.command_line import interrupted_by_signals
from gspo_gym.cli.search.command import TRAIN, run_trial
from gspo_gym.cli.search.study import as_override
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import ConfigError, UnknownNameError, UsageError, nearest_name
from gspo_gym.run.records import read_config, read_events, read_metrics, read_summary

_GRACE_SECONDS = 60.0  # for the runs to save what they have
_NOT_BEGUN = "not begun"
_MOVES = ("run.folder", "model.label")  # where a run is, and no setting of it

# Every game's committed configuration says who is credited (a turn's advantage) and which ratio counts (an episode's).
# Where a method reads no clip, the defaults stand in for those of the file, which it would refuse.
_NO_CLIP = ("loss.clip_low=3e-4", "loss.clip_high=4e-4")
_TOKEN, _SAMPLED = "algorithm.variety=grpo", "correction.old_logprobs=rollout"
_WHOLE = ("algorithm.variety=gspo", "advantages.level=trajectory", "advantages.discount=1")
_SIBLINGS = (*_WHOLE, "advantages.baseline=leave_one_out", "advantages.scale=none")
METHODS: Mapping[str, tuple[str, ...]] = {
    DEFAULT: (),
    "gspo": _WHOLE,
    "auto": ("advantages.level=auto", "advantages.discount=1"),
    "grpo": (_TOKEN, "loss.clip_low=0.2", "loss.clip_high=0.27"),
    "cispo": (_TOKEN, "loss.surrogate=cispo", "loss.clip_low=3e-4", "loss.clip_high=4"),
    "sapo": (_TOKEN, "loss.surrogate=sapo", *_NO_CLIP),
    "gmpo": ("loss.surrogate=gmpo", "loss.unit=turn", "loss.clip_low=0.3297", "loss.clip_high=0.4918"),
    "dppo": (_TOKEN, "loss.surrogate=dppo", "loss.clip_low=0.2", "loss.clip_high=0.2", _SAMPLED),
    "vespo": ("loss.surrogate=vespo", *_NO_CLIP),
    "role": (*_WHOLE, "advantages.baseline=role", "advantages.scale=none"),
    "maxrl": (*_WHOLE, "advantages.scale=mean"),
    "adaptive": ("training.adaptive_tasks=128",),
    "siblings": _SIBLINGS,
    "forks": (*_SIBLINGS, "rollout.forks_per_episode=1"),
}


@dataclass(frozen=True, slots=True)
class Game:
    """A committed configuration that learns within minutes.

    Attributes:
        minutes: of a run with one thread beside another: half as much again as its configuration says of two threads.
        goal: success that most runs of the configuration reach.
    """

    minutes: float
    goal: float


GAMES: Mapping[str, Game] = {
    "quickstart": Game(1.5, 0.9),
    "countdown": Game(3, 0.25),
    "frozen_lake": Game(7.5, 0.6),
    "tic_tac_toe": Game(7.5, 0.6),
    "wordle": Game(4.5, 0.9),
}
_NIGHT = ("quickstart", "countdown", "frozen_lake", "tic_tac_toe")
_ALL = tuple(name for name in METHODS if name != "maxrl")  # which ends where a return is not 0 or 1, as games give here
_QUICK_METHODS, _QUICK_GAMES, _QUICK_SEEDS = (DEFAULT, "gspo", "auto"), ("quickstart", "countdown"), 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What a night trains.

    Attributes:
        changes: overrides of all cells, under those of the methods.
        first_seed: run seeds are this and the next.
        num_parallel: cells at a time.
        command: trains, in place of `python -m gspo_gym.train`.
    """

    folder: Path
    methods: tuple[str, ...] = _ALL
    games: tuple[str, ...] = _NIGHT
    num_seeds: int = 5
    first_seed: int = 0
    changes: tuple[str, ...] = ()
    num_parallel: int = 2
    command: tuple[str, ...] = TRAIN
    poll_seconds: float = 5.0

    def cells(self) -> Iterator[Cell]:
        """Yield the cells, unfinished, in the order in which they run."""
        for seed in range(self.first_seed, self.first_seed + self.num_seeds):
            for game in self.games:
                for method in self.methods:
                    yield self._cell(game, method, seed)

    def _cell(self, game: str, method: str, seed: int) -> Cell:
        return Cell(game, method, seed, (*self.changes, *METHODS[method]), GAMES[game].goal, "unfinished", _NOT_BEGUN)

    def folder_of(self, cell: Cell) -> Path:
        """Return the folder of a cell's run."""
        return self.folder / cell.game / cell.method / f"seed_{cell.seed}"

    def overrides_of(self, cell: Cell) -> list[str]:
        """Return all that the run changes in the game's configuration."""
        folder = self.folder_of(cell)
        places = as_override("run.folder", str(folder.parent)), as_override("model.label", folder.name)
        return [*cell.overrides, f"run.seed={cell.seed}", *places]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `night`."""
    group = parser.add_argument_group("night")
    group.add_argument("--methods", nargs="+", help=f"beside {DEFAULT}: {', '.join(METHODS)} (all but maxrl)")
    group.add_argument("--games", nargs="+", help=f"{', '.join(GAMES)} ({' '.join(_NIGHT)})")
    group.add_argument("--seeds", type=int, help="run seeds, from --seed on (5)")
    group.add_argument("--folder", type=Path, default=Path("runs/night"), help="of the runs (default: %(default)s)")
    group.add_argument(
        "--quick",
        action="store_true",
        help=f"{', '.join(_QUICK_METHODS)} on {' and '.join(_QUICK_GAMES)} with {_QUICK_SEEDS} run seeds",
    )


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return what the arguments ask for; the default is always there, because the others are compared with it.

    Raises:
        UnknownNameError: there is no such method or game.
        UsageError: no run seed.
    """
    a = arguments
    methods, games, num_seeds = (_QUICK_METHODS, _QUICK_GAMES, _QUICK_SEEDS) if a.quick else (_ALL, _NIGHT, 5)
    for what, names, table in (("method", a.methods, METHODS), ("game", a.games, GAMES)):
        if unknown := [name for name in names or () if name not in table]:
            raise UnknownNameError(f"night: there is no {what} {unknown[0]!r}; {nearest_name(unknown[0], table)}")
    if a.seeds is not None and a.seeds < 1:
        raise UsageError(f"--seeds: expected at least 1 run seed, got {a.seeds}")
    return Plan(
        folder=a.folder,
        methods=tuple(dict.fromkeys((DEFAULT, *(a.methods or methods)))),
        games=tuple(dict.fromkeys(a.games or games)),
        num_seeds=a.seeds or num_seeds,
        first_seed=a.seed,
        changes=tuple(a.files),
        num_parallel=a.processes or 2,
    )


def run_night(plan: Plan) -> int:
    """Run all cells that are not finished; return 1 if one still is not.

    Raises:
        ConfigError: a method's keys do not go with a game's configuration.
        UsageError: a run in the folder was trained with other settings.
    """
    console = Console(width=160, highlight=False)
    for cell in plan.cells():
        _require_same(plan.folder_of(cell), _config_of(plan, cell))
    make_folder(plan.folder)
    progress = _Progress(plan, console)
    waiting = [cell for cell in progress.cells if cell.status == "unfinished"]
    minutes = sum(GAMES[cell.game].minutes for cell in waiting) / plan.num_parallel
    console.print(
        f"{len(waiting)} of {len(progress.cells)} cells to run, {plan.num_parallel} at a time: about {minutes:.0f} "
        "minutes on as many idle cores"
    )
    with interrupted_by_signals(_GRACE_SECONDS):
        run_to_end(_run_all(plan, waiting, progress))
    console.print(f"{plan.folder / 'night.md'} is the page")
    return int(any(cell.status != "finished" for cell in progress.cells))


class _Progress:
    """What is known of the cells of a plan, and of those that earlier commands ran in its folder."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._console = console
        self._lines, self._page = plan.folder / "cells.jsonl", plan.folder / "night.md"
        self._cells = {cell.name: cell for cell in (read_cells(self._lines) if self._lines.exists() else ())}
        self._names = [cell.name for cell in plan.cells()]
        self._cells |= {cell.name: read_cell(cell, plan.folder_of(cell)) for cell in plan.cells()}
        self._write()

    @property
    def cells(self) -> list[Cell]:
        """Return the plan's."""
        return [self._cells[name] for name in self._names]

    def update(self, cell: Cell) -> None:
        """Take the result of a cell that was run: print it, and write the page."""
        self._cells[cell.name] = cell
        last = cell.points[-1] if cell.points else None
        text = cell.error or (last and f"success {last.success:.3f} after {last.tokens:,.0f} tokens")
        self._console.print(f"{cell.game}, {cell.method}, seed {cell.seed}: {cell.status}: {text}", markup=False)
        self._write()

    def _write(self) -> None:
        cells = [cell for cell in self._cells.values() if cell.error != _NOT_BEGUN]
        replace_file(self._lines, cell_lines(cells))
        replace_file(self._page, page(cells))


async def _run_all(plan: Plan, cells: Sequence[Cell], progress: _Progress) -> None:
    queue = iter(cells)

    async def work() -> None:
        for cell in queue:
            progress.update(await _run(plan, cell))

    async with asyncio.TaskGroup() as workers:
        for _ in range(plan.num_parallel):
            workers.create_task(work())


async def _run(plan: Plan, cell: Cell) -> Cell:
    folder = plan.folder_of(cell)
    make_folder(folder.parent)
    result = await run_trial(
        [cell.game, *plan.overrides_of(cell), "--resume=auto"],
        run_folder=folder,
        log=folder.with_suffix(".log"),
        metric="final_success_rate",
        timeout_seconds=None,
        should_stop=lambda _: False,
        num_parallel=os.cpu_count() or 1,  # a thread each, on any machine
        poll_seconds=plan.poll_seconds,
        command=plan.command,
    )
    after = read_cell(cell, folder)
    return after if after.status != "unfinished" or result.error is None else replace(after, error=result.error)


def read_cell(cell: Cell, folder: Path) -> Cell:
    """Return the cell with what its run's folder holds, which need not be there."""
    if not (folder / "events.jsonl").exists():
        return cell
    summary = read_summary(folder) if (folder / "summary.json").exists() else {"status": "interrupted"}
    lines = read_metrics(folder)
    steps = [0, *(line["step"] for line in lines)]
    tokens, seconds = (
        dict(zip(steps, accumulate((line[name] for line in lines), initial=0.0), strict=True))
        for name in ("rollout/sampled_tokens", "time/step_seconds")
    )
    evaluations = [(e["step"], e["data"]["success_rate"]) for e in read_events(folder) if e["kind"] == "evaluation"]
    points = tuple(
        Point(step, rate or 0.0, tokens[step], round(seconds[step], 1)) for step, rate in evaluations if step in tokens
    )
    if summary["status"] == "completed":
        return replace(cell, status="finished", error=None, points=points)
    if summary["status"] == "failed":
        return replace(cell, status="failed", error=summary["error"], points=points)
    return replace(cell, error="stopped; the same command goes on", points=points)


def _config_of(plan: Plan, cell: Cell) -> RunConfig:
    try:
        return load_config(cell.game, plan.overrides_of(cell))
    except ConfigError as error:
        raise ConfigError(f"night: method {cell.method!r} does not go with {cell.game}: {error}") from error


def _require_same(folder: Path, config: RunConfig) -> None:
    """Raise a UsageError if the run in the folder has another value of any key."""
    if not (folder / "config.toml").exists():
        return
    theirs, ours = (dict(flat_items(c)) for c in (read_config(folder), tomllib.loads(config.to_toml())))
    # A key that only one of them has is absent, or of another version, in the other.
    differing = sorted(key for key in theirs.keys() & ours.keys() if theirs[key] != ours[key] and key not in _MOVES)
    if differing:
        raise UsageError(
            f"{folder}: was trained with {differing[0]} = {theirs[differing[0]]!r}, and is now to have "
            f"{ours[differing[0]]!r}: choose another --folder, or remove this one"
        )

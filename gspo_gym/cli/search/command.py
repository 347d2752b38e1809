"""`gspo-gym search SEARCH.toml`: run a configuration with many values of some keys, and keep the best.

    runs/<label>/
        search.toml         the resolved settings
        base.toml           a copy of the base, which all trials use
        journal.log         Optuna's journal of all trials
        trials/trial_0003/  an ordinary run's folder; its log is trials/trial_0003.log
        leaderboard.json    all trials, best first; written after each
        best.toml           the best trial's configuration, to train again or longer

`study.py` proposes values. A trial is an ordinary run in a process, watched through its folder. Every trial starts from
the base and not from another trial's weights, because a run must be repeatable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.files import make_folder, replace_file, writing
from gspo_gym.base.leftovers import end_with_us, has_ended
from gspo_gym.base.loops import run_to_end, wait_until_ended
from gspo_gym.base.tables import table
from gspo_gym.cli.search.study import (
    Metric,
    SearchSettings,
    SearchStudy,
    as_override,
    load_search,
    require_optuna,
    require_same_search,
)
from gspo_gym.config.run_config import config_file, load_config
from gspo_gym.errors import ConfigError
from gspo_gym.run.records import read_events
from gspo_gym.types import Outcome

if TYPE_CHECKING:
    import optuna
    from rich.console import Console

TRAIN = (sys.executable, "-m", "gspo_gym.train")
_GRACE_SECONDS = 10.0  # for a run to write its summary after it is told to stop
_SHOWN_LINES = 3  # of a failed run's log
ShouldStop = Callable[[list[tuple[int, float]]], bool]  # is shown all evaluations so far


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `search`."""
    parser.add_argument("search", metavar="FILE", help="a TOML file; examples/search.toml is one")
    parser.add_argument("--resume", action="store_true", help="go on with the search in the same folder")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the `search` command; return 1 if no trial finished."""
    from rich.console import Console

    settings = load_search(arguments.search)
    console = Console()
    leaderboard = run_search(settings, resume=arguments.resume, console=console)
    print(_table(leaderboard))
    if leaderboard["best"] is None:
        console.print(f"no trial came to its end; the logs are in {settings.search_folder / 'trials'}")
        return 1
    console.print(
        f"{settings.search_folder / 'best.toml'} is trial {leaderboard['best']}. The best of many trials is partly the "
        "luckiest: evaluate it on other seeds, or train it again with another run.seed, before you believe its number."
    )
    return 0


def run_search(
    settings: SearchSettings,
    *,
    resume: bool = False,
    console: Console | None = None,
    command: Sequence[str] | None = None,
    poll_seconds: float = 1.0,
) -> dict[str, Any]:
    """Run all trials and return the contents of leaderboard.json.

    Args:
        settings: from `load_search`.
        resume: go on with the search in the folder; interrupted trials start again.
        console: where each trial's end is printed; None: nowhere.
        command: the training command, in place of `python -m gspo_gym.train`.
        poll_seconds: between looks at a run's evaluations.

    Raises:
        ConfigError: the folder is taken, or (resume) holds no search or another one.
        MissingExtraError: Optuna is not installed.
    """
    require_optuna()
    base = _open_folder(settings, resume=resume)
    study = SearchStudy(settings, settings.search_folder / "journal.log")
    search = _Search(settings, study, base, console, tuple(command or TRAIN), poll_seconds)
    if (num_restarted := study.restart_interrupted()) and console is not None:
        console.print(f"{num_restarted} interrupted trials start again")
    run_to_end(search.run())
    return search.write_leaderboard()


class _Search:
    """The workers of a search: they take trials from the study and record the results."""

    def __init__(
        self,
        settings: SearchSettings,
        study: SearchStudy,
        base: Path,
        console: Console | None,
        command: tuple[str, ...],
        poll_seconds: float,
    ) -> None:
        self._settings, self._study, self._base, self._console = settings, study, base, console
        self._command, self._poll_seconds = command, poll_seconds
        self._folder = settings.search_folder
        self._seen_evaluations: set[tuple[int, int]] = set()  # (trial, iteration)

    async def run(self) -> None:
        """Run until no trial is left; an unexpected error in one worker stops the others and their runs."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._settings.search.max_parallel):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while (trial := self._study.ask()) is not None:
            await self._play(trial)
            self.write_leaderboard()

    async def _play(self, trial: optuna.Trial) -> None:
        if (twin := self._study.twin_of(trial)) is not None:  # a run with the same values and seed would end alike
            self._copy(trial, twin)
            return
        search, label = self._settings.search, f"trial_{trial.number:04d}"
        values = [as_override(key, value) for key, value in self._study.values_of(trial).items()]
        own = [as_override("run.folder", str(self._folder / "trials")), as_override("model.label", label)]
        overrides = [*search.overrides, *values, *own]
        try:
            # `load_search` tried each value alone; a combination may still be invalid.
            load_config(self._base, overrides)
        except ConfigError as error:
            self._fail(trial, f"not a valid configuration: {error}")
            return
        try:
            result = await run_trial(
                [str(self._base), *overrides],
                run_folder=self._folder / "trials" / label,
                log=self._folder / "trials" / f"{label}.log",
                metric=search.metric,
                timeout_seconds=search.trial_timeout_seconds,
                should_stop=lambda evaluations: self._is_behind(trial, evaluations),
                num_parallel=search.max_parallel,
                poll_seconds=self._poll_seconds,
                command=self._command,
            )
        except ConfigError as error:
            self._fail(trial, str(error))
            return
        self._finish(trial, result)

    def _copy(self, trial: optuna.Trial, twin: optuna.trial.FrozenTrial) -> None:
        """Record the twin's result for this trial, without a run."""
        # Evolution proposes an unchanged parent again.
        trial.set_user_attr("same_as", twin.number)
        for name, value in twin.user_attrs.items():
            trial.set_user_attr(name, 0.0 if name == "seconds" else value)
        self._is_behind(trial, twin.user_attrs["evaluations"])
        self._study.study.tell(trial, twin.value if twin.state.name == "COMPLETE" else None, state=twin.state)
        self._say(trial, f"has the values of trial {twin.number}, whose result it takes")

    def _is_behind(self, trial: optuna.Trial, evaluations: Sequence[tuple[int, float]]) -> bool:
        """Report new evaluations to the pruner; return whether it stops the trial."""
        # All are reported, because the pruner counts them; at iteration 0 the values have had no effect yet.
        is_behind = False
        for iteration, value in evaluations:
            if iteration > 0 and (trial.number, iteration) not in self._seen_evaluations:
                self._seen_evaluations.add((trial.number, iteration))
                trial.report(value, iteration)
                is_behind |= trial.should_prune()
        return is_behind

    def _finish(self, trial: optuna.Trial, result: TrialResult) -> None:
        trial.set_user_attr("seconds", round(result.seconds, 1))
        trial.set_user_attr("evaluations", [list(evaluation) for evaluation in result.evaluations])
        if result.error is not None:
            self._fail(trial, result.error)
        elif result.is_pruned:
            self._study.study.tell(trial, state=require_optuna().trial.TrialState.PRUNED)
            self._say(trial, f"stopped after iteration {result.evaluations[-1][0]}")
        else:
            self._is_behind(trial, result.evaluations)  # for the others' sake: it came to its end
            score = result.score(self._settings.search.metric)
            self._study.study.tell(trial, score)
            self._say(trial, f"{self._settings.search.metric} {score:.3f}")

    def _fail(self, trial: optuna.Trial, error: str) -> None:
        trial.set_user_attr("error", error)
        self._study.study.tell(trial, state=require_optuna().trial.TrialState.FAIL)
        self._say(trial, f"failed: {error}")

    def _say(self, trial: optuna.Trial, message: str) -> None:
        if self._console is not None:
            values = ", ".join(f"{key} = {_short(value)}" for key, value in self._study.values_of(trial).items())
            self._console.print(f"trial {trial.number}: {message}; {values}", highlight=False, markup=False)

    def write_leaderboard(self) -> dict[str, Any]:
        """Write leaderboard.json and best.toml; return the contents of the former."""
        rows = [self._row(trial) for trial in self._study.trials()]
        rows.sort(key=lambda row: (row["state"] != "complete", -(row["score"] or 0.0), row["trial"]))
        best = rows[0]["trial"] if rows and rows[0]["state"] == "complete" else None
        board = {"schema": 1, "metric": self._settings.search.metric, "best": best, "trials": rows}
        replace_file(self._folder / "leaderboard.json", json.dumps(board, indent=2) + "\n")
        if best is not None:
            replace_file(self._folder / "best.toml", self._best_config(rows[0]))
        return board

    def _row(self, trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
        state = trial.state.name.lower()
        return {
            "trial": trial.number,
            "state": "failed" if state == "fail" else state,
            "score": trial.value,
            "parameters": self._study.values_of(trial),
            "evaluations": trial.user_attrs.get("evaluations", []),
            "seconds": trial.user_attrs.get("seconds"),
            "error": trial.user_attrs.get("error"),
            "folder": str(self._folder / "trials" / f"trial_{trial.user_attrs.get('same_as', trial.number):04d}"),
        }

    def _best_config(self, row: dict[str, Any]) -> str:
        search = self._settings.search
        values = [as_override(key, value) for key, value in row["parameters"].items()]
        own = [as_override("run.folder", search.folder), as_override("model.label", f"{search.label[:59]}-best")]
        config = load_config(self._base, [*search.overrides, *values, *own])
        return f"# Trial {row['trial']} of {self._folder}: {search.metric} {row['score']}.\n\n{config.to_toml()}"


def _open_folder(settings: SearchSettings, *, resume: bool) -> Path:
    """Create or check the search's folder; return its copy of the base."""
    folder = settings.search_folder
    base = folder / f"base{config_file(settings.search.base).suffix}"
    is_begun = (folder / "search.toml").exists()
    if resume:
        if not is_begun:
            raise ConfigError(f"{folder}: there is no search to resume (no search.toml)")
        require_same_search(load_search(folder / "search.toml"), settings)
        return base
    if is_begun or (folder.exists() and any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: go on with its search (--resume) or choose another search.label")
    make_folder(folder / "trials")
    with writing(base):
        shutil.copyfile(config_file(settings.search.base), base)
    replace_file(folder / "search.toml", settings.to_toml())  # last: with it, the search has begun
    return base


def _table(leaderboard: dict[str, Any]) -> str:
    keys = list(leaderboard["trials"][0]["parameters"]) if leaderboard["trials"] else []
    names = [key.rpartition(".")[2] for key in keys]
    headers = names if len(set(names)) == len(names) else keys  # short ones fit a terminal
    rows = []
    for row in leaderboard["trials"]:
        score = "-" if row["score"] is None else f"{row['score']:.3f}"
        values = [_short(row["parameters"].get(key)) for key in keys]
        rows.append((str(row["trial"]), score, row["state"], str(row["seconds"] or "-"), *values))
    return table(("trial", leaderboard["metric"], "state", "seconds", *headers), rows)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial's run.

    Attributes:
        evaluations: (iteration, value of the search's metric), in order.
        error: why the trial does not count; None if it finished.
        is_pruned: it was stopped because others were better.
        seconds: wall-clock.
    """

    evaluations: tuple[tuple[int, float], ...]
    error: str | None
    is_pruned: bool
    seconds: float

    def score(self, metric: Metric) -> float:
        """Return the value of the last evaluation or the best one, depending on the metric."""
        values = [value for _, value in self.evaluations]
        return max(values) if metric.startswith("best_") else values[-1]


def read_evaluations(run_folder: Path, metric: Metric, *, is_over: bool = False) -> list[tuple[int, float]]:
    """Return (iteration, value) of every evaluation that a run has recorded.

    Raises:
        ConfigError: the environment declares no success, and the metric is a success rate.
    """
    choice, _, name = metric.partition("_")
    events = [event for event in read_events(run_folder) if event["kind"] == "evaluation"]
    # Undecided: every episode was cut off first. Such an evaluation counts as 0, unless a finished run has no other.
    no_success = [event["data"] for event in events if event["data"][name] is None]
    if any(map(_ends_without_success, no_success)) or (is_over and events and len(no_success) == len(events)):
        raise ConfigError(f"search.metric: {metric}: the environment declares no success; use {choice}_mean_return")
    return [(int(event["step"]), float(event["data"][name] or 0.0)) for event in events]


def _ends_without_success(evaluation: Mapping[str, Any]) -> bool:
    """Return whether an environment ended an episode by itself without declaring success or failure."""
    outcome = Outcome.TERMINATED.value
    return any(row["outcome"] == outcome and row["success"] is None for row in evaluation.get("rows", ()))


async def run_trial(
    arguments: Sequence[str],
    *,
    run_folder: Path,
    log: Path,
    metric: Metric,
    timeout_seconds: float | None,
    should_stop: ShouldStop,
    num_parallel: int,
    poll_seconds: float,
    command: Sequence[str] = TRAIN,
) -> TrialResult:
    """Run `command` with the arguments to its end, and read its evaluations every `poll_seconds`.

    Its output goes to `log`. Cancelling this stops the process.

    Args:
        num_parallel: trials that share the machine; without OMP_NUM_THREADS in the environment, the cores are divided.

    Raises:
        ConfigError: see `read_evaluations`.
    """
    start_seconds = time.monotonic()
    cores = max(1, (os.cpu_count() or 1) // num_parallel)
    environment = {"OMP_NUM_THREADS": str(cores), **os.environ}
    # A process, because a crash, lack of memory or the deadline must end the run and not the search.
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, *arguments, stdout=output, stderr=output, stdin=asyncio.subprocess.DEVNULL, env=environment
        )
    end_with_us(process.pid)
    is_late = is_pruned = False
    try:
        while not await _has_ended(process, poll_seconds):
            is_late = timeout_seconds is not None and time.monotonic() - start_seconds > timeout_seconds
            is_pruned = not is_late and should_stop(read_evaluations(run_folder, metric))
            if is_late or is_pruned:
                break
    finally:
        # To its end, also where this is cancelled again: a second signal would end the run before it has saved.
        stopping = asyncio.ensure_future(_stop(process))
        try:
            await wait_until_ended({stopping})
        finally:
            has_ended(process.pid)
        stopping.result()
    evaluations = read_evaluations(run_folder, metric, is_over=True)
    error = None
    if is_late:
        error = f"took longer than search.trial_timeout_seconds = {timeout_seconds:g}"
    elif not is_pruned and process.returncode != 0:
        error = f"exit status {process.returncode}: {_last_lines(log)}"
    elif not is_pruned and not evaluations:
        error = "ended without an evaluation"
    return TrialResult(tuple(evaluations), error, is_pruned, time.monotonic() - start_seconds)


async def _has_ended(process: asyncio.subprocess.Process, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        return False
    return True


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Tell the run to save and end; kill it if it does not."""
    if process.returncode is not None:
        return
    process.terminate()  # Ctrl-C's signal is ignored by what a script starts in its background
    if not await _has_ended(process, _GRACE_SECONDS):
        process.kill()
        await process.wait()


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return " | ".join([line.strip() for line in lines if line.strip()][-_SHOWN_LINES:]) or "it said nothing"

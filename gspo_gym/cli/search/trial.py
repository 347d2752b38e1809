"""Run one trial of a search: an ordinary run in a separate process, watched through its folder."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.base.leftovers import end_with_us, has_ended
from gspo_gym.cli.search.study import Metric
from gspo_gym.errors import ConfigError
from gspo_gym.run.records import read_events
from gspo_gym.types import Outcome

TRAIN = (sys.executable, "-m", "gspo_gym.train")
_GRACE_SECONDS = 10.0  # for a run to write its summary after it is told to stop
_SHOWN_LINES = 3  # of a failed run's log

ShouldStop = Callable[[list[tuple[int, float]]], bool]  # is shown all evaluations so far


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
    which, _, name = metric.partition("_")
    events = [event for event in read_events(run_folder) if event["kind"] == "evaluation"]
    # Undecided: every episode was cut off first. Such an evaluation counts as 0, unless a finished run has no other.
    undecided = [event["data"] for event in events if event["data"][name] is None]
    if any(map(_ends_without_success, undecided)) or (is_over and events and len(undecided) == len(events)):
        raise ConfigError(f"search.metric: {metric}: the environment declares no success; use {which}_mean_return")
    return [(int(event["step"]), float(event["data"][name] or 0.0)) for event in events]


def _ends_without_success(evaluation: Mapping[str, Any]) -> bool:
    """Return whether an environment ended an episode by itself without declaring success or failure."""
    ended = Outcome.TERMINATED.value
    return any(row["outcome"] == ended and row["success"] is None for row in evaluation.get("rows", ()))


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
    started = time.monotonic()
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
            is_late = timeout_seconds is not None and time.monotonic() - started > timeout_seconds
            is_pruned = not is_late and should_stop(read_evaluations(run_folder, metric))
            if is_late or is_pruned:
                break
    finally:
        await _stop(process)
        has_ended(process.pid)
    evaluations = read_evaluations(run_folder, metric, is_over=True)
    error = None
    if is_late:
        error = f"took longer than search.trial_timeout_seconds = {timeout_seconds:g}"
    elif not is_pruned and process.returncode != 0:
        error = f"exit status {process.returncode}: {_last_lines(log)}"
    elif not is_pruned and not evaluations:
        error = "ended without an evaluation"
    return TrialResult(tuple(evaluations), error, is_pruned, time.monotonic() - started)


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

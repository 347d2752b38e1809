"""What SIGTERM leaves: `python -m benchmarks stops --count 30 --seed 0`.

A small real run with warm-up, evaluations and a checkpoint every third step gets SIGTERM at moments drawn uniformly
over its life, its environments in threads and in worker processes by turns. It must leave in its grace with exit code
143, its last completed step saved and no process behind, and end as an undisturbed run when it is resumed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import time
from pathlib import Path

from benchmarks.chaos import processes_below
from benchmarks.crash import Fingerprint, Report, fingerprint, interrupt, play, resume_and_compare, settings, show
from gspo_gym.config.run_config import RunConfig
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.run.settings import RunSettings
from gspo_gym.seeding import generator

_EXIT_CODES = (128 + signal.SIGTERM, -signal.SIGTERM)  # the latter of the signal's default action
_CHILD_SECONDS = 15.0  # until no process is left; what hangs has 10 of them after SIGTERM
_PR_SET_CHILD_SUBREAPER = 36


def run_stops(count: int, seed: int, *, num_steps: int) -> int:
    """Measure and print; the exit status."""
    return show(lambda folder: measure(folder, count=count, seed=seed, num_steps=num_steps))


def measure(folder: Path, *, count: int, seed: int, num_steps: int) -> Report:
    """Stop `count` runs at random moments and resume each, in a folder that is empty."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a stopped run leaves becomes our child
    report, whole = Report(), configure(folder / "whole", num_steps, "thread")
    seconds = play(whole)
    expected = _fingerprint(whole.run_folder)
    for number in range(count):
        isolation = ("thread", "process")[number % 2]
        config = configure(folder / f"stopped_{number}", num_steps, isolation)
        doing, code = interrupt(config, signal.SIGTERM, generator(seed, "stops", number), seconds, report)
        name = f"stop {number}, {isolation}, {doing}"
        if code not in _EXIT_CODES or report.seconds[-1] > RunSettings().stop_grace_seconds:
            report.failed.append(f"{name}: it ended with {code} after {report.seconds[-1]:.1f} s")
        if num_left := _num_left():
            report.failed.append(f"{name}: {num_left} processes are left")
        if config.run_folder.exists() and not is_saved(config.run_folder):
            report.failed.append(f"{name}: the last completed step is not saved")
        resume_and_compare(config, name, expected, report, _fingerprint)
        shutil.rmtree(config.run.folder)
    return report


def configure(folder: Path, num_steps: int, isolation: str) -> RunConfig:
    """Return a run with a warm-up, whose checkpoints are of every third step."""
    values = settings(folder, num_steps=num_steps).model_dump(exclude_none=True)
    values["rollout"] |= {"isolation": isolation}
    values["training"] |= {"checkpoint_every_n_iters": 3}
    return RunConfig.from_dict({**values, "warmup": {"num_episodes": 8, "learning_rate": 1e-3}})


def is_saved(folder: Path) -> bool:
    """Return whether the newest checkpoint is of the last step that was recorded; True before the first one."""
    saved = [int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*")]
    done = max((line["step"] for line in read_metrics(folder)), default=0)
    return max(saved, default=0) == done  # in start-up there is nothing to save yet


def _fingerprint(folder: Path) -> Fingerprint:
    """Return what is compared: a stop adds a checkpoint and its event, so that of events only evaluations are."""
    evaluations = [(event["step"], event["data"]) for event in read_events(folder) if event["kind"] == "evaluation"]
    return {**fingerprint(folder), "events": evaluations}


def _num_left() -> int:
    """Return how many processes a run that has ended leaves, after what hangs has had its time."""
    deadline = time.monotonic() + _CHILD_SECONDS
    while (left := processes_below(os.getpid())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(left)

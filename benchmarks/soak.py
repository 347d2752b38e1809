"""What a long run leaks: `python -m benchmarks soak --steps 2000`.

A small real run, whose environment notes at every reset what the process holds: memory, open files, tasks of the event
loop and threads. The second quarter of the notes is compared with the last: a run that leaks holds more at its end.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.crash import settings
from benchmarks.letters import Letters
from gspo_gym.cli.train import run_training
from gspo_gym.rollout.ledger import Dispatched, imbalances, read_ledger

MAX_MB_PER_1000_EPISODES = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Holding:
    """What the process held at one moment."""

    resident_mb: float
    files: int
    tasks: int
    threads: int

    @classmethod
    def now(cls) -> Holding:
        """Look; in the event loop."""
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE / 2**20
        return cls(resident, len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), threading.active_count())


NOTES: list[Holding] = []  # of the only run of the process


class Watched(Letters):
    """Letters that is played in the event loop, and looks around."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        NOTES.append(Holding.now())
        return super().reset(seed=seed, options=options)


@dataclass(frozen=True, slots=True)
class SoakReport:
    """What a run of so many episodes held in the second quarter and in the last, and what its ledger says."""

    num_episodes: int
    seconds: float
    early: Holding
    late: Holding
    num_attempts: int
    imbalances: Sequence[str]

    @property
    def mb_per_1000_episodes(self) -> float:
        # The middles of the two quarters are half of the run apart.
        return (self.late.resident_mb - self.early.resident_mb) / (self.num_episodes / 2 / 1000)

    @property
    def is_good(self) -> bool:
        is_flat = self.mb_per_1000_episodes < MAX_MB_PER_1000_EPISODES
        counts = [(held.files, held.tasks, held.threads) for held in (self.early, self.late)]
        return is_flat and counts[0] == counts[1] and not self.imbalances


def run_soak(num_steps: int) -> int:
    """Measure and print; the exit status."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = measure(Path(folder), num_steps)
    console = Console()
    console.print(f"{num_steps:,} steps, {report.num_episodes:,} episodes, {report.seconds:.0f} seconds")
    console.print(render(report))
    console.print(f"{report.mb_per_1000_episodes:+.2f} MB in 1,000 episodes; {report.num_attempts:,} attempts", end="")
    console.print(f", {len(report.imbalances)} without one end; {'flat' if report.is_good else 'NOT FLAT'}")
    return 0 if report.is_good else 1


def measure(folder: Path, num_steps: int) -> SoakReport:
    """Train so many steps in this process, in a folder that is empty."""
    torch.set_num_threads(1)
    NOTES.clear()
    config = settings(folder, num_steps=num_steps, concurrency=4)
    rollout = config.rollout.model_copy(update={"env_name": "benchmarks.soak:Watched"})
    # A policy that has learned all there is ends the run before its time: all of a group earn the same.
    changes = {"checkpoint_every_n_iters": 20, "keep_every": None, "learning_rate": 1e-6, "max_idle_iters": num_steps}
    training = config.training.model_copy(update=changes)
    evaluation = config.evaluation.model_copy(update={"every_n_iters": 20})
    started = time.monotonic()
    run_training(config.model_copy(update={"rollout": rollout, "training": training, "evaluation": evaluation}))
    seconds, quarter = time.monotonic() - started, len(NOTES) // 4
    ledger = read_ledger(config.run_folder / "ledger.jsonl")
    return SoakReport(
        len(NOTES),
        seconds,
        _median(NOTES[quarter : 2 * quarter]),
        _median(NOTES[3 * quarter :]),
        sum(isinstance(entry, Dispatched) for entry in ledger),
        [str(each) for each in imbalances(ledger)],
    )


def render(report: SoakReport) -> Table:
    """The table."""
    table = Table("held, median of a quarter")
    for heading in ("memory, MB", "files", "tasks", "threads"):
        table.add_column(heading, justify="right")
    for name, held in (("second", report.early), ("last", report.late)):
        table.add_row(name, f"{held.resident_mb:.1f}", str(held.files), str(held.tasks), str(held.threads))
    return table


def _median(notes: Sequence[Holding]) -> Holding:
    return Holding(
        statistics.median(held.resident_mb for held in notes),
        *(statistics.median_low(getattr(held, name) for held in notes) for name in ("files", "tasks", "threads")),
    )

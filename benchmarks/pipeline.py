"""What playing ahead saves: `python -m benchmarks pipeline`.

The same training run synchronously and with `max_staleness` 1 and 2: a tiny model, the local engine and an environment
that takes 0.2 seconds a turn on average, with a heavy tail. As long as batches are played one after the other, no step
takes less than the longer of playing and learning; the ratio to that, as measured in the synchronous run, is shown.
With more than one batch in play at once, it may be less than 1.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.core import TextEnv
from gspo_gym.run.records import read_metrics
from gspo_gym.seeding import generator

_num_begun: Counter[int] = Counter()  # episodes of this process, by the seed of their task


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained.

    Attributes:
        model: as for `models.load_policy`.
        num_steps: steps in all; the first is left out of the measurement, because it warms up and fills the pipeline.
        num_groups, group_size: episodes of a step.
        num_turns: of every episode.
        turn_seconds: mean latency of the environment's turns.
        sigma: of the lognormal latency; 1.0 makes one turn in a hundred take 6 times the mean.
        observation_tokens: length of what the environment says, which sets the cost of learning.
    """

    model: str = "tiny:qwen3-64"
    num_steps: int = 7
    num_groups: int = 16
    group_size: int = 8
    num_turns: int = 4
    turn_seconds: float = 0.2
    sigma: float = 1.0
    observation_tokens: int = 128

    def latency(self, task_seed: int, member: int, turn: int) -> float:
        """Seconds of that turn; the same in every run, whoever plays it."""
        location = math.log(self.turn_seconds) - self.sigma**2 / 2
        return float(generator(task_seed, "latency", member, turn).lognormal(location, self.sigma))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Means over the measured steps, in seconds; `playing` is the part of a step that waited for episodes."""

    step: float
    playing: float
    learning: float
    staleness: float
    num_late: float


class Slow(TextEnv):
    """An environment that takes its time and rewards different letters."""

    def __init__(self, **workload: Any) -> None:
        self._workload = Workload(**workload)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self._seed, self._turn = seed or 0, 0
        self._member = _num_begun[self._seed] % self._workload.group_size
        _num_begun[self._seed] += 1
        return "a" * self._workload.observation_tokens, {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(self._workload.latency(self._seed, self._member, self._turn))
        self._turn += 1
        is_over = self._turn == self._workload.num_turns
        return "b" * self._workload.observation_tokens, len(set(action)) / 16, is_over, False, {}


def measure(workload: Workload, max_staleness: int) -> StepTimes:
    """Train and time it."""
    with tempfile.TemporaryDirectory() as folder:
        config = configure(workload, max_staleness, Path(folder))
        run_training(config)
        lines = read_metrics(config.run_folder)[1:]

    def mean(name: str) -> float:
        return statistics.fmean(line.get(name, 0.0) for line in lines)

    return StepTimes(
        step=mean("time/step_seconds"),
        playing=mean("time/rollout_seconds"),
        learning=mean("time/update_seconds"),
        staleness=mean("rollout/staleness_mean"),
        num_late=sum(line.get("rollout/stale_dropped", 0.0) for line in lines),
    )


def configure(workload: Workload, max_staleness: int, folder: Path) -> RunConfig:
    """Return the run's configuration."""
    num_episodes = workload.num_groups * workload.group_size
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder), "log_episodes_every_n_iters": 0},
            "algorithm": {"variety": "gspo"},
            "model": {"base": workload.model, "label": "pipeline"},
            "rollout": {
                "env_name": "benchmarks.pipeline:Slow",
                "env_config": asdict(workload),
                "max_turns": workload.num_turns,
                "max_output_tokens": 16,
                "min_output_tokens": 8,
                "max_model_len": 1024,
                "episodes_per_batch": num_episodes,
                "max_concurrent_rollouts": 1024,
            },
            "limits": {"step_timeout_seconds": 600},
            "training": {
                "iterations_per_epoch": workload.num_steps,
                "group_size": workload.group_size,
                "batch_size": num_episodes,
                "learning_rate": 1e-5,
                "checkpoint_every_n_iters": workload.num_steps,
                "max_staleness": max_staleness,
            },
            "loss": {},
            "correction": {"old_logprobs": "rollout"},
            "evaluation": {"seeds": [0], "every_n_iters": workload.num_steps},
        }
    )


def measure_in_turns(workload: Workload, *, repeats: int) -> list[StepTimes]:
    """Medians over runs with `max_staleness` 0, 1 and 2, which take turns: a busy moment hits all of them."""
    runs = [[measure(workload, max_staleness) for max_staleness in (0, 1, 2)] for _ in range(repeats)]
    return [
        StepTimes(**{f.name: statistics.median(getattr(r, f.name) for r in same) for f in fields(StepTimes)})
        for same in zip(*runs, strict=True)
    ]


def render(times: Sequence[StepTimes]) -> Table:
    """The table; the first row is the synchronous run, and each has its `max_staleness` for its number.

    Waiting and learning are what a step consists of; ages are in versions; "too late" counts episodes of a whole run.
    """
    table = Table("max_staleness")
    for heading in ("step", "waiting", "learning", "ratio", "mean age", "too late"):
        table.add_column(heading, justify="right", no_wrap=True)
    bound = max(times[0].playing, times[0].learning)
    for staleness, run in enumerate(times):
        table.add_row(
            f"{staleness}",
            *(f"{seconds:.2f} s" for seconds in (run.step, run.playing, run.learning)),
            f"{run.step / bound:.2f}",
            f"{run.staleness:.2f}",
            f"{run.num_late:g}",
        )
    return table


def run_pipeline(workload: Workload, *, repeats: int) -> int:
    """Measure and print."""
    console = Console()
    times = measure_in_turns(workload, repeats=repeats)
    synchronous = times[0]
    console.print(
        f"{workload.model}; {workload.num_groups} groups of "
        f"{workload.group_size} episodes of {workload.num_turns} turns, {workload.turn_seconds:g} s a turn on average "
        f"(lognormal, sigma {workload.sigma:g}); medians of {repeats} runs, means "
        f"of {workload.num_steps - 1} steps each"
    )
    console.print(
        f"one after the other: playing {synchronous.playing:.2f} s, learning {synchronous.learning:.2f} s a step"
    )
    console.print(render(times))
    return 0

"""What playing ahead saves: `python -m benchmarks pipeline`.

The same training run synchronously and with `max_staleness` 1 and 2: a tiny model, the local engine and an environment
that takes 0.2 seconds a turn on average, with a heavy tail. As long as batches are played one after the other, no step
takes less than the longer of playing and learning; the ratio to that, as measured in the synchronous run, is shown.
With more than one batch in play at once, it may be less than 1.
"""

from __future__ import annotations

import asyncio
import copy
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.learning.settings import (
    CorrectionSettings,
    LossSettings,
    OptimizerSettings,
    UpdateSettings,
)
from gspo_gym.learning.update import Learner
from gspo_gym.policy.load import Policy, load_policy
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.rollout.actors import EngineActor
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import RolloutPool
from gspo_gym.run.collect import Collector
from gspo_gym.run.journal import Journal
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_metrics
from gspo_gym.run.report.progress import QuietProgress
from gspo_gym.run.settings import EvaluationSettings, LoopSettings, RunSettings, RunSize, TrainPlan
from gspo_gym.run.state import Saver
from gspo_gym.run.trainer import Trainer
from gspo_gym.seeding import generator
from gspo_gym.types import Outcome, Sampling, Task

ENV_ID = "benchmark/Slow-v0"
MAX_MODEL_LEN = 1024


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


class _Slow:
    """An environment that takes its time and rewards different letters."""

    def __init__(self, workload: Workload, task: Task, member: int) -> None:
        self._workload, self._seed, self._member = workload, task.seed, member
        self._turn = 0

    async def reset(self, **_: Any) -> Any:
        return "a" * self._workload.observation_tokens, {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(self._workload.latency(self._seed, self._member, self._turn))
        self._turn += 1
        is_over = self._turn == self._workload.num_turns
        return "b" * self._workload.observation_tokens, len(set(action)) / 16, is_over, False, {}

    async def close(self) -> None:
        pass


def measure(workload: Workload, max_staleness: int) -> StepTimes:
    """Train and time it."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_train(workload, max_staleness, Path(folder) / "run"))
        lines = read_metrics(Path(folder) / "run")[1:]

    def mean(name: str) -> float:
        return statistics.fmean(line.get(name, 0.0) for line in lines)

    return StepTimes(
        step=mean("time/step_seconds"),
        playing=mean("time/rollout_seconds"),
        learning=mean("time/update_seconds"),
        staleness=mean("rollout/staleness_mean"),
        num_late=sum(line.get("rollout/stale_dropped", 0.0) for line in lines),
    )


async def _train(workload: Workload, max_staleness: int, folder: Path) -> None:
    policy = load_policy(workload.model, seed=0)
    model = copy.deepcopy(policy.model) if max_staleness else policy.model
    engine = LocalEngine(model, max_model_len=MAX_MODEL_LEN, source=policy.model if max_staleness else None)
    recorder = RunRecorder.create(folder, "")
    plan = TrainPlan(
        env_id=ENV_ID,
        size=RunSize(
            num_epochs=1,
            iterations_per_epoch=workload.num_steps,
            episodes_per_batch=workload.num_groups * workload.group_size,
            batch_size=workload.num_groups * workload.group_size,
            group_size=workload.group_size,
        ),
        run=RunSettings(log_episodes_every_n_iters=0),
        loop=LoopSettings(checkpoint_every_n_iters=workload.num_steps, max_staleness=max_staleness),
        evaluation=EvaluationSettings(every_n_iters=workload.num_steps),
    )
    trainer = Trainer(
        plan,
        collector=Collector(plan, make_pool(workload, policy, engine), weight_version=lambda: engine.weight_version),
        learner=_learner(policy),
        publish=WeightSync(engine).publish,
        evaluate=_evaluate_nothing,
        saver=Saver(lambda _: Path, plan.loop, on_event=recorder.event),
        journal=Journal(plan, recorder, QuietProgress(lambda _: None)),
    )
    try:
        await trainer.run()
    finally:
        recorder.close()
        await engine.close()


def make_pool(workload: Workload, policy: Policy, engine: LocalEngine) -> RolloutPool:
    """Return a pool that plays the workload's environments, all episodes at once."""
    members: Counter[int] = Counter()  # environments made so far for each task

    def make_env(task: Task) -> _Slow:
        members[task.seed] += 1
        return _Slow(workload, task, members[task.seed] - 1)

    return RolloutPool(
        play=episode_player(
            make_env=make_env,
            act=EngineActor(engine, Sampling(min_tokens=8)),
            renderers=RendererCache(policy.tokenizer),
            limits=EpisodeLimits(
                max_turns=workload.num_turns,
                max_output_tokens=16,
                max_model_len=MAX_MODEL_LEN,
                step_timeout_seconds=600.0,
            ),
        ),
        pool_limits=PoolLimits(max_concurrent_rollouts=1024, max_attempts=1, min_group_fraction=1.0),
        run_seed=0,
    )


def _learner(policy: Policy) -> Learner:
    return Learner(
        policy.model,
        optimizer=OptimizerSettings(),
        loss=LossSettings(),
        update=UpdateSettings(learning_rate=1e-5),
        correction=CorrectionSettings(old_logprobs="rollout"),
    )


async def _evaluate_nothing(_label: str) -> Evaluation:
    return Evaluation(ENV_ID, (EvaluationRow(0, 0.0, None, 1, Outcome.TERMINATED),))


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

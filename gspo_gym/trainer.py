"""The loop: collect -> update -> publish weights -> evaluate, until the plan is done.

`Trainer` joins parts that know nothing of each other; it is the only object that calls them all. What the parts are is
decided in `build.py`; what they do with a batch is decided in `rollout` and `learning`. Called by `train.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo_gym.engine.base import Engine
from gspo_gym.evaluation import Evaluation
from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.learning.update import Learner
from gspo_gym.recording import RunRecorder
from gspo_gym.report.progress import Progress
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.rollout.summary import rollout_metrics
from gspo_gym.seeding import training_seed
from gspo_gym.types import Task


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What a run does, in steps; one step is one batch of episodes and the updates on it.

    Attributes:
        env_id: the environment trained on.
        run_seed: everything random in the run derives from it.
        num_steps: steps in all.
        groups_per_batch, group_size: episodes of a step = groups_per_batch x group_size.
        advantages: how the episodes of a group are compared.
        evaluate_every: steps between evaluations; there is one before the first step and one after the last, too.
        checkpoint_every: steps between checkpoints; there is one after the last step in any case.
        log_every: steps between lines in metrics.jsonl.
        stop_at_success_rate: an evaluation that reaches it ends the run; None runs all steps.
    """

    env_id: str
    run_seed: int
    num_steps: int
    groups_per_batch: int
    group_size: int
    advantages: AdvantageSettings
    evaluate_every: int
    checkpoint_every: int
    log_every: int
    stop_at_success_rate: float | None


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands; saved with every checkpoint, so that a resumed run goes on as if nothing had happened.

    The evaluations are summaries as in summary.json. `wall_seconds` are those of training steps and evaluations.
    """

    step: int = 0
    num_episodes: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    wall_seconds: float = 0.0
    initial_eval: Mapping[str, Any] | None = None
    final_eval: Mapping[str, Any] | None = None
    best_eval: Mapping[str, Any] | None = None
    curve: tuple[tuple[int, float], ...] = field(default=())  # (step, success rate or mean return) of each evaluation

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        return cls(**{**values, "curve": tuple((int(step), float(score)) for step, score in values["curve"])})

    def after_evaluation(self, evaluation: Evaluation) -> TrainState:
        """With this evaluation as the latest, and as the first or the best where it is."""
        summary = {"step": self.step, **evaluation.summary()}
        score = evaluation.score
        is_best = self.best_eval is None or score > max(score for _, score in self.curve)
        return dataclasses.replace(
            self,
            initial_eval=self.initial_eval or summary,
            final_eval=summary,
            best_eval=summary if is_best else self.best_eval,
            curve=(*self.curve, (self.step, score)),
        )


# Plays the evaluation's episodes with the present weights; the text names the occasion.
Evaluate = Callable[[str], Awaitable[Evaluation]]
SaveCheckpoint = Callable[[TrainState], None]


class Trainer:
    """Runs a plan. Holds no mathematics, no names and no files of its own; `state` says where it stands."""

    def __init__(
        self,
        plan: TrainPlan,
        *,
        pool: RolloutPool,
        engine: Engine,
        learner: Learner,
        evaluate: Evaluate,
        save_checkpoint: SaveCheckpoint,
        recorder: RunRecorder,
        progress: Progress,
        state: TrainState | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.state = state or TrainState()
        self._pool = pool
        self._engine = engine
        self._learner = learner
        self._evaluate = evaluate
        self._save_checkpoint = save_checkpoint
        self._recorder = recorder
        self._progress = progress
        self._clock = clock

    async def run(self) -> TrainState:
        """Train until the plan is done or an evaluation reaches its goal; returns the final state.

        Raises:
            RolloutError: no episode of a whole batch could be used.
            NonFiniteError: too many optimizer steps in a row were not finite.
            EnginePoisonedError: a weight update failed half-way.
        """
        plan = self.plan
        self._progress.started(plan.num_steps)
        try:
            if self.state.initial_eval is None:
                await self._run_evaluation()
            while self.state.step < plan.num_steps and not self._is_goal_reached():
                await self._run_step()
                if self.state.step % plan.evaluate_every == 0 or self.state.step == plan.num_steps:
                    await self._run_evaluation()
                if self.state.step % plan.checkpoint_every == 0:
                    self._save_checkpoint(self.state)
            if self.state.step % plan.checkpoint_every != 0:
                self._save_checkpoint(self.state)
        finally:
            self._progress.finished()
        return self.state

    async def _run_step(self) -> None:
        """One batch of episodes, the updates on it, and the new weights published."""
        started = self._clock()
        step = self.state.step + 1
        groups = await self._pool.collect(self._requests(step))
        collected = self._clock()
        built = build_batch(groups, self.plan.advantages)
        report = self._learner.update(built.batch)
        await self._engine.update_weights(version=step)
        finished = self._clock()
        metrics = {
            **rollout_metrics(groups, seconds=collected - started),
            **report.metrics,
            "batch/constant_group_fraction": built.counts.num_constant_groups / built.counts.num_groups,
            "time/rollout_seconds": collected - started,
            "time/update_seconds": finished - collected,
            "time/step_seconds": finished - started,
        }
        self.state = dataclasses.replace(
            self.state,
            step=step,
            num_episodes=self.state.num_episodes + built.counts.num_trajectories,
            sampled_tokens=self.state.sampled_tokens + int(metrics["rollout/sampled_tokens"]),
            trained_tokens=self.state.trained_tokens + int(metrics["batch/trained_tokens"]),
            wall_seconds=self.state.wall_seconds + finished - started,
        )
        if step % self.plan.log_every == 0 or step == self.plan.num_steps:
            self._recorder.metrics(step, metrics)
        self._recorder.episodes(f"step_{step:06d}", [t for group in groups for t in group.trajectories])
        self._progress.stepped(step, metrics)

    async def _run_evaluation(self) -> None:
        started = self._clock()
        step = self.state.step
        evaluation = await self._evaluate(f"eval_{step:06d}")
        self.state = dataclasses.replace(
            self.state.after_evaluation(evaluation), wall_seconds=self.state.wall_seconds + self._clock() - started
        )
        self._recorder.event("evaluation", step, evaluation.to_dict())
        self._progress.note(f"step {step}: {evaluation.sentence()}")

    def _requests(self, step: int) -> list[GroupRequest]:
        plan = self.plan
        return [
            GroupRequest(
                group_id=f"step_{step:06d}/group_{group:04d}",
                task=Task(plan.env_id, training_seed(plan.run_seed, step, group)),
                size=plan.group_size,
            )
            for group in range(plan.groups_per_batch)
        ]

    def _is_goal_reached(self) -> bool:
        goal, latest = self.plan.stop_at_success_rate, self.state.final_eval
        rate = latest["success_rate"] if latest is not None and latest["step"] == self.state.step else None
        return goal is not None and rate is not None and bool(rate >= goal)

"""The loop: collect -> update -> publish weights -> evaluate, until the plan is done.

`Trainer` joins parts that know nothing of each other; it is the only object that calls them all. What the parts are is
decided in `config/build/trainer.py`; what they do with a batch is decided in `rollout` and `learning`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from gspo_gym.judge.base import JudgeError
from gspo_gym.learning.advantages import is_constant
from gspo_gym.learning.batching import BuiltBatch, build_batch
from gspo_gym.learning.correction import MismatchAlarm
from gspo_gym.learning.credit import played, returns_of
from gspo_gym.learning.update import Learner
from gspo_gym.policy.weight_sync import require_committed, versions_of
from gspo_gym.rollout.evaluation import Evaluation, ScoreUnit
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.rollout.schedule import OnDemand, PlayedAhead, Schedule, staleness_metrics
from gspo_gym.rollout.summary import Mixture, rollout_metrics, source_metrics
from gspo_gym.run.collect import Collected, batch_metrics, collect_groups
from gspo_gym.run.plan import TrainPlan
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.report.progress import Progress
from gspo_gym.run.state import TrainState as TrainState
from gspo_gym.seeding import training_seed
from gspo_gym.types import Task, TrajectoryGroup

_Result = TypeVar("_Result")

_UNDECIDED = (
    "step {}: every episode of an environment was cut off before it said how it ended; scores are the {} until an "
    "evaluation in which one comes to its end decides what they are"
)


# Plays the evaluation's episodes with the present weights; the text names the occasion.
Evaluate = Callable[[str], Awaitable[Evaluation]]
SaveCheckpoint = Callable[[TrainState], None]
# Makes the learner's present weights the ones that sample, under the given version.
Publish = Callable[[int], Awaitable[None]]
WhileLearning = Callable[[], AbstractAsyncContextManager[object]]


class Trainer:
    """Runs a plan. Holds no mathematics, no names and no files of its own; `state` says where it stands."""

    def __init__(
        self,
        plan: TrainPlan,
        *,
        pool: RolloutPool,
        publish: Publish,
        learner: Learner,
        evaluate: Evaluate,
        save_checkpoint: SaveCheckpoint,
        recorder: RunRecorder,
        progress: Progress,
        state: TrainState | None = None,
        weight_version: Callable[[], int] = lambda: 0,
        is_committed: Callable[[int], bool] | None = None,
        alarm: MismatchAlarm | None = None,
        more_metrics: Callable[[int, Sequence[TrajectoryGroup]], Mapping[str, float]] | None = None,
        while_learning: WhileLearning = contextlib.nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the parts.

        `weight_version` says what samples now, and is asked only if episodes are played ahead. `is_committed` says
        whether tokens of a version may be trained on; None: all may. `alarm` judges every batch; None: nobody does.
        `more_metrics` gives a step's others, from its number and groups. `while_learning` is around the learner's work
        on a batch; what played it may give its memory up for so long.
        """
        self.plan = plan
        self.state = state or TrainState()
        self._saved: TrainState | None = None  # what the newest checkpoint of this process holds
        self._schedule = self._make_schedule(pool, weight_version)
        self._publish = publish
        self._learner = learner
        self._evaluate = evaluate
        self._save_checkpoint = save_checkpoint
        self._recorder = recorder
        self._progress = progress
        self._is_committed = is_committed
        self._alarm = alarm
        self._more_metrics = more_metrics
        self._while_learning = while_learning
        self._clock = clock

    async def run(self) -> TrainState:
        """Train until the plan is done or an evaluation reaches its goal; returns the final state.

        However it ends, no episode is being played and no thread works for it any more.

        Raises:
            RolloutError: no episode of a whole batch could be used.
            NonFiniteError: too many optimizer steps in a row were not finite.
            EnginePoisonedError: a weight update failed half-way.
            EngineMismatchError: the engine's logprobs are not the learner's, batch after batch.
            JudgeError: nothing will be scored any more; the run is saved and can go on.
        """
        plan = self.plan
        self._progress.started(plan.size.num_iterations)
        try:
            await self._evaluate_if_due()  # also one that an earlier part of the run was stopped in
            while self.state.step < plan.size.num_iterations and not self._is_goal_reached():
                await self._run_step()
                await self._evaluate_if_due()
                if self.state.step % plan.loop.checkpoint_every_n_iters == 0:
                    await self._save()
            await self._save()
        except JudgeError:  # raised while episodes are played, so that the weights are those of `state`
            await self._save()
            raise
        finally:
            self._progress.finished()
            await self._schedule.close()
        return self.state

    async def _run_step(self) -> None:
        """One batch of episodes, the updates on it, and the new weights published.

        A step whose groups teach nothing takes no update and is a step all the same: the weights get its number.
        """
        started, step, unit = self._clock(), self.state.step + 1, self.state.score_unit
        success_of = () if unit is None else unit.success_of
        self._schedule.begin(step)
        collected = self._only_committed(await self._collect(), step)
        num_late = self._schedule.finish()
        played_at = self._clock()
        async with self._while_learning():
            built, learned = await self._block(lambda: self._learn(collected))
        self._require_agreement(collected, learned, step)
        await self._publish(step)
        finished = self._clock()
        # Played ahead, episodes are played all the time, not only while a step waits for them.
        is_ahead = self.plan.loop.max_staleness > 0
        metrics = {
            **rollout_metrics(
                collected.groups,
                seconds=(finished if is_ahead else played_at) - started,
                success_of=success_of,
            ),
            **(source_metrics(collected.groups, success_of=success_of) if self.plan.mixture else {}),
            **(staleness_metrics(collected.groups, version=step - 1, num_dropped=num_late) if is_ahead else {}),
            **learned,
            **batch_metrics(collected, built),
            **({} if self._more_metrics is None else self._more_metrics(step, collected.groups)),
            "time/rollout_seconds": played_at - started,
            "time/update_seconds": finished - played_at,
            "time/step_seconds": finished - started,
        }
        self.state = dataclasses.replace(
            self.state,
            step=step,
            num_tasks=self._schedule.num_tasks,
            pending_tasks=self._schedule.pending_tasks,
            num_episodes=self.state.num_episodes + built.counts.num_trajectories,
            sampled_tokens=self.state.sampled_tokens + int(metrics["rollout/sampled_tokens"]),
            trained_tokens=self.state.trained_tokens + int(metrics.get("batch/trained_tokens", 0)),
            gradient_steps=self.state.gradient_steps + (learned.get("optim/grad_norm_max", 0.0) > 0),
            wall_seconds=self.state.wall_seconds + finished - started,
            running=built.running,
        )
        self._record_step(collected, metrics, is_updated=built.batch is not None)

    def _make_schedule(self, pool: RolloutPool, weight_version: Callable[[], int]) -> Schedule:
        """Where groups come from: the only thing in which synchronous and pipelined training differ."""
        plan, state = self.plan, self.state
        mixture = Mixture(plan.env_id, plan.mixture)

        def request(number: int, name: str) -> GroupRequest:
            task = Task(mixture.env_of(number), training_seed(plan.run.seed, number))
            return GroupRequest(name, task, size=plan.size.group_size)

        if plan.loop.max_staleness == 0:
            return OnDemand(pool.collect, request, num_tasks=state.num_tasks)
        return PlayedAhead(
            pool.play_group,
            request,
            weight_version=weight_version,
            groups_per_step=plan.size.groups_per_iteration,
            num_steps=plan.size.num_iterations,
            max_staleness=plan.loop.max_staleness,
            num_ahead=plan.loop.num_ahead,
            num_tasks=state.num_tasks,
            pending_tasks=state.pending_tasks,
        )

    async def _collect(self) -> Collected:
        plan = self.plan
        return await collect_groups(
            self._schedule.take,
            num_groups=plan.size.groups_per_iteration,
            constant_groups=plan.loop.constant_groups,
            max_refill_rounds=plan.loop.max_refill_rounds,
            is_informative=self._is_informative,
        )

    def _only_committed(self, collected: Collected, step: int) -> Collected:
        """Without episodes of weights that were never committed, of which there are none unless an engine is broken."""
        if self._is_committed is None:
            return collected
        checked = require_committed(collected.kept, self._is_committed)
        if checked.num_dropped:
            self._recorder.event("uncommitted", step, {"num_episodes": checked.num_dropped})
        return dataclasses.replace(collected, kept=checked.groups)

    def _require_agreement(self, collected: Collected, learned: Mapping[str, float], step: int) -> None:
        """Sound the alarm if engine and learner disagree; the weights that were scored are those of the step before."""
        if self._alarm is None:
            return
        sampled_under = {version for group in collected.kept for t in group.trajectories for version in versions_of(t)}
        reason = self._alarm.check(learned, sampled_under=sampled_under, version=step - 1)
        if reason is not None:
            self._recorder.event("mismatch", step, {"reason": reason})
            self._progress.note(f"step {step}: {reason}")

    def _learn(self, collected: Collected) -> tuple[BuiltBatch, Mapping[str, float]]:
        plan = self.plan
        built = build_batch(
            collected.kept,
            plan.advantages,
            rewards=plan.rewards,
            step_rewards=plan.step_rewards,
            running=self.state.running,
        )
        return built, {} if built.batch is None else self._learner.update(built.batch).metrics

    async def _block(self, work: Callable[[], _Result]) -> _Result:
        """What the work returns; in a thread if episodes are played meanwhile, which must not wait for it.

        A cancellation takes effect when the work has ended: it cannot be stopped, and must not go on behind our back.
        """
        if self.plan.loop.max_staleness == 0:
            return work()
        working = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.gather(working, return_exceptions=True)
            raise

    def _is_informative(self, group: TrajectoryGroup) -> bool:
        plan = self.plan
        returns = [
            returns_of(t, discount=plan.advantages.discount, rewards=plan.rewards, step_rewards=plan.step_rewards)
            for t in played(group)
        ]
        return not is_constant(returns, plan.advantages)

    def _record_step(self, collected: Collected, metrics: Mapping[str, float], *, is_updated: bool) -> None:
        plan, step = self.plan, self.state.step
        for reason in collected.failures:
            self._recorder.event("refill_failed", step, {"reason": reason})
        if not is_updated:
            self._recorder.event("no_update", step, {"num_groups": len(collected.groups)})
        if step % plan.loop.log_interval == 0 or step == plan.size.num_iterations:
            self._recorder.metrics(step, metrics)
        if plan.run.log_episodes_every_n_iters and step % plan.run.log_episodes_every_n_iters == 0:
            self._recorder.episodes(f"step_{step:06d}", [t for group in collected.groups for t in group.trajectories])
        self._progress.stepped(step, metrics)

    async def _evaluate_if_due(self) -> None:
        """Evaluate before the first step, every so many, and after the last, unless this step has its evaluation."""
        plan, step = self.plan, self.state.step
        is_due = step % plan.evaluation.every_n_iters == 0 or step >= plan.size.num_iterations
        if is_due and step != self.state.last_evaluated:
            await self._run_evaluation()

    async def _run_evaluation(self) -> None:
        # Weights change in `_run_step` only, so an evaluation has one version, also while episodes are played ahead.
        started = self._clock()
        step = self.state.step
        played = await self._evaluate(f"eval_{step:06d}")
        unit = self.state.score_unit or ScoreUnit.of_first(
            played, has_success_goal=self.plan.loop.stop_at_success_rate is not None
        )
        evaluation = played if unit is None else played.in_unit(unit)
        num_undecided = len(self.state.undecided)
        self.state = dataclasses.replace(
            self.state.after_evaluation(evaluation, unit),
            wall_seconds=self.state.wall_seconds + self._clock() - started,
        )
        self._recorder.event("evaluation", step, evaluation.to_dict())
        self._progress.note(f"step {step}: {evaluation.sentence()}")
        if unit is None and not num_undecided:
            self._progress.note(_UNDECIDED.format(step, evaluation.score_name.replace("_", " ")))
        elif unit is not None and num_undecided:
            self._progress.note(
                f"step {step}: this evaluation decides that scores are the {unit.name.replace('_', ' ')}, also of the "
                f"{num_undecided} before it, where an episode that was cut off undecided is no success"
            )

    async def _save(self) -> None:
        """Save a checkpoint of the present state, unless the newest one holds it."""
        if self._saved is not self.state:
            await self._block(lambda: self._save_checkpoint(self.state))
            self._saved = self.state

    def _is_goal_reached(self) -> bool:
        goal, latest = self.plan.loop.stop_at_success_rate, self.state.final_eval
        rate = latest["success_rate"] if latest is not None and latest["step"] == self.state.step else None
        return goal is not None and rate is not None and bool(rate >= goal)

"""The training loop: collect -> score -> update -> publish -> evaluate, until the plan is done.

`Trainer` joins parts that do not know each other; it is the only object that calls them all. `config/build/trainer.py`
chooses the parts; `rollout` and `learning` define what they do with a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from gspo_gym.base.loops import Compute, in_another_thread, retrieve_exception, wait_until_ended
from gspo_gym.errors import StuckError
from gspo_gym.judge.base import JudgeError
from gspo_gym.learning.batching import BuiltBatch, build_batch
from gspo_gym.learning.tokens import TokenSink
from gspo_gym.learning.update import AnyLearner
from gspo_gym.rollout.evaluation import Evaluation, ScoreUnit
from gspo_gym.run.collect import Collected, Collector
from gspo_gym.run.feedback import GiveFeedback
from gspo_gym.run.journal import Journal, StepTimes
from gspo_gym.run.settings import TrainPlan
from gspo_gym.run.state import Saver, TrainState
from gspo_gym.run.steering import Steering, StopRequested

_Result = TypeVar("_Result")

MAX_IDLE_STEPS = 10  # in a row in which nothing was learned: such a run would learn nothing for ever

# Makes the learner's present weights the ones that sample, under the given version.
Publish = Callable[[int], Awaitable[None]]
# Plays the evaluation's episodes with the present weights; the text names the occasion.
Evaluate = Callable[[str], Coroutine[Any, Any, Evaluation]]
WhileLearning = Callable[[], AbstractAsyncContextManager[object]]
# `Engine.forget_ended`.
ForgetEnded = Callable[[], Awaitable[None]]


async def _keeps_nothing() -> None: ...


class Trainer:
    """Loop that runs a plan. It holds no mathematics, names or files; `state` is its progress.

    Args:
        plan: the settings of the loop.
        collector: collects the episodes of a step.
        learner: updates the weights on a batch.
        publish: makes the engine sample with the updated weights.
        evaluate: plays the evaluation's episodes.
        saver: saves the learner's weights with a state.
        journal: records what happens, and stops the run if engine and learner disagree.
        state: from the checkpoint to go on from; None: the run begins.
        forget_ended: `Engine.forget_ended`, called before every step and evaluation, because a resumed run has played
            other episodes before them.
        compute: runs the learner's work outside the event loop, which judges, task apps and signals need meanwhile.
        give_feedback: gives the batch what a teacher with feedback reads; None: there is no such teacher.
        while_learning: entered while the learner works on a batch; the engine can lend it memory meanwhile.
        steering: requests from outside, such as to stop; None: there are none.
    """

    def __init__(
        self,
        plan: TrainPlan,
        *,
        collector: Collector,
        learner: AnyLearner,
        publish: Publish,
        evaluate: Evaluate,
        saver: Saver,
        journal: Journal,
        state: TrainState | None = None,
        forget_ended: ForgetEnded = _keeps_nothing,
        compute: Compute = in_another_thread,
        give_feedback: GiveFeedback | None = None,
        while_learning: WhileLearning = contextlib.nullcontext,
        steering: Steering | None = None,
    ) -> None:
        self.plan = plan
        self.state = state or TrainState()
        self._collector = collector
        self._learner = learner
        self._publish = publish
        self._evaluate = evaluate
        self._saver = saver
        self._journal = journal
        self._forget_ended = forget_ended
        self._compute = compute
        self._give_feedback = give_feedback
        self._while_learning = while_learning
        self._steering = steering or Steering()

    async def run(self) -> TrainState:
        """Train until the plan is done or an evaluation reaches its goal; return the final state.

        However it ends, no episode is being played and no thread works for it afterwards.

        Raises:
            RolloutError: no episode of a whole batch could be used.
            NonFiniteError: too many optimizer steps in a row were not finite.
            EnginePoisonedError: a weight update failed half-way.
            EngineMismatchError: the engine's logprobs are not the learner's, batch after batch.
            StuckError: too many steps in a row taught nothing; the run is saved and can go on.
            CheckpointError: the disk refused several checkpoints in a row.
            JudgeError: nothing will be scored any more; the run is saved and can go on.
            StopRequested: a stop was asked for; the run is saved and can go on.
        """
        self._steering.attach()
        self._journal.started(self.state.step)
        try:
            await self._saver.begin(self.state)  # a kill during the first evaluation must not lose the warm-up
            await self._evaluate_if_due()  # also one that an earlier part of the run was stopped in
            await self._saver.after_step(self.state)
            while self.state.step < self.plan.size.num_iterations and not self.state.has_reached(
                self.plan.loop.stop_at_success_rate
            ):
                await self._steering.between_steps(self._save)
                await self._run_step()
                await self._evaluate_if_due()
                await self._saver.after_step(self.state)
                self._require_something_to_learn()
            await self._save()  # also the last evaluation
        except (JudgeError, StopRequested, StuckError):  # raised between updates: the weights are those of `state`
            await self._save()
            raise
        finally:
            self._journal.finished()
            await self._collector.close()
            await self._saver.close()
            await self._steering.dropped_work_ended()
        return self.state

    async def _save(self) -> None:
        await self._saver.finish(self.state)
        self._steering.saved()

    async def _run_step(self) -> None:
        """Collect a batch of episodes, score it, update the weights on it, and publish them."""
        start_seconds, step = self._journal.clock(), self.state.step + 1
        await self._forget_ended()
        collection = await self._steering.unless_stopped(self._collector.collect(step))
        self._journal.collected(step, collection)
        collected_at = self._journal.clock()
        async with self._while_learning():
            built_batch = await self._block(lambda: self._score(collection))
            tokens = self._journal.token_table(step)
            feedback_metrics: Mapping[str, float] = {}
            if self._give_feedback is not None:
                feedback = await self._steering.unless_stopped(self._give_feedback(collection.kept, built_batch))
                self._journal.given_feedback(step, feedback, is_recorded=tokens is not None)
                built_batch, feedback_metrics = feedback.built, feedback.metrics
            update_metrics = {**await self._block(lambda: self._update(built_batch, tokens)), **feedback_metrics}
        self._journal.learned(step, collection, update_metrics)
        # Also without an update: the weights get the number of every step.
        await self._publish(step)
        times = StepTimes(start_seconds, collected_at, self._journal.clock())
        metrics = self._journal.metrics(
            step, collection, built_batch, update_metrics, times=times, unit=self.state.score_unit
        )
        self._advance(step, built_batch, metrics, seconds=times.finished - start_seconds)
        self._journal.stepped(step, collection, built_batch, metrics, tokens)

    def _score(self, collection: Collected) -> BuiltBatch:
        """Return the collected groups as a batch in which every turn has its advantage."""
        plan = self.plan
        return build_batch(
            collection.kept,
            plan.advantages,
            rewards=plan.rewards,
            step_rewards=plan.step_rewards,
            running=self.state.running,
            known_returns=collection.returns,
        )

    def _update(self, built_batch: BuiltBatch, tokens: TokenSink | None) -> Mapping[str, float]:
        """Update the weights; return the update's metrics, or {} if there is nothing to learn from."""
        return {} if built_batch.batch is None else self._learner.update(built_batch.batch, tokens).metrics

    async def _block(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of the learner's work; a cancellation waits for the end of the work."""
        working = asyncio.ensure_future(self._compute(work))
        working.add_done_callback(retrieve_exception)  # of a cancelled step, which does not look
        # A thread cannot be stopped, and must not change weights after this has returned.
        await wait_until_ended({working})
        return working.result()

    def _require_something_to_learn(self) -> None:
        """Raise StuckError if `MAX_IDLE_STEPS` steps in a row have taught nothing."""
        num_idle = self.state.idle_steps
        if num_idle >= MAX_IDLE_STEPS:
            raise StuckError(
                f"in {num_idle} iterations in a row, up to {self.state.step}, no episode had an advantage: all of a "
                "group earned the same, and nothing was learned. `gspo-gym doctor` says why; larger groups, a warm-up, "
                "easier tasks or finer rewards help"
            )

    def _advance(self, step: int, built_batch: BuiltBatch, metrics: Mapping[str, float], *, seconds: float) -> None:
        state = self.state
        next_state = dataclasses.replace(
            state,
            step=step,
            num_tasks=self._collector.num_tasks,
            pending_tasks=self._collector.pending_tasks,
            task_counts=self._collector.task_counts,
            num_episodes=state.num_episodes + built_batch.counts.num_trajectories,
            sampled_tokens=state.sampled_tokens + int(metrics["rollout/sampled_tokens"]),
            trained_tokens=state.trained_tokens + int(metrics.get("batch/trained_tokens", 0)),
            idle_steps=state.idle_steps + 1 if _is_idle(built_batch, metrics) else 0,
            gradient_steps=state.gradient_steps + (metrics.get("optim/grad_norm_max", 0.0) > 0),
            wall_seconds=state.wall_seconds + seconds,
            running=built_batch.running,
        )
        self.state = self._journal.with_alarms(next_state)

    async def _evaluate_if_due(self) -> None:
        """Evaluate before the first step, every few steps, and after the last, unless this step has its evaluation."""
        plan, step = self.plan, self.state.step
        is_due = (
            self.state.last_evaluated is None
            or step % plan.evaluation.every_n_iters == 0
            or step >= plan.size.num_iterations
        )
        if is_due and step != self.state.last_evaluated:
            await self._run_evaluation()

    async def _run_evaluation(self) -> None:
        # Weights change in `_run_step` only, so an evaluation has one version, also while episodes are played ahead.
        start_seconds, before = self._journal.clock(), self.state
        await self._forget_ended()
        raw_evaluation = await self._steering.unless_stopped(self._evaluate(f"eval_{before.step:06d}"))
        unit = before.score_unit or ScoreUnit.of_first(
            raw_evaluation, has_success_goal=self.plan.loop.stop_at_success_rate is not None
        )
        evaluation = raw_evaluation if unit is None else raw_evaluation.in_unit(unit)
        self.state = dataclasses.replace(
            before.after_evaluation(evaluation, unit),
            wall_seconds=before.wall_seconds + self._journal.clock() - start_seconds,
        )
        self._journal.evaluated(before.step, evaluation, unit, num_undecided=len(before.undecided))


def _is_idle(built_batch: BuiltBatch, metrics: Mapping[str, float]) -> bool:
    """Return whether a step taught nothing although not every task was done."""
    has_advantages = built_batch.batch is not None and bool(built_batch.batch.advantages.any())
    # A teacher needs no advantages, nor siblings; one with feedback taught if there was some.
    is_taught = "loss/distillation" in metrics and metrics.get("distillation/taught_fraction", 1.0) > 0
    # If every task was done, there is nothing more to learn, and the run is not stuck.
    return not (has_advantages or is_taught) and metrics.get("rollout/success_rate") != 1.0

"""The journal of a run: metrics, events and episodes go to the folder, notes to the display of progress.

Nothing here feeds back into training, except that a run is stopped where engine and learner disagree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gspo_gym.diagnosis.alarms import MismatchAlarm, note_of
from gspo_gym.diagnosis.selection import AttemptWatch, SelectionAlarm
from gspo_gym.diagnosis.teaching import TeachingAlarm
from gspo_gym.errors import StorageError
from gspo_gym.learning.batching import BuiltBatch
from gspo_gym.learning.tokens import TokenTable
from gspo_gym.policy.weight_sync import versions_of
from gspo_gym.rollout.evaluation import Evaluation, ScoreUnit
from gspo_gym.rollout.schedule import staleness_metrics
from gspo_gym.rollout.summary import rollout_metrics, source_metrics, uniform_metrics
from gspo_gym.run.collect import Collected, batch_metrics
from gspo_gym.run.feedback import StepFeedback, leak_reason
from gspo_gym.run.feedback_files import pack_feedback
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.report.progress import Progress
from gspo_gym.run.settings import TrainPlan
from gspo_gym.run.state import TrainState
from gspo_gym.run.tokens import pack_tokens
from gspo_gym.types import TrajectoryGroup

_UNDECIDED = (
    "step {}: every episode of an environment was cut off before it said how it ended; scores are the {} until an "
    "evaluation in which one comes to its end decides what they are"
)

# Further metrics of a step, from its number and groups; may also sound alarms of its own.
MoreMetrics = Callable[[int, Sequence[TrajectoryGroup]], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times at which a step began, had its episodes and had published its weights, by the journal's clock."""

    started: float
    collected: float
    finished: float


class Journal:
    """Journal of a run's steps and evaluations.

    Args:
        plan: of the run; may be replaced between two steps.
        recorder: of the run's folder.
        progress: shown to a person.
        alarm: compares the logprobs of engine and learner in every batch; None: they are not compared.
        attempts: watches how attempts end, among `more_metrics`; None: they are not watched.
        selection: the same for the returns of task apps.
        teaching: watches whether a teacher with feedback agrees with the rewards; None: there is no such teacher.
        more_metrics: see `MoreMetrics`; None: there are none.
        clock: monotonic seconds, also for the trainer's times of a step.
    """

    def __init__(
        self,
        plan: TrainPlan,
        recorder: RunRecorder,
        progress: Progress,
        *,
        alarm: MismatchAlarm | None = None,
        attempts: AttemptWatch | None = None,
        selection: SelectionAlarm | None = None,
        teaching: TeachingAlarm | None = None,
        more_metrics: MoreMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.plan = plan
        self._recorder = recorder
        self._progress = progress
        self._alarm = alarm
        self._attempts = attempts
        self._selection = selection
        self._teaching = teaching
        self._more_metrics = more_metrics
        self._has_told_of_leaks = False  # every step may have some, and an event

    def with_alarms(self, state: TrainState) -> TrainState:
        """Return the state of a step with what the alarms have counted up to it, so that a resumed run counts on."""
        return replace(
            state,
            num_mismatches=0 if self._alarm is None else self._alarm.num_in_a_row,
            attempts=state.attempts if self._attempts is None else self._attempts.evidence,
            selection=state.selection if self._selection is None else self._selection.evidence,
            teaching=state.teaching if self._teaching is None else self._teaching.evidence,
        )

    def started(self, step: int) -> None:
        """Begin to show progress; so many steps were taken in an earlier part of the run."""
        self._progress.started(self.plan.size.num_iterations, step)

    def finished(self) -> None:
        """End the display of progress, however the run ended."""
        self._progress.finished()

    def collected(self, step: int, collected: Collected) -> None:
        """Record how many episodes were left out because their weights were never committed."""
        if collected.num_uncommitted:
            self._recorder.event("uncommitted", step, {"num_episodes": collected.num_uncommitted})

    def learned(self, step: int, collected: Collected, learned: Mapping[str, float]) -> None:
        """Record an alarm if engine and learner disagree on the logprobs of the batch, or a teacher with the rewards.

        Raises:
            EngineMismatchError: engine and learner disagree for too many batches in a row.
        """
        if self._teaching is not None and (reason := self._teaching.check(learned)) is not None:
            self._sound("teacher_disagrees", step, reason)
        if self._alarm is None:
            return
        sampled_under = {version for group in collected.kept for t in group.trajectories for version in versions_of(t)}
        # The learner scores with the weights of the step before.
        reason = self._alarm.check(learned, sampled_under=sampled_under, version=step - 1)
        if reason is not None:
            self._sound("mismatch", step, reason)

    def given_feedback(self, step: int, feedback: StepFeedback, *, is_recorded: bool) -> None:
        """Record that feedback says the answer, and, if the step's tokens are recorded, what the teacher read."""
        if (reason := leak_reason(feedback)) is not None:
            self._recorder.event("feedback_leaks", step, {"reason": reason})
            if not self._has_told_of_leaks:
                self._progress.note(note_of("feedback_leaks", step, reason))
                self._has_told_of_leaks = True
        if is_recorded:
            try:
                self._recorder.feedback(step, pack_feedback(feedback.turns))
            except StorageError as error:  # a record that training does without
                self._recorder.event("tokens_failed", step, {"reason": str(error)})
                self._progress.note(f"step {step}: what the teacher read is not recorded: {error}")

    def _sound(self, kind: str, step: int, reason: str) -> None:
        self._recorder.event(kind, step, {"reason": reason})
        self._progress.note(note_of(kind, step, reason))

    def metrics(
        self,
        step: int,
        collected: Collected,
        built: BuiltBatch,
        learned: Mapping[str, float],
        *,
        times: StepTimes,
        unit: ScoreUnit | None,
    ) -> dict[str, float]:
        """Return all metrics of a step.

        Args:
            learned: the metrics of the update.
            unit: of the run's scores; None before it is decided.
        """
        is_ahead = self.plan.loop.max_staleness > 0
        # Played ahead, episodes are played all the time, and not only while a step waits for them.
        playing_until = times.finished if is_ahead else times.collected
        groups, success_of = collected.groups, () if unit is None else unit.success_of
        return {
            **rollout_metrics(groups, seconds=playing_until - times.started, success_of=success_of),
            **(source_metrics(groups, success_of=success_of) if self.plan.mixture else {}),
            **(staleness_metrics(groups, version=step - 1, num_dropped=collected.num_late) if is_ahead else {}),
            **learned,
            **batch_metrics(collected, built),
            **uniform_metrics(collected.uniform),
            **({} if self._more_metrics is None else self._more_metrics(step, groups)),
            "time/rollout_seconds": times.collected - times.started,
            "time/update_seconds": times.finished - times.collected,
            "time/step_seconds": times.finished - times.started,
        }

    def token_table(self, step: int) -> TokenTable | None:
        """Return a sink for the update of a step of which tokens are to be recorded; None: of others."""
        every = self.plan.run.log_tokens_every_n_iters
        # `gspo-gym verify` recomputes a step from the weights before it.
        follows_checkpoint = (step - 1) % self.plan.loop.checkpoint_every_n_iters == 0
        return TokenTable() if every and (step % every == 0 or follows_checkpoint) else None

    def stepped(
        self,
        step: int,
        collected: Collected,
        built: BuiltBatch,
        metrics: Mapping[str, float],
        tokens: TokenTable | None,
    ) -> None:
        """Record a finished step, as often as the plan says; `tokens` is what `token_table` gave for it."""
        plan = self.plan
        for reason in collected.failures:
            self._recorder.event("refill_failed", step, {"reason": reason})
        if built.batch is None:
            self._recorder.event("no_update", step, {"num_groups": len(collected.groups)})
        if step % plan.loop.log_interval == 0 or step == plan.size.num_iterations:
            self._recorder.metrics(step, metrics)
        if plan.run.log_episodes_every_n_iters and step % plan.run.log_episodes_every_n_iters == 0:
            self._recorder.episodes(f"step_{step:06d}", [t for group in collected.groups for t in group.trajectories])
        if tokens is not None:
            try:
                self._recorder.tokens(step, pack_tokens(step, collected, built, tokens))
            except StorageError as error:  # a record that training does without
                self._recorder.event("tokens_failed", step, {"reason": str(error)})
                self._progress.note(f"step {step}: what the learner saw is not recorded: {error}")
        self._progress.stepped(step, metrics)

    def evaluated(self, step: int, evaluation: Evaluation, unit: ScoreUnit | None, *, num_undecided: int) -> None:
        """Record an evaluation; `num_undecided` evaluations before it did not decide the unit."""
        self._recorder.event("evaluation", step, evaluation.to_dict())
        self._progress.note(f"step {step}: {evaluation.sentence()}")
        if unit is None and not num_undecided:
            self._progress.note(_UNDECIDED.format(step, evaluation.score_name.replace("_", " ")))
        elif unit is not None and num_undecided:
            self._progress.note(
                f"step {step}: this evaluation decides that scores are the {unit.name.replace('_', ' ')}, also of the "
                f"{num_undecided} before it, where an episode that was cut off undecided is no success"
            )

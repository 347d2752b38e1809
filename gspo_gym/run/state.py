"""The state of a run, which every checkpoint holds and a resumed run goes on from; and when checkpoints are saved: if
one is due, in the background, and again when the disk refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo_gym.base.loops import wait_until_ended
from gspo_gym.diagnosis.selection import AttemptCounts, AttemptEvidence, SelectionEvidence
from gspo_gym.diagnosis.teaching import TeachingEvidence
from gspo_gym.errors import CheckpointError
from gspo_gym.learning.advantages import RunningReturns
from gspo_gym.policy.manifest import EVALUATION_NUMBERS
from gspo_gym.rollout.evaluation import Evaluation, ScoreUnit, restated
from gspo_gym.rollout.sampler import TaskCounts
from gspo_gym.rollout.summary import PlayedReturns
from gspo_gym.run.process import Phases
from gspo_gym.run.settings import LoopSettings


@dataclass(frozen=True, slots=True)
class TrainState:
    """Progress of a run, saved with every checkpoint: a resumed run goes on as if nothing had happened.

    The evaluations are summaries as in summary.json. `wall_seconds` are those of training steps and evaluations.
    `num_tasks` counts the groups that were asked for, and with them the tasks; `pending_tasks` are the numbers of those
    that were played ahead and not trained on: a resumed run plays them again, before all others. `running` are the
    statistics of all returns so far. `score_unit` is what all scores of the run are measured in; None before an
    evaluation decides it, and `undecided` are the summaries of those before. `gradient_steps` counts the steps in which
    the optimizer had a gradient to go by, and `idle_steps` those, in a row up to now, which taught nothing. `last_seq`
    is that of the run's events when the checkpoint was taken; None: an earlier version took it. `num_mismatches` counts
    the steps, in a row up to now, in which engine and learner disagreed; `attempts` is the evidence of failed ones, and
    `selection` that of task apps' returns, and `teaching` that of a teacher with feedback. `task_counts` is what the
    choice of tasks goes by.
    """

    step: int = 0
    num_tasks: int = 0
    pending_tasks: tuple[int, ...] = ()
    num_episodes: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    gradient_steps: int = 0
    idle_steps: int = 0
    wall_seconds: float = 0.0
    initial_eval: Mapping[str, Any] | None = None
    final_eval: Mapping[str, Any] | None = None
    best_eval: Mapping[str, Any] | None = None
    curve: tuple[tuple[int, float], ...] = field(default=())  # (step, score) of each evaluation
    running: RunningReturns = field(default_factory=RunningReturns)
    score_unit: ScoreUnit | None = None
    undecided: tuple[Mapping[str, Any], ...] = ()
    last_seq: int | None = None
    num_mismatches: int = 0
    attempts: AttemptEvidence = field(default_factory=AttemptEvidence)
    selection: SelectionEvidence = field(default_factory=SelectionEvidence)
    task_counts: TaskCounts = field(default_factory=TaskCounts)
    teaching: TeachingEvidence = field(default_factory=TeachingEvidence)

    @property
    def last_evaluated(self) -> int | None:
        """Return the step of the latest evaluation, or None."""
        return self.curve[-1][0] if self.curve else None

    def has_reached(self, success_rate: float | None) -> bool:
        """Return whether this step has an evaluation with at least this success rate; False for None.

        Episodes that could not be scored count as failures, because they may be those that are hard.
        """
        latest = self.final_eval
        rate = latest["success_rate"] if latest is not None and latest["step"] == self.step else None
        if success_rate is None or latest is None or rate is None:
            return False
        # Environments without a notion of success are not in the rate.
        names = () if self.score_unit is None else self.score_unit.success_of
        parts = [part for name, part in latest.get("parts", {}).items() if not names or name in names] or [latest]
        num_scored = sum(part["num_episodes"] for part in parts)
        num_failed = sum(part.get("num_failed", 0) for part in parts)
        return bool(rate * num_scored >= success_rate * (num_scored + num_failed))

    def evaluation_numbers(self) -> dict[str, Any] | None:
        """Return the numbers of this step's evaluation under the names of a checkpoint's manifest, or None."""
        if self.final_eval is None or self.final_eval["step"] != self.step:
            return None
        return {name: self.final_eval[name] for name in EVALUATION_NUMBERS if name in self.final_eval}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """Return the state from the values of `to_dict`, after JSON.

        Raises:
            CheckpointError: the values are not those of a state.
        """
        try:
            return cls._parse(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the trainer's state is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def _parse(cls, values: Mapping[str, Any]) -> TrainState:
        for name in ("step", "num_tasks", "num_episodes", "sampled_tokens", "trained_tokens"):
            if type(values[name]) is not int or not 0 <= values[name] < 2**63:
                raise ValueError(f"{name}: expected an integer >= 0, got {values[name]!r:.80}")
        curve = tuple((int(step), float(score)) for step, score in values["curve"])
        # What is read with a default is not in the checkpoints of earlier versions.
        pending = tuple(int(number) for number in values.get("pending_tasks", ()))
        running = RunningReturns(**values.get("running", {}))
        unit = values.get("score_unit")
        attempts = dict(values.get("attempts", {}))
        attempts["recent"] = tuple(AttemptCounts(**counts) for counts in attempts.get("recent", ()))
        selection = dict(values.get("selection", {}))
        selection["recent"] = tuple(
            PlayedReturns(tuple(step["kept"]), tuple(step["lost"])) for step in selection.get("recent", ())
        )
        task_counts = TaskCounts.from_json(values.get("task_counts", {}))
        return cls(
            **{
                **values,
                "curve": curve,
                "running": running,
                "pending_tasks": pending,
                "attempts": AttemptEvidence(**attempts),
                "selection": SelectionEvidence(**selection),
                "task_counts": task_counts,
                "teaching": TeachingEvidence(tuple(values.get("teaching", {}).get("recent", ()))),
                "undecided": tuple(values.get("undecided", ())),
                "score_unit": None if unit is None else ScoreUnit(unit["name"], tuple(unit["success_of"])),
            }
        )

    def after_evaluation(self, evaluation: Evaluation, unit: ScoreUnit | None) -> TrainState:
        """Return the state with this evaluation as the latest, and as the first or the best if it is.

        `unit` is the run's unit of scores, which the evaluation is in; None: it is not decided yet. An evaluation that
        decides it also converts the earlier ones.
        """
        state = self if unit is None else self._in_unit(unit)
        summary = {"step": self.step, **evaluation.summary()}
        score = evaluation.score
        is_best = state.best_eval is None or score > max(score for _, score in state.curve)
        return dataclasses.replace(
            state,
            initial_eval=state.initial_eval or summary,
            final_eval=summary,
            best_eval=summary if is_best else state.best_eval,
            curve=(*state.curve, (self.step, score)),
            score_unit=unit,
            undecided=(*state.undecided, summary) if unit is None else (),
        )

    def _in_unit(self, unit: ScoreUnit) -> TrainState:
        """Return the state with its undecided evaluations converted to the unit."""
        if not self.undecided:
            return self
        summaries = [restated(summary, unit) for summary in self.undecided]
        return dataclasses.replace(
            self,
            initial_eval=summaries[0],
            final_eval=summaries[-1],
            best_eval=max(summaries, key=lambda summary: float(summary[summary["score"]])),
            curve=tuple((summary["step"], float(summary[summary["score"]])) for summary in summaries),
            undecided=(),
        )


_MAX_FAILURES = 3  # in a row: the disk will not recover by itself

# Copies what a checkpoint of this state holds, and returns what writes the copy; that runs in another thread.
CopyCheckpoint = Callable[[TrainState], Callable[[], Path]]
# Records an event: its kind, step and data (JSON, hence Any).
OnEvent = Callable[[str, int, Mapping[str, Any]], None]


class Saver:
    """Saver of a run's checkpoints: a step waits for the copy of the tensors and not for the disk.

    Only one checkpoint is written at a time. If the disk refuses one, an event records it, and the next step saves
    again.

    Args:
        copy: see `CopyCheckpoint`.
        settings: how often.
        on_event: see `OnEvent`.
        saved: the state in the run's newest checkpoint; None: it has none.
        phases: told while the run waits; None: nothing is told.
    """

    def __init__(
        self,
        copy: CopyCheckpoint,
        settings: LoopSettings,
        *,
        on_event: OnEvent,
        saved: TrainState | None = None,
        phases: Phases | None = None,
    ) -> None:
        self._copy = copy
        self._on_event = on_event
        self._phases = phases or Phases()
        self._settings = settings
        self._writing: asyncio.Task[Path | CheckpointError] | None = None
        self._copied_state: TrainState | None = None  # what is being written, or was last
        self._saved_state = saved  # what the newest complete checkpoint holds
        self._num_failures = 0  # in a row

    async def after_step(self, state: TrainState) -> None:
        """Begin to save the state if that is due; return when its tensors are copied.

        Raises:
            CheckpointError: the disk refused several checkpoints in a row.
        """
        if self._writing is not None and self._writing.done():
            await self.wait()
        if self._num_failures or state.step % self._settings.checkpoint_every_n_iters == 0:
            await self.begin(state)

    async def finish(self, state: TrainState) -> None:
        """Save the state unless the newest checkpoint holds it; return when it is complete on the disk.

        Raises:
            CheckpointError: the disk refused several checkpoints in a row.
        """
        await self.wait()
        while self._saved_state is not state:
            await self.begin(state)
            await self.wait()

    async def wait(self) -> None:
        """Wait until the checkpoint in progress is complete on the disk, even if cancelled meanwhile.

        Raises:
            CheckpointError: the disk refused several checkpoints in a row.
        """
        if self._writing is None:
            return
        try:
            if not self._writing.done():
                with self._phases.during("saving"):
                    await wait_until_ended({self._writing})
        except asyncio.CancelledError:
            with contextlib.suppress(CheckpointError):  # there is no next step to try again at
                self._record(self._writing.result())
            raise
        self._record(self._writing.result())

    async def close(self) -> None:
        """Wait until nothing is being written; a refusal of the disk is recorded and not raised, since the run ends."""
        with contextlib.suppress(CheckpointError):
            await self.wait()

    async def begin(self, state: TrainState) -> None:
        """Begin to save the state unless the newest checkpoint holds it; return when its tensors are copied.

        Raises:
            CheckpointError: the disk refused several checkpoints in a row.
        """
        await self.wait()
        if self._saved_state is state:
            return
        with self._phases.during("saving"):
            # The event loop, and episodes that are played ahead, must not wait for the copy: ranks of the
            # learner may have to be started again first.
            copying = asyncio.ensure_future(asyncio.to_thread(self._copy, state))
            await wait_until_ended({copying})
            write = copying.result()
        self._copied_state = state
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, write))

    def _write(self, write: Callable[[], Path]) -> Path | CheckpointError:
        try:
            return write()
        except CheckpointError as error:
            return error

    def _record(self, outcome: Path | CheckpointError) -> None:
        assert self._copied_state is not None
        self._writing = None
        if isinstance(outcome, Path):
            self._saved_state, self._num_failures = self._copied_state, 0
            self._on_event("checkpoint", self._copied_state.step, {"folder": outcome.name})
            return
        self._num_failures += 1
        self._on_event("checkpoint_failed", self._copied_state.step, {"reason": str(outcome)})
        if self._num_failures >= _MAX_FAILURES:
            raise CheckpointError(
                f"{outcome}; {self._num_failures} checkpoints in a row could not be saved. The last good one is in "
                "place: make room, or make the folder writable, and go on with --resume"
            ) from outcome

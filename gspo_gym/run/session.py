"""One process of a run, from what it begins with to the record of how it ended, whatever it trains.

The objects that train are built in `config/build/run.py`.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from gspo_gym.base.files import replace_file
from gspo_gym.base.loops import run_to_end
from gspo_gym.env.watchdog import MARKER, TRAINING_ADVICE, read_frozen, seconds_until_frozen, watching
from gspo_gym.errors import CheckpointError, ConfigError, GymError
from gspo_gym.learning.update import AnyLearner
from gspo_gym.policy.checkpoints import Checkpoint, CheckpointStore
from gspo_gym.run.judging import Judging
from gspo_gym.run.recording import INTERVAL, RunRecorder, missing_records
from gspo_gym.run.report.progress import Progress, telling
from gspo_gym.run.state import TrainState
from gspo_gym.run.steering import Steering, StopRequested
from gspo_gym.run.trainer import Trainer

_NO_GRADIENT = (
    "NOTHING WAS LEARNED: in {} steps the optimizer took no step with a gradient, so that the weights are those of the "
    "beginning. `gspo-gym doctor` says why: most often all episodes of every group earn the same"
)
_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True, slots=True)
class Start:
    """What a process of a run begins with: the configuration's model, or a checkpoint.

    Attributes:
        checkpoint: None: there is none.
        parts: of another run's checkpoint, as in run.restore; None: all of the run's own.
        state: the trainer's first; None: a run begins.
        changes: settings that differ from those with which a resumed run began: key -> [then, now].
    """

    checkpoint: Checkpoint | None = None
    parts: tuple[str, ...] | None = None
    state: TrainState | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_resumed(self) -> bool:
        """Return whether the run goes on from its own checkpoint."""
        return self.checkpoint is not None and self.parts is None

    @property
    def step(self) -> int:
        return 0 if self.state is None else self.state.step

    @property
    def base(self) -> str | None:
        """Return the model to load in place of the configuration's, or None."""
        if self.checkpoint is None or (self.parts is not None and "weights" not in self.parts):
            return None
        return str(self.checkpoint.model_folder)

    @property
    def parent(self) -> Mapping[str, Any] | None:
        """Return the identity of the run with whose checkpoint this run began; None: it began with none."""
        if self.checkpoint is None:
            return None
        origin = self.checkpoint.origin
        return origin.parent if self.is_resumed else {"run": origin.run, "step": self.checkpoint.step}

    def restore(self, learner: AnyLearner) -> None:
        """Load what is taken of the checkpoint into the learner.

        Raises:
            ConfigError: the optimizer of another run's checkpoint is of another kind, or of other parameters.
        """
        if self.checkpoint is None:
            return
        tensors, counters = self.checkpoint.learner_tensors, self.checkpoint.learner_counters
        if self.parts is None:
            learner.restore(tensors, counters)
            return
        has_optimizer, has_step = "optimizer" in self.parts, "step" in self.parts
        try:
            learner.restore_parts(tensors, counters, with_optimizer=has_optimizer, with_step=has_step)
        except CheckpointError as error:
            raise ConfigError(
                f'run.restore: the "optimizer" of {self.checkpoint.folder} does not fit this run: {error}'
            ) from error

    def record(self, recorder: RunRecorder, progress: Progress) -> None:
        """Record and say which checkpoint the learner was restored from, if from any."""
        if self.checkpoint is None:
            return
        folder = self.checkpoint.folder
        if self.parts is None:
            progress.note(f"resumed from {folder} after step {self.step}")
            return
        data = {"parts": list(self.parts), "folder": str(folder), **(self.parent or {})}
        recorder.event("restored", self.step, data)
        for reason in self.checkpoint.damaged.values():
            progress.note(f"passed over a checkpoint: {reason}")
        progress.note(f"begins with {', '.join(self.parts)} of {folder}")


@dataclass(frozen=True, slots=True)
class Session:
    """What one process of a run has besides its settings.

    Attributes:
        progress: told what a person should know.
        steering: requests to it.
        stack: closes at the end of the training what was entered into it.
    """

    progress: Progress
    steering: Steering
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


def run_until_stopped(
    work: Callable[[Session], Coroutine[Any, Any, dict[str, Any]]], steering: Steering, console: Console | None
) -> dict[str, Any]:
    """Return the summary of a training; leave the program as a stop demands it.

    Raises:
        SystemExit, KeyboardInterrupt: the training was stopped, and saved before.
        GymError: it failed.
    """
    with steering.handling_signals(), telling(console, steering.phases) as progress:
        try:
            summary = run_to_end(work(Session(progress, steering)))
        except StopRequested as stop:
            progress.note(f"{stop}; go on with --resume")
        except GymError as error:
            # An error while the run stops is a consequence of the stop: it is told and does not fail the run.
            if steering.stopped_by is None:
                raise
            progress.note(f"stopped by {steering.stopped_by}; {type(error).__name__}: {error}")
    if steering.stopped_by is None:
        return summary
    gc.collect()  # a notebook goes on, and errors of cancelled tasks hold the models, in cycles of asyncio's
    if steering.exit_code == _INTERRUPTED:
        raise KeyboardInterrupt
    raise SystemExit(steering.exit_code)


async def train_to_end(
    trainer: Trainer,
    recorder: RunRecorder,
    session: Session,
    *,
    judging: Judging | None,
    rescored: bool,
    step_timeout_seconds: float,
) -> dict[str, Any]:
    """Train and write summary.json, also when the run fails: its status then names the failure.

    Args:
        rescored: see SUMMARY.
        step_timeout_seconds: of an environment; one that holds the interpreter for longer ends the program.
    """
    progress, steering = session.progress, session.steering
    status, reason = "completed", None

    def record(status: str, reason: str | None) -> dict[str, Any]:
        step, error = trainer.state.step, {} if reason is None else {"error": reason}
        if steering.stopped_by is not None:
            recorder.event("stopped", step, {"by": steering.stopped_by})
        recorder.event("finished", step, {"status": status, **error})
        values = summary_of(status, trainer.state, policy_name=recorder.policy_name, rescored=rescored)
        recorder.summary(summary := {"error": reason, **values})
        return summary

    steering.deadline.before_leaving = partial(record, "interrupted", None)  # the end of a grace skips the `finally`
    try:
        limit = seconds_until_frozen(step_timeout_seconds)
        with watching(recorder.folder / MARKER, limit, advice=TRAINING_ADVICE):
            state = await trainer.run()
        if state.step and not state.gradient_steps:
            progress.note(_NO_GRADIENT.format(state.step))
        if judging is not None:
            await steering.unless_stopped(judging.finish())
    except BaseException as error:
        reason = _failure(error)
        status = "interrupted" if reason is None else "failed"
        raise
    finally:
        steering.ended()
        summary = record(status, reason)
        steering.deadline.before_leaving = lambda: None  # it is told; only closing may hang now
    return summary


def _failure(error: BaseException) -> str | None:
    """Return why a training failed; None if it was stopped."""
    is_stopped = isinstance(error, StopRequested | asyncio.CancelledError | KeyboardInterrupt | SystemExit)
    return None if is_stopped else f"{type(error).__name__}: {error}"


def summary_of(status: str, state: TrainState, *, policy_name: str, rescored: bool) -> dict[str, Any]:
    """Return the values of summary.json but for `error`, which says why a run failed."""
    return {
        "status": status,
        "policy_name": policy_name,
        "rescored": rescored,
        "steps": state.step,
        "episodes": state.num_episodes,
        "wall_seconds": state.wall_seconds,
        "score": None if state.final_eval is None else state.final_eval["score"],
        "initial_eval": state.initial_eval,
        "final_eval": state.final_eval,
        "best_eval": state.best_eval,
        "sampled_tokens": state.sampled_tokens,
        "trained_tokens": state.trained_tokens,
        "gradient_steps": state.gradient_steps,
        "curve": [list(point) for point in state.curve],
    }


def record_resumption(
    start: Start, recorder: RunRecorder, progress: Progress, checkpoints: CheckpointStore, *, log_interval: int
) -> None:
    """Record and say what a resumed run lacks of its records, which settings it changes, and what it passes over.

    Checkpoints that are not sound are renamed, because their steps are taken again.
    """
    assert start.checkpoint is not None
    assert start.state is not None
    folder, step = recorder.folder, start.step
    has_all_metrics = log_interval == 1 and INTERVAL not in start.changes
    if missing := missing_records(folder, step, start.state.last_seq, has_all_metrics=has_all_metrics):
        recorder.event("records_damaged", step, missing)
        progress.note(
            f"{folder}: records before the checkpoint are gone: {missing['num_events']} events, and metrics of "
            f"{len(missing['metrics_steps'])} steps. The training itself goes on exactly"
        )
    if start.changes:
        recorder.event("changed", step, start.changes)
    for key, (before, now) in start.changes.items():
        progress.note(f"{key} = {now}, and {before} when the run began")
    for unsound, reason in start.checkpoint.damaged.items():
        aside_folder = checkpoints.set_aside(unsound)
        data = {"folder": unsound.name, "moved_to": aside_folder.name, "reason": reason}
        recorder.event("checkpoint_damaged", start.checkpoint.step, data)
        progress.note(f"passed over a checkpoint, which is {aside_folder} now: {reason}")
    frozen = read_frozen(folder / MARKER)
    if frozen.env_ids:
        recorder.event("frozen", step, {"env_ids": list(frozen.env_ids), "seconds": frozen.seconds})
        names = ", ".join(frozen.env_ids)
        progress.note(f"{names}: held the interpreter for {frozen.seconds:g} seconds; runs in worker processes now")


def record_lost_ranks(recorder: RunRecorder, progress: Progress, num_updates: int, reason: str) -> None:
    """Record and say that the learner's ranks were lost."""
    recorder.event("ranks_lost", num_updates, {"reason": reason})
    progress.note(f"the learner's ranks were lost, and start again from the newest checkpoint: {reason}")


def close_recorder(recorder: RunRecorder, page: Callable[[Path, str], str]) -> None:
    """Close the recorder; if the run is not to go on, its sinks first get its page, of its folder and status."""
    path = recorder.folder / "report.html"

    def write_page() -> Path:
        replace_file(path, page(recorder.folder, recorder.status))
        return path

    try:
        if recorder.status != "interrupted":
            recorder.report(write_page)
    finally:
        recorder.close()

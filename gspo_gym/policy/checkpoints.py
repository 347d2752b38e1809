"""Checkpoints that are complete or not there, also when the process is killed.

    checkpoints/step_000020/
        config.json, model.safetensors, ...  the policy as `save_policy` writes it and `load_policy` reads it
        resume/learner.safetensors           optimizer and reference; of ranks, a file of each: `learning/saved.py`
        resume/state.json                    {"counters": of the learner, "trainer": of the trainer}
        manifest.json                        size and SHA-256 of every file, step and run; written last

A checkpoint is written into a temporary folder, forced to the disk, and renamed. No pickle. The learner and the trainer
give the numbers in it their meaning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from gspo_gym.base.files import sync, writing
from gspo_gym.errors import CheckpointError
from gspo_gym.learning.saved import UNREADABLE, SavedTensors, state_files
from gspo_gym.policy.checkpoint_folder import CheckpointFolder
from gspo_gym.policy.load import Policy, copy_policy
from gspo_gym.policy.manifest import (
    Manifest,
    Numbers,
    Origin,
    RetentionSettings,
    parse_own_json,
    seal,
    verify,
)

_RESUME = "resume"
_STATE = f"{_RESUME}/state.json"


class Resumable(Protocol):
    """The part of a learner that is in a checkpoint."""

    def copy_state(self) -> Callable[[Path], None]:
        """Copy all tensors that a restart needs besides the policy's.

        Return what writes the copy into a folder, as `saved.SavedTensors.of_learner` reads it, in any thread.
        """

    def counters(self) -> Mapping[str, int | float]:
        """Return all numbers that a restart needs."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        step: after which it was saved.
        folder: where it is.
        learner_tensors, learner_counters: for the learner's `restore`; tensors are read when they are asked for.
        trainer_state: JSON values, hence Any.
        origin: where it comes from.
        damaged: newer ones that were passed over, and why.
    """

    step: int
    folder: Path
    learner_tensors: SavedTensors
    learner_counters: Mapping[str, int | float]
    trainer_state: Mapping[str, Any]
    origin: Origin = field(default_factory=Origin)
    damaged: Mapping[Path, str] = field(default_factory=dict)

    @property
    def model_folder(self) -> Path:
        """The folder that `load_policy` takes."""
        return self.folder


@dataclass(frozen=True, slots=True)
class Draft:
    """Copy of all that a checkpoint holds, taken between two updates; writing it needs nothing that is live.

    Attributes:
        step: after which it was taken.
        write_policy: writes the policy of that moment into a folder.
        write_learner: writes the learner's tensors of that moment into a folder.
        state: of learner and trainer, as JSON text.
        evaluation: the numbers of the step's evaluation; None: it has none.
    """

    step: int
    write_policy: Callable[[Path], None]
    write_learner: Callable[[Path], None]
    state: str
    evaluation: Numbers | None = None


class CheckpointStore(CheckpointFolder):
    """The checkpoints of one run; one thread of one process writes at a time.

    Args:
        folder: made when the first one is saved.
        run_id: of the run; checkpoints name it, and those of another run are refused. None: any are read.
        origin: what else checkpoints say of where they come from.
        retention: others are removed after a newer one is complete.
        copy_policy: copies a policy, and returns what writes the copy into a folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str | None = None,
        origin: Origin | None = None,
        retention: RetentionSettings | None = None,
        copy_policy: Callable[[Policy], Callable[[Path], None]] = copy_policy,
    ) -> None:
        super().__init__(folder, run_id=run_id, retention=retention)
        self._origin = replace(origin or Origin(), run=run_id)
        self._copy_policy = copy_policy

    def copy(
        self,
        step: int,
        *,
        policy: Policy,
        learner: Resumable,
        trainer_state: Mapping[str, Any],
        evaluation: Numbers | None = None,
    ) -> Draft:
        """Copy what a checkpoint of this moment holds: all that an update must wait for.

        Raises:
            CheckpointError: `trainer_state` is not JSON.
        """
        write_learner = learner.copy_state()
        try:
            state = {"counters": dict(learner.counters()), "trainer": dict(trainer_state)}
            text = json.dumps(state, allow_nan=False, indent=2)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self._of(step)}: could not be saved: {error}") from error
        return Draft(step, self._copy_policy(policy), write_learner, text, evaluation)

    def write(self, draft: Draft) -> Path:
        """Write a checkpoint and return its folder, when it is complete on the disk; in any thread.

        One of the same step is replaced. What crashed saves left behind is removed.

        Raises:
            CheckpointError: the disk refuses (full, read-only).
        """
        target = self._of(draft.step)
        folder = self._folder / f".tmp_{target.name}"
        try:
            with writing(target):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._tidy()
                draft.write_policy(folder)
                (folder / _RESUME).mkdir()
                draft.write_learner(folder / _RESUME)
                (folder / _STATE).write_text(draft.state, encoding="utf-8")
                seal(folder, step=draft.step, origin=self._origin, evaluation=draft.evaluation)
                self._publish(folder, target)
            self._remove_others()
        except (OSError, TypeError, ValueError) as error:
            shutil.rmtree(folder, ignore_errors=True)  # a disk that is full would stay full
            reason = str(error).removeprefix(f"{target}: cannot be written: ")
            raise CheckpointError(f"{target}: could not be saved: {reason}") from error
        return target

    def save(self, step: int, *, policy: Policy, learner: Resumable, trainer_state: Mapping[str, Any]) -> Path:
        """Return the folder of a checkpoint of this moment, when it is complete on the disk.

        Raises:
            CheckpointError: as `copy` and `write`.
        """
        return self.write(self.copy(step, policy=policy, learner=learner, trainer_state=trainer_state))

    def load_latest(self) -> Checkpoint:
        """Load the newest sound checkpoint; it names those that were passed over, and why.

        Raises:
            CheckpointError: there is none; names what is wrong with each.
        """
        if self._folder.exists():
            self._recover_replaced()
        return self.load_newest_sound()

    def load_newest_sound(self) -> Checkpoint:
        """Load as `load_latest`, and change nothing in the folder: another thread may be writing there.

        Raises:
            CheckpointError: as there.
        """
        error_by_folder: dict[Path, str] = {}
        for step in reversed(self._all_steps()):
            try:
                return replace(self.load(step), damaged=error_by_folder)
            except CheckpointError as error:
                error_by_folder[self._of(step)] = str(error)
        if error_by_folder:
            raise CheckpointError(f"{self._folder}: no checkpoint is sound: {'; '.join(error_by_folder.values())}")
        raise CheckpointError(
            f"{self._folder}: there is no complete checkpoint; begin again, without --resume: with --set-aside, if a "
            "run is there"
        )

    def set_aside(self, folder: Path) -> Path:
        """Rename a damaged checkpoint to the first free damaged_step_N, damaged_step_N.1, ..., and return that.

        Raises:
            CheckpointError: the disk refuses.
        """
        number = 0
        while (target := self._folder / f"damaged_{folder.name}{f'.{number}' if number else ''}").exists():
            number += 1
        try:
            folder.rename(target)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be moved to {target.name}: {error}") from error
        return target

    def load(self, step: int) -> Checkpoint:
        """Load the checkpoint of a step, with every byte verified.

        Raises:
            CheckpointError: there is none, or it is incomplete or damaged, or another step's or another run's; names
                the file.
        """
        if not self._of(step).is_dir():
            raise CheckpointError(f"{self._of(step)}: there is no such checkpoint; complete ones: {list(self.steps())}")
        return load_checkpoint(self._of(step), check=self._require_of_this_run)

    def num_updates(self, step: int) -> int:
        """Return the number of the learner's updates in the checkpoint of a step, which is not verified.

        Raises:
            CheckpointError: it cannot be read.
        """
        path = self._of(step) / _STATE
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["counters"]["learner.num_updates"])
        except UNREADABLE as error:
            raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error

    def _publish(self, draft: Path, target: Path) -> None:
        old_folder = self._folder / f".replaced_{target.name}"
        if target.exists():
            # A folder cannot be renamed onto a full one. If killed in between, load_latest() puts it back.
            target.rename(old_folder)
        draft.rename(target)
        sync(self._folder)
        shutil.rmtree(old_folder, ignore_errors=True)

    def _remove_others(self) -> None:
        evaluations = self._evaluations()
        for step in evaluations.keys() - self.retention.kept(evaluations):
            self._remove(self._of(step))

    def _tidy(self) -> None:
        """Remove what crashed saves left."""
        self._recover_replaced()
        for folder in self._folder.glob(".tmp_*"):
            shutil.rmtree(folder)

    def _recover_replaced(self) -> None:
        for old_folder in self._folder.glob(".replaced_*"):
            target = self._folder / old_folder.name.removeprefix(".replaced_")
            if target.exists():
                shutil.rmtree(old_folder)
            else:
                old_folder.rename(target)

    def _remove(self, folder: Path) -> None:
        # Renamed first: it stops being a checkpoint before its first file goes.
        trash = self._folder / f".tmp_removed_{folder.name}"
        folder.rename(trash)
        shutil.rmtree(trash)


def _check_state(counters: Any, trainer: Any) -> None:
    """Refuse what the learner and the trainer cannot have saved (Any: JSON).

    Raises:
        ValueError, AttributeError: it is no table, or a counter no number.
    """
    for name, value in counters.items():
        if type(value) not in (int, float) or abs(value) >= 2**63:
            raise ValueError(f"counter {name}: expected a number, got {value!r:.80}")
    if not isinstance(trainer, dict):
        raise ValueError(f"trainer: expected a table, got {trainer!r:.80}")


def load_checkpoint(folder: Path, *, check: Callable[[Path, Manifest], None] | None = None) -> Checkpoint:
    """Load the checkpoint in a folder, of whichever run, with every byte verified; `check` may refuse its manifest.

    Raises:
        CheckpointError: it is incomplete or damaged, or the folder is named after another step; names the file.
    """
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: is a link; a checkpoint is none")
    try:
        resume = folder / _RESUME
        manifest = verify(folder, required=(_STATE, *(f"{_RESUME}/{name}" for name in state_files(resume))))
        if check is not None:
            check(folder, manifest)
        state = parse_own_json((folder / _STATE).read_text(encoding="utf-8"))
        counters, trainer = state["counters"], state["trainer"]
        _check_state(counters, trainer)
        tensors = SavedTensors.of_learner(resume)
        return Checkpoint(manifest.step, folder, tensors, counters, trainer, manifest.origin)
    except CheckpointError:
        raise
    except UNREADABLE as error:
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error

"""Checkpoints that are complete or not there, also when the process is killed.

    checkpoints/step_000020/
        config.json, model.safetensors, ...  the policy as `save_policy` writes it and `load_policy` reads it
        resume/learner.safetensors           optimizer and reference
        resume/state.json                    {"counters": of the learner, "trainer": of the trainer}
        manifest.json                        size and SHA-256 of every file, step and run; written last

A checkpoint is written into a temporary folder, forced to the disk, and renamed. No pickle. The learner and the trainer
give the numbers in it their meaning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_gym.base.files import sync, writing
from gspo_gym.errors import CheckpointError
from gspo_gym.policy.load import Policy, save_policy
from gspo_gym.policy.manifest import Manifest, is_complete, read_manifest, require_own_name, seal, step_of, verify

_TENSORS = "resume/learner.safetensors"
_STATE = "resume/state.json"


class Resumable(Protocol):
    """The part of a learner that is in a checkpoint."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors that a restart needs besides the policy's."""
        ...

    def counters(self) -> Mapping[str, int | float]:
        """Return all numbers that a restart needs."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        step: after which it was saved.
        folder: where it is.
        learner_tensors, learner_counters: for the learner's `restore`; tensors are on the CPU.
        trainer_state: JSON values, hence Any.
    """

    step: int
    folder: Path
    learner_tensors: Mapping[str, Tensor]
    learner_counters: Mapping[str, int | float]
    trainer_state: Mapping[str, Any]

    @property
    def model_folder(self) -> Path:
        """The folder that `load_policy` takes."""
        return self.folder


class CheckpointStore:
    """The checkpoints of one run; one process writes at a time.

    Args:
        folder: made when the first one is saved.
        run_id: of the run; checkpoints name it, and those of another run are refused. None: any are read.
        keep_last: older ones are removed after a newer one is complete.
        write_policy: writes a policy into a folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str | None = None,
        keep_last: int = 2,
        write_policy: Callable[[Policy, Path], None] = save_policy,
    ) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last: expected at least 1, got {keep_last}")
        self._folder = folder
        self._run_id = run_id
        self._keep_last = keep_last
        self._write_policy = write_policy

    def save(self, step: int, *, policy: Policy, learner: Resumable, trainer_state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its folder, when it is complete on the disk.

        One of the same step is replaced. What crashed saves left behind is removed.

        Raises:
            CheckpointError: `trainer_state` is not JSON, or the disk refuses (full, read-only).
        """
        target = self._folder / f"step_{step:06d}"
        draft = self._folder / f".tmp_{target.name}"
        try:
            with writing(target):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._tidy()
                self._write_policy(policy, draft)
                (draft / "resume").mkdir()
                tensors = {name: tensor.detach().contiguous() for name, tensor in learner.tensors().items()}
                save_file(tensors, draft / _TENSORS)
                state = {"counters": dict(learner.counters()), "trainer": dict(trainer_state)}
                (draft / _STATE).write_text(json.dumps(state, allow_nan=False, indent=2), encoding="utf-8")
                seal(draft, step=step, run=self._run_id)
                self._publish(draft, target)
        except (OSError, TypeError, ValueError) as error:
            shutil.rmtree(draft, ignore_errors=True)  # a disk that is full would stay full
            reason = str(error).removeprefix(f"{target}: cannot be written: ")
            raise CheckpointError(f"{target}: could not be saved: {reason}") from error
        for old in self.steps()[: -self._keep_last]:
            self._remove(self._folder / f"step_{old:06d}")
        return target

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all complete checkpoints, ascending. Complete: all files are there in full size."""
        found = []
        for folder in self._folder.glob("step_*"):
            step = step_of(folder)
            if step is not None and is_complete(folder):
                found.append(step)
        return tuple(sorted(found))

    def newest(self) -> Path:
        """Return the folder of the newest complete checkpoint; loading it verifies the files.

        Raises:
            CheckpointError: there is none, or it is another step's or another run's.
        """
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self._folder}: there is no complete checkpoint")
        folder = self._folder / f"step_{steps[-1]:06d}"
        manifest = read_manifest(folder)
        require_own_name(folder, manifest)
        self._require_of_this_run(folder, manifest)
        return folder

    def passed_over(self) -> tuple[Path, ...]:
        """Return the folders of steps later than the newest complete checkpoint: they are not complete."""
        last = max(self.steps(), default=-1)
        steps = ((step_of(folder), folder) for folder in self._folder.glob("step_*"))
        return tuple(sorted(folder for step, folder in steps if step is not None and step > last))

    def load_latest(self) -> Checkpoint:
        """Load the newest complete checkpoint.

        Raises:
            CheckpointError: there is none, or it is damaged; names the file.
        """
        if self._folder.exists():
            self._recover_replaced()
        steps = self.steps()
        if not steps:
            raise CheckpointError(
                f"{self._folder}: there is no complete checkpoint; begin again, without --resume: with --set-aside, if "
                "a run is there"
            )
        return self.load(steps[-1])

    def load(self, step: int) -> Checkpoint:
        """Load the checkpoint of a step, with every byte verified.

        Raises:
            CheckpointError: there is none, or it is incomplete or damaged, or another step's or another run's; names
                the file.
        """
        folder = self._folder / f"step_{step:06d}"
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such checkpoint; complete ones: {list(self.steps())}")
        self._require_of_this_run(folder, verify(folder, required=(_STATE, _TENSORS)))
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            tensors = load_file(folder / _TENSORS)
            return Checkpoint(step, folder, tensors, state["counters"], state["trainer"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error

    def _require_of_this_run(self, folder: Path, manifest: Manifest) -> None:
        if self._run_id is not None and manifest.run != self._run_id:
            raise CheckpointError(
                f"{folder}: is a checkpoint of another run ({manifest.run}; this one is {self._run_id}). Remove it, or "
                "go on from it in a run of its own, with model.base"
            )

    def _publish(self, draft: Path, target: Path) -> None:
        replaced = self._folder / f".replaced_{target.name}"
        if target.exists():
            # A folder cannot be renamed onto a full one. If killed in between, load_latest() puts it back.
            target.rename(replaced)
        draft.rename(target)
        sync(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _tidy(self) -> None:
        """Remove what crashed saves left."""
        self._recover_replaced()
        for folder in self._folder.glob(".tmp_*"):
            shutil.rmtree(folder)

    def _recover_replaced(self) -> None:
        for replaced in self._folder.glob(".replaced_*"):
            target = self._folder / replaced.name.removeprefix(".replaced_")
            if target.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(target)

    def _remove(self, folder: Path) -> None:
        # Renamed first: it stops being a checkpoint before its first file goes.
        doomed = self._folder / f".tmp_removed_{folder.name}"
        folder.rename(doomed)
        shutil.rmtree(doomed)

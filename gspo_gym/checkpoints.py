"""Checkpoints that are complete or not there, whatever kills the process and whenever.

    checkpoints/step_000020/
        config.json, model.safetensors, ...  the policy as `models.save_policy` writes it; `load_policy` reads it
        resume/learner.safetensors           optimizer and reference
        resume/state.json                    {"counters": of the learner, "trainer": of the trainer}
        manifest.json                        size and SHA-256 of every file; written last

A checkpoint is written into a temporary folder, forced to the disk, and renamed. No pickle. What the numbers in it mean
is the learner's and the trainer's affair; how often one is saved, the trainer's.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_gym.errors import CheckpointError
from gspo_gym.files import replace_file, sync, sync_tree
from gspo_gym.models import Policy, save_policy

_SCHEMA_VERSION = 1
_STEP_FOLDER = re.compile(r"step_(\d+)")
_MANIFEST = "manifest.json"
_TENSORS = "resume/learner.safetensors"
_STATE = "resume/state.json"


class Resumable(Protocol):
    """What a checkpoint asks of a learner."""

    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors that a restart needs besides the policy's."""
        ...

    def counters(self) -> Mapping[str, int | float]:
        """All numbers that a restart needs."""
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
        """What `models.load_policy` takes."""
        return self.folder


class CheckpointStore:
    """The checkpoints of one run; one process writes at a time.

    Args:
        folder: made when the first one is saved.
        keep_last: older ones are removed after a newer one is complete.
        write_policy: writes a policy into a folder.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 2, write_policy: Callable[[Policy, Path], None] = save_policy
    ) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last: expected at least 1, got {keep_last}")
        self._folder = folder
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
            self._folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            self._write_policy(policy, draft)
            (draft / "resume").mkdir()
            save_file(
                {name: tensor.detach().contiguous() for name, tensor in learner.tensors().items()}, draft / _TENSORS
            )
            state = {"counters": dict(learner.counters()), "trainer": dict(trainer_state)}
            (draft / _STATE).write_text(json.dumps(state, allow_nan=False, indent=2), encoding="utf-8")
            _seal(draft, step)
            self._publish(draft, target)
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(f"{target}: could not be saved: {error}") from error
        for old in self.steps()[: -self._keep_last]:
            self._remove(self._folder / f"step_{old:06d}")
        return target

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, ascending. Complete: all files are there in full size."""
        found = []
        for folder in self._folder.glob("step_*"):
            match = _STEP_FOLDER.fullmatch(folder.name)
            if match and _is_complete(folder):
                found.append(int(match[1]))
        return tuple(sorted(found))

    def load_latest(self) -> Checkpoint:
        """The newest complete checkpoint.

        Raises:
            CheckpointError: there is none, or it is damaged; names the file.
        """
        if self._folder.exists():
            self._recover_replaced()
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self._folder}: there is no complete checkpoint")
        return self.load(steps[-1])

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of a step, every byte of it verified.

        Raises:
            CheckpointError: there is none, or it is incomplete or damaged; names the file.
        """
        folder = self._folder / f"step_{step:06d}"
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such checkpoint; complete ones: {list(self.steps())}")
        verify(folder)
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            tensors = load_file(folder / _TENSORS)
            return Checkpoint(step, folder, tensors, state["counters"], state["trainer"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error

    def _publish(self, draft: Path, target: Path) -> None:
        replaced = self._folder / f".replaced_{target.name}"
        if (
            target.exists()
        ):  # a folder cannot be renamed onto a full one; if killed in between, load_latest() puts it back
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
        """Remove a checkpoint; it stops being one before its first file goes."""
        doomed = self._folder / f".tmp_removed_{folder.name}"
        folder.rename(doomed)
        shutil.rmtree(doomed)


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: the manifest is missing or unreadable, or a file is missing, cut or changed; names the file.
    """
    for name, entry in _read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; the checkpoint is not complete")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{path}: expected {entry['bytes']} bytes, got {size}")
        digest = _sha256(path)
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path}: is damaged: expected SHA-256 {entry['sha256']}, got {digest}")


def _is_complete(folder: Path) -> bool:
    """Whether all files are there in full size, which is what a crash could have spoilt."""
    try:
        manifest = _read_manifest(folder)
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in manifest.items())
    except OSError:  # CheckpointError included
        return False


def _seal(folder: Path, step: int) -> None:
    """Force everything to the disk, and only then write the manifest that calls it complete."""
    sync_tree(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    manifest = {"schema": _SCHEMA_VERSION, "step": step, "files": entries}
    replace_file(folder / _MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The entries of a manifest by file; Any: JSON, {"bytes": int, "sha256": str}."""
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files: dict[str, Any] = manifest["files"]
        if manifest["schema"] != _SCHEMA_VERSION or not all({"bytes", "sha256"} <= set(e) for e in files.values()):
            raise CheckpointError(f"{path}: expected schema {_SCHEMA_VERSION}, got {manifest['schema']!r}")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; the checkpoint is not complete") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is damaged: {type(error).__name__}: {error}") from error
    return files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

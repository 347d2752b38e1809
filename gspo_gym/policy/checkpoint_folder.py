"""The complete checkpoints in a run's folder, as their manifests tell; nothing here writes, or loads torch."""

from __future__ import annotations

from pathlib import Path

from gspo_gym.errors import CheckpointError
from gspo_gym.policy.manifest import (
    Manifest,
    Numbers,
    RetentionSettings,
    is_complete,
    read_manifest,
    require_own_name,
    step_of,
)


class CheckpointFolder:
    """The checkpoints of one run, to be looked for.

    Args:
        folder: need not be there.
        run_id: of the run; checkpoints name it, and those of another run are refused. None: any are read.
        retention: says which is the best.
    """

    def __init__(self, folder: Path, *, run_id: str | None = None, retention: RetentionSettings | None = None) -> None:
        self._folder = folder
        self._run_id = run_id
        self.retention = retention or RetentionSettings()

    def best(self) -> Path | None:
        """Return the folder of the checkpoint with the best evaluation; None: no complete one has an evaluation."""
        ranking = self.retention.best(self._evaluations())
        return self._of(ranking[0]) if ranking else None

    def steps(self) -> tuple[int, ...]:
        """Return the steps of all complete checkpoints, ascending. Complete: all files are there in full size."""
        return tuple(step for step in self._all_steps() if is_complete(self._of(step)))

    def _all_steps(self) -> list[int]:
        """Return the steps of all folders that are named as checkpoints are, ascending."""
        folders = (folder for folder in self._folder.glob("step_*") if folder.is_dir())
        steps = ((step_of(folder), folder) for folder in folders)
        return sorted(step for step, folder in steps if step is not None and folder == self._of(step))

    def newest(self) -> Path:
        """Return the folder of the newest complete checkpoint; loading it verifies the files.

        Raises:
            CheckpointError: there is none, or it is another step's or another run's.
        """
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self._folder}: there is no complete checkpoint")
        return self.at(steps[-1])

    def at(self, step: int) -> Path:
        """Return the folder of a complete checkpoint; loading it verifies the files.

        Raises:
            CheckpointError: it is another step's or another run's.
        """
        folder = self._of(step)
        manifest = read_manifest(folder)
        require_own_name(folder, manifest)
        self._require_of_this_run(folder, manifest)
        return folder

    def _require_of_this_run(self, folder: Path, manifest: Manifest) -> None:
        if self._run_id is not None and manifest.run != self._run_id:
            raise CheckpointError(
                f"{folder}: is a checkpoint of another run ({manifest.run}; this one is {self._run_id}). Remove it, or "
                "go on from it in a run of its own, with model.base"
            )

    def _evaluations(self) -> dict[int, Numbers | None]:
        return {step: read_manifest(self._of(step)).evaluation for step in self.steps()}

    def _of(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

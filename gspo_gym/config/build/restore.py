"""Begin a new run from parts of another run's checkpoint: [run] restore and restore_from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.learning.update import Learner
from gspo_gym.policy.checkpoints import Checkpoint, CheckpointStore, load_checkpoint
from gspo_gym.run.records import read_run_id
from gspo_gym.run.state import TrainState


@dataclass(frozen=True, slots=True)
class Restored:
    """Parts of a checkpoint that a new run begins with.

    Attributes:
        parts: as in run.restore.
        checkpoint: of the other run.
        state: the new run's first.
    """

    parts: tuple[str, ...]
    checkpoint: Checkpoint
    state: TrainState

    @property
    def base(self) -> str | None:
        """Return the model to load in place of the configuration's, or None."""
        return str(self.checkpoint.model_folder) if "weights" in self.parts else None

    @property
    def parent(self) -> Mapping[str, Any]:
        """Return the other run's identity, for the new run's checkpoints."""
        return {"run": self.checkpoint.origin.run, "step": self.checkpoint.step}

    def restore(self, learner: Learner) -> None:
        """Load the checkpoint's parts into the learner.

        Raises:
            ConfigError: the optimizer is of another kind, or of other parameters.
        """
        try:
            learner.restore_parts(
                self.checkpoint.learner_tensors,
                self.checkpoint.learner_counters,
                with_optimizer="optimizer" in self.parts,
                with_step="step" in self.parts,
            )
        except CheckpointError as error:
            raise ConfigError(
                f'run.restore: the "optimizer" of {self.checkpoint.folder} does not fit this run: {error}'
            ) from error

    def sentences(self) -> list[str]:
        """Return sentences about it for a person."""
        parts = ", ".join(self.parts)
        passed_over = [f"passed over a checkpoint: {reason}" for reason in self.checkpoint.damaged.values()]
        return [*passed_over, f"begins with {parts} of {self.checkpoint.folder}"]


def find_restored(config: RunConfig) -> Restored | None:
    """Return the parts of another run that a new run begins with, or None.

    Raises:
        ConfigError: run.restore_from is no run or checkpoint, or does not fit this run.
        CheckpointError: it holds no sound checkpoint.
    """
    if config.run.restore_from is None:
        return None
    folder = Path(config.run.restore_from).expanduser()
    if (folder / "checkpoints").is_dir():
        checkpoint = CheckpointStore(folder / "checkpoints", run_id=read_run_id(folder)).load_latest()
    elif folder.is_dir():
        checkpoint = load_checkpoint(folder)
    else:
        raise ConfigError(f"run.restore_from: expected the folder of a run or of a checkpoint, got {str(folder)!r}")
    parts, theirs, state = config.run.restore, TrainState.from_dict(checkpoint.trainer_state), TrainState()
    if "optimizer" in parts:
        state = dataclasses.replace(state, running=theirs.running)
    if "tasks" in parts:
        _require_same_tasks(config, checkpoint.folder.parents[1] / "config.toml")
        state = dataclasses.replace(state, num_tasks=theirs.num_tasks, pending_tasks=theirs.pending_tasks)
    if "step" in parts:
        if theirs.step >= config.size.num_iterations:
            raise ConfigError(
                f"run.restore: {checkpoint.folder} is of step {theirs.step} of {config.size.num_iterations}, so that "
                'nothing is left to train: raise training.num_epochs, or leave "step" out'
            )
        state = dataclasses.replace(state, step=theirs.step)
    return Restored(parts, checkpoint, state)


def _require_same_tasks(config: RunConfig, path: Path) -> None:
    """Refuse to continue another run's task numbers if the numbers mean other tasks here.

    Raises:
        ConfigError: its configuration, if it is there, has another seed or other environments.
    """
    if not path.is_file():
        return
    theirs = load_config(path)
    if (theirs.run.seed, theirs.sources) != (config.run.seed, config.sources):
        raise ConfigError(
            f'run.restore: "tasks" are those of run.seed and [rollout]; expected them as in {path} (seed '
            f'{theirs.run.seed}, {theirs.rollout.env_name}), or leave "tasks" out'
        )

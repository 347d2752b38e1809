"""Go on from a checkpoint: a run from its own (`--resume`), or a new run with parts of another's ([run] restore)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from gspo_gym.config.build.conversations import require_same_template
from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.words import look_up
from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.learning.optimizer import scheduled_rate
from gspo_gym.policy.checkpoints import CheckpointStore, load_checkpoint
from gspo_gym.policy.manifest import read_manifest
from gspo_gym.run.records import read_run_id
from gspo_gym.run.registry import PLACE
from gspo_gym.run.session import Start
from gspo_gym.run.state import TrainState

# Keys that may differ from those with which a resumed run began, or sections if the name ends with a dot; besides, a
# run may be moved. A teacher may be named otherwise: that it is the same is required by its digest (`teacher.py`).
CHANGEABLE = frozenset(
    (
        "compute.", "evaluation.every_n_iters", "gateway.", "judge.gold.on_drift",
        "judge.options.api_key_env", "judge.options.base_url", "judge.options.cache",
        "judge.options.max_calls", "judge.options.max_concurrency", "judge.options.max_cost_usd", "judge.timeout_s",
        "distillation.api_key_env", "distillation.teacher", "distillation.teacher_model",
        "distillation.teacher_tokenizer", "reference.placement", "rollout.max_concurrent_rollouts",
        "rollout.policy_name", "run.log_episodes_every_n_iters", "run.log_tokens_every_n_iters",
        "run.stop_grace_seconds", "run.tags", "services.judge_url", "services.task_url", "topology.", "tracking.",
        "training.checkpoint_every_n_iters", "training.iterations_per_epoch", "training.keep_best",
        "training.keep_last",
        "training.learning_rate", "training.log_interval",
        "training.num_epochs", "training.stop_at_success_rate",
        "vllm.gpu_memory_utilization", "vllm.sleep_while_learning", "vllm.tensor_parallel_size",
    )
)  # fmt: skip


def may_change(key: str) -> bool:
    """Return whether a key may change when a run is resumed."""
    return key in CHANGEABLE or f"{key.partition('.')[0]}." in CHANGEABLE


def _require_named_run(folder: Path, checkpoint: Path) -> None:
    """Refuse to resume if the checkpoint names its run and the folder does not.

    Raises:
        CheckpointError: says what to restore.
    """
    run = read_manifest(checkpoint).run
    # Checkpoints of earlier versions name no run.
    if run is not None and read_run_id(folder) is None:
        raise CheckpointError(
            f"{checkpoint}: is of the run {run}, and {folder} does not say which run it holds: restore its "
            "config.toml, whose first line is the run's id, or its events.jsonl"
        )


def changed_settings(began: RunConfig, now: RunConfig, *, num_optimizer_steps: int) -> dict[str, list[Any]]:
    """Return the keys that a resumed run changes, each with its value as the run `began` and the present one.

    Any: of the config; None: the key was not there.

    Raises:
        ConfigError: a key that may not change differs, or the learning rate would jump after `num_optimizer_steps`,
            because a schedule is planned for another number of steps.
    """
    before, after = _flat(began), _flat(now)
    changes = {
        key: [before.get(key), after.get(key)]
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in PLACE
    }
    if refusals := [f"{key}: {was!r} became {value!r}" for key, (was, value) in changes.items() if not may_change(key)]:
        raise ConfigError(
            f"{now.run_folder / 'config.toml'}: a resumed run must go on as it began, but {'; '.join(refusals)}. Start "
            "another run instead"
        )
    _require_same_schedule(began, now, num_optimizer_steps)
    require_same_template(now)
    return changes


def _require_same_schedule(began: RunConfig, now: RunConfig, num_taken: int) -> None:
    totals = began.size.num_optimizer_steps, now.size.num_optimizer_steps
    for step in range(max(0, num_taken - 1), min(totals)):
        was, will_be = (
            scheduled_rate(step, peak=now.training.learning_rate, settings=now.optimizer, total_steps=total)
            for total in totals
        )
        if not math.isclose(was, will_be, rel_tol=1e-9):
            raise ConfigError(
                f"training.iterations_per_epoch, training.num_epochs: {began.size.num_iterations} iterations became "
                f"{now.size.num_iterations}, and with optimizer.schedule = {now.optimizer.schedule!r} the learning "
                f"rate would jump: optimizer step {step + 1} takes {was:g} in the run as it began, and would take "
                f"{will_be:g}. Resume with as many iterations as it began with, or begin another run from its "
                "checkpoint (model.base)"
            )


def _flat(config: RunConfig) -> dict[str, Any]:
    sections = config.model_dump(mode="json", exclude_none=True)
    return {key: look_up(sections, key) for key in leaf_keys()}


def find_resumed(config: RunConfig, checkpoints: CheckpointStore) -> Start:
    """Return what a run goes on from: its newest sound checkpoint.

    Raises:
        CheckpointError: there is none, or it is another run's.
        ConfigError: the settings differ from the run's beyond what may change.
    """
    checkpoint = checkpoints.load_latest()
    _require_named_run(config.run_folder, checkpoint.folder)
    began = load_config(config.run_folder / "config.toml")
    num_taken = int(checkpoint.learner_counters.get("optimizer.num_attempts", 0))
    changes = changed_settings(began, config, num_optimizer_steps=num_taken)
    return Start(checkpoint, state=TrainState.from_dict(checkpoint.trainer_state), changes=changes)


def find_restored(config: RunConfig) -> Start | None:
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
        state = dataclasses.replace(
            state, num_tasks=theirs.num_tasks, pending_tasks=theirs.pending_tasks, task_counts=theirs.task_counts
        )
    if "step" in parts:
        if theirs.step >= config.size.num_iterations:
            raise ConfigError(
                f"run.restore: {checkpoint.folder} is of step {theirs.step} of {config.size.num_iterations}, so that "
                'nothing is left to train: raise training.num_epochs, or leave "step" out'
            )
        state = dataclasses.replace(state, step=theirs.step)
    return Start(checkpoint, parts, state)


def _require_same_tasks(config: RunConfig, path: Path) -> None:
    """Refuse to continue another run's task numbers if the numbers mean other tasks here.

    Raises:
        ConfigError: its configuration, if it is there, has another seed, other environments or another choice of tasks.
    """
    if not path.is_file():
        return
    theirs = load_config(path)
    if (theirs.run.seed, theirs.sources) != (config.run.seed, config.sources):
        raise ConfigError(
            f'run.restore: "tasks" are those of run.seed and [rollout]; expected them as in {path} (seed '
            f'{theirs.run.seed}, {theirs.rollout.env_name}), or leave "tasks" out'
        )
    num_tasks, their_num = config.training.adaptive_tasks, theirs.training.adaptive_tasks
    if num_tasks != their_num:
        raise ConfigError(
            f'run.restore: "tasks" are chosen by training.adaptive_tasks = {their_num} in {path}, and by {num_tasks} '
            'here: take that, or leave "tasks" out'
        )

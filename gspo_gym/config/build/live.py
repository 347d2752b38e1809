"""Settings that can change during a run, and the start from parts of another run's checkpoint ([run] restore)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gspo_gym.config.build.judge import budget_limits
from gspo_gym.config.build.trainer import build_plan
from gspo_gym.config.nested import apply_override
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.words import look_up
from gspo_gym.errors import CheckpointError, ConfigError, nearest_name
from gspo_gym.learning.update import AnyLearner
from gspo_gym.policy.checkpoints import Checkpoint, CheckpointStore, load_checkpoint
from gspo_gym.policy.manifest import RetentionSettings
from gspo_gym.run.judging import Judging
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import Event, read_run_id
from gspo_gym.run.state import TrainState
from gspo_gym.run.steering import Change, Steering
from gspo_gym.run.trainer import Trainer


@dataclass(frozen=True, slots=True)
class When:
    """The moments at which a setting of a run that has begun may change.

    Attributes:
        on_resume: in the file that the run goes on with.
        obstacle: the reason why it cannot change while the run goes on; None: it can.
    """

    on_resume: bool = True
    obstacle: str | None = None


_JUDGE = "the connections to the judge are opened when a process begins"
_PLACES = "devices and engines are laid out when a process begins"
_REFERENCE = "the reference's processes start with the run's"
_SERVICES = "services are connected when a process begins"
_VLLM = "vLLM is started with it"
_FOLDER = "it names the folder that the process writes into"
_RATE = When(on_resume=False)  # the file's is what a schedule began with

# All that may change after a run began, by key, or by section if the name ends with a dot. `run set` and `--resume`
# both go by it.
CHANGEABLE: Mapping[str, When] = {
    "training.learning_rate": _RATE,
    **dict.fromkeys(
        (
            "evaluation.every_n_iters", "judge.gold.on_drift", "judge.max_unscored", "judge.options.max_calls",
            "judge.options.max_cost_usd", "rollout.max_concurrent_rollouts", "run.log_episodes_every_n_iters",
            "run.log_tokens_every_n_iters", "run.stop_grace_seconds", "training.checkpoint_every_n_iters",
            "training.iterations_per_epoch", "training.keep_best", "training.keep_best_direction",
            "training.keep_best_metric", "training.keep_every", "training.keep_last", "training.log_interval",
            "training.max_idle_iters", "training.must_save_by", "training.num_epochs", "training.stop_at_success_rate",
        ),
        When(),
    ),
    **dict.fromkeys(("run.folder", "model.label"), When(obstacle=_FOLDER)),
    "run.tags": When(obstacle="trackers are told of it when a process begins"),
    "rollout.policy_name": When(obstacle="task apps and judges are told of it when a process begins"),
    **dict.fromkeys(
        (
            "judge.timeout_s", "judge.options.api_key_env", "judge.options.base_url", "judge.options.cache",
            "judge.options.max_attempts", "judge.options.max_concurrency",
        ),
        When(obstacle=_JUDGE),
    ),
    **dict.fromkeys(
        (
            "reference.placement", "reference.port", "reference.tp", "reference.health_max_wait_s",
            "reference.health_interval_ms",
        ),
        When(obstacle=_REFERENCE),
    ),
    **dict.fromkeys(("services.judge_url", "services.task_url", "gateway."), When(obstacle=_SERVICES)),
    **dict.fromkeys(("model.device", "compute.", "topology."), When(obstacle=_PLACES)),
    **dict.fromkeys(
        (
            "vllm.tensor_parallel_size", "vllm.data_parallel_size", "vllm.gpu_memory_utilization",
            "vllm.sleep_while_learning",
        ),
        When(obstacle=_VLLM),
    ),
    "tracking.": When(obstacle="trackers are opened when a process begins"),
}  # fmt: skip
LIVE_KEYS = tuple(sorted(key for key, when in CHANGEABLE.items() if when.obstacle is None))
_SIZE_KEYS = ("training.iterations_per_epoch", "training.num_epochs")


def when_it_may_change(key: str) -> When:
    """Return when a key of a run that has begun may change; of most keys, never."""
    section = f"{key.partition('.')[0]}."
    never = When(on_resume=False, obstacle="the run would be another one")
    return CHANGEABLE.get(key) or CHANGEABLE.get(section) or never


def look_up_live(config: RunConfig) -> Mapping[str, Any]:
    """Return the values of LIVE_KEYS that the run has a use for (Any: of the config)."""
    sections = config.model_dump()
    return MappingProxyType({key: look_up(sections, key) for key in LIVE_KEYS if _why_useless(config, key) is None})


def _why_useless(config: RunConfig, key: str) -> str | None:
    if key.startswith("judge.") and (config.judge is None or not config.judge.enabled):
        return "the run has no judge"
    if key.startswith("judge.gold.") and (config.judge is None or config.judge.gold is None):
        return "the judge is not compared with gold"
    return None


class LiveSettings:
    """The settings of a run that may change between steps.

    Args:
        config: of the run.
        trainer, learner, checkpoints, judging, steering: changed in place.
        recorder: gets an event of each change.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        trainer: Trainer,
        learner: AnyLearner,
        checkpoints: CheckpointStore,
        judging: Judging | None,
        steering: Steering,
        recorder: RunRecorder,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._learner = learner
        self._checkpoints = checkpoints
        self._judging = judging
        self._steering = steering
        self._recorder = recorder

    @property
    def values(self) -> Mapping[str, Any]:
        """Return the present values by key (Any: of the config)."""
        return look_up_live(self._config)

    def parse(self, key: str, text: str) -> Any:
        """Return the text, as on the command line, as a value of a key (Any: of the config).

        Raises:
            ConfigError: the key may not change during the run, or the config would not be valid.
        """
        return look_up(self._with(key, text).model_dump(), key)

    def apply(self, change: Change) -> None:
        """Make a change and record it.

        Raises:
            ConfigError: as `parse`.
        """
        old = self.values.get(change.key)
        self._change(change.key, change.value)
        data = {"key": change.key, "old": old, "new": change.value, "by": change.by}
        self._recorder.event("changed", self._trainer.state.step, data)

    def restore(self, events: Sequence[Event], began: RunConfig) -> list[str]:
        """Apply the changes of the run's earlier processes, which are among `events`; return a sentence on each.

        A key keeps its present value if the present config gives it another value than the config with which the run
        `began`. Changes made in steps that are done again hold from their start, with another event.
        """
        given, first = self.values, look_up_live(began)
        latest = {event["data"]["key"]: event for event in events if event["kind"] == "changed"}
        sentences = []
        for key, event in latest.items():
            data = event["data"]
            if data["new"] == given.get(key):
                continue
            if given.get(key) != first.get(key):
                sentences.append(
                    f"{key} = {given.get(key)}, as the configuration says now, and not {data['new']}, "
                    "which was set while the run went on"
                )
                continue
            if event["step"] > self._trainer.state.step:
                self.apply(Change(key, data["new"], data["by"]))
            else:
                self._change(key, data["new"])
            sentences.append(f"{key} = {data['new']}, as {data['by']} set it while the run went on")
        return sentences

    def _change(self, key: str, value: Any) -> None:
        config = self._with(key, value)
        concurrency = config.rollout.max_concurrent_rollouts
        self._trainer.replan(build_plan(config), max_concurrent_rollouts=concurrency)
        self._learner.set_learning_rate(config.training.learning_rate)
        self._checkpoints.retention = RetentionSettings.of(config.training)
        self._steering.deadline.seconds = config.run.stop_grace_seconds
        if self._judging is not None and config.judge is not None:
            self._judging.set_limits(
                config.judge.scoring_limits,
                budget_limits(config.judge),
                stops_on_drift=config.judge.gold is not None and config.judge.gold.on_drift == "stop",
            )
        self._config = config

    def _with(self, key: str, value: Any) -> RunConfig:
        when = when_it_may_change(key)
        if when.obstacle is not None:
            advice = (
                "change it in the configuration, and go on with --resume"
                if when.on_resume
                else f"{nearest_name(key, LIVE_KEYS)} (those that can: {', '.join(LIVE_KEYS)})"
            )
            raise ConfigError(f"{key}: cannot change while the run goes on, because {when.obstacle}; {advice}")
        if (reason := _why_useless(self._config, key)) is not None:
            raise ConfigError(f"{key}: would change nothing: {reason}")
        optimizer = self._config.optimizer
        if key in _SIZE_KEYS and (optimizer.schedule != "constant" or optimizer.warmup_fraction):
            raise ConfigError(f"{key}: the learning rate is planned by the number of steps, which cannot change")
        values = self._config.model_dump(exclude_none=True)
        _, problem = apply_override(values, f"{key}={value}")
        if problem is not None:
            raise ConfigError(f"{key}: {problem.text}")
        return RunConfig.from_dict(values, source="run set")


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

    def restore(self, learner: AnyLearner) -> None:
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

"""Settings that can change during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gspo_gym.config.build.trainer import build_plan
from gspo_gym.config.nested import apply_override
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.words import look_up
from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.learning.update import Learner
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import Event
from gspo_gym.run.steering import Change
from gspo_gym.run.trainer import Trainer

LIVE_KEYS = (
    "evaluation.every_n_iters",
    "rollout.max_concurrent_rollouts",
    "run.log_episodes_every_n_iters",
    "training.checkpoint_every_n_iters",
    "training.iterations_per_epoch",
    "training.learning_rate",
    "training.log_interval",
    "training.num_epochs",
    "training.stop_at_success_rate",
)
_SIZE_KEYS = ("training.iterations_per_epoch", "training.num_epochs")


def look_up_live(config: RunConfig) -> Mapping[str, Any]:
    """Return the values of LIVE_KEYS (Any: of the config)."""
    sections = config.model_dump()
    return MappingProxyType({key: look_up(sections, key) for key in LIVE_KEYS})


class LiveSettings:
    """The settings of a run that may change between steps.

    Args:
        config: of the run.
        trainer, learner: changed in place.
        recorder: gets an event of each change.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        trainer: Trainer,
        learner: Learner,
        recorder: RunRecorder,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._learner = learner
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

    def restore(self, events: Sequence[Event], began: RunConfig) -> None:
        """Apply the changes of the run's earlier processes again, which are among `events`.

        A key keeps its present value if the present config gives it another value than the config with which the run
        `began`. Changes made in steps that are done again hold from their start, with another event.
        """
        given, first = self.values, look_up_live(began)
        latest = {event["data"]["key"]: event for event in events if event["kind"] == "changed"}
        for key, event in latest.items():
            data = event["data"]
            if given.get(key) != first.get(key) or data["new"] == given.get(key):
                continue
            if event["step"] > self._trainer.state.step:
                self.apply(Change(key, data["new"], data["by"]))
            else:
                self._change(key, data["new"])

    def _change(self, key: str, value: Any) -> None:
        config = self._with(key, value)
        concurrency = config.rollout.max_concurrent_rollouts
        self._trainer.replan(build_plan(config), max_concurrent_rollouts=concurrency)
        self._learner.set_learning_rate(config.training.learning_rate)
        self._config = config

    def _with(self, key: str, value: Any) -> RunConfig:
        if key not in LIVE_KEYS:
            raise ConfigError(
                f"{key}: cannot change while the run goes on; {nearest_name(key, LIVE_KEYS)} (those that can: "
                f"{', '.join(LIVE_KEYS)})"
            )
        optimizer = self._config.optimizer
        if key in _SIZE_KEYS and (optimizer.schedule != "constant" or optimizer.warmup_fraction):
            raise ConfigError(f"{key}: the learning rate is planned by the number of steps, which cannot change")
        values = self._config.model_dump(exclude_none=True)
        _, problem = apply_override(values, f"{key}={value}")
        if problem is not None:
            raise ConfigError(f"{key}: {problem.text}")
        return RunConfig.from_dict(values, source="run set")

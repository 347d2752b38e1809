"""Settings that change while a run goes on: each acts as in a run that was built with it, or says why it cannot."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.config.build import rollouts
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.engines import build_weight_sync
from gspo_gym.config.build.judge import build_judging
from gspo_gym.config.build.live import CHANGEABLE, LIVE_KEYS, LiveSettings, look_up_live
from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.manifest import RetentionSettings
from gspo_gym.rollout.episode import EpisodeRequest
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events
from gspo_gym.run.report.progress import QuietProgress
from gspo_gym.run.steering import Change, Steering
from gspo_gym.types import Trajectory

BASE: dict[str, Any] = {
    "model": {"base": "tiny:qwen3-64", "label": "live"},
    "rollout": {"env_name": "GuessNumber", "env_config": {"style": "terse"},
                "max_turns": 1, "max_output_tokens": 3, "max_model_len": 256,
                "episodes_per_batch": 8},
    "training": {"iterations_per_epoch": 2, "group_size": 4, "batch_size": 8, "learning_rate": 1e-3},
    "evaluation": {"seeds": "0:4"},
    "judge": {
        "enabled": True,
        "reward_blend": {"env": 0.5, "outcome": 0.5},
        "options": {"outcome": True, "model": "m", "base_url": "http://127.0.0.1:1/v1",
                    "usd_per_million_input_tokens": 1.0, "usd_per_million_output_tokens": 4.0,
                    "rubric_overrides": {"outcome": {"criteria": [{"id": "outcome.solved", "description": "Yes."}]}}},
        "gold": {"python": "scripted_judge:say_one"},
    },
}  # fmt: skip
VALUES: dict[str, Any] = {
    "evaluation.every_n_iters": 3,
    "judge.gold.on_drift": "stop",
    "judge.max_unscored": 5,
    "judge.options.max_calls": 100,
    "judge.options.max_cost_usd": 2.5,
    "rollout.max_concurrent_rollouts": 2,
    "run.log_episodes_every_n_iters": 7,
    "run.log_tokens_every_n_iters": 5,
    "run.stop_grace_seconds": 3.5,
    "training.checkpoint_every_n_iters": 9,
    "training.iterations_per_epoch": 4,
    "training.keep_best": 3,
    "training.keep_best_direction": "min",
    "training.keep_best_metric": "mean_return",
    "training.keep_every": 5,
    "training.keep_last": 4,
    "training.learning_rate": 1e-4,
    "training.log_interval": 2,
    "training.max_idle_iters": 6,
    "training.must_save_by": 1.5,
    "training.num_epochs": 3,
    "training.stop_at_success_rate": 0.5,
}


def config_with(key: str | None = None) -> RunConfig:
    values = copy.deepcopy(BASE)
    if key is not None:
        *above, name = key.split(".")
        table = values
        for part in above:
            table = table.setdefault(part, {})
        table[name] = VALUES[key]
    return RunConfig.from_dict(values)


class Parts:
    """The parts of a run that settings change, as a run builds them."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        policy = build.build_policy(config)
        player = asyncio.run(rollouts.build_player(config, policy))
        self.recorder = RunRecorder.create(folder, config.to_toml())
        self.learner = build.build_learner(config, policy)
        self.judging = build_judging(config)
        self.steering = Steering(config.run.stop_grace_seconds)
        self.checkpoints = CheckpointStore(folder / "checkpoints", retention=RetentionSettings.of(config.training))
        self.trainer = build.build_trainer(
            config,
            player,
            learner=self.learner,
            recorder=self.recorder,
            checkpoints=self.checkpoints,
            progress=QuietProgress(lambda _: None),
            state=None,
            weight_sync=build_weight_sync(config, policy, player.engine, self.recorder),
            judging=self.judging,
            steering=self.steering,
        )

    def settings(self, config: RunConfig) -> LiveSettings:
        return LiveSettings(
            config,
            trainer=self.trainer,
            learner=self.learner,
            checkpoints=self.checkpoints,
            judging=self.judging,
            steering=self.steering,
            recorder=self.recorder,
        )

    def read(self) -> list[Any]:
        """What each part goes by."""
        trainer, judging = self.trainer, self.judging
        assert judging is not None
        assert judging._gold is not None
        return [
            trainer.plan,
            trainer._collector.plan,
            trainer._journal.plan,
            (trainer._saver._settings, trainer._saver._deadline),
            trainer._collector.pool.concurrency,
            self.learner._optimizer._peak,
            self.checkpoints.retention,
            self.steering.deadline.seconds,
            [(each.limits, each._room.count) for each in (judging.for_training, judging.for_evaluation)],
            (judging._budget.limits, judging._gold.stops),
        ]


@pytest.mark.parametrize("key", LIVE_KEYS)
def test_a_change_leaves_every_part_as_in_a_run_that_was_built_with_it(key: str, tmp_path: Path) -> None:
    """What a run that was built with it does is in the tests of each key (tests/unit/config/test_effects.py)."""
    config, value = config_with(), VALUES[key]
    parts, wanted = Parts(config, tmp_path / "live"), Parts(config_with(key), tmp_path / "wanted")
    assert parts.read() != wanted.read()
    settings = parts.settings(config)
    assert settings.parse(key, str(value)) == value
    settings.apply(Change(key, value, "me"))
    assert parts.read() == wanted.read()
    assert settings.values[key] == value
    old = look_up_live(config)[key]
    assert read_events(parts.recorder.folder)[-1]["data"] == {"key": key, "old": old, "new": value, "by": "me"}


def test_what_may_change_are_keys_of_the_configuration_and_each_has_a_test() -> None:
    assert [key for key in CHANGEABLE if key not in leaf_keys() and not key.endswith(".")] == []
    assert set(VALUES) == set(LIVE_KEYS)
    also_on_resume = {key for key in LIVE_KEYS if CHANGEABLE[key].on_resume}
    assert set(LIVE_KEYS) - also_on_resume == {"training.learning_rate"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LiveSettings:
    config = config_with()
    return Parts(config, tmp_path_factory.mktemp("live") / "run").settings(config)


@pytest.mark.parametrize("key", [key for key, when in CHANGEABLE.items() if when.obstacle is not None])
def test_what_can_change_on_resume_only_says_why(key: str, settings: LiveSettings) -> None:
    some_key = next(leaf for leaf in leaf_keys() if leaf.startswith(key))
    reason = f"because {CHANGEABLE[key].obstacle}; change it in the configuration, and go on with --resume"
    with pytest.raises(ConfigError, match=f"^{some_key}: cannot change while the run goes on, {reason}$"):
        settings.parse(some_key, "1")


def test_a_setting_of_a_judge_that_is_not_there_is_refused_and_not_shown(tmp_path: Path) -> None:
    values = {name: section for name, section in BASE.items() if name != "judge"}
    config = RunConfig.from_dict(values)
    assert [key for key in look_up_live(config) if key.startswith("judge.")] == []
    settings = Parts(config_with(), tmp_path / "run").settings(config)
    with pytest.raises(ConfigError, match=r"judge\.max_unscored: would change nothing: the run has no judge"):
        settings.parse("judge.max_unscored", "5")


@pytest.mark.parametrize("allowed", [1, 3])
def test_an_evaluation_plays_as_many_at_once_as_may_be_by_now(allowed: int) -> None:
    num_open = most_open = 0

    async def play(request: EpisodeRequest) -> Trajectory:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await asyncio.sleep(0)  # the others begin meanwhile, if they may
        num_open -= 1
        raise LookupError(request.trajectory_id)

    evaluate = rollouts._evaluation_of(config_with(), play, concurrency=lambda: allowed)
    with pytest.raises(LookupError):
        asyncio.run(evaluate("eval_000000"))
    assert most_open == allowed

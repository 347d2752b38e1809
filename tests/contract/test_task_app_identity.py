"""A task app in another process plays what `run_episode` plays: the same tokens under the same seeds.

The app is our own server, started by its command; the model is asked through the gateway. What is compared is all that
is learned from: tokens, masks, logprobs, versions, turns, rewards and how the episode ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from app_process import serving_process
from seeded_engine import SeededEngine, any_of

from gspo_gym.config.build import rollouts
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.app_players import AppPlayers
from gspo_gym.config.build.apps import environment_ids
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.base import Engine
from gspo_gym.policy.load import Policy
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.types import Task, Trajectory

NUM_GROUPS, GROUP_SIZE = 4, 3
KEY = {"ENVIRONMENT_API_KEY": "a key that both sides know".replace(" ", "-")}
# More in a batch is another order of sums, which moves the last bits of a float32 logprob.
LOGPROB_ERROR = 5e-6


@dataclass(frozen=True)
class Game:
    """What is played, and what a hand-written engine says in it."""

    env_name: str
    env_config: dict[str, Any]
    limits: dict[str, Any]
    says: tuple[str, ...]


GUESSING = Game(
    "GuessNumber",
    {"style": "terse", "low": 1, "high": 8, "max_guesses": 4, "inconsistent_penalty": 0.2, "illegal_penalty": 0.4},
    {"max_turns": 4, "max_output_tokens": 3, "max_model_len": 256},
    ("1", "2", "4", "5", "8", "x", "99"),  # three tokens cut "99" short of its stop token
)
QUERYING = Game(
    "SqlAnalyst",
    {},
    {"max_turns": 3, "max_output_tokens": 120, "max_model_len": 900},
    (
        '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT name FROM sqlite_master"}}\n</tool_call>',
        'I look.\n<tool_call>\n{"name": "query", "arguments": {"sql": "SELEC"}}\n</tool_call>',
        '<tool_call>\n{"name": "query", "arguments": {"sql": ',
        '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>',
        "<think>\nlet me see\n</think>\n\nThe answer is 3.",
        '<tool_call>\n{"name": "answer", "arguments": {"value": "3"}}\n</tool_call>',
    ),
)


def config_of(game: Game, **sections: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "model": {"base": "tiny:qwen3-64", "label": "identity"},
            "rollout": {
                "env_name": game.env_name,
                "env_config": game.env_config,
                "episodes_per_batch": GROUP_SIZE,
                "policy_config": {"system_prompt": "Think, then act."},
                **game.limits,
            },
            "training": {
                "iterations_per_epoch": 1,
                "group_size": GROUP_SIZE,
                "batch_size": GROUP_SIZE,
                "learning_rate": 1e-3,
            },
            "evaluation": {"seeds": "0:4"},
            **sections,
        }
    )


def played(config: RunConfig, policy: Policy, engine: Callable[[], Engine] | None) -> list[Trajectory]:
    """The episodes of training, from the engine of the configuration or another."""

    async def main() -> list[Trajectory]:
        player = await rollouts.build_player(config, policy)
        if engine is not None:
            await player.close()
            other = engine()
            apps = AppPlayers(config, other, policy.tokenizer) if player.apps is not None else None
            player = rollouts.Player(policy, other, player.renderers, apps)
        try:
            await player.start()
            pool = rollouts.build_training_pool(config, player)
            (env_id,) = environment_ids(config)
            requests = [GroupRequest(f"g{k}", Task(env_id, 100 + k), GROUP_SIZE) for k in range(NUM_GROUPS)]
            groups = await pool.collect(requests)
            assert not [lost for group in groups for lost in group.dropped]
            return [trajectory for group in groups for trajectory in group.trajectories]
        finally:
            await player.close()

    return asyncio.run(main())


def require_same(here: Trajectory, there: Trajectory, *, logprob_error: float) -> None:
    for name in ("trajectory_id", "attempt", "task", "sampling_seed", "outcome", "success", "error", "reward"):
        assert getattr(there, name) == getattr(here, name), name
    assert len(there.segments) == len(here.segments)
    for ours, theirs in zip(here.segments, there.segments, strict=True):
        for name in ("token_ids", "action_mask", "turn_index", "weight_version"):
            np.testing.assert_array_equal(getattr(theirs, name), getattr(ours, name), err_msg=name)
        np.testing.assert_allclose(theirs.rollout_logprobs, ours.rollout_logprobs, rtol=0, atol=logprob_error)
    assert there.turns == here.turns
    assert there.messages == here.messages


@pytest.fixture(scope="module", params=[GUESSING, QUERYING], ids=lambda game: game.env_name)
def game_and_url(request: pytest.FixtureRequest) -> Iterator[tuple[Game, str]]:
    game = request.param
    arguments = (game.env_name, "--api-key-env", *KEY)
    with serving_process(*arguments, environment=KEY) as url:
        yield game, url


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEY.items():
        monkeypatch.setenv(name, key)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return build.build_policy(config_of(GUESSING))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "scripted"])
def test_an_app_in_another_process_plays_the_same_episodes(
    engine: str, game_and_url: tuple[Game, str], policy: Policy
) -> None:
    game, url = game_and_url
    make_engine = None if engine == "local" else lambda: SeededEngine(policy.tokenizer, any_of(*game.says))
    here = played(config_of(game), policy, make_engine)
    there = played(config_of(game, services={"task_url": url}), policy, make_engine)
    for ours, theirs in zip(here, there, strict=True):
        require_same(ours, theirs, logprob_error=LOGPROB_ERROR if engine == "local" else 0.0)
    # What would be compared for nothing if it never happened.
    turns = [turn for trajectory in here for turn in trajectory.turns]
    assert max(len(trajectory.turns) for trajectory in here) > 1
    if engine == "scripted":
        assert len({trajectory.reward for trajectory in here}) > 1
        assert len({trajectory.outcome for trajectory in here}) > 1 or game is GUESSING
        assert len({turn.parse for turn in turns}) > 1 or game is GUESSING


@pytest.mark.slow
def test_an_evaluation_of_an_app_is_that_of_its_environment_here(
    game_and_url: tuple[Game, str], policy: Policy
) -> None:
    game, url = game_and_url

    def evaluation(config: RunConfig) -> Any:
        async def main() -> Any:
            player = await rollouts.build_player(config, policy)
            try:
                await player.start()
                return await rollouts.build_evaluate(config, player)("label")
            finally:
                await player.close()

        return asyncio.run(main())

    assert evaluation(config_of(game, services={"task_url": url})) == evaluation(config_of(game))

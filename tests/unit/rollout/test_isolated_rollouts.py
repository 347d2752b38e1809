"""A configured run plays its environments where rollout.isolation says: training, evaluation, warm-up and players."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from small_run import small_run

from gspo_gym.config.build import rollouts
from gspo_gym.config.build import trainer as build
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.pool import POOL
from gspo_gym.errors import UnknownNameError
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.types import Task


def config(**rollout: Any) -> RunConfig:
    return RunConfig.from_dict(
        small_run(
            model={"label": "isolated"},
            rollout={"max_output_tokens": 8, "episodes_per_batch": 4, **rollout},
            training={"iterations_per_epoch": 1, "group_size": 2},
            warmup={"num_episodes": 4, "policy": "reference", "learning_rate": 1e-3},
        )
    )


def num_workers_leased() -> int:
    return POOL.counts["started"] + POOL.counts["reused"]


@pytest.fixture(scope="module")
def players() -> Any:
    made = {}
    for isolation in ("thread", "process"):
        settings = config(isolation=isolation)
        made[isolation] = (settings, asyncio.run(rollouts.build_player(settings, build.build_policy(settings))))
    yield made
    for _, player in made.values():
        asyncio.run(player.engine.close())


def test_the_keys_reach_the_worker() -> None:
    env = rollouts.build_environment(config(isolation="process", env_memory_limit_mb=3000, env_variables=["PATH"]))()
    assert isinstance(env, ProcessEnv)
    assert env._worker is not None
    limits = Path(f"/proc/{env._worker.pid}/limits").read_text(encoding="ascii").splitlines()
    assert [line.split()[3] for line in limits if line.startswith("Max address space")] == [str(3000 * 2**20)]
    assert env._worker.kind[-1] == (("PATH", os.environ["PATH"]),)
    env.kill()


def test_scripted_players_play_the_same_episodes_in_a_process_as_in_a_thread(players: Any) -> None:
    played = {}
    for isolation, (settings, player) in players.items():
        leased = num_workers_leased()
        pool, _plan = asyncio.run(rollouts.build_warmup(settings, player))
        groups = asyncio.run(pool.collect([GroupRequest(f"g{k}", Task("GuessNumber", k), 2) for k in range(4)]))
        played[isolation] = [(t.messages, t.reward, t.success) for group in groups for t in group.trajectories]
        # Eight episodes, and an instance whose policies and one whose tools are looked at; none in a thread.
        assert num_workers_leased() - leased == (10 if isolation == "process" else 0)
    assert len(played["thread"]) == 8
    assert played["process"] == played["thread"]


def test_a_model_plays_the_same_episodes_in_a_process_as_in_a_thread(players: Any) -> None:
    played = {}
    for isolation, (settings, player) in players.items():
        pool = rollouts.build_training_pool(settings, player)
        groups = asyncio.run(pool.collect([GroupRequest(f"g{k}", Task("GuessNumber", k), 2) for k in range(2)]))
        played[isolation] = [(t.messages, t.reward, t.outcome) for group in groups for t in group.trajectories]
    assert len(played["thread"]) == 4
    assert played["process"] == played["thread"]


def test_evaluating_a_scripted_policy_finds_its_name_in_a_process_too(players: Any) -> None:
    settings, player = players["process"]
    evaluate = asyncio.run(rollouts.build_scripted_evaluate(settings, player.renderers, "reference"))
    evaluation = asyncio.run(evaluate("scripted"))
    assert evaluation.mean_return == 1.0
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        asyncio.run(rollouts.build_scripted_evaluate(settings, player.renderers, "refrence"))


def test_reading_the_policies_gives_its_worker_back(players: Any) -> None:
    settings, player = players["process"]
    ended = [POOL.counts[how] for how in ("killed", "died", "replaced", "retired")]
    asyncio.run(rollouts.build_warmup(settings, player))
    asyncio.run(rollouts.build_scripted_evaluate(settings, player.renderers, "reference"))
    gc.collect()  # an instance that is forgotten takes its worker along
    assert [POOL.counts[how] for how in ("killed", "died", "replaced", "retired")] == ended

"""Every bundled environment plays one and the same episode, wherever it is played.

Compared with the reference's play in this process, where it is asked directly: over our OpenEnv server through our own
adapter, as a rollout of our task app, as a plain Gymnasium environment, in a vector of environments, and in the pool
that collects episodes. The reference may look at hidden state, which none of these shows, so there its actions are said
again.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from gspo_gym_envs import OWN
from gymnasium.utils.env_checker import check_env
from scripted_model import ScriptedModel, in_turn

from gspo_gym.base.messages import message_to_wire
from gspo_gym.config.build.episode_collection import collect_episodes
from gspo_gym.env.plain import as_gymnasium
from gspo_gym.env.playing import Playthrough, play, replaying
from gspo_gym.env.registry import make
from gspo_gym.env.vector import make_vec
from gspo_gym.remote.apps.contracts import RolloutResponse, read_response
from gspo_gym.remote.serve.openenv_server import create_openenv_app
from gspo_gym.remote.serve.task_app_server import create_task_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Message

OURS = list(OWN)  # not adapters and data sets
SEEDS = (0, 1)
MOST_TURNS = 100


def played(factory: Any, policy: Any, seed: int) -> Playthrough:
    return asyncio.run(play(factory, policy, seed=seed, name="it", max_turns=MOST_TURNS, step_timeout_seconds=60))


@functools.cache
def here(name: str, seed: int) -> Playthrough:
    """The reference's episode in this process: over, and a success."""
    run = played(lambda: make(name), make(name).unwrapped.policies["reference"], seed)
    assert (run.is_over, run.success) == (True, True)
    return run


@pytest.mark.parametrize("name", OURS)
def test_it_plays_over_openenv_as_in_this_process(name: str) -> None:
    """Messages, rewards, terms, events, success and flags: all that `difference_from` compares."""
    with BackgroundServer(create_openenv_app(name)) as server:
        assert make("OpenEnv", url=server.url).tool_schemas == make(name).unwrapped.tool_schemas
        for seed in SEEDS:
            there = played(lambda: make("OpenEnv", url=server.url), replaying(here(name, seed).actions), seed)
            assert here(name, seed).difference_from(there) is None


@pytest.mark.filterwarnings("ignore:.*Not able to test alternative render modes.*:UserWarning")  # not by gymnasium.make
@pytest.mark.parametrize("name", OURS)
def test_gymnasiums_own_checker_passes_on_it_as_a_plain_environment(name: str) -> None:
    with as_gymnasium(name) as env:
        check_env(env)


@pytest.mark.parametrize("name", OURS)
def test_it_plays_in_a_vector_as_in_this_process(name: str) -> None:
    """Both episodes in lockstep; what comes after the shorter one's end is another episode and not compared."""
    runs = [here(name, seed) for seed in SEEDS]
    envs = make_vec(name, len(runs))
    observations, _ = envs.reset(seed=SEEDS[0])  # environment i has that seed + i
    assert observations == tuple(seen(run.opening) for run in runs)
    for turn in range(max(len(run.actions) for run in runs)):
        step = envs.step([run.actions[min(turn, len(run.actions) - 1)] for run in runs])
        observations, rewards, terminations, truncations, infos = step
        for index, run in enumerate(runs):
            if turn >= len(run.answers):
                continue
            answer = run.answers[turn]
            assert observations[index] == seen(answer.messages)
            assert (rewards[index], terminations[index], truncations[index]) == (
                answer.reward,
                answer.terminated,
                answer.truncated,
            )
            assert infos["events"][index] == answer.events
    envs.close()


def seen(messages: Sequence[Message]) -> str | tuple[Message, ...]:
    """What a vector of environments shows for some messages."""
    if not messages:
        return ""
    (*_, last) = messages
    return last.content if len(messages) == 1 and last.role == "user" else tuple(messages)


@pytest.mark.parametrize("name", OURS)
def test_collecting_the_reference_collects_its_successes(name: str) -> None:
    collected = collect_episodes(name, "scripted:reference", seeds=SEEDS)
    assert collected.dropped == ()
    assert [episode.task.seed for episode in collected.trajectories] == list(SEEDS)
    for episode in collected.trajectories:
        run = here(name, episode.task.seed)
        assert episode.success is True
        assert episode.reward == run.episode_return
        assert [turn.reward for turn in episode.turns] == [answer.reward for answer in run.answers]


@pytest.mark.parametrize("name", OURS)
def test_its_rollout_is_the_episode_of_this_process(name: str) -> None:
    """What the model was shown, and each turn's reward, terms and events."""
    run = here(name, 0)
    model = ScriptedModel(in_turn(*(message_to_wire(action) for action in run.actions)))
    with BackgroundServer(model) as endpoint, BackgroundServer(create_task_app(name)) as server:
        policy = {"inference_url": f"{endpoint.url}/v1?cid=x"}
        request = {"run_id": "r", "env": {"seed": 0, "env_name": name}, "policy": {"config": policy}, "mode": "rl"}
        body = {**request, "ops": ["agent", "env"] * 100, "on_done": "terminate"}
        answer = httpx.post(f"{server.url}/rollout", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    response = read_response(answer.json())
    assert isinstance(response, RolloutResponse)
    steps = response.trajectories[0].steps
    shown = [run.opening, *(result.messages for result in run.answers[:-1])]
    assert [step.obs["messages"] for step in steps] == [[message_to_wire(m) for m in seen] for seen in shown]
    said = [
        message_to_wire(message) for pair in zip(shown, run.actions, strict=True) for message in (*pair[0], pair[1])
    ]
    assert model.asked[-1].body["messages"] == said[:-1]
    assert model.asked[-1].body.get("tools", []) == list(make(name).unwrapped.tool_schemas)
    for step, result in zip(steps, run.answers, strict=True):
        assert (step.reward, step.done, step.truncated) == (result.reward, result.done, result.truncated)
        details = {"reward_terms": dict(result.reward_terms), "events": list(result.events)}
        assert (step.info or {})["gspo_gym"] == details
    assert (response.metrics.mean_return, response.metrics.details["success"]) == (run.episode_return, True)

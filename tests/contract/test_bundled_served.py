"""Every bundled environment, served, plays the episode that it plays in this process: step by step, and as a rollout.

Compared with the reference's play here, where it is asked directly; there its actions are said again, in a rollout by
an endpoint that takes them for a model's.
"""

from __future__ import annotations

import asyncio
import functools
from functools import partial
from typing import Any

import httpx
import pytest
from gspo_gym_envs import OWN
from scripted_model import ScriptedModel, in_turn

from gspo_gym.base.messages import message_to_wire
from gspo_gym.env.playing import Playthrough, play, replaying
from gspo_gym.env.registry import make
from gspo_gym.remote.apps.contracts import RolloutResponse, read_response
from gspo_gym.remote.serve.openenv_server import create_openenv_app
from gspo_gym.remote.serve.task_app_server import create_task_app
from gspo_gym.remote.serving import BackgroundServer

OURS = list(OWN)  # not adapters and data sets
SEEDS = (0, 1)


def played(factory: Any, policy: Any, seed: int) -> Playthrough:
    return asyncio.run(play(factory, policy, seed=seed, name="it", max_turns=100, step_timeout_seconds=60))


@functools.cache
def here(name: str, seed: int) -> Playthrough:
    """The reference's episode in this process: over, and a success."""
    run = played(partial(make, name), make(name).unwrapped.policies["reference"], seed)
    assert (run.is_over, run.success) == (True, True)
    return run


@pytest.mark.parametrize("name", OURS)
def test_it_plays_step_by_step_as_in_this_process(name: str) -> None:
    """Messages, rewards, terms, events, success and flags: all that `difference_from` compares."""
    with BackgroundServer(create_openenv_app(name)) as server:
        there = partial(make, "OpenEnv", url=server.url)
        assert there().tool_schemas == make(name).unwrapped.tool_schemas
        for seed in SEEDS:
            assert here(name, seed).difference_from(played(there, replaying(here(name, seed).actions), seed)) is None


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

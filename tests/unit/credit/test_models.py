"""Forks of a model's episodes: recorded tokens are given back, and from there on the actor is asked."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.credit.bench import report_of
from gspo_gym.credit.forks import Fork, fork_group, truth_of
from gspo_gym.credit.models import ModelPlayer
from gspo_gym.env.core import TextEnv
from gspo_gym.errors import RolloutError
from gspo_gym.policy.load import load_tokenizer
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.limits import EpisodeLimits

LIMITS = EpisodeLimits(max_turns=4, max_output_tokens=32, max_model_len=4096)


class Walk(TextEnv):
    """Counts the letters "b" said; ends after the third answer and earns that."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.said = []
        return f"task {seed}", {}

    def step(self, action):
        self.said.append(action)
        is_last = len(self.said) == 3
        return f"heard {action}", float("".join(self.said).count("b")) if is_last else 0.0, is_last, False, {}


def either(env, rng):
    return lambda messages: str(rng.choice(["a", "b"]))


def player(policy=either) -> ModelPlayer:
    return ModelPlayer(
        Walk,
        ScriptedActor(policy),
        RendererCache(load_tokenizer("tiny:qwen3-64")),
        env_id="test/Walk-v0",
        limits=LIMITS,
        max_concurrent=8,
    )


def test_a_fork_repeats_the_recorded_tokens_and_goes_on_with_draws_of_its_own():
    async def play():
        made = player()
        [episode] = await made.play([Fork(7, ("episode", 0))])
        return episode, await made.play([Fork(7, ("continuation", n), episode, 2) for n in range(12)])

    episode, continued = asyncio.run(play())
    assert episode.states[0] == "task 7"
    assert len(episode.actions) == 3
    for other in continued:
        assert other.states == episode.states
        for mine, theirs in zip(episode.actions[:2], other.actions[:2], strict=True):
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
    assert len({other.actions[2].token_ids.tobytes() for other in continued}) == 2


def test_the_advantage_of_a_letter_is_half_of_what_it_earns():
    # a "b" earns 1, and the policy says it half of the time: its advantage is 1/2, of an "a" -1/2, at every turn
    async def play():
        made = player()
        return [await fork_group(made, s, group_size=3, num_continuations=24, discount=1.0) for s in range(2)]

    groups = asyncio.run(play())
    tokenizer = load_tokenizer("tiny:qwen3-64")
    for group in groups:
        for episode, (advantages, variances) in zip(group.episodes, truth_of(group, 1.0), strict=True):
            for action, advantage, variance in zip(episode.actions, advantages, variances, strict=True):
                exact = 0.5 if tokenizer.decode(action.token_ids)[0] == "b" else -0.5
                assert abs(advantage - exact) < 5 * variance**0.5 + 1e-9
    assert report_of(groups, 1.0).num_turns == 18


def test_an_episode_that_fails_ends_the_measurement_with_its_reason():
    def broken(env, rng):
        raise ValueError("no idea")

    with pytest.raises(RolloutError, match=r"test/Walk-v0, seed 3: engine_error: ValueError: no idea"):
        asyncio.run(player(broken).play([Fork(3, ("episode", 0))]))

"""Actors: an engine, and a policy written by hand.

Pinned here: 1. a scripted policy's episode has the tokens that the template gives its messages, marked as unsampled;
2. its randomness is the episode's own; 3. a message that would be cut off is an error that shows it; 4. policies are
looked up by name; 5. sampling settings out of range are refused at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.env.core import TextEnv
from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import EngineActor, ScriptedActor, policy_of
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.seeding import child_seed
from gspo_gym.types import Message, Outcome, Sampling, Task, Trajectory

START, END = 257, 258


class Parrot(TextEnv):
    """Wants to hear its secret word, which a reference policy may read."""

    secret = "polly"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "word?", {}

    def step(self, action: str) -> Any:
        done = action == self.secret
        return "no", float(done), done, False, {}


def reference(env: Parrot, rng: np.random.Generator) -> Any:
    return lambda messages: env.secret


def random(env: Parrot, rng: np.random.Generator) -> Any:
    return lambda messages: str(rng.integers(10**9))


Parrot.policies = {"reference": reference, "random": random}


def play(make_policy: Any, *, sampling_seed: int = 0, max_output_tokens: int = 16) -> Trajectory:
    return asyncio.run(
        run_episode(
            EpisodeRequest("e", Task("Parrot", 0), sampling_seed=sampling_seed),
            make_env=lambda task: Parrot(),
            act=ScriptedActor(make_policy),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=3, max_output_tokens=max_output_tokens, max_model_len=512),
        )
    )


def test_a_scripted_policy_is_recorded_as_if_a_model_had_said_it() -> None:
    episode = play(policy_of(Parrot, "reference"))
    prompt = [START, *b"user\nword?", END, *b"\n", START, *b"assistant\n"]
    (segment,) = episode.segments
    assert segment.token_ids.tolist() == [*prompt, *b"polly", END]
    assert segment.action_mask.tolist() == [False] * len(prompt) + [True] * 6
    assert segment.rollout_logprobs.tolist() == [0.0] * len(segment)
    assert segment.weight_version.tolist() == [-1] * len(segment)  # no weights sampled it
    assert episode.reward == 1.0


def test_a_scripted_policy_is_made_once_an_episode_and_sees_the_conversation() -> None:
    seen: list[list[str]] = []

    def make_policy(env: Any, rng: np.random.Generator) -> Any:
        seen.append([])

        def policy(messages: Sequence[Message]) -> Message:
            seen[-1].append(messages[-1].content)
            return Message("assistant", str(len(messages)))

        return policy

    episode = play(make_policy)
    assert seen == [["word?", "no", "no"]]
    assert [m.content for m in episode.messages if m.role == "assistant"] == ["1", "3", "5"]
    assert episode.outcome is Outcome.MAX_TURNS


def test_a_random_policy_depends_on_the_episodes_sampling_seed_only() -> None:
    def said(seed: int) -> list[str]:
        return [m.content for m in play(random, sampling_seed=seed).messages if m.role == "assistant"]

    assert said(1) == said(1)
    assert said(1) != said(2)


def test_a_message_that_would_be_cut_off_is_an_error_that_shows_it() -> None:
    # "polly" and its stop token are 6
    assert play(reference, max_output_tokens=6).outcome is Outcome.TERMINATED
    episode = play(reference, max_output_tokens=5)
    assert episode.outcome is Outcome.ENGINE_ERROR
    assert episode.error is not None
    assert "message has 6 tokens, but turn 0 may have 5: 'polly'" in episode.error


@pytest.mark.parametrize(("length", "shown"), [(80, "x" * 80), (81, "x" * 77 + "...")])
def test_a_long_message_is_shown_by_its_first_eighty_characters(length: int, shown: str) -> None:
    error = play(lambda env, rng: lambda messages: "x" * length).error
    assert error is not None
    assert f": '{shown}';" in error


def test_ended_sessions_are_forgotten() -> None:
    actor = ScriptedActor(reference)
    asyncio.run(actor.end_session("never seen"))
    asyncio.run(
        run_episode(
            EpisodeRequest("e", Task("Parrot", 0), sampling_seed=0),
            make_env=lambda task: Parrot(),
            act=actor,
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=2, max_output_tokens=16, max_model_len=256),
        )
    )
    assert vars(actor)["_policies"] == {}


def test_policies_are_looked_up_by_name() -> None:
    assert policy_of(Parrot, "random") is random
    assert policy_of(Parrot(), "reference") is reference
    with pytest.raises(UnknownNameError, match=r"Parrot has no scripted policy 'refrence'; did you mean 'reference'\?"):
        policy_of(Parrot(), "refrence")
    with pytest.raises(UnknownNameError, match=r"object has no scripted policy 'random'; known: \(none\)"):
        policy_of(object(), "random")


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 2.0}, {"min_tokens": -1}]
)
def test_sampling_settings_out_of_range_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"Sampling.{next(iter(wrong))}"):
        EngineActor(ScriptedEngine([]), Sampling(**wrong))


def test_an_engine_actor_passes_its_settings_on() -> None:
    engine = ScriptedEngine([[*b"polly", END]])
    asyncio.run(
        run_episode(
            EpisodeRequest("e", Task("Parrot", 0), sampling_seed=0),
            make_env=lambda task: Parrot(),
            act=EngineActor(
                engine, Sampling(temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, repetition_penalty=1.5, min_tokens=5)
            ),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=3, max_output_tokens=16, max_model_len=512),
        )
    )
    sampling = engine.calls[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 3)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens, sampling.max_tokens) == (0.25, 1.5, 5, 16)


def test_an_engine_actor_samples_the_models_own_distribution_unless_told_otherwise_and_ends_its_sessions() -> None:
    class Ending(ScriptedEngine):
        def __init__(self, *answers: list[int]) -> None:
            super().__init__(answers)
            self.ended: list[str] = []

        async def end_session(self, session_id: str) -> None:
            self.ended.append(session_id)

    engine = Ending([*b"polly", END])
    asyncio.run(
        run_episode(
            EpisodeRequest("e", Task("Parrot", 0), sampling_seed=5),
            make_env=lambda task: Parrot(),
            act=EngineActor(engine),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=3, max_output_tokens=16, max_model_len=512),
        )
    )
    assert engine.calls[0].sampling == SamplingParams(
        max_tokens=16,
        stop_token_ids=(END,),
        seed=child_seed(5, "turn", 0),  # all else neutral
    )
    assert engine.ended == ["e/0"]


def test_a_turn_with_less_room_than_the_least_tokens_may_end_with_any() -> None:
    engine = ScriptedEngine([[*b"polly", END]])
    asyncio.run(
        run_episode(
            EpisodeRequest("e", Task("Parrot", 0), sampling_seed=0),
            make_env=lambda task: Parrot(),
            act=EngineActor(engine, Sampling(min_tokens=50)),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=3, max_output_tokens=16, max_model_len=512),
        )
    )
    sampling = engine.calls[0].sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (16, 16)

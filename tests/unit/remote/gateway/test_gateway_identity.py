"""An app that plays as `run_episode` does gets the same episode through the gateway, token for token.

The app here is thirty lines of its own: it keeps its messages as a client does, without reasoning and with ids of tool
calls that it made up, and knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeded_engine import Pick, SeededEngine, any_of

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.engine.base import Engine
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.env.registry import make
from gspo_gym.env.session import EnvSession
from gspo_gym.errors import ContextOverflowError
from gspo_gym.policy.load import load_policy, tiny_tokenizer
from gspo_gym.remote.gateway.capture import CapturedCall, ChatCall
from gspo_gym.remote.gateway.capture_build import CaptureBuild, build_trajectory_parts
from gspo_gym.remote.gateway.session import Gateway, GatewaySession, GatewaySessionSettings
from gspo_gym.rollout.actors import EngineActor
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.types import Message, ParseStatus, Sampling, Segment, StepResult, Task, Trajectory, Turn

QWEN3 = (Path(__file__).parents[2] / "chat/templates/qwen3.jinja").read_text()
SAMPLING = Sampling(temperature=0.8, top_p=0.9)


@dataclasses.dataclass
class Game:
    """What is played, by which engine, under which limits."""

    task: Task
    tokenizer: Any
    engine: Engine
    max_turns: int = 6
    max_output_tokens: int = 24
    max_model_len: int = 1024
    sampling_seed: int = 11

    def make_env(self, task: Task) -> Any:
        return make(task.env_id, style="terse")  # texts for the contexts below


async def in_process(game: Game) -> Trajectory:
    return await run_episode(
        EpisodeRequest("g0/0", game.task, game.sampling_seed),
        make_env=game.make_env,
        act=EngineActor(game.engine, SAMPLING),
        renderers=RendererCache(game.tokenizer),
        limits=EpisodeLimits(
            max_turns=game.max_turns,
            max_output_tokens=game.max_output_tokens,
            max_model_len=game.max_model_len,
            step_timeout_seconds=30.0,
        ),
    )


async def through_the_gateway(game: Game) -> CaptureBuild:
    gateway = Gateway(game.engine, game.tokenizer)
    session = gateway.open_session(
        GatewaySessionSettings(
            name="g0/0/0",
            sampling_seed=game.sampling_seed,
            max_output_tokens=game.max_output_tokens,
            max_model_len=game.max_model_len,
            sampling=SAMPLING,
        )
    )
    env = EnvSession(game.make_env(game.task), env_id=game.task.env_id)
    try:
        await play(env, session, game)
    finally:
        await env.close()
    return build_trajectory_parts(await session.freeze())


async def play(env: EnvSession, session: GatewaySession, game: Game) -> None:
    """The app's own loop."""
    names = (f"call-{number:04x}" for number in itertools.count(4096))
    result = await env.reset(game.task.seed)
    messages = list(result.messages)
    for _ in range(game.max_turns):
        try:
            call = await session.chat(ChatCall(tuple(messages), env.tool_schemas))
        except ContextOverflowError:
            return
        result = await answer_to(env, call)
        messages += renamed(as_a_client_keeps_it(call), result, names)
        if result.done:
            return


async def answer_to(env: EnvSession, call: CapturedCall) -> StepResult:
    if call.error is not None:
        return await env.invalid_action(call.error)
    return await env.step(call.answer)


def as_a_client_keeps_it(call: CapturedCall) -> Message:
    return dataclasses.replace(call.answer, content=call.answer.content.strip(), reasoning_content=None)


def renamed(answer: Message, result: StepResult, names: Any) -> list[Message]:
    """The answer and what came back, under ids that the client gave to the calls."""
    ids = {call.id: next(names) for call in answer.tool_calls}
    calls = tuple(dataclasses.replace(call, id=ids[call.id]) for call in answer.tool_calls)
    answers = [
        dataclasses.replace(m, tool_call_id=ids.get(m.tool_call_id or "", m.tool_call_id)) for m in result.messages
    ]
    return [dataclasses.replace(answer, tool_calls=calls), *answers]


def columns(segment: Segment) -> list[list[Any]]:
    names = ("token_ids", "action_mask", "rollout_logprobs", "turn_index", "weight_version")
    return [np.asarray(getattr(segment, name)).tolist() for name in names]


def unscored(turn: Turn) -> Turn:
    return dataclasses.replace(turn, reward=None, reward_terms={}, events=())


def assert_same(build: CaptureBuild, episode: Trajectory) -> None:
    assert [columns(segment) for segment in build.segments] == [columns(segment) for segment in episode.segments]
    assert list(build.turns) == [unscored(turn) for turn in episode.turns]
    # What the environment said last was never shown to the model, so the gateway cannot know it.
    assert build.messages == episode.messages[: len(build.messages)]
    assert {message.role for message in episode.messages[len(build.messages) :]} <= {"user", "tool"}
    assert build.trained_fraction == 1.0


async def both(game: Game) -> tuple[CaptureBuild, Trajectory]:
    return await through_the_gateway(game), await in_process(game)


def seeded(env_id: str, pick: Pick, *, seed: int = 3, template: str | None = None, **limits: Any) -> Game:
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    engine = SeededEngine(tokenizer, pick, max_model_len=limits.get("max_model_len", 1024))
    return Game(Task(env_id, seed), tokenizer, engine, **limits)


@pytest.mark.parametrize("seed", range(3))
def test_a_game_in_text_is_the_same_also_with_turns_cut_off_and_unreadable(seed: int) -> None:
    texts = ("50", " 70 ", "<think>\nhm\n</think>\n\n90", "<think>\nnever ends", "a long guess of fifty or so", "30")
    build, episode = asyncio.run(both(seeded("gspo_gym/GuessNumber-v0", any_of(*texts), seed=seed, sampling_seed=seed)))
    assert_same(build, episode)
    assert len(episode.turns) > 1


def test_cases_that_differ_are_really_met() -> None:
    texts = ("<think>\nhm\n</think>\n\n90", "<think>\nno end", "a very long guess of fifty or so")
    build, episode = asyncio.run(both(seeded("gspo_gym/GuessNumber-v0", any_of(*texts), max_turns=12)))
    assert_same(build, episode)
    assert {turn.parse for turn in build.turns} == {ParseStatus.OK, ParseStatus.BAD_REASONING}
    assert {turn.finish_reason.value for turn in build.turns} == {"stop", "length"}


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def test_a_game_with_tools_is_the_same_also_with_bad_calls_and_several_at_once() -> None:
    tables = CALL % ("list_tables", "{}")
    query = CALL % ("query", '{"sql": "select 1.0"}')
    texts = (tables, f"{tables}\n{query}", f"Let me see.\n{query}", "<tool_call>\n{oops}\n</tool_call>", "I say so.")
    game = seeded("gspo_gym/SqlAnalyst-v0", any_of(*texts), max_turns=10, max_output_tokens=200, max_model_len=4000)
    build, episode = asyncio.run(both(game))
    assert_same(build, episode)
    assert ParseStatus.BAD_TOOL_CALL in {turn.parse for turn in build.turns}
    assert max(len(message.tool_calls) for message in build.messages) == 2


def test_a_template_that_strips_reasoning_begins_new_segments_at_the_same_turns() -> None:
    texts = ("<think>\nhm\n</think>\n\n90", "50", "<think>\nwell\n</think>\n\n70")
    game = seeded("gspo_gym/GuessNumber-v0", any_of(*texts), template=QWEN3, max_turns=8)
    build, episode = asyncio.run(both(game))
    assert_same(build, episode)
    assert 1 < len(build.segments) < len(build.turns)
    assert {use.kind for use in build.uses} == {"root", "extends", "rewrites"}


def test_the_context_ends_at_the_same_turn() -> None:
    build, episode = asyncio.run(
        both(seeded("gspo_gym/GuessNumber-v0", any_of("50", " 70"), max_turns=50, max_model_len=140))
    )
    assert episode.outcome.value == "context_overflow"
    assert [use.kind for use in build.uses][-1] == "failed"
    assert build.counts == {"trained": len(episode.turns), "failed": 1}
    assert_same(build, episode)


def test_a_local_model_is_sampled_the_same() -> None:
    policy = load_policy("tiny:qwen3-64@0")

    async def play_both() -> list[tuple[CaptureBuild, Trajectory]]:
        engine = LocalEngine(policy.model, max_model_len=1024)
        games = [
            Game(
                Task("gspo_gym/GuessNumber-v0", seed), policy.tokenizer, engine, max_output_tokens=6, sampling_seed=seed
            )
            for seed in range(4)
        ]
        pairs = [await both(game) for game in games]
        await engine.close()
        return pairs

    for build, episode in asyncio.run(play_both()):
        assert [segment.token_ids.tolist() for segment in build.segments] == [
            segment.token_ids.tolist() for segment in episode.segments
        ]
        for ours, theirs in zip(build.segments, episode.segments, strict=True):
            # The shape of a batch changes a float32 logit by 1e-6, so logprobs agree to rounding only.
            np.testing.assert_allclose(ours.rollout_logprobs, theirs.rollout_logprobs, atol=1e-5)
        assert list(build.turns) == [unscored(turn) for turn in episode.turns]

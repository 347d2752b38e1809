"""An answer that the caller's own stop string cut, over every engine: a stop, up to the learner's rewards.

No engine is asked for stop strings (`SamplingParams` has none): the gateway cuts for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hash_model
import pytest
from faulty_server import MAX_MODEL_LEN, MODEL, FaultyServer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gspo_gym.engine.base import Engine
from gspo_gym.engine.endpoint.http import HttpEngine, HttpSettings
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.credit import returns_of
from gspo_gym.learning.settings import AdvantageSettings, RewardSettings
from gspo_gym.policy.load import load_policy
from gspo_gym.remote.gateway.capture import CapturedCall, ChatCall
from gspo_gym.remote.gateway.capture_build import build_trajectory_parts
from gspo_gym.remote.gateway.session import Gateway, GatewaySessionSettings
from gspo_gym.rollout.summary import rollout_metrics
from gspo_gym.types import FinishReason, Message, Outcome, ParseStatus, Task, Trajectory, TrajectoryGroup

MAX_TOKENS = 24
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0]|upper }}{{ m.content }}/{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def letters() -> Any:
    """The 64 letters of `hash_model` as a tokenizer of transformers; the last one ends a message."""
    words = models.WordLevel({letter: number for number, letter in enumerate(hash_model.LETTERS)}, unk_token="A")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="/")
    wrapped.chat_template = TEMPLATE
    return wrapped


@dataclass(frozen=True)
class Subject:
    engine: Engine
    tokenizer: Any


@asynccontextmanager
async def _scripted() -> AsyncIterator[Subject]:
    yield Subject(ScriptedEngine(lambda tokens, turn: [*range(MAX_TOKENS)]), letters())


@asynccontextmanager
async def _local() -> AsyncIterator[Subject]:
    policy = load_policy("tiny:qwen3-64", seed=1)
    engine = LocalEngine(policy.model, max_model_len=256)
    yield Subject(engine, policy.tokenizer)
    await engine.close()


@asynccontextmanager
async def _http(dialect: Any) -> AsyncIterator[Subject]:
    with FaultyServer(dialect=dialect) as server:
        settings = HttpSettings(server.base_url, MODEL, max_model_len=MAX_MODEL_LEN, vocab_size=hash_model.VOCAB_SIZE)
        engine = await HttpEngine.start(settings, hash_model.LetterTokenizer())
        yield Subject(engine, letters())
        await engine.close()


ENGINES: dict[str, Callable[[Path], AbstractAsyncContextManager[Subject]]] = {
    "scripted": lambda _: _scripted(),
    "local": lambda _: _local(),
    "http, vLLM's dialect": lambda _: _http("vllm"),
    "http, SGLang's dialect": lambda _: _http("sglang"),
    "http, text": lambda _: _http("text"),
}


async def ask(subject: Subject, stop: tuple[str, ...], seed: int = 0) -> tuple[CapturedCall, Trajectory]:
    """One call of one episode, and the episode with a return of 1."""
    settings = GatewaySessionSettings(f"a{seed}", sampling_seed=seed, max_output_tokens=MAX_TOKENS, max_model_len=100)
    session = Gateway(subject.engine, subject.tokenizer).open_session(settings)
    call = await session.chat(ChatCall((Message("user", "Hi"),), stop=stop))
    parts = build_trajectory_parts(await session.freeze())
    (turn,) = parts.turns
    trajectory = Trajectory(
        trajectory_id="t",
        attempt=0,
        task=Task("quiz", 0),
        sampling_seed=seed,
        segments=parts.segments,
        turns=(replace(turn, reward=1.0),),
        messages=parts.messages,
        outcome=Outcome.TERMINATED,
    )
    return call, trajectory


async def long_answer(subject: Subject) -> tuple[CapturedCall, Trajectory, int]:
    """The first answer that max_tokens ends, and the seed that gives it."""
    for seed in range(100):
        call, trajectory = await ask(subject, (), seed)
        if call.finish_reason == "length":
            return call, trajectory, seed
    raise AssertionError("expected one of 100 answers to be long")


@pytest.mark.parametrize("name", ENGINES)
def test_an_answer_cut_at_the_callers_stop_string_is_no_overlong_one(name: str, tmp_path: Path) -> None:
    """The stop string is what the model says at a third of an answer that max_tokens ends; the seed is the same."""

    async def check() -> None:
        async with ENGINES[name](tmp_path) as subject:
            whole, long, seed = await long_answer(subject)
            text = whole.answer.content
            assert long.turns[0].finish_reason is FinishReason.LENGTH
            stop = text[len(text) // 3 :][:3]
            cut, trajectory = await ask(subject, (stop,), seed)
            assert cut.answer.content == text[: text.index(stop)]
            assert (cut.finish_reason, cut.completion.finish_reason) == ("stop", FinishReason.STOP)
            assert 0 < cut.num_sampled_tokens < whole.num_sampled_tokens == MAX_TOKENS
            assert trajectory.turns[0].finish_reason is FinishReason.STOP
            penalty = RewardSettings(overlong=0.5)
            assert [returns_of(t, rewards=penalty).episode_return for t in (long, trajectory)] == [0.5, 1.0]
            groups = [TrajectoryGroup(t.task, (t,), 1) for t in (long, trajectory)]
            built = build_batch(groups, AdvantageSettings(baseline="batch"), rewards=RewardSettings(overlong="mask"))
            assert built.batch is not None
            assert built.batch.is_masked.tolist() == [True, False]
            metrics = [rollout_metrics([group], seconds=1.0) for group in groups]
            assert [m["rollout/max_output_tokens_fraction"] for m in metrics] == [1.0, 0.0]

    asyncio.run(check())


def test_a_stop_string_that_ends_with_the_last_token_that_may_be_sampled_is_a_stop() -> None:
    """The engine says LENGTH of its 24 tokens A..X; "WX" is said with the last of them."""

    async def check() -> None:
        async with _scripted() as subject:
            cut, trajectory = await ask(subject, ("WX",))
            assert (cut.num_sampled_tokens, cut.finish_reason) == (MAX_TOKENS, "stop")
            assert trajectory.turns[0].finish_reason is FinishReason.STOP

    asyncio.run(check())


def test_a_block_that_the_callers_stop_string_leaves_open_was_not_cut_off_by_max_tokens() -> None:
    async def check() -> None:
        policy = load_policy("tiny:qwen3-64", seed=1)
        ids = policy.tokenizer.encode("<think>\nhm. so", add_special_tokens=False)
        subject = Subject(ScriptedEngine(lambda tokens, turn: ids), policy.tokenizer)
        _, cut_off = await ask(subject, ())
        _, stopped = await ask(subject, (".",))
        assert [t.turns[0].parse for t in (cut_off, stopped)] == [ParseStatus.TRUNCATED, ParseStatus.BAD_REASONING]

    asyncio.run(check())

"""Answers get lost on the way, the engine fails, sessions end under way: every logical call of an agent that knows only
the `openai` package is one turn, with the tokens that a session without trouble samples.

Clients that lose patience: test_gateway_retries.py. What goes wrong follows from seeds and counts, never from time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from seeded_engine import SeededEngine, any_of
from served_gateway import SETTINGS, TOKENIZER, Served, run, served

from gspo_gym.engine.base import SamplingParams
from gspo_gym.errors import EngineError
from gspo_gym.remote.gateway.capture import ChatCall
from gspo_gym.remote.gateway.capture_build import CaptureBuild, build_trajectory_parts
from gspo_gym.remote.gateway.session import Gateway, GatewaySession
from gspo_gym.remote.guard import App
from gspo_gym.seeding import child_seed, generator
from gspo_gym.types import Completion, Message

NUM_CALLS = 2
CONCURRENCY = 32
NUM_ROLLOUTS = 150
MAX_RETRIES = 4
WORDS = any_of("red", "green", "blue", "a little yellow", "no colour at all")


class FailingEngine(SeededEngine):
    """Some calls fail the first time; counts what it sampled, by seed."""

    def __init__(self, *, failing_fraction: float = 0.0) -> None:
        super().__init__(TOKENIZER, WORDS, max_model_len=SETTINGS.max_model_len)
        self._failing_fraction = failing_fraction
        self.failed: set[int] = set()
        self.num_sampled: Counter[int] = Counter()

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, **rest: Any) -> Completion:  # type: ignore[override]
        if generator(sampling.seed, "trouble").random() < self._failing_fraction and sampling.seed not in self.failed:
            self.failed.add(sampling.seed)
            raise EngineError("lost its mind")
        self.num_sampled[sampling.seed] += 1
        return await super().generate(prompt, sampling, **rest)


@dataclass
class LosesAnswers:
    """Before the gateway: of the answers to first attempts, every third is lost with its connection."""

    app: App
    num_answers: int = 0
    num_lost: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and headers.get(b"x-stainless-retry-count") == b"0":
            self.num_answers += 1
            if self.num_answers % 3 == 0:
                self.num_lost += 1
                await self.app(scope, receive, _lose)
                raise ConnectionResetError("lost on the way")
        await self.app(scope, receive, send)


async def _lose(message: Any) -> None:
    """The connection broke before anything could be sent."""
    raise OSError("nobody there")


def seed_of(rollout: int) -> int:
    return child_seed(0, "rollout", rollout)


async def play(client: openai.AsyncOpenAI, rollout: int) -> None:
    """The agent: two calls, the second on the answer to the first."""
    messages: list[Any] = [{"role": "user", "content": f"Rollout {rollout}. Which colour?"}]
    for _ in range(NUM_CALLS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "Another one?"}]


async def undisturbed(gateway: Gateway, rollout: int) -> CaptureBuild:
    """The same rollout without HTTP."""
    session = gateway.open_session(replace(SETTINGS, sampling_seed=seed_of(rollout)))
    messages = [Message("user", f"Rollout {rollout}. Which colour?")]
    for _ in range(NUM_CALLS):
        call = await session.chat(ChatCall(tuple(messages)))
        messages += [call.answer, Message("user", "Another one?")]
    return build_trajectory_parts(await session.freeze())


async def rollouts(gateway: Served) -> list[CaptureBuild]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(rollout: int) -> CaptureBuild:
        async with places:
            session = gateway.open(name=f"rollout/{rollout}", sampling_seed=seed_of(rollout))
            await play(gateway.client(session, max_retries=MAX_RETRIES), rollout)
            return build_trajectory_parts(await session.freeze())

    return await asyncio.gather(*(one(rollout) for rollout in range(NUM_ROLLOUTS)))


async def assert_undisturbed(builds: list[CaptureBuild]) -> None:
    calm = Gateway(SeededEngine(TOKENIZER, WORDS, max_model_len=SETTINGS.max_model_len), TOKENIZER)
    for rollout, build in enumerate(builds):
        expected = await undisturbed(calm, rollout)
        assert len(build.turns) == NUM_CALLS
        [segment], [right] = build.segments, expected.segments
        assert segment.token_ids.tolist() == right.token_ids.tolist()
        assert segment.action_mask.tolist() == right.action_mask.tolist()
        assert segment.rollout_logprobs.tolist() == right.rollout_logprobs.tolist()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package waits half a second and more between tries; how long is not what is shown here."""
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.02)
    monkeypatch.setattr(openai._base_client, "MAX_RETRY_DELAY", 0.1)


def test_an_answer_that_was_lost_on_the_way_is_given_again() -> None:
    engine = FailingEngine()
    network: list[LosesAnswers] = []

    def wrap(app: App) -> App:
        network.append(LosesAnswers(app))
        return network[0]

    async def test() -> None:
        async with served(engine, wrap=wrap) as gateway:
            builds = await rollouts(gateway)
            assert {tuple(build.counts.items()) for build in builds} == {(("trained", NUM_CALLS),)}
        await assert_undisturbed(builds)

    run(test)
    assert network[0].num_lost == 100  # of 300 first attempts
    assert set(engine.num_sampled.values()) == {1}


@pytest.mark.slow
def test_an_engine_that_fails_costs_an_attempt_and_no_token() -> None:
    engine = FailingEngine(failing_fraction=0.2)

    async def test() -> None:
        async with served(engine) as gateway:
            builds = await rollouts(gateway)
            failed = sum(build.counts.get("failed", 0) for build in builds)
            assert failed == len(engine.failed)
            assert sum(build.counts["trained"] for build in builds) == NUM_ROLLOUTS * NUM_CALLS
        await assert_undisturbed(builds)

    run(test)
    assert 30 < len(engine.failed) < 90  # of 300, at 20%
    assert set(engine.num_sampled.values()) == {1}


@pytest.mark.parametrize("freezes", [True, False], ids=["frozen", "aborted"])
def test_late_requests_and_late_answers_change_nothing_once_a_session_has_ended(freezes: bool) -> None:
    engine = SeededEngine(TOKENIZER, WORDS, max_model_len=SETTINGS.max_model_len)
    engine.waits = {number: asyncio.Event() for number in range(1, 40)}

    async def late(session: GatewaySession, client: openai.AsyncOpenAI, ask: Callable[[], Awaitable[Any]]) -> str:
        try:
            await ask()
        except openai.APIStatusError as error:
            return str(error.status_code)
        return "answered"

    async def test() -> None:
        async with served(engine) as gateway:
            session = gateway.open()
            client = gateway.client(session)
            create = client.chat.completions.create
            await create(model="policy", messages=[{"role": "user", "content": "first"}])
            in_flight = [
                asyncio.create_task(
                    late(session, client, lambda i=i: create(model="p", messages=[{"role": "user", "content": f"{i}"}]))
                )
                for i in range(20)
            ]
            for _ in range(21):
                await engine.arrived.get()
            capture = await session.freeze() if freezes else await session.abort()
            for event in engine.waits.values():
                event.set()
            assert Counter(await asyncio.gather(*in_flight)) == {"409": 20}
            after = await late(session, client, lambda: create(model="p", messages=[{"role": "user", "content": "x"}]))
            assert after == "409"
            if capture is not None:
                build = build_trajectory_parts(capture)
                assert build.counts == {"trained": 1, "not awaited": 20}  # still open when the session froze
        assert engine.ended == [SETTINGS.name]

    run(test)

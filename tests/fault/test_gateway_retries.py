"""Clients that give up on answers and ask again, by OpenAI's own package: one committed turn for each logical call."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections import Counter
from typing import Any

import anyio
import numpy as np
import openai
import served_gateway as gw

from gspo_gym.engine.scripted import Latency, ScriptedEngine
from gspo_gym.remote.gateway.app import openai_base_url
from gspo_gym.remote.gateway.capture_build import build_trajectory_parts

NUM_ROLLOUTS = 160
TIMEOUT_PROB = 0.3
MAX_TIMEOUTS = 3  # of one logical call
MAX_RETRIES = MAX_TIMEOUTS + 3  # a busy machine breaks an idle connection now and then
LONGEST_SECONDS = 0.02  # of a generation, and of a client's patience where it is short
_ASKED = re.compile(r"rollout (\d+), question (\d+)")
# openai 2.x stands on httpx, 3.x on httpx2: the same classes under two names.
HTTPX: Any = importlib.import_module("httpx" if openai.__version__.startswith("2.") else "httpx2")


def question(rollout: int, call: int) -> str:
    return f"rollout {rollout}, question {call}?"


def answer(rollout: int, call: int) -> str:
    return f"answer {rollout}.{call}"


class ImpatientTransport(HTTPX.AsyncBaseTransport):  # type: ignore[misc]  # Any
    """Gives up on three in ten attempts: some time before the answer is there, or when it has just come.

    What is given up is closed, as a client's timeout closes it; the openai package sees its transport's ReadTimeout.
    """

    def __init__(self) -> None:
        limits = HTTPX.Limits(max_connections=None, max_keepalive_connections=64)
        self._inner = HTTPX.AsyncHTTPTransport(limits=limits)
        self.num_given_up = Counter[str]()

    async def handle_async_request(self, request: Any) -> Any:
        rollout, call = map(int, _ASKED.findall(request.content.decode())[-1])
        attempt = int(request.headers["x-stainless-retry-count"])
        draw = np.random.default_rng([rollout, call, attempt])
        response = None
        if draw.random() >= TIMEOUT_PROB or attempt >= MAX_TIMEOUTS:
            return await self._inner.handle_async_request(request)
        if draw.random() < 0.5:
            response = await self._inner.handle_async_request(request)
            await response.aread()
            self.num_given_up["after the answer"] += 1
        else:
            # Ends it as httpx's own timeouts do. A bare `task.cancel()` goes through httpcore's shield (1.0.9, 2.16.2)
            # while the pool closes surplus connections: those after the one being closed stay open, uncollected.
            with anyio.move_on_after(draw.random() * LONGEST_SECONDS) as patience:
                response = await self._inner.handle_async_request(request)
            if patience.cancelled_caught:
                self.num_given_up["before the answer"] += 1
        if response is not None:
            await response.aclose()
        raise HTTPX.ReadTimeout("the client's patience is over", request=request)

    async def aclose(self) -> None:
        await self._inner.aclose()


def slow_engine() -> ScriptedEngine:
    """Answers the last question of the prompt, after 0 to 20 ms."""

    def reply(prompt: tuple[int, ...], _turn: int) -> list[int]:
        rollout, call = map(int, _ASKED.findall(gw.TOKENIZER.decode(list(prompt)))[-1])
        return gw.ids_of(answer(rollout, call))

    half = LONGEST_SECONDS / 2
    return ScriptedEngine(reply, latency=Latency(per_call_seconds=half, jitter_fraction=1.0, seed=1))


def num_calls_of(rollout: int) -> int:
    return 2 if rollout % 4 == 0 else 1


def test_many_rollouts_whose_clients_time_out_commit_one_turn_for_each_call() -> None:
    engine, transport = slow_engine(), ImpatientTransport()
    num_logical = sum(map(num_calls_of, range(NUM_ROLLOUTS)))

    async def play(served: gw.Served, client: openai.AsyncOpenAI, rollout: int, room: asyncio.Semaphore) -> None:
        async with room:
            session = served.open(name=f"rollout-{rollout}")
            mine = client.with_options(base_url=openai_base_url(served.url, session.id))
            messages: list[Any] = []
            for call in range(num_calls_of(rollout)):
                messages += gw.user(question(rollout, call))
                completion = await mine.chat.completions.create(model="policy", messages=messages)
                assert completion.choices[0].message.content == answer(rollout, call)
                messages.append(completion.choices[0].message.model_dump())
            capture = await session.freeze()
            assert [c.answer.content for c in capture.calls] == [
                answer(rollout, call) for call in range(num_calls_of(rollout))
            ]
            assert not capture.failed
            build = build_trajectory_parts(capture)
            assert build.counts == {"trained": num_calls_of(rollout)}
            assert (len(build.segments), build.trained_fraction) == (1, 1.0)

    async def check() -> None:
        http = openai.DefaultAsyncHttpxClient(transport=transport, trust_env=False)
        async with (
            gw.served(engine) as served,
            openai.AsyncOpenAI(
                base_url=served.url, api_key="none", max_retries=MAX_RETRIES, timeout=300.0, http_client=http
            ) as client,
        ):
            room = asyncio.Semaphore(128)
            async with asyncio.TaskGroup() as group:
                for rollout in range(NUM_ROLLOUTS):
                    group.create_task(play(served, client, rollout, room))

    gw.run(check, seconds=300.0)
    assert len(engine.calls) == num_logical == 200  # nothing was sampled twice
    # 200 first attempts and their retries, of which three in ten are given up: 200 * (0.3 + 0.09 + 0.027) = 83
    assert 50 < transport.num_given_up.total() < 120
    assert min(transport.num_given_up.values()) > 15  # both before the answer and after it


def test_the_marks_by_which_retries_are_known_are_those_of_the_package_in_use() -> None:
    seen: list[tuple[str, bytes]] = []

    class Failing(HTTPX.AsyncBaseTransport):  # type: ignore[misc]  # Any
        async def handle_async_request(self, request: Any) -> Any:
            seen.append((request.headers["x-stainless-retry-count"], request.content))
            return HTTPX.Response(503, json={}, headers={"retry-after-ms": "1"}, request=request)

    async def check() -> None:
        http = openai.DefaultAsyncHttpxClient(transport=Failing())
        async with openai.AsyncOpenAI(
            base_url="http://x/v1", api_key="none", max_retries=2, http_client=http
        ) as client:
            try:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi."}])
            except openai.InternalServerError:
                return
        raise AssertionError("expected the package to give up")

    gw.run(check)
    assert [count for count, _ in seen] == ["0", "1", "2"]
    assert len({content for _, content in seen}) == 1
    assert json.loads(seen[0][1])["messages"] == [{"role": "user", "content": "Hi."}]

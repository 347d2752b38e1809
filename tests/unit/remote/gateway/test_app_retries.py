"""Which requests are one call asked again, over real HTTP: who gets the earlier answer, who waits, who a new one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
import served_gateway as gw

from gspo_gym.engine.scripted import Failures, Latency, ScriptedEngine
from gspo_gym.remote.gateway.capture import Untrained
from gspo_gym.remote.gateway.capture_build import build_trajectory_parts
from gspo_gym.remote.gateway.replay import MAX_REMEMBERED, Asked, KeyReuseError, Replays, Reply, digest_of
from gspo_gym.remote.gateway.session import GatewaySession

HELLO = {"messages": gw.user("Hello.")}
RETRY = {"x-stainless-retry-count": "1"}
FIRST = {"x-stainless-retry-count": "0"}


class Slow:
    """An engine whose calls wait to be let go, and answer 0, 1, 2, ... in the order in which they began."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Event] = []
        self._has_begun = asyncio.Condition()
        answers = [gw.ids_of(str(number)) for number in range(9)]
        self.engine = ScriptedEngine(answers, latency=Latency(1.0), sleep=self._wait)

    async def _wait(self, _seconds: float) -> None:
        event = asyncio.Event()
        async with self._has_begun:
            self._waiting.append(event)
            self._has_begun.notify_all()
        await event.wait()

    async def begun(self, count: int) -> None:
        """Return when so many calls have begun."""
        async with self._has_begun:
            await self._has_begun.wait_for(lambda: len(self._waiting) >= count)

    def let_go(self) -> None:
        """Answer all calls that wait."""
        for event in self._waiting:
            event.set()


async def ask_and_hang_up(served: gw.Served, session: GatewaySession, body: Any, slow: Slow) -> None:
    """A client that gives up while its answer is being sampled."""
    port = int(served.url.rsplit(":", 1)[1])
    content = json.dumps(body, separators=(",", ":")).encode()  # as httpx writes it
    head = f"POST /t/{session.id}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + content)
    await slow.begun(1)
    writer.close()
    await writer.wait_closed()
    await served.http.get(f"{served.url}/health")  # the server sees the end of the one before this


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_an_answer_that_reached_nobody_is_given_to_who_asks_the_same_again() -> None:
    async def check() -> None:
        slow = Slow()
        async with gw.served(slow.engine) as served:
            session = served.open()
            await ask_and_hang_up(served, session, HELLO, slow)
            slow.let_go()
            await served.http.get(f"{served.url}/health")
            assert said(await served.post(session, HELLO)) == "0"
            assert len(slow.engine.calls) == 1
            (use,) = build_trajectory_parts(await session.freeze()).uses
            assert use.untrained is None

    gw.run(check)


def test_an_answer_that_reached_nobody_and_is_never_asked_for_again_is_not_trained_on() -> None:
    async def check() -> None:
        slow = Slow()
        async with gw.served(slow.engine) as served:
            session = served.open()
            await ask_and_hang_up(served, session, HELLO, slow)
            slow.let_go()
            await served.http.get(f"{served.url}/health")
            (use,) = build_trajectory_parts(await session.freeze()).uses
            assert use.untrained is Untrained.UNDELIVERED

    gw.run(check)


def test_a_retry_waits_for_the_call_that_is_being_answered() -> None:
    async def check() -> None:
        slow = Slow()
        async with gw.served(slow.engine) as served:
            session = served.open()
            first = asyncio.create_task(served.post(session, HELLO, headers=FIRST))
            await slow.begun(1)
            again = [asyncio.create_task(served.post(session, HELLO, headers=RETRY)) for _ in range(3)]
            await gw.until(lambda: served.app.replays_of(session).num_coalesced == 3)
            slow.let_go()
            answers = [await task for task in (first, *again)]
            assert len({answer.content for answer in answers}) == 1
            assert len(slow.engine.calls) == 1

    gw.run(check)


def test_a_marked_retry_gets_the_same_bytes_even_if_the_first_answer_was_delivered() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("a", "b")) as served:
            session = served.open()
            for extra in ({}, {"stream": True}):
                first = await served.post(session, HELLO | extra, headers=FIRST)
                again = await served.post(session, HELLO | extra, headers=RETRY)
                assert again.content == first.content
                assert again.headers["content-type"] == first.headers["content-type"]
            assert len((await session.freeze()).calls) == 2
            assert served.app.replays_of(session).num_replayed == 2

    gw.run(check)


def test_the_same_question_unmarked_after_its_answer_is_a_new_call() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("a", "b", "c")) as served:
            session = served.open()
            answers = [said(await served.post(session, HELLO, headers=headers)) for headers in ({}, {}, FIRST)]
            assert answers == ["a", "b", "c"]
            uses = build_trajectory_parts(await session.freeze()).uses
            assert [use.untrained for use in uses] == [None] * 3  # three draws from the policy, all delivered

    gw.run(check)


@pytest.mark.parametrize("headers", [FIRST, {}], ids=["marked", "unmarked"])
def test_two_that_wait_for_the_same_at_once_are_two_calls(headers: dict[str, str]) -> None:
    async def check() -> None:
        slow = Slow()
        async with gw.served(slow.engine) as served:
            session = served.open()
            tasks = [asyncio.create_task(served.post(session, HELLO, headers=headers)) for _ in range(2)]
            await slow.begun(2)
            slow.let_go()
            assert sorted([said(await task) for task in tasks]) == ["0", "1"]
            uses = build_trajectory_parts(await session.freeze()).uses
            assert [use.untrained for use in uses] == [None, None]

    gw.run(check)


def test_clients_that_ask_the_same_at_once_have_an_answer_each_also_from_a_fast_engine() -> None:
    """A connection whose answer is just sent looks like one whose client is gone."""

    async def check() -> None:
        engine = ScriptedEngine([gw.ids_of("5")] * 120)
        async with gw.served(engine) as served:
            session = served.open()
            for _ in range(20):
                answers = await asyncio.gather(*(served.post(session, HELLO) for _ in range(6)))
                assert [said(answer) for answer in answers] == ["5"] * 6
            assert len((await session.freeze()).calls) == 120
            assert served.app.replays_of(session).num_replayed == 0

    gw.run(check)


def test_a_client_that_is_answered_while_it_is_asked_whether_it_is_there_has_not_gone() -> None:
    async def check() -> None:
        replays, goes_on, first = Replays(), asyncio.Event(), asked("same", retry_count=0)

        async def slow() -> Reply:
            await goes_on.wait()
            return Reply(200, "x", b"first")

        async def work() -> Reply:
            return Reply(200, "x", b"second")

        async def answered_meanwhile() -> bool:
            """As uvicorn says it: an answer that has been sent is the end of a connection."""
            goes_on.set()
            exchange, _ = await answering
            exchange.finish(first, is_delivered=True)
            return True

        first = replace(first, has_gone=answered_meanwhile)
        answering = asyncio.create_task(replays.answer(first, slow))
        await asyncio.sleep(0)
        assert (await replays.answer(asked("same", retry_count=0), work))[1].body == b"second"

    gw.run(check)


def test_a_first_attempt_after_one_whose_client_hung_up_is_that_one() -> None:
    async def check() -> None:
        slow = Slow()
        async with gw.served(slow.engine) as served:
            session = served.open()
            await ask_and_hang_up(served, session, HELLO, slow)
            again = asyncio.create_task(served.post(session, HELLO, headers=FIRST))
            await gw.until(lambda: served.app.replays_of(session).num_coalesced == 1)
            slow.let_go()
            assert said(await again) == "0"
            assert len(slow.engine.calls) == 1

    gw.run(check)


def test_an_idempotency_key_is_one_call_and_has_one_body() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("a", "b", "c")) as served:
            session = served.open()
            one, other = ({"idempotency-key": key} for key in ("one", "other"))
            first, again, third = [await served.post(session, HELLO, headers=h) for h in (one, one, other)]
            assert first.content == again.content != third.content
            reused = await served.post(session, HELLO | {"max_tokens": 3}, headers=one)
            assert (reused.status_code, reused.json()["error"]["code"]) == (400, "idempotency_key_reused")
            elsewhere = await served.post(served.open(name="other"), HELLO, headers=one)
            assert said(elsewhere) == "c"  # keys are a session's own
            assert len((await session.freeze()).calls) == 2

    gw.run(check)


def test_a_failure_is_not_replayed() -> None:
    async def check() -> None:
        engine = ScriptedEngine([gw.ids_of("a"), gw.ids_of("b"), gw.ids_of("c")], failures=Failures(every=2))
        async with gw.served(engine) as served:
            session = served.open()
            assert said(await served.post(session, HELLO, headers=FIRST)) == "a"
            other = HELLO | {"max_tokens": 9}
            assert (await served.post(session, other, headers=FIRST)).status_code == 503
            assert said(await served.post(session, other, headers=RETRY)) == "c"
            capture = await session.freeze()
            assert [call.index for call in capture.calls] == [0, 2]
            assert [call.kind for call in capture.failed] == ["engine"]

    gw.run(check)


def test_a_retry_of_a_call_that_failed_is_not_given_the_answer_of_another_call_with_the_same_body() -> None:
    """Two calls: the second one's first attempt meets a broken engine, and its retry is sampled anew."""

    async def check() -> None:
        engine = ScriptedEngine([gw.ids_of("a"), gw.ids_of("b"), gw.ids_of("c")], failures=Failures(every=2))
        async with gw.served(engine) as served:
            session = served.open()
            assert said(await served.post(session, HELLO, headers=FIRST)) == "a"
            assert (await served.post(session, HELLO, headers=FIRST)).status_code == 503
            second = await served.post(session, HELLO, headers=RETRY)
            assert said(second) == "c"
            assert (await served.post(session, HELLO, headers=RETRY)).content == second.content
            build = build_trajectory_parts(await session.freeze())
            assert build.counts == {"trained": 2, "failed": 1}

    gw.run(check)


def test_a_forced_call_that_came_out_wrong_is_the_same_to_a_retry() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("nonsense", "more nonsense")) as served:
            session = served.open()
            body = HELLO | {"tools": [gw.LOOK], "tool_choice": "required"}
            first = await served.post(session, body, headers=FIRST)
            again = await served.post(session, body, headers=RETRY)
            assert (first.status_code, again.content) == (422, first.content)
            assert len((await session.freeze()).calls) == 1

    gw.run(check)


def asked(text: str, *, key: str | None = None, retry_count: int | None = 1) -> Asked:
    async def is_here() -> bool:
        return False

    return Asked(digest_of("chat", text.encode()), key, retry_count, is_here)


def test_only_so_many_answers_are_remembered() -> None:
    async def check() -> None:
        replays = Replays()
        number = iter(range(1000))

        async def work() -> Reply:
            return Reply(200, "x", str(next(number)).encode())

        async def ask(text: str) -> bytes:
            return (await replays.answer(asked(text), work))[1].body

        for index in range(MAX_REMEMBERED + 1):
            await ask(str(index))
        assert await ask("1") == b"1"
        assert await ask("0") == b"%d" % (MAX_REMEMBERED + 1)

    gw.run(check)


def test_who_waits_for_a_call_that_breaks_off_is_told_so_and_the_next_one_is_a_new_call() -> None:
    async def check() -> None:
        replays, has_begun, goes_on = Replays(), asyncio.Event(), asyncio.Event()

        async def fail() -> Reply:
            has_begun.set()
            await goes_on.wait()
            raise RuntimeError("broken off")

        async def work() -> Reply:
            return Reply(200, "x", b"fine")

        first = asyncio.create_task(replays.answer(asked("same"), fail))
        await has_begun.wait()
        second = asyncio.create_task(replays.answer(asked("same"), work))
        await gw.until(lambda: replays.num_coalesced == 1)
        goes_on.set()
        for task in (first, second):
            with pytest.raises(RuntimeError, match="broken off"):
                await task
        assert (await replays.answer(asked("same"), work))[1].body == b"fine"

    gw.run(check)


def test_a_key_of_any_length_is_not_kept() -> None:
    async def check() -> None:
        async def work() -> Reply:
            return Reply(200, "x", b"")

        with pytest.raises(KeyReuseError, match="at most 256 characters, got 257"):
            await Replays().answer(asked("x", key="k" * 257), work)

    gw.run(check)

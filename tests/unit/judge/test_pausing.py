"""A judge that is down is waited for by all, asked again by one, with a reason that is told; it goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from scripted_judge import ScriptedJudge, episode, judgement

from gspo_gym.judge.asking import PausingJudge
from gspo_gym.judge.base import JudgeBudgetError, JudgeDownError, JudgeError, Judgement, JudgeRequest, Rubrics

REQUEST = JudgeRequest(episode([1.0]), Rubrics())


class Outage:
    """A clock that only waiting moves, and a judge that is down until a time."""

    def __init__(self, until: float, then: Exception | None = None) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.judge = ScriptedJudge(lambda _: self._answer(until, then))
        self.pausing = PausingJudge(
            self.judge, on_event=lambda *event: self.events.append(event), clock=lambda: self.now, sleep=self._sleep
        )

    def _answer(self, until: float, then: Exception | None) -> Judgement:
        if self.now < until:
            raise JudgeDownError("no connection")
        if then is not None:
            raise then
        return judgement(outcome=1.0)

    async def until(self, seconds: float) -> None:
        """Let others go on until the clock says so."""
        while self.now < seconds:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def test_one_of_many_asks_again_and_all_get_their_scores() -> None:
    outage = Outage(until=300.0)

    async def run() -> list[Judgement]:
        return await asyncio.gather(*(outage.pausing.judge(REQUEST) for _ in range(50)))

    assert len(asyncio.run(run())) == 50
    # 1 + 2 + 4 + ... + 32 = 63 seconds, then 60 at a time: 63, 123, 183, 243, 303
    assert outage.waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    # 50 first calls may all be under way when the judge goes down; then one call a wait; then 49 once more
    assert len(outage.judge.requests) == 50 + 10 + 49


def test_a_pause_has_a_reason_and_an_end_and_is_told_once() -> None:
    outage = Outage(until=6.0)

    async def run() -> None:
        await asyncio.gather(*(outage.pausing.judge(REQUEST) for _ in range(5)))

    asyncio.run(run())
    assert outage.events == [
        ("judge_paused", {"judge": "scripted", "reason": "no connection"}),
        ("judge_resumed", {"judge": "scripted", "seconds": 7.0}),
    ]
    assert outage.pausing.pause_seconds == 7.0


def test_seconds_of_a_pause_that_lasts_are_counted() -> None:
    outage = Outage(until=1e9)

    async def run() -> float:
        task = asyncio.create_task(outage.pausing.judge(REQUEST))
        await outage.until(100)
        seconds = outage.pausing.pause_seconds
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seconds

    assert asyncio.run(run()) >= 100


@pytest.mark.parametrize("error", [JudgeError("half a verdict"), JudgeBudgetError("nothing left")])
def test_an_answer_that_is_no_score_ends_the_pause_all_the_same(error: JudgeError) -> None:
    outage = Outage(until=1.0, then=error)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(outage.pausing.judge(REQUEST))
    assert [kind for kind, _ in outage.events] == ["judge_paused", "judge_resumed"]


def test_when_the_one_who_asks_is_cancelled_the_next_one_asks() -> None:
    outage = Outage(until=20.0)

    async def run() -> list[Any]:
        first = asyncio.create_task(outage.pausing.judge(REQUEST))
        await asyncio.sleep(0)
        others = [asyncio.create_task(outage.pausing.judge(REQUEST)) for _ in range(3)]
        await outage.until(3)
        first.cancel()
        return await asyncio.gather(first, *others, return_exceptions=True)

    cancelled, *answers = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert all(isinstance(answer, Judgement) for answer in answers)


def test_other_errors_are_the_episodes_own() -> None:
    judge = ScriptedJudge(lambda _: (_ for _ in ()).throw(JudgeError("refused")))
    pausing = PausingJudge(judge)
    with pytest.raises(JudgeError, match="refused"):
        asyncio.run(pausing.judge(REQUEST))
    assert pausing.pause_seconds == 0
    asyncio.run(pausing.close())
    assert judge.num_closed == 1

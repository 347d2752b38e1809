"""Signs of life that the driver waits for; `tests/cluster` has real processes."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from gspo_gym.cluster import ray
from gspo_gym.cluster.actors import Actors, _Watch
from gspo_gym.cluster.replica import _reason_of_silence


class Ranks(Actors):
    """Two ranks, of which the second does not answer."""

    def __init__(self) -> None:
        self.num_asked = [0, 0]

    def __len__(self) -> int:
        return 2

    def call_life(self, rank: int) -> int:
        self.num_asked[rank] += 1
        return rank

    def answered(self, call: Any) -> bool:
        return bool(call == 0)


def test_a_rank_is_silent_after_so_many_looks_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    watch = _Watch(ranks, silence_seconds=3.0)
    hour = time.monotonic() + 3600  # the driver itself was paused
    monkeypatch.setattr(time, "monotonic", lambda: hour)
    assert [watch.silent() for _ in range(4)] == [[], [], [], [1]]  # a look a second
    assert ranks.num_asked == [5, 1]


class PausedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps by an hour when it is first asked for the time after `pause`."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


def test_a_replica_is_not_lost_when_the_driver_was_paused_while_it_waited() -> None:
    async def wait(loop: PausedLoop, *, answers: bool) -> str | None:
        answer: asyncio.Future[None] = loop.create_future()
        waiting = asyncio.create_task(_reason_of_silence(_awaited(answer), 0.5, OSError))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loop.ahead += 3600.0
        if answers:
            loop.call_later(0.01, answer.set_result, None)  # what came meanwhile is read after the timers
        return await waiting

    with asyncio.Runner(loop_factory=PausedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, PausedLoop)
        assert runner.run(wait(loop, answers=True)) is None
        assert runner.run(wait(loop, answers=False)) == "it was not heard of for 0.5 seconds"


async def _awaited(answer: asyncio.Future[None]) -> None:
    await answer


async def _lost() -> None:
    raise OSError("the actor died")


def test_a_replica_that_died_is_lost_for_the_reason_of_its_death() -> None:
    assert asyncio.run(_reason_of_silence(_lost(), 0.5, OSError)) == "OSError: the actor died"


def test_what_does_not_come_back_from_rays_own_code_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    end_event = threading.Event()
    monkeypatch.setattr(ray, "_end", end_event.set)
    with ray._ended_if_stuck():
        pass
    assert not end_event.is_set()
    monkeypatch.setattr(ray, "_STUCK_SECONDS", 0.01)
    with ray._ended_if_stuck():
        assert end_event.wait(30)

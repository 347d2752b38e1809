"""Several engines as one: who gets which call, who is not asked, and what becomes of calls and weights when one fails.

Time is virtual: an event loop whose clock jumps to the next timer. A reply is the sum of the prompt and a stop token:
every replica gives the same sample to the same call, and a wrong one is seen.

Pinned here:
1. breaker and limit, by tables and by hand;
2. sessions stay, new ones go to the replica with the fewest;
3. a call moves to another replica only if that gives the same sample, and never past its deadline;
4. of 2,000 calls none is lost or answered twice while a replica dies and comes back;
5. updates reach all replicas or leave them out; what is left out comes back under the committed version only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from virtual_time import VirtualLoop

from gspo_gym.base.retries import CircuitBreaker
from gspo_gym.engine.base import Capabilities, Engine, EngineHealth, SamplingParams, WeightUpdate
from gspo_gym.engine.gate import probing
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.replicas.replica_set import InFlightLimit, RouterSettings
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.engine.scripted import Failures, Latency, ScriptedEngine
from gspo_gym.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EngineLostError,
    EnginePoisonedError,
    EngineTimeoutError,
)
from gspo_gym.types import Completion

STOP = 2
SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=(STOP,), seed=0)

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    async def within_hours() -> Result:
        async with asyncio.timeout(10_000.0):  # health is checked for ever: what hangs would never end
            return await main

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(within_hours())


def reply(prompt: tuple[int, ...], turn: int) -> list[int]:
    return [sum(prompt) + 3, STOP]


class Fragile(ScriptedEngine):
    """A scripted engine whose samples depend on the prompt only, and which can be dead for a while."""

    def __init__(self, *, seconds: float = 1.0, failures: Failures | None = None, seeds: bool = True) -> None:
        super().__init__(reply, latency=Latency(per_call_seconds=seconds), failures=failures)
        self.is_dead = False
        self.num_answers = 0
        self.fails_at = ""
        self._seeds = seeds

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, seeds_per_request=self._seeds)

    async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, **options: Any) -> Completion:
        if self.is_dead:
            raise EngineError("connection refused")
        completion = await super().generate(prompt_token_ids, sampling, **options)
        if self.is_dead:
            raise EngineError("connection reset")
        self.num_answers += 1
        return completion

    async def health(self) -> EngineHealth:
        return replace(await super().health(), **({"is_alive": False, "reason": "dead"} if self.is_dead else {}))

    async def apply_weights(self, update: WeightUpdate) -> None:
        if self.fails_at == "apply":
            raise EngineError("no space for the weights")
        await super().apply_weights(update)

    async def resume(self, version: int) -> None:
        if self.fails_at == "resume":
            raise EngineError("connection lost")
        await super().resume(version)


def routed(*replicas: Engine, **settings: Any) -> RoutedEngine:
    clock = asyncio.get_running_loop().time
    return RoutedEngine(replicas, settings=RouterSettings(**settings), clock=clock)


def token(completion: Completion) -> int:
    return int(completion.token_ids[0])


async def update(engine: Engine, version: int) -> None:
    await engine.pause("wait")
    await engine.apply_weights(WeightUpdate(version, "shared"))
    await engine.resume(version)


# Failures_to_open 3, cool_down 5: what happens at which second, and the state right after.
BREAKER = (
    ("two failures are not three", [("fail", 0), ("fail", 1)], 1, "closed"),
    ("three in a row open it", [("fail", 0), ("fail", 1), ("fail", 2)], 2, "open"),
    ("an answer between them counts anew", [("fail", 0), ("fail", 1), ("succeed", 2), ("fail", 3)], 3, "closed"),
    ("before the cool-down it stays open", [("fail", 0), ("fail", 1), ("fail", 2)], 6.9, "open"),
    ("after it one call may try", [("fail", 0), ("fail", 1), ("fail", 2)], 7, "half_open"),
    ("late failures do not prolong it", [("fail", 0), ("fail", 1), ("fail", 2), ("fail", 4)], 7, "half_open"),
    ("a failed try opens it again", [("fail", 0), ("fail", 1), ("fail", 2), ("fail", 8)], 12.9, "open"),
    ("for as long as before", [("fail", 0), ("fail", 1), ("fail", 2), ("fail", 8)], 13, "half_open"),
    ("a try that is answered closes it", [("fail", 0), ("fail", 1), ("fail", 2), ("succeed", 8)], 8, "closed"),
)


@pytest.mark.parametrize(("events", "now", "state"), [row[1:] for row in BREAKER], ids=[row[0] for row in BREAKER])
def test_breaker_opens_cools_down_and_tries(events: list[tuple[str, float]], now: float, state: str) -> None:
    breaker = CircuitBreaker(failures_to_open=3, cool_down_seconds=5.0)
    for what, when in events:
        if what == "fail":
            breaker.fail(when)
        else:
            breaker.succeed()
    assert breaker.state(now) == state
    assert breaker.allows(now, num_in_flight=0) == (state != "open")
    assert breaker.allows(now, num_in_flight=1) == (state == "closed")


def test_limit_is_halved_by_a_timeout_and_raised_by_one_for_each_full_round() -> None:
    limit = InFlightLimit(16)
    limit.time_out(begun=0.0, now=10.0)
    assert limit.limit == 8  # 16 / 2
    limit.time_out(begun=9.0, now=11.0)
    assert limit.limit == 8  # that call was made under the old limit
    limit.time_out(begun=10.5, now=12.0)
    assert limit.limit == 4
    for _ in range(3):
        limit.succeed(4)
    assert limit.limit == 4
    limit.succeed(4)  # the 4th answer of a full round
    assert limit.limit == 5
    for _ in range(100):
        limit.succeed(4)  # never used to the full: nothing is learned
    assert limit.limit == 5
    for number in range(5, 16):
        for _ in range(number):
            limit.succeed(number)
    assert limit.limit == 16
    for _ in range(16):
        limit.succeed(16)
    assert limit.limit == 16  # the most


def test_limit_never_falls_below_one() -> None:
    limit = InFlightLimit(2)
    for second in range(5):
        limit.time_out(begun=second, now=second + 0.5)
    assert limit.limit == 1


@pytest.mark.parametrize("options", [{"failures_to_open": 0}, {"max_in_flight": 0}, {"health_interval_seconds": 0.0}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        RoutedEngine([Fragile()], settings=RouterSettings(**options))


def test_settings_at_the_edge_are_taken() -> None:
    settings = RouterSettings(max_in_flight=1, failures_to_open=1, health_interval_seconds=0.1, max_wait_seconds=0.0)
    assert len(RoutedEngine([Fragile()], settings=settings).replicas) == 1


def test_without_settings_a_replica_is_given_256_calls_at_once_and_nothing_runs_after_them() -> None:
    async def main() -> list[float]:
        loop, engine, seconds = asyncio.get_running_loop(), routed(Fragile(seconds=1.0)), []
        for count in (256, 257):
            started = loop.time()
            await asyncio.gather(*(engine.generate([1], SAMPLING) for _ in range(count)))
            seconds.append(loop.time() - started)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return seconds

    assert run(main()) == pytest.approx([1.0, 2.0])


def test_sessions_stay_and_new_ones_go_where_fewest_are() -> None:
    async def main() -> list[list[str | None]]:
        replicas = [Fragile() for _ in range(3)]
        engine = routed(*replicas)
        for turn in range(2):  # one after another: nothing is in flight, only sessions count
            for name in "abcdefg":
                await engine.generate([1, turn], SAMPLING, session_id=name)
        await engine.end_session("b")
        await engine.end_session("e")
        await engine.generate([1], SAMPLING, session_id="h")
        return [[call.session_id for call in replica.calls] for replica in replicas]

    # a b c d e f g in turn to 0 1 2 0 1 2 0; their second calls likewise; then replica 1 has none and takes h.
    assert run(main()) == [list("adgadg"), list("bebeh"), list("cfcf")]


def test_calls_without_session_go_where_fewest_are_in_flight() -> None:
    async def main() -> list[int]:
        replicas = [Fragile(seconds=seconds) for seconds in (10.0, 1.0)]
        engine = routed(*replicas)
        slow = [asyncio.create_task(engine.generate([1], SAMPLING)) for _ in range(2)]  # one for each
        await asyncio.sleep(2.0)  # the second replica has answered
        await asyncio.gather(*(engine.generate([1], SAMPLING) for _ in range(1)))
        await asyncio.gather(*slow)
        return [len(replica.calls) for replica in replicas]

    assert run(main()) == [1, 2]


def test_no_replica_is_given_more_calls_than_its_limit() -> None:
    most = 0

    async def main() -> float:
        nonlocal most

        class Counting(Fragile):
            running = 0

            async def generate(self, *arguments: Any, **options: Any) -> Completion:
                nonlocal most
                self.running += 1
                most = max(most, self.running)
                try:
                    return await super().generate(*arguments, **options)
                finally:
                    self.running -= 1

        engine = routed(Counting(), Counting(), max_in_flight=4)
        await asyncio.gather(*(engine.generate([1], SAMPLING) for _ in range(80)))
        return asyncio.get_running_loop().time()

    seconds = run(main())
    assert most == 4
    assert seconds == pytest.approx(80 / (2 * 4))  # all slots are used all the time


def test_weights_without_a_pause_are_refused_and_cost_no_replica() -> None:
    async def main() -> None:
        engine = routed(Fragile(), Fragile())
        with pytest.raises(EngineError, match="call pause first"):
            await engine.apply_weights(WeightUpdate(1, "shared"))
        assert [replica.left_out for replica in engine.replicas] == [None, None]
        await update(engine, 1)
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [1, 1]

    run(main())


def test_failed_call_is_answered_by_another_replica_with_the_same_sample() -> None:
    async def main() -> None:
        broken, sound = Fragile(failures=Failures(every=1)), Fragile()
        engine = routed(broken, sound)
        completion = await engine.generate([5, 6], SAMPLING, session_id="a")
        assert token(completion) == 14  # 5 + 6 + 3
        assert (broken.num_failures, sound.num_answers, engine.num_retries) == (1, 1, 1)
        await engine.generate([7], SAMPLING, session_id="a")
        assert len(broken.calls) == 1  # the session has moved
        assert [len(replica.sessions) for replica in engine.replicas] == [0, 1]
        await engine.end_session("a")
        assert [len(replica.sessions) for replica in engine.replicas] == [0, 0]

    run(main())


def test_sample_that_cannot_be_repeated_is_not_replaced_by_another_one() -> None:
    async def main() -> None:
        broken, sound = Fragile(failures=Failures(every=1), seeds=False), Fragile(seeds=False)
        with pytest.raises(EngineError, match="replica 0: scripted failure"):
            await routed(broken, sound).generate([5], SAMPLING)
        assert sound.calls == []

    run(main())


def test_call_that_every_replica_fails_says_what_each_one_said() -> None:
    async def main() -> None:
        engine = routed(*(Fragile(failures=Failures(every=1)) for _ in range(2)))
        with pytest.raises(EngineError, match=r"replica 0: scripted failure.*; replica 1: scripted failure"):
            await engine.generate([5], SAMPLING)

    run(main())


def test_call_whose_engines_were_lost_says_so_though_others_are_in_their_places_by_then() -> None:
    class Replaced(Fragile):
        async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, **options: Any) -> Completion:
            raise EngineLostError("the engine was replaced while it answered")

    async def main() -> None:
        engine = routed(Replaced(), Replaced())
        with pytest.raises(EngineLostError, match=r"replica 0: the engine was .*; replica 1: the engine was"):
            await engine.generate([5], SAMPLING)
        engine = routed(Replaced(), Fragile(failures=Failures(every=1)))
        with pytest.raises(EngineError, match="scripted failure") as failure:
            await engine.generate([5], SAMPLING)
        assert not isinstance(failure.value, EngineLostError)

    run(main())


def test_call_whose_replicas_were_poisoned_under_it_says_that_they_were_lost() -> None:
    """By then each health check is that of a fresh engine in its place, which is alive."""

    class Poisoned(Fragile):
        async def generate(self, prompt_token_ids: Any, sampling: SamplingParams, **options: Any) -> Completion:
            raise EnginePoisonedError("the engine is poisoned: its process has ended")

        async def health(self) -> EngineHealth:
            return replace(await super().health(), is_alive=True, is_poisoned=False)

    async def main() -> None:
        engine = routed(Poisoned(), Poisoned())
        with pytest.raises(EngineLostError, match=r"replica 0: the engine is poisoned.*; replica 1: the engine is"):
            await engine.generate([5], SAMPLING)

    run(main())


def test_call_that_is_stopped_on_replicas_that_hang_dead_says_that_they_were_lost() -> None:
    class Flapping(Fragile):
        num_checks = 0

        async def health(self) -> EngineHealth:
            self.num_checks += 1
            return replace(await super().health(), is_alive=self.num_checks > 2)

    async def main() -> None:
        hanging = Failures(every=1, kind="hang")
        engine = routed(Flapping(failures=hanging), failures_to_open=2)
        with pytest.raises(EngineLostError, match="replica 0: the replica stopped answering"):
            await engine.generate([5], SAMPLING)

    run(main())


def test_mistakes_of_the_caller_are_no_failures_of_a_replica() -> None:
    async def main() -> None:
        replicas = [Fragile(), Fragile()]
        engine = routed(*replicas, failures_to_open=1)
        with pytest.raises(ContextOverflowError):
            await engine.generate([1] * 4096, SAMPLING)
        with pytest.raises(EngineError, match="at least one token"):
            await engine.generate([], SAMPLING)
        call = asyncio.create_task(engine.generate([1], SAMPLING, session_id="a"))
        await asyncio.sleep(0.5)
        await engine.abort("a")
        with pytest.raises(EngineError, match="aborted"):
            await call
        assert asyncio.get_running_loop().time() == 0.5  # its replica is not waited for
        assert [len(replica.calls) for replica in replicas] == [1, 0]
        assert all(replica.breaker.state(0.5) == "closed" for replica in engine.replicas)

    run(main())


def test_replica_that_fails_again_and_again_is_asked_once_a_cool_down() -> None:
    async def main(**settings: Any) -> list[float]:
        loop = asyncio.get_running_loop()
        asked: list[float] = []

        class Broken(Fragile):
            async def generate(self, *arguments: Any, **options: Any) -> Completion:
                asked.append(loop.time())
                raise EngineError("broken")

        engine = routed(Broken(), Fragile(), **settings)
        for _ in range(30):  # one call a second
            await engine.generate([1], SAMPLING)
        return asked

    # Twice in a row; open from second 1, tried again at 11 and, 10 seconds after that failure, at 21.
    assert run(main(failures_to_open=2, cool_down_seconds=10.0)) == [0.0, 1.0, 11.0, 21.0]
    # Three times, unless told otherwise, and then after 5 seconds: from second 2 to 7, and so on.
    assert run(main()) == [0.0, 1.0, 2.0, 7.0, 12.0, 17.0, 22.0, 27.0]


def test_call_out_of_time_raises_at_its_deadline_and_halves_the_limit() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = routed(Fragile(seconds=100.0), Fragile(seconds=100.0), max_in_flight=8)
        with pytest.raises(EngineTimeoutError, match="3 seconds"):
            await engine.generate([1], SAMPLING, deadline_seconds=3.0)
        assert loop.time() == pytest.approx(3.0)
        assert [replica.limit.limit for replica in engine.replicas] == [4, 8]
        assert [replica.num_in_flight for replica in engine.replicas] == [0, 0]

    run(main())


def test_a_replicas_own_time_out_is_the_calls_and_is_asked_of_no_other_replica() -> None:
    class Late(Fragile):
        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            raise EngineTimeoutError("no answer within a second")

    async def main() -> None:
        sound = Fragile()
        engine = routed(Late(), sound, max_in_flight=8)
        with pytest.raises(EngineTimeoutError, match=r"^no answer within a second$"):
            await engine.generate([1], SAMPLING)
        assert (engine.num_retries, sound.calls) == (0, [])
        assert [replica.limit.limit for replica in engine.replicas] == [4, 8]  # 8 / 2

    run(main())


def test_call_aborted_half_a_second_before_its_deadline_is_no_time_out_of_its_replica() -> None:
    async def main() -> None:
        engine = routed(Fragile(seconds=100.0), max_in_flight=8)
        call = asyncio.create_task(engine.generate([1], SAMPLING, session_id="a", deadline_seconds=3.0))
        await asyncio.sleep(2.5)
        await engine.abort("a")
        with pytest.raises(EngineError, match="aborted"):
            await call
        assert engine.replicas[0].limit.limit == 8

    run(main())


def test_answers_raise_the_limit_only_where_it_was_used_to_the_full() -> None:
    async def main() -> list[int]:
        engine, seen = routed(Fragile(seconds=10.0), max_in_flight=4), []
        with pytest.raises(EngineTimeoutError):
            await engine.generate([1], SAMPLING, deadline_seconds=3.0)
        for count in (1, 1, 2, 2):  # the limit is 2: the second call of each pair is one of the 2 answers that it takes
            await asyncio.gather(*(engine.generate([1], SAMPLING) for _ in range(count)))
            seen.append(engine.replicas[0].limit.limit)
        return seen

    assert run(main()) == [2, 2, 2, 3]


def test_failures_with_answers_between_them_leave_a_replica_in_use() -> None:
    async def main() -> list[bool]:
        engine = routed(Fragile(failures=Failures(every=2)), failures_to_open=2, cool_down_seconds=1e6)
        answers = [await asyncio.gather(engine.generate([1], SAMPLING), return_exceptions=True) for _ in range(6)]
        return [isinstance(answer, Completion) for (answer,) in answers]

    assert run(main()) == [True, False] * 3


def test_deadline_covers_the_second_attempt_too() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = routed(Fragile(seconds=2.0, failures=Failures(every=1)), Fragile(seconds=2.0))
        with pytest.raises(EngineTimeoutError):
            await engine.generate([1], SAMPLING, deadline_seconds=3.0)
        assert loop.time() == pytest.approx(3.0)

    run(main())


def test_calls_on_a_replica_that_hangs_dead_move_when_its_health_says_so() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        hanging, sound = Fragile(failures=Failures(every=1, kind="hang")), Fragile()
        engine = routed(hanging, sound, failures_to_open=2)
        hanging.is_dead = False
        call = asyncio.create_task(engine.generate([5], SAMPLING))
        await asyncio.sleep(1.0)
        hanging.is_dead = True
        assert token(await call) == 8  # 5 + 3
        assert loop.time() == pytest.approx(11.0)  # health fails at 5 and 10, the other replica takes 1

    run(main())


def test_a_replica_whose_health_check_raises_is_dead_and_the_others_are_still_watched() -> None:
    class Unaskable(Fragile):
        async def health(self) -> EngineHealth:
            if self.is_dead:
                raise ConnectionResetError("while it was asked")
            return await super().health()

    async def main() -> None:
        hanging, sound = Unaskable(failures=Failures(every=1, kind="hang")), Fragile()
        engine = routed(hanging, sound, failures_to_open=2, health_interval_seconds=5.0)
        call = asyncio.create_task(engine.generate([5], SAMPLING))
        await asyncio.sleep(1.0)
        hanging.is_dead = True
        assert token(await call) == 8  # 5 + 3: the check at 10 seconds moves it, as where health says "dead"

    run(main())


def test_calls_that_wait_raise_when_the_watch_over_the_replicas_breaks() -> None:
    async def main() -> None:
        dead, seconds = Fragile(), [1.0]
        dead.is_dead = True

        async def sleep(_: float) -> None:
            await asyncio.sleep(seconds.pop())  # where it is empty: IndexError, a defect of the watch

        settings = RouterSettings(failures_to_open=1, cool_down_seconds=1000.0, max_wait_seconds=1e9)
        engine = RoutedEngine([dead], settings=settings, clock=asyncio.get_running_loop().time, sleep=sleep)
        with pytest.raises(EngineError, match="connection refused"):
            await engine.generate([1], SAMPLING)
        with pytest.raises(EngineError, match="health checks of the replicas ended: IndexError"):
            await engine.generate([1], SAMPLING)
        dead.is_dead = False
        seconds += [1000.0, 1000.0]
        assert token(await engine.generate([1], SAMPLING)) == 4  # 1 + 3: the next watch is in order

    run(main())


def test_calls_raise_when_no_replica_has_been_up_for_long() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        dead = Fragile()
        dead.is_dead = True
        engine = routed(dead, failures_to_open=1, cool_down_seconds=1000.0)
        with pytest.raises(EngineError, match="connection refused"):
            await engine.generate([1], SAMPLING)
        with pytest.raises(EngineError, match="no replica can be asked"):
            await engine.generate([1], SAMPLING)
        assert loop.time() == pytest.approx(60.0)  # at the health check that comes then

    run(main())


async def play(engine: RoutedEngine, number: int, answers: dict[tuple[int, int], list[int]]) -> None:
    """A session of four turns, each prompt holding the session's number and turn."""
    for turn in range(4):
        completion = await engine.generate([number, turn], SAMPLING, session_id=f"session-{number}")
        answers.setdefault((number, turn), []).append(token(completion))
    await engine.end_session(f"session-{number}")


def test_no_call_of_2000_is_lost_or_answered_twice_while_a_replica_dies_and_comes_back() -> None:
    answers: dict[tuple[int, int], list[int]] = {}

    async def main() -> tuple[list[Fragile], RoutedEngine, list[int]]:
        replicas = [Fragile(seconds=1.0 + number / 10) for number in range(3)]
        engine = routed(*replicas, max_in_flight=16)
        sessions = [asyncio.create_task(play(engine, number, answers)) for number in range(500)]
        await asyncio.sleep(8.5)
        replicas[1].is_dead = True
        await asyncio.sleep(10.0)
        while_dead = replicas[1].num_answers
        replicas[1].is_dead = False
        await asyncio.gather(*sessions)
        return replicas, engine, [while_dead, replicas[1].num_answers]

    replicas, engine, answered = run(main())
    assert len(answers) == 2000
    assert all(given == [number + turn + 3] for (number, turn), given in answers.items())
    assert sum(replica.num_answers for replica in replicas) == 2000  # no sample was taken twice
    assert engine.num_retries >= 16  # what was in flight, at least
    assert answered[1] > answered[0]  # it came back into use
    assert [len(replica.sessions) for replica in engine.replicas] == [0, 0, 0]


def test_every_replica_forgets_ended_sessions_also_one_that_can_be_rebuilt() -> None:
    forgotten: list[str] = []

    class Forgetful(Fragile):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def forget_ended(self) -> None:
            forgotten.append(self.name)

    async def main() -> None:
        async def make() -> Engine:
            return Forgetful("fresh")

        replaced = RebuildableEngine(Forgetful("first"), make)
        await replaced.rebuild(lambda fresh: update(fresh, 0))
        await routed(Forgetful("a"), replaced, Forgetful("b")).forget_ended()

    run(main())
    assert forgotten == ["a", "fresh", "b"]


def test_update_reaches_all_replicas_and_waits_for_their_calls() -> None:
    async def main() -> None:
        replicas = [Fragile(seconds=2.0), Fragile(seconds=3.0)]
        engine = routed(*replicas)
        before = [asyncio.create_task(engine.generate([1], SAMPLING)) for _ in range(2)]
        await asyncio.sleep(1.0)
        updating = asyncio.create_task(update(engine, 7))
        await asyncio.sleep(0.5)
        after = asyncio.create_task(engine.generate([1], SAMPLING))
        await updating
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        assert [(await call).weight_version.tolist() for call in before] == [[0, 0], [0, 0]]
        assert (await after).weight_version.tolist() == [7, 7]
        assert engine.weight_version == 7
        assert [replica.weight_version for replica in replicas] == [7, 7]

    run(main())


@pytest.mark.parametrize("step", ["apply", "resume", "attest"])
def test_replica_that_fails_an_update_is_left_out_and_the_others_commit(step: str) -> None:
    async def main() -> None:
        replicas = [Fragile() for _ in range(3)]
        replicas[1].fails_at = step
        engine = routed(*replicas)

        async def attest(one: Engine) -> None:
            with probing():
                await one.generate([1], SAMPLING)
            if one is replicas[1] and step == "attest":
                raise EngineError("other weights")

        engine.attest = attest
        await update(engine, 1)
        versions = {
            name: (await engine.generate([1], SAMPLING, session_id=name)).weight_version.tolist() for name in "abc"
        }
        assert versions == {name: [1, 1] for name in "abc"}
        assert [replica.left_out is None for replica in engine.replicas] == [True, False, True]
        with pytest.raises(EnginePoisonedError):
            await replicas[1].generate([1], SAMPLING)
        assert (await engine.health()).is_alive

    run(main())


def test_the_step_of_an_update_that_fails_everywhere_says_so_and_poisons_the_engine() -> None:
    async def main() -> None:
        replicas = [Fragile(), Fragile()]
        for replica in replicas:
            replica.fails_at = "apply"
        engine = routed(*replicas)
        await engine.pause("wait")
        with pytest.raises(EnginePoisonedError, match=r"^apply_weights failed on every replica: .*no space"):
            await engine.apply_weights(WeightUpdate(1, "shared"))
        with pytest.raises(EnginePoisonedError):
            await engine.generate([1], SAMPLING)
        assert (await engine.health()).is_poisoned

    run(main())


def test_replica_that_is_left_out_comes_back_rebuilt_and_under_the_committed_version_only() -> None:
    async def main() -> None:
        made: list[Fragile] = []

        async def make() -> Engine:
            made.append(Fragile())
            return made[-1]

        failing = Fragile()
        failing.fails_at = "apply"
        lost = RebuildableEngine(failing, make)
        engine = routed(lost, Fragile(), health_interval_seconds=5.0)
        versions = iter([0, 1])  # the first rebuild gives it the version before

        async def rebuild(one: Engine) -> None:
            assert one is lost
            version = next(versions)
            await lost.rebuild(lambda fresh: update(fresh, version))

        engine.set_rebuild(rebuild)
        await update(engine, 1)
        left_out = []
        for _ in range(20):  # one call a second
            assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [1, 1]
            left_out.append(engine.replicas[0].left_out is not None)
        assert left_out[:4] == [True] * 4  # nobody looks before 5 seconds are over
        assert not left_out[-1]
        assert [fresh.num_answers > 0 for fresh in made] == [False, True]

    run(main())


def test_replica_that_answers_under_a_version_it_should_not_have_is_left_out() -> None:
    async def main() -> None:
        stale, sound = Fragile(), Fragile()
        engine = routed(stale, sound)
        await update(engine, 3)
        await update(stale, 2)  # as after a restart: something changed it behind the router
        completion = await engine.generate([1], SAMPLING)
        assert completion.weight_version.tolist() == [3, 3]
        assert engine.replicas[0].left_out == "it sampled under version 2, expected 3"

    run(main())


def test_health_check_says_once_why_it_leaves_a_replica_out(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        stale, poisoned, sound = Fragile(), Fragile(), Fragile()
        engine = routed(stale, poisoned, sound)
        await update(engine, 3)
        await update(stale, 2)
        poisoned.poison("out of memory")
        for _ in range(2):
            await engine.check_health()
        stated = [replica.left_out for replica in engine.replicas]
        assert stated == ["it is under version 2, not 3", "out of memory", None]
        assert [record.getMessage() for record in caplog.records] == [
            "replica 0 is left out: it is under version 2, not 3",
            "replica 1 is left out: out of memory",
        ]

    run(main())


def test_retry_never_moves_a_call_past_an_update() -> None:
    async def main() -> None:
        failing, sound = Fragile(seconds=2.0, failures=Failures(every=1)), Fragile(seconds=5.0)
        engine = routed(failing, sound)
        call = asyncio.create_task(engine.generate([1], SAMPLING))
        busy = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(1.0)
        updating = asyncio.create_task(update(engine, 1))
        with pytest.raises(EngineError, match="weights changed before the call could be made elsewhere"):
            await call
        await updating
        assert (await busy).weight_version.tolist() == [0, 0]

    run(main())


def test_call_that_was_kept_over_an_update_may_carry_both_versions() -> None:
    async def main() -> None:
        replicas = [Fragile(seconds=4.0), Fragile(seconds=4.0)]
        engine = routed(*replicas)
        call = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(1.0)
        await engine.pause("keep")
        await engine.apply_weights(WeightUpdate(1, "shared"))
        await engine.resume(1)
        assert (await call).weight_version.tolist() == [0, 0]  # a scripted call carries the version it began with
        assert [replica.left_out for replica in engine.replicas] == [None, None]

    run(main())


def test_call_that_was_kept_may_end_in_the_version_that_was_committed_under_it() -> None:
    class Keeping(Fragile):
        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            completion = await super().generate(*arguments, **options)
            return replace(completion, weight_version=np.array([completion.weight_version[0], self.weight_version]))

    async def main() -> None:
        engine = routed(Keeping(seconds=4.0))
        call = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(1.0)
        await engine.pause("keep")
        await engine.apply_weights(WeightUpdate(1, "shared"))
        await engine.resume(1)
        assert (await call).weight_version.tolist() == [0, 1]
        assert engine.replicas[0].left_out is None

    run(main())


def test_closing_ends_a_rebuild_under_way_before_its_replica_is_closed() -> None:
    async def main() -> list[str]:
        failing, seen = Fragile(), []
        failing.fails_at = "apply"
        engine = routed(failing, Fragile(), health_interval_seconds=5.0)

        async def rebuild(_: Engine) -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(1.0)
                seen.append(f"ended, closed {not (await failing.health()).is_alive}")

        engine.set_rebuild(rebuild)
        await update(engine, 1)
        await engine.check_health()
        await asyncio.sleep(0)
        await engine.close()
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)
        return seen

    assert run(main()) == ["ended, closed False"]


def test_probes_are_answered_while_an_update_is_under_way() -> None:
    async def main() -> None:
        engine = routed(Fragile(), Fragile())
        await engine.pause("wait")
        await engine.apply_weights(WeightUpdate(1, "shared"))
        waiting = asyncio.create_task(engine.generate([1], SAMPLING))
        with probing():
            assert token(await engine.generate([4], SAMPLING)) == 7  # 4 + 3
        assert not waiting.done()
        await engine.resume(1)
        assert (await waiting).weight_version.tolist() == [1, 1]

    run(main())


def test_common_capabilities_are_what_all_replicas_promise() -> None:
    class Other(Fragile):
        @property
        def capabilities(self) -> Capabilities:
            return replace(
                super().capabilities,
                max_model_len=100,
                update_kinds=("full", "adapter"),
                pause_modes=("wait",),
                has_checksums=True,
                logprob_mode="raw",
            )

    alike = RoutedEngine([Fragile(), Fragile()]).capabilities
    assert (alike.is_trainable, alike.logprob_mode) == (True, "processed")
    common = RoutedEngine([Fragile(), Other()]).capabilities
    assert (common.is_trainable, common.logprob_mode) == (False, "none")
    assert (common.max_model_len, common.update_kinds, common.pause_modes, common.has_checksums) == (
        100,
        ("full", "adapter"),
        ("wait",),
        False,
    )
    with pytest.raises(ConfigError, match=r"RoutedEngine\.pause: expected mode 'wait', got 'keep'"):
        asyncio.run(RoutedEngine([Fragile(), Other()]).pause("keep"))
    with pytest.raises(ConfigError, match="RoutedEngine: expected an update of kind 'full' or 'adapter', got 'shared'"):
        asyncio.run(RoutedEngine([Other()]).apply_weights(WeightUpdate(1, "shared")))


def test_routed_engine_serves_one_event_loop_after_another() -> None:
    engine = RoutedEngine([Fragile(seconds=0.0), Fragile(seconds=0.0)])
    for _ in range(2):
        assert token(asyncio.run(engine.generate([1], SAMPLING))) == 4  # 1 + 3
    asyncio.run(engine.close())
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate([1], SAMPLING))


Action = Callable[[RoutedEngine], Awaitable[object]]


@pytest.mark.parametrize(
    "end", [lambda engine: engine.close(), lambda engine: _poison(engine)], ids=["close", "poison"]
)
def test_calls_that_wait_for_a_replica_end_with_the_engine(end: Action) -> None:
    async def main() -> None:
        engine = routed(Fragile(seconds=100.0), max_in_flight=1)
        calls = [asyncio.create_task(engine.generate([1], SAMPLING)) for _ in range(3)]
        await asyncio.sleep(1.0)
        await end(engine)
        results = await asyncio.gather(*calls[1:], return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        calls[0].cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    run(main())


async def _poison(engine: RoutedEngine) -> None:
    engine.poison("the test says so")

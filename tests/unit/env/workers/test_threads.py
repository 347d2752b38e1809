"""OwnThread: one owner's thread, reused afterwards unless a call got stuck in it. QuickCalls: one thread of many."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from gspo_gym.env.workers.threads import OwnThread, QuickCalls, Returned, Worker, WorkerPool


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Set when the test is over, so that hanging threads end."""
    event = threading.Event()
    yield event
    event.set()


def test_an_owner_keeps_its_thread_and_the_next_one_gets_it() -> None:
    pool = WorkerPool()
    first, second = OwnThread(pool), OwnThread(pool)
    a = [first.call(threading.get_ident, timeout_seconds=5).unwrap() for _ in range(3)]
    b = second.call(threading.get_ident, timeout_seconds=5).unwrap()
    assert len(set(a)) == 1
    assert b != a[0]
    first.release()
    assert OwnThread(pool).call(threading.get_ident, timeout_seconds=5).unwrap() == a[0]


def test_what_the_call_raises_is_in_the_result() -> None:
    def leave() -> None:
        raise SystemExit(3)

    thread = OwnThread(WorkerPool())
    with pytest.raises(SystemExit):
        thread.call(leave, timeout_seconds=5).unwrap()
    assert thread.call(lambda: 1, timeout_seconds=5).unwrap() == 1  # the thread lives on


def test_a_stuck_thread_is_not_reused_and_makes_its_last_call(gate: threading.Event) -> None:
    pool = WorkerPool()
    thread = OwnThread(pool)
    done = threading.Event()
    stuck = thread.call(threading.get_ident, timeout_seconds=5).unwrap()
    with pytest.raises(TimeoutError):
        thread.call(gate.wait, timeout_seconds=0.01)
    thread.abandon(done.set)
    assert thread.call(threading.get_ident, timeout_seconds=5).unwrap() != stuck
    assert not done.is_set()
    gate.set()
    assert done.wait(60)


def test_an_owner_that_is_collected_gives_its_thread_back() -> None:
    pool = WorkerPool()
    owner = OwnThread(pool)
    ident = owner.call(threading.get_ident, timeout_seconds=5).unwrap()
    del owner
    gc.collect()
    assert OwnThread(pool).call(threading.get_ident, timeout_seconds=5).unwrap() == ident


def test_the_event_loop_goes_on_while_a_call_blocks(gate: threading.Event) -> None:
    async def both() -> object:
        blocked = asyncio.create_task(OwnThread(WorkerPool()).call_async(gate.wait, timeout_seconds=5))
        await asyncio.sleep(0)
        gate.set()  # reached only if the loop is free
        return (await blocked).unwrap()

    assert asyncio.run(both()) is True


def test_an_idle_thread_keeps_nothing_alive() -> None:
    import weakref

    class Big:
        pass

    thread = OwnThread(WorkerPool())
    big = Big()
    seen = weakref.ref(big)
    thread.call(lambda kept=big: kept and None, timeout_seconds=5)  # type: ignore[misc]
    del big
    thread.call(lambda: None, timeout_seconds=5)  # the first call's names are gone when the next is under way
    gc.collect()
    assert seen() is None


class Clock:
    """Stands still, unless it is told that calls take some time."""

    def __init__(self) -> None:
        self.now, self.seconds_a_reading = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.seconds_a_reading
        return self.now


async def proven(quick: QuickCalls, name: str = "env") -> OwnThread:
    """Make calls of no time until they are quick; return their owner."""
    owner = OwnThread(WorkerPool())
    while not quick.is_quick(name):
        await quick.call(owner, name, int)
    return owner


def test_the_33rd_quick_call_shares_a_thread_with_those_that_are_asked_for_with_it() -> None:
    order: list[int] = []

    def call(number: int) -> tuple[int, int]:
        order.append(number)
        return number, threading.get_ident()

    async def play() -> None:
        quick = QuickCalls(WorkerPool(), clock=Clock())
        owner, others = OwnThread(WorkerPool()), [OwnThread(WorkerPool()) for _ in range(4)]
        # A mean of 2.7 ms at first, of 32 calls: 2.7 * (31 / 32) ** 31 is more than 1 ms, with one more it is less.
        own = set()
        for _ in range(32):
            assert not quick.is_quick("env")
            own.add((await quick.call(owner, "env", threading.get_ident)).unwrap())
        assert len(own) == 1
        assert not owner.has_thread
        answers = await asyncio.gather(*(quick.call(each, "env", lambda n=n: call(n)) for n, each in enumerate(others)))
        assert order == [0, 1, 2, 3]
        assert [answer.unwrap()[0] for answer in answers] == order
        assert len({answer.unwrap()[1] for answer in answers}) == 1
        assert not any(each.has_thread for each in others)
        await quick.call(owner, "another", int)
        assert owner.has_thread

    asyncio.run(play())


def test_slow_calls_are_sent_back_to_threads_of_their_owners() -> None:
    async def play() -> None:
        clock = Clock()
        quick = QuickCalls(WorkerPool(), clock=clock)
        owner = await proven(quick)
        clock.seconds_a_reading = 0.02  # 20 ms / 32 are not yet a millisecond
        mean = 2.7 * (31 / 32) ** 32
        num_calls = 0
        while mean < 1:
            mean += (20 - mean) / 32
            assert quick.is_quick("env")
            await quick.call(owner, "env", int)
            num_calls += 1
            assert not owner.has_thread
        assert num_calls == 1
        await quick.call(owner, "env", int)
        assert owner.has_thread

    asyncio.run(play())


def test_an_error_of_a_shared_call_is_in_its_result_and_others_are_answered() -> None:
    def leave() -> None:
        raise SystemExit(3)

    async def play() -> None:
        quick = QuickCalls(WorkerPool(), clock=Clock())
        owner = await proven(quick)
        failed, good = await asyncio.gather(quick.call(owner, "env", leave), quick.call(OwnThread(), "env", lambda: 7))
        assert isinstance(failed.error, SystemExit)
        assert good.unwrap() == 7

    asyncio.run(play())


def test_a_stuck_call_keeps_the_shared_thread_and_the_others_go_on(gate: threading.Event) -> None:
    clock = Clock()

    def hang() -> int:
        clock.now += 0.01
        gate.wait()
        return threading.get_ident()

    async def play() -> None:
        quick = QuickCalls(WorkerPool(), clock=clock, patience_seconds=0.01)
        owner, others = await proven(quick), [OwnThread(WorkerPool()) for _ in range(3)]
        stuck = asyncio.create_task(quick.call(owner, "env", hang))
        answers = await asyncio.gather(*(quick.call(each, "env", threading.get_ident) for each in others))
        assert len({answer.unwrap() for answer in answers}) == 3
        assert not stuck.done()
        assert owner.has_thread
        # It has not ended, but 0.01 s in one of 32 calls make a mean of 0.98 ms more than 1 ms.
        assert not quick.is_quick("env")
        after = asyncio.create_task(quick.call(owner, "env", lambda: (gate.is_set(), threading.get_ident())))
        await quick.call(others[0], "env", int)
        assert not after.done()
        gate.set()
        assert (await after).unwrap() == (True, (await stuck).unwrap())
        assert [each.num_shared for each in (owner, *others)] == [0, 0, 0, 0]

    asyncio.run(play())


def test_a_stuck_call_counts_once(gate: threading.Event) -> None:
    clock = Clock()

    def hang() -> None:
        clock.now += 0.02
        gate.wait()

    async def play() -> None:
        quick = QuickCalls(WorkerPool(), clock=clock, patience_seconds=0.01)
        owner = await proven(quick)
        stuck = asyncio.create_task(quick.call(owner, "env", hang))
        await asyncio.create_task(quick.call(OwnThread(WorkerPool()), "env", int))  # goes to another thread
        gate.set()
        await stuck
        mean = 2.7 * (31 / 32) ** 32
        mean = (mean + (20 - mean) / 32) * 31 / 32
        while mean >= 1:
            assert not quick.is_quick("env")
            await quick.call(owner, "env", int)
            mean *= 31 / 32
        assert quick.is_quick("env")

    asyncio.run(play())


def test_a_call_that_waited_for_others_is_not_stuck(gate: threading.Event) -> None:
    class Watched(Clock):
        def __call__(self) -> float:
            if threading.current_thread() is threading.main_thread():
                looked.set()
            return super().__call__()

    clock, looked = Watched(), asyncio.Event()

    def work() -> None:
        clock.now += 0.02

    async def play() -> None:
        quick = QuickCalls(WorkerPool(), clock=clock, patience_seconds=0.01)
        first, second = await proven(quick), OwnThread(WorkerPool())
        working = asyncio.create_task(quick.call(first, "env", work))
        innocent = asyncio.create_task(quick.call(second, "env", gate.wait))  # of no time, as the clock stands
        await asyncio.wait_for(looked.wait(), 5)
        assert not second.has_thread
        gate.set()
        await asyncio.gather(working, innocent)

    asyncio.run(play())


class LimitedPool(WorkerPool):
    """Has no threads while it is exhausted, as a machine with a limit on them."""

    is_exhausted = False

    def lease(self) -> Worker:
        if self.is_exhausted:
            raise RuntimeError("can't start new thread")
        return super().lease()


def test_calls_that_get_no_thread_fail_and_later_ones_are_made() -> None:
    async def play() -> None:
        pool = LimitedPool()
        quick = QuickCalls(pool, clock=Clock())
        owner, other = await proven(quick), OwnThread(WorkerPool())
        pool.is_exhausted = True
        async with asyncio.timeout(5):
            calls = (quick.call(each, "env", int) for each in (owner, other))
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert [str(error) for error in failed] == ["can't start new thread"] * 2
            pool.is_exhausted = False
            assert (await quick.call(owner, "env", lambda: 3)).unwrap() == 3
        assert (owner.num_shared, other.num_shared) == (0, 0)

    asyncio.run(play())


def test_calls_behind_a_stuck_one_that_get_no_thread_fail(gate: threading.Event) -> None:
    async def play() -> None:
        pool, clock = LimitedPool(), Clock()
        quick = QuickCalls(pool, clock=clock, patience_seconds=0.01)
        owner, others = await proven(quick), [OwnThread(pool), OwnThread(WorkerPool()), OwnThread(pool)]

        def hang() -> None:
            pool.is_exhausted = True
            clock.now += 0.01
            gate.wait()

        stuck = asyncio.create_task(quick.call(owner, "env", hang))
        async with asyncio.timeout(5):
            calls = (quick.call(each, "env", lambda: 7) for each in others)
            first, second, third = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(second, Returned)
            assert second.unwrap() == 7
            assert str(first) == str(third) == "can't start new thread"
            gate.set()
            await stuck
        assert [each.num_shared for each in (owner, *others)] == [0, 0, 0, 0]

    asyncio.run(play())


def test_a_call_after_a_cancelled_one_never_overtakes_it(gate: threading.Event) -> None:
    made: list[str] = []

    async def play() -> None:
        quick = QuickCalls(WorkerPool(), clock=Clock())
        owner = await proven(quick)
        first = asyncio.create_task(quick.call(OwnThread(WorkerPool()), "env", gate.wait))
        step = asyncio.create_task(quick.call(owner, "env", lambda: made.append("step")))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait({step})
        quick._mean_seconds["env"] = 1.0  # were it asked now, it would go to its owner's thread
        close = asyncio.create_task(quick.call(owner, "env", lambda: made.append("close")))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, close)
        assert made == ["step", "close"]

    asyncio.run(play())


def test_quick_calls_serve_one_event_loop_after_another() -> None:
    quick = QuickCalls(WorkerPool(), clock=Clock())
    asyncio.run(proven(quick))

    async def leave_one_behind() -> None:
        asyncio.create_task(quick.call(OwnThread(WorkerPool()), "env", int))  # noqa: RUF006  # it is to be left
        await asyncio.sleep(0)

    asyncio.run(leave_one_behind())

    async def play() -> object:
        return (await quick.call(OwnThread(WorkerPool()), "env", lambda: 3)).unwrap()

    assert asyncio.run(play()) == 3

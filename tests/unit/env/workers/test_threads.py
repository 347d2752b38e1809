"""OwnThread: one owner's thread, reused afterwards unless a call got stuck in it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from gspo_gym.env.workers.threads import OwnThread, WorkerPool


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
    assert done.wait(5)


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

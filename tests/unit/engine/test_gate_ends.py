"""What is left of a call that the gate has ended, and what a gate says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gspo_gym.engine.gate import Gate, probing
from gspo_gym.errors import EngineError, EnginePoisonedError


async def hold(gate: Gate, session_id: str | None = None) -> None:
    """A call that is in flight until something ends it."""
    async with gate.admit(session_id):
        await asyncio.Event().wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


ENDS: dict[str, tuple[Callable[[Gate], object], type[EngineError], str]] = {
    "aborted": (lambda gate: gate.abort("a"), EngineError, "session a: the call was aborted"),
    "poisoned": (lambda gate: gate.poison("half an update"), EnginePoisonedError, "half an update"),
    "closed": (lambda gate: gate.close(), EngineError, "the engine is closed"),
}


@pytest.mark.parametrize("is_waiting", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_task_whose_call_was_ended_is_not_being_cancelled_and_can_go_on(end: str, is_waiting: bool) -> None:
    """Otherwise the group of tasks that it belongs to would take the next cancellation for this one."""
    act, kind, message = ENDS[end]

    async def caller(gate: Gate) -> int:
        with pytest.raises(kind, match=message):
            await hold(gate, "a")
        task = asyncio.current_task()
        assert task is not None
        await asyncio.sleep(0)
        return task.cancelling()

    async def main() -> int:
        gate = Gate()
        if is_waiting:
            gate.pause()
        calling = asyncio.create_task(caller(gate))
        await settle()
        act(gate)
        return await calling

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("end", ENDS)
def test_a_call_that_is_ended_twice_is_ended_once(end: str) -> None:
    """By an abort first, whatever comes after; the call's task must not be cancelled again on its way out."""
    act, *_ = ENDS[end]

    async def caller(gate: Gate) -> str:
        with pytest.raises(EngineError, match="session a: the call was aborted"):
            await hold(gate, "a")
        await settle()  # a second cancellation would arrive here
        return "went on"

    async def main() -> str:
        gate = Gate()
        calling = asyncio.create_task(caller(gate))
        await settle()
        gate.abort("a")
        act(gate)
        gate.abort("a")
        gate.close()
        return await calling

    assert asyncio.run(main()) == "went on"


def test_health_says_why_it_is_dead_and_nothing_else() -> None:
    gate = Gate()
    health = gate.health()
    assert (health.is_alive, health.is_poisoned, health.reason) == (True, False, None)
    health = gate.health("the thread died")
    assert (health.is_alive, health.is_poisoned, health.reason) == (False, False, "the thread died")
    gate.close()
    health = gate.health()
    assert (health.is_alive, health.is_poisoned, health.reason) == (False, False, "closed")
    assert gate.health("the thread died").reason == "the thread died"
    gate.poison("half an update")
    health = gate.health("the thread died")
    assert (health.is_alive, health.is_poisoned, health.reason) == (False, True, "half an update")


def test_an_open_gate_requires_nothing_and_a_closed_one_says_so() -> None:
    gate = Gate()
    gate.require_open()
    gate.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        gate.require_open()


def test_a_probe_does_not_wait_and_is_counted_while_it_runs() -> None:
    async def main() -> None:
        gate = Gate()
        gate.pause()
        gate.require_paused()
        with probing():
            async with gate.admit("probe"):
                assert gate.num_in_flight == 1
        assert gate.num_in_flight == 0
        gate.resume(3)
        assert (gate.weight_version, gate.is_paused) == (3, False)
        gate.pause()  # an update that changes nothing may be committed, too
        gate.resume(4)
        async with gate.admit():
            assert gate.weight_version == 4

    asyncio.run(main())


def test_a_call_without_a_session_is_aborted_by_none() -> None:
    async def main() -> None:
        gate = Gate()
        calls = [asyncio.create_task(hold(gate)), asyncio.create_task(hold(gate, "a"))]
        await settle()
        gate.abort("b")
        gate.abort("a")
        await settle()
        assert [call.done() for call in calls] == [False, True]
        assert gate.num_in_flight == 1
        gate.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(error) for error in results] == ["the engine is closed", "session a: the call was aborted"]

    asyncio.run(main())


@pytest.mark.parametrize("end", ENDS)
def test_a_task_whose_call_has_returned_is_not_disturbed_by_what_ends_calls(end: str) -> None:
    act, *_ = ENDS[end]

    async def caller(gate: Gate) -> str:
        async with gate.admit("a"):
            pass
        act(gate)
        await settle()  # a cancellation would arrive here
        return "went on"

    async def main() -> str:
        return await asyncio.create_task(caller(Gate()))

    assert asyncio.run(main()) == "went on"


def test_a_session_may_have_several_calls_which_are_aborted_together() -> None:
    async def main() -> None:
        gate = Gate()
        calls = [asyncio.create_task(hold(gate, "a")) for _ in range(3)]
        await settle()
        gate.abort("a")
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(error) for error in results] == ["session a: the call was aborted"] * 3
        assert gate.num_in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize("end", ["poisoned", "closed"])
def test_no_update_begins_at_a_gate_that_has_ended(end: str) -> None:
    act, kind, message = ENDS[end]
    gate = Gate()
    act(gate)
    with pytest.raises(kind, match=message):
        gate.pause()


def test_a_call_that_ends_between_new_weights_and_their_commit_waits_for_the_commit() -> None:
    async def main() -> None:
        gate, answered = Gate(), asyncio.Event()

        async def call() -> int:
            async with gate.admit():
                await answered.wait()
            return gate.weight_version

        calling = asyncio.create_task(call())
        await settle()
        gate.pause()
        gate.require_paused()
        answered.set()
        await settle()
        assert (calling.done(), gate.num_in_flight) == (False, 1)
        gate.resume(5)
        assert await calling == 5

    asyncio.run(main())

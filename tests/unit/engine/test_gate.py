"""The gate of every engine: who waits, who is ended, and with which error; and publishing through it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.gate import Deadline, Gate
from gspo_gym.engine.scripted import Failures, ScriptedEngine
from gspo_gym.errors import ConfigError, EngineError, EnginePoisonedError, EngineTimeoutError
from gspo_gym.policy.weight_sync import WeightSync

SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)


async def hold(gate: Gate, session_id: str | None = None, deadline_seconds: float | None = None) -> str:
    """A call that is in flight until something ends it."""
    async with gate.admit(session_id, deadline_seconds):
        await asyncio.Event().wait()
    return "never"


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(body: Callable[[Gate], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(Gate())

    asyncio.run(main())


def test_calls_that_come_while_paused_wait_for_the_new_version() -> None:
    async def body(gate: Gate) -> None:
        seen: list[int] = []

        async def call() -> None:
            async with gate.admit():
                seen.append(gate.weight_version)

        await call()
        gate.pause()
        waiting = [asyncio.create_task(call()) for _ in range(3)]
        await settle()
        assert (seen, gate.num_in_flight) == ([0], 0)
        gate.resume(7)
        await asyncio.gather(*waiting)
        assert seen == [0, 7, 7, 7]

    run(body)


def test_draining_ends_with_the_last_call_in_flight_and_not_before() -> None:
    async def body(gate: Gate) -> None:
        calls = [asyncio.create_task(hold(gate, f"s{k}")) for k in range(2)]
        await settle()
        gate.pause()
        drained = asyncio.create_task(gate.drained())
        gate.abort("s0")
        await settle()
        assert (gate.num_in_flight, drained.done()) == (1, False)
        gate.abort("s1")
        await drained
        assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [EngineError] * 2

    run(body)


def test_poison_ends_calls_in_flight_and_waiting_and_later_and_whoever_drains() -> None:
    async def body(gate: Gate) -> None:
        in_flight = asyncio.create_task(hold(gate, "a"))
        await settle()
        gate.pause()
        waiting = asyncio.create_task(hold(gate, "b"))
        draining = asyncio.create_task(gate.drained())
        await settle()
        gate.poison("half an update")
        gate.poison("a later reason")
        for task in (in_flight, waiting, draining, asyncio.create_task(hold(gate))):
            with pytest.raises(EnginePoisonedError, match="half an update"):
                await task
        with pytest.raises(EnginePoisonedError):
            gate.resume(1)
        health = gate.health()
        assert (health.is_alive, health.is_poisoned, health.reason) == (True, True, "half an update")
        assert (health.num_in_flight, health.weight_version) == (0, 0)

    run(body)


def test_a_call_whose_caller_is_cancelled_stays_cancelled() -> None:
    async def body(gate: Gate) -> None:
        task = asyncio.create_task(hold(gate, "a"))
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.num_in_flight == 0

    run(body)


def test_a_deadline_counts_the_waiting_too_and_frees_the_place() -> None:
    async def body(gate: Gate) -> None:
        with pytest.raises(EngineTimeoutError, match=r"within 0\.01 seconds"):
            await hold(gate, deadline_seconds=0.01)
        gate.pause()
        with pytest.raises(EngineTimeoutError):
            await hold(gate, deadline_seconds=0.01)
        assert gate.num_in_flight == 0

    run(body)


def test_a_timeout_inside_the_call_is_not_taken_for_the_deadline() -> None:
    async def body(gate: Gate) -> None:
        with pytest.raises(TimeoutError, match="the server's own"):
            async with gate.admit(deadline_seconds=60):
                raise TimeoutError("the server's own")

    run(body)


def test_two_updates_at_once_and_weights_without_a_pause_are_refused() -> None:
    async def body(gate: Gate) -> None:
        with pytest.raises(EngineError, match="expected a paused engine"):
            gate.require_paused()
        gate.pause()
        with pytest.raises(EngineError, match="paused already"):
            gate.pause()

    run(body)


def test_a_closed_gate_admits_nobody() -> None:
    async def body(gate: Gate) -> None:
        gate.pause()
        waiting = asyncio.create_task(hold(gate))
        await settle()
        gate.close()
        for task in (waiting, asyncio.create_task(hold(gate))):
            with pytest.raises(EngineError, match="closed"):
                await task
        assert not gate.health().is_alive

    run(body)


def test_a_failed_publication_poisons_the_engine_and_its_version_is_never_seen() -> None:
    class Breaking(ScriptedEngine):
        async def apply_weights(self, update: WeightUpdate) -> None:
            await super().apply_weights(update)
            raise EngineError("the disk is gone")

    async def main() -> None:
        engine = Breaking([[1], [1]])
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [0]
        with pytest.raises(EnginePoisonedError, match="update to version 1 failed: EngineError: the disk is gone"):
            await WeightSync(engine).publish(1)
        assert engine.weight_version == 0
        with pytest.raises(EnginePoisonedError):
            await engine.generate([1], SAMPLING)
        with pytest.raises(EnginePoisonedError):
            await WeightSync(engine).publish(2)

    asyncio.run(main())


def test_an_update_in_flight_keeps_the_calls_that_run() -> None:
    async def main() -> None:
        engine = ScriptedEngine([[1], [2]], failures=Failures(every=1, kind="hang"))
        call = asyncio.create_task(engine.generate([1], SAMPLING, session_id="a"))
        await settle()
        await WeightSync(engine, mode="keep").publish(3)
        assert (engine.weight_version, call.done()) == (3, False)
        assert (await engine.health()).num_in_flight == 1
        await engine.abort("a")
        with pytest.raises(EngineError, match="aborted"):
            await call

    asyncio.run(main())


def test_an_update_must_say_where_its_weights_are() -> None:
    with pytest.raises(ConfigError, match="expected a folder with kind"):
        WeightUpdate(1, "full")


def test_a_call_is_told_when_its_time_is_over() -> None:
    async def main() -> None:
        gate = Gate()
        loop = asyncio.get_running_loop()
        async with gate.admit(deadline_seconds=60) as deadline:
            assert deadline.end == pytest.approx(loop.time() + 60, abs=30)  # however busy the machine is
            left = deadline.seconds_left()
            assert left is not None
            assert 30 < left <= 60
            assert not deadline.has_passed()
        async with gate.admit() as deadline:
            assert (deadline.end, deadline.seconds_left(), deadline.has_passed()) == (None, None, False)
        for seconds in (0.0, -1.0):
            assert Deadline.after(seconds).seconds_left() == 0
            assert Deadline.after(seconds).has_passed()

    asyncio.run(main())


def test_a_gated_engine_closes_when_its_calls_have_ended() -> None:
    class Slow(ScriptedEngine):
        async def close(self) -> None:
            await self._close_gate()

    async def main() -> None:
        engine = Slow([[1]], failures=Failures(every=1, kind="hang"))
        calling = asyncio.create_task(engine.generate([1], SAMPLING))
        await settle()
        await engine.close()
        assert (await engine.health()).num_in_flight == 0
        with pytest.raises(EngineError, match="closed"):
            await calling
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1], SAMPLING)
        await engine.close()

    asyncio.run(main())

"""vLLM in process at its end: a process that dies, and one that is closed.

Every test starts an engine of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from agreement import Turn, worst_gap

from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.errors import EngineError, EnginePoisonedError
from gspo_gym.policy.load import Policy
from gspo_gym.policy.staging import Staging
from gspo_gym.policy.weight_sync import Target, WeightSync
from gspo_gym.types import Completion

SHORT = SamplingParams(max_tokens=10, stop_token_ids=(), seed=0)
LONG = SamplingParams(max_tokens=400, stop_token_ids=(), seed=0)


def start_with_process(start_engine: Any) -> tuple[VllmEngine, Any]:
    """An engine, and the process in which its scheduler is."""
    others = {process.pid for process in multiprocessing.active_children()}
    engine = start_engine()
    (core,) = [process for process in multiprocessing.active_children() if process.pid not in others]
    return engine, core


async def in_flight(engine: VllmEngine) -> list[asyncio.Task[Completion]]:
    """Four calls, each with some tokens: they began together with a short one, which has ended."""
    calls = [asyncio.create_task(engine.generate([72, number], LONG)) for number in range(4)]
    await engine.generate([72], SHORT)
    return calls


def test_calls_in_flight_fail_when_vllms_process_is_killed(start_engine: Any, loop_thread: Any) -> None:
    engine, core = start_with_process(start_engine)

    async def kill() -> None:
        calls = await in_flight(engine)
        os.kill(core.pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(EngineError, match="EngineDeadError"):
                await call
        health = await engine.health()
        assert (health.is_alive, health.is_poisoned, health.num_in_flight) == (False, False, 0)
        assert health.reason is not None
        with pytest.raises(EngineError, match="EngineDeadError"):
            await engine.generate([72], SHORT)
        with pytest.raises(EngineError, match="EngineDeadError"):
            await engine.pause("wait")
        await engine.close()

    loop_thread.run(kill())
    assert not core.is_alive()


@pytest.mark.nightly
def test_closing_ends_calls_in_flight_with_an_error_and_leaves_no_process(start_engine: Any, loop_thread: Any) -> None:
    engine, core = start_with_process(start_engine)

    async def close() -> None:
        calls = await in_flight(engine)
        await engine.close()
        for call in calls:
            with pytest.raises(EngineError, match="closed"):
                await call
        assert not (await engine.health()).is_alive
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([72], SHORT)

    loop_thread.run(close())
    assert not core.is_alive()


@pytest.mark.nightly
def test_an_engine_that_is_killed_asleep_is_replaced_by_the_update_and_one_that_sleeps_can_be_closed(
    start_engine: Any, loop_thread: Any, policy: Policy, tmp_path: Path
) -> None:
    first, core = start_with_process(start_engine)

    async def make() -> Engine:
        return await VllmEngine.start(first._settings)

    async def die_asleep() -> Completion:
        engine = RebuildableEngine(first, make)
        sync = WeightSync([Target(engine, engine.rebuild)], kind="full", staging=Staging(policy, tmp_path / "staged"))
        await engine.sleep()
        os.kill(core.pid, signal.SIGKILL)
        await asyncio.to_thread(core.join)
        await engine.wake_up()
        with pytest.raises(EnginePoisonedError, match="it did not wake up"):
            await engine.generate([72], SHORT)
        await sync.publish(1)
        completion = await engine.generate([72], SHORT)
        await engine.sleep()
        await engine.close()
        return completion

    completion = loop_thread.run(die_asleep())
    assert completion.weight_version.tolist() == [1] * 10
    assert worst_gap(policy.model, [Turn([72], completion)]) <= 1e-4

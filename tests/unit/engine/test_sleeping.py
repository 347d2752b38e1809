"""An engine that sleeps while the learner works: who waits, what fails, and what stands behind it when it wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sleepy_engine import SleepyEngine, Step

from gspo_gym.config.build.engines import build_while_learning
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.base import Engine, SamplingParams, WeightUpdate, require_sleeping
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.errors import ConfigError, EnginePoisonedError, NonFiniteError
from gspo_gym.policy.weight_sync import Target, WeightSync

SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)
Make = Callable[[dict[str, Any]], RunConfig]


def answer(prompt: tuple[int, ...], turn: int) -> list[int]:
    return [5, 6]


def rebuildable(first: SleepyEngine, log: list[str]) -> RebuildableEngine:
    """Engines that can be rebuilt; those that come after the first do not fail."""

    async def make() -> Engine:
        log.append("make")
        return SleepyEngine(answer, log=log)

    return RebuildableEngine(first, make)


def test_calls_wait_for_an_engine_that_sleeps_and_are_answered_when_it_wakes() -> None:
    async def main() -> None:
        engine = rebuildable(SleepyEngine(answer), [])
        await engine.sleep()
        call = asyncio.create_task(engine.generate([1], SAMPLING))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not call.done()
        await engine.wake_up()
        assert (await call).token_ids.tolist() == [5, 6]
        assert engine.num_rebuilds == 0

    asyncio.run(main())


@pytest.mark.parametrize("step", ["sleep", "wake_up"])
def test_an_engine_that_fails_to_sleep_or_to_wake_is_replaced_by_the_update_that_follows(step: Step) -> None:
    async def main() -> list[str]:
        log: list[str] = []
        engine = rebuildable(SleepyEngine(answer, failing=[step], log=log), log)
        sync = WeightSync([Target(engine, engine.rebuild)])
        await engine.sleep()
        await engine.wake_up()
        with pytest.raises(EnginePoisonedError, match=f"it did not .*: {step}: out of memory"):
            await engine.generate([1], SAMPLING)  # nothing is sampled meanwhile
        await sync.publish(1)
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [1, 1]
        assert sync.num_rebuilds == engine.num_rebuilds == 1
        return log

    log = asyncio.run(main())
    assert log[-4:] == ["pause", "make", "pause", "apply 1"]  # the first pause finds it poisoned


def test_an_engine_that_was_replaced_while_it_slept_is_awake() -> None:
    async def main() -> None:
        log: list[str] = []
        engine = rebuildable(SleepyEngine(answer, log=log), log)
        await engine.sleep()

        async def bring_up(fresh: Engine) -> None:
            await fresh.pause("wait")
            await fresh.apply_weights(WeightUpdate(3, "shared"))
            await fresh.resume(3)

        await engine.rebuild(bring_up)
        await engine.wake_up()
        assert log == ["sleep", "make", "pause", "apply 3"]
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [3, 3]

    asyncio.run(main())


def test_an_engine_that_is_being_replaced_is_put_to_sleep_when_it_is_there() -> None:
    async def main() -> None:
        made, log = asyncio.Event(), list[str]()

        async def make() -> Engine:
            await made.wait()
            return SleepyEngine(answer, log=log)

        async def bring_up(fresh: Engine) -> None:
            log.append("bring up")

        engine = RebuildableEngine(SleepyEngine(answer), make)
        rebuilding, sleeping = asyncio.create_task(engine.rebuild(bring_up)), asyncio.create_task(engine.sleep())
        for _ in range(10):
            await asyncio.sleep(0)
        made.set()
        await asyncio.gather(rebuilding, sleeping)
        assert log == ["bring up", "sleep"]
        await engine.close()

    asyncio.run(main())


def test_an_engine_that_is_poisoned_while_it_sleeps_stays_so_and_can_be_closed() -> None:
    async def main() -> None:
        engine = rebuildable(SleepyEngine(answer), [])
        await engine.sleep()
        engine.poison("by hand")
        await engine.wake_up()
        with pytest.raises(EnginePoisonedError, match="by hand"):
            await engine.generate([1], SAMPLING)
        await engine.close()

    asyncio.run(main())


def test_the_learner_works_while_the_engine_sleeps_only_if_that_is_asked_for(make: Make) -> None:
    async def log_of(config: RunConfig) -> list[str]:
        log: list[str] = []
        async with build_while_learning(config, SleepyEngine(answer, log=log))():
            log.append("learn")
        return log

    assert asyncio.run(log_of(make({"vllm": {"sleep_while_learning": True}}))) == ["sleep", "learn", "wake_up"]
    assert asyncio.run(log_of(make({"vllm": {}}))) == ["learn"]
    assert asyncio.run(log_of(make({}))) == ["learn"]


def test_an_engine_is_not_woken_for_a_learner_that_failed_and_can_be_closed(make: Make, tmp_path: Path) -> None:
    engine = SleepyEngine(answer)

    async def fail() -> None:
        async with build_while_learning(make({"vllm": {"sleep_while_learning": True}}), engine)():
            raise NonFiniteError("five steps in a row")

    with pytest.raises(NonFiniteError, match="five steps in a row"):
        asyncio.run(fail())
    assert engine.log == ["sleep"]
    asyncio.run(engine.close())


def test_an_engine_that_cannot_sleep_is_refused(make: Make) -> None:
    engine = ScriptedEngine(answer)
    with pytest.raises(ConfigError, match="expected an engine that can sleep"):
        require_sleeping(engine)
    with pytest.raises(ConfigError, match="expected an engine that can sleep"):
        build_while_learning(make({"vllm": {"sleep_while_learning": True}}), engine)

"""Rebuilding an engine: which engine stays, which are closed, and what callers see when rebuilds overlap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from simulation import SimulatedLoop
from tracked_engine import TrackedEngine, Workshop

from gspo_gym.engine.base import Engine, SamplingParams, WeightUpdate
from gspo_gym.engine.replicas.rebuildable import BringUp, RebuildableEngine
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.errors import EngineError, EnginePoisonedError
from gspo_gym.types import Completion

SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)


def under(version: int) -> BringUp:
    """Brings an engine up under that version."""

    async def bring_up(engine: Engine) -> None:
        await engine.pause("wait")
        await engine.apply_weights(WeightUpdate(version, "shared"))
        await engine.resume(version)

    return bring_up


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(body: Callable[[Workshop, RebuildableEngine], Awaitable[None]], *, max_rebuilds: int = 100) -> Workshop:
    """Run a test with a rebuildable engine, and close it."""

    async def main() -> Workshop:
        workshop = Workshop()
        engine = RebuildableEngine(await workshop.make(), workshop.make, max_rebuilds=max_rebuilds)
        await body(workshop, engine)
        await engine.close()
        return workshop

    return asyncio.run(main())


@pytest.mark.parametrize("num_ticks", range(1, 13))
def test_of_two_rebuilds_at_once_the_later_stays_and_every_other_engine_is_closed(num_ticks: int) -> None:
    """The second is asked for at any await of the first, while a call waits."""

    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        first = asyncio.create_task(engine.rebuild(under(1)))
        waiting = asyncio.create_task(engine.generate([1], SAMPLING))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        await engine.rebuild(under(2))
        assert engine.weight_version == 2
        assert workshop.num_open == 1
        await settle()
        assert (engine.weight_version, workshop.num_open) == (2, 1)
        (outcome,) = await asyncio.gather(first, return_exceptions=True)
        assert outcome is None or "given up for a later rebuild" in str(outcome)
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [2, 2]
        await asyncio.gather(waiting, return_exceptions=True)

    assert run(body).num_open == 0


@pytest.mark.parametrize("num_ticks", range(1, 13))
def test_of_three_rebuilds_the_last_stays_whichever_the_second_interrupts(num_ticks: int) -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        first = asyncio.create_task(engine.rebuild(under(1)))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        second = asyncio.create_task(engine.rebuild(under(2)))
        await asyncio.sleep(0)
        await engine.rebuild(under(3))
        assert (engine.weight_version, workshop.num_open) == (3, 1)
        await asyncio.gather(first, second, return_exceptions=True)
        await settle()
        assert (engine.weight_version, workshop.num_open) == (3, 1)

    assert run(body).num_open == 0


def test_a_rebuild_that_is_overtaken_says_so_and_its_bring_up_is_cancelled() -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        ended: list[str] = []

        async def for_ever(fresh: Engine) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        first = asyncio.create_task(engine.rebuild(for_ever))
        await settle()
        assert not first.done()
        await engine.rebuild(under(2))
        with pytest.raises(EngineError, match="given up for a later rebuild"):
            await first
        assert ended == ["cancelled"]
        assert [one.is_closed for one in workshop.made] == [True, True, False]

    run(body)


def test_the_engine_that_is_replaced_is_closed_before_another_is_made() -> None:
    """Two models do not fit where one did."""

    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        workshop.may_make.clear()
        rebuilding = asyncio.create_task(engine.rebuild(under(1)))
        await settle()
        assert [one.is_closed for one in workshop.made] == [True]
        workshop.may_make.set()
        await rebuilding
        assert [one.is_closed for one in workshop.made] == [True, False]

    run(body)


def test_the_last_of_three_rebuilds_begins_when_the_first_has_closed_what_it_made() -> None:
    """The second is overtaken before it has begun, so that it waits for nothing itself."""

    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        async def for_ever(fresh: Engine) -> None:
            await asyncio.Event().wait()

        first = asyncio.create_task(engine.rebuild(for_ever))
        await settle()
        workshop.made[1].num_closing_turns = 50
        second = asyncio.create_task(engine.rebuild(under(2)))
        await asyncio.sleep(0)
        await engine.rebuild(under(3))
        assert workshop.max_open == 1
        await asyncio.gather(first, second, return_exceptions=True)

    run(body)


def test_a_rebuild_that_is_cancelled_while_it_closes_an_engine_makes_no_other() -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        workshop.made[0].num_closing_turns = 50
        rebuilding = asyncio.create_task(engine.rebuild(under(1)))
        await settle()
        rebuilding.cancel()
        await asyncio.wait({rebuilding})
        assert [one.is_closed for one in workshop.made] == [True]

    run(body)


def test_closing_does_not_wait_for_an_engine_that_is_never_made() -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        workshop.may_make.clear()
        rebuilding = asyncio.create_task(engine.rebuild(under(1)))
        await settle()
        closing = asyncio.create_task(engine.close())
        await settle()
        assert (closing.done(), rebuilding.done()) == (True, True)
        with pytest.raises(EngineError, match="closed"):
            await rebuilding
        await closing

    run(body)


@pytest.mark.parametrize("num_ticks", range(12))
def test_a_rebuild_whose_caller_is_cancelled_leaves_no_engine_open_and_the_next_one_succeeds(num_ticks: int) -> None:
    """Cancelled twice: the second time while it closes what it made."""

    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        rebuilding = asyncio.create_task(engine.rebuild(under(1)))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        is_over = rebuilding.done()
        rebuilding.cancel()
        await asyncio.sleep(0)
        rebuilding.cancel()
        await asyncio.wait({rebuilding})
        assert rebuilding.cancelled() != is_over
        assert workshop.num_open == (await engine.health()).is_alive  # none, or the one in place
        await engine.rebuild(under(2))
        assert (engine.weight_version, workshop.num_open) == (2, 1)

    assert run(body).num_open == 0


@pytest.mark.parametrize("num_ticks", range(12))
def test_closing_during_a_rebuild_closes_what_it_made_and_no_rebuild_follows(num_ticks: int) -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        rebuilding = asyncio.create_task(engine.rebuild(under(1)))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        await engine.close()
        assert workshop.num_open == 0
        (outcome,) = await asyncio.gather(rebuilding, return_exceptions=True)
        assert outcome is None or "closed" in str(outcome)
        with pytest.raises(EngineError, match="closed"):
            await engine.rebuild(under(2))
        await settle()
        assert workshop.num_open == 0

    run(body)


def test_what_the_maker_needed_goes_once_however_often_it_is_closed() -> None:
    async def main() -> None:
        workshop, removed = Workshop(), []
        engine = RebuildableEngine(await workshop.make(), workshop.make, on_close=lambda: removed.append("folder"))
        await engine.rebuild(under(1))
        assert removed == []
        await engine.close()
        await engine.close()
        assert removed == ["folder"]

    asyncio.run(main())


def test_a_call_that_finds_the_engine_dead_begins_one_rebuild_and_calls_during_it_wait() -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        engine.bring_up = under(4)
        await workshop.made[0].close()
        workshop.may_make.clear()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1], SAMPLING)
        waiting = [asyncio.create_task(engine.generate([1], SAMPLING)) for _ in range(3)]
        await settle()
        assert not any(call.done() for call in waiting)
        workshop.may_make.set()
        assert [(await call).weight_version.tolist() for call in waiting] == [[4, 4]] * 3
        assert (len(workshop.made), engine.num_rebuilds) == (2, 1)

    run(body)


def test_an_engine_that_dies_again_is_rebuilt_again() -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        engine.bring_up = under(4)
        for number in range(3):
            await workshop.made[number].close()
            with pytest.raises(EngineError, match="closed"):
                await engine.generate([1], SAMPLING)
            assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [4, 4]
        assert engine.num_rebuilds == 3

    run(body)


def test_a_call_waits_for_the_rebuild_that_follows_the_one_it_waited_for() -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        workshop.may_make.clear()
        first = asyncio.create_task(engine.rebuild(under(1)))
        await settle()
        waiting = asyncio.create_task(engine.generate([1], SAMPLING))
        await settle()
        second = asyncio.create_task(engine.rebuild(under(2)))
        await settle()
        assert not waiting.done()
        workshop.may_make.set()
        assert (await waiting).weight_version.tolist() == [2, 2]
        await second
        await asyncio.gather(first, return_exceptions=True)

    run(body)


def test_an_update_that_begins_during_a_rebuild_is_that_of_the_fresh_engine() -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        workshop.may_make.clear()
        rebuilding = asyncio.create_task(engine.rebuild(under(1)))
        await settle()
        pausing = asyncio.create_task(engine.pause("wait"))
        await settle()
        assert not pausing.done()
        workshop.may_make.set()
        await asyncio.gather(rebuilding, pausing)
        await engine.apply_weights(WeightUpdate(2, "shared"))
        await engine.resume(2)
        assert workshop.made[1].weight_version == engine.weight_version == 2

    run(body)


def test_calls_do_not_begin_again_a_rebuild_that_failed() -> None:
    """The weights that it was to have may be at fault: the update that follows decides."""

    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        engine.bring_up = under(1)

        async def fail(fresh: Engine) -> None:
            raise EngineError("no space for the weights")

        with pytest.raises(EnginePoisonedError, match="no space for the weights"):
            await engine.rebuild(fail)
        for _ in range(2):
            with pytest.raises(EnginePoisonedError, match="cannot be rebuilt: EngineError: no space for the weights"):
                await engine.generate([1], SAMPLING)
            await settle()
        assert (len(workshop.made), workshop.num_open) == (2, 0)
        await engine.rebuild(under(2))
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [2, 2]

    assert run(body).num_open == 0


def test_an_engine_that_was_rebuilt_too_often_is_poisoned_until_somebody_closes_it() -> None:
    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        await engine.rebuild(under(1))
        await engine.rebuild(under(2))
        with pytest.raises(EnginePoisonedError, match="rebuilt 2 times"):
            await engine.rebuild(under(3))
        with pytest.raises(EnginePoisonedError, match="rebuilt 2 times"):
            await engine.generate([1], SAMPLING)
        assert (len(workshop.made), engine.num_rebuilds) == (3, 2)

    assert run(body, max_rebuilds=2).num_open == 0


def test_an_update_that_succeeds_begins_the_count_of_rebuilds_again() -> None:
    async def body(_: Workshop, engine: RebuildableEngine) -> None:
        for version in (1, 4):
            await engine.rebuild(under(version))
            await engine.rebuild(under(version + 1))
            await under(version + 2)(engine)
        await engine.rebuild(under(7))
        await engine.rebuild(under(8))
        with pytest.raises(EnginePoisonedError, match="rebuilt 2 times without an update in between"):
            await engine.rebuild(under(9))
        assert engine.num_rebuilds == 6

    assert run(body, max_rebuilds=2).num_open == 0


def test_a_replica_that_was_rebuilt_too_often_may_be_again_after_an_update_of_the_others() -> None:
    """A node that leaves and returns: in between it could not be placed again and again."""

    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        routed = RoutedEngine([engine, await workshop.make()])
        await engine.rebuild(under(0))
        with pytest.raises(EnginePoisonedError, match="rebuilt 1 times"):
            await engine.rebuild(under(0))
        await under(1)(routed)
        await engine.rebuild(under(1))
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [1, 1]
        await routed.close()

    assert run(body, max_rebuilds=1).num_open == 0


def test_an_engine_is_rebuilt_a_hundred_times_unless_told_otherwise() -> None:
    async def main() -> None:
        workshop = Workshop()
        engine = RebuildableEngine(await workshop.make(), workshop.make)
        for version in range(1, 101):
            await engine.rebuild(under(version))
        with pytest.raises(EnginePoisonedError, match="rebuilt 100 times"):
            await engine.rebuild(under(101))
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("deadline_seconds", "left"), [(10.0, 7.0), (2.0, 0.0), (None, None)])
def test_what_is_left_of_a_deadline_after_the_rebuild_is_what_the_engine_gets(
    deadline_seconds: float | None, left: float | None
) -> None:
    given: list[float | None] = []

    class Noting(TrackedEngine):
        async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Completion:
            given.append(options.pop("deadline_seconds"))
            return await super().generate(tokens, sampling, **options)

    async def main() -> None:
        async def make() -> Engine:
            await asyncio.sleep(4.0)
            return Noting()

        await asyncio.sleep(100.0)  # a clock that does not begin at 0
        engine = RebuildableEngine(Noting(), make)
        rebuilding = asyncio.create_task(engine.rebuild(under(1)))
        await asyncio.sleep(1.0)  # of the 4 that it takes
        await asyncio.gather(
            engine.generate([1], SAMPLING, deadline_seconds=deadline_seconds), rebuilding, return_exceptions=True
        )
        await engine.close()

    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(0)) as runner:
        runner.run(main())
    assert given == [left]


@pytest.mark.parametrize("is_rebuilding", [False, True])
def test_an_engine_that_was_poisoned_is_not_revived_by_a_call_that_finds_it_dead(is_rebuilding: bool) -> None:
    """A failed publication poisons it: what it would be restored to is not for a call to decide."""

    async def body(workshop: Workshop, engine: RebuildableEngine) -> None:
        engine.bring_up = under(1)
        await workshop.made[0].close()
        if is_rebuilding:
            workshop.may_make.clear()
            with pytest.raises(EngineError, match="closed"):
                await engine.generate([1], SAMPLING)  # which begins a rebuild
            await settle()
        engine.poison("the update failed")
        workshop.may_make.set()
        await settle()
        for _ in range(2):
            with pytest.raises(EnginePoisonedError, match="the update failed"):
                await engine.generate([1], SAMPLING)
            await settle()
        assert len(workshop.made) == 1
        await engine.rebuild(under(2))
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [2, 2]

    assert run(body).num_open == 0


def test_a_session_that_was_replaced_with_its_engine_is_forgotten_without_an_error() -> None:
    class Gone(TrackedEngine):
        """Says that it cannot be reached, after it was replaced."""

        async def end_session(self, session_id: str) -> None:
            await rebuilt.wait()
            raise EngineError("connection refused")

    rebuilt = asyncio.Event()

    async def main() -> None:
        workshop = Workshop()
        engine = RebuildableEngine(Gone(), workshop.make)
        ending = asyncio.create_task(engine.end_session("a"))
        await settle()
        await engine.rebuild(under(1))
        rebuilt.set()
        await ending
        await engine.close()

    asyncio.run(main())

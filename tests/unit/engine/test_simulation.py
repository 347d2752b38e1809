"""The engine side under thousands of seeded schedules: wake-ups in any order, cancellations and deaths at any await.

Of every schedule: no sample is older than what was published when it was asked for, or of a version that was never
committed; every engine made is closed; every call ends; no task, future or lost exception is left. A failure names its
seed, which gives the same schedule again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from nightly_seed import FIRST_SEED
from simulated_run import SHAPES, MakeRebuildable, Shape, SimulatedRun, play
from simulated_schedule import NUM_STEPS, SimulatedTraining, train_ahead
from simulation import SimulatedLoop, StuckError, simulate

from gspo_gym.engine.gate import Gate
from gspo_gym.engine.replicas.rebuildable import BringUp, RebuildableEngine
from gspo_gym.engine.replicas.router import RoutedEngine

# About 2.5 seconds each; a router's schedules are longer.
NUM_SCHEDULES: dict[Shape, int] = {"plain": 250, "rebuildable": 250, "routed": 125, "routed rebuildables": 125}
NUM_TRAININGS = 250
NIGHTLY_FACTOR = 4
PROBS = (0.0, 0.005, 0.02, 0.05)

Scenario = Callable[[SimulatedLoop], Coroutine[Any, Any, None]]


def wrong_schedules(scenario: Scenario, seeds: range) -> list[str]:
    """What was wrong, with the seed; [] if nothing."""
    wrong = []
    for seed in seeds:
        try:
            simulate(seed, scenario)
        except Exception as error:
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
    return wrong


async def calls(
    loop: SimulatedLoop, *, shape: Shape, samples: list[int], make: MakeRebuildable = RebuildableEngine
) -> None:
    run = SimulatedRun(loop, shape, loop.choices.choice(("wait", "keep")), make)
    await play(run, interrupt_prob=loop.choices.choice(PROBS))
    samples.append(run.num_samples)


async def training(loop: SimulatedLoop, *, num_taken: list[int]) -> None:
    run = SimulatedRun(loop, loop.choices.choice(("plain", "rebuildable")), loop.choices.choice(("wait", "keep")))
    trained = SimulatedTraining(run, max_staleness=loop.choices.choice((1, 2)))
    await train_ahead(loop, trained, interrupt_prob=loop.choices.choice(PROBS[:3]))
    num_taken.append(len(trained.taken))


def check_calls(shape: Shape, seeds: range) -> None:
    samples: list[int] = []
    wrong = wrong_schedules(partial(calls, shape=shape, samples=samples), seeds)
    assert not wrong, f"{len(wrong)} of {len(seeds)} schedules: {wrong[:3]}"
    assert sum(samples) > 4 * len(seeds)  # of 12 calls each


def check_training(seeds: range) -> None:
    num_taken: list[int] = []
    wrong = wrong_schedules(partial(training, num_taken=num_taken), seeds)
    assert not wrong, f"{len(wrong)} of {len(seeds)} schedules: {wrong[:3]}"
    assert num_taken.count(2 * NUM_STEPS) > len(seeds) / 4  # undisturbed to the end, and disturbed ones that recovered


@pytest.mark.parametrize("shape", SHAPES)
def test_every_schedule_of_calls_and_updates_keeps_what_the_engine_side_promises(shape: Shape) -> None:
    check_calls(shape, range(NUM_SCHEDULES[shape]))


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_four_times_as_many_new_schedules_keep_what_the_engine_side_promises(shape: Shape) -> None:
    check_calls(shape, range(FIRST_SEED, FIRST_SEED + NIGHTLY_FACTOR * NUM_SCHEDULES[shape]))


def test_every_schedule_of_groups_played_ahead_is_fresh_enough_and_leaves_nothing() -> None:
    check_training(range(NUM_TRAININGS))


@pytest.mark.nightly
def test_four_times_as_many_new_schedules_of_groups_are_fresh_enough_and_leave_nothing() -> None:
    check_training(range(FIRST_SEED, FIRST_SEED + NIGHTLY_FACTOR * NUM_TRAININGS))


class Doubling(RebuildableEngine):
    """Awaits the end of the rebuild before, and only then takes its place: two that wait for it begin both."""

    async def rebuild(self, bring_up: BringUp) -> None:
        if self._is_rebuilding and self._rebuilding is not None:
            self._rebuilding.cancel()
            await asyncio.wait({self._rebuilding})
        mine = self._rebuilding = asyncio.create_task(self._replace(bring_up, ()))
        try:
            await asyncio.wait({mine})
        except asyncio.CancelledError:
            mine.cancel()
            raise


def test_the_simulation_finds_two_rebuilds_that_begin_at_once() -> None:
    wrong = wrong_schedules(partial(calls, shape="rebuildable", samples=[], make=Doubling), range(200))
    assert any("were not closed" in one for one in wrong)


def test_the_simulation_finds_answers_that_leave_before_their_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def do_not_wait(self: Gate) -> None:
        """Lets a kept call end under weights that are not attested."""

    monkeypatch.setattr(Gate, "_wait_for_commit", do_not_wait)
    wrong = wrong_schedules(partial(calls, shape="plain", samples=[]), range(200))
    assert any("are committed" in one for one in wrong)


def test_the_simulation_finds_a_router_that_goes_on_with_a_replica_which_missed_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RoutedEngine, "_require_committed", lambda *_: None)
    monkeypatch.setattr("gspo_gym.engine.replicas.replica_set.ReplicaSet.leave_out", lambda *_: None)
    wrong = wrong_schedules(partial(calls, shape="routed", samples=[]), range(200))
    assert any("was published" in one for one in wrong)


def test_a_schedule_that_hangs_or_leaves_a_task_is_found() -> None:
    async def hang(loop: SimulatedLoop) -> None:
        await asyncio.Event().wait()

    async def leave(loop: SimulatedLoop) -> None:
        left.append(asyncio.create_task(asyncio.sleep(1000.0)))

    @asynccontextmanager
    async def spinning() -> Any:
        yield

    async def spin(loop: SimulatedLoop) -> None:
        while True:
            async with spinning():
                await asyncio.sleep(0)

    left: list[asyncio.Task[None]] = []
    for scenario, reason in ((hang, "nothing will ever happen"), (leave, "1 tasks are left"), (spin, "no end after")):
        with pytest.raises((StuckError, AssertionError), match=reason):
            simulate(0, scenario)


def test_the_same_seed_gives_the_same_schedule_and_others_give_others() -> None:
    async def order(loop: SimulatedLoop, seen: list[int]) -> None:
        async def note(number: int) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(number)

        await asyncio.gather(*(note(number) for number in range(4)))

    def of(seed: int) -> list[int]:
        seen: list[int] = []
        simulate(seed, partial(order, seen=seen))
        return seen

    orders = [of(seed) for seed in range(10)]
    assert orders == [of(seed) for seed in range(10)]
    assert len({tuple(one) for one in orders}) == 10  # of 12! / 3!^4 = 369,600

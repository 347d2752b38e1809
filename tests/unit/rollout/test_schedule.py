"""Groups played ahead: which step gets which, how old they may be, and what becomes of those that are too late.

Time is virtual: an event loop whose clock jumps to the next timer, so that hours of rollouts take a moment and every
run of a test is the same. A group is one episode of two tokens; its number is its task's seed.

Pinned here:
1. over 10,000 groups with random delays, nothing older than the bound is handed out, nothing twice, nothing lost;
2. with one step ahead nothing is ever given up, and a step takes about the longer of playing and learning;
3. a group that is overtaken is cancelled as soon as no step may use it, counted, and replaced by a fresh task;
4. failures reach whoever takes groups, and nothing is left running, however it ends;
5. what was pending at a stop is played again first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from virtual_time import VirtualLoop

from gspo_gym.errors import EnginePoisonedError, RolloutError
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.rollout.schedule import OnDemand, PlayedAhead, is_played_again, oldest_version, staleness_metrics
from gspo_gym.seeding import generator
from gspo_gym.types import DroppedEpisode, Outcome, Segment, Task, Trajectory, TrajectoryGroup

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def episode_of(name: str, number: int, versions: Iterable[int]) -> Trajectory:
    """An episode with one sampled token of each version, after one token of a prompt."""
    sampled = list(versions)
    length = 1 + len(sampled)
    segment = Segment(
        token_ids=np.zeros(length, np.int32),
        action_mask=np.arange(length) > 0,
        rollout_logprobs=np.zeros(length, np.float32),
        turn_index=np.array([-1, *[0] * len(sampled)], np.int32),
        weight_version=np.array([-1, *sampled], np.int32),
    )
    return Trajectory(name, 0, Task("test/Env-v0", number), 0, (segment,), (), (), Outcome.TERMINATED)


class World:
    """An engine's version and a pool: group n takes `seconds(n)`, and samples at its beginning and at its end."""

    def __init__(self, seconds: Callable[[int], float], *, fails: Callable[[int], Exception | None] | None = None):
        self.version = 0
        self.begun: list[int] = []
        self.running: set[int] = set()
        self.cancelled: list[int] = []
        self.empty: set[int] = set()
        self.lag: Callable[[int], int] = lambda number: 0  # versions that a group's tokens are behind the engine's word
        self._seconds = seconds
        self._fails = fails or (lambda number: None)

    async def play(self, request: GroupRequest) -> TrajectoryGroup:
        number = request.task.seed
        self.begun.append(number)
        self.running.add(number)
        first = self.version
        try:
            await asyncio.sleep(self._seconds(number))
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            self.running.discard(number)
        if (error := self._fails(number)) is not None:
            raise error
        if number in self.empty:
            dropped = DroppedEpisode(request.group_id, Outcome.ENV_ERROR, "it broke")
            return TrajectoryGroup(request.task, (), request.size, (dropped,))
        lag = self.lag(number)
        trajectory = episode_of(request.group_id, number, (first - lag, self.version - lag))
        return TrajectoryGroup(request.task, (trajectory,), request.size)

    def schedule(
        self, *, staleness: int, groups: int = 2, steps: int = 100, ahead: int | None = None, **where: Any
    ) -> PlayedAhead:
        return PlayedAhead(
            self.play,
            lambda number, name: GroupRequest(name, Task("test/Env-v0", number), 1),
            weight_version=lambda: self.version,
            groups_per_step=groups,
            num_steps=steps,
            max_staleness=staleness,
            num_ahead=staleness if ahead is None else ahead,
            **where,
        )

    async def train(
        self,
        schedule: PlayedAhead,
        steps: Iterable[int],
        *,
        groups: int = 2,
        learn: Callable[[int], Awaitable[object]] = lambda step: asyncio.sleep(1.0),
    ) -> list[tuple[list[int], int]]:
        """The trainer's part: for each step the numbers of its groups, and how many episodes were given up."""
        done = []
        try:
            for step in steps:
                schedule.begin(step)
                taken = await schedule.take(groups)
                num_late = schedule.finish()
                await learn(step)
                self.version = step
                done.append(([group.task.seed for group in taken], num_late))
        finally:
            await schedule.close()
            assert not self.running
        return done


@pytest.mark.parametrize("staleness", [1, 2, 3, 5])
def test_nothing_older_than_the_bound_is_trained_on(staleness: int) -> None:
    """2,500 groups each, with lognormal delays of a heavy tail and a learner of random speed, seen from outside."""
    groups, steps = 10, 250
    world = World(lambda number: float(generator(1, staleness, number).lognormal(0.0, 1.5)))
    schedule = world.schedule(staleness=staleness, groups=groups, steps=steps)
    handed: Counter[int] = Counter()
    ages: list[int] = []
    num_late = 0

    async def main() -> None:
        nonlocal num_late
        for step in range(1, steps + 1):
            schedule.begin(step)
            taken = await schedule.take(groups)
            assert len(taken) == groups
            handed.update(group.task.seed for group in taken)
            for group in taken:
                versions = group.trajectories[0].segments[0].weight_version[1:]
                ages.append(step - 1 - int(versions.min()))
            num_late += schedule.finish()
            await asyncio.sleep(float(generator(2, staleness, step).uniform(0.0, 6.0)))
            world.version = step
        assert schedule.pending_tasks == ()
        await schedule.close()

    run(main())
    assert len(ages) == groups * steps == handed.total()
    assert sum(age > staleness or age < 0 for age in ages) == 0
    assert max(ages) == staleness  # it is reached, so the test has seen the edge
    assert set(handed.values()) == {1}
    assert len(world.begun) == len(set(world.begun)) == groups * steps + num_late == schedule.num_tasks
    assert (num_late > 0) == (staleness > 1)
    assert not world.running


def test_one_step_ahead_costs_what_the_longer_of_playing_and_learning_does() -> None:
    """Groups take 3 seconds and the learner 2: 3 for the first batch, then 3 a step, and 2 for the last update.

    Synchronously, 10 steps would take 50 seconds.
    """
    world = World(lambda number: 3.0)
    schedule = world.schedule(staleness=1, steps=10)

    async def main() -> tuple[list[tuple[list[int], int]], float]:
        done = await world.train(schedule, range(1, 11), learn=lambda step: asyncio.sleep(2.0))
        return done, asyncio.get_running_loop().time()

    done, seconds = run(main())
    assert seconds == pytest.approx(10 * 3.0 + 2.0)
    assert done == [([2 * step, 2 * step + 1], 0) for step in range(10)]
    assert world.begun == list(range(20))  # nothing for steps after the last


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0, 1.3])
def test_with_turns_of_a_heavy_tail_a_step_takes_hardly_longer_than_the_longer_of_both(share: float) -> None:
    """8 groups of 8 episodes of 4 turns, 0.2 s each on average (lognormal, sigma 1); learning takes `share` of playing.

    One step ahead, a step takes max(playing, learning), whose mean is more than the larger mean: most where both are
    alike. Two steps ahead, a batch has longer than a step. Simulated, so this is the schedule and nothing else.
    """
    groups, steps = 8, 100
    draws = generator(0, "turns").lognormal(np.log(0.2) - 0.5, 1.0, size=(steps * groups * 2, 8, 4))
    seconds = draws.sum(axis=2).max(axis=1)  # a group lasts as long as its longest episode
    playing = float(seconds[: steps * groups].reshape(steps, groups).max(axis=1).mean())
    learning = share * playing

    async def step_seconds(staleness: int) -> float:
        world = World(lambda number: float(seconds[number]))
        schedule = world.schedule(staleness=staleness, groups=groups, steps=steps)
        started = asyncio.get_running_loop().time()
        await world.train(schedule, range(1, steps + 1), groups=groups, learn=lambda step: asyncio.sleep(learning))
        return (asyncio.get_running_loop().time() - started) / steps

    one, two = run(step_seconds(1)), run(step_seconds(2))
    bound = max(playing, learning)
    assert bound <= one <= 1.15 * bound < playing + learning
    assert learning <= two <= 1.02 * bound
    if share <= 0.8:
        assert two < 0.9 * bound  # playing, the longer of both, is no bound any more


def test_with_one_step_ahead_a_slow_group_is_waited_for_and_its_age_is_1() -> None:
    world = World(lambda number: 50.0 if number == 2 else 1.0)
    schedule = world.schedule(staleness=1, steps=4)
    done = run(world.train(schedule, range(1, 5)))
    assert done == [([0, 1], 0), ([2, 3], 0), ([4, 5], 0), ([6, 7], 0)]
    assert world.cancelled == []


def test_a_group_that_is_overtaken_is_given_up_when_no_step_may_use_it_and_replaced() -> None:
    """Two steps ahead: 2 and 3 are begun under version 0, together with 4 and 5; step 3 trains version 2, their last.

    Number 2 never ends. Step 2 takes 3 and 4, step 3 takes 5 and 6: then 2 is of no use to step 4, which trains
    version 3. In its place, a fresh number is played beside the two of every step.
    """
    world = World(lambda number: 1e9 if number == 2 else 1.0)
    schedule = world.schedule(staleness=2, steps=8)
    seen: list[tuple[int, list[int]]] = []

    async def learn(step: int) -> None:
        await asyncio.sleep(0)
        seen.append((step, list(world.cancelled)))  # at once, not at the end of the update
        await asyncio.sleep(2.0)

    done = run(world.train(schedule, range(1, 9), learn=learn))
    assert [numbers for numbers, _ in done][:3] == [[0, 1], [3, 4], [5, 6]]
    assert [num_late for _, num_late in done] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert seen[1:3] == [(2, []), (3, [2])]
    assert sorted(number for numbers, _ in done for number in numbers) == [n for n in range(17) if n != 2]


def test_what_a_group_that_was_given_up_raises_ends_the_run_at_the_next_step() -> None:
    class Breaking(World):
        async def play(self, request: GroupRequest) -> TrajectoryGroup:
            try:
                return await super().play(request)
            except asyncio.CancelledError:
                raise KeyError("its end could not be written down") from None

    world = Breaking(lambda number: 1e9 if number == 2 else 1.0)  # given up in step 3, as above
    schedule = world.schedule(staleness=2, steps=8)
    with pytest.raises(KeyError, match="written down"):
        run(world.train(schedule, range(1, 9)))
    assert world.version == 3


def test_finished_groups_are_taken_in_the_order_in_which_they_were_begun() -> None:
    """Later ones may be quicker, but where there is a choice the oldest goes first: it has the least time left."""
    world = World(lambda number: 10.0 - number)  # 9 is the quickest
    schedule = world.schedule(staleness=3, steps=5)
    done = run(world.train(schedule, range(1, 6), learn=lambda step: asyncio.sleep(20.0)))
    assert [numbers for numbers, _ in done] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_tokens_that_are_older_than_the_engine_says_are_no_basis_to_train_on() -> None:
    world = World(lambda number: 1.0)
    world.lag = lambda number: 2 if number in (6, 7) else 0
    schedule = world.schedule(staleness=1, steps=9)
    # 6 and 7 are begun under version 2, for step 4, and come back sampled from version 0: they are replaced
    done = run(world.train(schedule, range(1, 10)))
    assert done[2:5] == [([4, 5], 0), ([8, 9], 2), ([10, 11], 0)]


def test_an_engine_that_never_gets_new_weights_is_an_error_and_no_endless_loop() -> None:
    world = World(lambda number: 1.0)
    world.version = -3
    with pytest.raises(RolloutError, match=r"step 1: the engine samples from weights that are 3 versions old"):
        run(world.train(world.schedule(staleness=2), [1]))
    with pytest.raises(RolloutError, match=r"step 1: the engine samples from"):  # also before a single group
        run(world.train(world.schedule(staleness=2, groups=1), [1], groups=1))
    world.version = -2  # just not too old
    assert run(world.train(world.schedule(staleness=2, ahead=0), [1])) == [([0, 1], 0)]
    world.version, world.lag = 0, lambda number: 5
    with pytest.raises(RolloutError, match=r"group_000000 was sampled from weights that are 5 versions old.*is 2"):
        run(world.train(world.schedule(staleness=2), [1]))


def test_weights_that_are_sent_rarely_leave_less_to_play_ahead() -> None:
    """Sent after every second step, weights are up to 1 version behind; a bound of 2 then leaves one step ahead."""
    world = World(lambda number: 1.0)
    schedule = world.schedule(staleness=2, ahead=1, steps=12)
    ages: list[int] = []

    async def main() -> None:
        for step in range(1, 13):
            schedule.begin(step)
            taken = await schedule.take(2)
            ages.extend(step - 1 - oldest_version(group.trajectories[0]) for group in taken)
            assert schedule.finish() == 0
            await asyncio.sleep(0.5)
            world.version = step - step % 2
        await schedule.close()

    run(main())
    assert max(ages) == 2


@pytest.mark.parametrize("error", [EnginePoisonedError("half an update"), OSError("no space left")])
def test_what_ends_a_group_in_the_background_reaches_whoever_takes_groups(error: Exception) -> None:
    world = World(lambda number: 1.0 if number != 3 else 0.5, fails=lambda number: error if number == 3 else None)
    schedule = world.schedule(staleness=2, steps=9)
    steps: list[int] = []

    async def learn(step: int) -> None:
        steps.append(step)
        await asyncio.sleep(5.0)

    with pytest.raises(type(error), match=str(error)):
        run(world.train(schedule, range(1, 10), learn=learn))
    assert steps == [1]
    assert not world.running


def test_a_batch_without_a_single_episode_is_an_error_and_a_lost_group_is_not() -> None:
    world = World(lambda number: 1.0)
    world.empty = {0, 2, 3}
    schedule = world.schedule(staleness=1)
    with pytest.raises(RolloutError, match="all 2 groups"):
        run(world.train(schedule, [1, 2]))
    assert schedule.num_tasks == 4  # step 1 had number 1 and went on


def test_closing_ends_what_is_played_and_waits_for_it() -> None:
    world = World(lambda number: 1.0 if number < 2 else 1e9)
    schedule = world.schedule(staleness=3)

    async def main() -> set[asyncio.Task[Any]]:
        schedule.begin(1)
        await schedule.take(2)
        schedule.finish()
        await asyncio.sleep(1.0)
        assert world.running == {2, 3, 4, 5, 6, 7}
        await schedule.close()
        assert schedule.pending_tasks == ()
        await schedule.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert run(main()) == set()
    assert (world.running, sorted(world.cancelled)) == (set(), [2, 3, 4, 5, 6, 7])


def test_what_was_pending_is_played_again_before_anything_new() -> None:
    """Stopped after step 3 with two steps ahead and a straggler, which step 4 might still have used."""
    slow = 7
    first = World(lambda number: 1e9 if number == slow else 1.0)
    schedule = first.schedule(staleness=2, steps=8)
    state: dict[str, Any] = {}

    async def note(step: int) -> None:
        await asyncio.sleep(1.5)
        state.update(num_tasks=schedule.num_tasks, pending_tasks=schedule.pending_tasks)

    before = run(first.train(schedule, [1, 2, 3], learn=note))
    taken = {number for numbers, _ in before for number in numbers}
    assert set(state["pending_tasks"]) == set(range(state["num_tasks"])) - taken
    assert slow in state["pending_tasks"]

    second = World(lambda number: 1.0)
    second.version = 3
    resumed = second.schedule(staleness=2, steps=8, **state)
    assert resumed.pending_tasks == state["pending_tasks"]
    after = run(second.train(resumed, range(4, 9)))
    assert second.begun[: len(state["pending_tasks"])] == list(state["pending_tasks"])
    both = [number for numbers, _ in before + after for number in numbers]
    assert sorted(both) == list(range(16))


def test_what_is_left_of_the_pending_ones_is_named_in_order_with_those_that_are_played() -> None:
    """Of 1, 4 and 6, the step plays 1 and 4 again, of which 4 lasts; 6 waits."""
    world = World(lambda number: 1e9 if number == 4 else 1.0)

    async def main() -> tuple[int, ...]:
        schedule = world.schedule(staleness=2, num_tasks=9, pending_tasks=(6, 1, 4))
        schedule.begin(1)
        await schedule.take(1)
        asking = asyncio.create_task(schedule.take(1))  # of which nothing comes
        await asyncio.sleep(0)
        asking.cancel()
        pending = schedule.pending_tasks
        await schedule.close()
        return pending

    assert run(main()) == (4, 6)


def test_groups_on_demand_are_played_when_they_are_asked_for_and_named_by_step_and_place() -> None:
    played: list[list[tuple[str, int]]] = []

    async def collect(requests: Sequence[GroupRequest]) -> Sequence[TrajectoryGroup]:
        played.append([(request.group_id, request.task.seed) for request in requests])
        return [await World(lambda number: 0.0).play(request) for request in requests]

    def request(number: int, name: str) -> GroupRequest:
        return GroupRequest(name, Task("test/Env-v0", number), 1)

    async def main() -> None:
        schedule = OnDemand(collect, request, num_tasks=5)
        for step, counts in ((3, (2, 1)), (4, (1,))):
            schedule.begin(step)
            for count in counts:
                assert len(await schedule.take(count)) == count
            assert (schedule.finish(), schedule.pending_tasks) == (0, ())
        await schedule.close()
        assert schedule.num_tasks == 9

    run(main())
    assert played == [
        [("step_000003/group_0000", 5), ("step_000003/group_0001", 6)],
        [("step_000003/group_0002", 7)],
        [("step_000004/group_0000", 8)],
    ]


def test_staleness_is_counted_from_the_oldest_sampled_token() -> None:
    task = Task("test/Env-v0", 0)
    old, new = episode_of("a", 0, (3, 5, 4)), episode_of("b", 0, (5, 5))
    assert (oldest_version(old), oldest_version(new)) == (3, 5)  # the prompt's token, which has none, does not count
    assert oldest_version(episode_of("c", 0, ())) == -1  # nothing was sampled
    group = TrajectoryGroup(task, (old, new), 2)
    assert staleness_metrics([group], version=5, num_dropped=4) == {
        "rollout/staleness_mean": (2 + 0) / 2,
        "rollout/staleness_max": 2.0,
        "rollout/stale_dropped": 4.0,
    }


@pytest.mark.parametrize(
    ("trajectory_id", "is_again"),
    [
        ("step_000002/group_0003/1", False),
        ("step_000003/group_0000/0", True),
        ("group_000004/0", False),  # trained on, or given up
        ("group_000005/0", True),  # played ahead, and pending
        ("group_000007/0", True),  # asked for after the checkpoint
    ],
)
def test_what_a_checkpoint_of_step_two_has_not_trained_on_is_played_again(trajectory_id: str, is_again: bool) -> None:
    assert is_played_again(trajectory_id, step=2, num_tasks=7, pending_tasks=(5, 6)) is is_again

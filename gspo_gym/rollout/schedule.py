"""The groups of a step: played on demand, or ahead, while the learner works.

Staleness is counted in versions: a step trains weights of version v, and a sample is v - u versions old if its oldest
token was sampled from version u. The bound is hard because it is checked twice: by the version committed when a group
was asked for, which includes waiting for a slot and waiting to be taken, and by every token that comes back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gspo_gym.errors import EngineError, RolloutError
from gspo_gym.rollout.pool import GroupRequest, require_episodes
from gspo_gym.types import Trajectory, TrajectoryGroup

MakeRequest = Callable[[int, str], GroupRequest]  # of the group of that number in the run, under that name


class Schedule(Protocol):
    """Hands out groups, step by step."""

    @property
    def num_tasks(self) -> int:
        """Groups that were asked for so far; the next one gets this number, and with it its task."""
        ...

    @property
    def pending_tasks(self) -> tuple[int, ...]:
        """Numbers of the groups that are asked for and not handed out, ascending: to be played again after a stop."""
        ...

    def begin(self, step: int) -> None:
        """Begin a step, which trains the weights of version step - 1."""
        ...

    async def take(self, count: int) -> Sequence[TrajectoryGroup]:
        """Return so many groups; some may have lost all their episodes.

        Raises:
            RolloutError: no episode of them could be used.
            EnginePoisonedError: the engine must be rebuilt.
        """
        ...

    def finish(self) -> int:
        """End a step's collecting; return how many episodes were given up as too old since `begin`."""
        ...

    async def close(self) -> None:
        """End the episodes in play; closing twice is fine."""
        ...


class OnDemand:
    """Schedule that plays groups on demand with the newest weights: strictly on-policy.

    Names count from 0 in each step; `num_tasks` were asked for by an earlier part of the run.
    """

    def __init__(
        self,
        collect: Callable[[Sequence[GroupRequest]], Awaitable[Sequence[TrajectoryGroup]]],
        request: MakeRequest,
        *,
        num_tasks: int = 0,
    ) -> None:
        self._collect = collect
        self._request = request
        self._num_tasks = num_tasks
        self._step = 0
        self._first = num_tasks  # number of the step's first group

    @property
    def num_tasks(self) -> int:
        return self._num_tasks

    @property
    def pending_tasks(self) -> tuple[int, ...]:
        return ()

    def begin(self, step: int) -> None:
        self._step, self._first = step, self._num_tasks

    async def take(self, count: int) -> Sequence[TrajectoryGroup]:
        numbers = range(self._num_tasks, self._num_tasks + count)
        self._num_tasks = numbers.stop
        names = (f"step_{self._step:06d}/group_{number - self._first:04d}" for number in numbers)
        return await self._collect(
            [self._request(*request_arguments) for request_arguments in zip(numbers, names, strict=True)]
        )

    def finish(self) -> int:
        return 0  # nothing is ever too old

    async def close(self) -> None:
        """Do nothing: nothing is played unless `take` waits for it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Played:
    """A finished group, and the oldest version: that of its start or of one of its tokens."""

    group: TrajectoryGroup
    oldest: int


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """A group that is being played or waits to be taken; `version` was committed when it was asked for."""

    number: int
    step: int
    version: int
    request: GroupRequest
    playing: asyncio.Task[_Played]


class PlayedAhead:
    """Schedule that plays groups of coming steps while the learner works, and gives up those that become too old.

    After each step's groups are taken, as many are in play as `num_ahead` further steps need. A step takes those that
    are finished, the longest begun first. A group is given up as soon as no coming step may train on it: cancelled if
    it is still played, counted, and replaced by one of a fresh task. A group is as old as its oldest sample.

    Args:
        play: plays one group; see `RolloutPool.play_group`.
        weight_version: the version that samples now.
        groups_per_step: groups that a step takes, unless it asks for more.
        num_steps: of the run; nothing is played for steps after the last.
        max_staleness: the bound, in versions.
        num_ahead: steps that are played for in advance: `max_staleness`, less what the engine's weights lag behind.
        num_tasks, pending_tasks: where an earlier part of the run stopped; the pending ones are played first.
    """

    def __init__(
        self,
        play: Callable[[GroupRequest], Awaitable[TrajectoryGroup]],
        request: MakeRequest,
        *,
        weight_version: Callable[[], int],
        groups_per_step: int,
        num_steps: int,
        max_staleness: int,
        num_ahead: int,
        num_tasks: int = 0,
        pending_tasks: Iterable[int] = (),
    ) -> None:
        self._play = play
        self._request = request
        self._weight_version = weight_version
        self._groups_per_step = groups_per_step
        self._num_steps = num_steps
        self._max_staleness = max_staleness
        self._num_ahead = num_ahead
        self._num_tasks = num_tasks
        self._again = deque(sorted(pending_tasks))
        self._begun_groups: list[_Begun] = []  # not handed out, in the order in which they were begun
        self._ending: set[asyncio.Task[_Played]] = set()  # given up, and closing their environments
        self._step: int  # this and the next are set by `begin`
        self._num_late: int
        self._failure: BaseException | None = None  # of a group that was given up

    @property
    def num_tasks(self) -> int:
        return self._num_tasks

    @property
    def pending_tasks(self) -> tuple[int, ...]:
        return tuple(sorted([*self._again, *(group.number for group in self._begun_groups)]))

    def begin(self, step: int) -> None:
        self._step, self._num_late = step, 0

    async def take(self, count: int) -> Sequence[TrajectoryGroup]:
        """See `Schedule.take`; a RolloutError also if the engine samples from weights that are always too old."""
        if self._failure is not None:
            raise self._failure
        # With `num_ahead` 1 it waits for every group, and none is too old; with more it does not wait for a group that
        # a whole batch of later ones has overtaken.
        while len(ready := self._ready()) < count:
            self._ask_for(count - len(self._begun_groups))
            still = [group.playing for group in self._begun_groups if not group.playing.done()]
            await asyncio.wait(still, return_when=asyncio.FIRST_COMPLETED)
        ready_groups = ready[:count]
        self._begun_groups = [group for group in self._begun_groups if group not in ready_groups]
        groups = tuple(group.playing.result().group for group in ready_groups)
        require_episodes(groups)
        return groups

    def finish(self) -> int:
        """See `Schedule.finish`; asks for what the coming steps will need."""
        for group in [g for g in self._begun_groups if self._step - g.version > self._max_staleness]:
            self._give_up(group)  # the next step trains version `step`, which is too far from its own
        num_ahead = min(self._num_ahead, self._num_steps - self._step)
        self._ask_for(num_ahead * self._groups_per_step - len(self._begun_groups))
        return self._num_late

    async def close(self) -> None:
        """Cancel the groups in play and wait until their environments are closed."""
        for group in self._begun_groups:
            self._end(group)
        self._begun_groups.clear()
        if self._ending:
            await asyncio.wait(self._ending)

    def _ready(self) -> list[_Begun]:
        done_groups = [group for group in self._begun_groups if group.playing.done()]
        # Giving them up favours short episodes a little, and is the price of not waiting for the longest.
        late = [group for group in done_groups if self._age(group) > self._max_staleness]
        for group in late:
            self._give_up(group)
            if group.step == self._step:
                self._refuse(self._age(group), f"{group.request.group_id} was sampled from")
        return [group for group in done_groups if group not in late]

    def _age(self, group: _Begun) -> int:
        return self._step - 1 - group.playing.result().oldest

    def _ask_for(self, count: int) -> None:
        version = self._weight_version()  # now and not when play begins: waiting for a free slot makes a group older
        for _ in range(count):
            if self._step - 1 - version > self._max_staleness:
                self._refuse(self._step - 1 - version, "the engine samples from")
            number = self._again.popleft() if self._again else self._num_tasks
            self._num_tasks = max(self._num_tasks, number + 1)
            request = self._request(number, f"group_{number:06d}")
            playing = asyncio.create_task(self._play_and_date(request, version))
            self._begun_groups.append(_Begun(number, self._step, version, request, playing))

    async def _play_and_date(self, request: GroupRequest, version: int) -> _Played:
        group = await self._play(request)
        return _Played(group, min([version, *map(oldest_version, group.trajectories)]))

    def _refuse(self, age: int, subject: str) -> None:
        raise RolloutError(
            f"step {self._step}: {subject} weights that are {age} versions old, and training.max_staleness is "
            f"{self._max_staleness}: groups that are begun now would be given up again and again. Raise it, or see why "
            "new weights do not reach the engine"
        )

    def _give_up(self, group: _Begun) -> None:
        # Whole: without all its siblings, a sample would be compared with the quick ones alone.
        self._begun_groups.remove(group)
        self._num_late += group.request.size
        self._end(group)

    def _end(self, group: _Begun) -> None:
        self._ending.add(group.playing)
        group.playing.add_done_callback(self._note_end)
        group.playing.cancel()

    def _note_end(self, playing: asyncio.Task[_Played]) -> None:
        # The exception of a group that was given up is kept for the next `take`, which would otherwise miss it. An
        # engine's error ends the groups that are trained on, too, and is raised by them.
        self._ending.discard(playing)
        error = None if playing.cancelled() else playing.exception()
        if error is not None and not isinstance(error, EngineError):
            self._failure = self._failure or error


def is_played_again(trajectory_id: str, *, step: int, num_tasks: int, pending_tasks: Collection[int]) -> bool:
    """Return whether a run that goes on after `step` plays this episode again, under either schedule.

    `num_tasks` and `pending_tasks` are those of the checkpoint, see `Schedule`.
    """
    group = trajectory_id.partition("/")[0]
    number = int(group.rpartition("_")[2])
    if group.startswith("step_"):
        return number > step
    return number >= num_tasks or number in pending_tasks


def oldest_version(trajectory: Trajectory) -> int:
    """Return the oldest version that sampled a token of the episode; -1 if one is unknown."""
    versions_by_segment = [segment.weight_version[segment.action_mask] for segment in trajectory.segments]
    return min((int(versions.min()) for versions in versions_by_segment if len(versions)), default=-1)


def staleness_metrics(groups: Sequence[TrajectoryGroup], *, version: int, num_dropped: int) -> dict[str, float]:
    """Return the ages of the samples of a batch that trains weights of `version`; `num_dropped` episodes were older."""
    ages = [version - oldest_version(trajectory) for group in groups for trajectory in group.trajectories]
    return {
        "rollout/staleness_mean": sum(ages) / len(ages),
        "rollout/staleness_max": float(max(ages)),
        "rollout/stale_dropped": float(num_dropped),
    }

"""Many episodes at once, in groups of the same task, with retries and a ledger.

The episodes depend only on the requests and the run seed, never on concurrency, order or timing. The pool knows
nothing of rewards beyond whether an episode has one, nor whether it is played here or by a task app.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gspo_gym.errors import ConfigError, EngineLostError, EnvDiedError, RolloutError
from gspo_gym.rollout.episode import EpisodeRequest, PlayEpisode
from gspo_gym.rollout.forks import Replay, draw_replays
from gspo_gym.rollout.ledger import Dispatched, Disposition, Ledger, Terminal
from gspo_gym.rollout.limits import GroupScoring, PoolLimits, Scoring, Slots
from gspo_gym.seeding import child_seed
from gspo_gym.types import DroppedEpisode, Outcome, Task, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """`size` episodes of one task.

    `group_id` names the group in the run, and with it its episodes. `seed_name` is what the sampling seeds derive from
    (with the run seed, the member and the attempt); None means the group id. Members count from `first_member`: parts
    of a group can be asked for one by one. Each episode is continued by `forks_per_episode` more, of which the numbers
    follow those of all episodes; see `draw_replays`.
    """

    group_id: str
    task: Task
    size: int
    seed_name: str | None = None
    first_member: int = 0
    forks_per_episode: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"GroupRequest {self.group_id}: size: expected at least 1, got {self.size}")

    @property
    def members(self) -> range:
        """Return the numbers of the group's episodes."""
        return range(self.first_member, self.first_member + self.size)

    def forks_of(self, member: int) -> range:
        """Return the numbers of the forks of an episode."""
        first = self.members.stop + (member - self.first_member) * self.forks_per_episode
        return range(first, first + self.forks_per_episode)


# Called with every finished attempt and what became of it; a KEPT one may still be dropped with its group.
OnEpisode = Callable[[Trajectory, Disposition], None]


@dataclass(frozen=True, slots=True)
class _Finished:
    """The last attempt of one member, and why it is not kept (None: it is)."""

    trajectory: Trajectory
    reason: str | None
    is_unscored: bool = False  # it was played, and `scoring` could not score it


class RolloutPool:
    """Player of groups of episodes.

    An attempt that ends in an infrastructure failure is repeated in a fresh environment, up to `max_attempts`; then it
    is dropped. Its sampling seed is a fresh one, unless the engine was lost, or the environment by no doing of the
    actions: then the same episode is played again, so that a process that dies changes nothing. An episode without a
    score from `scoring` is repeated, then dropped; where `scoring` compares a group, it is dropped at once.

    Args:
        play: plays one attempt in a fresh environment.
        run_seed: all sampling seeds derive from it.
        ledger: what was dispatched and how it ended; None: a new one, which only counts.
        on_episode: called with every finished attempt, for progress; must be quick.
        keep_unscored: keep episodes in which the environment scored no turn, to be scored afterwards.
        scoring: gives finished episodes their rewards in place of the environment; None: the environment does.

    Attributes:
        num_retries: attempts that failed and were played again.
    """

    def __init__(
        self,
        *,
        play: PlayEpisode,
        pool_limits: PoolLimits,
        run_seed: int,
        ledger: Ledger | None = None,
        on_episode: OnEpisode | None = None,
        keep_unscored: bool = False,
        scoring: Scoring | GroupScoring | None = None,
    ) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.num_retries = 0
        self._play_episode = play
        self._pool_limits = pool_limits
        self._run_seed = run_seed
        self._on_episode = on_episode
        self._keep_unscored = keep_unscored
        self._scoring = scoring
        self._slots = Slots(pool_limits.max_concurrent_rollouts)

    async def collect(self, requests: Sequence[GroupRequest]) -> tuple[TrajectoryGroup, ...]:
        """Play all groups at once; one group per request, in their order, its trajectories in the order of members.

        A group that kept fewer than `min_group_fraction` of its episodes (or fewer than 2 where 2 were asked for) is
        dropped whole: it comes back, to be counted, with no trajectories and all its episodes in `dropped`.

        Calls may overlap; `max_concurrent_rollouts` holds over all of them. If this call is cancelled, every running
        episode is closed and entered as CANCELLED before it returns.

        Raises:
            ConfigError: two requests have the same group id.
            RolloutError: all groups were dropped; says the most frequent reasons.
            EnginePoisonedError: the engine must be rebuilt; everything still running was cancelled.
        """
        groups = await self.play_groups(requests)
        if groups:
            require_episodes(groups)
        return groups

    async def play_group(self, request: GroupRequest) -> TrajectoryGroup:
        """Play one group of many that are asked for one by one; as `collect`, but a dropped group is an answer."""
        (group,) = await self.play_groups([request])
        return group

    async def play_groups(self, requests: Sequence[GroupRequest]) -> tuple[TrajectoryGroup, ...]:
        """Play all groups at once, as `collect`, but also "all of them were dropped" is an answer."""
        names = Counter((request.group_id, member) for request in requests for member in request.members)
        duplicates = [name for (name, _), count in names.items() if count > 1]
        if duplicates:
            raise ConfigError(f"collect: group ids must be unique, but {duplicates[0]!r} occurs more than once")
        results_by_id: dict[str, _Finished] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    tasks.create_task(self._play_members(request, results_by_id))
        except BaseException as error:
            # Finished members wait for their group to be settled, and now there will be none.
            for done in results_by_id.values():
                self._settle(done.trajectory, Disposition.DROPPED, done.reason or "its collection was stopped")
            raise _first_cause(error) from None
        return tuple(self._assemble(request, results_by_id) for request in requests)

    async def run_tasks(
        self, tasks: Sequence[Task], *, label: str, samples: Sequence[int] | None = None
    ) -> tuple[TrajectoryGroup, ...]:
        """Play one episode of each task, for evaluation: one group of size 1 per task, in their order.

        `label` names the occasion: the same tasks can be played again under another one. `samples` number the episodes
        of tasks that are named several times; None: each is the first of its task.
        """
        # The label does not enter the sampling seeds: a task is sampled with the same seed on every occasion.
        numbered = zip(tasks, samples or [0] * len(tasks), strict=True)
        return await self.play_groups(
            [
                GroupRequest(f"{label}/{task.task_id}", task, size=1, seed_name=task.task_id, first_member=sample)
                for task, sample in numbered
            ]
        )

    async def _play_members(self, request: GroupRequest, results_by_id: dict[str, _Finished]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in request.members:
                tasks.create_task(self._play_member(request, member, results_by_id))
        done = {member: results_by_id[_trajectory_id(request, member)] for member in request.members}
        usable = {member: result.trajectory for member, result in done.items() if result.reason is None}
        if request.forks_per_episode and len(usable) >= self._min_good(request):
            await self._play_forks(request, usable, results_by_id)
        if isinstance(self._scoring, GroupScoring):
            for trajectory, fault in await self._scoring.score(list(usable.values())):
                results_by_id[trajectory.trajectory_id] = _scored(trajectory, fault)

    async def _play_forks(
        self, request: GroupRequest, usable: Mapping[int, Trajectory], results_by_id: dict[str, _Finished]
    ) -> None:
        """Continue the episodes of a group; which turns follows from them and the group's name."""
        replays = draw_replays(
            list(usable.values()), seed=child_seed(self._run_seed, "forks", request.seed_name or request.group_id)
        )
        async with asyncio.TaskGroup() as tasks:
            for member, replay in zip(usable, replays, strict=True):
                for fork in request.forks_of(member) if replay is not None else ():
                    tasks.create_task(self._play_member(request, fork, results_by_id, replay))

    async def _play_member(
        self, request: GroupRequest, member: int, results_by_id: dict[str, _Finished], replay: Replay | None = None
    ) -> None:
        last_attempt = self._pool_limits.max_attempts - 1
        seed_name = request.group_id if request.seed_name is None else request.seed_name
        draw = 0
        for attempt in range(last_attempt + 1):
            episode = EpisodeRequest(
                trajectory_id=_trajectory_id(request, member),
                task=request.task,
                sampling_seed=child_seed(self._run_seed, "group", seed_name, member, draw),
                attempt=attempt,
                replay=replay,
            )
            done = await self._play_attempt(episode)
            trajectory, reason = done.trajectory, done.reason
            # A first prompt that does not fit, or an environment that scores nothing, would end the same way again.
            if attempt < last_attempt and self._is_played_again(done):
                self.num_retries += 1
                draw += not _is_lost(trajectory)
                self._settle(trajectory, Disposition.RETRIED, reason)
                self._report(trajectory, Disposition.RETRIED)
                continue
            results_by_id[trajectory.trajectory_id] = done
            self._report(trajectory, Disposition.KEPT if reason is None else Disposition.DROPPED)
            return

    async def _play_attempt(self, episode: EpisodeRequest) -> _Finished:
        """Play and score an attempt. It gives up its slot while it waits for a score, unless too many wait."""
        scoring = self._scoring
        async with self._slots.of_this_loop():
            task = episode.task
            self.ledger.dispatch(
                Dispatched(episode.trajectory_id, episode.attempt, task.task_id, task.seed, episode.sampling_seed)
            )
            with self._settling(episode):
                trajectory = await self._play_episode(episode)
                if not isinstance(scoring, Scoring) or is_failed(trajectory):
                    keep_unscored = self._keep_unscored or scoring is not None
                    return _Finished(trajectory, _reason_to_drop(trajectory, keep_unscored=keep_unscored))
                # Waited for inside the slot: where too many episodes wait for a score, no further one begins.
                room = await scoring.wait_for_room()
        # Its slot is given up while it waits for a score: another episode plays meanwhile.
        with self._settling(episode):
            return _scored(*await scoring.score(trajectory, room))

    @contextlib.contextmanager
    def _settling(self, episode: EpisodeRequest) -> Iterator[None]:  # every dispatched attempt must end in the ledger
        try:
            yield
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            outcome = Outcome.CANCELLED if is_cancelled else Outcome.ENGINE_ERROR
            reason = "it was cancelled" if is_cancelled else f"{type(error).__name__}: {error}"
            self.ledger.settle(Terminal(episode.trajectory_id, episode.attempt, outcome, Disposition.DROPPED, reason))
            raise

    def _is_played_again(self, done: _Finished) -> bool:
        if done.is_unscored:
            return self._scoring is not None
        return done.trajectory.outcome.is_infrastructure_failure

    def _assemble(self, request: GroupRequest, results_by_id: dict[str, _Finished]) -> TrajectoryGroup:
        members = [results_by_id[_trajectory_id(request, member)] for member in request.members]
        num_good, min_good = sum(result.reason is None for result in members), self._min_good(request)
        fork_ids = (_trajectory_id(request, fork) for member in request.members for fork in request.forks_of(member))
        members += [results_by_id[fork_id] for fork_id in fork_ids if fork_id in results_by_id]
        trajectories, dropped_episodes = [], []
        for result in members:
            reason = result.reason
            if reason is None and num_good < min_good:
                reason = f"its group has {num_good} usable episodes of {request.size} and needs {min_good}"
            if reason is None:
                trajectories.append(result.trajectory)
            else:
                dropped_episodes.append(
                    DroppedEpisode(result.trajectory.trajectory_id, result.trajectory.outcome, reason)
                )
            self._settle(result.trajectory, Disposition.KEPT if reason is None else Disposition.DROPPED, reason)
        return TrajectoryGroup(request.task, tuple(trajectories), len(members), tuple(dropped_episodes))

    def _min_good(self, request: GroupRequest) -> int:
        """Return the least episodes of a group, forks not counted, with which it is kept."""
        # At least two where two were asked for: one alone has nothing to be compared with. A hair below the product,
        # because 0.07 * 100 comes out a little above 7.
        return max(math.ceil(self._pool_limits.min_group_fraction * request.size - 1e-9), min(2, request.size))

    def _settle(self, trajectory: Trajectory, disposition: Disposition, reason: str | None) -> None:
        if reason is None and trajectory.outcome is Outcome.ACTION_LIMIT:
            reason = trajectory.error  # kept, and which limit it was is worth knowing
        self.ledger.settle(
            Terminal(trajectory.trajectory_id, trajectory.attempt, trajectory.outcome, disposition, reason)
        )

    def _report(self, trajectory: Trajectory, disposition: Disposition) -> None:
        if self._on_episode is not None:
            self._on_episode(trajectory, disposition)


def require_episodes(groups: Sequence[TrajectoryGroup]) -> None:
    """Raise a RolloutError with the most frequent reasons if no group has a usable episode."""
    if not any(group.trajectories for group in groups):
        raise RolloutError(_describe_total_failure(groups))


def is_failed(trajectory: Trajectory) -> bool:
    """Return whether the episode is no result. An episode that ended at an action limit is a result with an error."""
    return trajectory.error is not None and trajectory.outcome is not Outcome.ACTION_LIMIT


def _is_lost(trajectory: Trajectory) -> bool:
    """Return whether the engine was lost, or the environment failed by no doing of the actions.

    The latter is so before there were any. Where a process died or did not answer, the same actions were tried once
    more (`env/blame.py`), and did not do it again: else the outcome is ACTION_LIMIT. An engine that cannot end a
    session has answered all that was asked of it.
    """
    error = trajectory.error or ""
    cause = error.removeprefix("while closing: ")
    if trajectory.outcome is Outcome.ENV_ERROR:
        return not trajectory.turns or cause.startswith(f"{EnvDiedError.__name__}: ")
    if trajectory.outcome is Outcome.ENGINE_ERROR:
        return cause != error or cause.startswith(f"{EngineLostError.__name__}: ")
    return trajectory.outcome is Outcome.ENV_TIMEOUT


def member_of(trajectory_id: str) -> int:
    """Return the number of an episode in its group, from the id that a pool gave it."""
    return int(trajectory_id.rpartition("/")[2])


def _trajectory_id(request: GroupRequest, member: int) -> str:
    return f"{request.group_id}/{member}"


def _scored(trajectory: Trajectory, fault: str | None) -> _Finished:
    """Return a scored episode, or one that got no score because of a fault."""
    reason = f"not scored: {fault}" if fault else _reason_to_drop(trajectory, keep_unscored=False)
    return _Finished(trajectory, reason, is_unscored=fault is not None)


def _reason_to_drop(trajectory: Trajectory, *, keep_unscored: bool) -> str | None:
    """Return why a finished episode cannot be used; None if it can."""
    if is_failed(trajectory):
        return trajectory.error
    if not (trajectory.is_scored or keep_unscored):
        return (
            f"{trajectory.task.env_id}: not scored: the reward of every turn was None; an environment must give a "
            "number at one turn at least"
        )
    return None


def _describe_total_failure(groups: Sequence[TrajectoryGroup]) -> str:
    reasons = Counter(f"{d.outcome.value}: {d.reason}" for group in groups for d in group.dropped)
    reason_lines = "".join(f"\n  {count} x {reason}" for reason, count in reasons.most_common(3))
    num_more = len(reasons) - 3
    rest = f"\n  and {num_more} other reasons" if num_more > 0 else ""
    return (
        f"all {len(groups)} groups ({reasons.total()} episodes) were dropped. "
        f"Most frequent reasons:{reason_lines}{rest}"
    )


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

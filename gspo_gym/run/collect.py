"""Collect the groups of a training step, and play the demonstrations before the first.

Groups that teach nothing can be left out and replaced: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

The warm-up teaches a randomly initialised model the format of an answer: it imitates an environment's scripted policy,
by default random legal play, and leaves the strategy to reinforcement. Not for distilling a good player.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_gym.base.loops import Compute, in_another_thread, retrieve_exception, wait_until_ended
from gspo_gym.errors import RolloutError
from gspo_gym.learning.advantages import is_constant
from gspo_gym.learning.batching import BuiltBatch
from gspo_gym.learning.credit import Returns, played, returns_of
from gspo_gym.learning.settings import OptimizerSettings, UpdateSettings
from gspo_gym.learning.supervised import SupervisedReport, SupervisedStep, supervised_epochs
from gspo_gym.policy.weight_sync import require_committed
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.rollout.sampler import TaskCounts, TaskSampler, is_uniform
from gspo_gym.rollout.schedule import MakeRequest, OnDemand, PlayedAhead, Schedule
from gspo_gym.rollout.summary import Mixture
from gspo_gym.run.process import Phases
from gspo_gym.run.report.progress import Progress
from gspo_gym.run.settings import ConstantGroups, TrainPlan, WarmupSettings
from gspo_gym.run.state import TrainState
from gspo_gym.seeding import child_seed, training_seed
from gspo_gym.types import Task, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The groups that a step has to train on.

    Attributes:
        groups: all that were taken, in the order of their numbers, or in which they were begun.
        kept: the groups to train on; may be none.
        num_dropped: groups with episodes that were left out because they are not informative.
        num_refilled: groups that were asked for beyond the first round.
        failures: the errors of rounds of refilling without a usable episode.
        num_uncommitted: episodes left out, because the weights that sampled them were never committed.
        num_late: episodes given up as too old.
        returns: by trajectory id, where choosing the groups needed them.
        uniform: the groups of `groups` whose tasks were drawn without regard to what was counted; () without an
            adaptive sampler.
    """

    groups: tuple[TrajectoryGroup, ...]
    kept: tuple[TrajectoryGroup, ...]
    num_dropped: int
    num_refilled: int
    failures: tuple[str, ...]
    num_uncommitted: int = 0
    num_late: int = 0
    returns: Mapping[str, Returns] = field(default_factory=dict)
    uniform: tuple[TrajectoryGroup, ...] = ()


class Collector:
    """Collector of the groups of each step; close it.

    Args:
        plan: which groups, how many, and whether constant ones are replaced.
        pool: plays their episodes.
        state: where an earlier part of the run stopped; None: at the beginning.
        weight_version: returns the version that samples now; called only if episodes are played ahead.
        is_committed: returns whether tokens of a version may be trained on; None: all may.
    """

    def __init__(
        self,
        plan: TrainPlan,
        pool: RolloutPool,
        state: TrainState | None = None,
        *,
        weight_version: Callable[[], int] = lambda: 0,
        is_committed: Callable[[int], bool] | None = None,
    ) -> None:
        self.plan = plan
        self._is_committed = is_committed
        self.pool = pool
        state = state or TrainState()
        self._requests = _Requests(plan, state.task_counts)
        self._schedule = _make_schedule(plan, pool, self._requests.request, state, weight_version)

    @property
    def num_tasks(self) -> int:
        """Return `Schedule.num_tasks`."""
        return self._schedule.num_tasks

    @property
    def pending_tasks(self) -> tuple[int, ...]:
        """Return `Schedule.pending_tasks`."""
        return self._schedule.pending_tasks

    @property
    def task_counts(self) -> TaskCounts:
        """Return what the choice of tasks goes by after the last step."""
        return self._requests.sampler.counts

    async def collect(self, step: int) -> Collected:
        """Return the groups of a step; if episodes are played ahead, ask for those of coming steps.

        Raises:
            RolloutError: no episode of a whole batch could be used.
        """
        plan = self.plan
        returns: dict[str, Returns] = {}

        def is_informative(group: TrajectoryGroup) -> bool:
            own = {
                t.trajectory_id: returns_of(
                    t, discount=plan.advantages.discount, rewards=plan.rewards, step_rewards=plan.step_rewards
                )
                for t in played(group)
            }
            returns.update(own)  # `build_batch` needs them again
            return not is_constant(list(own.values()), plan.advantages)

        self._schedule.begin(step)
        collection = await collect_groups(
            self._schedule.take,
            num_groups=plan.size.groups_per_iteration,
            constant_groups=plan.loop.constant_groups,
            is_informative=is_informative,
        )
        kept_groups, num_uncommitted = collection.kept, 0
        if self._is_committed is not None:
            commit_check = require_committed(kept_groups, self._is_committed)
            kept_groups, num_uncommitted = commit_check.groups, commit_check.num_dropped
        uniform = self._requests.count(collection.groups, is_informative, self._schedule.pending_tasks)
        return dataclasses.replace(
            collection,
            kept=kept_groups,
            num_uncommitted=num_uncommitted,
            num_late=self._schedule.finish(),  # asks for coming steps' groups, to be played while the learner works
            returns=returns,
            uniform=uniform,
        )

    async def close(self) -> None:
        """End the episodes in progress."""
        await self._schedule.close()


class _Requests:
    """Requests for training groups, and what their outcomes teach the sampler about coming tasks."""

    def __init__(self, plan: TrainPlan, counts: TaskCounts) -> None:
        mixture = Mixture(plan.env_id, plan.mixture)
        self.sampler = TaskSampler(plan.run.seed, mixture, plan.loop.adaptive_tasks, counts)
        self._size = plan.size
        self._numbers: dict[str, int] = {}  # of the groups that are asked for, by their names

    def request(self, number: int, name: str) -> GroupRequest:
        """Return the request for the group of that number and name."""
        self._numbers[name] = number
        size, forks = self._size.group_size, self._size.forks_per_episode
        return GroupRequest(name, self.sampler.task(number), size=size, forks_per_episode=forks)

    def count(
        self,
        groups: Sequence[TrajectoryGroup],
        is_informative: Callable[[TrajectoryGroup], bool],
        pending: Collection[int],
    ) -> tuple[TrajectoryGroup, ...]:
        """Count the groups of a step for the choice of coming tasks; return those that were chosen without it.

        `pending` are the numbers of the groups that are asked for and not handed out.
        """
        group_by_number = {
            self._numbers[group.trajectories[0].group_id]: group
            for group in groups
            if group.trajectories and self.sampler.is_adaptive
        }
        self._numbers = {name: number for name, number in self._numbers.items() if number in pending}
        self.sampler.after_step({number: is_informative(group) for number, group in group_by_number.items()}, pending)
        return tuple(group for number, group in group_by_number.items() if is_uniform(number))


def _make_schedule(
    plan: TrainPlan, pool: RolloutPool, request: MakeRequest, state: TrainState, weight_version: Callable[[], int]
) -> Schedule:
    """Return the source of groups: the only difference between synchronous and pipelined training."""
    if plan.loop.max_staleness == 0:
        return OnDemand(pool.collect, request, num_tasks=state.num_tasks)
    return PlayedAhead(
        pool.play_group,
        request,
        weight_version=weight_version,
        groups_per_step=plan.size.groups_per_iteration,
        num_steps=plan.size.num_iterations,
        max_staleness=plan.loop.max_staleness,
        num_ahead=plan.loop.num_ahead,
        num_tasks=state.num_tasks,
        pending_tasks=state.pending_tasks,
    )


_MAX_REFILL_ROUNDS = 10  # of fresh groups for a step, as in DAPO's recipe (verl: max_num_gen_batches)


async def collect_groups(
    take: Callable[[int], Awaitable[Sequence[TrajectoryGroup]]],
    *,
    num_groups: int,
    constant_groups: ConstantGroups,
    is_informative: Callable[[TrajectoryGroup], bool],
    max_refill_rounds: int = _MAX_REFILL_ROUNDS,
) -> Collected:
    """Take `num_groups` groups and keep them all, or the informative ones.

    With "refill", further groups replace the missing ones until num_groups are informative, for at most
    max_refill_rounds rounds. A group that lost all its episodes is missing, too. `take` is the schedule's.

    Raises:
        RolloutError: no episode of the first round could be used. A later round that fails is entered in `failures`.
    """
    groups: list[TrajectoryGroup] = []
    kept_groups: list[TrajectoryGroup] = []
    failures: list[str] = []
    num_requested = 0
    for refill in range(1 + (max_refill_rounds if constant_groups == "refill" else 0)):
        num_missing = num_groups - len(kept_groups)
        if not num_missing:
            break
        # The paper oversamples and cuts the surplus; asking for what is missing throws nothing informative away.
        num_requested += num_missing
        try:
            new_groups = await take(num_missing)
        except RolloutError as error:
            # Later there is something to train on, and if the environment is down the next step will say so.
            if refill == 0:
                raise
            failures.append(str(error))
            continue
        groups += new_groups
        kept_groups += [group for group in new_groups if constant_groups == "keep" or is_informative(group)]
    num_nonempty = sum(bool(group.trajectories) for group in groups)
    num_dropped = 0 if constant_groups == "keep" else num_nonempty - len(kept_groups)
    return Collected(tuple(groups), tuple(kept_groups), num_dropped, num_requested - num_groups, tuple(failures))


def batch_metrics(collected: Collected, built: BuiltBatch) -> dict[str, float]:
    """Return metrics on the use of the groups; the constant fraction is of all played groups with episodes."""
    counts = built.counts
    num_groups = collected.num_dropped + counts.num_groups
    num_compared = counts.num_trajectories + counts.num_untrained + counts.num_filtered
    metrics = {
        "batch/constant_group_fraction": (collected.num_dropped + counts.num_constant_groups) / num_groups,
        "batch/dropped_constant_groups": float(collected.num_dropped),
        "batch/refilled_groups": float(collected.num_refilled),
        "batch/num_filtered": float(counts.num_filtered),
        "batch/num_untrained": float(counts.num_untrained),
    }
    if built.mean_return is not None:
        metrics["batch/mean_return"] = built.mean_return
        metrics["batch/overlong_fraction"] = counts.num_overlong / num_compared
    return metrics


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """Demonstrations to imitate, and the settings to imitate them with.

    The schedule of `optimizer` belongs to reinforcement: the warm-up holds its learning rate constant.
    """

    env_id: str
    run_seed: int
    warmup: WarmupSettings
    optimizer: OptimizerSettings
    update: UpdateSettings


async def warm_up(
    model: Any,
    pool: RolloutPool,
    plan: WarmupPlan,
    progress: Progress,
    *,
    compute: Compute = in_another_thread,
    phases: Phases | None = None,
) -> SupervisedReport:
    """Play the demonstrations with the pool's scripted actor, and train `model` in place on them with `compute`.

    The tasks are training tasks of a seed derived for the warm-up, so no evaluation task is seen. `phases` are told how
    far it is. Any: transformers and peft are untyped.

    Raises:
        RolloutError: no demonstration could be played; the scripted policy's error is in the message.
        NonFiniteError: too many steps in a row had a NaN or infinite loss or gradient.
    """
    phases = phases or Phases()
    phases.enter("warming up", total=plan.warmup.num_episodes, unit="demonstrations")
    demonstrations = await play_demonstrations(pool, plan)
    phases.enter("warming up")
    stopping = threading.Event()

    def end_if_stopping(supervised_step: SupervisedStep) -> None:
        phases.count(supervised_step.step + 1, supervised_step.num_total_steps, "batches")
        if stopping.is_set():
            raise InterruptedError("the warm-up was stopped")

    def train() -> SupervisedReport:
        return supervised_epochs(
            model,
            demonstrations,
            optimizer=plan.optimizer.at_constant_rate(),
            settings=plan.warmup,
            update=plan.update,
            seed=child_seed(plan.run_seed, "warmup"),
            on_step=end_if_stopping,
        )

    training = asyncio.ensure_future(compute(train))
    try:
        await asyncio.wait({training})
    except asyncio.CancelledError:
        # A thread cannot be stopped, and a warm-up may take long: nothing of it is kept.
        stopping.set()
        training.add_done_callback(retrieve_exception)
        await wait_until_ended({training})
        raise
    report = training.result()
    progress.note(
        f"warm-up: {len(demonstrations)} demonstrations, loss per token "
        + (
            f"{report.epoch_losses[0]:.3f} in the first pass, {report.epoch_losses[-1]:.3f} in the last"
            if len(report.epoch_losses) > 1
            else f"{report.epoch_losses[0]:.3f} in the one pass"
        )
    )
    return report


async def play_demonstrations(pool: RolloutPool, plan: WarmupPlan) -> list[Trajectory]:
    """Return one episode for each of `num_episodes` training tasks."""
    requests = [
        GroupRequest(
            f"warmup/{i:06d}", Task(plan.env_id, training_seed(child_seed(plan.run_seed, "warmup"), i)), size=1
        )
        for i in range(plan.warmup.num_episodes)
    ]
    groups = await pool.collect(requests)
    return [trajectory for group in groups for trajectory in group.trajectories]

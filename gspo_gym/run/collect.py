"""The groups of one training step: played, and where asked for, those that teach nothing left out and replaced.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

Warm-up: demonstrations played by an environment's own scripted policy, imitated before reinforcement starts.

A randomly initialised model does not know the format of an answer; after warm-up on random legal play it does, and the
strategy is left to reinforcement. Not for distilling a good player, although the "reference" policy may be named too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.errors import RolloutError
from gspo_gym.learning.batching import BuiltBatch
from gspo_gym.learning.settings import OptimizerSettings, SupervisedSettings
from gspo_gym.learning.supervised import SupervisedReport, supervised_epochs
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.run.report.progress import Progress
from gspo_gym.run.settings import ConstantGroups
from gspo_gym.seeding import child_seed, training_seed
from gspo_gym.types import Task, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What a step has to train on.

    Attributes:
        groups: all that were taken, in the order of their numbers, or in which they were begun.
        kept: of these, those to train on; may be none.
        num_dropped: groups with episodes that were left out, because they are not informative.
        num_refilled: groups that were asked for beyond the first round.
        failures: why whole rounds of refilling came to nothing.
    """

    groups: tuple[TrajectoryGroup, ...]
    kept: tuple[TrajectoryGroup, ...]
    num_dropped: int
    num_refilled: int
    failures: tuple[str, ...]


async def collect_groups(
    take: Callable[[int], Awaitable[Sequence[TrajectoryGroup]]],
    *,
    num_groups: int,
    constant_groups: ConstantGroups,
    max_refill_rounds: int,
    is_informative: Callable[[TrajectoryGroup], bool],
) -> Collected:
    """Take `num_groups` groups and keep them all, or the informative ones.

    With "refill", as many further groups as are missing are taken, until num_groups are informative or
    max_refill_rounds such rounds are over. The paper oversamples and cuts the surplus; here a round asks for exactly
    what is missing, so that nothing informative is thrown away. A group that lost all its episodes is missing, too.
    `take` is the schedule's.

    Raises:
        RolloutError: no episode of the first round could be used. A later round that fails so is entered in `failures`:
            there is something to train on, and if the environment is down the next step will say so.
    """
    groups: list[TrajectoryGroup] = []
    kept: list[TrajectoryGroup] = []
    failures: list[str] = []
    num_requested = 0
    for refill in range(1 + (max_refill_rounds if constant_groups == "refill" else 0)):
        num_missing = num_groups - len(kept)
        if not num_missing:
            break
        num_requested += num_missing
        try:
            played = await take(num_missing)
        except RolloutError as error:
            if refill == 0:
                raise
            failures.append(str(error))
            continue
        groups += played
        kept += [group for group in played if constant_groups == "keep" or is_informative(group)]
    num_nonempty = sum(bool(group.trajectories) for group in groups)
    num_dropped = 0 if constant_groups == "keep" else num_nonempty - len(kept)
    return Collected(tuple(groups), tuple(kept), num_dropped, num_requested - num_groups, tuple(failures))


def batch_metrics(collected: Collected, built: BuiltBatch) -> dict[str, float]:
    """What became of the groups; the fraction is over all that were played and have episodes."""
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
    """What is imitated, and how hard."""

    env_id: str
    run_seed: int
    num_episodes: int
    optimizer: OptimizerSettings
    settings: SupervisedSettings


async def warm_up(model: Any, pool: RolloutPool, plan: WarmupPlan, progress: Progress) -> SupervisedReport:
    """Play the demonstrations with the pool's scripted actor, and train `model` in place on them.

    Their tasks are those of the training step 0, which no training step plays, so no evaluation task is seen. Any:
    transformers and peft are untyped.

    Raises:
        RolloutError: no demonstration could be played; the scripted policy's error is in the message.
        NonFiniteError: too many steps in a row had a NaN or infinite loss or gradient.
    """
    demonstrations = await play_demonstrations(pool, plan)
    report = supervised_epochs(
        model,
        demonstrations,
        optimizer=plan.optimizer,
        settings=plan.settings,
        seed=child_seed(plan.run_seed, "warmup"),
    )
    progress.note(
        f"warm-up: {len(demonstrations)} demonstrations, loss per token "
        f"{report.epoch_losses[0]:.3f} in the first pass, {report.epoch_losses[-1]:.3f} in the last"
    )
    return report


async def play_demonstrations(pool: RolloutPool, plan: WarmupPlan) -> list[Trajectory]:
    """One episode for each of `num_episodes` training tasks."""
    requests = [
        GroupRequest(
            f"warmup/{i:06d}", Task(plan.env_id, training_seed(child_seed(plan.run_seed, "warmup"), i)), size=1
        )
        for i in range(plan.num_episodes)
    ]
    groups = await pool.collect(requests)
    return [trajectory for group in groups for trajectory in group.trajectories]

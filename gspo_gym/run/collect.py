"""The groups of one training step: played, and where asked for, those that teach nothing left out and replaced.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2). Called by the trainer, who says which groups are informative;
a schedule (`schedule.py`) says where groups come from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gspo_gym.errors import RolloutError
from gspo_gym.learning.batching import BuiltBatch
from gspo_gym.types import TrajectoryGroup

ConstantGroups = Literal["keep", "drop", "refill"]


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

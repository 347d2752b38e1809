"""The groups of one training step: played, and where asked for, those that teach nothing left out and replaced.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2). Called by the trainer, who says which groups are informative;
what is played depends on the requests and on those answers, never on concurrency or timing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gspo_gym.errors import RolloutError
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.types import TrajectoryGroup

ConstantGroups = Literal["keep", "drop", "refill"]


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What a step has to train on.

    Attributes:
        groups: all that were played, in the order of their numbers.
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
    collect: Callable[[Sequence[GroupRequest]], Awaitable[Sequence[TrajectoryGroup]]],
    request: Callable[[int], GroupRequest],
    *,
    num_groups: int,
    constant_groups: ConstantGroups,
    max_refill_rounds: int,
    is_informative: Callable[[TrajectoryGroup], bool],
) -> Collected:
    """Play the groups number 0 .. num_groups - 1 and keep them all, or the informative ones.

    With "refill", as many fresh groups as are missing are played, their numbers counted on, until num_groups are
    informative or max_refill_rounds such rounds are over. The paper oversamples and cuts the surplus; here a round asks
    for exactly what is missing, so that nothing informative is thrown away. A group that lost all its episodes is
    missing, too. `collect` and `request` are the pool's and the plan's.

    Raises:
        RolloutError: no episode of the first round could be used. A later round that fails so is entered in `failures`:
            there is something to train on, and if the environment is down the next step will say so.
    """
    groups: list[TrajectoryGroup] = []
    kept: list[TrajectoryGroup] = []
    failures: list[str] = []
    num_requested = 0
    for refill in range(1 + (max_refill_rounds if constant_groups == "refill" else 0)):
        numbers = range(num_requested, num_requested + num_groups - len(kept))
        num_requested = numbers.stop
        if not numbers:
            break
        try:
            played = await collect([request(number) for number in numbers])
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

"""Per-turn rewards of an episode -> its return and its returns-to-go.

Knows nothing of groups (that is `advantages`) or tokens (`batching`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.types import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Returns:
    """What an episode earned.

    Attributes:
        episode_return: undiscounted sum of the turns' rewards; the same number as `Trajectory.reward`.
        to_go: [num_turns] float64, from each turn on: to_go[k] = reward[k] + discount * to_go[k + 1].
        reward_magnitude: sum of the rewards' absolute values, the scale at which rounding in the sum happens.
    """

    episode_return: float
    to_go: NDArray[np.float64]
    reward_magnitude: float


def returns_of(trajectory: Trajectory, *, discount: float = 1.0) -> Returns:
    """The returns of one scored episode. A turn without a reward adds nothing; it was not scored, not punished.

    `discount` is per turn and touches the returns-to-go only. Nothing is bootstrapped where an episode was cut off: a
    truncated episode is worth what it had earned.

    Raises:
        UnscoredError: no turn carries a reward, or the episode failed before it could be scored.
        RecordError: turns are not numbered 0, 1, 2, ...
        ConfigError: discount outside (0, 1].
    """
    if not 0 < discount <= 1:
        raise ConfigError(f"discount: expected 0 < discount <= 1, got {discount}")
    indices = [turn.index for turn in trajectory.turns]
    if indices != list(range(len(indices))):
        raise RecordError(f"trajectory {trajectory.trajectory_id}: expected turns 0, 1, 2, ..., got {indices}")
    episode_return = trajectory.reward  # raises UnscoredError
    rewards = [0.0 if turn.reward is None else turn.reward for turn in trajectory.turns]
    to_go = np.zeros(len(rewards), dtype=np.float64)
    following = 0.0
    for k in reversed(range(len(rewards))):
        following = rewards[k] + discount * following
        to_go[k] = following
    return Returns(episode_return, to_go, float(sum(abs(reward) for reward in rewards)))

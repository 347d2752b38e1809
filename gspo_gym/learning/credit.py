"""Per-turn rewards of an episode -> its return and its returns-to-go.

In this order: what each turn earns (`step_rewards`), the penalty of an overlong episode, the sums, the clip. Knows
nothing of groups (that is `advantages`) or tokens (`batching`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.learning.settings import RewardSettings, StepRewardSettings
from gspo_gym.learning.step_rewards import step_rewards as rewards_of_turns
from gspo_gym.types import FinishReason, Outcome, Trajectory, TrajectoryGroup

_MAX_MAGNITUDE = 1e37  # float32, which advantages are, ends at 3.4e38


@dataclass(frozen=True, slots=True, eq=False)
class Returns:
    """What an episode earned.

    Attributes:
        episode_return: undiscounted sum of the turns' rewards, clipped. With the default settings, the same number as
            `Trajectory.reward`.
        to_go: [num_turns] float64, from each turn on: to_go[k] = reward[k] + discount * to_go[k + 1], then clipped.
        reward_magnitude: sum of the rewards' absolute values, the scale at which rounding in the sum happens.
    """

    episode_return: float
    to_go: NDArray[np.float64]
    reward_magnitude: float


def returns_of(
    trajectory: Trajectory,
    *,
    discount: float = 1.0,
    rewards: RewardSettings | None = None,
    step_rewards: StepRewardSettings | None = None,
) -> Returns:
    """The returns of one scored episode. A turn without a reward adds nothing; it was not scored, not punished.

    `discount` is per turn and touches the returns-to-go only. Nothing is bootstrapped where an episode was cut off: a
    truncated episode is worth what it had earned, less the penalty where `rewards.overlong` is "penalize", which counts
    as part of its last turn's reward. `rewards.clip` cuts sums and not single rewards: the return, which level
    "trajectory" compares, and each return-to-go, which level "turn" compares; a discounted sum is cut after it was
    discounted. None for settings: their defaults.

    Raises:
        UnscoredError: no turn carries a reward, or the episode failed before it could be scored.
        RecordError: turns are not numbered 0, 1, 2, ..., or advantages, in float32, could overflow.
        ConfigError: discount outside (0, 1].
    """
    if not 0 < discount <= 1:
        raise ConfigError(f"discount: expected 0 < discount <= 1, got {discount}")
    indices = [turn.index for turn in trajectory.turns]
    if indices != list(range(len(indices))):
        raise RecordError(f"trajectory {trajectory.trajectory_id}: expected turns 0, 1, 2, ..., got {indices}")
    rewards = rewards or RewardSettings()
    earned = list(rewards_of_turns(trajectory, step_rewards or StepRewardSettings()))
    if rewards.overlong == "penalize" and is_overlong(trajectory):
        earned[-1] -= rewards.overlong_penalty
    episode_return = sum(earned)
    to_go = np.zeros(len(earned), dtype=np.float64)
    following = 0.0
    for k in reversed(range(len(earned))):
        following = earned[k] + discount * following
        to_go[k] = following
    reward_magnitude = float(sum(abs(reward) for reward in earned))
    if not reward_magnitude <= _MAX_MAGNITUDE:
        raise RecordError(
            f"trajectory {trajectory.trajectory_id}: expected rewards whose sizes sum to at most {_MAX_MAGNITUDE:g}, "
            f"got {reward_magnitude:g}; scale them"
        )
    if rewards.clip is not None:
        episode_return = max(-rewards.clip, min(rewards.clip, episode_return))
        to_go = to_go.clip(-rewards.clip, rewards.clip)
    return Returns(float(episode_return), to_go, reward_magnitude)


def is_overlong(trajectory: Trajectory) -> bool:
    """Whether one of our limits cut the episode off: on turns, on context, or on the output tokens of its last turn.

    An environment that truncates an episode has a reason of its own, which is part of its task.
    """
    if trajectory.outcome in (Outcome.MAX_TURNS, Outcome.CONTEXT_OVERFLOW):
        return True
    return bool(trajectory.turns) and trajectory.turns[-1].finish_reason is FinishReason.LENGTH


def played(group: TrajectoryGroup) -> list[Trajectory]:
    """The trajectories of a group in which the policy took a turn; in the others it did nothing.

    Whether tokens of a turn are trained on does not matter: leaving out episodes that a task app played in a way that
    cannot be trained on would move the mean with which the others are compared.
    """
    return [trajectory for trajectory in group.trajectories if trajectory.turns]

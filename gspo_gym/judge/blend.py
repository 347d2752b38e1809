"""Blend an episode's rewards with its judgement.

    return = env * (environment's return) + event * (sum of event totals) + outcome * (outcome's total)

The formula and its defaults are those of the hosted trainer, which blends numbers of episodes. Here each part is laid
on the turn that earned it, with the same sum: the environment's reward and the event's total stay at their turn, the
outcome comes on the last. Every part has a name in `Turn.reward_terms`.

As in the hosted trainer nothing is normalised: the sum of event totals grows with an episode's length. A score that is
asked for and missing makes the episode unscored; it never counts as 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import Field

from gspo_gym.base.settings import Settings
from gspo_gym.errors import ConfigError, RecordError, UnscoredError
from gspo_gym.judge.base import JudgeError, Judgement
from gspo_gym.types import Trajectory, Turn

EVENT_TERM, OUTCOME_TERM = "judge_event", "judge_outcome"
ENV_TERM = "env"  # of what the environment gave a turn beside its own named terms

EnvRewards = Callable[[Trajectory], Sequence[float | None]]  # one reward a turn; None where the environment gave none


class RewardBlend(Settings):
    """[judge.reward_blend]: return = env * return + event * (sum of event totals) + outcome * (outcome's total)."""

    env: float = Field(default=1.0, ge=0, description="weight of the environment's own return")
    event: float = Field(default=0.0, ge=0, description="weight of the sum of event totals, not normalised")
    outcome: float = Field(default=0.0, ge=0, description="weight of the outcome's total")


def env_rewards(trajectory: Trajectory) -> tuple[float | None, ...]:
    """Return the environment's own rewards, turn by turn; the episode must not have been blended."""
    return tuple(turn.reward for turn in trajectory.turns)


def blend(
    trajectory: Trajectory, judgement: Judgement, weights: RewardBlend, rewards: EnvRewards = env_rewards
) -> Trajectory:
    """Return the episode with blended turn rewards; `trajectory` must not have been blended before.

    A turn that no part scores keeps None. `rewards` replaces the environment's rewards (step rewards do).
    Raises:
        UnscoredError: the episode failed, has no turn, or its environment gave no reward although env > 0.
        JudgeError: a score with a weight is missing from the judgement.
        RecordError: the environment has a reward term of one of the judge's names.
        ConfigError: the weights make a reward, or the return, larger than a float can be.
    """
    if trajectory.outcome.is_infrastructure_failure or not trajectory.turns:
        raise UnscoredError(f"trajectory {trajectory.trajectory_id}: nothing was played that could be judged")
    own_rewards = tuple(rewards(trajectory))
    _require_scores(trajectory, judgement, weights, own_rewards)
    is_replaced = own_rewards != env_rewards(trajectory)  # then the environment's own terms would not add up
    turns: list[Turn] = []
    for turn, reward in zip(trajectory.turns, own_rewards, strict=True):
        parts = {} if reward is None else _env_parts({} if is_replaced else turn.reward_terms, reward, weights.env)
        if clash := sorted({EVENT_TERM, OUTCOME_TERM} & set(turn.reward_terms)):
            raise RecordError(
                f"{trajectory.task.env_id}: reward term {clash[0]!r} has the judge's name; rename it, or, if the "
                "episode was blended before, take it as it was"
            )
        if weights.event > 0:
            parts[EVENT_TERM] = weights.event * judgement.event_reviews[len(turns)].total
        if weights.outcome > 0 and len(turns) == len(trajectory.turns) - 1:
            parts[OUTCOME_TERM] = weights.outcome * judgement.outcome_total
        is_scored = reward is not None or bool(parts)  # 0 is a score, and None is none
        total = _finite_sum(parts.values(), trajectory, weights) if is_scored else None
        turns.append(dataclasses.replace(turn, reward=total, reward_terms=parts))
    # The sum of finite rewards may still be larger than a float can be.
    _finite_sum((turn.reward for turn in turns if turn.reward is not None), trajectory, weights)
    return dataclasses.replace(trajectory, turns=tuple(turns))


def unjudged(trajectory: Trajectory, weights: RewardBlend, rewards: EnvRewards = env_rewards) -> Trajectory:
    """Return the episode with the environment's weighted rewards and the judge's lowest score, 0.

    For an episode that ended because an action exceeded a limit; its last turn is always scored.

    Raises:
        ConfigError: the weight makes the return larger than a float can be.
    """
    values = [None if reward is None else weights.env * reward for reward in rewards(trajectory)]
    _finite_sum((reward for reward in values if reward is not None), trajectory, weights)
    turns = [dataclasses.replace(t, reward=r, reward_terms={}) for t, r in zip(trajectory.turns, values, strict=True)]
    if turns[-1].reward is None:  # the episode counts as scored
        turns[-1] = dataclasses.replace(turns[-1], reward=0.0)
    return dataclasses.replace(trajectory, turns=tuple(turns))


def _require_scores(
    trajectory: Trajectory, judgement: Judgement, weights: RewardBlend, own_rewards: Sequence[float | None]
) -> None:
    name, num_turns = trajectory.trajectory_id, len(trajectory.turns)
    if weights.env > 0 and all(reward is None for reward in own_rewards):
        raise UnscoredError(
            f"trajectory {name}: its environment gave None at every turn, and judge.reward_blend.env is "
            f"{weights.env:g}; set that to 0 where only the judge scores"
        )
    if weights.event > 0 and len(judgement.event_reviews) != num_turns:
        raise JudgeError(
            f"trajectory {name}: expected a review of each of its {num_turns} turns from {judgement.judge}, got "
            f"{len(judgement.event_reviews)}"
        )
    if weights.outcome > 0 and judgement.outcome_review is None:
        raise JudgeError(f"trajectory {name}: expected a review of the outcome from {judgement.judge}, got none")
    totals = list(judgement.event_totals) if weights.event > 0 else []
    totals += [judgement.outcome_total] if weights.outcome > 0 else []
    if not all(math.isfinite(total) for total in totals):
        raise JudgeError(f"trajectory {name}: expected finite totals from {judgement.judge}, got {totals}")


def _finite_sum(values: Iterable[float], trajectory: Trajectory, weights: RewardBlend) -> float:
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):  # larger than a float, or infinities of both signs
        total = math.inf
    if not math.isfinite(total):
        raise ConfigError(
            f"judge.reward_blend: env = {weights.env:g}, event = {weights.event:g} and outcome = {weights.outcome:g} "
            f"make the rewards of trajectory {trajectory.trajectory_id} larger than a number can be; lower them"
        )
    return total


def _env_parts(terms: Mapping[str, float], reward: float, weight: float) -> dict[str, float]:
    """Return the environment's weighted terms, and the rest of the reward as a term."""
    parts = {name: weight * value for name, value in terms.items()}
    remainder = reward - math.fsum(terms.values())
    if abs(remainder) > 1e-9 * max(1.0, abs(reward)):  # else it is rounding in their sum
        parts[ENV_TERM] = parts.get(ENV_TERM, 0.0) + weight * remainder
    return parts

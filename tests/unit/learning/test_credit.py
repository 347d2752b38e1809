from __future__ import annotations

import dataclasses

import pytest

from gspo_gym.errors import ConfigError, RecordError, UnscoredError
from gspo_gym.learning.credit import is_overlong, played, returns_of
from gspo_gym.learning.settings import RewardSettings
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.types import FinishReason, Outcome


def test_return_to_go_discounts_per_turn_and_the_return_does_not(make_trajectory):
    returns = returns_of(make_trajectory([1.0, None, 2.0]), discount=0.5)
    assert returns.episode_return == 3.0
    # from the end: 2; 0 + 0.5 * 2 = 1; 1 + 0.5 * 1 = 1.5
    assert returns.to_go.tolist() == [1.5, 1.0, 2.0]


def test_undiscounted_return_to_go_starts_with_the_episode_return(make_trajectory):
    returns = returns_of(make_trajectory([0.25, -0.5, 1.0]))
    assert returns.to_go.tolist() == [0.75, 0.5, 1.0]
    assert returns.episode_return == 0.75
    assert returns.reward_magnitude == 1.75


def test_truncated_episode_keeps_what_it_had_earned(make_trajectory):
    returns = returns_of(make_trajectory([0.5, None], outcome=Outcome.MAX_TURNS))
    assert (returns.episode_return, returns.to_go.tolist()) == (0.5, [0.5, 0.0])


@pytest.mark.parametrize("outcome", [Outcome.TERMINATED, Outcome.MAX_TURNS])
def test_an_episode_that_nobody_scored_has_no_return(make_trajectory, outcome):
    with pytest.raises(UnscoredError, match="no reward"):
        returns_of(make_trajectory([None, None], outcome=outcome))


def test_an_infrastructure_failure_has_no_return_whatever_it_had_earned(make_trajectory):
    with pytest.raises(UnscoredError, match="env_timeout"):
        returns_of(make_trajectory([1.0], outcome=Outcome.ENV_TIMEOUT))


def test_misnumbered_turns_are_refused(make_trajectory):
    trajectory = make_trajectory([1.0, 2.0])
    object.__setattr__(trajectory, "turns", trajectory.turns[::-1])
    with pytest.raises(RecordError, match=r"got \[1, 0\]"):
        returns_of(trajectory)


@pytest.mark.parametrize("discount", [0.0, -0.1, 1.1])
def test_discount_outside_its_range_is_refused(make_trajectory, discount):
    with pytest.raises(ConfigError, match="discount"):
        returns_of(make_trajectory([1.0]), discount=discount)


def cut_off(trajectory):
    """The same, but its last turn ran out of output tokens."""
    *others, last = trajectory.turns
    return dataclasses.replace(
        trajectory, turns=(*others, dataclasses.replace(last, finish_reason=FinishReason.LENGTH))
    )


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.MAX_TURNS, True),
        (Outcome.CONTEXT_OVERFLOW, True),
        (Outcome.TERMINATED, False),
        (Outcome.TRUNCATED, False),  # by the environment, for a reason of its own
    ],
)
def test_an_episode_that_a_limit_of_ours_ended_is_overlong(make_trajectory, outcome, expected):
    assert is_overlong(make_trajectory([1.0, 1.0], outcome=outcome)) is expected


def test_an_episode_whose_last_turn_ran_out_of_tokens_is_overlong_and_an_earlier_one_does_not_matter(make_trajectory):
    trajectory = make_trajectory([1.0, 1.0])
    first, last = trajectory.turns
    assert is_overlong(cut_off(trajectory))
    first = dataclasses.replace(first, finish_reason=FinishReason.LENGTH)
    assert not is_overlong(dataclasses.replace(trajectory, turns=(first, last)))


def test_the_overlong_penalty_is_part_of_the_last_turns_reward(make_trajectory):
    rewards = RewardSettings(overlong=0.5)
    returns = returns_of(make_trajectory([1.0, 2.0], outcome=Outcome.MAX_TURNS), discount=0.5, rewards=rewards)
    # rewards 1 and 2 - 0.5; from the end 1.5; 1 + 0.5 * 1.5
    assert (returns.episode_return, returns.to_go.tolist()) == (2.5, [1.75, 1.5])
    whole = returns_of(make_trajectory([1.0, 2.0]), rewards=rewards)
    assert (whole.episode_return, whole.to_go.tolist()) == (3.0, [3.0, 2.0])


@pytest.mark.parametrize("overlong", ["keep", "mask"])
def test_an_overlong_episode_that_is_kept_or_masked_keeps_its_return(make_trajectory, overlong):
    trajectory = make_trajectory([1.0, 2.0], outcome=Outcome.MAX_TURNS)
    assert returns_of(trajectory, rewards=RewardSettings(overlong=overlong)).episode_return == 3.0


def test_sums_are_clipped_and_not_single_rewards(make_trajectory):
    # returns-to-go 1 + 1 + 3 = 5, 4, 3 and the return 5; cutting each reward to 2 would have given 1 + 1 + 2 = 4
    returns = returns_of(make_trajectory([1.0, 1.0, 3.0]), rewards=RewardSettings(clip=4.5))
    assert (returns.episode_return, returns.to_go.tolist()) == (4.5, [4.5, 4.0, 3.0])
    returns = returns_of(make_trajectory([-3.0, 1.0]), rewards=RewardSettings(clip=1.5))
    assert (returns.episode_return, returns.to_go.tolist()) == (-1.5, [-1.5, 1.0])


def test_the_penalty_comes_before_the_clip(make_trajectory):
    # 3 - 1 = 2, which 2.5 leaves alone; clipping first would have given 2.5 - 1
    rewards = RewardSettings(overlong=1.0, clip=2.5)
    assert returns_of(make_trajectory([3.0], outcome=Outcome.MAX_TURNS), rewards=rewards).episode_return == 2.0


def test_step_rewards_come_before_everything_else(make_trajectory):
    trajectory = make_trajectory([0.0, 0.0], outcome=Outcome.MAX_TURNS)
    turns = [dataclasses.replace(turn, events=("wood", "stone")) for turn in trajectory.turns]
    trajectory = dataclasses.replace(trajectory, turns=tuple(turns))
    step_rewards = StepRewardSettings(mode="decision_stepwise", kind="absolute")
    rewards = RewardSettings(overlong=0.25, clip=3.5)
    returns = returns_of(trajectory, discount=0.5, rewards=rewards, step_rewards=step_rewards)
    # 2 and 2 - 0.25: return 3.75, cut to 3.5; to go 2 + 0.5 * 1.75 and 1.75
    assert (returns.episode_return, returns.to_go.tolist()) == (3.5, [2.875, 1.75])


def test_off_discounts_the_whole_return_from_the_last_turn(make_trajectory):
    returns = returns_of(make_trajectory([1.0, 1.0, 2.0]), discount=0.5, step_rewards=StepRewardSettings(mode="off"))
    assert (returns.episode_return, returns.to_go.tolist()) == (4.0, [1.0, 2.0, 4.0])


def test_only_what_the_policy_played_is_compared(make_trajectory, make_group):
    trajectory, silent = make_trajectory([1.0]), make_trajectory([], outcome=Outcome.CONTEXT_OVERFLOW)
    assert played(make_group(silent, trajectory)) == [trajectory]


def test_an_answer_of_one_token_was_played(make_trajectory, make_group):
    short = make_trajectory([1.0], action=1)
    assert short.num_actions == 1
    assert played(make_group(short)) == [short]

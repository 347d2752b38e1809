from __future__ import annotations

import pytest

from gspo_gym.errors import ConfigError, RecordError, UnscoredError
from gspo_gym.learning.credit import returns_of
from gspo_gym.types import Outcome


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

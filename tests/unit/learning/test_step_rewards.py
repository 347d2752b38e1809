"""Step rewards, with the values that the hosted trainer's own code gives for the same events."""

from __future__ import annotations

import dataclasses

import pytest

from gspo_gym.env.rewards import Achievements
from gspo_gym.errors import UnscoredError
from gspo_gym.learning.credit import turn_rewards
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.types import Outcome


@pytest.fixture
def earn(make_trajectory):
    """`earn(events of turn 0, events of turn 1, ..., rewards=..., **settings)` -> the rewards, as a list."""

    def run(*events, rewards=None, outcome=Outcome.TERMINATED, **settings):
        trajectory = make_trajectory(rewards or [0.0] * len(events), outcome=outcome)
        turns = [dataclasses.replace(t, events=tuple(e)) for t, e in zip(trajectory.turns, events, strict=True)]
        trajectory = dataclasses.replace(trajectory, turns=tuple(turns))
        return list(turn_rewards(trajectory, StepRewardSettings(**settings)))

    return run


DECISION = {"mode": "decision_stepwise"}
CONSISTENT = {**DECISION, "strategy": "consistent"}
PER_ACHIEVEMENT = {**DECISION, "strategy": "per_achievement"}


def test_by_default_each_turn_earns_what_its_environment_gave(earn):
    assert earn(["wood"], [], rewards=[0.5, None]) == [0.5, 0.0]


def test_off_pays_the_episodes_return_on_its_last_turn(earn):
    assert earn(["wood"], [], ["stone"], rewards=[0.5, None, 1.0], mode="off") == [0.0, 0.0, 1.5]


def test_events_replace_the_environments_rewards(earn):
    assert earn(["wood"], [], rewards=[7.0, 9.0], **DECISION) == [1.0, 0.0]


def test_unique_counts_what_the_episode_had_not_seen_and_absolute_counts_all(earn):
    events = (["wood", "stone"], ["wood", "drink"], ["wood"])
    assert earn(*events, **DECISION) == [2.0, 1.0, 0.0]
    assert earn(*events, **DECISION, kind="absolute") == [2.0, 2.0, 1.0]


def test_what_an_environment_unlocks_again_counts_where_the_kind_is_absolute(earn):
    achievements = Achievements(["wood", "stone"])
    turns = []
    for unlocked in (["wood", "wood"], [], ["wood", "stone"]):
        for name in unlocked:
            achievements.unlock(name)
        turns.append(achievements.turn_events())
    assert earn(*turns, **DECISION) == [1.0, 0.0, 1.0]
    assert earn(*turns, **DECISION, kind="absolute") == [1.0, 0.0, 2.0]


def test_a_turn_that_names_an_event_twice_reached_it_once(earn):
    assert earn(["wood", "wood"], **DECISION, kind="absolute") == [1.0]


def test_without_a_strategy_lambda_is_added_where_something_is_new(earn):
    # counts 2, 0, 1 with kind unique; a repeat is not new, also where kind "absolute" counts it
    events = (["wood", "stone"], ["wood"], ["drink"])
    assert earn(*events, **DECISION, indicator_lambda=0.5) == [2.5, 0.0, 1.5]
    assert earn(*events, **DECISION, indicator_lambda=0.5, kind="absolute") == [2.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("events", "indicator_lambda", "expected"),
    [
        (["wood"], 1.0, 1.0),
        (["wood", "drink"], 1.0, 1.0),  # two unlocks are one indicator
        (["wood", "drink"], 0.5, 0.5),
        (["wood"], 0.0, 1.0),  # 0 counts as 1
        ([], 1.0, 0.0),
    ],
)
def test_consistent_pays_lambda_once_a_turn(earn, events, indicator_lambda, expected):
    assert earn(events, **CONSISTENT, indicator_lambda=indicator_lambda) == [expected]


def test_consistent_pays_a_repeat_only_if_repeats_count(earn):
    assert earn(["wood"], ["wood"], **CONSISTENT, indicator_lambda=0.5) == [0.5, 0.0]
    assert earn(["wood"], ["wood"], **CONSISTENT, indicator_lambda=0.5, kind="absolute") == [0.5, 0.5]


def test_per_achievement_adds_weights_and_one_without_a_weight_counts_one(earn):
    assert earn(["wood", "drink"], **PER_ACHIEVEMENT, weights={"wood": 0.8}) == [1.8]
    assert earn(["wood", "drink"], **PER_ACHIEVEMENT, weights={"wood": 0.8}, indicator_lambda=0.5) == [0.9]


def test_per_achievement_pays_nothing_beyond_the_limit(earn):
    # limits: wood the default 1, stone 2, drink none
    events = [["wood", "stone", "drink"]] * 3
    assert earn(*events, **PER_ACHIEVEMENT, k_limits={"stone": 2, "drink": 0}) == [3.0, 2.0, 1.0]
    assert earn(*events, **PER_ACHIEVEMENT, k_limits={"stone": 2, "drink": -1}) == [3.0, 2.0, 1.0]


def test_earlier_unlocks_earn_more_by_beta(earn):
    # T = 3: 1 + 0.1 * 3; a repeat earns none; 1 + 0.1 * 1
    assert earn(["wood"], ["wood"], ["stone"], **DECISION, beta=0.1) == pytest.approx([1.3, 0.0, 1.1])
    assert earn(["wood"], ["wood"], ["stone"], **CONSISTENT, beta=0.1) == pytest.approx([1.3, 0.0, 1.1])
    assert earn(["wood"], [], **PER_ACHIEVEMENT, beta=0.1, weights={"wood": 0.5}) == pytest.approx([0.7, 0.0])


@pytest.mark.parametrize(
    ("events", "rewards", "expected"),
    [
        # credited 1 and 2 before the last turn: less these, the episode is worth its return where that is below 0
        ([["wood"], ["stone", "drink"], ["iron"]], [None, 0.5, -2.0], [1.0, 2.0, -1.5 - 3.0]),
        ([["wood"], ["stone", "drink"], ["iron"]], [None, 0.5, 0.25], [1.0, 2.0, -3.0]),
        ([["wood"]], [-0.5], [-0.5]),
        ([["wood"]], [0.5], [0.0]),
    ],
)
def test_an_action_beyond_a_limit_takes_back_what_was_credited(earn, events, rewards, expected):
    assert earn(*events, rewards=rewards, outcome=Outcome.ACTION_LIMIT, **DECISION) == expected


def test_an_episode_without_events_earned_0_although_its_environment_gave_nothing(earn):
    assert earn([], rewards=[None], **DECISION) == [0.0]


@pytest.mark.parametrize("settings", [{}, {"mode": "off"}])
def test_an_unscored_episode_is_not_worth_0(earn, settings):
    with pytest.raises(UnscoredError):
        earn([], rewards=[None], **settings)


@pytest.mark.parametrize("settings", [{}, {"mode": "off"}, DECISION])
def test_a_failed_episode_earns_nothing_at_all(earn, settings):
    with pytest.raises(UnscoredError, match="engine_error"):
        earn(["wood"], rewards=[1.0], outcome=Outcome.ENGINE_ERROR, **settings)


@pytest.mark.parametrize("strategy", [None, "consistent", "per_achievement"])
def test_an_episode_that_does_not_report_events_is_worth_its_return_and_not_0(make_trajectory, strategy):
    settings = StepRewardSettings(mode="decision_stepwise", strategy=strategy)
    trajectory = make_trajectory([0.5, 1.0])
    silent = dataclasses.replace(trajectory, reports_events=False)
    assert turn_rewards(trajectory, settings) == (0.0, 0.0)  # it achieved nothing, which is known
    assert turn_rewards(silent, settings) == (0.0, 1.5)

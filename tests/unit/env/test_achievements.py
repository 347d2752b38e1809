"""Achievements: what is unlocked, what counts in a turn, and how step rewards count it."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_gym.env.rewards import Achievements, Reward
from gspo_gym.errors import ContractError


def test_a_name_is_new_once_an_episode_but_an_event_of_every_turn_that_reaches_it() -> None:
    achievements = Achievements(["wood", "table"])
    assert (achievements.unlock("wood"), achievements.unlock("wood")) == (True, False)
    assert achievements.turn_events() == ("wood",)
    assert (achievements.unlock("table"), achievements.unlock("wood")) == (True, False)
    assert achievements.turn_events() == ("table", "wood")
    assert achievements.turn_events() == ()
    assert achievements.unlocked == ("wood", "table")


def test_a_new_episode_starts_from_nothing() -> None:
    achievements = Achievements(["wood"])
    achievements.unlock("wood")
    achievements.reset()
    assert (achievements.unlocked, achievements.turn_events()) == ((), ())
    assert achievements.unlock("wood")


def test_the_events_are_those_of_a_reward() -> None:
    achievements = Achievements(["wood"])
    achievements.unlock("wood")
    assert Reward({}, events=achievements.turn_events()).events == ("wood",)


def test_an_unknown_name_is_refused_with_the_nearest_and_earns_nothing() -> None:
    achievements = Achievements(["collect_wood"])
    with pytest.raises(ContractError, match="there is no achievement 'colect_wood'; did you mean 'collect_wood'"):
        achievements.unlock("colect_wood")
    assert achievements.turn_events() == ()


@pytest.mark.parametrize("names", ["wood", ["wood", "wood"], ["wood", ""], [1]])
def test_names_are_distinct_texts(names: Any) -> None:
    with pytest.raises(ContractError, match="Achievements: expected"):
        Achievements(names)

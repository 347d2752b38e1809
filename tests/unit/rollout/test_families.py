"""The same scripted episode earns the same return through the tokens of every family's template."""

from __future__ import annotations

import pytest
from chat_families import FAMILIES, ChatFamily
from door_episode import play_door


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.format is not None], ids=lambda family: family.name
)
def test_a_scripted_episode_earns_all_that_there_is(family: ChatFamily) -> None:
    trajectory = play_door(family.template)
    assert trajectory.error is None
    assert trajectory.reward == 1.0
    assert len(trajectory.turns) == 2

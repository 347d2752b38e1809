"""Limits on episodes, pools and scoring by themselves; what they do is in `test_episode.py` and `test_pool.py`."""

from __future__ import annotations

import pytest
from published_table import check_promises
from pydantic import ValidationError

from gspo_gym.base.settings import Settings
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits, ScoringLimits


@pytest.mark.parametrize(
    ("settings", "sections", "constants"),
    [
        (EpisodeLimits, ("limits", "rollout"), {"action_limit_return"}),
        (PoolLimits, ("limits", "rollout"), {"min_group_fraction", "max_attempts"}),
        (ScoringLimits, ("judge",), {"max_unscored"}),
    ],
)
def test_defaults_and_ranges_are_those_of_the_published_tables(
    settings: type[Settings], sections: tuple[str, ...], constants: set[str]
) -> None:
    promised = set().union(*(check_promises(settings, section) for section in sections))
    assert promised == set(settings.model_fields) - constants


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_return_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        EpisodeLimits(max_turns=1, max_output_tokens=1, max_model_len=2, action_limit_return=value)

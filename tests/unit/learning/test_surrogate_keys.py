"""What a surrogate reads, the units that it takes, and the clip range that follows from it, by tables written here."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import pytest

from gspo_gym.learning.settings import LossSettings
from gspo_gym.learning.surrogate_keys import surrogate_problem, with_following_clips

UNITS = ("trajectory", "segment", "turn", "token")
# surrogate: what it reads of these keys, the units it takes
TABLE: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "clip": ({"clip_low", "clip_high", "dual_clip"}, UNITS),
    "cispo": ({"clip_high"}, UNITS),
    "sapo": ({"sapo_temperatures"}, UNITS),
    "gmpo": ({"clip_low", "clip_high"}, ("trajectory", "segment", "turn")),
    "dppo": ({"clip_low", "clip_high"}, ("token",)),
    "vespo": (set(), ("trajectory",)),
}
VALUES = {
    "clip_low": 0.01,
    "clip_high": 0.02,
    "dual_clip": 3.0,
    "sapo_temperatures": (2.0, 2.0),
}


def test_the_table_has_every_surrogate() -> None:
    assert list(TABLE) == list(get_args(LossSettings.model_fields["surrogate"].annotation))


@pytest.mark.parametrize("surrogate", TABLE)
def test_a_surrogate_takes_its_own_units_and_keys_and_names_what_it_does_not_take(surrogate: str) -> None:
    keys, units = TABLE[surrogate]
    for unit in UNITS:
        problem = surrogate_problem(surrogate, unit, ["kl_coef", *sorted(keys)])
        expected = f'surrogate: "{surrogate}" needs unit {" or ".join(map(repr, units))}, got {unit!r}'
        assert problem == (None if unit in units else expected)
    for key in VALUES.keys() - keys:
        expected = f'{key}: has no effect with surrogate "{surrogate}"; remove it'
        assert surrogate_problem(surrogate, units[0], ["kl_coef", key, *keys]) == expected
        with pytest.raises(ValueError, match=re.escape(expected)):
            LossSettings.model_validate({"surrogate": surrogate, "unit": units[0], key: VALUES[key]})


@pytest.mark.parametrize(
    ("surrogate", "unit", "low", "high"),
    [
        ("clip", "trajectory", 3e-4, 4e-4),
        ("clip", "token", 3e-4, 4e-4),
        ("cispo", "token", 3e-4, 4.0),  # a cap of 5
        ("cispo", "trajectory", 3e-4, 4e-4),
        ("sapo", "token", 3e-4, 4e-4),
        ("gmpo", "turn", 1 - math.exp(-0.4), math.exp(0.4) - 1),
        ("dppo", "token", 0.2, 0.2),
        ("vespo", "trajectory", 3e-4, 4e-4),
    ],
)
def test_the_clip_range_follows_from_the_surrogate(surrogate: Any, unit: Any, low: float, high: float) -> None:
    settings = LossSettings(surrogate=surrogate, unit=unit)
    assert (settings.clip_low, settings.clip_high) == (pytest.approx(low, rel=1e-12), pytest.approx(high, rel=1e-12))


def test_a_clip_that_is_stated_stays_and_what_is_no_name_is_left_to_be_reported() -> None:
    assert with_following_clips({"surrogate": "dppo", "clip_low": 0.1, "clip_high": None}) == {
        "surrogate": "dppo",
        "clip_low": 0.1,
        "clip_high": 0.2,
    }
    for values in ({}, {"surrogate": None}, {"surrogate": ["dppo"]}, {"surrogate": "none", "unit": "token"}):
        assert with_following_clips(values) == values

from __future__ import annotations

import math

import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.learning.schedule import learning_rate
from gspo_gym.learning.settings import OptimizerSettings


def rates(num, total_steps=None, **settings):
    resolved = OptimizerSettings(learning_rate=2.0, **settings)
    return [learning_rate(step, settings=resolved, total_steps=total_steps) for step in range(num)]


def test_warmup_is_linear_and_starts_above_zero():
    assert rates(6, num_warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_cosine_falls_from_the_peak_to_its_floor_at_the_last_step_and_stays():
    # one step of warm-up, then 5 steps from progress 0 to 1: floor + (1 - floor) (1 + cos(pi p)) / 2, floor 0.1
    expected = [2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi * p))) for p in (0, 0.25, 0.5, 0.75, 1)]
    actual = rates(8, 6, num_warmup_steps=1, schedule="cosine")
    assert actual == pytest.approx([2.0, *expected, 0.2, 0.2], abs=1e-12)


def test_cosine_of_a_single_step_is_the_peak():
    assert rates(1, 1, schedule="cosine") == [2.0]


@pytest.mark.parametrize("total_steps", [None, 3])
def test_cosine_without_an_end_or_room_is_refused(total_steps):
    with pytest.raises(ConfigError, match="total_steps"):
        rates(1, total_steps, num_warmup_steps=3, schedule="cosine")

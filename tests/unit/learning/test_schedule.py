from __future__ import annotations

import math

import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.learning.optimizer import scheduled_rate
from gspo_gym.learning.settings import OptimizerSettings


def rates(num, total_steps=None, **settings):
    resolved = OptimizerSettings(**settings)
    return [scheduled_rate(step, peak=0.5, settings=resolved, total_steps=total_steps) for step in range(num)]


def test_warmup_is_linear_and_starts_above_zero():
    assert rates(6, num_warmup_steps=4) == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]


def test_cosine_falls_from_the_peak_to_its_floor_at_the_last_step_and_stays():
    # one step of warm-up, then 5 steps from progress 0 to 1: floor + (1 - floor) (1 + cos(pi p)) / 2, floor 0.1
    expected = [0.5 * (0.1 + 0.45 * (1 + math.cos(math.pi * p))) for p in (0, 0.25, 0.5, 0.75, 1)]
    actual = rates(8, 6, num_warmup_steps=1, schedule="cosine")
    assert actual == pytest.approx([0.5, *expected, 0.05, 0.05], abs=1e-12)


def test_cosine_of_a_single_step_is_the_peak():
    assert rates(1, 1, schedule="cosine") == [0.5]


@pytest.mark.parametrize("total_steps", [None, 3])
def test_cosine_without_an_end_or_room_is_refused(total_steps):
    with pytest.raises(ConfigError, match=r"total_steps|no step is left for the cosine"):
        rates(1, total_steps, num_warmup_steps=3, schedule="cosine")


def test_linear_falls_by_equal_steps_from_the_peak_to_its_floor_and_stays():
    # one step of warm-up, then 4 steps from progress 0 to 1: floor + (1 - floor) (1 - p), floor 0.25
    expected = [0.5 * (0.25 + 0.75 * (1 - p)) for p in (0, 1 / 3, 2 / 3, 1)]
    actual = rates(7, 5, num_warmup_steps=1, schedule="linear", min_lr_fraction=0.25)
    assert actual == pytest.approx([0.5, *expected, 0.125, 0.125], abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_to_the_peak_itself_is_constant(schedule):
    assert rates(4, 4, schedule=schedule, min_lr_fraction=1.0) == [0.5] * 4


@pytest.mark.parametrize(
    ("fraction", "total", "expected"), [(0.07, 100, 7), (0.07, 101, 8), (0.03, 100, 3), (0.5, 1, 1)]
)
def test_a_warmup_fraction_is_rounded_up_but_not_for_a_rounding_error(fraction, total, expected):
    # 0.07 * 100 is 7.000000000000001 in float64
    settings = OptimizerSettings(warmup_fraction=fraction)
    assert settings.warmup_steps(total) == expected


def test_a_warmup_fraction_warms_up_for_that_part_of_the_steps():
    # a quarter of 8 steps is 2
    assert rates(4, 8, warmup_fraction=0.25) == [0.25, 0.5, 0.5, 0.5]


def test_a_warmup_fraction_of_an_unknown_number_of_steps_is_refused():
    with pytest.raises(ConfigError, match="warmup_fraction needs total_steps"):
        rates(1, None, warmup_fraction=0.1)


@pytest.mark.parametrize("total_steps", [None, 1])
def test_a_linear_decay_without_an_end_or_room_is_refused(total_steps):
    with pytest.raises(ConfigError, match=r"schedule 'linear'.*total_steps|no step is left for the linear"):
        rates(1, total_steps, num_warmup_steps=1, schedule="linear")

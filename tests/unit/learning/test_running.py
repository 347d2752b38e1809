from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo_gym.learning.advantages import RunningReturns

values_of_a_run = st.lists(st.lists(st.floats(-100, 100), max_size=5), max_size=6)


def after(parts):
    running = RunningReturns()
    for part in parts:
        running = running.updated(np.array(part), magnitude=max((abs(v) for v in part), default=0.0))
    return running


def test_three_values_in_two_parts_by_hand():
    # 1, 2 and 6: mean 3, squares of deviations 4 + 1 + 9
    running = after([[1.0], [], [2.0, 6.0]])
    assert dataclasses.astuple(running)[:4] == pytest.approx((3, 3.0, 14.0, 6.0))
    assert running.std == pytest.approx(math.sqrt(7))


def test_one_value_has_no_spread_and_two_have():
    # 0.1 to the last digit, which a start from another mean than 0 would lose
    assert dataclasses.astuple(after([[0.1]]))[:4] == (1, 0.1, 0.0, 0.1)
    assert after([[0.1]]).std == 0.0
    assert RunningReturns().std == 0.0
    assert after([[1.0, 3.0]]).std == pytest.approx(math.sqrt(2))


@given(values_of_a_run)
def test_parts_are_as_good_as_the_whole(parts):
    values = np.array([v for part in parts for v in part])
    running = after(parts)
    assert running.count == len(values)
    if len(values) > 1:
        assert running.mean == pytest.approx(values.mean(), abs=1e-9)
        assert running.std == pytest.approx(values.std(ddof=1), abs=1e-6)


def test_returns_around_a_million_keep_a_deviation_of_one():
    # the difference of a sum of squares and a squared sum would have lost it: 1e12 * 1e4 has a last digit of 2
    values = 1e6 + np.arange(10_000) % 2 * 2.0  # 0, 2, 0, 2, ...: deviations of 1
    running = after(np.split(values, 100))
    assert running.std == pytest.approx(math.sqrt(10_000 / 9_999), rel=1e-9)


def test_a_state_that_went_through_json_goes_on_bit_for_bit():
    generator = np.random.default_rng(0)
    parts = [generator.normal(size=7).tolist() for _ in range(6)]
    restored = RunningReturns(**json.loads(json.dumps(dataclasses.asdict(after(parts[:3])))))
    for part in parts[3:]:
        restored = restored.updated(np.array(part), magnitude=max(abs(v) for v in part))
    assert restored == after(parts)

"""Reward: a number that keeps its terms, also through copies and pickles."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ContractError


def test_the_float_is_the_exact_sum_of_the_terms() -> None:
    reward = Reward({"a": 0.1, "b": 0.2, "c": -0.3})
    assert float(reward) == math.fsum([0.1, 0.2, -0.3])  # 0.1 + 0.2 - 0.3 added one by one is another number
    assert isinstance(reward, float)


def test_terms_and_success_of_numpy_become_python_values() -> None:
    reward = Reward({"a": np.float32(0.5), "b": np.int64(2)}, success=np.bool_(True))  # type: ignore[arg-type]
    assert [type(value) for value in reward.terms.values()] == [float, float]
    assert reward.success is True


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda reward: pickle.loads(pickle.dumps(reward))],
    ids=["copy", "deep", "pickle"],
)
def test_a_duplicate_is_whole(duplicate: Any) -> None:
    reward = Reward({"a": 0.5, "b": -0.25}, events=("found",), success=False)
    twin = duplicate(reward)
    assert type(twin) is Reward
    assert (float(twin), twin.terms, twin.events, twin.success) == (0.25, {"a": 0.5, "b": -0.25}, ("found",), False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None])
def test_a_term_that_is_no_finite_number_is_named(value: Any) -> None:
    with pytest.raises(ContractError, match="reward term 'a': expected a finite number"):
        Reward({"a": value})


def test_events_and_success_are_checked() -> None:
    with pytest.raises(ContractError, match="reward events: expected a sequence of names, got 'found'"):
        Reward({}, events="found")
    with pytest.raises(ContractError, match="reward success: expected True, False or None, got 'yes'"):
        Reward({}, success="yes")  # type: ignore[arg-type]


def test_a_score_without_a_weight_is_an_error() -> None:
    with pytest.raises(ContractError, match=r"reward terms \['b'\] have no weight; weights exist for \['a'\]"):
        Reward.weighted({"a": 1.0, "b": 1.0}, {"a": 2.0})

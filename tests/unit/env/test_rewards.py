"""Reward: a number that keeps its terms, also through copies and pickles."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

from gspo_gym.env.rewards import Reward, RewardTerms
from gspo_gym.errors import ConfigError, ContractError, EnvError, UsageError


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1", None])
def test_a_term_that_is_no_finite_number_is_named(value: Any) -> None:
    with pytest.raises(ContractError, match="reward term 'a': expected a finite number"):
        Reward({"a": value})


def test_terms_whose_product_or_sum_no_float_holds_are_the_authors_error() -> None:
    with pytest.raises(ContractError, match=r"reward terms: expected finite numbers, got .*100000"):
        Reward.weighted({"a": 1.0, "b": 10**400}, {"a": 1.0, "b": 0.5})
    with pytest.raises(ContractError, match=r"reward terms \['a', 'b'\]: their sum is too large"):
        Reward({"a": 1e308, "b": 1e308})


def test_events_and_success_are_checked() -> None:
    with pytest.raises(ContractError, match="reward events: expected a sequence of names, got 'found'"):
        Reward({}, events="found")
    with pytest.raises(ContractError, match="reward success: expected True, False or None, got 'yes'"):
        Reward({}, success="yes")  # type: ignore[arg-type]


def test_a_score_without_a_weight_is_an_error() -> None:
    with pytest.raises(ContractError, match=r"reward terms \['b'\] have no weight; weights exist for \['a'\]"):
        Reward.weighted({"a": 1.0, "b": 1.0}, {"a": 2.0})


# --- terms from functions ---------------------------------------------------------------------------------------------


def correct(action: str, answer: str) -> bool:
    return action == answer


def length(action: str, unit: float = 1.0) -> float:
    return len(action) * unit


async def judged(action: str) -> float:
    await asyncio.sleep(0)
    return 0.5


def test_each_function_is_a_term_with_its_weight_and_gets_what_it_names() -> None:
    terms = RewardTerms({correct: 1.0, length: -0.25})
    reward = terms.score(action="ab", answer="ab", unused=object(), events=("x",), success=True)
    assert reward is not None
    assert (float(reward), dict(reward.terms)) == (1.0 - 0.25 * 2, {"correct": 1.0, "length": -0.5})
    assert (reward.events, reward.success) == (("x",), True)
    with_unit = terms.score(action="ab", answer="b", unit=2.0)
    assert with_unit is not None
    assert dict(with_unit.terms) == {"correct": 0.0, "length": -1.0}
    assert with_unit.success is None


def test_terms_may_look_at_events_and_success() -> None:
    def counted(events: tuple[str, ...]) -> int:
        return len(events)

    def won(success: bool | None) -> bool:
        return bool(success)

    reward = RewardTerms({counted: 0.5, won: 2}).score(events=("a", "b"), success=True)
    assert reward is not None
    assert dict(reward.terms) == {"counted": 1.0, "won": 2.0}


def test_a_term_that_is_not_scored_leaves_the_whole_reward_unscored() -> None:
    def unsure() -> None:
        return None

    assert RewardTerms({unsure: 1.0, correct: 1.0}).score(action="a", answer="a") is None
    assert asyncio.run(RewardTerms({correct: 1.0, judged: 1.0, unsure: 1.0}).score_async(action="", answer="")) is None


def test_async_functions_are_awaited_and_score_in_their_place() -> None:
    reward = asyncio.run(RewardTerms({judged: 2.0, correct: 1.0}).score_async(action="a", answer="a"))
    assert reward is not None
    assert list(reward.terms.items()) == [("judged", 1.0), ("correct", 1.0)]
    with pytest.raises(UsageError, match=r"\['judged'\] are async; await score_async instead"):
        RewardTerms({judged: 2.0}).score(action="a")


def test_plain_terms_may_be_awaited_too() -> None:
    reward = asyncio.run(RewardTerms({correct: 1.0}).score_async(action="a", answer="a"))
    assert reward == 1.0


def test_what_a_term_asks_for_and_is_not_given_is_named() -> None:
    with pytest.raises(ContractError, match="reward term 'correct' takes 'answer', which is not given; did you mean"):
        RewardTerms({correct: 1.0}).score(action="a", answers="a")


def test_a_term_that_raises_is_named_plain_or_async() -> None:
    def broken(action: str) -> float:
        return 1 / len(action)

    async def late(action: str) -> float:
        return 1 / len(action)

    with pytest.raises(EnvError, match="reward term 'broken' raised ZeroDivisionError: division by zero"):
        RewardTerms({broken: 1.0}).score(action="")
    with pytest.raises(EnvError, match="reward term 'late' raised ZeroDivisionError"):
        asyncio.run(RewardTerms({late: 1.0}).score_async(action=""))


@pytest.mark.parametrize("score", [math.nan, math.inf, 10**400, "1", [1.0]], ids=repr)
def test_a_score_that_is_no_finite_number_names_its_term(score: Any) -> None:
    def odd() -> Any:
        return score

    with pytest.raises(ContractError, match="reward term 'odd': expected a finite number, a bool or None"):
        RewardTerms({odd: 1.0}).score()


def test_functions_that_cannot_be_terms_are_refused_when_they_are_declared() -> None:
    def positional(action: str, /) -> float:
        return 0.0

    def twin() -> Any:
        def correct(action: str) -> float:
            return 0.0

        return correct

    with pytest.raises(ConfigError, match=r"expected functions with a name \(def\), got <function "):
        RewardTerms({lambda action: 0.0: 1.0})
    with pytest.raises(ConfigError, match="expected one function of each name, got 'correct' twice"):
        RewardTerms({correct: 1.0, twin(): 1.0})
    with pytest.raises(ConfigError, match="reward term 'positional': expected parameters to be given by keyword"):
        RewardTerms({positional: 1.0})
    for weight in (math.nan, 10**400, "1", True):
        with pytest.raises(ConfigError, match="expected a finite weight for 'correct'"):
            RewardTerms({correct: weight})  # type: ignore[dict-item]

"""Graders on answers as models write them, and reward functions with any of the arguments."""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

import pytest

from gspo_gym.env.data.dataset import GRADERS, RowReward, reference_text
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, ContractError, UnknownNameError

ROW = {"question": "2+2?", "answer": "4", "level": 3, "unused": None}


@pytest.mark.parametrize(
    ("grader", "completion", "answer", "is_right"),
    [
        ("exact", " Paris\n", "Paris", True),
        ("exact", "paris", "Paris", False),
        ("exact", "4", 4, True),
        ("contains", "The capital is PARIS, of course.", "Paris", True),
        ("contains", "Parisian", "Paris", False),
        ("contains", "14", "4", False),
        ("contains", "so \u22124", "-4", True),
        ("contains", "it is a.b", "a.b", True),
        ("contains", "it is axb", "a.b", False),
        ("number", "2 + 2 is 4.", "4", True),
        ("number", "so 1,234.50 in all", "1234.5", True),
        ("number", "5-3", "3", True),  # the minus is an operator
        ("number", "it is -3", "3", False),
        ("number", "x=-3", "-3", True),
        ("number", ".5", "0.50", True),
        ("number", "4 of them, not 5", "4", False),  # the last one counts
        ("number", "12,34", "34", True),  # no thousands: two numbers
        ("number", "0.1", 0.1, True),
        ("number", "none", "4", False),
        ("number", "it is \u22125", "-5", True),
        ("number", "5\u22123", "3", True),  # an operator
        ("number", "1e3", "1000", True),
        ("number", "1.5E-3 m", "0.0015", True),
        ("number", "2em", "2", True),
        ("number", "1e999", "1e998", False),
        ("number", "3/4", "0.75", True),
        ("number", "-3/4.", "-0.75", True),
        ("number", "1/4", "3/4", False),
        ("number", "6/2 = 3", "3", True),
        ("number", "on 3/4/2020", "2020", True),  # a date
        ("number", "1/3", "0.3333333333333333", False),
        ("number", "5/0", "5/0", False),
        ("number", r"\dfrac{3}{4}", "3/4", True),
        ("number", r"\frac12", "0.5", True),
        ("number", r"1\frac{1}{2}", "1.5", True),
        ("number", r"-\tfrac{6}{8}", r"-\frac{3}{4}", True),
        ("number", "3 1/2", "3.5", True),
        ("number", "3 1/2", "0.5", False),
        ("number", "-3 1/2", "-7/2", True),
        ("number", "3 100/200", "3.5", True),
        ("number", "1 000/4", "250", True),
        ("number", r"\dfrac{1{,}000}{4}", "250", True),
        ("number", r"\frac{1.5}{2}", "0.75", True),
        ("number", r"\frac{1.5}{2}", "2", False),
        ("number", "it is 4 5/4", "5/4", True),  # no mixed number
        ("number", "-1/-2", "0.5", True),
        ("number", "-1/-2", "-2", False),
        ("number", r"\frac{1}{-2}", "-0.5", True),
        ("number", r"\cfrac{1}{2}", "0.5", True),
        ("number", "1{,}000", "1000", True),
        ("number", "1{,}000", "0", False),
        ("number", r"12\,345.5", "12345.5", True),
        ("number", r"10,\!000", "10000", True),
        ("number", "10 000", "10000", True),
        ("number", "10\u202f000", "0", False),
        ("number", "in 2020 100 people", "100", True),  # two numbers
        ("number", "50%", "50%", True),
        ("number", r"50 \%", "0.5", True),
        ("number", "50", "50%", True),
        ("number", "0.5", "50%", True),
        ("number", "0.5%", "50%", False),
        ("number", "50%", "0.005", False),
        ("number", "72", "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", True),
        ("boxed", r"so \boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        ("boxed", r"\boxed{ \frac{1} {2} }", r"Thus $\boxed{\frac{1}{2}}$.", True),
        ("boxed", r"\boxed{0.50}", "0.5", True),
        ("boxed", r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", True),
        ("boxed", r"\boxed{\tfrac{x}{2}}", r"\frac{x}{2}", True),
        ("boxed", r"\boxed{\frac{1}{2}}", "0.5", True),
        ("boxed", r"\boxed{1/2}", r"\frac12", True),
        ("boxed", "\\boxed{\u22121}", "-1", True),
        ("boxed", r"\boxed{1e3}", "1,000", True),
        ("boxed", r"\boxed{50\%}", "50", True),
        ("boxed", r"\boxed{\text{east}}", "east", True),
        ("boxed", r"\boxed{5\text{ cm}}", "5", True),
        ("boxed", r"\boxed{5\text{ cm}}", r"6\text{ cm}", False),
        ("boxed", r"\boxed{5\,\text{cm}}", "5", True),
        ("boxed", r"\boxed{10~\text{cm}^2}", "10", True),
        ("boxed", r"\boxed{\text{about }5}", "5", True),
        ("boxed", r"\boxed{2\text{ and }3}", "23", False),
        ("boxed", r"\boxed{320}", r"3\text{ hours }20\text{ minutes}", False),
        ("boxed", r"\boxed{5\text{3}}", "5", False),
        ("boxed", r"\boxed{\text{east}}", r"\text{west}", False),
        ("boxed", r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", False),
        ("boxed", r"\boxed{x+0.5}", "y+0.5", False),
        ("boxed", r"\boxed{4", "4", False),
        ("boxed", "4", "4", False),
        ("choice", "C", "C", True),
        ("choice", "Not (A), rather (C).", "C", True),
        ("choice", "Answer: B) because I'd say so", "(B)", True),
        ("choice", "A cat", "A", True),
        ("choice", "Because", "B", False),
        ("choice", "b", "B", False),
        ("choice", "", "B", False),
    ],
)
def test_a_grader_reads_answers_as_models_write_them(grader: str, completion: str, answer: Any, is_right: bool) -> None:
    assert GRADERS[grader](completion=completion, answer=answer) is is_right


@pytest.mark.parametrize("grader", GRADERS)
@pytest.mark.parametrize("answer", ["B", "4", "-3", "1,000"])
def test_the_reference_s_text_is_right_for_every_grader_that_can_read_the_answer(grader: str, answer: str) -> None:
    if (grader == "choice") != answer.isalpha() and grader in ("choice", "number"):
        return
    assert GRADERS[grader](completion=reference_text(grader, answer), answer=answer)


def test_a_huge_number_costs_no_time_and_compares_exactly() -> None:
    digits = "9" * 100_000
    assert GRADERS["number"](completion=digits, answer=digits)
    assert not GRADERS["number"](completion=digits, answer=digits[:-1] + "8")


def call(function: Any, completion: str = "said") -> Any:
    return RowReward.of(function)(completion, ROW)


def test_a_function_is_given_what_it_asks_for_and_nothing_else() -> None:
    assert call(lambda completion: completion) == "said"
    assert call(lambda answer, completion: (answer, completion)) == ("4", "said")
    assert call(lambda question: question) == "2+2?"
    assert call(lambda *, level, answer: (level, answer)) == (3, "4")
    assert call(lambda: 1.0) == 1.0
    assert call(lambda completion, **columns: (completion, columns)) == ("said", ROW)


def test_a_default_is_used_where_the_row_has_no_such_column() -> None:
    assert call(lambda completion, level=0, weight=2.0: (level, weight)) == (3, 2.0)
    assert RowReward.of(lambda completion, answer, weight=2.0: 0).required == {"answer"}


def test_what_the_model_said_hides_a_column_of_that_name() -> None:
    reward = RowReward.of(lambda completion: completion)
    assert reward("said", {"completion": "from the data"}) == "said"


@pytest.mark.parametrize("function", [lambda completion, /: 0.0, lambda *everything: 0.0])
def test_a_function_that_cannot_be_called_by_keyword_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match="expected parameters to be given by keyword"):
        RowReward.of(function)


def test_names_are_graders_or_in_modules() -> None:
    assert RowReward.of("exact").required == {"answer"}
    assert RowReward.of("gspo_gym.env.data.dataset:number").name == "gspo_gym.env.data.dataset:number"
    with pytest.raises(UnknownNameError, match="did you mean 'number'"):
        RowReward.of("numbr")
    with pytest.raises(UnknownNameError, match="has no 'nmber'; did you mean 'number'"):
        RowReward.of("gspo_gym.env.data.dataset:nmber")
    with pytest.raises(ConfigError, match=r"expected a function, got 3\.14"):
        RowReward.of("math:pi")


def test_async_functions_are_known_as_such_however_they_are_wrapped() -> None:
    async def late(completion: str, bonus: float = 0.0) -> float:
        return len(completion) + bonus

    class Late:
        async def __call__(self, completion: str) -> float:
            return float(len(completion))

    for function, expected in ((late, 4.0), (partial(late, bonus=1.0), 5.0), (Late(), 4.0)):
        reward = RowReward.of(function)
        assert reward.is_async
        assert asyncio.run(reward("said", ROW)) == expected
    assert not RowReward.of(lambda completion: 0.0).is_async


@pytest.mark.parametrize(
    ("answered", "terms", "success"),
    [
        (True, {"correct": 1.0}, True),
        (False, {"correct": 0.0}, False),
        (0.5, {"reward": 0.5}, False),
        (1, {"reward": 1.0}, True),
        ({"format": 0.25, "correct": 0.75}, {"format": 0.25, "correct": 0.75}, True),
        (Reward({"x": 1.0}), {"x": 1.0}, None),  # who builds one says for himself whether it is a success
    ],
)
def test_every_answer_becomes_a_reward(answered: Any, terms: dict[str, float], success: bool | None) -> None:
    reward = RowReward.of("exact").as_reward(answered, top=1.0)
    assert reward is not None
    assert (dict(reward.terms), reward.success) == (terms, success)


def test_without_a_largest_reward_no_number_is_a_success() -> None:
    reward = RowReward.of("exact").as_reward(5.0, top=math.inf)
    assert reward is not None
    assert reward.success is None
    assert RowReward.of("exact").as_reward(None, top=1.0) is None


@pytest.mark.parametrize("answered", ["1.0", math.nan, [1.0], {"x": None}])
def test_an_answer_that_is_no_reward_names_the_function(answered: Any) -> None:
    with pytest.raises(ContractError, match="reward 'exact': reward term"):
        RowReward.of("exact").as_reward(answered, top=1.0)

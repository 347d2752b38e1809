"""The budget: limits hold however many calls are under way, waits end, and what is not known is charged at its most."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.judge.asking import BudgetLimits, JudgeBudget, Prices
from gspo_gym.judge.base import JudgeBudgetError, JudgeCost

MOST = JudgeCost(1, 80, 20, 0.5)


@pytest.mark.parametrize(
    ("limits", "cap"),
    [
        (BudgetLimits(max_calls=40), lambda cost: (cost.num_calls, 40, 1)),
        (BudgetLimits(max_usd=10.0), lambda cost: (cost.usd, 10.0, 0.5)),
    ],
)
def test_many_at_once_spend_at_most_the_limit_and_one_call(limits: BudgetLimits, cap: object) -> None:
    draws = np.random.default_rng(5)
    costs = [
        JudgeCost(1, int(draws.integers(81)), int(draws.integers(21)), float(draws.uniform(0, 0.5))) for _ in range(500)
    ]

    async def play() -> tuple[JudgeBudget, JudgeCost, int]:
        budget, real, refused = JudgeBudget(limits), JudgeCost(), 0

        async def call(number: int) -> None:
            nonlocal real, refused
            try:
                async with budget.call(MOST) as reservation:
                    for _ in range(number % 7):
                        await asyncio.sleep(0)
                    reservation.settle(costs[number])
                    real = real + costs[number]
            except JudgeBudgetError:
                refused += 1

        await asyncio.gather(*(call(number) for number in range(500)))
        return budget, real, refused

    budget, real, refused = asyncio.run(play())
    spent, limit, most = cap(real)  # type: ignore[operator]
    assert limit <= spent < limit + most  # used up, and by no more than one call too much
    assert refused == 500 - real.num_calls > 0
    assert budget.spent.num_calls == real.num_calls
    assert budget.spent.usd == pytest.approx(real.usd)


def test_a_call_that_only_others_under_way_stand_against_waits_for_them() -> None:
    async def play() -> list[str]:
        budget, order = JudgeBudget(BudgetLimits(max_usd=1.5)), list[str]()
        hold = asyncio.Event()

        async def first() -> None:
            async with budget.call(JudgeCost(1, usd=2.0)) as reservation:
                order.append("first in")
                await hold.wait()
                reservation.settle(JudgeCost(1, usd=0.25))
                order.append("first out")

        async def second() -> None:
            async with budget.call(JudgeCost(1, usd=2.0)) as reservation:
                order.append("second in")
                reservation.settle(JudgeCost(1, usd=1.25))

        tasks = [asyncio.create_task(first()), asyncio.create_task(second())]
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["first in"]
        hold.set()
        await asyncio.gather(*tasks)
        # 0.25 + 1.25 dollars: the limit is reached, so the third call is refused and does not wait.
        with pytest.raises(JudgeBudgetError, match=r"max_usd = 1\.5, spent 1\.5000"):
            async with budget.call(MOST):
                pass
        budget.limits = BudgetLimits(max_usd=1.75)
        async with budget.call(MOST):
            order.append("raised")
        return order

    assert asyncio.run(play()) == ["first in", "first out", "second in", "raised"]


def test_a_call_without_an_answer_is_charged_at_its_most_and_frees_its_place() -> None:
    async def play() -> JudgeCost:
        budget = JudgeBudget(BudgetLimits(max_calls=2))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="on purpose"):
                async with budget.call(MOST):
                    raise RuntimeError("on purpose")
        with pytest.raises(JudgeBudgetError, match="max_calls = 2, spent 2"):
            async with budget.call(MOST):
                pass
        return budget.spent

    assert asyncio.run(play()) == JudgeCost(2, 160, 40, 1.0)


def test_what_an_earlier_process_spent_counts() -> None:
    async def play() -> None:
        budget = JudgeBudget(BudgetLimits(max_usd=1.0), spent=JudgeCost(7, 0, 0, 1.0))
        async with budget.call(MOST):
            pass

    with pytest.raises(JudgeBudgetError, match=r"max_usd = 1, spent 1\.0000"):
        asyncio.run(play())


def test_prices_are_for_a_million_tokens() -> None:
    # 3 dollars a million read, 15 written: 200,000 * 3 / 1e6 + 10,000 * 15 / 1e6 = 0.6 + 0.15.
    assert Prices(3.0, 15.0).cost_of(200_000, 10_000) == JudgeCost(1, 200_000, 10_000, 0.75)


@pytest.mark.parametrize("wrong", [{"max_calls": -1}, {"max_usd": float("nan")}])
def test_impossible_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="limits >= 0"):
        BudgetLimits(**wrong)  # type: ignore[arg-type]

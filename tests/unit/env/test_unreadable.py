"""Text that cannot be read never pays: what it costs by default, and the check that plays it every turn."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.session import EnvSession
from gspo_gym.env.tools import tool
from gspo_gym.errors import ContractError
from gspo_gym.types import Message, ToolCall


class Text(TextEnv):
    """Double a number; a wrong answer costs 1."""

    reward_range: tuple[float, float] = (-1.0, 1.0)
    policies: ClassVar = {
        "reference": lambda env, rng: lambda messages: str(2 * env.number),
        "random": lambda env, rng: lambda messages: str(rng.integers(1_000, 2_000)),
    }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(1, 400))
        return f"Double {self.number}.", {}

    def step(self, action: str) -> Any:
        is_right = action == str(2 * self.number)
        return "Done.", 1.0 if is_right else -1.0, True, False, {"success": is_right}


class Tools(ToolEnv):
    """The same by a tool."""

    reward_range: tuple[float, float] = (-1.0, 1.0)

    def start(self, options: Any) -> Any:
        return "Double 3."

    @tool
    def answer(self, number: int) -> str:
        """Answer.

        Args:
            number: the number.
        """
        self.finish(1.0 if number == 6 else -1.0)
        return "done"


class AsyncTools(Tools):
    async def end_turn(self) -> None:
        return None


class Plain:
    """The same without a base class, and so without `invalid_action`."""

    reward_range = (-1.0, 1.0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "Double 3.", {}

    def step(self, action: str) -> Any:
        return "Done.", 1.0 if action == "6" else -1.0, True, False, {}


def said(env: Any, is_right: bool) -> Message:
    number = 2 * getattr(env, "number", 3) if is_right else 0
    calls = (ToolCall("c0", "answer", {"number": number}),) if isinstance(env, ToolEnv) else ()
    return Message("assistant", str(number), calls)


def rewards_of(env: Any, num_unreadable: int, *, then_right: bool | None = None) -> list[float | None]:
    async def play() -> list[float | None]:
        session = EnvSession(env, env_id="Double")
        await session.reset(0)
        rewards = [(await session.invalid_action("unreadable")).reward for _ in range(num_unreadable)]
        return rewards if then_right is None else [*rewards, (await session.step(said(env, then_right))).reward]

    return asyncio.run(play())


@pytest.mark.parametrize("kind", [Text, Tools, AsyncTools, Plain])
def test_by_default_it_costs_in_every_turn_what_the_worst_turn_can_cost(kind: type) -> None:
    """And the range bounds what the environment gives beside it: -1 for a wrong answer is in range after it, too."""
    assert rewards_of(kind(), 3) == [-1.0, -1.0, -1.0]
    assert rewards_of(kind(), 2, then_right=False) == [-1.0, -1.0, -1.0]
    assert rewards_of(kind(), 1, then_right=True) == [-1.0, 1.0]


@pytest.mark.parametrize("low", [0.0, 0.25, -float("inf")])
@pytest.mark.parametrize("kind", [Text, Tools, Plain])
def test_it_costs_nothing_where_no_turn_can_cost_something_or_none_is_declared(kind: type, low: float) -> None:
    env = kind()
    env.reward_range = (low, 1.0)
    assert rewards_of(env, 2, then_right=True) == [0.0, 0.0, 1.0]


def test_who_charges_failed_calls_sets_another_price_and_what_a_turn_costs_anyway_sets_none() -> None:
    class Priced(Tools):
        def end_turn(self) -> None:
            self.add_reward(-0.05 * self.num_failed_calls)

    class Charging(Tools):
        def invalid_action(self, error: str) -> Any:
            self.add_reward(-0.25)
            return super().invalid_action(error)

    class Stepping(Tools):
        per_turn = 0.1

        def end_turn(self) -> None:
            self.add_reward(self.per_turn)

    class Slow(Stepping):
        per_turn = -0.02

    assert rewards_of(Priced(), 2, then_right=True) == [-0.05, -0.05, 1.0]
    assert rewards_of(Charging(), 2, then_right=True) == [-0.25, -0.25, 1.0]
    for kind in (Stepping, Slow):
        assert rewards_of(kind(), 2) == [pytest.approx(-1.0)] * 2


def test_the_range_still_bounds_the_rest_after_an_unreadable_turn() -> None:
    class Worse(Text):
        def step(self, action: str) -> Any:
            return "Done.", -1.5, True, False, {}

    with pytest.raises(ContractError, match=r"return is -2.5; expected it in the declared reward_range, \(-2, 1\)"):
        rewards_of(Worse(), 1, then_right=False)


def problems_of(env: Any) -> dict[str, list[str]]:
    report = check_env(env, seeds=range(3), max_turns=5, num_leak_episodes=0)
    found: dict[str, list[str]] = {}
    for problem in report.problems:
        found.setdefault(problem.check, []).append(problem.text)
    return found


class PaysForUnreadable(Text):
    def invalid_action(self, error: str) -> Any:
        return error, 0.0, False, False, {}


class CostsLittle(Text):
    """Less than one wrong answer, and more than that over five turns."""

    def invalid_action(self, error: str) -> Any:
        return error, -0.3, False, False, {}


class Undeclared(Text):
    reward_range = (-float("inf"), 1.0)


class RefusesTheSecond(Text):
    def invalid_action(self, error: str) -> Any:
        if getattr(self, "was_unreadable", False):
            raise RuntimeError("once is enough")
        self.was_unreadable = True
        return error, -1.0, False, False, {}


def test_the_check_plays_it_every_turn_and_refuses_an_environment_in_which_it_pays_more_than_other_play() -> None:
    assert problems_of(Text) == {}
    [text] = problems_of(PaysForUnreadable)["tricks"]
    assert text.startswith("expected text that cannot be read to earn no more than other play (-1), got 0")
    [text] = problems_of(CostsLittle)["tricks"]  # a wrong answer takes one turn
    assert text.startswith("expected text that cannot be read to earn no more than other play (-1), got -0.3")


def test_an_environment_that_fails_at_the_second_unreadable_text_is_refused() -> None:
    class Longer(RefusesTheSecond):  # other play takes two turns
        turns = 0

        def step(self, action: str) -> Any:
            self.turns += 1
            return super().step(action) if self.turns % 2 == 0 else ("Again.", 0.0, False, False, {})

    assert any("once is enough" in text for text in problems_of(Longer)["tricks"])


def test_the_check_refuses_an_environment_that_subtracts_without_declaring_it() -> None:
    """Being cut off earns 0 there, and hanging -1, both no less than a wrong answer."""
    found = problems_of(Undeclared)
    assert "earned -1: expected reward_range to declare the smallest return" in found["reward range"][0]
    assert "declare reward_range" in found["tricks"][0]

    class Free(Undeclared):  # nothing that it does costs anything
        def step(self, action: str) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, max(0.0, reward), *rest

    assert "reward range" not in problems_of(Free)

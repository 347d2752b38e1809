"""Whether a text says the hidden answer of a task is found out by playing it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from gspo_gym_envs.guess_number.env import GuessNumber
from gspo_gym_envs.sql_analyst.env import SqlAnalyst

from gspo_gym.env.checks.answers import AnswerCheck, UncheckableError, parts_of
from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import tool
from gspo_gym.types import Message, Task, ToolCall


class Capital(TextEnv):
    """Asks for a capital of two words, which the reference says in a sentence."""

    policies: ClassVar = {"reference": lambda env, rng: lambda messages: f"It is {env.city}."}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.country, self.city = (("Mexico", "Mexico City"), ("Ghana", "Accra"), ("Peru", "Lima"))[(seed or 0) % 3]
        return f"What is the capital of {self.country}? Say: It is ...", {}

    def step(self, action: str) -> Any:
        is_right = action == f"It is {self.city}."
        return "", Reward({"right": float(is_right)}, success=is_right), True, False, {}


class Unscored(Capital):
    """Nobody says what wins."""

    policies: ClassVar = {}

    def step(self, action: str) -> Any:
        return "", Reward({"length": float(len(action))}), True, False, {}


class Vault(ToolEnv):
    """A number opens it, given to a tool as an integer."""

    policies: ClassVar = {
        "reference": lambda env, rng: lambda messages: Message("assistant", "", (call("open", code=env.code),))
    }

    def start(self, options: Any) -> str:
        self.code = int(self.np_random.integers(100, 1000))
        return "Open the vault, which has a code from 100 to 999."

    @tool
    def open(self, code: int) -> str:
        """Open the vault."""
        self.finish(Reward({"open": float(code == self.code)}, success=code == self.code))
        return "wrong code"


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("call_0", name, arguments)


def leak(make: Callable[[], Any], seed: int, text: str, **options: Any) -> str | None:
    check = AnswerCheck(make, env_id="Test-v0", max_turns=4, step_timeout_seconds=None)
    shown = options.pop("shown", (Message("user", "Begin."),))
    return asyncio.run(check.leak(Task("Test-v0", seed), text, shown=shown, **options))


def drawn(seed: int) -> int:
    """The number of a seed, by looking."""
    env = GuessNumber(style="terse")
    env.reset(seed=seed)
    number = env._number
    assert number is not None
    return number


@pytest.mark.parametrize("seed", range(6))
def test_the_answer_of_guess_number_is_a_leak_and_its_hints_are_not(seed: int) -> None:
    number = drawn(seed)
    assert leak(GuessNumber, seed, f"lost: {number}") == str(number)
    assert leak(GuessNumber, seed, f"You guessed badly; {number} was it!") == str(number)
    for text in ("higher", "lower", f"{number % 8 + 1} was wrong", "Halve the range with each guess."):
        assert leak(GuessNumber, seed, text) is None


def test_sql_analysts_verdict_on_a_wrong_answer_is_a_leak() -> None:
    env = SqlAnalyst()
    env.reset(seed=1_000_001)
    wrong, *_ = env.step(Message("assistant", "", (call("answer", value="nothing"),)))
    text = wrong if isinstance(wrong, str) else wrong[-1].content
    assert text.startswith("wrong: ")
    assert leak(SqlAnalyst, 1_000_001, text, shown=(Message("user", env.question.text),)) == text.removeprefix(
        "wrong: "
    )
    assert leak(SqlAnalyst, 1_000_001, "wrong", shown=(Message("user", env.question.text),)) is None


def test_what_was_shown_before_is_no_secret() -> None:
    number = drawn(0)
    shown = (Message("user", "Guess."), Message("assistant", str(number)))
    assert leak(GuessNumber, 0, f"{number} again", shown=shown) is None


def test_an_answer_of_several_words_is_found_in_the_form_of_the_reference() -> None:
    assert leak(Capital, 0, "Wrong.\nThe capital: Mexico City") == "Mexico City"
    assert leak(Capital, 1, "You should have said Accra, not Lagos.") == "Accra"
    assert leak(Capital, 1, "Lagos is in Nigeria; think of the coast.") is None


def test_a_number_that_a_tool_takes_is_found() -> None:
    env = Vault()
    env.reset(seed=3)
    assert leak(Vault, 3, f"the code was {env.code}") == str(env.code)
    assert leak(Vault, 3, f"the code was not {env.code % 999 + 1}") is None


def test_another_episodes_actions_are_tried_as_they_are() -> None:
    env = Vault()
    env.reset(seed=3)
    right, wrong = (Message("assistant", "", (call("open", code=code),)) for code in (env.code, env.code - 1))
    assert leak(Vault, 3, "an episode", actions=(wrong, right)) == f"open({{'code': {env.code}}})"
    assert leak(Vault, 3, "an episode", actions=(wrong,)) is None


def test_where_nobody_says_what_wins_nothing_is_called_harmless() -> None:
    with pytest.raises(UncheckableError, match="expected a reference player or a largest return"):
        leak(Unscored, 0, "Mexico City")
    assert leak(Unscored, 0, "Mexico City", declares_success=True) is None


def test_verdicts_are_kept_for_a_step_and_then_forgotten() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(GuessNumber(style="terse"))
        return made[-1]

    async def look() -> list[int]:
        check, counts = AnswerCheck(make, env_id="Test-v0", max_turns=4, step_timeout_seconds=None), []
        for forgets in (False, False, True):
            if forgets:
                check.forget()
            await check.leak(Task("Test-v0", 1), "higher", shown=())
            counts.append(len(made))
        return counts

    assert asyncio.run(look()) == [1, 1, 2], "the reference's episode rules 'higher' out without another environment"


def test_parts_of_a_text() -> None:
    assert parts_of("Not 4.\nAnswer: Mexico City") == [
        "Not 4.\nAnswer: Mexico City",
        "Not 4.",
        "Answer: Mexico City",
        "Mexico City",
        "Not",
        "4",
        "Answer",
        "Mexico",
        "City",
    ]

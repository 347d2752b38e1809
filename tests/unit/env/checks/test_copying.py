"""An environment that shows its answer before it is asked is caught, wherever that stands; others are not accused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from gspo_gym.env.checks.checker import CheckReport, check_env
from gspo_gym.env.checks.score import places
from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import tool
from gspo_gym.types import Message, ToolCall

Shown = tuple[str, Mapping[str, Any]]  # a first observation and info
_FRUIT = ("apple", "banana", "cherry", "damson")


class Sums(TextEnv):
    """Two numbers to add. `shows` says what a subclass shows, given the numbers and their sum."""

    policies: ClassVar = {"reference": lambda env, rng: lambda messages: f"The sum is {env.sum}."}
    reward_range = (0.0, 1.0)
    shows: ClassVar[Callable[[int, int, int], Shown]] = lambda a, b, total: (f"What is {a} + {b}?", {})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        a, b = (int(n) for n in self.np_random.integers(10, 90, size=2))
        self.sum = a + b
        return type(self).shows(a, b, self.sum)

    def step(self, action: str) -> Any:
        is_right = str(self.sum) in action.replace(".", "").split()
        return "", Reward({"right": float(is_right)}, success=is_right), True, False, {}


def showing(shows: Callable[[int, int, int], Shown], *, has_reference: bool = True) -> type[Sums]:
    attributes: dict[str, Any] = {"shows": staticmethod(shows), "__module__": __name__}
    if not has_reference:
        attributes["policies"] = {}
    return type("Showing", (Sums,), attributes)


def check(env: Any, **settings: Any) -> CheckReport:
    return check_env(env, **{"seeds": range(6), "num_leak_episodes": 0, **settings})


def leaks(report: CheckReport) -> list[str]:
    return [problem.text for problem in report.problems if problem.check == "copying"]


@pytest.mark.parametrize("has_reference", [True, False])
@pytest.mark.parametrize(
    ("shows", "place"),
    [
        (lambda a, b, s: (f"{a} + {b}?", {"answer": s}), "info['answer']"),
        (lambda a, b, s: (f"{a} + {b}?", {"debug": [a, {"target": s}]}), "info['debug'][1]['target']"),
        (lambda a, b, s: (f"{a} + {b}?", {"log": f"drawn: answer={s}"}), "the word after 'answer' in info['log']"),
        (lambda a, b, s: (f"{a} + {b}? (It is {s}.)", {}), "the word after"),
        (lambda a, b, s: (f"Task {a}\nAnswer: {s}\nGo.", {}), "what follows 'Answer' in the first observation"),
        (lambda a, b, s: (f"{s}\n{a} + {b}?", {}), "line 1"),
        (lambda a, b, s: ("and " * (a % 4) + f"add. Solution {s}", {}), "the word after 'solution'"),
    ],
    ids=["info", "nested info", "text in info", "aside", "label", "line", "last word"],
)
def test_an_answer_that_is_shown_is_found_and_its_place_named(shows: Any, place: str, has_reference: bool) -> None:
    report = check(showing(shows, has_reference=has_reference))
    assert not report.passed
    (text,) = leaks(report)
    assert f"expected {place}" in text
    assert "won all 16 tasks" in text  # 6 seeds, and 10 of the other side


@pytest.mark.parametrize(
    "shows",
    [
        lambda a, b, s: (f"What is {a} + {b}?", {"row": f"rows[{a}]", "length": 2}),
        lambda a, b, s: (f"{a} + {b}? It is below {s + 1}.", {"almost": s - 1}),
        lambda a, b, s: (" ".join(str(n) for n in sorted({s, *range(s % 7, 90, 9)})) + ": which is right?", {}),
    ],
    ids=["nothing", "hints", "candidates in order"],
)
@pytest.mark.parametrize("has_reference", [True, False])
def test_what_is_no_answer_is_not_accused(shows: Any, has_reference: bool) -> None:
    assert leaks(check(showing(shows, has_reference=has_reference))) == []


class Choice(Sums):
    """Options in random order: the answer is shown, and nothing says which it is."""

    policies: ClassVar = {"reference": lambda env, rng: lambda messages: env.right}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        TextEnv.reset(self, seed=seed)
        self.right = str(self.np_random.choice(_FRUIT))
        lettered = zip("ABCD", self.np_random.permutation(_FRUIT), strict=True)
        return "Which is ripe?\n" + "\n".join(f"{letter}) {fruit}" for letter, fruit in lettered), {}

    def step(self, action: str) -> Any:
        return "", Reward({"right": float(action == self.right)}, success=action == self.right), True, False, {}


def test_the_options_of_a_question_are_no_leak() -> None:
    report = check(Choice)
    assert report.passed, str(report)


class Safe(ToolEnv):
    """The code is a whole number, entered by a tool; info says it where a subclass wants it."""

    reward_range = (0.0, 1.0)
    policies: ClassVar = {"reference": lambda env, rng: enter(env.code)}
    leaks: ClassVar[bool] = False

    def start(self, options: Any) -> str:
        self.code = int(self.np_random.integers(1_000, 10_000))
        return f"Open the safe{f' (code {self.code})' if self.leaks else ''}."

    @tool
    def enter(self, code: int) -> str:
        """Enter the code."""
        self.finish(Reward({"open": float(code == self.code)}, success=code == self.code))
        return "click"

    def end_turn(self) -> None:
        if self.num_turns == 2:
            self.finish(Reward({}, success=False), truncated=True)


def enter(code: int) -> Callable[[Sequence[Message]], Message]:
    return lambda messages: Message("assistant", "", (ToolCall("call_0", "enter", {"code": code}),))


def test_a_number_that_a_tool_takes_is_copied_in_the_words_of_the_reference() -> None:
    class Leaky(Safe):
        leaks = True

    assert leaks(check(Safe)) == []
    (text,) = leaks(check(Leaky))
    assert "the word after 'code'" in text


def test_places_are_named_in_info_and_in_the_first_observation() -> None:
    found = places([Message("user", "Name: Ada Lovelace\nHer year?")], {"seed": 7, "tags": ["x", None]})
    assert found["info['seed']"] == "7"
    assert found["info['tags'][0]"] == "x"
    assert "info['tags'][1]" not in found
    assert found["what follows 'Name' in the first observation"] == "Ada Lovelace"
    assert found["the word after 'her' in the first observation"] == "year"
    assert found["line 2 of the first observation"] == "Her year?"
    assert found["word 1 from the end of the first observation"] == "year"

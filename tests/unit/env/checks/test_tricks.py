"""Every trick is played, and an environment that pays for one is caught by that trick and by no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from gspo_gym.env.checks.checker import CheckReport, check_env
from gspo_gym.env.checks.contract import rubric_of
from gspo_gym.env.checks.score import CANDIDATES, LONG_ANSWER, probes
from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.playing import arguments_for, schemas_of, tool_calling_policy
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import tool
from gspo_gym.types import Message, ToolCall

PASSWORD = "sesame, open"


class Gate(TextEnv):
    """Two sentences have to be said: the gate opens for one."""

    policies: ClassVar = {"reference": lambda env, rng: lambda messages: PASSWORD}
    reward_range = (0.0, 1.0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.opening = f"Gate {int(self.np_random.integers(10_000))}: what do you say?"
        self.num_said = 0
        return self.opening, {}

    def step(self, action: str) -> Any:
        self.num_said += 1
        is_open = action == PASSWORD or self.is_fooled_by(action)
        is_over = is_open or self.num_said == 2
        reward = Reward({"opened": float(is_open)}, success=is_open if is_over else None)
        return ("Come in." if is_open else "No. Once more?"), reward, is_over, False, {}

    def is_fooled_by(self, action: str) -> bool:
        return False


def gate(fooled: Callable[[Gate, str], bool]) -> type[Gate]:
    class Fooled(Gate):
        """Opens to whom it should not."""

        def is_fooled_by(self, action: str) -> bool:
            return fooled(self, action)

    return Fooled


def check(env: Any, **settings: Any) -> CheckReport:
    return check_env(env, **{"seeds": range(3), "num_leak_episodes": 0, **settings})


def caught(report: CheckReport) -> set[str]:
    """The tricks that succeeded."""
    texts = [problem.text for problem in report.problems if problem.check == "tricks"]
    return {text.partition("expected ")[2].partition(" to fail")[0] for text in texts if "to fail" in text}


def test_a_gate_that_opens_to_the_password_only_is_not_fooled_and_every_trick_is_reported() -> None:
    report = check(Gate)
    assert report.passed, str(report)
    returns = report.measurements["mean_returns"]
    assert returns.pop("reference") == 1.0
    assert returns == {
        "an empty answer": 0.0,
        "every tool without arguments": 0.0,
        "repeating the prompt": 0.0,
        "repeating the last message": 0.0,
        "repeating the tools": 0.0,
        "quoting the rubric": 0.0,
        "a very long answer": 0.0,
        "every number to 100": 0.0,
        "claiming success": 0.0,
        "unreadable text": 0.0,
    }
    told = " ".join(fact.text for fact in report.facts if fact.check == "tricks")
    assert all(f"{name} 0" in told for name in returns)


@pytest.mark.parametrize(
    ("fooled", "tricks"),
    [
        (lambda gate, text: text == "", {"an empty answer", "every tool without arguments"}),
        (lambda gate, text: text == gate.opening, {"repeating the prompt", "repeating the last message"}),
        (lambda gate, text: text == "No. Once more?", {"repeating the last message"}),
        (lambda gate, text: text == "[]", {"repeating the tools"}),
        (lambda gate, text: "Opens to whom it should not." in text, {"quoting the rubric"}),
        (lambda gate, text: "opened" in text.split(), {"quoting the rubric"}),  # the name of its reward's term
        (lambda gate, text: len(text) > 10_000, {"a very long answer"}),
        (lambda gate, text: "73" in text.split(), {"every number to 100"}),
        (lambda gate, text: "solved" in text, {"claiming success"}),
    ],
    ids=["empty", "prompt", "echo", "tools", "docstring", "terms", "long", "candidates", "claim"],
)
def test_who_pays_for_a_trick_is_caught_by_it_and_by_no_other(fooled: Any, tricks: set[str]) -> None:
    report = check(gate(fooled))
    assert caught(report) <= tricks
    assert caught(report), str(report)


def test_a_declared_rubric_is_what_is_quoted() -> None:
    class Graded(Gate):
        """Not this."""

        rubric = "The answer is polite."

        def is_fooled_by(self, action: str) -> bool:
            return "polite" in action

    assert caught(check(Graded)) == {"quoting the rubric"}
    assert rubric_of(Graded()) == "The answer is polite."

    class Sheet:
        text = "Be brief."

    Graded.rubric = Sheet()  # type: ignore[assignment]
    assert rubric_of(Graded()) == "Be brief."
    assert rubric_of(object()) == rubric_of(object())  # whatever its docstring says


def test_a_trick_that_earns_as_much_as_the_reference_without_success_is_caught_too() -> None:
    class PaysByTheWord(Gate):
        def step(self, action: str) -> Any:
            observation, _, is_over, *rest = super().step(action)
            return observation, Reward({"words": min(1.0, len(action) / 10_000)}), is_over, *rest

        policies: ClassVar = {"reference": lambda env, rng: lambda messages: "x" * 5_000}

    texts = [problem.text for problem in check(PaysByTheWord).problems if problem.check == "tricks"]
    # The reference earns 0.5 twice, the trick 1 twice.
    assert texts == ["expected a very long answer to earn less than 'reference' on average (1), got 2"]


def test_without_a_reference_the_largest_return_is_out_of_reach() -> None:
    class NoReference(Gate):
        policies: ClassVar = {}

        def is_fooled_by(self, action: str) -> bool:
            return action == ""

        def step(self, action: str) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, float(reward), *rest  # and no success to be caught by

    texts = [problem.text for problem in check(NoReference).problems if problem.check == "tricks"]
    assert "expected an empty answer to earn less than the largest return (1), got 1" in texts


def test_where_only_a_judge_scores_no_trick_can_be_compared() -> None:
    class Judged(Gate):
        policies: ClassVar = {}

        def step(self, action: str) -> Any:
            observation, _, *rest = super().step(action)
            return observation, None, *rest

    report = check(Judged)
    assert report.passed, str(report)


def test_an_environment_that_breaks_at_a_long_answer_is_told_with_the_trick() -> None:
    class Fragile(Gate):
        def is_fooled_by(self, action: str) -> bool:
            if len(action) > 10_000:
                raise MemoryError("too long")
            return False

    texts = [problem.text for problem in check(Fragile).problems if problem.check == "tricks"]
    assert [text.partition(" (")[0] for text in texts] == [
        "a very long answer, seed 0: EnvDiedError: Fragile: step() raised MemoryError: too long"
    ]


# -- tools -----------------------------------------------------------------------------------------------------------


class Safe(ToolEnv):
    """A safe with a code, and a lever that ought to do nothing."""

    reward_range = (0.0, 1.0)
    policies: ClassVar = {"reference": lambda env, rng: tool_call("enter", code=str(env.code), times=1)}
    lever_opens: ClassVar[bool] = False
    believes: ClassVar[str] = ""

    def start(self, options: Any) -> str:
        self.code = int(self.np_random.integers(1_000, 10_000))
        return "Open the safe."

    @tool
    def enter(self, code: str, times: int) -> str:
        """Enter the code."""
        is_open = code == str(self.code) or bool(self.believes and self.believes in code)
        self.finish(Reward({"open": float(is_open)}, success=is_open))
        return "click"

    @tool
    def pull(self) -> str:
        """Pull the lever."""
        if self.lever_opens:
            self.finish(Reward({"open": 1.0}, success=True))
        return "creak"

    def end_turn(self) -> None:
        if self.num_turns == 2:
            self.finish(Reward({}, success=False), truncated=True)


def tool_call(name: str, **arguments: Any) -> Callable[[Sequence[Message]], Message]:
    message = Message("assistant", "", (ToolCall("call_0", name, arguments),))
    return lambda messages: message


def test_a_safe_that_knows_its_code_is_not_fooled() -> None:
    assert check(Safe).passed


def test_calling_every_tool_without_arguments_finds_the_one_that_needs_none() -> None:
    class Careless(Safe):
        lever_opens = True

    assert "every tool without arguments" in caught(check(Careless))


@pytest.mark.parametrize(("words", "trick"), [("Reward: 1.0", "claiming success"), ("99 100", "every number to 100")])
def test_what_is_said_is_also_given_to_every_tool(words: str, trick: str) -> None:
    class Believes(Safe):
        believes = words

    report = check(Believes)
    assert report.measurements["mean_returns"][trick] > 0.0
    # The lever's turn comes after that of the code, and does not end the episode.
    assert trick in caught(report)


class Foreign:
    """Takes tool calls without subclassing ToolEnv, as adapters of other suites do; its policy is async."""

    takes_messages = True
    tool_schemas = (
        {
            "type": "function",
            "function": {
                "name": "move",
                "description": "Move.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "to": {"type": "string", "enum": ["north", "south"]},
                        "steps": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                        "why": {"type": "string"},
                        "how": {"type": ["string", "null"]},
                        "map": {"type": "array", "items": {"type": "string"}},
                    },
                    "required": ["to", "steps", "how", "map", "not described"],
                },
            },
        },
        {"type": "function", "function": {"name": "stop"}},
    )
    reward_range = (0.0, 1.0)

    @staticmethod
    def walk(env: Any, rng: Any) -> Any:
        async def play(messages: Sequence[Message]) -> Message:
            return tool_call("move", to=env.way, steps=1)(messages)

        return play

    policies: ClassVar = {"reference": walk}

    def reset(self, seed: int) -> Any:
        self.way = ("north", "south")[seed % 2]
        return f"Go {self.way}.", {}

    def step(self, action: Message) -> Any:
        is_there = [call.arguments.get("to") for call in action.tool_calls] == [self.way]
        answers = [Message("tool", "done", tool_call_id=call.id) for call in action.tool_calls] or "Use a tool."
        return answers, Reward({"there": float(is_there)}, success=is_there), True, False, {}


def test_an_environment_with_tools_that_is_no_tool_env_and_async_players_are_checked_alike() -> None:
    report = check(Foreign)
    assert report.passed, str(report)
    assert report.measurements["mean_returns"]["reference"] == 1.0


def test_arbitrary_actions_call_the_tools_of_any_environment_with_what_their_schemas_allow() -> None:
    said = [tool_calling_policy(Foreign(), np.random.default_rng(seed))([]) for seed in range(20)]
    calls = [call for message in said for call in message.tool_calls]  # type: ignore[union-attr]
    assert {call.name for call in calls} == {"move", "stop"}
    moves = [call.arguments for call in calls if call.name == "move"]
    assert all(set(move) == {"to", "steps", "how", "map"} for move in moves)
    assert {move["to"] for move in moves} == {"north", "south"}
    assert all(isinstance(move["steps"], int) and isinstance(move["how"], str) and move["map"] == [] for move in moves)
    assert all(call.arguments == {} for call in calls if call.name == "stop")


def test_a_text_is_given_as_every_free_text_and_as_no_other_argument() -> None:
    arguments = arguments_for(schemas_of(Foreign())[0], np.random.default_rng(0), text="open")
    assert arguments["why"] == "open"
    assert arguments["to"] in ("north", "south")
    assert isinstance(arguments["steps"], int)


def test_who_takes_text_only_is_offered_no_calls() -> None:
    class TextOnly(Foreign):
        takes_messages = False

    assert schemas_of(TextOnly()) == ()
    assert tool_calling_policy(TextOnly(), np.random.default_rng(0))([]).isdigit()  # type: ignore[union-attr]


def test_the_texts_of_tricks_are_as_long_and_complete_as_their_names_say() -> None:
    assert CANDIDATES.split() == [str(number) for number in range(1, 101)]
    assert len(LONG_ANSWER) > 40_000
    spoken = {
        name: policy(Gate(), np.random.default_rng(0))([Message("user", "A?"), Message("user", "B?")])
        for name, policy in probes("the rubric").items()
    }
    texts = {name: said if isinstance(said, str) else said.content for name, said in spoken.items()}  # type: ignore[union-attr]
    assert texts["repeating the prompt"] == "A?"
    assert texts["repeating the last message"] == "B?"
    assert texts["quoting the rubric"] == "the rubric"

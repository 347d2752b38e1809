"""ToolEnv: turns made of tool calls, played by plain Gymnasium calls.

Pinned here:

1.  Every call is answered by one tool message, in order; what goes wrong in a call is a text, never an exception.
2.  Rewards of a turn add up by term; a turn without any earned 0, or nothing at all where a judge scores.
3.  `finish` ends the episode with its turn; later calls of the turn are not made; `end_turn` may end it too.
4.  A hanging tool is given up at its limit, plain or async, and cannot change the episode afterwards.
5.  Async tools make the environment async; plain tools then run off the loop.
6.  A mistake of the author (a NaN reward, a call at the wrong time) is an exception and not shown to the model.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from gspo_gym.env.core import ToolEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import Tool, ToolError, tool
from gspo_gym.errors import ContractError, UsageError
from gspo_gym.types import Message, ToolCall


def calls(*named: tuple[str, dict[str, Any]]) -> Message:
    """An assistant message with these calls, whose ids are c0, c1, ..."""
    made = tuple(ToolCall(f"c{index}", name, arguments) for index, (name, arguments) in enumerate(named))
    return Message("assistant", "", tool_calls=made)


class Safe(ToolEnv):
    """Three digits have to be dialled; every turn costs 0.1."""

    reward_range = (-1.0, 1.0)

    def start(self, options: Any) -> str:
        self.code = int(options.get("code", self.np_random.integers(10)))
        self.log: list[str] = []
        return "Open the safe."

    @tool
    def peek(self) -> dict[str, int]:
        """Look at the code."""
        self.log.append("peek")
        return {"code": self.code}

    @tool
    def dial(self, digit: int) -> str:
        """Dial a digit."""
        self.log.append(f"dial {digit}")
        if digit == self.code:
            self.finish(Reward({"opened": 1.0}, events=("opened",), success=True))
            return "open"
        self.add_reward(Reward({"wrong": -0.25}, events=("missed",)))
        return "closed"

    @tool
    def kick(self) -> str:
        raise RuntimeError("ouch")

    @tool
    def ask(self) -> str:
        raise ToolError("nobody answers")

    @tool
    def broken(self) -> Any:
        return object()

    def end_turn(self) -> None:
        self.add_reward(Reward({"time": -0.125}))
        if self.num_turns == 4:
            self.finish(truncated=True)


@pytest.fixture
def safe() -> Safe:
    env = Safe()
    assert env.reset(seed=0, options={"code": 7}) == ("Open the safe.", {})
    return env


def answer_of(env: ToolEnv, *named: tuple[str, dict[str, Any]]) -> list[str]:
    return [message.content for message in env.step(calls(*named))[0]]


def test_calls_are_answered_in_order_by_tool_messages(safe: Safe) -> None:
    observation, reward, terminated, truncated, info = safe.step(calls(("peek", {}), ("dial", {"digit": 3})))
    assert observation == [
        Message("tool", '{"code": 7}', tool_call_id="c0", name="peek"),
        Message("tool", "closed", tool_call_id="c1", name="dial"),
    ]
    assert (reward.terms, reward.events, reward.success) == ({"wrong": -0.25, "time": -0.125}, ("missed",), None)
    assert (float(reward), terminated, truncated, info) == (-0.375, False, False, {})


def test_rewards_of_one_turn_add_up_by_term(safe: Safe) -> None:
    reward = safe.step(calls(("dial", {"digit": 1}), ("dial", {"digit": 2})))[1]
    assert reward.terms == {"wrong": -0.5, "time": -0.125}
    assert reward.events == ("missed", "missed")
    assert safe.step("hm")[1].terms == {"time": -0.125}  # nothing is carried over


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("dail", {"digit": 1}), "error: unknown tool 'dail'; did you mean 'dial'?"),
        (("dial", {"digit": "1"}), "error: dial: argument 'digit': expected a valid integer, got '1'"),
        (("dial", {}), "error: dial: missing argument 'digit'"),
        (("kick", {}), "error: RuntimeError: ouch"),
        (("ask", {}), "error: nobody answers"),
    ],
    ids=str,
)
def test_what_goes_wrong_in_a_call_is_a_text(safe: Safe, call: tuple[str, dict[str, Any]], text: str) -> None:
    assert answer_of(safe, call, ("peek", {})) == [text, '{"code": 7}']


def test_a_result_that_cannot_be_shown_is_the_authors_error_and_no_text_for_the_model(safe: Safe) -> None:
    with pytest.raises(ContractError, match="Safe: tool broken: expected a result with a text for the model"):
        safe.step(calls(("broken", {})))


def test_finish_ends_the_episode_and_later_calls_are_not_made(safe: Safe) -> None:
    observation, reward, terminated, truncated, _ = safe.step(calls(("dial", {"digit": 7}), ("peek", {})))
    assert [m.content for m in observation] == ["open", "error: the episode is over, this call was not made"]
    assert safe.log == ["dial 7"]
    assert (reward.terms, reward.success, terminated, truncated) == ({"opened": 1.0}, True, True, False)
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"Safe\.step: no episode is being played"):
        safe.step("again")
    with pytest.raises(gymnasium.error.ResetNeeded):
        safe.invalid_action("again")
    safe.reset(seed=1)
    assert safe.num_turns == 0


def test_end_turn_may_cut_the_episode_off(safe: Safe) -> None:
    flags = [safe.step("hm")[2:4] for _ in range(4)]
    assert flags == [(False, False)] * 3 + [(False, True)]


def test_a_message_without_calls_is_answered_by_a_reminder(safe: Safe) -> None:
    text = "Call a tool. Tools: peek, dial, kick, ask, broken."
    assert safe.step("I think it is 7")[0] == text
    assert safe.step(Message("assistant", "I think it is 7"))[0] == text


def test_an_action_that_could_not_be_read_counts_as_a_turn(safe: Safe) -> None:
    observation, reward, terminated, truncated, _ = safe.invalid_action("no JSON")
    terms = {"time": -0.125, "unreadable": -0.875}  # together the worst turn, -1
    assert (observation, reward.terms, terminated, truncated) == ("no JSON", terms, False, False)
    assert safe.num_turns == 1


def test_invalid_action_can_be_made_to_cost() -> None:
    class Strict(Safe):
        def invalid_action(self, error: str) -> Any:
            self.add_reward(Reward({"format": -0.5}))
            return super().invalid_action(error)

    env = Strict()
    env.reset(seed=0)
    assert env.invalid_action("no JSON")[1].terms == {"format": -0.5, "time": -0.125}


def test_a_plain_number_is_the_term_reward() -> None:
    class Plain(ToolEnv):
        def start(self, options: Any) -> str:
            return "go"

        @tool
        def win(self) -> str:
            self.add_reward(0.25)
            self.finish(0.5)
            return "won"

        @tool
        def wait(self) -> str:
            return "waited"

    env = Plain()
    env.reset()
    assert env.step(calls(("wait", {})))[1].terms == {}
    assert float(env.step("no call")[1]) == 0.0
    assert env.step(calls(("win", {})))[1].terms == {"reward": 0.75}


def test_a_turn_without_rewards_is_unscored_where_a_judge_scores() -> None:
    class Judged(ToolEnv):
        is_scored = False

        def start(self, options: Any) -> str:
            return "go"

        @tool
        def wait(self, paid: bool) -> str:
            if paid:
                self.add_reward(0.0)
            return "waited"

    env = Judged()
    env.reset()
    assert env.step(calls(("wait", {"paid": False})))[1] is None
    assert float(env.step(calls(("wait", {"paid": True})))[1]) == 0.0


def test_an_instance_may_offer_other_tools() -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    class Fewer(Safe):
        @property
        def tools(self) -> tuple[Tool, ...]:
            return (*(t for t in super().tools if t.name == "peek"), Tool.from_function(add))

    env = Fewer()
    env.reset(seed=0, options={"code": 7})
    assert answer_of(env, ("add", {"a": 2, "b": 3}), ("dial", {"digit": 7})) == [
        "5",
        "error: unknown tool 'dial'; known: add, peek",
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_the_authors_mistake(value: float) -> None:
    class Bad(Safe):
        @tool
        def pay(self) -> str:
            self.add_reward(value)
            return "paid"

    env = Bad()
    env.reset(seed=0)
    with pytest.raises(ContractError, match="expected a finite number"):
        env.step(calls(("pay", {})))
    with pytest.raises(gymnasium.error.ResetNeeded):  # half a turn was played
        env.step(calls(("peek", {})))


def test_scoring_outside_of_an_episode_is_the_authors_mistake() -> None:
    class Early(ToolEnv):
        def start(self, options: Any) -> str:
            self.add_reward(1.0)
            return "go"

    with pytest.raises(UsageError, match=r"Early\.add_reward: no episode is being played"):
        Early().reset()


def test_start_must_be_written() -> None:
    with pytest.raises(NotImplementedError, match=r"ToolEnv must define start\(options\)"):
        ToolEnv().reset()


def test_gymnasium_s_checker_accepts_it() -> None:
    gymnasium_check_env(Safe(), skip_render_check=True)


# -- time limits -----------------------------------------------------------------------------------------------------


class Slow(ToolEnv):
    """Tools that wait for an event of the test's."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.late: list[str] = []
        self.threads: set[int] = set()

    def start(self, options: Any) -> str:
        return "go"

    @tool(time_limit_seconds=0.02)
    def hang(self) -> str:
        self.threads.add(threading.get_ident())
        self.gate.wait()
        try:
            self.finish(1.0)
        except UsageError as error:
            self.late.append(str(error))
        return "too late"

    @tool(time_limit_seconds=10.0)
    def quick(self, fail: bool = False) -> str:
        self.threads.add(threading.get_ident())
        if fail:
            raise TimeoutError("of the tool's own")
        return "done"


@pytest.fixture
def slow() -> Iterator[Slow]:
    env = Slow()
    env.reset(seed=0)
    yield env
    env.gate.set()
    env.close()


def wait_until(is_so: Callable[[], Any]) -> None:
    """Wait for another thread, which is about to do it."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_hanging_tool_is_given_up_and_changes_nothing_later(slow: Slow) -> None:
    observation, _, terminated, _, _ = slow.step(calls(("hang", {}), ("quick", {})))
    assert [m.content for m in observation] == ["error: hang: no result within 0.02 seconds", "done"]
    assert not terminated
    wait_until(lambda: len(slow.threads) == 2)  # the stuck thread was replaced
    slow.gate.set()
    wait_until(lambda: slow.late)
    assert slow.late == ["Slow.add_reward: this call was given up at its time limit"]
    assert not slow.step("hm")[2]


def test_limited_tools_share_one_thread_which_is_not_the_callers(slow: Slow) -> None:
    slow.step(calls(("quick", {}), ("quick", {})))
    slow.step(calls(("quick", {})))
    assert len(slow.threads) == 1
    assert threading.get_ident() not in slow.threads


def test_a_timeout_of_the_tools_own_is_told_from_the_limit(slow: Slow) -> None:
    assert answer_of(slow, ("quick", {"fail": True})) == ["error: TimeoutError: of the tool's own"]


# -- async -----------------------------------------------------------------------------------------------------------


class Mixed(ToolEnv):
    """Async and plain tools."""

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}

    async def start(self, options: Any) -> str:
        await asyncio.sleep(0)
        return "go"

    @tool
    async def fetch(self, key: str) -> str:
        await asyncio.sleep(0)
        self.threads["fetch"] = threading.get_ident()
        return key.upper()

    @tool(time_limit_seconds=0.02)
    async def hang(self) -> str:
        await asyncio.Event().wait()
        return "never"

    @tool(time_limit_seconds=10.0)
    async def own_timeout(self) -> str:
        raise TimeoutError("mine")

    @tool
    def plain(self) -> str:
        self.threads["plain"] = threading.get_ident()
        self.finish(1.0)
        return "done"


def test_an_async_tool_makes_the_environment_async() -> None:
    async def play() -> tuple[Mixed, Any, Any]:
        env = Mixed()
        assert await env.reset(seed=0) == ("go", {})
        first = await env.step(calls(("fetch", {"key": "a"}), ("hang", {}), ("own_timeout", {})))
        second = await env.step(calls(("plain", {})))
        env.close()
        return env, first, second

    env, first, second = asyncio.run(play())
    assert [m.content for m in first[0]] == [
        "A",
        "error: hang: no result within 0.02 seconds",
        "error: TimeoutError: mine",
    ]
    assert (float(second[1]), second[2]) == (1.0, True)
    assert env.threads["fetch"] == threading.get_ident()
    assert env.threads["plain"] != threading.get_ident()


def test_an_async_tool_alone_makes_reset_awaitable_too() -> None:
    class OnlyATool(ToolEnv):
        def start(self, options: Any) -> str:
            return "go"

        @tool
        async def look(self) -> str:
            return "seen"

    async def play() -> Any:
        env = OnlyATool()
        await env.reset()
        answer = await env.step(calls(("look", {})))
        env.close()
        return answer

    assert asyncio.run(play())[0][0].content == "seen"

"""PlainEnv: every kind of environment of ours as Gymnasium's own tools expect one. Pinned here:

1.  Gymnasium's checker, wrappers and vector environments take it; text, tool and async environments look alike.
2.  It plays as the environment does in a session.
3.  Tool calls are read strictly, and what cannot be read is the environment's invalid action.
4.  What is not scored is told apart from a reward of 0.
5.  Failures are errors, and closing leaves no thread.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.plain import AnyText, PlainEnv, as_gymnasium, read_tool_calls
from gspo_gym.env.playing import play
from gspo_gym.env.registry import make
from gspo_gym.env.tools import tool
from gspo_gym.errors import ConfigError, EnvError, UsageError
from gspo_gym.types import Message

# What Gymnasium's checker says to every environment that is not made by gymnasium.make.
pytestmark = pytest.mark.filterwarnings("ignore:.*Not able to test alternative render modes.*:UserWarning")


class AsyncSteps(TextEnv):
    """Async; not scored before the third turn, which ends it. "fail" raises."""

    num_turns = 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed)
        self.num_turns = 0
        await asyncio.sleep(0)
        return f"seed {seed}", {}

    async def step(self, action: str) -> Any:  # type: ignore[override]
        self.num_turns += 1
        if action == "fail":
            raise RuntimeError("fell over")
        return "", 1.0 if self.num_turns == 3 else None, self.num_turns == 3, False, {}


class Counter(ToolEnv):
    """Adds up; done at 3."""

    total = 0

    def start(self, options: Any) -> str:
        self.total = 0
        return "Add up to 3."

    @tool
    def add(self, number: int) -> str:
        """Add."""
        self.total += number
        if self.total >= 3:
            self.finish(1.0)
        return f"{self.total}"

    def invalid_action(self, error: str) -> Any:
        self.add_reward(-0.5)
        return super().invalid_action(error)


@pytest.mark.parametrize("made", ["GuessNumber", "SqlAnalyst", AsyncSteps, Counter])
def test_gymnasiums_checker_accepts_every_kind(made: Any) -> None:
    with as_gymnasium(made) as env:
        check_env(env)


def test_it_plays_as_the_environment_does_in_a_session() -> None:
    """The reference halves the range; each answer and reward is the session's."""
    reference = make("GuessNumber").unwrapped.policies["reference"]
    run = asyncio.run(
        play(
            lambda: make("GuessNumber", style="terse"),
            reference,
            seed=11,
            name="it",
            max_turns=9,
            step_timeout_seconds=5,
        )
    )
    with as_gymnasium("GuessNumber", style="terse") as env:
        observation, info = env.reset(seed=11)
        assert observation == run.opening[0].content
        assert info["messages"] == [{"role": "user", "content": observation}]
        for action, answer in zip(run.actions, run.answers, strict=True):
            observation, reward, terminated, truncated, info = env.step(action.content)
            assert observation == answer.messages[0].content
            assert (reward, terminated, truncated) == (answer.reward, answer.terminated, answer.truncated)
            assert info["reward_terms"] == dict(answer.reward_terms)
        assert info["is_success"] is True
        assert info["events"] == ["found"]


def test_gymnasiums_wrappers_and_vector_environments_take_it() -> None:
    """One step is the limit, and no number is found in it; "x" is illegal and costs 0.1."""

    def one() -> gymnasium.Env[Any, Any]:
        return RecordEpisodeStatistics(TimeLimit(as_gymnasium("GuessNumber", style="terse", low=1, high=1000), 1))

    envs = gymnasium.vector.SyncVectorEnv([one] * 3)
    try:
        observations, _ = envs.reset(seed=3)
        assert observations == ("Guess 1-1000. 4 tries.",) * 3
        _, rewards, terminated, truncated, info = envs.step(("1", "x", "1"))
        assert list(terminated) == [False] * 3
        assert list(truncated) == [True] * 3
        assert list(rewards) == [0.0, -0.1, 0.0]
        assert list(info["episode"]["l"]) == [1, 1, 1]
    finally:
        envs.close()


def test_what_is_not_scored_is_told_apart_from_nothing() -> None:
    with as_gymnasium(AsyncSteps) as env:
        assert env.reset(seed=5)[0] == "seed 5"
        told = [env.step("go") for _ in range(3)]
    assert [(reward, info["is_scored"]) for _, reward, _, _, info in told] == [(0.0, False), (0.0, False), (1.0, True)]
    assert [terminated for _, _, terminated, _, _ in told] == [False, False, True]


def test_tools_are_called_in_hermes_form_or_as_json_alone() -> None:
    call = json.dumps({"name": "add", "arguments": {"number": 1}})
    with as_gymnasium(Counter) as env:
        _, info = env.reset(seed=0)
        assert [schema["function"]["name"] for schema in info["tool_schemas"]] == ["add"]
        observation, *_ = env.step(call)
        assert observation == "1"
        observation, reward, terminated, _, info = env.step(
            f"Two.<tool_call>{call}</tool_call><tool_call>{call}</tool_call>"
        )
        assert (observation, reward, terminated) == ("2\n\n3", 1.0, True)
        assert [message["tool_call_id"] for message in info["messages"]] == ["call_1", "call_2"]


def test_a_call_that_cannot_be_read_is_the_environments_invalid_action() -> None:
    with as_gymnasium(Counter) as env:
        env.reset(seed=0)
        observation, reward, *_ = env.step("<tool_call>add 1</tool_call>")
        assert observation == """error: expected {"name": ..., "arguments": {...}} in a tool call, got 'add 1'"""
        assert reward == -0.5
        assert env.step("<tool_call>")[1] == -0.5
        assert env.step("I think.")[0].startswith("Call a tool.")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("plain", None),
        ('{"answer": 3}', None),  # JSON, but no call
        ('{"name": "add"}', ("", [("add", {})])),
        ('{"name": "add", "arguments": "x"}', None),
        ('{"name": "add", "arguments": {}, "id": 1}', None),
        ('a <tool_call> {"name": "add", "arguments": {"n": 1}}\n</tool_call> b', ("a  b", [("add", {"n": 1})])),
    ],
)
def test_tool_calls_are_read_strictly(text: str, read: Any) -> None:
    assert read_tool_calls(text) == read


def test_a_text_environment_gets_a_call_as_the_text_that_it_is() -> None:
    with as_gymnasium("GuessNumber", style="terse") as env:
        env.reset(seed=0)
        assert env.step('{"name": "add"}')[0] == "not a number 1-8"


def test_the_space_takes_every_text_up_to_its_length() -> None:
    space = AnyText(3)
    assert all(text in space for text in ("", "ab", "é数\n"))
    assert not any(thing in space for thing in ("abcd", 3, None, Message("user", "a")))
    space.seed(0)
    assert all(text.isprintable() and len(text) <= 8 for text in (space.sample() for _ in range(50)))


def test_failures_are_errors() -> None:
    with as_gymnasium(AsyncSteps) as env:
        env.reset(seed=0)
        with pytest.raises(EnvError, match=r"AsyncSteps: step\(\) raised RuntimeError: fell over"):
            env.step("fail")
    with pytest.raises(EnvError, match="making the environment raised ZeroDivisionError"):
        as_gymnasium(lambda: 1 / 0)
    with pytest.raises(ConfigError, match="go with an environment's name"):
        as_gymnasium(Counter, high=3)


def test_closing_leaves_no_thread_and_may_be_repeated() -> None:
    def loops() -> int:
        return sum(thread.name == "gspo-gym-plain" for thread in threading.enumerate())

    before = loops()
    env = as_gymnasium("GuessNumber", style="terse")
    assert loops() == before + 1
    env.close()
    env.close()
    assert loops() == before
    with pytest.raises(UsageError, match="the environment is closed"):
        env.reset()


def test_an_instance_or_a_wrapper_is_taken_as_it_is() -> None:
    inner = make("GuessNumber", style="terse", high=3)
    with as_gymnasium(inner) as env:
        assert isinstance(env, PlainEnv)
        assert env.session.env is inner.unwrapped
        assert env.reset(seed=0)[0] == "Guess 1-3. 4 tries."

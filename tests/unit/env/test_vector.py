"""make_vec: the same episodes as played one by one, all autoreset modes, and one bad environment among good ones.

Expected values are the rules of GuessNumber played by hand (`options` cannot name the number of one environment, so the
tests read the hidden numbers from plain instances of the same seeds), and of a small scripted environment below.
"""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.registry import make
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import tool
from gspo_gym.env.vector import TextVectorEnv, make_vec
from gspo_gym.errors import ConfigError, ContractError, EnvError, UnknownNameError, UsageError
from gspo_gym.types import Message, ToolCall


class Counter(TextEnv):
    """Says its seed and the number of the turn; ends at "end", is cut off at "cut"; other words make it misbehave."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = [] if log is None else log

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed, self.turn = seed, 0
        self.log.append(f"reset {seed}")
        return f"seed {seed}", {}

    def step(self, action: str) -> Any:
        self.turn += 1
        if action == "raise":
            raise ValueError("as told")
        if action == "unscored":
            return "no score", None, False, False, {}
        reward = Reward({"turn": self.turn}, events=("acted",), success=True if action == "end" else None)
        return f"turn {self.turn}", reward, action == "end", action == "cut", {}

    def close(self) -> None:
        self.log.append("close")


class Door(ToolEnv):
    """One tool; async, so that both kinds are stepped."""

    def start(self, options: Any) -> str:
        return "Open it."

    @tool
    async def push(self) -> str:
        """Push the door."""
        await asyncio.sleep(0)
        self.finish(Reward({"opened": 1.0}, success=True))
        return "open"


def second_seed(first: int) -> int:
    """The seed of the episode after that of a held-out seed: below 2**31, the generator's first draw."""
    return int(np.random.default_rng(first).integers(2**31))


def vector(num_envs: int = 3, mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> TextVectorEnv:
    return TextVectorEnv(kwargs.pop("factory", Counter), num_envs, env_id="Counter", autoreset_mode=mode, **kwargs)


def test_every_environment_plays_the_episode_that_it_would_play_alone() -> None:
    numbers = []
    for seed in (7, 8, 9):
        env = make("GuessNumber", style="terse")
        env.reset(seed=seed)
        numbers.append(env._number)
    envs = make_vec("GuessNumber", 3, style="terse")
    assert envs.reset(seed=7)[0] == ("Guess 1-8. 4 tries.",) * 3
    observations, rewards, terminations, truncations, infos = envs.step([str(number) for number in numbers])
    envs.close()
    assert observations == ("correct",) * 3
    assert rewards.dtype == np.float64
    assert rewards.tolist() == [1.0, 1.0, 1.0]
    assert terminations.tolist() == [True, True, True]
    assert truncations.tolist() == [False, False, False]
    assert infos["success"].tolist() == [True, True, True]
    assert infos["reward_terms"]["found"].tolist() == [1.0, 1.0, 1.0]


def test_after_the_end_the_next_step_begins_a_new_episode_and_ignores_the_action() -> None:
    envs = vector()
    envs.reset(seed=10)
    _, _, terminations, truncations, _ = envs.step(["end", "go", "cut"])
    assert (terminations.tolist(), truncations.tolist()) == ([True, False, False], [False, False, True])
    observations, rewards, terminations, truncations, _ = envs.step(["raise", "go", "raise"])
    seeds = [second_seed(10), second_seed(12)]
    assert observations == (f"seed {seeds[0]}", "turn 2", f"seed {seeds[1]}")
    assert rewards.tolist() == [0.0, 2.0, 0.0]
    assert not terminations.any()
    assert not truncations.any()
    envs.close()


def test_same_step_autoreset_shows_the_new_episode_and_keeps_the_last_words() -> None:
    envs = vector(2, AutoresetMode.SAME_STEP)
    envs.reset(seed=0)
    observations, rewards, terminations, _, infos = envs.step(["end", "go"])
    assert observations == (f"seed {second_seed(0)}", "turn 1")
    assert infos["final_obs"][0] == "turn 1"
    assert (rewards.tolist(), terminations.tolist()) == ([1.0, 1.0], [True, False])
    assert envs.step(["go", "go"])[0] == ("turn 1", "turn 2")
    envs.close()


def test_without_autoreset_a_finished_environment_must_be_reset_by_its_mask() -> None:
    envs = vector(2, AutoresetMode.DISABLED)
    envs.reset(seed=0)
    envs.step(["end", "go"])
    with pytest.raises(UsageError, match=r"environments \[0\] must be reset"):
        envs.step(["go", "go"])
    observations, _ = envs.reset(seed=5, options={"reset_mask": np.array([True, False])})
    assert observations == ("seed 5", "turn 1")
    assert envs.step(["go", "go"])[0] == ("turn 1", "turn 2")
    envs.close()


def test_an_environment_that_raises_disturbs_no_other_and_is_never_worth_zero() -> None:
    envs = vector()
    envs.reset(seed=0)
    observations, rewards, terminations, truncations, infos = envs.step(["go", "raise", "go"])
    assert (observations[0], observations[2]) == ("turn 1", "turn 1")
    assert math.isnan(rewards[1])
    assert (terminations[1], truncations[1]) == (False, True)
    first, error, last = infos["error"].tolist()
    assert (first, error.partition(" (")[0], last) == (None, "Counter: step() raised ValueError: as told", None)
    assert infos["_error"].tolist() == [False, True, False]
    observations, rewards, _, truncations, _ = envs.step(["go", "go", "go"])
    assert observations == ("turn 2", f"seed {second_seed(1)}", "turn 2")
    assert not truncations.any()
    assert rewards.tolist() == [2.0, 0.0, 2.0]
    envs.close()


def test_an_environment_that_hangs_is_given_up_at_its_deadline() -> None:
    over = threading.Event()

    class Hanging(Counter):
        def step(self, action: str) -> Any:
            if action == "hang":
                over.wait()
            return super().step(action)

    envs = vector(2, factory=Hanging, step_timeout_seconds=1.0)  # a healthy step of a busy machine is well below it
    envs.reset(seed=0)
    observations, rewards, _, truncations, infos = envs.step(["hang", "go"])
    assert observations[1] == "turn 1"
    assert math.isnan(rewards[0])
    assert truncations.tolist() == [True, False]
    assert "within 1 seconds" in infos["error"][0]
    over.set()
    envs.close()


def test_a_turn_without_a_score_is_not_a_number_and_the_episode_goes_on() -> None:
    envs = vector(2)
    envs.reset(seed=0)
    _, rewards, terminations, truncations, infos = envs.step(["unscored", "go"])
    assert math.isnan(rewards[0])
    assert rewards[1] == 1.0
    assert not (terminations | truncations).any()
    assert "error" not in infos
    envs.close()


def test_tool_environments_take_messages_and_answer_with_messages() -> None:
    envs = TextVectorEnv(Door, 2, env_id="Door")
    envs.reset(seed=0)
    assert [schema["function"]["name"] for schema in envs.tool_schemas[0]] == ["push"]
    call = Message("assistant", "", (ToolCall("c0", "push", {}),))
    observations, rewards, terminations, _, _ = envs.step([call, "I do nothing"])
    assert observations[0] == (Message("tool", "open", tool_call_id="c0", name="push"),)
    assert observations[1] == "Call a tool. Tools: push."
    assert rewards.tolist() == [1.0, 0.0]
    assert terminations.tolist() == [True, False]
    envs.close()


def test_every_episode_is_played_in_a_fresh_instance_that_is_closed() -> None:
    logs: list[list[str]] = []

    def make_one() -> Counter:
        logs.append([])
        return Counter(logs[-1])

    envs = vector(1, factory=make_one)
    envs.reset(seed=3)
    envs.step(["end"])
    envs.step(["go"])
    envs.close()
    assert logs == [["reset 3", "close"], [f"reset {second_seed(3)}", "close"]]


def test_a_reset_without_a_seed_goes_on_from_the_seed_before() -> None:
    envs = vector(2)
    envs.reset(seed=4)
    observations, _ = envs.reset()
    envs.close()
    assert observations == tuple(f"seed {second_seed(seed)}" for seed in (4, 5))


def test_it_works_inside_a_running_event_loop() -> None:
    async def play() -> tuple[Any, ...]:
        envs = vector(2)
        try:
            return envs.reset(seed=[1, 2])[0]
        finally:
            envs.close()

    assert asyncio.run(play()) == ("seed 1", "seed 2")


def test_an_environment_that_cannot_be_reset_is_named() -> None:
    class Broken(Counter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed == 1:
                raise OSError("no board")
            return super().reset(seed=seed)

    envs = vector(3, factory=Broken)
    with pytest.raises(EnvError, match=r"environment 1 could not be reset: .*raised OSError: no board"):
        envs.reset(seed=0)
    envs.close()


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (lambda: vector(0), ConfigError, "num_envs >= 1, got 0"),
        (lambda: make_vec("GuesNumber", 2), UnknownNameError, "did you mean 'GuessNumber'"),
        (lambda: make_vec("GuessNumber", 2, hihg=3), ConfigError, "no argument 'hihg'; did you mean 'high'"),
        (lambda: vector(2).reset(seed=[1]), ConfigError, "expected 2 seeds, got 1"),
        (lambda: vector(2).reset(options={"reset_mask": [True]}), ConfigError, r"reset_mask \[2\] bool"),
        (lambda: vector(2).step(["a", "b"]), UsageError, r"environments \[0, 1\] must be reset"),
        (lambda: vector(2).step("ab"), ContractError, "expected 2 actions, got 'ab'"),
    ],
)
def test_a_mistake_is_named(act: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        act()

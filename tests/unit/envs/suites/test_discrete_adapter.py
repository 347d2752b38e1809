"""Discrete actions in words: names and numbers, what is illegal, what is passed on, and what ends an episode."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gspo_gym_envs.suites.discrete import Actions, DiscreteEnv, in_numbers
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.registry import make
from gspo_gym.errors import ConfigError, UnknownNameError


class Counter(gymnasium.Env):
    """Counts up or down by one; pays what it counts, and ends at 3."""

    observation_space = Discrete(10)
    action_space = Discrete(2, start=1)

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = self.start + (options or {}).get("more", 0)
        return self.count, {"seed": seed}

    def step(self, action):
        assert self.action_space.contains(action)
        self.count += 1 if action == 2 else -1
        return self.count, float(self.count), self.count == 3, False, {"action": action}

    def close(self):
        self.closed += 1


class Panel(Counter):
    """Two switches."""

    action_space = MultiDiscrete([2, 3])

    def step(self, action):
        return 0, float(action[0] * 10 + action[1]), False, False, {}


def loud(observation, env) -> str:
    return f"{observation}!" * env.start


def first_digit(text: str) -> int | None:
    return next((int(c) for c in text if c in "12"), None)


def won(reward: float, terminated: bool) -> bool:
    return terminated and reward == 3.0


def test_cartpole_is_played_as_gymnasium_plays_it() -> None:
    env, plain = make("Discrete", env="CartPole-v1"), gymnasium.make("CartPole-v1")
    text, _ = env.reset(seed=4)
    seen, _ = plain.reset(seed=4)
    assert "cart position = " in text
    done = False
    while not done:
        text, reward, terminated, truncated, _ = env.step("PUSH  Left")
        seen, expected, expected_end, _, _ = plain.step(0)
        assert (reward, terminated, truncated) == (expected, expected_end, False)
        numbers = [float(part.rpartition("= ")[2]) for part in text.split(", ")]
        np.testing.assert_allclose(numbers, seen, rtol=1e-3)  # four digits are written
        done = terminated


def test_an_action_is_named_or_numbered_and_anything_else_is_illegal_and_not_played() -> None:
    env = DiscreteEnv(Counter, action_names=["down", "up"], illegal_penalty=0.25)
    assert env.reset(seed=0)[0] == "Choose an action.\nx = 0\nActions: down, up."
    assert env.step("Up")[0] == "x = 1"
    assert env.step("1")[4] == {"action": 1}  # the space's own number, which starts at 1
    for text in ("0", "3", "", "up!", "up up", "²", "1.0"):
        observation, reward, terminated, truncated, _ = env.step(text)
        assert observation == "That is no action. Actions: down, up.\nx = 0"
        assert (dict(reward.terms), terminated, truncated) == ({"illegal": -0.25}, False, False)


def test_a_describe_and_a_parse_function_carry_an_environment_over() -> None:
    env = DiscreteEnv("CartPole-v1", describe=lambda seen, _env: f"{len(seen)} numbers", parse=first_digit)
    assert "4 numbers" in env.reset(seed=0)[0]
    assert env.step("I take 1, then 2")[0] == "4 numbers"


def test_functions_may_be_named_as_a_config_does() -> None:
    env = DiscreteEnv("CartPole-v1", describe="builtins:format", parse="math:isqrt")
    with pytest.raises(TypeError):  # math.isqrt was given the text, and format the environment
        env.reset(seed=0)
    with pytest.raises(UnknownNameError, match="math has no 'isqrd'; did you mean 'isqrt'"):
        DiscreteEnv("CartPole-v1", parse="math:isqrd")


def test_the_end_is_the_inner_environments_and_the_limit_counts_every_answer() -> None:
    env = DiscreteEnv(Counter, action_names=["down", "up"], max_steps=4, success=won)
    env.reset(seed=0)
    ends = [env.step(text)[1:4] for text in ("up", "up", "up")]
    assert [(float(r), t, u) for r, t, u in ends] == [(1.0, False, False), (2.0, False, False), (3.0, True, False)]
    assert ends[-1][0].success is True
    with pytest.raises(ResetNeeded):
        env.step("up")
    env.reset(seed=0)
    ends = [env.step(text)[1:4] for text in ("up", "jump", "down", "jump")]
    assert [(t, u) for _, t, u in ends] == [(False, False)] * 3 + [(False, True)]
    assert ends[-1][0].success is False


def test_the_registered_time_limit_is_the_limit_also_for_illegal_answers() -> None:
    env = make("Discrete", env="MountainCar-v0")
    assert env.unwrapped.max_steps == 200
    env.reset(seed=0)
    answers = [env.step("?") for _ in range(200)]
    assert [answer[3] for answer in answers] == [False] * 199 + [True]


def test_seed_options_info_and_close_reach_the_inner_environment() -> None:
    env = DiscreteEnv(lambda: Counter(start=1))
    text, info = env.reset(seed=7, options={"more": 4})
    assert "x = 5" in text
    assert info == {"seed": 7}
    env.close()
    assert env.inner.closed == 1


def test_several_dimensions_are_answered_one_by_one() -> None:
    env = DiscreteEnv(Panel, action_names=[["off", "on"], ["low", "mid", "high"]])
    assert env.reset(seed=0)[0].endswith("Actions: one of each, separated by commas: off/on - low/mid/high.")
    assert float(env.step("on, High")[1]) == 12.0
    assert float(env.step("0,1")[1]) == 1.0
    assert all("illegal" in env.step(text)[1].terms for text in ("on", "on, 3", "on, low, low", "high, on"))


def test_names_that_are_numbers_mean_themselves() -> None:
    actions = Actions.of(Discrete(3), ["2", "0", "1"])
    assert [actions.parse(text) for text in "012"] == [1, 2, 0]


def test_random_play_says_every_action_and_only_actions() -> None:
    actions = Actions.of(MultiDiscrete([2, 2]), None)
    rng = np.random.default_rng(0)
    assert {actions.sample(rng) for _ in range(100)} == {"0, 0", "0, 1", "1, 0", "1, 1"}


def test_nested_observations_are_numbered_by_key_and_large_ones_need_a_function() -> None:
    space = Dict({"a": Box(0, 1, (2,)), "b": Discrete(4)})
    seen = {"a": np.array([0.5, 0.25]), "b": np.int64(3)}
    assert space.contains({"a": seen["a"].astype(np.float32), "b": 3})
    assert in_numbers(seen) == "a 0 = 0.5000, a 1 = 0.2500, b = 3"
    assert in_numbers((1, (2, 3))) == "x0 = 1, x1 0 = 2, x1 1 = 3"
    assert in_numbers(np.zeros(64)).count("=") == 64
    with pytest.raises(ConfigError, match="65 numbers needs a describe function"):
        in_numbers(np.zeros(65))
    with pytest.raises(ConfigError, match="expected 2 observation_names"):
        in_numbers(np.zeros(2), ["one"])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"env": "Pendulum-v1"}, "expected a Discrete action space"),
        ({"env": "CartPole-v1", "action_names": ["left"]}, r"expected different action_names, \(2,\) of them"),
        ({"env": "CartPole-v1", "action_names": ["left", "LEFT"]}, "expected different action_names"),
        ({"env": "CartPole-v1", "illegal_penalty": -1}, "illegal_penalty >= 0"),
        ({"env": "CartPole-v1", "max_steps": 0}, "max_steps >= 1"),
        ({"env": Counter, "env_kwargs": {"start": 1}}, "env_kwargs go with the id"),
        ({"env": "CartPole-v1", "env_kwargs": {"sutton": True}}, "takes no argument 'sutton'"),
    ],
)
def test_what_does_not_fit_is_refused(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiscreteEnv(**kwargs)


def test_it_keeps_the_contract() -> None:
    report = check_env("Discrete", env_config={"env": "CartPole-v1", "max_steps": 20}, seeds=range(3))
    assert report.passed, str(report)

"""What every bundled environment refuses, with the value that was wrong: settings, options of a reset, and steps."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import numpy as np
import pytest
from gspo_gym_envs.code_repair.env import CodeRepair
from gspo_gym_envs.countdown.env import Countdown
from gspo_gym_envs.frozen_lake.env import FrozenLake
from gspo_gym_envs.guess_number.env import GuessNumber
from gspo_gym_envs.homestead.env import Homestead
from gspo_gym_envs.sql_analyst.env import SqlAnalyst
from gspo_gym_envs.support_desk.env import SupportDesk
from gspo_gym_envs.tic_tac_toe.env import TicTacToe
from gspo_gym_envs.wordle.env import Wordle
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import TextEnv
from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.types import Message


@pytest.mark.parametrize(
    ("make", "kwargs", "error", "message"),
    [
        (GuessNumber, {"low": 5, "high": 4}, ConfigError, "expected 0 <= low <= high, got low=5, high=4"),
        (GuessNumber, {"max_guesses": 0}, ConfigError, "expected max_guesses >= 1, got 0"),
        (GuessNumber, {"illegal_penalty": -0.1}, ConfigError, "penalties >= 0"),
        (GuessNumber, {"style": "loud"}, ConfigError, "expected style 'terse' or 'verbose', got 'loud'"),
        (FrozenLake, {"map": "4x5"}, UnknownNameError, "did you mean '4x4'?"),
        (FrozenLake, {"map": ["SF", "G"]}, ConfigError, "equally long rows"),
        (FrozenLake, {"map": []}, ConfigError, "equally long rows"),
        (FrozenLake, {"map": ["SX", "FG"]}, ConfigError, "letters S, F, H, G"),
        (FrozenLake, {"map": ["SS", "FG"]}, ConfigError, "exactly one start S on the map, got 2"),
        (FrozenLake, {"map": ["SH", "HG"]}, ConfigError, "no goal G can be reached"),
        (FrozenLake, {"map": "4x4", "size": 5}, ConfigError, "size only goes with map='random', got size=5"),
        (FrozenLake, {"map": "random", "size": 1}, ConfigError, "expected size >= 2, got 1"),
        (FrozenLake, {"max_steps": 5}, ConfigError, "the shortest path has 6 moves, got max_steps=5"),
        (FrozenLake, {"map": "random", "size": 8, "max_steps": 13}, ConfigError, "has 14 moves, got max_steps=13"),
        (FrozenLake, {"progress_reward": 1.0}, ConfigError, "progress_reward < goal_reward"),
        (FrozenLake, {"style": "loud"}, ConfigError, "expected style"),
        (SqlAnalyst, {"level": "esay"}, UnknownNameError, "did you mean 'easy'?"),
        (SqlAnalyst, {"max_steps": 0}, ConfigError, "expected max_steps >= 1.*got max_steps=0"),
        (SqlAnalyst, {"max_errors": 0}, ConfigError, "expected max_errors >= 1 or none, got 0"),
        (SqlAnalyst, {"max_rows": 9}, ConfigError, "max_rows >= 10.*max_rows=9"),
        (SqlAnalyst, {"max_query_seconds": 0.0}, ConfigError, "max_query_seconds > 0.*max_query_seconds=0.0"),
        (SqlAnalyst, {"correct_reward": 0.0}, ConfigError, "expected correct_reward > 0.*correct_reward=0.0"),
        (SqlAnalyst, {"tools": ["query"]}, ConfigError, "expected 'answer' among the tools, got \\['query'\\]"),
        (SqlAnalyst, {"tools": ["answer", "qury"]}, UnknownNameError, "did you mean 'query'?"),
        (SqlAnalyst, {"style": "loud"}, ConfigError, "expected style 'terse' or 'verbose', got 'loud'"),
        (CodeRepair, {"num_bugs": 4}, ConfigError, "num_bugs from 1 to 3 .* got 4"),
        (CodeRepair, {"max_steps": 0}, ConfigError, "max_steps >= 1, got 1 and 0"),
        (CodeRepair, {"solved_reward": 0}, ConfigError, "solved_reward=0"),
        (CodeRepair, {"style": "loud"}, ConfigError, "got 'loud'"),
        (CodeRepair, {"level": "tny"}, UnknownNameError, "unknown level 'tny'; did you mean 'tiny'"),
        (CodeRepair, {"level": "tiny", "num_bugs": 2}, ConfigError, "num_bugs=1 at level 'tiny', got 2"),
        (CodeRepair, {"tools": ["replac", "submit"]}, UnknownNameError, "did you mean 'replace'"),
        (CodeRepair, {"tools": ["fix"]}, UnknownNameError, "unknown tool 'fix'"),
        (CodeRepair, {"tools": ["replace"]}, ConfigError, "expected 'submit' and 'replace' or 'write_file'"),
        (
            CodeRepair,
            {"tools": ["submit", "run_tests"]},
            ConfigError,
            "expected 'submit' and 'replace' or 'write_file'",
        ),
        (SupportDesk, {"task": "technical_suport"}, UnknownNameError, "did you mean 'technical_support'"),
        (SupportDesk, {"level": "tinny"}, UnknownNameError, "unknown level 'tinny'; did you mean 'tiny'"),
        (SupportDesk, {"level": "tiny", "task": "technical_support"}, ConfigError, "no effect at level 'tiny'"),
        (SupportDesk, {"max_steps": 0}, ConfigError, "expected max_steps >= 1, got 0"),
        (SupportDesk, {"max_errors": 0}, ConfigError, "expected max_errors >= 1 or none, got 0"),
        (SupportDesk, {"solved_reward": 0.0}, ConfigError, "solved_reward=0.0"),
        (
            SupportDesk,
            {"user": {"modle": "m"}},
            ConfigError,
            "user: expected the fields of ChatModelSettings, got \\['modle'\\]",
        ),
        (SupportDesk, {"user": {"model": ""}}, ConfigError, "expected a model's name"),
        (Countdown, {"num_numbers": 7}, ConfigError, "num_numbers from 3 to 6"),
        (Countdown, {"min_target": 9, "max_target": 8}, ConfigError, "min_target=9, max_target=8"),
        (Countdown, {"max_turns": 2}, ConfigError, "max_turns >= num_numbers - 1, got 2 for 4"),
        (Countdown, {"illegal_penalty": -1.0}, ConfigError, "illegal_penalty=-1.0"),
        (Countdown, {"style": "loud"}, ConfigError, "got 'loud'"),
        (Wordle, {"max_guesses": 0}, ConfigError, "expected max_guesses >= 1, got 0"),
        (Wordle, {"allowed": "all"}, ConfigError, "got 'all'"),
        (Wordle, {"information_reward": -0.1}, ConfigError, "information_reward=-0.1"),
        (Wordle, {"style": "loud"}, ConfigError, "got 'loud'"),
        (Wordle, {"words": ["cat"]}, ConfigError, "at least two different words"),
        (Wordle, {"words": ["cat", "bird"]}, ConfigError, "words of one length in the letters a-z, got 'bird'"),
        (Wordle, {"words": ["cat", "Dog"]}, ConfigError, "got 'Dog'"),
        (TicTacToe, {"opponent": "minmax"}, UnknownNameError, "unknown opponent 'minmax'.*minimax"),
        (TicTacToe, {"first": "me"}, ConfigError, "got first='me'"),
        (TicTacToe, {"opponent": "self", "first": "agent"}, ConfigError, "opponent='self'"),
        (TicTacToe, {"max_illegal": 0}, ConfigError, "expected max_illegal >= 1, got 0"),
        (TicTacToe, {"draw_reward": 2.0}, ConfigError, "draw_reward=2.0"),
        (TicTacToe, {"style": "loud"}, ConfigError, "got 'loud'"),
        (Homestead, {"size": 11}, ConfigError, "size from 12 to 64, got 11"),
        (Homestead, {"max_turns": 0}, ConfigError, "max_turns >= 1"),
        (Homestead, {"max_actions": 0}, ConfigError, "max_actions >= 1"),
        (Homestead, {"achievements_reward": 0.0}, ConfigError, "achievements_reward=0.0"),
        (Homestead, {"style": "loud"}, ConfigError, "got 'loud'"),
    ],
)
def test_impossible_settings_are_refused_with_the_value(
    make: type[TextEnv], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**kwargs)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (GuessNumber, {"numbr": 3}, "unknown options"),
        (GuessNumber, {"number": 9}, "expected number from 1 to 8, got 9"),
        (FrozenLake, {"map": "8x8"}, "expected no options, got \\['map'\\]"),
        (SqlAnalyst, {"level": "tiny"}, "expected no options, got \\['level'\\]"),
        (Countdown, {"numbers": [2, 3]}, "expected the options numbers and target"),
        (Countdown, {"numbers": [2, 3], "target": 3}, "a target that is none of"),
        (Countdown, {"numbers": [2, -3], "target": 6}, "whole numbers from 1 up"),
        (Countdown, {"numbers": [2, 3], "target": 7}, "a target that can be made"),
        (Wordle, {"wrd": "these"}, "unknown options"),
        (Wordle, {"word": "xyzzy"}, "got 'xyzzy'"),
        (TicTacToe, {"frst": "agent"}, "expected the option first"),
        (TicTacToe, {"first": "me"}, "expected the option first"),
        (TicTacToe, {"first": "agent", "x": 1}, "expected the option first"),
        (Homestead, {"land": 1}, r"expected no options, got \['land'\]"),
    ],
)
def test_wrong_reset_options_are_refused(make: type[TextEnv], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(style="terse").reset(seed=0, options=options)


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (GuessNumber, {}),
        (FrozenLake, {}),
        (SqlAnalyst, {"level": "tiny"}),
        (CodeRepair, {"level": "tiny"}),
        (SupportDesk, {"level": "tiny"}),
        (Countdown, {}),
        (Wordle, {}),
        (TicTacToe, {}),
        (Homestead, {"max_turns": 1}),
    ],
)
def test_stepping_outside_an_episode_is_an_error(make: type[TextEnv], kwargs: dict[str, Any]) -> None:
    async def play() -> None:
        env = make(**kwargs)
        for method in (env.step, env.invalid_action):
            with pytest.raises(ResetNeeded):
                await _answer(method("wait"))
        messages = _heard((await _answer(env.reset(seed=0)))[0])
        player, is_over = env.policies["reference"](env, np.random.default_rng(1)), False
        while not is_over:
            action = player(tuple(messages))
            text, _, terminated, truncated, _ = await _answer(env.step(action))
            said = action if isinstance(action, Message) else Message("assistant", str(action))
            messages += [said, *_heard(text)]
            is_over = terminated or truncated
        for method in (env.step, env.invalid_action):
            with pytest.raises(ResetNeeded):
                await _answer(method("wait"))

    asyncio.run(play())


def _heard(observation: Any) -> list[Message]:
    return [Message("user", observation)] if isinstance(observation, str) else list(observation)


async def _answer(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer

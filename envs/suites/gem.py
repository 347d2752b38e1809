"""`GemEnv`: the environments of axon-rl's GEM (the package gem-llm), and players of its games.

In a config: `rollout.env_name = "Gem"` with `rollout.env_config = { game = "game:GuessTheNumber-v0-easy" }`. GEM's
observation wrappers, which repeat the history as one text every turn, are not used: a turn shows only the new part.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gspo_gym_envs.suites.packages import import_package
from gspo_gym_envs.suites.reasoning_gym import OwnGenerators
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, ScriptedPolicy, TextEnv
from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import (
    ConfigError,
    ContractError,
    EnvError,
    UnknownNameError,
    described,
    nearest_name,
)
from gspo_gym.seeding import child_seed
from gspo_gym.types import Message

StepTuple = tuple[str, Reward, bool, bool, Info]

_MAX_SHOWN = 200  # characters of another package's error
_GAMES, _QUESTIONS = "game:", "rg:"
_END = "<｜TERMINAL_STATE｜>"  # GEM's questions say this instead of nothing


class GemEnv(TextEnv):
    r"""One GEM environment; it reads the last \boxed{} of an answer, which is passed on unchanged.

    An observation is GEM's own with its prefix and suffix, where games keep their board. Rewards pass unchanged as the
    term "reward". GEM declares success only for mathematics ("correct" in its info), so games have no success rate.

    GEM draws from process-wide random generators and seeds them, so they are lent to an episode while its code runs.
    Rollouts play in worker processes, because making a Sokoban may take seconds. Ids under "rg:" ask the same 500
    questions in training and evaluation; `ReasoningGym` keeps the two apart. Ids under "math:", "code:", "logic:",
    "qa:" and "eval:" load a data set from the hub, and word games load nltk's list of words.

    Policies: "random" for games; "reference" for GuessTheNumber, Mastermind, Sudoku and TowerofHanoi.

    Args:
        game: GEM's id, such as "game:Mastermind-v0-hard" or "rg:chain_sum".
        **env_kwargs: arguments of GEM's constructor, such as `max_turns=12`.

    Raises:
        MissingExtraError: gem-llm is not installed.
        UnknownNameError: GEM has no such environment; names the nearest.
    """

    isolation = "process"

    def __init__(self, game: str, **env_kwargs: Any) -> None:
        self._package = _package()
        known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
        if game not in known:
            raise UnknownNameError(f"GemEnv: GEM has no environment {game!r}; {nearest_name(game, known)}")
        self.game = game
        self._kwargs = env_kwargs
        if game.startswith(_GAMES):
            self.reward_range = (-0.1, 1.0)  # a format error, and a success (gem.utils.constants.LanguageGameReward)
            self.policies = {"random": random_play, **references(game)}  # type: ignore[misc]  # on the instance
        elif game.startswith(_QUESTIONS):
            self.reward_range = (0.0, 1.0)
        self.inner: Any = None  # GEM's environment, made for each episode; read by the players
        self._generators = OwnGenerators(0)
        self._is_playing = False

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        """Make a GEM environment and start the episode of the seed."""
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"GemEnv.reset: expected no options, got {sorted(options)}")
        if seed is None:
            seed = next_seed(self.np_random)
        # A fresh one each time, because some keep state over a reset.
        self.close()
        self._generators = OwnGenerators(child_seed(seed, "gem"))
        with self._generators.in_place():
            self.inner = self._made()
            answer = self._called("reset", lambda: self.inner.reset(seed=seed))
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ContractError(f"GEM {self.game}: expected (observation, info) from reset, got {described(answer)}")
        self._is_playing = True
        return self._text(*answer), dict(answer[1])

    def step(self, action: str) -> StepTuple:
        """Return GEM's answer to a text."""
        if not self._is_playing:
            raise ResetNeeded("GemEnv.step: no episode is being played; call reset first")
        with self._generators.in_place():
            answer = self._called("step", lambda: self.inner.step(action))
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise ContractError(f"GEM {self.game}: expected five values from step, got {described(answer)}")
        observation, reward, terminated, truncated, info = answer
        self._is_playing = not (terminated or truncated)
        success = bool(info["correct"]) if "correct" in info else None
        text = self._text(observation, info) if self._is_playing else _last_word(observation)
        return text, Reward({"reward": reward}, success=success), bool(terminated), bool(truncated), dict(info)

    def invalid_action(self, error: str) -> StepTuple:
        r"""Let GEM judge an unreadable answer as an empty one, which has no \boxed{}."""
        del error
        return self.step("")

    def close(self) -> None:
        close = getattr(self.inner, "close", None)
        self.inner, self._is_playing = None, False
        if callable(close):
            close()

    def _made(self) -> Any:
        return self._called("make", lambda: self._package.make(self.game, **self._kwargs))

    def _called(self, what: str, call: Any) -> Any:
        try:
            return call()
        except Exception as error:  # GEM and its games may raise anything
            # The text is cleaned, because nltk writes a screenful in colours.
            text = " ".join(re.sub(r"\x1b\[\d+m|\*{4,}", " ", str(error)).split())[:_MAX_SHOWN]
            raise EnvError(f"GEM {self.game}: {what} raised {type(error).__name__}: {text}") from error

    def _text(self, observation: Any, info: Any) -> str:  # as GEM's wrappers join the parts
        if not isinstance(observation, str) or not isinstance(info, Mapping):
            raise ContractError(f"GEM {self.game}: expected a text and an info, got {described(observation)}")
        parts = [str(info.get("prefix", "")), observation, str(info.get("suffix", ""))]
        return "\n".join(part.strip("\n") for part in parts if part.strip())


def _last_word(observation: Any) -> str:
    return "" if observation == _END else str(observation)


def _package() -> Any:
    modules = ("gem:make", "gem.envs.registration:ENV_REGISTRY")
    return import_package("Gem", "gem-llm", *modules, extra="envs-gem")


def references(game: str) -> dict[str, PolicyFactory]:
    """Return the reference policy of a game with a readable secret or solution, else nothing.

    >>> list(references("game:Sudoku-v0-easy")), references("game:Sokoban-v0-easy")
    (['reference'], {})
    """
    for name, policy in _REFERENCES.items():
        if game.startswith(f"game:{name}-"):
            return {"reference": policy}
    return {}


def random_play(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that makes GEM's random actions in a `GemEnv`."""
    own = OwnGenerators(int(rng.integers(2**31)))  # the game's generators must not advance

    def play(_messages: Sequence[Message]) -> str:
        # Two games have no random action. Some others forget the \boxed{} that they require, or add brackets.
        for name, draw in _RANDOM_MOVES.items():
            if env.game.startswith(f"game:{name}-"):
                return f"\\boxed{{{draw(env.inner, rng)}}}"
        with own.in_place():
            said = str(env.inner.sample_random_action()).replace("[", "").replace("]", "")
        return said if "\\boxed" in said else f"\\boxed{{{said}}}"

    return play


def _tower_move(_game: Any, rng: np.random.Generator) -> str:
    return " ".join(rng.choice(["A", "B", "C"], size=2, replace=False))


def _sudoku_move(game: Any, rng: np.random.Generator) -> str:
    return " ".join(str(number) for number in rng.integers(1, game.scale + 1, size=3))


_RANDOM_MOVES = {"TowerofHanoi": _tower_move, "Sudoku": _sudoku_move}


def _saying(moves: Iterator[str]) -> ScriptedPolicy:
    return lambda _messages: f"\\boxed{{{next(moves)}}}"


def _guess(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    return _saying(iter([str(env.inner.game_number)]))


def _code(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    return _saying(iter([" ".join(map(str, env.inner.game_code))]))


def _sudoku(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    game = env.inner
    cells = [(row, column) for row in range(game.scale) for column in range(game.scale)]
    return _saying(
        f"{row + 1} {column + 1} {game.full_grid[row][column]}" for row, column in cells if not game.board[row][column]
    )


def _towers(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    return _saying(_tower_moves(env.inner.num_disks, "A", "C", "B"))


def _tower_moves(num_disks: int, source: str, target: str, spare: str) -> Iterator[str]:
    if num_disks:
        yield from _tower_moves(num_disks - 1, source, spare, target)
        yield f"{source} {target}"
        yield from _tower_moves(num_disks - 1, spare, target, source)


_REFERENCES: Mapping[str, PolicyFactory] = {
    "GuessTheNumber": _guess,
    "Mastermind": _code,
    "Sudoku": _sudoku,
    "TowerofHanoi": _towers,
}

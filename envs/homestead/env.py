"""Homestead: settle a seeded wilderness, told as text; twenty small achievements in one episode.

A survival game in the manner of Crafter, with a land, rules and numbers of its own. `README.md` beside this file has
the rules, the rewards and a transcript; `world.py` draws the land, `rules.py` says what can be done, `view.py` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, SmallTask, TextEnv
from gspo_gym.env.rewards import Achievements, Reward
from gspo_gym.errors import ConfigError

from .policies import planner, random_actions
from .rules import ACHIEVEMENTS, ACTIONS, act
from .view import map_rows, rules_text, told, verbose_status
from .world import DIRECTIONS, World, drawn_world

Style = Literal["terse", "verbose"]
StepTuple = tuple[str, Reward, bool, bool, Info]

_WORDS = {action: action for action in ACTIONS} | {name[0]: name for name in DIRECTIONS}
_MIN_SIZE, _MAX_SIZE = 12, 64


class Homestead(TextEnv):
    """Gather, build, hunt and last through the night; each of `rules.ACHIEVEMENTS` earns once.

    An action is one to `max_actions` words of `rules.ACTIONS`, separated by commas, in any case; the four directions
    also by their first letter. They are made in order, each in one step of time; a bite ends the turn, as does death.
    Anything else is illegal: nothing is done, and one step passes. The episode *terminates* with the last achievement
    and with death, and is *truncated* after `max_turns`.

    Args:
        size: rows and columns of the land, 12 to 64.
        max_turns: answers before truncation, at least 1.
        max_actions: actions an answer may have, at least 1.
        achievements_reward: for all achievements together, > 0; each earns an equal share, the first time only.
        illegal_penalty: subtracted for an illegal answer, >= 0.
        style: "verbose" (the rules in sentences too) or "terse" (map and numbers; the rules are to be found out).

    Attributes (read by the scripted policies):
        world: the land and all on it. achievements: what was achieved so far.

    >>> env = Homestead(style="terse")
    >>> print(env.reset(seed=0)[0].splitlines()[-1])
    H9 F9 W9 E9 day
    """

    isolation = "thread"
    any_thread = True
    policies: ClassVar[Mapping[str, PolicyFactory]] = {"reference": planner, "random": random_actions}
    small_task: ClassVar[SmallTask | None] = SmallTask(
        {"size": 12, "max_turns": 6, "max_actions": 4}, style={"style": "terse"}
    )

    def __init__(
        self,
        *,
        size: int = 16,
        max_turns: int = 60,
        max_actions: int = 8,
        achievements_reward: float = 1.0,
        illegal_penalty: float = 0.01,
        style: Style = "verbose",
    ) -> None:
        if not _MIN_SIZE <= size <= _MAX_SIZE:
            raise ConfigError(f"Homestead: expected size from {_MIN_SIZE} to {_MAX_SIZE}, got {size}")
        if max_turns < 1 or max_actions < 1:
            raise ConfigError(
                f"Homestead: expected max_turns >= 1 and max_actions >= 1, got {max_turns} and {max_actions}"
            )
        if not (achievements_reward > 0 and illegal_penalty >= 0):
            raise ConfigError(
                "Homestead: expected achievements_reward > 0 and illegal_penalty >= 0, got "
                f"achievements_reward={achievements_reward}, illegal_penalty={illegal_penalty}"
            )
        if style not in ("terse", "verbose"):
            raise ConfigError(f"Homestead: expected style 'terse' or 'verbose', got {style!r}")
        self.size, self.max_turns, self.max_actions, self.style = size, max_turns, max_actions, style
        self._weights = {"achievements": achievements_reward, "illegal": -illegal_penalty}
        self.reward_range = (-illegal_penalty * max_turns, achievements_reward)
        self.achievements = Achievements(ACHIEVEMENTS)
        self.world = World(1, ["."], 0, np.random.default_rng(0), [])  # until there is a land
        self._turns_left = 0  # 0: no episode is being played

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        if options:
            raise ConfigError(f"Homestead.reset: expected no options, got {sorted(options)}")
        super().reset(seed=seed)
        self.world = drawn_world(self.np_random, self.size)
        self.achievements.reset()
        self._turns_left = self.max_turns
        rules = [] if self.style == "terse" else [rules_text(self.max_actions, len(ACHIEVEMENTS))]
        return self._told(rules), {}

    def step(self, action: str) -> StepTuple:
        self._require_episode("step")
        words = [_WORDS.get(word.strip().lower()) for word in action.split(",", self.max_actions)]
        if len(words) > self.max_actions:
            return self._illegal(f"at most {self.max_actions} actions")
        if None in words:
            return self._illegal(f"unknown action {words.index(None) + 1}")
        num_new = 0
        news: list[str] = []
        for word in filter(None, words):
            outcome = act(self.world, word)
            new = [name for name in outcome.achieved if self.achievements.unlock(name)]
            num_new += len(new)
            news += [f"+{name}" for name in new] + ([f"{word}: {outcome.problem}"] if outcome.problem else [])
            if outcome.is_bitten:
                news.append("bitten")
            if outcome.is_bitten or self.world.health == 0 or self._has_all():
                break
        return self._answer(list(dict.fromkeys(news)), {"achievements": num_new / len(ACHIEVEMENTS)} if num_new else {})

    def invalid_action(self, error: str) -> StepTuple:
        """An answer that could not even be read is illegal like any other: a step passes."""
        self._require_episode("invalid_action")
        return self._illegal(error)

    def _require_episode(self, method: str) -> None:
        if self._turns_left == 0:
            raise ResetNeeded(f"Homestead.{method}: no episode is being played; call reset first")

    def _has_all(self) -> bool:
        return len(self.achievements.unlocked) == len(ACHIEVEMENTS)

    def _illegal(self, error: str) -> StepTuple:
        outcome = act(self.world, "wait")
        return self._answer([error, *(["bitten"] if outcome.is_bitten else [])], {"illegal": 1.0})

    def _answer(self, news: Sequence[str], scores: Mapping[str, float]) -> StepTuple:
        """One turn is used up."""
        self._turns_left -= 1
        events = self.achievements.turn_events()
        terminated = self._has_all() or self.world.health == 0
        truncated = self._turns_left == 0 and not terminated
        success = None
        if terminated or truncated:
            self._turns_left = 0
            success = self._has_all()
            ending = "all done" if success else "dead" if terminated else "time is up"
            observation = "\n".join([*news, ending])
        else:
            observation = self._told(news)
        return (
            observation,
            Reward.weighted(scores, self._weights, events=events, success=success),
            terminated,
            truncated,
            {},
        )

    def _told(self, news: Sequence[str]) -> str:
        if self.style == "terse":
            return told(self.world, news)
        status = verbose_status(self.world, len(self.achievements.unlocked), len(ACHIEVEMENTS), self._turns_left)
        return "\n".join([*news, *map_rows(self.world), status])

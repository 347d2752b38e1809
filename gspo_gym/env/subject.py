"""What `checks.py` checks, and what it has found: the environment with its players and episodes, and the problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import (
    Playthrough,
    echo_policy,
    play,
    replaying,
    silent_policy,
    tool_calling_policy,
)
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.types import Message

TRIVIAL: Mapping[str, PolicyFactory] = {"saying nothing": silent_policy, "repeating what was said": echo_policy}
PROBE = "arbitrary actions"
_SHOWN = 3  # problems of one check that are told in full


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken promise: the check that found it, and what was expected and what came, with seed and turn."""

    check: str
    text: str


@dataclass(slots=True)
class Findings:
    """Problems and notes so far, and the check that is running."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    check: str = ""
    _counts: dict[str, int] = field(default_factory=dict)

    def fail(self, text: str) -> None:
        """Report a problem of the running check; after the third it is only counted."""
        self._counts[self.check] = self._counts.get(self.check, 0) + 1
        if self._counts[self.check] <= _SHOWN:
            self.problems.append(Problem(self.check, text))

    def close(self) -> None:
        """Report how many problems were only counted."""
        for check, count in self._counts.items():
            if count > _SHOWN:
                self.problems.append(Problem(check, f"... and {count - _SHOWN} more like these"))


@dataclass(slots=True)
class Subject:
    """The environment under check.

    Attributes:
        factory, name, seeds, max_turns, timeout: as given to `check_env`.
        reference, random: names of the policies with these roles.
        policies, reward_range, max_steps: what an instance declares; max_steps is Gymnasium's time limit.
        runs: the episodes that were played with nothing else running, by player and seed.
    """

    factory: Callable[[], Any]  # Any: authors need not subclass anything
    name: str
    seeds: tuple[int, ...]
    max_turns: int
    timeout: float
    reference: str
    random: str
    policies: Mapping[str, PolicyFactory] = field(default_factory=dict)
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    max_steps: int | None = None
    runs: dict[tuple[str, int], Playthrough] = field(default_factory=dict)

    @property
    def players(self) -> dict[str, PolicyFactory]:
        named = {name: self.policies[name] for name in (self.random, self.reference) if name in self.policies}
        return {**named, PROBE: tool_calling_policy, **TRIVIAL}

    def runs_of(self, player: str) -> list[Playthrough]:
        return [run for (name, _), run in self.runs.items() if name == player]

    def mean_return(self, player: str) -> float:
        return float(np.mean([run.episode_return or 0.0 for run in self.runs_of(player)]))

    async def open(self) -> EnvSession:
        return await open_session(self.factory, env_id=self.name, step_timeout_seconds=self.timeout)

    async def replay(self, actions: Sequence[Message], seed: int) -> Playthrough:
        """The episode that these actions make in a fresh instance."""
        return await play(
            self.factory,
            replaying(actions),
            seed=seed,
            name=self.name,
            max_turns=len(actions),
            step_timeout_seconds=self.timeout,
        )

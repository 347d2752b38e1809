"""The environment under check with its recorded episodes, and the findings about it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import Playthrough, play_in, replaying, tool_calling_policy
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.types import Message

PROBE = "arbitrary actions"
_SHOWN = 3  # problems of one check that are detailed
_MAX_BESIDE = 64  # concurrent episodes in this process
_MAX_WORKERS = 4  # concurrent worker processes


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken promise: its check, and a text with seed and turn, what was expected and what came."""

    check: str
    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A measurement of a check, in words."""

    check: str
    text: str


@dataclass(slots=True)
class Findings:
    """Findings so far, for `checker.CheckReport`; `check` is the running check."""

    problems: list[Problem] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measurements: dict[str, Any] = field(default_factory=dict)
    check: str = ""
    _counts: dict[str, int] = field(default_factory=dict)

    def fail(self, text: str) -> None:
        """Report a problem of the running check; after three, only count it."""
        self._counts[self.check] = self._counts.get(self.check, 0) + 1
        if self._counts[self.check] <= _SHOWN:
            self.problems.append(Problem(self.check, text))

    def tell(self, text: str) -> None:
        """Report a measurement of the running check."""
        self.facts.append(Fact(self.check, text))

    def close(self) -> None:
        """Report the problems that were only counted."""
        for check, count in self._counts.items():
            if count > _SHOWN:
                self.problems.append(Problem(check, f"... and {count - _SHOWN} more like these"))


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """Arguments of `checker.check_env`."""

    seeds: tuple[int, ...]
    max_turns: int
    step_timeout_seconds: float
    reference: str
    random: str
    max_step_seconds: float | None
    num_leak_episodes: int
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Call:
    """Duration of one call of the environment."""

    method: str
    where: str
    seconds: float


@dataclass(slots=True)
class Subject:
    """The environment under check.

    Attributes:
        factory, in_worker: make an instance in this process and in a worker process.
        policies, reward_range, reference_is_perfect, isolation: as an instance declares them.
        max_steps: Gymnasium's time limit.
        rubric: the environment's text on its grading.
        runs: episodes played with nothing else running, by player and seed.
        calls: their calls of `reset` and `step`.
        needs_worker: whether episodes are played in worker processes.
    """

    name: str
    factory: Callable[[], Any]
    in_worker: Callable[[], Any]
    settings: CheckSettings
    policies: Mapping[str, PolicyFactory] = field(default_factory=dict)
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    reference_is_perfect: bool = True
    isolation: str | None = None
    max_steps: int | None = None
    rubric: str = ""
    runs: dict[tuple[str, int], Playthrough] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    needs_worker: bool = False

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.settings.seeds

    @property
    def players(self) -> dict[str, PolicyFactory]:
        """Return the recorded players: random and reference play if declared, and arbitrary actions."""
        names = [name for name in (self.settings.random, self.settings.reference) if name in self.policies]
        return {**{name: _own_policy(name) for name in names}, PROBE: tool_calling_policy}

    def runs_of(self, player: str) -> list[Playthrough]:
        return [run for (name, _), run in self.runs.items() if name == player]

    def mean_return(self, player: str) -> float:
        return mean_return(self.runs_of(player))

    async def open(self) -> EnvSession:
        """Open a session on a fresh environment, in a worker process if needed."""
        return await self._open_session(self.in_worker if self.needs_worker else self.factory)

    async def open_here(self) -> EnvSession:
        """Open a session on a fresh environment in this process."""
        return await self._open_session(self.factory)

    async def replay(self, actions: Sequence[Message], seed: int) -> Playthrough:
        """Return the episode that `actions` make in a fresh instance."""
        session = await self.open()
        try:
            return await play_in(session, replaying(actions), seed=seed, max_turns=len(actions))
        finally:
            await session.close()

    async def replay_all(self, episodes: Sequence[tuple[Sequence[Message], int]]) -> list[Playthrough | BaseException]:
        """Return the `replay` of each (actions, seed), played concurrently."""
        limit = asyncio.Semaphore(_MAX_WORKERS if self.needs_worker else _MAX_BESIDE)

        async def replay(actions: Sequence[Message], seed: int) -> Playthrough:
            async with limit:
                return await self.replay(actions, seed)

        return await asyncio.gather(*(replay(*episode) for episode in episodes), return_exceptions=True)

    @contextmanager
    def timing(self, method: str, where: str) -> Iterator[None]:
        """Record the duration of the block."""
        start = self.settings.clock()
        yield
        self.calls.append(Call(method, where, self.settings.clock() - start))

    async def _open_session(self, factory: Callable[[], Any]) -> EnvSession:
        seconds = self.settings.step_timeout_seconds
        return await open_session(factory, env_id=self.name, step_timeout_seconds=seconds, checks_returns=False)


def mean_return(runs: Sequence[Playthrough]) -> float:
    """Return the mean of at least one episode; one without any reward counts as 0."""
    return float(np.mean([run.episode_return or 0.0 for run in runs]))


def _own_policy(name: str) -> PolicyFactory:
    # Taken from the environment that is played, because a worker's plays in the worker.
    return lambda env, rng: env.policies[name](env, rng)

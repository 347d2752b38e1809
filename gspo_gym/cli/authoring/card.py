"""`make_card`: what an environment is, as it says itself, and what it is worth to its own players.

Nothing here knows a particular environment, nor how a card looks (`card_text.py`). Called by `command.py`.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium

from gspo_gym.base.loops import run_to_end
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import PlayerError, Playthrough, play, schemas_of, tool_calling_policy
from gspo_gym.env.registry import make, resolve
from gspo_gym.env.session import looking_at
from gspo_gym.errors import ConfigError, GymError
from gspo_gym.rollout.statistics import Interval, bootstrap_mean_interval, wilson_interval

REFERENCE, RANDOM = "reference", "random"
_STAND_IN = "arbitrary actions"  # where an environment has no random player
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class PlayerRecord:
    """How one player did.

    Attributes:
        player: its name.
        runs: the episodes, by seed.
        failures: what went wrong in the episodes that could not be played.
    """

    player: str
    runs: tuple[Playthrough, ...]
    failures: tuple[str, ...]

    @property
    def returns(self) -> tuple[float, ...]:
        """Of the episodes in which a turn had a reward."""
        return tuple(run.episode_return for run in self.runs if run.episode_return is not None)

    @property
    def turns(self) -> tuple[int, ...]:
        """Actions of each episode."""
        return tuple(len(run.answers) for run in self.runs)

    @property
    def success_rate(self) -> float | None:
        """The share of the episodes that succeeded, undecided ones included; None: none declared success or failure."""
        count = self._num_successes
        return None if count is None else count / len(self.runs)

    @property
    def success_interval(self) -> Interval | None:
        """Its 95% interval (Wilson)."""
        count = self._num_successes
        return None if count is None else wilson_interval(count, len(self.runs))

    @property
    def _num_successes(self) -> int | None:
        if all(run.success is None for run in self.runs):
            return None
        return sum(run.success is True for run in self.runs)

    @property
    def mean_interval(self) -> Interval | None:
        """The 95% interval of the mean return (bootstrap); None: fewer than two returns."""
        return bootstrap_mean_interval(self.returns)

    @property
    def mean_terms(self) -> Mapping[str, float]:
        """The contribution of each reward term to an episode, its mean over all episodes."""
        totals: Counter[str] = Counter()
        for run in self.runs:
            for answer in run.answers:
                totals.update(answer.reward_terms)
        return {name: total / len(self.runs) for name, total in totals.items()}

    @property
    def event_rates(self) -> Mapping[str, float]:
        """The share of the episodes in which each event occurred."""
        counts = Counter(name for run in self.runs for name in {e for answer in run.answers for e in answer.events})
        return {name: count / len(self.runs) for name, count in counts.items()}


@dataclass(frozen=True)
class EnvironmentCard:
    """What there is to say about an environment.

    Attributes:
        env_id: the full id.
        summary: the first paragraph of its docstring.
        options: the constructor's arguments with their values here, as Python writes them.
        facts: spaces, isolation, limits and the like, by name.
        tools: what the model may call: name, description, parameters (Any: JSON schemas).
        reward_range: as declared.
        records: of the reference and of the random player, as far as there are any.
    """

    env_id: str
    summary: str
    options: Mapping[str, str]
    facts: Mapping[str, str]
    tools: tuple[Mapping[str, Any], ...]
    reward_range: tuple[float, float]
    records: tuple[PlayerRecord, ...]


def make_card(
    name: str, env_config: Mapping[str, Any] | None = None, *, num_seeds: int = 100, max_turns: int = 200
) -> EnvironmentCard:
    """The card of a registered environment.

    Args:
        name: of it.
        env_config: arguments of its constructor (Any: its own affair).
        num_seeds: the seeds 0 to num_seeds - 1 are played, which are evaluation tasks.
        max_turns: longer episodes are cut off here.

    Raises:
        UnknownNameError: there is no such environment.
        ConfigError: its constructor refuses the arguments, or there are no seeds.
    """
    if num_seeds < 1:
        raise ConfigError(f"card: expected at least one seed, got {num_seeds}")
    return run_to_end(_make_card(resolve(name), dict(env_config or {}), range(num_seeds), max_turns))


async def _make_card(env_id: str, config: dict[str, Any], seeds: Sequence[int], max_turns: int) -> EnvironmentCard:
    factory = partial(make, env_id, **config)
    async with looking_at(factory) as made:
        env = getattr(made, "unwrapped", made)
        policies: Mapping[str, PolicyFactory] = getattr(env, "policies", {})
        card = partial(
            EnvironmentCard,
            env_id=env_id,
            summary=inspect.cleandoc(type(env).__doc__ or "").partition("\n\n")[0],
            options=_options(type(env), config),
            facts=_facts(env_id, env),
            tools=schemas_of(env),
            reward_range=_reward_range(env),
        )
    players = {REFERENCE: policies[REFERENCE]} if REFERENCE in policies else {}
    players |= {RANDOM: policies[RANDOM]} if RANDOM in policies else {_STAND_IN: tool_calling_policy}
    records = [await _play(factory, env_id, player, policy, seeds, max_turns) for player, policy in players.items()]
    return card(records=tuple(records))


async def _play(
    factory: partial[Any], env_id: str, player: str, policy: PolicyFactory, seeds: Sequence[int], max_turns: int
) -> PlayerRecord:
    """One episode a seed, one after another: what a player costs is the environment's affair."""
    runs: list[Playthrough] = []
    failures: list[str] = []
    for seed in seeds:
        try:
            runs.append(
                await play(
                    factory,
                    policy,
                    seed=seed,
                    name=env_id,
                    max_turns=max_turns,
                    step_timeout_seconds=_TIMEOUT_SECONDS,
                )
            )
        except (GymError, PlayerError) as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    return PlayerRecord(player, tuple(runs), tuple(failures))


def _options(env_class: type, config: Mapping[str, Any]) -> dict[str, str]:
    parameters = inspect.signature(env_class).parameters.values()
    defaults = {
        p.name: "required" if p.default is p.empty else repr(p.default) for p in parameters if p.kind not in _REST
    }
    return defaults | {name: repr(value) for name, value in config.items()}


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _reward_range(env: Any) -> tuple[float, float]:
    low, high = getattr(env, "reward_range", (-math.inf, math.inf))
    return float(low), float(high)


def _facts(env_id: str, env: Any) -> dict[str, str]:
    limit = gymnasium.registry[env_id].max_episode_steps
    return {
        "acts by": "tool calls" if getattr(env, "takes_messages", False) else "text",
        "observation space": str(getattr(env, "observation_space", "not said")),
        "action space": str(getattr(env, "action_space", "not said")),
        "isolation": getattr(env, "isolation", None) or "not said (a thread of the episode's own)",
        **({"code of the model": env.confinement} if getattr(env, "confinement", None) else {}),
        "time limit": "none from outside" if limit is None else f"{limit} steps, then truncated",
        "players": ", ".join(getattr(env, "policies", {})) or "none",
    }

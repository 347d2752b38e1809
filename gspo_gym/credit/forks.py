"""Groups of episodes that are continued from every turn, and what the continuations earn.

A fork replays: the same seed, then the recorded actions, then the policy goes on with draws of its own. An environment
that answers a replay otherwise cannot be forked. Given the seed, an environment has no chance left: the value of a
prefix is that of this task, which is what the episodes of a group share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.playing import PlayerError, Playthrough, play_in
from gspo_gym.env.session import EnvSession
from gspo_gym.errors import ConfigError, ContractError, RolloutError
from gspo_gym.seeding import generator
from gspo_gym.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Segment,
    Task,
    Trajectory,
    Turn,
)

Floats = NDArray[np.float64]
Action = Message | Completion

NUM_TREE = 4  # continuations that estimate, as a tree of episodes would; the others are the truth
_NO_TOKENS = Segment(
    token_ids=np.zeros(1, np.int32),
    action_mask=np.zeros(1, np.bool_),
    rollout_logprobs=np.zeros(1, np.float32),
    turn_index=np.full(1, -1, np.int32),
    weight_version=np.full(1, -1, np.int32),
)


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """An episode and what it takes to continue it.

    Attributes:
        states: per turn, the text that the environment said last: the key by which GiGPO compares turns.
        actions: per turn, what a replay repeats.
    """

    trajectory: Trajectory
    states: tuple[str, ...]
    actions: tuple[Action, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return the environment's reward of each turn; 0 where it gave none."""
        return tuple(turn.reward or 0.0 for turn in self.trajectory.turns)


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """An episode to be played: of the task `seed`, with the first `num_turns` turns of `origin`, if there is one.

    `path` names its draws.
    """

    seed: int
    path: tuple[str | int, ...]
    origin: Episode | None = None
    num_turns: int = 0

    @property
    def actions(self) -> tuple[Action, ...]:
        """Return the actions that it repeats."""
        return () if self.origin is None else self.origin.actions[: self.num_turns]


class Player(Protocol):
    """A policy in an environment."""

    async def play(self, forks: Sequence[Fork]) -> list[Episode]:
        """Return the episode of each fork, in order."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ForkedGroup:
    """The episodes of one task, and what continuations from before each turn earned.

    Attributes:
        values: per episode, [num_turns + 1, C] discounted returns of C continuations; the last row is 0: the end.
    """

    episodes: tuple[Episode, ...]
    values: tuple[Floats, ...]


async def fork_group(
    player: Player, seed: int, *, group_size: int, num_continuations: int, discount: float
) -> ForkedGroup:
    """Play a group of episodes, and continue each from before each of its turns.

    Equal prefixes are continued once for all episodes that have them. Of each, `NUM_TREE` continuations are played
    beside the `num_continuations`, for estimators.

    Raises:
        ConfigError: fewer than 2 episodes or continuations.
        ContractError: a replay was answered otherwise than the episode.
    """
    if min(group_size, num_continuations) < 2:
        raise ConfigError(
            f"credit: expected at least 2 episodes a group and 2 continuations, got {group_size} and "
            f"{num_continuations}"
        )
    episodes = await player.play([Fork(seed, ("episode", number)) for number in range(group_size)])
    prefixes: dict[str, tuple[Episode, int]] = {}
    for episode in episodes:
        for turn in range(len(episode.actions)):
            prefixes.setdefault(_key(episode.actions[:turn]), (episode, turn))
    num = NUM_TREE + num_continuations
    forks = [
        Fork(seed, ("continuation", number, copy), episode, turn)
        for number, (episode, turn) in enumerate(prefixes.values())
        for copy in range(num)
    ]
    continued = iter(await player.play(forks))
    value_of = {
        key: np.array([_value_from(episode, turn, next(continued), discount) for _ in range(num)])
        for key, (episode, turn) in prefixes.items()
    }
    values = tuple(
        np.array([*(value_of[_key(e.actions[:turn])] for turn in range(len(e.actions))), np.zeros(num)])
        for e in episodes
    )
    return ForkedGroup(tuple(episodes), values)


def truth_of(group: ForkedGroup, discount: float) -> list[tuple[Floats, Floats]]:
    """Return per episode the true advantages [num_turns] and the variances of their errors.

    The advantage of an action is its reward and the value after it less the value before it.
    """
    truths = []
    for episode, values in zip(group.episodes, group.values, strict=True):
        returns = values[:, NUM_TREE:]
        means, variances = returns.mean(axis=1), returns.var(axis=1, ddof=1) / returns.shape[1]
        advantages = np.array(episode.rewards) + discount * means[1:] - means[:-1]
        truths.append((advantages, discount**2 * variances[1:] + variances[:-1]))
    return truths


class ScriptedPlayer:
    """Player of a hand-written policy in one environment of this process, an episode after the other, without tokens.

    The policy's player is made where an episode is continued: what it knows must be in the conversation or in the
    environment.
    """

    def __init__(self, session: EnvSession, policy: PolicyFactory, *, max_turns: int) -> None:
        self._session = session
        self._policy = policy
        self._max_turns = max_turns

    async def play(self, forks: Sequence[Fork]) -> list[Episode]:
        """Return the episode of each fork; a RolloutError if the policy raised."""
        return [await self._play(fork) for fork in forks]

    async def _play(self, fork: Fork) -> Episode:
        rng = generator(0, "credit", fork.seed, *fork.path)
        policy = _continuing(fork.actions, self._policy, rng)
        try:
            played = await play_in(self._session, policy, seed=fork.seed, max_turns=self._max_turns)
        except PlayerError as error:
            raise RolloutError(f"{self._session.env_id}, seed {fork.seed}: {error}") from error
        return _as_episode(played, self._session.env_id)


def _continuing(actions: Sequence[Action], policy: PolicyFactory, rng: np.random.Generator) -> PolicyFactory:
    def factory(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
        recorded = iter(actions)
        players: list[ScriptedPolicy] = []

        def say(messages: Sequence[Message]) -> Any:  # Any: plain or async, as the player answers
            if (action := next(recorded, None)) is not None:
                return action
            if not players:
                players.append(policy(env, rng))
            return players[0](messages)

        return say

    return factory


def _as_episode(played: Playthrough, env_id: str) -> Episode:
    observations = [played.opening, *(answer.messages for answer in played.answers)]
    turns = tuple(
        Turn(k, 0, (0, 0), (0, 1), FinishReason.STOP, reward=answer.reward, events=answer.events)
        for k, answer in enumerate(played.answers)
    )
    messages = list(played.opening)
    for action, answer in zip(played.actions, played.answers, strict=True):
        messages += [action, *answer.messages]
    last = played.answers[-1]
    outcome = Outcome.TERMINATED if last.terminated else Outcome.TRUNCATED if last.truncated else Outcome.MAX_TURNS
    task = Task(env_id, played.seed)
    said, success = tuple(messages), played.success
    trajectory = Trajectory(task.task_id, 0, task, 0, (_NO_TOKENS,), turns, said, outcome, success=success)
    return Episode(trajectory, tuple(map(_text_of, observations[:-1])), played.actions)


def _text_of(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages)


def _key(actions: Sequence[Action]) -> str:
    return repr([a.token_ids.tolist() if isinstance(a, Completion) else a for a in actions])


def _value_from(episode: Episode, turn: int, continued: Episode, discount: float) -> float:
    """Return what a continuation earned from `turn` on, after comparing what came before with the episode."""
    seen, seen_again = episode.states[: turn + 1], continued.states[: turn + 1]
    earned, earned_again = episode.rewards[:turn], continued.rewards[:turn]
    if seen != seen_again or not np.allclose(earned, earned_again, rtol=0, atol=1e-9):
        task = episode.trajectory.task
        raise ContractError(
            f"{task.env_id}, seed {task.seed}: a replay was answered otherwise before turn {turn} than the episode, "
            "which cannot be forked; `gspo-gym env check` says what is not determined by the seed"
        )
    rewards = np.array(continued.rewards[turn:])
    return float(rewards @ discount ** np.arange(len(rewards)))

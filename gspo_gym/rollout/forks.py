"""Forks: episodes that repeat the first turns of another one, and then go on with draws of their own.

A replay needs no snapshot of an environment: the seed, then the recorded tokens; before each turn the prompt must be
the recorded one. Which turn is forked is drawn here; what the forks say of an advantage is in `learning/trees.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_gym.errors import ContractError
from gspo_gym.rollout.actors import Actor, ActRequest
from gspo_gym.seeding import generator
from gspo_gym.types import Completion, ForkPoint, Int32Array, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The first `num_turns` turns of a recorded episode, at least one fewer than it has, for a fork to repeat."""

    origin: Trajectory
    num_turns: int

    @property
    def point(self) -> ForkPoint:
        """Return the place where the fork leaves its origin."""
        return ForkPoint(self.origin.trajectory_id, self.num_turns)

    def prompt(self, turn: int) -> Int32Array:
        """Return [L] the recorded prompt of a turn."""
        record = self.origin.turns[turn]
        return self.origin.segments[record.segment].token_ids[: record.action_span[0]]


def completions_of(trajectory: Trajectory) -> tuple[Completion, ...]:
    """Return what was sampled in each turn, with the logprobs and versions of then."""
    completions = []
    for turn in trajectory.turns:
        segment, span = trajectory.segments[turn.segment], slice(*turn.action_span)
        arrays = segment.token_ids[span], segment.rollout_logprobs[span]
        completions.append(Completion(*arrays, turn.finish_reason, segment.weight_version[span]))
    return tuple(completions)


class ReplayingActor:
    """Actor of one episode: it repeats the recorded completions, and asks `act` for the turns after them."""

    def __init__(self, act: Actor, replay: Replay) -> None:
        self._act = act
        self._replay = replay
        self._completions = completions_of(replay.origin)
        self._is_same = True

    async def __call__(self, request: ActRequest) -> Completion:
        """Return a turn's completion; a ContractError if its prompt is not the recorded one."""
        turn = request.turn_index
        if turn <= self._replay.num_turns and not np.array_equal(request.prompt_token_ids, self._replay.prompt(turn)):
            self._is_same = False
            raise self._divergence(turn)
        return self._completions[turn] if turn < self._replay.num_turns else await self._act(request)

    async def end_session(self, session_id: str) -> None:
        await self._act.end_session(session_id)

    def require_replayed(self, fork: Trajectory) -> None:
        """Raise a ContractError that names the turn if the finished fork was answered otherwise than its origin.

        A fork that an infrastructure failure ended early says nothing of it.
        """
        is_short = len(fork.turns) <= self._replay.num_turns
        if not self._is_same or (is_short and not fork.outcome.is_infrastructure_failure):
            raise self._divergence(len(fork.turns))

    def _divergence(self, turn: int) -> ContractError:
        task, origin = self._replay.origin.task, self._replay.origin.trajectory_id
        return ContractError(
            f"{task.env_id}, seed {task.seed}: a replay of episode {origin} was answered otherwise before turn {turn}, "
            "so that it cannot be forked; `gspo-gym env check` says what is not determined by the seed, and "
            "rollout.forks_per_episode = 0 forks nothing"
        )


def draw_replays(episodes: Sequence[Trajectory], *, seed: int) -> list[Replay | None]:
    """Return what the forks of each episode of a group repeat; None: it is not forked.

    The turn is drawn uniformly from all turns of the *other* episodes but their first ones, and an episode that has no
    such turn is not forked. So whether an episode is forked before turn k depends on nothing that it did from there on,
    and its own continuation is one of equals: the mean over it and its forks is an unbiased value of the turns before.
    A turn drawn from the episode's own would prefer those that end soon (`tests/unit/learning/test_trees.py`).

    Args:
        episodes: of one task, in the order of their numbers, each with a turn. seed: of the draws.
    """
    replays: list[Replay | None] = []
    for number, episode in enumerate(episodes):
        turns = [t for j, other in enumerate(episodes) if j != number for t in range(1, len(other.turns))]
        turn = turns[int(generator(seed, number).integers(len(turns)))] if turns else len(episode.turns)
        replays.append(Replay(episode, turn) if turn < len(episode.turns) else None)
    return replays

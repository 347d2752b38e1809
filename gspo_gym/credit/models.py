"""A model as a player of forks: its recorded completions are given back turn by turn, and then it samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.credit.forks import Episode, Fork
from gspo_gym.env.workers.threads import QuickCalls
from gspo_gym.errors import RolloutError
from gspo_gym.rollout.actors import Actor
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.forks import Replay, completions_of
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.seeding import child_seed
from gspo_gym.types import Message, Task


class ModelPlayer:
    """Player of a model's episodes, as many at once as fit `max_concurrent`, through the loop that training uses.

    Args:
        factory: makes a fresh environment.
        act: samples.
        renderers: of the model's tokenizer.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        act: Actor,
        renderers: RendererCache,
        *,
        env_id: str,
        limits: EpisodeLimits,
        max_concurrent: int,
    ) -> None:
        self._factory = factory
        self._act = act
        self._renderers = renderers
        self._env_id = env_id
        self._limits = limits
        self._slots = asyncio.Semaphore(max_concurrent)
        self._quick = QuickCalls(clock=time.monotonic)

    async def play(self, forks: Sequence[Fork]) -> list[Episode]:
        """Return the episode of each fork.

        Raises:
            RolloutError: an episode failed, or its first prompt does not fit.
            ContractError: a replay was answered otherwise than its origin.
        """
        return list(await asyncio.gather(*map(self._play, forks)))

    async def _play(self, fork: Fork) -> Episode:
        request = EpisodeRequest(
            "/".join(map(str, (fork.seed, *fork.path))),
            Task(self._env_id, fork.seed),
            child_seed(0, "credit", fork.seed, *fork.path),
            replay=None if fork.origin is None else Replay(fork.origin.trajectory, fork.num_turns),
        )
        async with self._slots:
            trajectory = await run_episode(
                request,
                make_env=lambda _task: self._factory(),
                act=self._act,
                renderers=self._renderers,
                limits=self._limits,
                quick=self._quick,
            )
        if trajectory.outcome.is_infrastructure_failure or not trajectory.turns:
            reason = trajectory.error or "no turn was played"
            raise RolloutError(f"{self._env_id}, seed {fork.seed}: {trajectory.outcome.value}: {reason}")
        return Episode(trajectory, _states(trajectory.messages), completions_of(trajectory))


def _states(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the text before each of the policy's messages, back to the one before."""
    states: list[str] = []
    texts: list[str] = []
    for message in messages:
        if message.role == "assistant":
            states.append("\n".join(texts))
            texts = []
        else:
            texts.append(message.content)
    return tuple(states)

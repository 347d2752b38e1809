"""Bound the episodes that wait for a score, such as a judge's; how they are scored is not decided here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from pydantic import Field

from gspo_gym.base.settings import Settings
from gspo_gym.errors import UnscoredError
from gspo_gym.types import Trajectory

# The episode with its rewards. Raises UnscoredError if it has none; whatever else it raises ends the collection.
Score = Callable[[Trajectory], Awaitable[Trajectory]]


class ScoringLimits(Settings):
    """Limits on scores that are late or do not come."""

    max_unscored: int = Field(
        default=256,
        gt=0,
        description="episodes that are played and wait for their score; while so many do, no further one begins",
    )
    on_unscored: Literal["refill", "drop"] = Field(
        default="refill",
        description=(
            "what becomes of an episode that gets no score: another is played in its place, limits.max_attempts at "
            "most, or it is dropped at once; it never counts as 0"
        ),
    )


class Slots:
    """Semaphore of a fixed count that can be used in one event loop after another."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the semaphore; None: there is none yet
        self._semaphore: asyncio.Semaphore

    def of_this_loop(self) -> asyncio.Semaphore:
        """Return the semaphore of the running loop; it is fresh in every loop, because it belongs to one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self._count)
        return self._semaphore


class Scoring:
    """Scorer of one pool's episodes.

    Args:
        score: gives an episode its rewards.
        limits: see there.
    """

    def __init__(self, score: Score, limits: ScoringLimits) -> None:
        self.limits = limits
        self._score = score
        self._room = Slots(self.limits.max_unscored)

    async def wait_for_room(self) -> None:
        """Wait until one more episode may wait for its score; `score` must follow."""
        await self._room.of_this_loop().acquire()

    async def score(self, trajectory: Trajectory) -> tuple[Trajectory, str | None]:
        """Return the episode with its rewards, or unchanged and why it got none. Call after `wait_for_room`."""
        try:
            return await self._score(trajectory), None
        except UnscoredError as error:
            return trajectory, str(error)
        finally:
            self._room.of_this_loop().release()

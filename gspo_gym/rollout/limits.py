"""Every limit on an episode, in one place, and the order in which they are checked.

Before each turn, in this order; the first that binds decides the outcome:

1. the environment ended the episode (terminated before truncated);
2. `max_turns` actions were taken: Outcome.MAX_TURNS;
3. the next prompt leaves no room for one token in `max_model_len`: Outcome.CONTEXT_OVERFLOW;
4. `episode_timeout_seconds` passed since the environment was made, also during any wait: Outcome.EPISODE_TIMEOUT.

During a turn: at most min(max_output_tokens, max_model_len - prompt) tokens are sampled, and the environment has
`step_timeout_seconds` to be made, and for each reset, step and close: Outcome.ENV_TIMEOUT. Loading what
all environments share has another limit (`env/workers/isolation.py`). Where a limit was exceeded because of the action
(`env/blame.py` says when), the outcome is ACTION_LIMIT, and the episode is scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pydantic import Field

from gspo_gym.base.settings import Settings
from gspo_gym.errors import UnscoredError
from gspo_gym.types import Trajectory


class _TimeLimits(Settings):
    step_timeout_seconds: float = Field(
        default=30.0, gt=0, description="to make the environment, and for each reset, step or close of it"
    )
    episode_timeout_seconds: float = Field(
        default=600.0, gt=0, description="for the whole episode, from when its environment was made"
    )


class LimitSettings(_TimeLimits):
    """[limits]: when an episode is given up; see `rollout/limits.py` for the order."""


class EpisodeLimits(_TimeLimits):
    """Limits of one episode. Tokens are counted by the model's own tokenizer."""

    max_turns: int = Field(gt=0, description="actions per episode")
    max_output_tokens: int = Field(gt=0, description="sampled tokens per turn, the stop token included")
    max_model_len: int = Field(gt=1, description="prompt plus completion, in tokens")
    action_limit_return: float | None = Field(
        default=None,
        description=(
            "return of an episode that ends because an action exceeded a limit of the environment; unset: the lowest "
            "of the environment's reward_range, or 1 below what was earned (at most 0) where it states none"
        ),
    )


class PoolLimits(Settings):
    """Limits of a rollout pool."""

    max_concurrent_rollouts: int = Field(default=64, gt=0, description="episodes in flight at once")
    max_attempts: int = Field(
        default=3,
        gt=0,
        description="tries per sample, each in a fresh environment, with a fresh seed unless it was lost by no action",
    )
    min_group_fraction: float = Field(
        default=0.75, gt=0, le=1, description="a group that kept fewer of its episodes is dropped whole"
    )


class ScoringLimits(Settings):
    """Limits on scores that are late or do not come."""

    max_unscored: int = Field(
        default=256,
        gt=0,
        description="episodes that are played and wait for their score; while so many do, no further one begins",
    )


# The episode with its rewards. Raises UnscoredError if it has none; whatever else it raises ends the collection.
Score = Callable[[Trajectory], Awaitable[Trajectory]]
# The same for an episode beside all of its group, itself among them.
ScoreInGroup = Callable[[Trajectory, tuple[Trajectory, ...]], Awaitable[Trajectory]]


class Slots:
    """Semaphore of a fixed count that can be used in one event loop after another."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the semaphore; None: there is none yet
        self._semaphore: asyncio.Semaphore

    def of_this_loop(self) -> asyncio.Semaphore:
        """Return the semaphore of the running loop; it is fresh in every loop, because it belongs to one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self.count)
        return self._semaphore


class Scoring:
    """Scorer of one pool's episodes: `score` gives an episode its rewards."""

    def __init__(self, score: Score, limits: ScoringLimits) -> None:
        self.limits = limits
        self._score = score
        self._room = Slots(self.limits.max_unscored)

    async def wait_for_room(self) -> asyncio.Semaphore:
        """Return the room in which one more episode may wait for its score, when there is some; `score` must follow."""
        room = self._room.of_this_loop()
        await room.acquire()
        return room

    async def score(self, trajectory: Trajectory, room: asyncio.Semaphore) -> tuple[Trajectory, str | None]:
        """Return the episode with its rewards, or unchanged and why it got none; `room` is `wait_for_room`'s."""
        try:
            return await _or_reason(trajectory, self._score(trajectory))
        finally:
            room.release()


class GroupScoring:
    """Scorer of one pool's episodes that compares those of a group; asked when the last of them is over."""

    # Episodes that wait have no limit of their own: they wait for siblings, which a limit could keep from beginning.
    def __init__(self, score: ScoreInGroup) -> None:
        self._score = score

    async def score(self, group: Sequence[Trajectory]) -> list[tuple[Trajectory, str | None]]:
        """Return each episode with its rewards, or unchanged and why it got none, in the order of the group."""
        siblings = tuple(group)
        async with asyncio.TaskGroup() as tasks:
            scores = [tasks.create_task(_or_reason(one, self._score(one, siblings))) for one in siblings]
        return [score.result() for score in scores]


async def _or_reason(trajectory: Trajectory, score: Awaitable[Trajectory]) -> tuple[Trajectory, str | None]:
    try:
        return await score, None
    except UnscoredError as error:
        return trajectory, str(error)

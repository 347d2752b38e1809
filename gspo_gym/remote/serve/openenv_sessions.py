"""Sessions of a served environment: a limited number at once, with one environment each. No wire format here."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.errors import ActionLimitError, EnvDiedError, EnvTimeoutError, GymError, UsageError
from gspo_gym.types import Message, StepResult


class CapacityError(GymError, RuntimeError):
    """The server's limit of sessions is reached."""


class Session:
    """One environment and its present episode; calls wait for each other.

    Attributes:
        id: the client's name for it. episode_id, num_steps: of the episode.
        is_attached: a WebSocket drives it; the others live until they are closed, or idle for too long.
        is_closing: it ends with its WebSocket.
        is_broken: a call did not return in time; it may only be closed.
    """

    def __init__(self, env: EnvSession) -> None:
        self.id = str(uuid.uuid4())
        self.episode_id: str | None = None
        self.num_steps = 0
        self.is_attached = False
        self.is_closing = False
        self.is_broken = False
        self.last_used = time.monotonic()
        self.env = env
        self._is_playing = False
        self._generator = np.random.default_rng()  # of the seeds of unseeded episodes
        self._lock = asyncio.Lock()

    async def reset(self, seed: int | None, episode_id: str | None, options: Mapping[str, Any]) -> StepResult:
        """Start an episode; without a seed, of a task drawn as `splits.next_seed` says.

        Raises:
            EnvError, ContractError: as `EnvSession.reset`.
        """
        async with self._lock:
            self._is_playing = False
            if seed is None:
                seed = next_seed(self._generator)
            else:
                self._generator = np.random.default_rng(seed)  # the seed starts the sequence of the episodes after it
            result = await self._call(self.env.reset(seed, options))
            self.episode_id, self.num_steps = episode_id or str(uuid.uuid4()), 0
            self._is_playing = True
            return result

    async def act(self, message_at: Callable[[int], Message]) -> StepResult:
        """Answer one action; `message_at` receives the number of the turn.

        Raises:
            UsageError: no episode is being played.
            EnvError, ContractError: as `EnvSession.step`.
        """
        async with self._lock:
            return await self._turn(self.env.step(message_at(self.num_steps)))

    async def close(self) -> None:
        """Close the environment and ignore its errors, which a client that has gone cannot use."""
        with suppress(GymError):
            await self.env.close()

    async def _turn(self, answer: Coroutine[Any, Any, StepResult]) -> StepResult:
        if not self._is_playing:
            answer.close()  # it was never begun
            raise UsageError("no episode is being played: send reset first")
        result = await self._call(answer)
        self.num_steps += 1
        self._is_playing = not result.done
        return result

    async def _call(self, answer: Any) -> StepResult:  # Any: a coroutine of EnvSession
        self.last_used = time.monotonic()
        try:
            result: StepResult = await answer
        # The environment may hang or be half-way through a step: only closing is safe.
        except (EnvTimeoutError, EnvDiedError, ActionLimitError, asyncio.CancelledError):
            self.is_broken = True
            raise
        finally:
            self.last_used = time.monotonic()
        return result


class Sessions:
    """The open sessions.

    Args:
        factory: makes an environment.
        env_id: its name in errors.
        max_sessions: open at once.
        step_timeout_seconds: for each call of an environment's method.
        idle_timeout_seconds: a session that no WebSocket drives gives its place up after so long without a call.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        env_id: str,
        max_sessions: int,
        step_timeout_seconds: float,
        idle_timeout_seconds: float,
    ) -> None:
        self.max_sessions = max_sessions
        self._factory, self._env_id = factory, env_id
        self._timeout, self._idle_timeout = step_timeout_seconds, idle_timeout_seconds
        self._open: dict[str, Session] = {}
        self._num_opening = 0

    @property
    def num_active(self) -> int:
        """Return the sessions that take a place: open ones, and those with an environment that is being made."""
        return len(self._open) + self._num_opening

    async def create(self) -> Session:
        """Open a session with a fresh environment.

        Raises:
            CapacityError: all places are taken.
            EnvError, EnvTimeoutError, ContractError: the environment could not be made.
        """
        if self.num_active >= self.max_sessions:
            # Idle ones are closed only when their places are needed.
            await self._close_idle()
        if self.num_active >= self.max_sessions:
            raise CapacityError(f"{self.num_active} of at most {self.max_sessions} sessions are open")
        self._num_opening += 1
        try:
            session = Session(await self.open_env())
        finally:
            self._num_opening -= 1  # counted while it is being made, or more would be opened
        self._open[session.id] = session
        return session

    async def open_env(self) -> EnvSession:
        """Return an environment that takes no place.

        Raises:
            EnvError, EnvTimeoutError, ContractError: it could not be made.
        """
        return await open_session(self._factory, env_id=self._env_id, step_timeout_seconds=self._timeout)

    def get(self, session_id: str) -> Session:
        """Return an open session.

        Raises:
            UsageError: there is none of that id.
        """
        if session_id not in self._open:
            raise UsageError(f"there is no session {session_id!r}")
        return self._open[session_id]

    async def destroy(self, session: Session) -> None:
        """Close a session; its place becomes free when its environment is closed."""
        # Its socket and /mcp may both close it.
        if session.id in self._open:
            try:
                await session.close()
            finally:
                self._open.pop(session.id, None)  # also if closing failed

    async def close_all(self) -> None:
        await asyncio.gather(*(self.destroy(session) for session in list(self._open.values())))

    async def _close_idle(self) -> None:
        # Sessions with a WebSocket end with that.
        oldest = time.monotonic() - self._idle_timeout
        idle = [
            candidate for candidate in self._open.values() if not candidate.is_attached and candidate.last_used < oldest
        ]
        await asyncio.gather(*(self.destroy(session) for session in idle))

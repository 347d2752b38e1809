"""The open sessions on one engine, by the ids given to agents, without HTTP (`app.py`)."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.engine.base import Engine
from gspo_gym.errors import UnknownNameError
from gspo_gym.remote.gateway.capture import SessionClosedError, SessionLimitError
from gspo_gym.remote.gateway.session import SESSION_IS_OVER, GatewaySession, GatewaySessionSettings

_MAX_CLOSED = 65_536  # to tell a late call from a wrong address


class Gateway:
    """Opens sessions on one engine, and finds them by id.

    Args:
        engine: answers the calls.
        tokenizer: a transformers tokenizer with a chat template.
        template_kwargs: for the chat template, unless a session has some.
        max_sessions: open at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        max_sessions: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._max_sessions = max_sessions
        self._clock = clock
        self._renderers: dict[str, RendererCache] = {}  # by the template's arguments, as JSON
        self._sessions: dict[str, GatewaySession] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    @property
    def num_sessions(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    def open_session(self, settings: GatewaySessionSettings) -> GatewaySession:
        """Open a session with an unguessable id.

        Raises:
            SessionLimitError: the maximum number is open.
        """
        if len(self._sessions) >= self._max_sessions:
            raise SessionLimitError(f"{len(self._sessions)} sessions are open, as many as may be (max_sessions)")
        session = GatewaySession(
            settings,
            engine=self.engine,
            renderers=self._renderers_with(settings.chat_template_kwargs),
            clock=self._clock,
            forget=self._forget,
        )
        self._sessions[session.id] = session
        return session

    def session(self, session_id: str) -> GatewaySession:
        """Return the open session of that id.

        Raises:
            SessionClosedError: it is over. UnknownNameError: there was none lately; names no other session.
        """
        if session_id in self._closed:
            raise SessionClosedError(SESSION_IS_OVER)
        if session_id not in self._sessions:
            raise UnknownNameError(
                "there is no such session; its address was changed on the way, or it is of another run"
            )
        return self._sessions[session_id]

    async def close(self) -> None:
        """Abort all sessions."""
        # A copy, because aborting forgets the session.
        for session in list(self._sessions.values()):
            await session.abort()

    def _forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._closed[session_id] = None
        # The oldest: an agent that calls after so many others is told that there is no such session.
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)

    def _renderers_with(self, template_kwargs: Mapping[str, Any] | None) -> RendererCache:
        kwargs = self._template_kwargs if template_kwargs is None else dict(template_kwargs)
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self._renderers:
            self._renderers[key] = RendererCache(self._tokenizer, template_kwargs=kwargs)
        return self._renderers[key]

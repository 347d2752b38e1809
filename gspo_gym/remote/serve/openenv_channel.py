"""One WebSocket of an OpenEnv client: reads frames, plays the session, answers each with one frame.

Called by `openenv_server.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from gspo_gym.base.strict_json import read_json
from gspo_gym.env.blame import failure_code
from gspo_gym.env.suites.openenv_reading import EXTENSION
from gspo_gym.errors import GymError, RecordError, UsageError
from gspo_gym.remote.serve.openenv_mcp import answer_rpc
from gspo_gym.remote.serve.openenv_sessions import CapacityError, Session, Sessions
from gspo_gym.remote.serve.openenv_wire import (
    ResetRequest,
    ToolAction,
    error_frame,
    message_of,
    observation_data,
    read_action,
    tools_data,
    validation_errors,
    with_call_result,
)


class Channel:
    """Drives one session for one client.

    The session is the socket's own and ends with it; `?session_id=` attaches to one that was made over /mcp instead,
    which stays open.
    """

    def __init__(self, websocket: WebSocket, *, sessions: Sessions, tool_schemas: Sequence[Mapping[str, Any]]) -> None:
        self._websocket, self._sessions, self._tool_schemas = websocket, sessions, tool_schemas

    async def run(self) -> None:
        """Until the client leaves, says "close", or the session cannot go on."""
        await self._websocket.accept()
        with contextlib.suppress(WebSocketDisconnect):  # it may leave while it is being answered
            session = await self._open_session()
            if session is not None:
                await self._drive(session)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it was faster
            await self._websocket.close()

    async def _drive(self, session: Session) -> None:
        try:
            await self._serve(session)
        finally:
            session.is_attached = False
            if session.is_closing or session.is_broken:
                await asyncio.shield(self._sessions.destroy(session))

    async def _open_session(self) -> Session | None:
        """The session; None: there is none, and the client has been told why."""
        wanted = self._websocket.query_params.get("session_id")
        try:
            session = await self._sessions.create() if wanted is None else self._sessions.get(wanted)
            if session.is_attached:
                raise UsageError(f"session {wanted!r} has a WebSocket already")
        except CapacityError as error:
            counts = {"active_sessions": self._sessions.num_active, "max_sessions": self._sessions.max_sessions}
            await self._send(error_frame("CAPACITY_REACHED", str(error), **counts))
            return None
        except UsageError as error:
            await self._send(error_frame("SESSION_ERROR", str(error)))
            return None
        except GymError as error:
            await self._send(error_frame("FACTORY_ERROR", str(error)))
            return None
        session.is_attached, session.is_closing = True, wanted is None
        return session

    async def _serve(self, session: Session) -> None:
        while True:
            received = await self._websocket.receive()
            if received["type"] == "websocket.disconnect":
                return
            frame = await self._answer(received.get("text"), session)
            if frame is None:
                return
            await self._send(frame)
            if session.is_broken:
                return

    async def _answer(self, text: str | None, session: Session) -> dict[str, Any] | None:
        """The frame that answers a client's; None: it said goodbye."""
        try:
            frame = read_json(text if text is not None else "")
        except RecordError as error:
            return error_frame("INVALID_JSON", f"Invalid JSON: {error}")
        kind = frame.get("type") if isinstance(frame, dict) else None
        try:
            match kind:
                case "reset":
                    return await self._reset(frame.get("data", {}), session)
                case "step":
                    return await self._step(frame.get("data"), session)
                case "state":
                    counts = {"episode_id": session.episode_id, "step_count": session.num_steps}
                    return {"type": "state", "data": counts}
                case "mcp":
                    answer = await answer_rpc(
                        frame.get("data"), sessions=self._sessions, tool_schemas=self._tool_schemas, session=session
                    )
                    return {"type": "mcp", "data": answer}
                case "close":
                    return None
        except ValidationError as error:
            return error_frame("VALIDATION_ERROR", "Invalid message", errors=validation_errors(error))
        except GymError as error:
            # OpenEnv has no code for an action that exceeded a limit: our clients read what stands beside it.
            details = {EXTENSION: {"failure": failure_code(error)}} if kind == "step" else {}
            return error_frame("SESSION_ERROR" if session.is_broken else "EXECUTION_ERROR", str(error), **details)
        return error_frame("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _reset(self, data: Any, session: Session) -> dict[str, Any]:
        given = ResetRequest.model_validate(data)
        result = await session.reset(given.seed, given.episode_id, given.options)
        return {"type": "observation", "data": observation_data(result)}

    async def _step(self, data: Any, session: Session) -> dict[str, Any]:
        action = read_action(data, has_tools=bool(self._tool_schemas))
        if isinstance(action, ToolAction) and action.type == "list_tools":
            return {"type": "observation", "data": tools_data(self._tool_schemas)}
        result = await session.act(lambda turn: message_of(action, turn=turn))
        answer = observation_data(result)
        if isinstance(action, ToolAction) and action.tool_name is not None:
            answer = with_call_result(answer, action.tool_name, result)
        return {"type": "observation", "data": answer}

    async def _send(self, frame: Mapping[str, Any]) -> None:
        await self._websocket.send_text(json.dumps(frame))

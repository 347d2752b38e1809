"""Serve an environment over OpenEnv's protocol to other trainers and clients, alone or beside other protocols.

An episode is a WebSocket at /ws: one socket, one session, one environment. Tools are offered in both of OpenEnv's ways
(actions `call_tool` and `list_tools`; JSON-RPC at /mcp and in `mcp` frames). Verified against openenv 0.10.0.

Departures from OpenEnv: HTTP POST /step is refused with 409, because OpenEnv's answers from a fresh environment that
was never reset, which looks like an answer; idle sessions without a WebSocket give up their place to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import fastapi
from fastapi import WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from gspo_gym.base.http import read_json
from gspo_gym.env.blame import failure_code
from gspo_gym.env.registry import resolve
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import ConfigError, GymError, RecordError, UsageError
from gspo_gym.remote.apps.contracts import EXTENSION
from gspo_gym.remote.guard import Guard, failure_status
from gspo_gym.remote.serve.env_source import description_of
from gspo_gym.remote.serve.openenv_sessions import CapacityError, Session, Sessions
from gspo_gym.remote.serve.openenv_wire import (
    RESERVED_TOOL_NAMES,
    Observation,
    ResetRequest,
    TextAction,
    ToolAction,
    ToolObservation,
    answer_rpc,
    error_frame,
    message_of,
    observation_data,
    read_action,
    rpc_error,
    tools_data,
    validation_errors,
    with_call_result,
)

_STATELESS = (
    "HTTP is stateless: this action would meet a fresh environment that was never reset. Play an episode over the "
    "WebSocket at /ws"
)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the environment, read from one instance when the server starts."""

    name: str
    description: str
    tool_schemas: tuple[Mapping[str, Any], ...]


class OpenEnvService:
    """Serves one environment and its sessions in OpenEnv's protocol.

    Attributes:
        sessions: of this server. facts: read from one instance when the server starts.

    Raises:
        UnknownNameError: a name that is not registered.
        ConfigError: a limit is not positive, or no such isolation.
    """

    facts: Facts

    def __init__(
        self,
        env: str | Callable[[], Any],
        *,
        config: Mapping[str, Any] | None,
        isolation: str,
        max_sessions: int,
        step_timeout_seconds: float,
        idle_timeout_seconds: float,
    ) -> None:
        if max_sessions < 1 or not step_timeout_seconds > 0 or not idle_timeout_seconds > 0:
            raise ConfigError(
                "create_openenv_app: expected max_sessions >= 1 and timeouts > 0, got "
                f"{max_sessions}, {step_timeout_seconds} and {idle_timeout_seconds}"
            )
        self.name = resolve(env) if isinstance(env, str) else getattr(env, "__name__", "environment")
        self._description = description_of(env) or self.name
        self.sessions = Sessions(
            isolated_factory(env, config, isolation),
            env_id=self.name,
            max_sessions=max_sessions,
            step_timeout_seconds=step_timeout_seconds,
            idle_timeout_seconds=idle_timeout_seconds,
        )

    def add_to(self, app: fastapi.FastAPI) -> None:
        """Add the routes to an application."""
        app.state.openenv = self
        app.include_router(_ROUTER)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the facts at the start and close all sessions at the end.

        Raises:
            EnvError, EnvTimeoutError, ContractError: the environment cannot be made.
            ConfigError: a tool has a reserved name.
        # One instance is made to be asked for its tools: an environment that cannot be made fails the start.
        """
        self.facts = await _read_facts(self.sessions, self.name, self._description)
        try:
            yield
        finally:
            await self.sessions.close_all()


def create_openenv_app(
    env: str | Callable[[], Any],
    *,
    config: Mapping[str, Any] | None = None,
    isolation: str = "auto",
    max_sessions: int = 8,
    step_timeout_seconds: float = 60.0,
    idle_timeout_seconds: float = 600.0,
    api_key: str | Iterable[str] | None = None,
    allowed_origins: Iterable[str] = (),
    allowed_hosts: Iterable[str] | None = None,
) -> Guard:
    """Return an ASGI application that serves an environment.

    Args:
        env: a registered name, or a class or function without arguments that returns a fresh instance; it need not
            subclass anything.
        config: arguments of the constructor.
        isolation: "thread", "process", or "auto" for the environment's own choice.
        max_sessions: episodes at once; one more is answered CAPACITY_REACHED, and should be tried again later.
        step_timeout_seconds: for each call of an environment's method; a session that misses it is over.
        idle_timeout_seconds: of a session that no WebSocket drives, before it may lose its place to another.
        api_key, allowed_origins, allowed_hosts: see `Guard`.

    Raises:
        UnknownNameError: a name that is not registered.
        ConfigError: a limit is not positive, or no such isolation. When it starts: a tool has a reserved name.
    """
    service = OpenEnvService(
        env,
        config=config,
        isolation=isolation,
        max_sessions=max_sessions,
        step_timeout_seconds=step_timeout_seconds,
        idle_timeout_seconds=idle_timeout_seconds,
    )
    app = joined_app([service], title=f"{service.name} over OpenEnv's protocol")
    return Guard(app, api_key=api_key, allowed_origins=allowed_origins, allowed_hosts=allowed_hosts)


async def _read_facts(sessions: Sessions, name: str, description: str) -> Facts:
    session = await sessions.open_env()
    try:
        schemas = session.tool_schemas
    finally:
        await session.close()
    reserved_names = RESERVED_TOOL_NAMES & {schema["function"]["name"] for schema in schemas}
    if reserved_names:
        raise ConfigError(
            f"{name}: OpenEnv reserves the tool names {sorted(reserved_names)}; call these tools otherwise"
        )
    return Facts(name, description, schemas)


def _service(app: fastapi.FastAPI) -> OpenEnvService:
    service: OpenEnvService = app.state.openenv
    return service


_ROUTER = fastapi.APIRouter()


@_ROUTER.get("/health")
async def health() -> dict[str, str]:
    """Answer that the server runs; needs no key."""
    return {"status": "healthy"}


@_ROUTER.get("/metadata")
async def metadata(request: fastapi.Request) -> dict[str, Any]:
    """Describe the environment."""
    facts = _service(request.app).facts
    about = {"name": facts.name, "description": facts.description, "version": importlib.metadata.version("gspo-gym")}
    return {**about, "readme_content": None, "author": None, "documentation_url": None}


@_ROUTER.get("/schema")
async def schema(request: fastapi.Request) -> dict[str, Any]:
    """Return JSON schemas of actions, observations and states."""
    has_tools = bool(_service(request.app).facts.tool_schemas)
    observation = (ToolObservation if has_tools else Observation).model_json_schema()
    state = {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}}
    return {
        "action": (ToolAction if has_tools else TextAction).model_json_schema(),
        "observation": observation,
        "reset_observation": observation,
        "state": {"type": "object", "properties": state},
    }


@_ROUTER.get("/list_environments")
async def list_environments(request: fastapi.Request) -> list[str]:
    """List the one environment that is served."""
    return [_service(request.app).facts.name]


@_ROUTER.get("/state")
async def state() -> dict[str, Any]:
    """Return the state of a fresh environment, as OpenEnv does; an episode's state is asked for over its WebSocket."""
    return {"episode_id": None, "step_count": 0}


@_ROUTER.post("/reset")
async def reset(request: fastapi.Request) -> JSONResponse:
    """Return the first observation of a fresh environment, which is closed again."""
    sessions = _service(request.app).sessions
    try:
        reset_request = ResetRequest.model_validate(read_json(await request.body() or b"{}"))
    except RecordError as error:
        return JSONResponse({"detail": f"the body is not JSON: {error}"}, 400)
    except ValidationError as error:
        return JSONResponse({"detail": validation_errors(error)}, 422)
    try:
        session = await sessions.create()
    except CapacityError as error:
        return JSONResponse({"detail": f"CAPACITY_REACHED: {error}"}, 503)
    except GymError as error:
        return JSONResponse({"detail": str(error)}, 500)
    try:
        result = await session.reset(reset_request.seed, reset_request.episode_id, reset_request.options)
    except GymError as error:
        return JSONResponse({"detail": str(error)}, failure_status(error, reset_request.options))
    finally:
        await sessions.destroy(session)
    return JSONResponse(observation_data(result))


@_ROUTER.post("/step")
async def step(request: fastapi.Request) -> JSONResponse:
    """Refuse: say the fault of the action, or that there is no episode here."""
    has_tools = bool(_service(request.app).facts.tool_schemas)
    try:
        body = read_json(await request.body() or b"{}")
        read_action(body.get("action") if isinstance(body, dict) else body, has_tools=has_tools)
    except RecordError as error:
        return JSONResponse({"detail": f"the body is not JSON: {error}"}, 400)
    except ValidationError as error:
        return JSONResponse({"detail": validation_errors(error)}, 422)
    return JSONResponse({"detail": _STATELESS}, 409)


@_ROUTER.post("/mcp")
async def mcp(request: fastapi.Request) -> JSONResponse:
    """Answer JSON-RPC: tools/list, tools/call in a session, and OpenEnv's session/create and session/close."""
    try:
        rpc_request = read_json(await request.body())
    except RecordError as error:
        return JSONResponse(rpc_error(None, -32700, f"Parse error: {error}"))
    service = _service(request.app)
    return JSONResponse(
        await answer_rpc(rpc_request, sessions=service.sessions, tool_schemas=service.facts.tool_schemas)
    )


@_ROUTER.websocket("/ws")
async def websocket(socket: fastapi.WebSocket) -> None:
    """Play one session: episodes, one after another."""
    service = _service(socket.app)
    await Channel(socket, sessions=service.sessions, tool_schemas=service.facts.tool_schemas).run()


class Service(Protocol):
    """One protocol of a server."""

    def add_to(self, app: fastapi.FastAPI) -> None:
        """Add its routes to an application. If two services have the same route, the first one's is used."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context that is open while the server runs."""


def joined_app(services: Sequence[Service], *, title: str) -> fastapi.FastAPI:
    """Return one application with the routes of all services, without pages that would describe them to strangers."""

    @contextlib.asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for service in services:
                await stack.enter_async_context(service.running())
            yield

    app = fastapi.FastAPI(title=title, lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    for service in services:
        service.add_to(app)
    return app


class Channel:
    """One client's WebSocket: reads frames, plays a session, and answers each frame with one.

    The session is of the socket and ends with it; `?session_id=` attaches to one that was made over /mcp instead,
    which stays open.
    """

    def __init__(self, websocket: WebSocket, *, sessions: Sessions, tool_schemas: Sequence[Mapping[str, Any]]) -> None:
        self._websocket, self._sessions, self._tool_schemas = websocket, sessions, tool_schemas

    async def run(self) -> None:
        """Answer frames until the client leaves, says "close", or the session cannot go on."""
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
                # Shielded: a server that is stopped still closes the environment.
                await asyncio.shield(self._sessions.destroy(session))

    async def _open_session(self) -> Session | None:
        """Return the session, or None after telling the client why there is none."""
        session_id = self._websocket.query_params.get("session_id")
        try:
            session = await self._sessions.create() if session_id is None else self._sessions.get(session_id)
            # Two clients of one episode would each see half of it.
            if session.is_attached:
                raise UsageError(f"session {session_id!r} has a WebSocket already")
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
        # A session that was made over /mcp outlives the socket.
        session.is_attached, session.is_closing = True, session_id is None
        return session

    async def _serve(self, session: Session) -> None:
        while True:
            event = await self._websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            frame = await self._answer(event.get("text"), session)
            if frame is None:
                return
            await self._send(frame)
            if session.is_broken:
                return

    async def _answer(self, text: str | None, session: Session) -> dict[str, Any] | None:
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
        reset_request = ResetRequest.model_validate(data)
        result = await session.reset(reset_request.seed, reset_request.episode_id, reset_request.options)
        return {"type": "observation", "data": observation_data(result)}

    async def _step(self, data: Any, session: Session) -> dict[str, Any]:
        action = read_action(data, has_tools=bool(self._tool_schemas))
        # Listing is no turn: nothing happens in the environment.
        if isinstance(action, ToolAction) and action.type == "list_tools":
            return {"type": "observation", "data": tools_data(self._tool_schemas)}
        result = await session.act(lambda turn: message_of(action, turn=turn))
        answer = observation_data(result)
        if isinstance(action, ToolAction) and action.tool_name is not None:
            answer = with_call_result(answer, action.tool_name, result)
        return {"type": "observation", "data": answer}

    async def _send(self, frame: Mapping[str, Any]) -> None:
        await self._websocket.send_text(json.dumps(frame))

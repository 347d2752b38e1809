"""The step-wise protocol: one environment, played over HTTP by whoever drives it, step by step.

An episode is a session: /env/{name}/initialize opens it under the client's attempt id, /step plays one action under a
number, /terminate ends it. Each of them may be sent again: an attempt is opened once and a step is played once, however
often a client that lost an answer asks. What does not fit (another body under the same number, a step left out, an
episode that is over) is refused with 409, a session that is gone with 404, and a full server answers 503. Knows no
routes; called by `task_app_server.py`. The client is `env/adapters/step_protocol.py`.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import OrderedDict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gspo_gym.env.blame import failure_code
from gspo_gym.env.workers.isolation import IsolatedFactory
from gspo_gym.env.workers.wire import message_from_json, messages_to_json, step_result_to_json
from gspo_gym.errors import ContractError, GymError, UsageError
from gspo_gym.remote.refusals import RefusalError, failure_status
from gspo_gym.remote.serve.env_source import EnvSource
from gspo_gym.remote.serve.openenv_sessions import CapacityError, Session, Sessions
from gspo_gym.types import Message, StepResult, ToolCall

Json = dict[str, Any]  # Any: JSON

_MAX_ENDED = 10_000  # attempts remembered as over, so that a late request opens none again
_MAX_DESCRIBED = 64
_MAX_ID = 200  # characters


class _Request(BaseModel):
    """Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class InitializeRequest(_Request):
    """Open a session; `seed` names its task, null for one drawn as `splits.next_seed` says.

    `attempt_id` names the session for requests that are sent again; without one, each opens another.
    """

    attempt_id: str | None = Field(default=None, min_length=1, max_length=_MAX_ID)
    seed: int | None = Field(default=None, ge=0)
    config: Json = Field(default_factory=dict)
    options: Json = Field(default_factory=dict)


class StepRequest(_Request):
    """Play one action.

    Attributes:
        env_id: the session's.
        step_id: 0 for the first action; None: the next one, which must not be sent again.
        action: {"message": an assistant message}, {"error": why the model's text is no action}, or
            {"tool_calls": [{"tool", "args"}]}.
    """

    env_id: str = Field(max_length=_MAX_ID)
    step_id: int | None = Field(default=None, ge=0)
    action: Json


class TerminateRequest(_Request):
    """End a session."""

    env_id: str = Field(max_length=_MAX_ID)


class _Attempt:
    """One session as its client knows it."""

    def __init__(self, request: InitializeRequest) -> None:
        self.request = request
        self.lock = asyncio.Lock()  # a request that is sent again waits for the first
        self.session: Session | None = None
        self.opening: Json = {}
        self.last: tuple[int, Json, Json] | None = None  # step id, action, answer


class StepSessions:
    """The sessions of a served environment that are played step by step.

    Args:
        source: which environment.
        sessions: where they are kept, with its limits.
    """

    def __init__(self, source: EnvSource, sessions: Sessions) -> None:
        self._source, self._sessions = source, sessions
        self._attempts: dict[str, _Attempt] = {}  # by attempt id
        self._attempt_of: dict[str, str] = {}  # by session id
        self._ended: OrderedDict[str, None] = OrderedDict()  # attempt ids
        self._described: dict[str, list[Json]] = {}  # tools, by the constructor's arguments
        self._describing = asyncio.Lock()

    async def describe(self, config: Json) -> Json:
        """The tools of the environment with these arguments.

        Raises:
            RefusalError: clients may not set them, or it cannot be made.
        """
        factory = self._source.factory_of(config)
        key = json.dumps(dict(factory.kwargs), sort_keys=True, default=repr)
        async with self._describing:  # one at a time: an environment is made for it, beside those that play
            if key not in self._described:
                while len(self._described) >= _MAX_DESCRIBED:
                    del self._described[next(iter(self._described))]
                self._described[key] = await self._read_tools(factory)
            return {"name": self._source.name, "tool_schemas": self._described[key]}

    async def initialize(self, request: InitializeRequest) -> Json:
        """The first observation, in a new session; the same again for the same attempt.

        Raises:
            RefusalError: no place, the attempt is over or was opened otherwise, or the environment failed.
        """
        attempt_id = request.attempt_id or uuid.uuid4().hex
        if attempt_id in self._ended:
            raise RefusalError(409, "attempt_over", f"attempt {attempt_id!r} is over")
        attempt = self._attempts.setdefault(attempt_id, _Attempt(request))
        if attempt.request != request:
            raise RefusalError(409, "attempt_conflict", f"attempt {attempt_id!r} was opened with other values")
        async with attempt.lock:
            if attempt.session is None:
                if self._attempts.get(attempt_id) is not attempt:  # the one that was waited for failed
                    raise RefusalError(409, "attempt_over", f"attempt {attempt_id!r} could not be opened")
                try:
                    await self._open(attempt, attempt_id)
                except BaseException:
                    self._attempts.pop(attempt_id, None)
                    raise
            return attempt.opening

    async def step(self, request: StepRequest) -> Json:
        """What the environment answers to an action; the same again for the same step.

        Raises:
            RefusalError: the session is gone, the step is not its next or last one, or the environment failed, which
                ends the session.
        """
        attempt = self._attempt(request.env_id)
        async with attempt.lock:
            session = attempt.session
            assert session is not None
            number = session.num_steps if request.step_id is None else request.step_id
            if attempt.last is not None and attempt.last[0] == number:
                if attempt.last[1] != request.action:
                    raise RefusalError(409, "step_conflict", f"step {number} was played with another action")
                return attempt.last[2]
            if number != session.num_steps:
                text = f"expected step {session.num_steps}, got {number}"
                raise RefusalError(409, "step_out_of_order", text)
            result = await self._played(session, request.action)
            answer = {"env_id": session.id, "step_id": number, **_told(result)}
            attempt.last = (number, request.action, answer)
            return answer

    async def terminate(self, request: TerminateRequest) -> Json:
        """Close the session; one that is gone is closed."""
        attempt_id = self._attempt_of.get(request.env_id)
        if attempt_id is not None:
            await self._end(attempt_id)
        return {"ok": True, "env_id": request.env_id}

    async def _read_tools(self, factory: IsolatedFactory) -> list[Json]:
        try:
            env = await self._sessions.open_env(factory)
        except GymError as error:
            raise RefusalError(failure_status(error, factory.kwargs), "env_init_failed", str(error)) from error
        try:
            return [dict(schema) for schema in env.tool_schemas]
        finally:
            await env.close()

    async def _open(self, attempt: _Attempt, attempt_id: str) -> None:
        request = attempt.request
        factory = self._source.factory_of(request.config)
        try:
            session = await self._sessions.create(factory)
        except CapacityError as error:
            raise RefusalError(503, "at_capacity", str(error)) from error
        except GymError as error:
            raise RefusalError(failure_status(error, request.config), "env_init_failed", str(error)) from error
        try:
            result = await session.reset(request.seed, attempt_id, request.options)
        except BaseException as error:
            await self._sessions.destroy(session)
            if isinstance(error, GymError):
                given = {**request.config, **request.options}
                raise RefusalError(failure_status(error, given), "env_reset_failed", str(error)) from error
            raise
        self._forget_lost()
        attempt.session = session
        attempt.opening = {"env_id": session.id, "attempt_id": attempt_id, **_told(result)}
        self._attempt_of[session.id] = attempt_id

    async def _played(self, session: Session, action: Json) -> StepResult:
        error_text = action.get("error")
        message = None if isinstance(error_text, str) else _message_of(action, session.num_steps)
        try:
            if message is None:
                return await session.refuse(str(error_text))
            return await session.act(lambda _turn: message)
        except UsageError as error:
            raise RefusalError(409, "episode_over", str(error)) from error
        except GymError as error:
            if (attempt_id := self._attempt_of.get(session.id)) is not None:
                await self._end(attempt_id)  # half a step was played: nobody knows how much
            raise RefusalError(500, failure_code(error), str(error)) from error

    def _attempt(self, session_id: str) -> _Attempt:
        self._forget_lost()
        attempt_id = self._attempt_of.get(session_id)
        if attempt_id is None:
            raise RefusalError(404, "unknown_session", f"there is no session {session_id!r}; it may have been idle")
        return self._attempts[attempt_id]

    def _forget_lost(self) -> None:
        """Those whose sessions were idle while another needed their place."""
        for attempt_id, attempt in list(self._attempts.items()):
            if attempt.session is not None and not self._sessions.is_open(attempt.session):
                self._forget(attempt_id)

    async def _end(self, attempt_id: str) -> None:
        attempt = self._forget(attempt_id)
        if attempt is not None and attempt.session is not None:
            await self._sessions.destroy(attempt.session)

    def _forget(self, attempt_id: str) -> _Attempt | None:
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None and attempt.session is not None:
            self._attempt_of.pop(attempt.session.id, None)
        self._ended[attempt_id] = None
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return attempt


def _message_of(action: Json, turn: int) -> Message:
    try:
        if "message" in action:
            message = message_from_json(action["message"], where="action.message")
            if message.role != "assistant":
                raise ContractError(f"action.message: expected the role assistant, got {message.role!r}")
            return message
        calls = [
            ToolCall(f"call_{turn}_{index}", str(call["tool"]), dict(call.get("args") or {}))
            for index, call in enumerate(action["tool_calls"])
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise RefusalError(
            422, "bad_action", f'action: expected "message", "error" or "tool_calls" of {{"tool", "args"}}: {error}'
        ) from error
    return Message("assistant", str(action.get("text") or ""), tuple(calls))


def _told(result: StepResult) -> Json:
    """An answer of the environment: short, for any client, and in full as `result`."""
    told = step_result_to_json(result)
    text = "\n\n".join(message.content for message in result.messages)
    return {
        "observation": {"messages": messages_to_json(result.messages), "text": text, "reward_last": result.reward},
        "reward": result.reward,
        "done": result.done,
        "info": told["info"],
        "result": told,
    }

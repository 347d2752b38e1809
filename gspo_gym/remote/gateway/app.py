"""The gateway's HTTP: OpenAI's protocol in front of `gateway.Gateway`, as a bare ASGI application.

No framework, because the URLs follow no table (`gateway_app_urls.py`), a lost answer has to be noticed, and every
episode waits for this code at every turn. Served behind `guard.Guard`, in the engine's event loop (`loop_server.py`).
Headers by which an agent would authenticate elsewhere are not looked at, so they are neither logged nor repeated.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import ClientDisconnect, Request

from gspo_gym.errors import GymError, UnknownNameError
from gspo_gym.remote.gateway.app_errors import failure_reply
from gspo_gym.remote.gateway.gateway import Gateway
from gspo_gym.remote.gateway.openai_wire import (
    RequestError,
    read_body,
    read_chat_request,
    read_completion_request,
    read_flag,
)
from gspo_gym.remote.gateway.openai_wire_answers import (
    JSON_TYPE,
    STREAM_TYPE,
    Envelope,
    answer_id,
    chat_chunks,
    chat_completion,
    chat_logprobs,
    event_stream,
    json_bytes,
    models,
    text_chunks,
    text_completion,
    text_logprobs,
)
from gspo_gym.remote.gateway.openai_wire_responses import read_responses_request, response_events, response_object
from gspo_gym.remote.gateway.replay import Asked, Exchange, Replays, Reply, digest_of
from gspo_gym.remote.gateway.session import GatewaySession
from gspo_gym.remote.gateway.urls import Target, read_target
from gspo_gym.remote.guard import Guard, Receive, Scope, Send
from gspo_gym.types import Message

TRAINED_HEADER = "x-gspo-gym-trained"
"""Of a request, "true" or "false": whether its caller wants it trained on. As `metadata` in the body."""

_MAX_BODY_BYTES = 16_000_000  # every request brings the whole conversation
_MAX_CONCURRENT_REQUESTS = 4_096  # an episode waits for one, sub-agents aside
_RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's clients in all languages

Json = Any  # a JSON value


@dataclass(slots=True)
class _SessionState:
    """What HTTP adds to a session: its exchanges, and the conversations that `previous_response_id` continues."""

    replays: Replays = field(default_factory=Replays)
    conversations: dict[str, tuple[Message, ...]] = field(default_factory=dict)


def create_gateway_app(gateway: Gateway, *, model: str = "policy") -> Guard:
    """What is served: a `GatewayApp` behind its guard. Arguments as there.

    It asks for no key and answers under any host name: the URL of a session, which nobody can guess, is what opens it,
    for as long as the session lasts. Pages in browsers are kept out.
    """
    return Guard(
        GatewayApp(gateway, model=model),
        allowed_hosts=(),
        max_body_bytes=_MAX_BODY_BYTES,
        max_concurrent_requests=_MAX_CONCURRENT_REQUESTS,
    )


class GatewayApp:
    """An ASGI application: POST /t/ID/v1/chat/completions, .../completions, .../responses, and GET .../models.

    Args:
        gateway: with the sessions. It must live in the event loop that serves.
        model: the name under which the policy is listed and answers; requests may name any.
        now: seconds since 1970, for what OpenAI's objects call created.
    """

    def __init__(self, gateway: Gateway, *, model: str = "policy", now: Callable[[], float] = time.time) -> None:
        self._gateway = gateway
        self._model = model
        self._now = now
        self._states: WeakKeyDictionary[GatewaySession, _SessionState] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; or the server's start and end, at which there is nothing to do."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        if scope["type"] != "http":
            return
        target = read_target(scope["path"], scope["query_string"].decode("latin-1"))
        if scope["method"] in ("GET", "HEAD"):
            await _send(send, self._look(scope["path"], target))
        elif scope["method"] == "POST":
            await self._post(target, Request(scope, receive), send)
        else:
            error = RequestError(f"method {scope['method']}: expected POST", code="method_not_allowed")
            await _send(send, failure_reply(error, status=405))

    def replays_of(self, session: GatewaySession) -> Replays:
        """The session's exchanges, for who counts retries."""
        return self._state_of(session).replays

    def _state_of(self, session: GatewaySession) -> _SessionState:
        state = self._states.get(session)
        if state is None:
            state = self._states[session] = _SessionState()
        return state

    def _look(self, path: str, target: Target) -> Reply:
        if path in ("/", "/health"):
            return _json_reply({"status": "ok"})
        if target.api != "models":
            return failure_reply(UnknownNameError(f"GET {path}: expected POST, or GET of /v1/models"))
        try:
            if target.session_id is not None:
                self._gateway.session(target.session_id)
        except GymError as error:
            return failure_reply(error)
        return _json_reply(models(self._model, created=int(self._now())))

    async def _post(self, target: Target, request: Request, send: Send) -> None:
        try:
            body = await request.body()
        except ClientDisconnect:
            return  # half a request: nobody waits for an answer
        try:
            session = self._session(target)
            state = self._state_of(session)
            asked = _asked(target.api, body, request)
            exchange, reply = await state.replays.answer(asked, lambda: self._work(session, target, body, request))
        except Exception as error:
            await _send(send, failure_reply(error))
            return
        await _deliver(session, exchange, reply, asked, send)

    def _session(self, target: Target) -> GatewaySession:
        if target.session_id is None:
            raise UnknownNameError("the URL names no session: expected /t/ID/... or ?cid=ID")
        session = self._gateway.session(target.session_id)
        if target.api not in _APIS:
            raise UnknownNameError(f"expected /v1/ and one of {sorted(_APIS)} behind the session in the URL")
        return session

    async def _work(self, session: GatewaySession, target: Target, body: bytes, request: Request) -> Reply:
        """What a request that is none of the earlier ones is answered."""
        try:
            said = request.headers.get(TRAINED_HEADER)
            is_trained = None if said is None else read_flag(said, name=TRAINED_HEADER)
            return await _APIS[target.api](self, session, read_body(body), is_trained)
        except Exception as error:
            return failure_reply(error)

    async def _chat(self, session: GatewaySession, body: Mapping[str, Json], is_trained: bool | None) -> Reply:
        request = read_chat_request(body)
        call = await session.chat(_marked(request.call, is_trained))
        logprobs = chat_logprobs(call, session.renderer_of(call).decode) if request.options.logprobs else None
        around = self._envelope("chatcmpl", session, call.index)
        if request.options.stream:
            chunks = chat_chunks(call, around, request.options, logprobs=logprobs)
            return Reply(200, STREAM_TYPE, event_stream(chunks), call_index=call.index)
        return _json_reply(chat_completion(call, around, logprobs=logprobs), call.index)

    async def _complete(self, session: GatewaySession, body: Mapping[str, Json], is_trained: bool | None) -> Reply:
        request = read_completion_request(body)
        call = await session.complete(_marked(request.call, is_trained))
        logprobs = text_logprobs(call, session.renderer_of(call).decode) if request.options.logprobs else None
        around = self._envelope("cmpl", session, call.index)
        if request.options.stream:
            chunks = text_chunks(call, around, request.options, logprobs=logprobs)
            return Reply(200, STREAM_TYPE, event_stream(chunks), call_index=call.index)
        return _json_reply(text_completion(call, around, logprobs=logprobs), call.index)

    async def _respond(self, session: GatewaySession, body: Mapping[str, Json], is_trained: bool | None) -> Reply:
        conversations = self._state_of(session).conversations
        request = read_responses_request(body, previous=conversations)
        call = await session.chat(_marked(request.call, is_trained))
        around = self._envelope("resp", session, call.index)
        conversations[around.answer_id] = (*request.conversation, call.answer)
        response = response_object(call, around, body)
        if request.options.stream:
            return Reply(200, STREAM_TYPE, response_events(response), call_index=call.index)
        return _json_reply(response, call.index)

    def _envelope(self, prefix: str, session: GatewaySession, index: int) -> Envelope:
        return Envelope(answer_id(prefix, session.id, index), int(self._now()), self._model)


_Api = Callable[[GatewayApp, GatewaySession, Mapping[str, Json], bool | None], Awaitable[Reply]]
_APIS: Mapping[str, _Api] = {
    "chat": GatewayApp._chat,
    "completions": GatewayApp._complete,
    "responses": GatewayApp._respond,
}


def _marked(call: Any, is_trained: bool | None) -> Any:  # Any: either of the two calls, which comes back
    return call if is_trained is None else dataclasses.replace(call, is_trained=is_trained)


def _asked(api: str, body: bytes, request: Request) -> Asked:
    count = request.headers.get(_RETRY_HEADER, "")
    return Asked(
        digest=digest_of(api, body),
        key=request.headers.get("idempotency-key"),
        retry_count=int(count) if count.isdecimal() and len(count) < 10 else None,
        has_gone=lambda: _has_gone(request.receive),
    )


async def _has_gone(receive: Receive) -> bool:
    """Whether the client has hung up: if so, what is received next is there already. The body was received before."""
    receiving = asyncio.ensure_future(receive())
    await asyncio.sleep(0)
    if receiving.done():
        return receiving.result()["type"] == "http.disconnect"  # type: ignore[no-any-return]  # ASGI's are untyped
    receiving.cancel()
    return False


async def _deliver(session: GatewaySession, exchange: Exchange, reply: Reply, asked: Asked, send: Send) -> None:
    """Send an answer, if there is anybody left to send it to, and say so."""
    has_gone = await asked.has_gone()
    if not has_gone:
        await _send(send, reply)
    exchange.finish(asked, is_delivered=not has_gone)
    if reply.call_index is not None:
        session.note_delivery(reply.call_index, is_delivered=exchange.is_delivered)


def _json_reply(value: Json, call_index: int | None = None) -> Reply:
    return Reply(200, JSON_TYPE, json_bytes(value), call_index=call_index)


async def _send(send: Send, reply: Reply) -> None:
    headers = {"content-type": reply.content_type, "content-length": str(len(reply.body)), **dict(reply.headers)}
    wire = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": wire})
    await send({"type": "http.response.body", "body": reply.body})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return

"""The gateway's HTTP side: OpenAI's protocol in front of `gateway.Gateway`, as a bare ASGI application.

No framework, because the URLs follow no route table, a lost answer has to be noticed, and every episode waits for this
code at every turn. It is served behind `Guard`, in the engine's event loop (`LoopServer`). Authentication headers
meant for other services are not read, logged or repeated.

Errors get the status, code and envelope by which OpenAI's clients know them. Those clients try again at some statuses;
`x-should-retry: false` goes with what a retry does not change.

Client code appends to URLs, and some of it to the query. Therefore the session id stands in the path and again in the
query, and `/v1` and `/chat/completions` are understood in any place. An id that was itself changed is
unknown and an error.

    400  context_length_exceeded, conversation_not_renderable, invalid_value, unsupported_value, idempotency_key_reused:
         asking again changes nothing
    404  not_found; 409 session_closed; 429 session_limit_exceeded (`max_calls`)
    422  invalid_tool_call: a tool had to be called, and what was sampled is no valid call of it
    503  engine_error, engine_timeout: try again; engine_poisoned: do not

Answers carry `gspo_gym: {"call", "parse", "error"}`: which call of the session it is, and what is wrong with text that
was to be an action.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl
from weakref import WeakKeyDictionary

from starlette.requests import ClientDisconnect, Request

from gspo_gym.base.messages import ConversationReader
from gspo_gym.errors import (
    GymError,
    UnknownNameError,
)
from gspo_gym.remote.gateway.openai_wire import (
    RequestError,
    read_body,
    read_chat_request,
    read_completion_request,
    read_flag,
)
from gspo_gym.remote.gateway.openai_wire_answers import (
    STREAM_TYPE,
    Envelope,
    answer_id,
    chat_chunks,
    chat_completion,
    chat_logprobs,
    event_stream,
    models,
    read_responses_request,
    response_events,
    response_object,
    text_chunks,
    text_completion,
    text_logprobs,
)
from gspo_gym.remote.gateway.replay import (
    Asked,
    Exchange,
    Replays,
    Reply,
    digest_of,
    failure_reply,
    json_reply,
    live,
    send_reply,
)
from gspo_gym.remote.gateway.session import Gateway, GatewaySession
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
    replays: Replays = field(default_factory=Replays)
    conversations: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    reader: ConversationReader = field(default_factory=ConversationReader)


def create_gateway_app(gateway: Gateway, *, model: str = "policy") -> Guard:
    """Return a `GatewayApp` behind its guard. Arguments as there.

    It asks for no key and answers under any host name: a session's unguessable URL opens it, while the session lasts.
    Pages in browsers are kept out.
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
        gateway: holds the sessions. It must live in the event loop that serves.
        model: the name under which the policy is listed and answers; requests may name any.
        now: seconds since 1970, for `created` in OpenAI's objects.
    """

    def __init__(self, gateway: Gateway, *, model: str = "policy", now: Callable[[], float] = time.time) -> None:
        self._gateway = gateway
        self._model = model
        self._now = now
        self._states: WeakKeyDictionary[GatewaySession, _SessionState] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
        if scope["type"] != "http":
            return
        target = read_target(scope["path"], scope["query_string"].decode("latin-1"))
        # HEAD, because some clients ask it of a base URL first.
        if scope["method"] in ("GET", "HEAD"):
            await send_reply(send, self._look(scope["path"], target))
        elif scope["method"] == "POST":
            await self._post(target, Request(scope, receive), send)
        else:
            error = RequestError(f"method {scope['method']}: expected POST", code="method_not_allowed")
            await send_reply(send, failure_reply(error, status=405))

    def replays_of(self, session: GatewaySession) -> Replays:
        """Return the session's exchanges, to count retries."""
        return self._state_of(session).replays

    def _state_of(self, session: GatewaySession) -> _SessionState:
        state = self._states.get(session)
        if state is None:
            state = self._states[session] = _SessionState()
        return state

    def _look(self, path: str, target: Target) -> Reply:
        if path in ("/", "/health"):
            return json_reply({"status": "ok"})
        if target.api != "models":
            return failure_reply(UnknownNameError(f"GET {path}: expected POST, or GET of /v1/models"))
        try:
            if target.session_id is not None:
                self._gateway.session(target.session_id)
        except GymError as error:
            return failure_reply(error)
        return json_reply(models(self._model, created=int(self._now())))

    async def _post(self, target: Target, request: Request, send: Send) -> None:
        try:
            body = await request.body()
        except ClientDisconnect:
            return  # half a request: no answer is waited for
        try:
            session = self._session(target)
            state = self._state_of(session)
            identity = _request_identity(target.api, body, request)
            exchange, reply = await state.replays.answer(identity, lambda: self._work(session, target, body, request))
        except Exception as error:
            # Whatever it was, the app gets OpenAI's error object and not the server's.
            await send_reply(send, failure_reply(error))
            return
        await _deliver(session, exchange, reply, identity, send)

    def _session(self, target: Target) -> GatewaySession:
        if target.session_id is None:
            raise UnknownNameError("the URL names no session: expected /t/ID/... or ?cid=ID")
        session = self._gateway.session(target.session_id)
        if target.api not in _APIS:
            raise UnknownNameError(f"expected /v1/ and one of {sorted(_APIS)} behind the session in the URL")
        return session

    async def _work(self, session: GatewaySession, target: Target, body: bytes, request: Request) -> Reply:
        try:
            flag_text = request.headers.get(TRAINED_HEADER)
            is_trained = None if flag_text is None else read_flag(flag_text, name=TRAINED_HEADER)
            return await _APIS[target.api](self, session, read_body(body), is_trained)
        # As a reply, so that a retry of the same request gets it, too, if it is final.
        except Exception as error:
            return failure_reply(error)

    async def _chat(self, session: GatewaySession, body: Mapping[str, Json], is_trained: bool | None) -> Reply:
        request = read_chat_request(body, reader=self._state_of(session).reader)
        call = await session.chat(_mark_trained(request.call, is_trained))
        logprobs = chat_logprobs(call, session.renderer_of(call).decode) if request.options.logprobs else None
        around = self._envelope("chatcmpl", session, call.index)
        if request.options.stream:
            chunks = chat_chunks(call, around, request.options, logprobs=logprobs)
            return Reply(200, STREAM_TYPE, event_stream(chunks), call_index=call.index)
        return json_reply(chat_completion(call, around, logprobs=logprobs), call.index)

    async def _complete(self, session: GatewaySession, body: Mapping[str, Json], is_trained: bool | None) -> Reply:
        request = read_completion_request(body)
        call = await session.complete(_mark_trained(request.call, is_trained))
        logprobs = text_logprobs(call, session.renderer_of(call).decode) if request.options.logprobs else None
        around = self._envelope("cmpl", session, call.index)
        if request.options.stream:
            chunks = text_chunks(call, around, request.options, logprobs=logprobs)
            return Reply(200, STREAM_TYPE, event_stream(chunks), call_index=call.index)
        return json_reply(text_completion(call, around, logprobs=logprobs), call.index)

    async def _respond(self, session: GatewaySession, body: Mapping[str, Json], is_trained: bool | None) -> Reply:
        # `previous_response_id` continues what the gateway said itself, so each answer is kept.
        conversations = self._state_of(session).conversations
        request = read_responses_request(body, previous=conversations)
        call = await session.chat(_mark_trained(request.call, is_trained))
        around = self._envelope("resp", session, call.index)
        conversations[around.answer_id] = (*request.conversation, call.answer)
        response = response_object(call, around, body)
        if request.options.stream:
            return Reply(200, STREAM_TYPE, response_events(response), call_index=call.index)
        return json_reply(response, call.index)

    def _envelope(self, prefix: str, session: GatewaySession, index: int) -> Envelope:
        return Envelope(answer_id(prefix, session.id, index), int(self._now()), self._model)


_Api = Callable[[GatewayApp, GatewaySession, Mapping[str, Json], bool | None], Awaitable[Reply]]
_APIS: Mapping[str, _Api] = {
    "chat": GatewayApp._chat,
    "completions": GatewayApp._complete,
    "responses": GatewayApp._respond,
}


def _mark_trained(call: Any, is_trained: bool | None) -> Any:  # Any: either of the two calls, which comes back
    return call if is_trained is None else dataclasses.replace(call, is_trained=is_trained)


def _request_identity(api: str, body: bytes, request: Request) -> Asked:
    count = request.headers.get(_RETRY_HEADER, "")
    return Asked(
        digest=digest_of(api, body),
        key=request.headers.get("idempotency-key"),
        # A count of ten digits is no count of retries.
        retry_count=int(count) if count.isdecimal() and len(count) < 10 else None,
        has_gone=lambda: _has_gone(request.receive),
    )


async def _has_gone(receive: Receive) -> bool:
    # The body was received before, so only a disconnect can be waiting.
    receiving = asyncio.ensure_future(receive())
    await asyncio.sleep(0)  # a waiting message is delivered at once
    if receiving.done():
        return receiving.result()["type"] == "http.disconnect"  # type: ignore[no-any-return]  # ASGI's are untyped
    receiving.cancel()
    return False


async def _deliver(session: GatewaySession, exchange: Exchange, reply: Reply, identity: Asked, send: Send) -> None:
    has_gone = await identity.has_gone()
    if not has_gone:
        await send_reply(send, reply)
    # An answer that reached no caller is asked for again, or its call is no part of the episode.
    exchange.finish(identity, is_delivered=not has_gone)
    if reply.call_index is not None:
        session.note_delivery(reply.call_index, is_delivered=exchange.is_delivered)


Api = Literal["chat", "completions", "responses", "models", "unknown"]

_IN_PATH = re.compile(r"/t/([^/]*)(/.*|$)")
# The names under which programs pass the id on in a query, in the order in which they look for it.
_IN_QUERY = ("cid", "trace_correlation_id", "trace")
_ENDS_ID = re.compile(r"[/?&]")
# A base URL, with or without its version and the path of the chat API; programs may append both once more.
_CHAT = re.compile(r"(/v1)*(/chat/completions)*(/v1/chat/completions)?/?")
_OTHERS: tuple[tuple[Api, re.Pattern[str]], ...] = tuple(
    (api, re.compile(rf"(/v1)*/{api}/?")) for api in ("completions", "responses", "models")
)


@dataclass(frozen=True, slots=True)
class Target:
    """A request's target. `session_id` is None if its URL names none; `api` is "unknown" if it has no such route."""

    session_id: str | None
    api: Api


def rollout_url(base_url: str, session_id: str) -> str:
    """Return a task app's inference URL, which survives all known ways of changing it.

    >>> rollout_url("http://127.0.0.1:8003", "Xy_1")
    'http://127.0.0.1:8003/t/Xy_1/v1/chat/completions?cid=Xy_1'
    """
    return f"{openai_base_url(base_url, session_id)}/chat/completions?cid={session_id}"


def openai_base_url(base_url: str, session_id: str) -> str:
    """Return the session's `base_url` for an OpenAI client.

    >>> openai_base_url("http://127.0.0.1:8003/", "Xy_1")
    'http://127.0.0.1:8003/t/Xy_1/v1'
    """
    return f"{base_url.rstrip('/')}/t/{session_id}/v1"


def read_target(path: str, query: str) -> Target:
    """Read the session and the API of a request; an id in the path wins over one in the query.

    >>> read_target("/t/Xy_1/v1/v1/chat/completions", "")
    Target(session_id='Xy_1', api='chat')
    >>> read_target("/v1", "cid=Xy_1/v1/chat/completions")
    Target(session_id='Xy_1', api='chat')
    """
    # Code that appends a query of its own loses one in the query, and none in the path.
    match = _IN_PATH.fullmatch(path)
    if match:
        return Target(match[1], _api_of(match[2]))
    return Target(_id_in_query(query), _api_of(path))


def _id_in_query(query: str) -> str | None:
    values = dict(reversed(parse_qsl(query)))  # reversed: the first of each name counts
    for name in _IN_QUERY:
        if name in values:
            return _ENDS_ID.split(values[name], maxsplit=1)[0]
    return None


def _api_of(tail: str) -> Api:
    if _CHAT.fullmatch(tail):
        return "chat"
    return next((api for api, pattern in _OTHERS if pattern.fullmatch(tail)), "unknown")

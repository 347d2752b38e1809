"""A model behind OpenAI's protocol, for people and programs: no sessions, nothing captured, several answers at once.

The gateway's wire and its parsing of answers, but every request stands alone. Chat streams while it is sampled. A
client that hangs up ends its request, and with it the work of the engine.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request

from gspo_gym.base.loops import all_of
from gspo_gym.chat.plain import ToolsIn
from gspo_gym.chat.renderer import Renderer, RendererCache
from gspo_gym.engine.base import Engine
from gspo_gym.errors import UnknownNameError
from gspo_gym.remote.gateway.app import Target, read_target
from gspo_gym.remote.gateway.capture import CapturedCall
from gspo_gym.remote.gateway.openai_wire import (
    AnswerOptions,
    ChatRequest,
    RequestError,
    read_body,
    read_chat_request,
    read_completion_request,
    read_scored_prompt,
    shown,
)
from gspo_gym.remote.gateway.openai_wire_answers import (
    STREAM_TYPE,
    Envelope,
    answer_id,
    chat_chunks,
    chat_completion,
    chat_logprobs,
    event_stream,
    json_bytes,
    models,
    read_responses_request,
    response_events,
    response_object,
    scored_prompt,
    text_chunks,
    text_completion,
    text_logprobs,
)
from gspo_gym.remote.gateway.replay import Reply, failure_reply, json_reply, live, send_reply
from gspo_gym.remote.gateway.session import GatewaySession, GatewaySessionSettings
from gspo_gym.remote.gateway.slices import GrowingText, SlicedEngine
from gspo_gym.remote.guard import Guard, Receive, Scope, Send, until_gone
from gspo_gym.seeding import child_seed
from gspo_gym.types import Sampling

_MAX_CHOICES = 64
_MAX_BODY_BYTES = 16_000_000  # every request brings the whole conversation
_MAX_SEED = 2**63

Json = Any  # a JSON value
Chunk = dict[str, Json]


@dataclass(frozen=True, slots=True)
class Served:
    """The served model.

    Attributes:
        engine: samples. It must live in the event loop that serves.
        tokenizer: a transformers tokenizer with a chat template (Any: untyped).
        name: under which it is listed; requests for another one are refused.
        max_output_tokens: of an answer that asks for no limit.
        sampling: of requests that do not say otherwise.
        template_kwargs: for the chat template.
        tools_in: where the model reads what tools there are; see `Renderer`.
        score: returns the logprob of each token after those before it, 0 of the first; None: it cannot.
        facts: more of the model's entry in /v1/models. fingerprint: of its weights, in answers with such logprobs.
    """

    engine: Engine
    tokenizer: Any
    name: str
    max_output_tokens: int
    sampling: Sampling
    template_kwargs: Mapping[str, Json]
    tools_in: ToolsIn = "auto"
    score: Callable[[Sequence[int]], Awaitable[list[float]]] | None = None
    facts: Mapping[str, Json] = field(default_factory=dict)
    fingerprint: str | None = None


def create_model_app(served: Served, *, api_key: str | None = None) -> Guard:
    """Return a `ModelApp` behind its guard; `api_key` None: anyone who can connect may ask."""
    return Guard(ModelApp(served), api_key=api_key, max_body_bytes=_MAX_BODY_BYTES)


class ModelApp:
    """An ASGI application: POST /v1/chat/completions, /v1/completions, /v1/responses, and GET /v1/models.

    Args:
        served: the model.
        now: seconds since 1970, for `created` in OpenAI's objects.
    """

    def __init__(self, served: Served, *, now: Callable[[], float] = time.time) -> None:
        self._served = served
        self._now = now
        self._renderers = RendererCache(
            served.tokenizer, template_kwargs=served.template_kwargs, tools_in=served.tools_in
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the server's start and end."""
        if scope["type"] == "lifespan":
            await live(receive, send)
        if scope["type"] != "http":
            return
        target = read_target(scope["path"], "")
        if scope["method"] in ("GET", "HEAD"):
            await send_reply(send, self._look(scope["path"], target))
        elif scope["method"] == "POST":
            await self._post(target, Request(scope, receive), send)
        else:
            error = RequestError(f"method {scope['method']}: expected POST", code="method_not_allowed")
            await send_reply(send, failure_reply(error, status=405))

    def _look(self, path: str, target: Target) -> Reply:
        if path in ("/", "/health"):
            return json_reply({"status": "ok"})
        model_list = models(self._served.name, created=int(self._now()), facts=self._served.facts)
        if target.api == "models":
            return json_reply(model_list)
        if path.removeprefix("/v1/models/") == self._served.name:
            return json_reply(model_list["data"][0])
        return failure_reply(UnknownNameError(f"GET {path}: expected POST, or GET of /v1/models"))

    async def _post(self, target: Target, request: Request, send: Send) -> None:
        """Answer, unless the client hangs up first: then stop sampling for it."""
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        answering = asyncio.create_task(self._answer(target, body, send))
        leaving = asyncio.create_task(until_gone(request.receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, target: Target, body: bytes, send: Send) -> None:
        stream = _Stream(send)
        try:
            if target.api not in _APIS:
                raise UnknownNameError(f"expected /v1/ and one of {sorted(_APIS)}")
            read = read_body(body)
            self._require_model(read.get("model"))
            reply = await _APIS[target.api](self, read, stream)
            if reply is not None:
                await send_reply(send, reply)
        except Exception as error:
            failure = failure_reply(error)
            await (stream.fail(failure) if stream.has_begun else send_reply(send, failure))

    def _require_model(self, name: Json) -> None:
        if name != self._served.name:
            raise UnknownNameError(f"model: expected {self._served.name!r}, the one served here, got {shown(name)}")

    async def _chat(self, body: Mapping[str, Json], stream: _Stream) -> Reply | None:
        request = read_chat_request(body, max_choices=_MAX_CHOICES)
        number, seed, around = body.get("n") or 1, _seed(body), self._envelope("chatcmpl")
        choices = [_Choice(self._renderers.for_tools(request.call.tools), request, index) for index in range(number)]

        async def sample(choice: _Choice, grown: Callable[[Sequence[int]], None] | None) -> CapturedCall:
            slicing_engine = SlicedEngine(self._served.engine, grown=grown, ends=choice.text.ends)
            async with self._session(around, seed, choice.index, slicing_engine) as session:
                return await session.chat(request.call)

        if not request.options.stream:
            calls = await all_of(sample(choice, None) for choice in choices)
            answers = [
                chat_completion(call, around, logprobs=choice.logprobs(call))
                for choice, call in zip(choices, calls, strict=True)
            ]
            return json_reply(_join_answers(answers))
        queue: asyncio.Queue[list[Chunk]] = asyncio.Queue()

        async def tell(choice: _Choice) -> CapturedCall:
            call = await sample(choice, lambda ids: queue.put_nowait(choice.grown(around, ids)))
            queue.put_nowait(list(choice.ended(call, around)))
            return call

        telling = asyncio.ensure_future(all_of(tell(choice) for choice in choices))
        telling.add_done_callback(lambda _: queue.put_nowait([]))
        try:
            while not (telling.done() and queue.empty()):
                await stream.send(await queue.get())
            calls = await telling
        finally:
            telling.cancel()
        await stream.end([_usage_chunk(calls, around)] if request.options.include_usage else [])
        return None

    async def _complete(self, body: Mapping[str, Json], _: _Stream) -> Reply:
        around = self._envelope("cmpl")
        if body.get("prompt_logprobs") is not None:
            return json_reply(await self._score(body, around))
        request = read_completion_request(body)
        ends = GrowingText(self._renderers.for_tools(()), request.call.stop).ends
        async with self._session(around, _seed(body), 0, SlicedEngine(self._served.engine, ends=ends)) as session:
            call = await session.complete(request.call)
        decode = self._renderers.for_tools(()).decode
        logprobs = text_logprobs(call, decode) if request.options.logprobs else None
        if request.options.stream:
            return _stream_reply(event_stream(text_chunks(call, around, request.options, logprobs=logprobs)))
        return json_reply(text_completion(call, around, logprobs=logprobs))

    async def _score(self, body: Mapping[str, Json], around: Envelope) -> Chunk:
        """Return the prompt's logprobs, in the fields of vLLM's answer; nothing is sampled."""
        if self._served.score is None:
            raise RequestError("prompt_logprobs: not known here; serve with --engine local", param="prompt_logprobs")
        token_ids = read_scored_prompt(body)
        longest = self._served.engine.capabilities.max_model_len
        if len(token_ids) > longest:
            raise RequestError(
                f"prompt: expected at most {longest} tokens, got {len(token_ids)}",
                code="context_length_exceeded",
                param="prompt",
            )
        logprobs = await self._served.score(token_ids)
        return scored_prompt(token_ids, logprobs, around, fingerprint=self._served.fingerprint)

    async def _respond(self, body: Mapping[str, Json], _: _Stream) -> Reply:
        request = read_responses_request(body, previous={})
        around = self._envelope("resp")
        async with self._session(around, _seed(body), 0, SlicedEngine(self._served.engine)) as session:
            call = await session.chat(request.call)
        response = response_object(call, around, body)
        return _stream_reply(response_events(response)) if request.options.stream else json_reply(response)

    def _session(self, around: Envelope, seed: int, index: int, engine: SlicedEngine) -> _OneSession:
        served_model = self._served
        settings = GatewaySessionSettings(
            name=f"{around.answer_id}/{index}",
            sampling_seed=child_seed(seed, "choice", index),
            max_output_tokens=served_model.max_output_tokens,
            max_model_len=served_model.engine.capabilities.max_model_len,
            sampling=served_model.sampling,
        )
        return _OneSession(
            GatewaySession(
                settings, engine=engine, renderers=self._renderers, clock=time.monotonic, forget=lambda _: None
            )
        )

    def _envelope(self, prefix: str) -> Envelope:
        return Envelope(answer_id(prefix, secrets.token_hex(8), 0), int(self._now()), self._served.name)


_Api = Callable[["ModelApp", Mapping[str, Json], "_Stream"], Awaitable[Reply | None]]
_APIS: Mapping[str, _Api] = {
    "chat": ModelApp._chat,
    "completions": ModelApp._complete,
    "responses": ModelApp._respond,
}


class _OneSession:
    """A session for the length of a block; the engine forgets it at the end."""

    def __init__(self, session: GatewaySession) -> None:
        self._session = session

    async def __aenter__(self) -> GatewaySession:
        return self._session

    async def __aexit__(self, *_: object) -> None:
        await self._session.abort()


class _Choice:
    """One of a request's answers, as it grows."""

    def __init__(self, renderer: Renderer, request: ChatRequest, index: int) -> None:
        self.index = index
        self.text = GrowingText(renderer, request.call.stop, has_tools=bool(request.call.tools))
        self._renderer = renderer
        self._options = request.options
        self._has_begun = False

    def logprobs(self, call: CapturedCall) -> Json:
        return chat_logprobs(call, self._renderer.decode) if self._options.logprobs else None

    def grown(self, around: Envelope, token_ids: Sequence[int]) -> list[Chunk]:
        """Return the chunks of what is new, the first time with the role."""
        deltas = [] if self._has_begun else [{"role": "assistant", "content": ""}]
        self._has_begun = True
        reasoning, content = self.text.grow(token_ids)
        deltas += [{"reasoning_content": reasoning}] if reasoning else []
        deltas += [{"content": content}] if content else []
        return [self._chunk(around, delta) for delta in deltas]

    def ended(self, call: CapturedCall, around: Envelope) -> Iterator[Chunk]:
        """Yield the chunks of the finished answer, without what was sent before."""
        reasoning, content = self.text.rest(call.answer)
        logprobs = self.logprobs(call)
        for chunk in chat_chunks(call, around, AnswerOptions(), logprobs=logprobs):
            choice = chunk["choices"][0]
            delta = choice["delta"]
            if "role" in delta:
                continue
            if "reasoning_content" in delta:
                delta["reasoning_content"] = reasoning
            elif "content" in delta:
                delta["content"] = content
            if any(delta.values()) or choice["finish_reason"] or choice["logprobs"]:
                choice["index"] = self.index
                yield chunk

    def _chunk(self, around: Envelope, delta: Mapping[str, Json]) -> Chunk:
        choice = {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**_head(around), "choices": [choice]}


class _Stream:
    """Server-sent events, begun by the first of them: what fails before is an answer with a status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def send(self, chunks: Sequence[Chunk]) -> None:
        """Send chunks, if there are some."""
        await self._write(b"".join(b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks))

    async def end(self, chunks: Sequence[Chunk]) -> None:
        """Send the last chunks, and the end."""
        await self._write(event_stream(iter(chunks)), is_last=True)

    async def fail(self, reply: Reply) -> None:
        """End with an error, which OpenAI's clients raise."""
        await self._write(b"data: " + reply.body + b"\n\n", is_last=True)

    async def _write(self, body: bytes, *, is_last: bool = False) -> None:
        if not body and not is_last:
            return
        if not self.has_begun:
            self.has_begun = True
            headers = [(b"content-type", STREAM_TYPE.encode()), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _seed(body: Mapping[str, Json]) -> int:
    seed = body.get("seed")
    if seed is None:
        return secrets.randbelow(_MAX_SEED)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _MAX_SEED:
        raise RequestError(f"seed: expected a whole number from 0 to 2**63 - 1, got {shown(seed)}", param="seed")
    return seed


def _join_answers(answers: Sequence[Chunk]) -> Chunk:
    """Return several answers as one object with as many choices; the prompt was read once."""
    first = answers[0]
    num_sampled = sum(answer["usage"]["completion_tokens"] for answer in answers)
    usage = {**first["usage"], "completion_tokens": num_sampled}
    usage["total_tokens"] = usage["prompt_tokens"] + num_sampled
    choices = [{**answer["choices"][0], "index": index} for index, answer in enumerate(answers)]
    return {**first, "choices": choices, "usage": usage}


def _usage_chunk(calls: Sequence[CapturedCall], around: Envelope) -> Chunk:
    num_read, num_sampled = calls[0].num_prompt_tokens, sum(call.num_sampled_tokens for call in calls)
    usage = {"prompt_tokens": num_read, "completion_tokens": num_sampled, "total_tokens": num_read + num_sampled}
    return {**_head(around), "choices": [], "usage": usage}


def _head(around: Envelope) -> Chunk:
    kind = "chat.completion.chunk"
    return {"id": around.answer_id, "object": kind, "created": around.created, "model": around.model}


def _stream_reply(body: bytes) -> Reply:
    return Reply(200, STREAM_TYPE, body)

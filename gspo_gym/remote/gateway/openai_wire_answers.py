"""The gateway's answers -> OpenAI's objects: chat completions, text completions, their streams, models and errors.

A stream is written from the finished answer, so that it always ends as it should. What OpenAI has no word for stands in
the extra field `gspo_gym`: which call of the session it was, and what became of parsing it. No I/O. Called by
`gateway_app.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.base.messages import message_to_wire
from gspo_gym.remote.gateway.capture import CapturedCall
from gspo_gym.remote.gateway.openai_wire import AnswerOptions

Json = Any  # a JSON value

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_UNREADABLE = "\ufffd"  # what a token is decoded to that is only a part of a character


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands around every answer: `answer_id` is unique to the call, `created` in seconds since 1970."""

    answer_id: str
    created: int
    model: str


def answer_id(prefix: str, session_id: str, index: int) -> str:
    """The same for the same call, whoever asks; says nothing about the session.

    >>> answer_id("chatcmpl", "Xy_1", 0) == answer_id("chatcmpl", "Xy_1", 0) != answer_id("chatcmpl", "Xy_1", 1)
    True
    """
    digest = hashlib.sha256(f"{session_id}/{index}".encode()).hexdigest()
    return f"{prefix}-{digest[:24]}"


def chat_completion(call: CapturedCall, around: Envelope, *, logprobs: Json = None) -> dict[str, Json]:
    """A `chat.completion`. `logprobs` as `chat_logprobs` writes them, None for none."""
    choice = {
        "index": 0,
        "message": answer_message(call),
        "logprobs": logprobs,
        "finish_reason": call.finish_reason,
    }
    return {**_head("chat.completion", call, around), "choices": [choice], "usage": usage_of(call)}


def chat_chunks(
    call: CapturedCall, around: Envelope, options: AnswerOptions, *, logprobs: Json = None
) -> Iterator[dict[str, Json]]:
    """The same as `chat.completion.chunk` objects: who speaks, what is said, each call, why it ended, the usage."""
    head = _head("chat.completion.chunk", call, around)
    if options.include_usage:
        head["usage"] = None  # in all but the last

    def chunk(delta: dict[str, Json], finish: str | None = None, logprobs: Json = None) -> dict[str, Json]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**head, "choices": [choice]}

    message = answer_message(call)
    yield chunk({"role": "assistant", "content": ""})
    if "reasoning_content" in message:
        yield chunk({"reasoning_content": message["reasoning_content"]})
    if message["content"] or logprobs is not None:
        yield chunk({"content": message["content"] or ""}, logprobs=logprobs)
    for index, tool_call in enumerate(message.get("tool_calls", ())):
        function = tool_call["function"]
        opening = {**tool_call, "index": index, "function": {**function, "arguments": ""}}
        yield chunk({"tool_calls": [opening]})
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
    yield chunk({}, finish=call.finish_reason)
    if options.include_usage:
        yield {**head, "choices": [], "usage": usage_of(call)}


def text_completion(call: CapturedCall, around: Envelope, *, logprobs: Json = None) -> dict[str, Json]:
    """A `text_completion`. `logprobs` as `text_logprobs` writes them, None for none."""
    finish = "stop" if call.finish_reason == "tool_calls" else call.finish_reason
    choice = {"index": 0, "text": call.answer.content, "logprobs": logprobs, "finish_reason": finish}
    return {**_head("text_completion", call, around), "choices": [choice], "usage": usage_of(call)}


def text_chunks(
    call: CapturedCall, around: Envelope, options: AnswerOptions, *, logprobs: Json = None
) -> Iterator[dict[str, Json]]:
    """The same as a stream: the text with why it ended, and the usage."""
    whole = text_completion(call, around, logprobs=logprobs)
    usage = whole.pop("usage")
    yield whole
    if options.include_usage:
        yield {**whole, "choices": [], "usage": usage}


def answer_message(call: CapturedCall) -> dict[str, Json]:
    """The assistant's message: content null where there is only a call, reasoning where there was some."""
    wire = message_to_wire(call.answer)
    if call.answer.tool_calls and not call.answer.content:
        wire["content"] = None
    if call.answer.reasoning_content is not None:
        wire["reasoning_content"] = call.answer.reasoning_content
    return {**wire, "refusal": None}


def usage_of(call: CapturedCall) -> dict[str, int]:
    """Tokens read and sampled."""
    read, sampled = call.num_prompt_tokens, call.num_sampled_tokens
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def about(call: CapturedCall) -> dict[str, Json]:
    """The extra field: enough for an agent loop to do with a malformed answer what one in this process does."""
    return {"call": call.index, "parse": call.parse.value, "error": call.error}


def chat_logprobs(call: CapturedCall, decode: Callable[[Sequence[int]], str]) -> dict[str, Json]:
    """Of every sampled token, the stop token included; alternatives are not known."""
    content = []
    for token, logprob in zip(call.completion.token_ids.tolist(), call.completion.logprobs.tolist(), strict=True):
        text = decode([token])
        known = {"token": text, "logprob": logprob, "bytes": None if _UNREADABLE in text else list(text.encode())}
        content.append({**known, "top_logprobs": [known]})
    return {"content": content, "refusal": None}


def text_logprobs(call: CapturedCall, decode: Callable[[Sequence[int]], str]) -> dict[str, Json]:
    """As the older API has them: lists by token, with offsets into the text."""
    tokens = [decode([token]) for token in call.completion.token_ids.tolist()]
    offsets = [sum(map(len, tokens[:count])) for count in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": call.completion.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def models(name: str, *, created: int) -> dict[str, Json]:
    """The list of models: the policy."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": created, "owned_by": "gspo-gym"}]}


def error_object(message: str, *, kind: str, code: str, param: str | None = None) -> dict[str, Json]:
    """OpenAI's error envelope."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_bytes(value: Json) -> bytes:
    """Compact JSON."""
    return _ENCODER.encode(value).encode()


def event_stream(chunks: Iterator[dict[str, Json]]) -> bytes:
    """Server-sent events, with the [DONE] that ends them."""
    return b"".join([b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks] + [_DONE])


def _head(kind: str, call: CapturedCall, around: Envelope) -> dict[str, Json]:
    version = int(call.completion.weight_version[-1])
    return {
        "id": around.answer_id,
        "object": kind,
        "created": around.created,
        "model": around.model,
        "system_fingerprint": f"weights-{version}",  # of the last token: weights may change within an answer
        "gspo_gym": about(call),
    }

"""Write the gateway's answers as OpenAI's objects: chat and text completions, their streams, models, errors, responses.

A stream is written from the finished answer, and therefore always ends as it should. The extra field `gspo_gym` holds
what OpenAI has no word for: the call of the session, and how parsing ended. No I/O.

Of the Responses API, input as text or items, instructions, function tools, `previous_response_id` within a session and
a text format are read; items of text and of function calls are written, as one object or as events. Reasoning items are
skipped and not written: the gateway keeps the model's reasoning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gspo_gym.base.messages import message_to_wire, text_from_wire
from gspo_gym.errors import RecordError
from gspo_gym.remote.gateway.capture import CapturedCall, ChatCall
from gspo_gym.remote.gateway.openai_wire import (
    AnswerOptions,
    RequestError,
    read_count,
    read_messages,
    read_sampling,
    read_schema,
    read_tool_choice,
    read_tools,
    require_one_choice,
    require_supported,
    shown,
    wants_training,
)
from gspo_gym.types import Message

Json = Any  # a JSON value

JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
# As in `require_supported`: what OpenAI keeps or makes of a conversation, which is not here.
_UNSUPPORTED_IN_RESPONSES: Mapping[str, Json] = {"context_management": [], "conversation": None, "prompt": None}
_UNREADABLE = "\ufffd"  # what a token is decoded to that is only a part of a character


@dataclass(frozen=True, slots=True)
class Envelope:
    """The common fields of every answer: `answer_id` is unique to the call, `created` in seconds since 1970."""

    answer_id: str
    created: int
    model: str


def answer_id(prefix: str, session_id: str, index: int) -> str:
    """Return an id that is equal for the same call and tells nothing about the session.

    >>> answer_id("chatcmpl", "Xy_1", 0) == answer_id("chatcmpl", "Xy_1", 0) != answer_id("chatcmpl", "Xy_1", 1)
    True
    """
    digest = hashlib.sha256(f"{session_id}/{index}".encode()).hexdigest()
    return f"{prefix}-{digest[:24]}"


def chat_completion(call: CapturedCall, around: Envelope, *, logprobs: Json = None) -> dict[str, Json]:
    """Return a `chat.completion`; `logprobs` from `chat_logprobs`, None for none."""
    choice = {"index": 0, "message": answer_message(call), "logprobs": logprobs, "finish_reason": call.finish_reason}
    return {**_head("chat.completion", call, around), "choices": [choice], "usage": usage_of(call)}


def chat_chunks(
    call: CapturedCall, around: Envelope, options: AnswerOptions, *, logprobs: Json = None
) -> Iterator[dict[str, Json]]:
    """Yield it as `chat.completion.chunk` objects: role, content, each call, finish reason, usage."""
    head = _head("chat.completion.chunk", call, around)
    if options.include_usage:
        head["usage"] = None  # in all but the last

    def chunk(delta: dict[str, Json], finish: str | None = None, logprobs: Json = None) -> dict[str, Json]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**head, "choices": [choice]}

    message = answer_message(call)
    yield chunk({"role": "assistant", "content": ""})
    # Before the content, as it was sampled.
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
    """Return a `text_completion`; `logprobs` from `text_logprobs`, None for none."""
    # This API has no tool calls: their text stands in the answer.
    finish = "stop" if call.finish_reason == "tool_calls" else call.finish_reason
    choice = {"index": 0, "text": call.answer.content, "logprobs": logprobs, "finish_reason": finish}
    return {**_head("text_completion", call, around), "choices": [choice], "usage": usage_of(call)}


def text_chunks(
    call: CapturedCall, around: Envelope, options: AnswerOptions, *, logprobs: Json = None
) -> Iterator[dict[str, Json]]:
    """Yield it as a stream: the text with the finish reason, and the usage."""
    whole = text_completion(call, around, logprobs=logprobs)
    usage = whole.pop("usage")
    yield whole
    if options.include_usage:
        yield {**whole, "choices": [], "usage": usage}


def answer_message(call: CapturedCall) -> dict[str, Json]:
    """Return the assistant's message, with content null if there is only a call, and reasoning if there was some."""
    wire = message_to_wire(call.answer)
    if call.answer.tool_calls and not call.answer.content:
        wire["content"] = None
    if call.answer.reasoning_content is not None:
        wire["reasoning_content"] = call.answer.reasoning_content
    return {**wire, "refusal": None}


def usage_of(call: CapturedCall) -> dict[str, int]:
    """Return the tokens read and sampled."""
    num_read, num_sampled = call.num_prompt_tokens, call.num_sampled_tokens
    return {"prompt_tokens": num_read, "completion_tokens": num_sampled, "total_tokens": num_read + num_sampled}


def about(call: CapturedCall) -> dict[str, Json]:
    """Return the extra field, with which an agent loop can treat a malformed answer as one in this process does."""
    return {"call": call.index, "parse": call.parse.value, "error": call.error}


def chat_logprobs(call: CapturedCall, decode: Callable[[Sequence[int]], str]) -> dict[str, Json]:
    """Return the logprob of every sampled token, the stop token included; alternatives are not known."""
    content = []
    # One token may be a part of a character, which has no text of its own.
    for token, logprob in zip(call.completion.token_ids.tolist(), call.completion.logprobs.tolist(), strict=True):
        text = decode([token])
        token_fields = {
            "token": text,
            "logprob": logprob,
            "bytes": None if _UNREADABLE in text else list(text.encode()),
        }
        content.append({**token_fields, "top_logprobs": [token_fields]})
    return {"content": content, "refusal": None}


def text_logprobs(call: CapturedCall, decode: Callable[[Sequence[int]], str]) -> dict[str, Json]:
    """Return logprobs as the older API has them: lists by token, with offsets into the text."""
    tokens = [decode([token]) for token in call.completion.token_ids.tolist()]
    offsets = [sum(map(len, tokens[:count])) for count in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": call.completion.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def scored_prompt(
    token_ids: Sequence[int], logprobs: Sequence[float], around: Envelope, *, fingerprint: str | None
) -> dict[str, Json]:
    """Return the logprobs of a prompt's tokens as vLLM does: one entry a place, none for the first token."""
    entries = [{str(token): {"logprob": value}} for token, value in zip(token_ids[1:], logprobs[1:], strict=True)]
    choice = {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "prompt_logprobs": [None, *entries],
        "prompt_token_ids": list(token_ids),
    }
    return {
        "id": around.answer_id,
        "object": "text_completion",
        "created": around.created,
        "model": around.model,
        "system_fingerprint": fingerprint,
        "choices": [choice],
        "usage": {"prompt_tokens": len(token_ids), "completion_tokens": 0, "total_tokens": len(token_ids)},
    }


def models(name: str, *, created: int, facts: Mapping[str, Json] = MappingProxyType({})) -> dict[str, Json]:
    """Return the list of models: the policy, with more facts about it."""
    card = {"id": name, "object": "model", "created": created, "owned_by": "gspo-gym", **facts}
    return {"object": "list", "data": [card]}


def error_object(message: str, *, kind: str, code: str, param: str | None = None) -> dict[str, Json]:
    """Return OpenAI's error envelope."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_bytes(value: Json) -> bytes:
    """Encode as compact JSON."""
    return _ENCODER.encode(value).encode()


def event_stream(chunks: Iterator[dict[str, Json]]) -> bytes:
    """Encode as server-sent events, with the [DONE] that ends them."""
    return b"".join([b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks] + [_DONE])


def _head(kind: str, call: CapturedCall, around: Envelope) -> dict[str, Json]:
    return {
        "id": around.answer_id,
        "object": kind,
        "created": around.created,
        "model": around.model,
        # Of the last token: weights may change within an answer.
        "system_fingerprint": f"weights-{int(call.completion.weight_version[-1])}",
        "gspo_gym": about(call),
    }


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """One request to /v1/responses.

    `conversation` is what a later request that names this one's answer continues: everything but the instructions,
    which are each request's own.
    """

    call: ChatCall
    conversation: tuple[Message, ...]
    options: AnswerOptions


def read_responses_request(
    body: Mapping[str, Json], *, previous: Mapping[str, tuple[Message, ...]]
) -> ResponsesRequest:
    """Read a request to /v1/responses; `previous` are the session's conversations by response id.

    Raises:
        RequestError: a needed field is missing or wrong, or asks for something unsupported.
    """
    require_supported(body, _UNSUPPORTED_IN_RESPONSES)
    require_one_choice(body)
    earlier: tuple[Message, ...] = ()
    if (previous_id := body.get("previous_response_id")) is not None:
        if previous_id not in previous:
            raise RequestError(
                "previous_response_id: expected a response of this session",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        earlier = previous[previous_id]
    conversation = (*earlier, *read_messages(_as_chat(body.get("input")), param="input"))
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise RequestError(f"instructions: expected text, got {shown(instructions)}", param="instructions")
    opening = (Message("system", instructions),) if instructions else ()
    tools = read_tools(_as_chat_tools(body.get("tools")))
    text = body.get("text") if isinstance(body.get("text"), Mapping) else {}
    call = ChatCall(
        messages=(*opening, *conversation),
        tools=() if body.get("tool_choice") == "none" else tools,
        max_tokens=read_count(body, "max_output_tokens"),
        sampling=read_sampling(body),
        tool_choice=read_tool_choice(body.get("tool_choice"), tools),
        json_schema=read_schema(text.get("format") if isinstance(text, Mapping) else None, param="text.format"),
        is_trained=wants_training(body),
    )
    return ResponsesRequest(call, conversation, AnswerOptions(stream=bool(body.get("stream"))))


def response_object(call: CapturedCall, around: Envelope, request: Mapping[str, Json]) -> dict[str, Json]:
    """Return a `response`, which repeats the request's settings as OpenAI does."""
    is_cut = call.finish_reason == "length"
    return {
        "id": around.answer_id,
        "object": "response",
        "created_at": around.created,
        "completed_at": around.created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "model": around.model,
        "output": _items(call, around.answer_id),
        "parallel_tool_calls": bool(request.get("parallel_tool_calls", True)),
        "previous_response_id": request.get("previous_response_id"),
        "temperature": request.get("temperature"),
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_p": request.get("top_p"),
        "usage": {
            "input_tokens": call.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": call.num_sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": call.num_prompt_tokens + call.num_sampled_tokens,
        },
        "gspo_gym": about(call),
    }


def response_events(response: Mapping[str, Json]) -> bytes:
    """Encode it as server-sent events: begin, each item, end. (This API has no [DONE].)"""
    start_response = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Json]] = [
        {"type": "response.created", "response": start_response},
        {"type": "response.in_progress", "response": start_response},
    ]
    for index, item in enumerate(response["output"]):
        events += _item_events(item, index)
    events.append({"type": f"response.{response['status']}", "response": response})
    numbered_events = ({**event, "sequence_number": number} for number, event in enumerate(events))
    return b"".join(b"event: %s\ndata: %s\n\n" % (e["type"].encode(), json_bytes(e)) for e in numbered_events)


def _as_chat(value: Json) -> list[Json]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError(f"input: expected text or a list of items, got {shown(value)}", param="input")
    messages: list[dict[str, Json]] = []
    for index, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":
            continue
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "function": {k: item.get(k) for k in ("name", "arguments")}}
            # Consecutive calls are one assistant message's, as the model said them.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = _output_text(item.get("output"), f"input[{index}]")
            messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
        else:
            raise RequestError(
                f"input[{index}]: expected a message, a function_call or its output, got {shown(item)}", param="input"
            )
    return messages


def _output_text(output: Json, where: str) -> str:
    try:
        return text_from_wire(output, where=where)
    except RecordError as error:
        raise RequestError(str(error), param="input") from error


def _as_chat_tools(value: Json) -> Json:
    if not isinstance(value, list):
        return value
    tools = []
    for tool in value:
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError(
                f"tools: expected type function, got {shown(tool)}", code="unsupported_value", param="tools"
            )
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _items(call: CapturedCall, response_id: str) -> list[dict[str, Json]]:
    status = "incomplete" if call.finish_reason == "length" else "completed"
    items: list[dict[str, Json]] = []
    answer = call.answer
    # An empty answer is a message, too.
    if answer.content or not answer.tool_calls:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        message_fields = {"type": "message", "role": "assistant", "status": status, "content": [text]}
        items.append({"id": f"msg_{response_id}", **message_fields})
    for index, tool_call in enumerate(answer.tool_calls):
        arguments = json.dumps(dict(tool_call.arguments), ensure_ascii=False)
        items.append(
            {
                "id": f"fc_{response_id}_{index}",
                "type": "function_call",
                "status": status,
                "call_id": tool_call.id,
                "name": tool_call.name,
                "arguments": arguments,
            }
        )
    return items


def _item_events(item: Mapping[str, Json], index: int) -> Sequence[dict[str, Json]]:
    return list(_text_events(item, index) if item["type"] == "message" else _call_events(item, index))


def _text_events(item: Mapping[str, Json], index: int) -> Iterator[dict[str, Json]]:
    part = item["content"][0]
    at = {"item_id": item["id"], "output_index": index, "content_index": 0}
    empty = {**part, "text": ""}
    start_item = {**item, "status": "in_progress", "content": []}
    yield {"type": "response.output_item.added", "output_index": index, "item": start_item}
    yield {"type": "response.content_part.added", **at, "part": empty}
    yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **at, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(item: Mapping[str, Json], index: int) -> Iterator[dict[str, Json]]:
    at = {"item_id": item["id"], "output_index": index}
    opening = {**item, "status": "in_progress", "arguments": ""}
    yield {"type": "response.output_item.added", "output_index": index, "item": opening}
    yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
    done = {"name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **at, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}

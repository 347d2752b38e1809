"""OpenAI's Responses API in the gateway's calls: its basics, by which the chat API's conversations are said otherwise.

Read: input as text or items, instructions, function tools, `previous_response_id` within a session, a text format.
Written: items of text and of function calls, as one object or as events. Reasoning items are read past and not written:
what a model thought is the gateway's. No I/O. Called by `gateway_app.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.base.messages import text_from_wire
from gspo_gym.errors import RecordError
from gspo_gym.remote.gateway.capture import CapturedCall, ChatCall
from gspo_gym.remote.gateway.openai_wire import (
    AnswerOptions,
    RequestError,
    read_count,
    read_messages,
    read_number,
    read_schema,
    read_tool_choice,
    read_tools,
    shown,
    wants_training,
)
from gspo_gym.remote.gateway.openai_wire_answers import Envelope, about, json_bytes
from gspo_gym.types import Message

Json = Any  # a JSON value


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """One request to /v1/responses.

    `conversation` is what a later request continues that names this one's answer: everything but the instructions,
    which are each request's own.
    """

    call: ChatCall
    conversation: tuple[Message, ...]
    options: AnswerOptions


def read_responses_request(
    body: Mapping[str, Json], *, previous: Mapping[str, tuple[Message, ...]]
) -> ResponsesRequest:
    """What a request to /v1/responses asks for; `previous` are the session's conversations by response id.

    Raises:
        RequestError: a field that counts is missing, wrong, or asks for what there is not.
    """
    earlier: tuple[Message, ...] = ()
    if (previous_id := body.get("previous_response_id")) is not None:
        if previous_id not in previous:
            raise RequestError(
                "previous_response_id: expected a response of this session",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        earlier = previous[previous_id]
    if body.get("background"):
        raise RequestError("background: not supported", code="unsupported_parameter", param="background")
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
        temperature=read_number(body, "temperature", low=0.0, high=2.0),
        top_p=read_number(body, "top_p", low=0.0, high=1.0),
        tool_choice=read_tool_choice(body.get("tool_choice"), tools),
        json_schema=read_schema(text.get("format") if isinstance(text, Mapping) else None, param="text.format"),
        is_trained=wants_training(body),
    )
    return ResponsesRequest(call, conversation, AnswerOptions(stream=bool(body.get("stream"))))


def response_object(call: CapturedCall, around: Envelope, request: Mapping[str, Json]) -> dict[str, Json]:
    """A `response`. What the request said is said back, as OpenAI does."""
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
    """The same as server-sent events: it begins, each item, it ends. (There is no [DONE] in this API.)"""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Json]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        events += _item_events(item, index)
    events.append({"type": f"response.{response['status']}", "response": response})
    numbered = ({**event, "sequence_number": number} for number, event in enumerate(events))
    return b"".join(b"event: %s\ndata: %s\n\n" % (e["type"].encode(), json_bytes(e)) for e in numbered)


def _as_chat(value: Json) -> list[Json]:
    """Input in the words of the chat API: calls that follow each other are one assistant message's."""
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
    """Function tools as the chat API has them: their name and parameters one level deeper."""
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
    if answer.content or not answer.tool_calls:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        said = {"type": "message", "role": "assistant", "status": status, "content": [text]}
        items.append({"id": f"msg_{response_id}", **said})
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
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**item, "status": "in_progress", "content": []},
    }
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
    yield {
        "type": "response.function_call_arguments.done",
        **at,
        "name": item["name"],
        "arguments": item["arguments"],
    }
    yield {"type": "response.output_item.done", "output_index": index, "item": item}

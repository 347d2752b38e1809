"""OpenAI's chat messages on the wire and back: what is lenient, what is refused, and where."""

from __future__ import annotations

import json

import pytest

from gspo_gym.base.messages import (
    message_from_wire,
    message_to_wire,
    messages_from_wire,
    require_encodable,
    text_from_wire,
)
from gspo_gym.errors import RecordError
from gspo_gym.types import Message, ToolCall


def test_what_the_openai_package_sends_back_of_its_own_answer_is_read() -> None:
    # A message of an answer, as `completion.choices[0].message.model_dump()` puts it into the next request.
    value = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, null]}'}}
        ],
    }
    call = ToolCall("c1", "look", {"at": [1, None]})
    assert message_from_wire(value, where="m") == Message("assistant", "", (call,))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}], "a"),
        ([{"type": "output_text", "text": "a", "annotations": []}], "a"),
    ],
)
def test_content_is_a_text_or_parts_of_text(content: object, text: str) -> None:
    assert text_from_wire(content, where="m") == text


@pytest.mark.parametrize(("said", "ours"), [("developer", "system"), ("system", "system"), ("function", "tool")])
def test_older_and_newer_names_of_roles_are_known(said: str, ours: str) -> None:
    assert message_from_wire({"role": said, "content": "x"}, where="m").role == ours


@pytest.mark.parametrize("arguments", ['{"n": 1}', {"n": 1}])
def test_arguments_are_text_or_an_object(arguments: object) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    message = message_from_wire({"role": "assistant", "content": "", "tool_calls": [call]}, where="m")
    assert message.tool_calls[0].arguments == {"n": 1}


def test_a_call_without_arguments_has_none() -> None:
    calls = [{"id": "a", "function": {"name": "f", "arguments": ""}}, {"id": "b", "function": {"name": "g"}}]
    message = message_from_wire({"role": "assistant", "content": "", "tool_calls": calls}, where="m")
    assert [dict(call.arguments) for call in message.tool_calls] == [{}, {}]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("hello", "expected a message with role and content, got str 'hello'"),
        ({"content": "x"}, "expected system, user, assistant or tool, got '(none)'"),
        ({"role": "robot", "content": "x"}, "expected system, user, assistant or tool, got 'robot'"),
        ({"role": "user", "content": 7}, "expected content as text or a list of text parts, got int 7"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "part 0: expected text, got an im",
        ),
        ({"role": "assistant", "content": "", "tool_calls": "f()"}, "expected tool_calls as a list, got str 'f()'"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "tool call 0: expected a tool call"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "tool call 0: the arguments of 'f' are not JSON",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "tool call 0: expected a tool call",
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "expected tool_call_id as text, got int 7"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(value: object, problem: str) -> None:
    with pytest.raises(RecordError) as raised:
        messages_from_wire([{"role": "user", "content": "ok"}, value], where="messages")
    assert str(raised.value).startswith("messages[1]:")
    assert problem in str(raised.value)


@pytest.mark.parametrize("value", [None, {"role": "user"}, "text", 3])
def test_messages_are_a_list(value: object) -> None:
    with pytest.raises(RecordError, match="messages: expected a list of messages"):
        messages_from_wire(value, where="messages")


def test_a_message_goes_there_and_back() -> None:
    calls = (ToolCall("c1", "say", {"word": "Größe", "loud": True}), ToolCall("c2", "stop", {}))
    for message in (
        Message("system", "Be brief."),
        Message("user", "Hi.", name="Ann"),
        Message("assistant", "", calls),
        Message("tool", "done", tool_call_id="c1", name="say"),
    ):
        wire = message_to_wire(message)
        assert message_from_wire(json.loads(json.dumps(wire)), where="m") == message


def test_arguments_leave_as_text_and_reasoning_stays() -> None:
    wire = message_to_wire(Message("assistant", "x", (ToolCall("c", "f", {"a": "ü"}),), reasoning_content="hm"))
    assert "reasoning_content" not in wire
    assert wire["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "ü"}'}


def test_a_lone_surrogate_is_refused_where_it_would_be_tokenised() -> None:
    require_encodable("Größe 😀", where="m")
    with pytest.raises(RecordError, match="m: expected text that can be encoded, got a lone surrogate"):
        require_encodable("half \ud83d", where="m")

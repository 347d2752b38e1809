"""OpenAI's chat messages on the wire and back: what is lenient, what is refused, and where."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from gspo_gym.base.messages import (
    ConversationReader,
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


def test_a_reader_of_a_conversation_reads_each_request_as_if_it_were_the_first() -> None:
    def asks(far: object) -> dict[str, object]:
        call = {"id": "c", "function": {"name": "look", "arguments": {"far": far}}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    words = [
        *({"role": role, "content": text} for role in ("user", "assistant") for text in ("x", "y")),
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        *map(asks, (1, True, 1.0)),  # to Python, these are equal
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ]
    draw = np.random.default_rng(0)
    reader, asked, num_repeated = ConversationReader(), words[:1], 0
    for _ in range(1000):
        before = reader.read(copy.deepcopy(asked), where="m")
        # Mostly the last request and more, else a part of it with another end, or another conversation.
        kept = int(draw.choice([len(asked), draw.integers(len(asked) + 1), 0], p=[0.7, 0.2, 0.1]))
        asked = [*asked[:kept], *(words[k] for k in draw.integers(len(words), size=draw.integers(1, 4)))]
        found, expected = reader.read(copy.deepcopy(asked), where="m"), messages_from_wire(asked, where="m")
        assert repr(found) == repr(expected)
        assert all(one is other for one, other in zip(before[:kept], found, strict=False))
        num_repeated += kept
    assert num_repeated > 1000


def test_a_request_that_is_refused_leaves_the_reader_as_it_was() -> None:
    reader, first = ConversationReader(), [{"role": "user", "content": "x"}]
    known = reader.read(first, where="m")
    for wrong in ({"role": "king", "content": "x"}, "x", None, {"role": "user", "content": 1}):
        with pytest.raises(RecordError, match=r"^m\[1\]"):
            reader.read([*first, wrong], where="m")
    assert reader.read([*first, *first], where="m")[0] is known[0]

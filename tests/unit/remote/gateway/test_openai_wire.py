"""OpenAI's requests as the gateway's calls: what is read, what is ignored, and what is refused by which field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served_gateway import LOOK, user

from gspo_gym.remote.gateway.capture import REQUIRED, ChatCall, CompletionCall
from gspo_gym.remote.gateway.openai_wire import (
    AnswerOptions,
    RequestError,
    read_body,
    read_chat_request,
    read_completion_request,
)
from gspo_gym.remote.gateway.openai_wire_answers import read_responses_request
from gspo_gym.types import Message, ToolCall

HELLO = {"messages": user("Hello.")}
ASKED = (Message("user", "Hello."),)
# What real task apps send beside what OpenAI knows.
CRAFTER = {
    "model": "policy",
    "function_call": {"name": "look"},
    "parallel_tool_calls": False,
    "stop_after_tool_calls": 1,
    "thinking_mode": "think",
    "thinking_budget": 1028,
    "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    "user": "someone",
    "seed": 3,
    "presence_penalty": 0,
    "store": False,
}


def test_what_is_not_asked_for_is_left_to_the_session() -> None:
    request = read_chat_request(HELLO)
    assert request.call == ChatCall(ASKED)
    assert request.options == AnswerOptions(stream=False, include_usage=False, logprobs=False)


def test_fields_that_nobody_here_knows_are_ignored() -> None:
    assert read_chat_request(HELLO | CRAFTER) == read_chat_request(HELLO)


def test_every_field_that_counts_is_read() -> None:
    body = HELLO | {
        "tools": [LOOK],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END", "\n\n"],
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 3,
        "metadata": {"gspo_gym_trained": "false", "other": "x"},
    }
    request = read_chat_request(body)
    assert request.call == ChatCall(
        ASKED,
        (LOOK,),
        9,
        {"temperature": 0.5, "top_p": 0.9},
        ("END", "\n\n"),
        tool_choice="look",
        json_schema=None,
        is_trained=False,
    )
    assert request.options == AnswerOptions(stream=True, include_usage=True, logprobs=True)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("auto", None),
        (None, None),
        ("required", REQUIRED),
        ({"type": "function", "function": {"name": "look"}}, "look"),
        ({"type": "function", "name": "look"}, "look"),
    ],
)
def test_a_tool_choice_is_free_required_or_named(choice: Any, wanted: str | None) -> None:
    call = read_chat_request(HELLO | {"tools": [LOOK], "tool_choice": choice}).call
    assert (call.tool_choice, call.tools) == (wanted, (LOOK,))


def test_tool_choice_none_offers_no_tools() -> None:
    call = read_chat_request(HELLO | {"tools": [LOOK], "tool_choice": "none"}).call
    assert (call.tool_choice, call.tools) == (None, ())


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_a_response_format_becomes_a_schema(response_format: Any, schema: Any) -> None:
    read = read_chat_request(HELLO | {"response_format": response_format}).call.json_schema
    assert (None if read is None else json.loads(read)) == schema


def test_the_newer_name_of_the_token_limit_goes_before_the_older_one() -> None:
    assert read_chat_request(HELLO | {"max_tokens": 9, "max_completion_tokens": 4}).call.max_tokens == 4


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": user("half \ud83d")}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": "low"}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": True}, "min_tokens"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"stop": [""]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"tools": {"look": 1}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "lok"}}}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"metadata": {"gspo_gym_trained": "maybe"}}, "metadata.gspo_gym_trained"),
    ],
)
def test_what_would_change_the_answer_and_is_not_understood_is_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_chat_request(HELLO | change)
    assert raised.value.param == param
    assert str(raised.value).startswith(param)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="expected a JSON object") as raised:
        read_body(body)
    assert raised.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2, 3], (1, 2, 3)), ([[1, 2, 3]], (1, 2, 3)), ([0], (0,))],
)
def test_a_prompt_is_one_text_or_one_list_of_ids(prompt: Any, read: Any) -> None:
    assert read_completion_request({"prompt": prompt}).call == CompletionCall(read)


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, -1], [1, "a"], [True], {"a": 1}, [[]]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt: expected one text, or one list of token ids"):
        read_completion_request({"prompt": prompt})


@pytest.mark.parametrize("change", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"n": 3}])
def test_completions_that_are_more_than_a_continuation_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_completion_request({"prompt": "Once"} | change)


def test_logprobs_of_a_completion_are_a_number_and_zero_is_one() -> None:
    for value, wanted in ((None, False), (0, True), (1, True), (False, False)):
        assert read_completion_request({"prompt": "x", "logprobs": value}).options.logprobs is wanted


def test_responses_input_items_become_the_conversation() -> None:
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Look."},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I will."}]},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"at": "door"}'},
            {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "a door"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "what?"}]},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": "required",
        "max_output_tokens": 5,
    }
    request = read_responses_request(body, previous={})
    calls = (ToolCall("a", "look", {"at": "door"}), ToolCall("b", "look", {}))
    conversation = (
        Message("user", "Look."),
        Message("assistant", "I will.", calls),
        Message("tool", "a door", tool_call_id="a"),
        Message("tool", "what?", tool_call_id="b"),
    )
    assert request.call.messages == (Message("system", "Be brief."), *conversation)
    assert request.conversation == conversation
    assert (request.call.tool_choice, request.call.max_tokens) == (REQUIRED, 5)
    assert request.call.tools == (
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}},
    )


def test_a_response_continues_a_previous_one_under_its_own_instructions() -> None:
    earlier = (Message("user", "One."), Message("assistant", "Two."))
    body = {"input": "Three.", "instructions": "Count.", "previous_response_id": "resp-1"}
    request = read_responses_request(body, previous={"resp-1": earlier})
    assert request.conversation == (*earlier, Message("user", "Three."))
    assert request.call.messages == (Message("system", "Count."), *earlier, Message("user", "Three."))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 7}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input"),
        ({"previous_response_id": "resp-of-another"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"instructions": 7}, "instructions"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ],
)
def test_responses_requests_that_are_not_understood_are_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_responses_request({"input": "Hi."} | change, previous={})
    assert raised.value.param == param

"""Sampled text becomes a message or says why not."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_gym.chat.formats import FORMATS, Format, format_named
from gspo_gym.chat.parsing import ParseFailure, parse_action
from gspo_gym.types import Message, ParseStatus, ToolCall

OK_CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 7}}\n</tool_call>'
GUESS = ToolCall("call_0", "guess", {"number": 7})


HERMES = format_named("hermes")


def parse(text: str, *, truncated: bool = False) -> Message | ParseFailure:
    """Read a text by the format whose call it begins with."""
    openings = {"[TOOL_CALLS]": "mistral-list", "<|python_tag|>": "llama3", '{"': "llama3", "{": "llama3"}
    name = next((name for opening, name in openings.items() if opening in text.partition('"arguments"')[0]), "hermes")
    form = HERMES if "<tool_call>" in text else format_named(name)
    return parse_action(text, form, has_tools=True, is_truncated=truncated)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("7", None, "7"),
        (" 7\n", None, " 7\n"),
        ("", None, ""),
        ("<think>\nhm\n</think>\n\n7", "hm", "7"),
        ("<think>hm</think>7", "hm", "7"),
        ("\n<think>\n\n</think>\n\n 7 ", "", " 7 "),
        ("<think>\n</think>", "", ""),
        ("<think>\n  a\n\nb \n</think>\n\n", "  a\n\nb ", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, reasoning: str | None, content: str) -> None:
    expected = Message("assistant", content, reasoning_content=reasoning)
    assert parse_action(text, HERMES, has_tools=False, is_truncated=False) == expected
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [("hm\n</think>\n\n7", "hm", "7"), ("\n</think>\n\n7", "", "7"), ("<think>\nhm\n</think>\n\n7", "hm", "7")],
)
def test_an_answer_may_start_inside_the_block_that_the_prompt_opened(text: str, reasoning: str, content: str) -> None:
    parsed = parse_action(text, HERMES, has_tools=False, is_truncated=False, starts_in_reasoning=True)
    assert parsed == Message("assistant", content, reasoning_content=reasoning)


@pytest.mark.parametrize(
    ("text", "truncated", "status"),
    [
        ("<think>hm", True, ParseStatus.TRUNCATED),
        ("<think>hm", False, ParseStatus.BAD_REASONING),
        ("<think>a</think>b<think>c</think>", False, ParseStatus.BAD_REASONING),
        ("<think>a<think>b</think>", False, ParseStatus.BAD_REASONING),
        ("a</think>b", False, ParseStatus.BAD_REASONING),
        ("a<think>b</think>", True, ParseStatus.BAD_REASONING),
    ],
)
def test_reasoning_that_is_no_single_closed_block_at_the_start_is_a_failure(
    text: str, truncated: bool, status: ParseStatus
) -> None:
    parsed = parse_action(text, HERMES, has_tools=False, is_truncated=truncated)
    assert isinstance(parsed, ParseFailure)
    assert (parsed.status, parsed.text) == (status, text)


def test_unfinished_reasoning_that_the_prompt_opened_is_truncated() -> None:
    parsed = parse_action("still thin", HERMES, has_tools=False, is_truncated=True, starts_in_reasoning=True)
    assert isinstance(parsed, ParseFailure)
    assert parsed.status is ParseStatus.TRUNCATED


def test_without_tools_a_call_is_ordinary_text() -> None:
    for text in (OK_CALL, '{"name": "guess", "arguments": {}}', "[TOOL_CALLS] []", "<tool_call>"):
        assert parse_action(text, HERMES, has_tools=False, is_truncated=False) == Message("assistant", text)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (OK_CALL, ""),
        ("I guess.\n" + OK_CALL, "I guess."),
        ("I guess.\n\n" + OK_CALL + "\nThere.", "I guess.\nThere."),
        ('<tool_call>{"arguments":{"number":7},"name":"guess"}</tool_call>', ""),
        ('{"name": "guess", "parameters": {"number": 7}}', ""),
        ('\n{"type": "function", "name": "guess", "parameters": {"number": 7}} ', ""),
        ('<|python_tag|>{"name": "guess", "parameters": {"number": 7}}', ""),
        ('[TOOL_CALLS] [{"name": "guess", "arguments": {"number": 7}}]', ""),
        ('I guess.[TOOL_CALLS][{"name": "guess", "arguments": {"number": 7}}]', "I guess."),
    ],
)
def test_a_call_is_read_in_every_format(text: str, content: str) -> None:
    assert parse(text) == Message("assistant", content, tool_calls=(GUESS,))


def test_calls_are_numbered_and_reasoning_stays_apart() -> None:
    parsed = parse(f"<think>hm</think>\n{OK_CALL}\n{OK_CALL}")
    second = ToolCall("call_1", "guess", {"number": 7})
    assert parsed == Message("assistant", "", tool_calls=(GUESS, second), reasoning_content="hm")


def test_an_id_that_the_model_gave_is_kept() -> None:
    parsed = parse('[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "Xy3456789"}, {"name": "b", "arguments": {}}]')
    assert isinstance(parsed, Message)
    assert [call.id for call in parsed.tool_calls] == ["Xy3456789", "call_1"]


def test_a_closing_tag_inside_a_string_does_not_close_the_call() -> None:
    arguments = {"text": "say </tool_call> and <tool_call>"}
    parsed = parse(f"<tool_call>{json.dumps({'name': 'say', 'arguments': arguments})}</tool_call>")
    assert parsed == Message("assistant", "", tool_calls=(ToolCall("call_0", "say", arguments),))


@pytest.mark.parametrize(
    "text",
    ["{not json", '{"answer": 7}', '{"name": "Bob"}', "Use {name} with parameters.", '["name", "arguments"]', "{}"],
)
def test_json_that_is_no_call_is_an_answer(text: str) -> None:
    assert parse(text) == Message("assistant", text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '<tool_call>{"name": "guess" "arguments": {}}</tool_call>',
            "tool call 1: not valid JSON: Expecting ',' delim",
        ),
        ("<tool_call></tool_call>", "tool call 1: not valid JSON: Expecting value at character 0"),
        ('<tool_call>{"a\nb": 1}</tool_call>', "not valid JSON: Invalid control character at character 3 of"),
        ('<tool_call>{"arguments": {}}</tool_call>', "expected the tool's name as a string under \"name\", got 'null'"),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', "got '7'"),
        ('<tool_call>{"name": " ", "arguments": {}}</tool_call>', "expected the tool's name"),
        ('<tool_call>{"name": "guess"}</tool_call>', 'tool call 1 (guess): expected a JSON object under "arguments"'),
        ('<tool_call>{"name": "guess", "arguments": [7]}</tool_call>', "got '[7]'"),
        ('<tool_call>{"name": "guess", "arguments": "{}"}</tool_call>', "expected a JSON object under"),
        ("<tool_call>[1]</tool_call>", "expected a JSON object with name and arguments"),
        (OK_CALL + "<tool_call>{}</tool_call>", "tool call 2: expected the tool's name"),
        ('<tool_call>{"name": "guess", "arguments": {}}', "expected </tool_call> after the JSON object, got ''"),
        ('<tool_call>{"name": "guess", "arguments": {}} so', "expected </tool_call> after the JSON object, got 'so'"),
        ("so </tool_call>", "that no <tool_call> opened"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "the number 'NaN' is not finite"),
        ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "the number '1e999' is not finite"),
        ('<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "not usable JSON"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "7" * 5000 + "}}</tool_call>", "not usable JSON"),
        ('<tool_call>{"name": "a", "arguments": ' + "[" * 40 + "]" * 40 + "}</tool_call>", "more than 32 levels"),
        ("<tool_call>" + "[" * 200_000, "tool call 1: not usable JSON: nested too deeply"),
        ('{"name": "guess", "parameters": {"number": 7}', "tool call 1: not valid JSON"),
        ('{"name": "guess", "parameters": {}} I hope', "expected nothing after the JSON object, got 'I hope'"),
        ("<|python_tag|>print(7)", "tool call 1: not valid JSON"),
        ("[TOOL_CALLS] 7", "expected a list of objects"),
        ("[TOOL_CALLS] []", "expected a list of objects"),
        ('[TOOL_CALLS] [{"name": "a", "arguments": {}}] so', "expected nothing after the list, got 'so'"),
    ],
)
def test_a_malformed_call_says_what_was_wrong(text: str, error: str) -> None:
    parsed = parse(text)
    assert isinstance(parsed, ParseFailure)
    assert parsed.status is ParseStatus.BAD_TOOL_CALL
    assert error in parsed.error
    assert parsed.text == text
    assert len(parsed.error) < 250


def test_a_call_cut_off_at_any_character_is_truncated() -> None:
    whole = (
        '<tool_call>\n{"name": "guess", "arguments": {"a": [1.5, true], "b": "\\u00e9\\n", "c": null}}\n</tool_call>'
    )
    assert isinstance(parse(whole), Message)
    for length in range(len("<tool_call>"), len(whole)):
        parsed = parse(whole[:length], truncated=True)
        assert isinstance(parsed, ParseFailure), whole[:length]
        assert parsed.status is ParseStatus.TRUNCATED, (whole[:length], parsed.error)


def test_a_malformed_call_in_a_truncated_answer_is_not_excused() -> None:
    parsed = parse('<tool_call>{"name" "guess", "arguments": {"number": 7}}</tool_call> and', truncated=True)
    assert isinstance(parsed, ParseFailure)
    assert parsed.status is ParseStatus.BAD_TOOL_CALL


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", OK_CALL, '{"name": "a"',
     "{", "}", "[", "]", '"', ":", ",", '"arguments"', '"parameters"', "\\", "\n", " ", "7", "true", "-", "e9"]
)  # fmt: skip


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=12).map("".join),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.booleans(),
)
@example("[" * 100_000, HERMES, True, False)
def test_any_text_is_a_message_or_a_failure_that_keeps_the_text(
    text: str, form: Format, truncated: bool, inside: bool
) -> None:
    parsed = parse_action(text, form, has_tools=True, is_truncated=truncated, starts_in_reasoning=inside)
    if isinstance(parsed, ParseFailure):
        assert parsed.text == text
        assert parsed.error
        assert parsed.status is not ParseStatus.OK
    else:
        assert parsed.content.strip() in text or parsed.tool_calls
        assert [call.id for call in parsed.tool_calls] == [f"call_{i}" for i in range(len(parsed.tool_calls))]

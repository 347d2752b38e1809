"""Every format is read strictly: what is nearly right is a failure, and what was cut off is told from what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_gym.chat.formats import FORMATS, Format, format_named, pieces
from gspo_gym.chat.parsing import ParseFailure, parse_action
from gspo_gym.types import Message, ParseStatus, ToolCall

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "look": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "table": {"type": "object"},
        "names": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "choice": {"enum": ["1", "2"]},
        "mixed": {"enum": ["1", 2, None]},
    }
}
# One call of each format, as its models write it: look(text="7", count=7) with reasoning before it.
WRITTEN = {
    "hermes": "<think>\nhm\n</think>\n\n<tool_call>\n"
    '{"name": "look", "arguments": {"text": "7", "count": 7}}\n</tool_call>',
    "qwen-xml": "<think>\nhm\n</think>\n\n<tool_call>\n<function=look>\n<parameter=text>\n7\n</parameter>\n"
    "<parameter=count>\n7\n</parameter>\n</function>\n</tool_call>",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
    '<|message|>{"text": "7", "count": 7}',
    "gemma4": '<|channel>thought\nhm\n<channel|><|tool_call>call:look{count:7,text:<|"|>7<|"|>}<tool_call|>',
    "lfm2": "<think>hm</think><|tool_call_start|>[look(text='7', count=7)]<|tool_call_end|>",
    "muse": ' to=self<|message|>hm<|eom|><|start|>assistant to=look<|message|><atem:function_calls>\n'
    '<atem:invoke name="look">\n<atem:parameter name="text">7</atem:parameter>\n'
    '<atem:parameter name="count">7</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>",
    "llama3": '<think>hm</think>{"name": "look", "parameters": {"text": "7", "count": 7}}',
    "mistral-list": '[THINK]hm[/THINK][TOOL_CALLS][{"name": "look", "arguments": {"text": "7", "count": 7}}]',
    "mistral-args": '[THINK]hm[/THINK][TOOL_CALLS]look[ARGS]{"text": "7", "count": 7}',
    "mistral-id": '[THINK]hm[/THINK][TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{"text": "7", "count": 7}',
    "glm4": "\n<think>hm</think>\n<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>7</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
    "deepseek-v3": "<think>hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"text": "7", "count": 7}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.1": "<think>hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
    '{"text": "7", "count": 7}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.2": '<think>hm</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
    '<｜DSML｜parameter name="text" string="true">7</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="count" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "kimi-k2": "<think>hm</think><|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    '<|tool_call_argument_begin|>{"text": "7", "count": 7}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax-m2": '<think>\nhm\n</think>\n\n<minimax:tool_call>\n<invoke name="look">\n'
    '<parameter name="text">7</parameter>\n'
    '<parameter name="count">7</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax-m1": "<think>hm</think><tool_calls>\n"
    '{"name": "look", "arguments": {"text": "7", "count": 7}}\n</tool_calls>',
    "seed-oss": "<seed:think>hm</seed:think>\n<seed:tool_call>\n<function=look>\n<parameter=text>7</parameter>\n"
    "<parameter=count>7</parameter>\n</function>\n</seed:tool_call>",
    "command": '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", '
    '"parameters": {"text": "7", "count": 7}}\n]<|END_ACTION|>',
    "functionary": '<think>hm</think><function=look>{"text": "7", "count": 7}</function>',
    "nemotron-nano": '<think>hm</think><TOOLCALL>[{"name": "look", "arguments": {"text": "7", "count": 7}}]</TOOLCALL>',
    "olmo3": "<think>hm</think><function_calls>\nlook(text='7', count=7)\n</function_calls>",
    "pythonic": "<think>hm</think>[look(text=\"7\", count=7)]",
}  # fmt: skip


def read(name: str, text: str, *, truncated: bool = False, has_tools: bool = True) -> Message | ParseFailure:
    form = format_named(name)
    return parse_action(text, form, has_tools=has_tools, is_truncated=truncated, parameters=SCHEMAS)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_is_read_as_its_models_write_it(form: Format) -> None:
    parsed = read(form.name, WRITTEN[form.name])
    assert isinstance(parsed, Message), parsed
    (call,) = parsed.tool_calls
    given = {"mistral-id": "a1b2c3d4e", "kimi-k2": "functions.look:0", "command": "0"}
    assert call.id == given.get(form.name, "call_0")
    assert (parsed.content.strip(), parsed.reasoning_content) == ("", "hm")
    assert (call.name, call.arguments) == ("look", {"text": "7", "count": 7})
    assert [type(call.arguments[key]) for key in ("text", "count")] == [str, int]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_that_was_cut_off_anywhere_behind_its_opening_is_truncated(form: Format) -> None:
    whole = WRITTEN[form.name]
    opening = form.opening if not form.begins else "</think>"
    start = whole.index(opening) + len(opening)
    start += len('{"name":') if form.name == "llama3" else len("[look(") if form.begins else 0
    for length in range(start, len(whole)):
        parsed = read(form.name, whole[:length], truncated=True)
        assert isinstance(parsed, ParseFailure), whole[:length]
        assert parsed.status is ParseStatus.TRUNCATED, (whole[:length], parsed.error)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_that_ends_too_early_is_no_call_if_nothing_was_cut_off(form: Format) -> None:
    parsed = read(form.name, WRITTEN[form.name][:-1])
    assert isinstance(parsed, ParseFailure)
    assert parsed.status is ParseStatus.BAD_TOOL_CALL
    assert "expected" in parsed.error or "not valid JSON" in parsed.error


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_without_the_tools_name_is_no_call(form: Format) -> None:
    parsed = read(form.name, WRITTEN[form.name].replace("look", "", 1))
    assert isinstance(parsed, ParseFailure) or (form.begins and not parsed.tool_calls), parsed


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", " a\n\nb ", " a\n\nb "),
        ("text", "", ""),
        ("text", "null", "null"),
        ("count", "5", 5),
        ("count", "-0", 0),
        ("share", "5", 5),
        ("share", "1e-05", 1e-05),
        ("flag", "true", True),
        ("flag", "False", False),
        ("table", '{"a": [1, "b"]}', {"a": [1, "b"]}),
        ("names", "[]", []),
        ("maybe", "None", None),
        ("maybe", "nothing", "nothing"),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "five", "five"),
        ("choice", "2", "2"),
        ("mixed", "1", "1"),
        ("mixed", "2", 2),
        ("mixed", "null", None),
        ("unknown", "5", 5),
        ("unknown", "five", "five"),
        ("unknown", '"five"', "five"),
    ],
)
def test_a_raw_value_is_typed_by_the_tools_schema(key: str, text: str, value: Any) -> None:
    parsed = read(
        "qwen-xml", f"<tool_call>\n<function=look>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    assert parsed == Message("assistant", "", tool_calls=(ToolCall("call_0", "look", {key: value}),))
    assert type(parsed.tool_calls[0].arguments[key]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("qwen-xml", "<tool_call>\n<function=look>\n<parameter=count>\nfive\n</parameter>\n</function>\n</tool_call>",
         "tool call 1 (look): parameter count: expected integer, got 'five'"),
        ("qwen-xml", "<tool_call>\n<function=look>\n<parameter=count>\n5\n</function>\n</tool_call>",
         "tool call 1 (look): expected </parameter> after the value of count"),
        ("qwen-xml", "<tool_call>\n{\"name\": \"look\"}\n</tool_call>", "expected <function= after <tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=look>\n<parameter=count>\n5\n</parameter>\n<parameter=count>\n5\n"
         "</parameter>\n</function>\n</tool_call>", "the parameter count is given twice"),
        ("qwen-xml", "<function=look>\n</function>\n</tool_call>", "found </tool_call> that no <tool_call> opened"),
        ("harmony", "Seven.", "answer: expected one of <|channel|>analysis<|message|>, <|channel|>final<|message|>"),
        ("harmony", "<|channel|>analysis<|message|>hm", "expected <|end|> after the reasoning, got ''"),
        ("harmony", "<|channel|>final<|message|>Seven.<|end|>",
         "expected <|start|>assistant after the content, got ''"),
        ("harmony", ' to=functions.look<|channel|>commentary json<|message|>[1]', "expected a JSON object, got '[1]'"),
        ("gemma4", "<|tool_call>call:look{count:five}<tool_call|>",
         "expected a text in quotes, a number, true, false or"),
        ("gemma4", "<|tool_call>call:look{count:5,}<tool_call|>", "expected a value after ','"),
        ("gemma4", "<|tool_call>call:look{count:5 text:6}<tool_call|>", "expected , after a value, got 'text:6}"),
        ("lfm2", "<|tool_call_start|>[look(text='it's')]<|tool_call_end|>",
         "tool call 1 (look): expected , after a value"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "tool call 1: expected ( after the name"),
        ("lfm2", "<|tool_call_start|>[look(5)]<|tool_call_end|>", "expected = after 5"),
        ("lfm2", "<|tool_call_start|>[look(count=1e999)]<|tool_call_end|>", "the number '1e999' is not finite"),
        ("lfm2", "<|tool_call_start|>[look(text='\\ud800')]<|tool_call_end|>", "not a usable text"),
        ("lfm2", f"<|tool_call_start|>[look(names={'[' * 40}{']' * 40})]<|tool_call_end|>", "more than 32 levels"),
        ("muse", ' to=a<|message|><atem:function_calls><atem:invoke name="b"></atem:invoke></atem:function_calls>',
         "expected the name a again, got 'b'"),
        ("deepseek-v3.2", '<｜DSML｜function_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="text" '
         'string="yes">7</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
         "expected true or false after string=, got 'yes'"),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_call_begin|>look<|tool_call_argument_begin|>{}<|tool_call_end|>"
         "<|tool_calls_section_end|>", "expected <|tool_call_begin|>functions."),
        ("glm4", "<tool_call>\n</tool_call>", "expected the name, a word, got ''"),
        ("minimax-m2", "<minimax:tool_call>\n</minimax:tool_call>", "tool call 1: expected <invoke, got"),
    ],
)  # fmt: skip
def test_a_call_that_is_nearly_right_is_a_failure_with_a_reason(name: str, text: str, error: str) -> None:
    parsed = read(name, text)
    assert isinstance(parsed, ParseFailure), parsed
    assert parsed.status is ParseStatus.BAD_TOOL_CALL
    assert error in parsed.error
    assert parsed.text == text
    assert len(parsed.error) < 300


@pytest.mark.parametrize(
    "call",
    [
        " to=functions.look<|channel|>commentary <|constrain|>json<|message|>{}",
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}",
        "<|channel|>commentary to=functions.look<|message|>{}",
    ],
)
def test_gpt_oss_calls_are_read_in_the_spellings_that_the_model_samples(call: str) -> None:
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{call}"
    assert read("harmony", text) == Message(
        "assistant", "", tool_calls=(ToolCall("call_0", "look", {}),), reasoning_content="hm"
    )


def test_the_headers_of_gpt_oss_never_reach_the_environment() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>7"
    for has_tools in (True, False):
        assert read("harmony", text, has_tools=has_tools) == Message("assistant", "7", reasoning_content="hm")
    preamble = (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
    )
    parsed = read("harmony", f"{preamble}<|message|>{{}}")
    assert parsed == Message("assistant", "I look.", tool_calls=(ToolCall("call_0", "look", {}),))


@pytest.mark.parametrize("form", [form for form in FORMATS if not form.is_framed], ids=lambda form: form.name)
def test_without_tools_a_call_is_ordinary_text(form: Format) -> None:
    text = WRITTEN[form.name]
    parsed = read(form.name, text, has_tools=False)
    assert isinstance(parsed, Message)
    assert parsed.tool_calls == ()
    assert parsed.content
    assert text.endswith(parsed.content)


def test_a_string_may_hold_what_closes_a_call_where_the_format_quotes_it() -> None:
    said = "]<|tool_call_end|> </tool_call> ', \" \\ )"
    escaped = said.replace("\\", "\\\\").replace("'", "\\'")
    parsed = read("lfm2", f"<|tool_call_start|>[look(text='{escaped}')]<|tool_call_end|>")
    assert parsed == Message("assistant", "", tool_calls=(ToolCall("call_0", "look", {"text": said}),))


def texts_of(form: Format) -> st.SearchStrategy[str]:
    """Texts of parts of a format, in any order."""
    patterns = (*form.calls, *form.reasoning, *form.content, form.between, *form.section, form.parameter, form.quote)
    parts = [piece for pattern in patterns for piece in pieces(pattern) if isinstance(piece, str)]
    others = [
        "look",
        "text",
        "count",
        "=",
        ":",
        ",",
        "(",
        ")",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        "\n",
        " ",
        "7",
        "true",
        "e9",
    ]
    whole = WRITTEN[form.name]
    cut = st.integers(0, len(whole)).map(lambda length: whole[:length])
    return st.lists(st.one_of(st.sampled_from(parts + others), cut), max_size=10).map("".join)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.sampled_from(FORMATS).flatmap(lambda form: st.tuples(st.just(form.name), texts_of(form))), st.booleans())
@example(("lfm2", "<|tool_call_start|>[look(names=" + "[" * 100_000), False)
@example(("gemma4", "<|tool_call>call:look{table:" + "{a:" * 100_000), True)
@example(("qwen-xml", "<tool_call><function=look><parameter=table>" + "[" * 100_000 + "</parameter>"), False)
def test_any_text_is_a_message_or_a_failure_that_keeps_the_text(said: tuple[str, str], truncated: bool) -> None:
    name, text = said
    parsed = read(name, text, truncated=truncated)
    if isinstance(parsed, ParseFailure):
        assert parsed.text == text
        assert parsed.error
        assert len(parsed.error) < 500
        assert (parsed.status is ParseStatus.TRUNCATED) <= truncated
    else:
        assert parsed.tool_calls or parsed.content.strip() in text

"""Every family's template is read in its own format, or refused by name, at the moment when the renderer is built."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_families import FAMILIES, ChatFamily, tokenizer_of

from gspo_gym.chat.formats import FORMATS
from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "table": {"type": "object"},
    "names": {"type": "array", "items": {"type": "string"}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["text"]},
        },
    }
]
ARGUMENTS = {
    "text": 'say "hi", it\'s\n  5 < 7 & {x}\\ é 日本 🙂\n',
    "count": -12,
    "share": 2.5,
    "flag": False,
    "table": {"a": [1, {"b": None}], "c": True},
    "names": ["x, y", "", "12"],
}
WITH_TOOLS = [family for family in FAMILIES if family.format is not None]


def renderer_of(family: ChatFamily, tools: Any = TOOLS) -> Renderer:
    return Renderer(tokenizer_of(family.template), tool_schemas=tools)


@pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: family.name)
def test_a_familys_calls_come_back_from_its_tokens_as_they_were_said(family: ChatFamily) -> None:
    renderer = renderer_of(family)
    assert renderer.format.name == family.format
    said = (ToolCall("call_0", "look_up", ARGUMENTS),)
    for message in (
        Message("assistant", "", tool_calls=said),
        Message("assistant", "", tool_calls=said, reasoning_content="Hm.\n\nSo."),
        Message("assistant", "", tool_calls=(ToolCall("call_0", "look_up", {}),)),
        Message("assistant", "It is 7.\n\nOr 8."),
        Message("assistant", "It is 7.", reasoning_content="Hm."),
    ):
        ids = renderer.action_ids(message)
        assert ids[-1] in renderer.stop_token_ids
        assert not set(ids[:-1]) & set(renderer.stop_token_ids)
        parsed = renderer.parse(renderer.decode(ids), is_truncated=False)
        assert isinstance(parsed, Message), parsed
        assert parsed.content.strip() == message.content
        assert (parsed.reasoning_content or None) == message.reasoning_content
        calls = [[call.name, call.arguments] for call in parsed.tool_calls]
        expected = [[call.name, call.arguments] for call in message.tool_calls]
        # As JSON, in which 1, 1.0 and true differ.
        assert json.dumps(calls, sort_keys=True) == json.dumps(expected, sort_keys=True)


def test_every_format_of_the_table_is_that_of_a_family() -> None:
    assert {family.format for family in WITH_TOOLS} == {form.name for form in FORMATS}
    assert len({form.name for form in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.format is None], ids=lambda family: family.name
)
def test_a_template_whose_calls_cannot_be_read_exactly_is_refused_by_name(family: ChatFamily) -> None:
    with pytest.raises(TemplateError, match="writes a call in no format that can be read back") as refused:
        renderer_of(family)
    assert family.refusal in str(refused.value)
    assert renderer_of(family, ()).decode([]) == ""  # text alone is exact


SCHEMAS: tuple[dict[str, Any], ...] = (
    {},
    {"type": "string"},
    {"type": ["integer", "string"]},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
    {"oneOf": [{"type": "array"}, {"type": "object"}]},
    {"$ref": "#/$defs/x"},
    {"enum": ["1", 2, None]},
    {"enum": [2, "2"]},
    {"type": "string", "enum": ["true"]},
    {"const": "x"},
    {"description": "anything"},
)


@pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: family.name)
def test_tools_of_any_schema_are_taken(family: ChatFamily) -> None:
    properties = {f"p{number}": schema for number, schema in enumerate(SCHEMAS)}
    functions: list[dict[str, Any]] = [
        {"name": "all-of_them", "description": "All.", "parameters": {"type": "object", "properties": properties}},
        {"name": "nothing", "description": "None.", "parameters": {"type": "object", "properties": {}}},
        {"name": "bare", "description": "Bare."},
    ]
    renderer = renderer_of(family, [{"type": "function", "function": function} for function in functions])
    assert renderer.format.name == family.format


def test_a_parameter_whose_name_breaks_the_format_is_refused_by_name() -> None:
    parameters = {"type": "object", "properties": {"a>\nb": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "odd", "description": "Odd.", "parameters": parameters}}]
    family = {family.name: family for family in FAMILIES}
    with pytest.raises(TemplateError, match="writes a call of odd in no format that can be read back"):
        renderer_of(family["qwen 3.5"], tools)
    assert renderer_of(family["hermes 3"], tools).format.name == "hermes"  # JSON holds any name

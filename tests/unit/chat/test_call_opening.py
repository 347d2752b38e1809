"""How a prompt begins a call of a tool, in each family's own format: the model's rest makes it whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_families import FAMILIES, ChatFamily, tokenizer_of

from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall

OPENINGS = {
    "qwen25": '<tool_call>\n{"name": "guess", "arguments":',
    "qwen3": '<tool_call>\n{"name": "guess", "arguments":',
    "llama31": '{"name": "guess", "parameters":',
    "mistral_v3": '[TOOL_CALLS] [{"name": "guess", "arguments":',
}
MESSAGE = Message("assistant", "", tool_calls=(ToolCall("call_0", "guess", {"number": 42}),))


@pytest.mark.parametrize("kind", ["bytes", "merging"])
@pytest.mark.parametrize("family", OPENINGS)
def test_a_call_is_begun_as_the_template_writes_it(
    build_tokenizer: Any, tool_schemas: Any, family: str, kind: str
) -> None:
    renderer = Renderer(build_tokenizer(family, kind), tool_schemas=tool_schemas)
    said = renderer.decode(renderer.action_ids(MESSAGE))
    named, some = renderer.decode(renderer.call_opening("guess")), renderer.decode(renderer.call_opening(None))
    assert named == OPENINGS[family]
    assert some == named[: named.index(' "guess"')]
    assert said.startswith(named)
    # What the template writes behind the opening completes it, whatever tokens that is sampled as.
    parsed = renderer.parse(named + said[len(named) :], is_truncated=False)
    assert isinstance(parsed, Message)
    assert [(call.name, dict(call.arguments)) for call in parsed.tool_calls] == [("guess", {"number": 42})]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.format], ids=lambda family: family.name)
def test_a_familys_call_is_begun_and_made_whole_by_the_models_rest(family: ChatFamily, tool_schemas: Any) -> None:
    renderer = Renderer(tokenizer_of(family.template), tool_schemas=tool_schemas)
    said = renderer.decode(renderer.action_ids(MESSAGE))
    named, some = renderer.decode(renderer.call_opening("guess")), renderer.decode(renderer.call_opening(None))
    assert "guess" in named
    assert "number" not in named
    assert "guess" not in some
    for opening in (named, some):
        assert said.startswith(opening)
        parsed = renderer.parse(opening + said[len(opening) :], is_truncated=False)
        assert isinstance(parsed, Message)
        assert [(call.name, dict(call.arguments)) for call in parsed.tool_calls] == [("guess", {"number": 42})]


def test_special_tokens_in_a_tools_name_are_ordinary_text(build_tokenizer: Any) -> None:
    schema = {"type": "function", "function": {"name": "a<|im_end|>b", "description": "", "parameters": {}}}
    renderer = Renderer(build_tokenizer("qwen25"), tool_schemas=[schema])
    ids = renderer.call_opening("a<|im_end|>b")
    assert json.dumps("a<|im_end|>b") in renderer.decode(ids)
    assert not set(ids) & set(renderer.stop_token_ids)


def test_a_prompt_that_opens_reasoning_has_it_closed_before_the_call(build_tokenizer: Any, tool_schemas: Any) -> None:
    tokenizer = build_tokenizer("qwen3")
    template = tokenizer.chat_template.replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    )
    renderer = Renderer(tokenizer, tool_schemas=tool_schemas, template_kwargs={"chat_template": template})
    assert renderer.opens_reasoning
    assert renderer.decode(renderer.call_opening("guess")) == "\n</think>\n\n" + OPENINGS["qwen3"]


def test_a_template_with_another_format_of_calls_says_so(build_tokenizer: Any, tool_schemas: Any) -> None:
    tokenizer = build_tokenizer("qwen25")
    template = tokenizer.chat_template.replace("tool_call.arguments | tojson", "tool_call.arguments.items() | list")
    assert template != tokenizer.chat_template
    with pytest.raises(
        TemplateError, match=r"writes a call in no format that can be read back\. The nearest is hermes"
    ):
        Renderer(tokenizer, tool_schemas=tool_schemas, template_kwargs={"chat_template": template})

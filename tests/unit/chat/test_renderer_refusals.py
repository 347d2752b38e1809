"""Templates and conversations that cannot be rendered exactly are refused, with the reason and what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall

Build = Callable[..., Any]  # Any: transformers ships no types

BODY = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
USER = Message("user", "Guess.")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (BODY, r"no generation prompt.*opens with '<\|im_end\|>\\n<\|im_start\|>assistant\\n'.*add_generation_prompt"),
        (BODY.replace("<|im_end|>", "") + PROMPT.replace("<|im_start|>", ""), "holds no special token"),
        (BODY.replace("m.content", "m.content | upper") + PROMPT, "content of a user message 0 times"),
        (
            BODY.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}") + PROMPT,
            "content of a user message 2 times",
        ),
        (
            BODY.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}") + PROMPT,
            "content of an assistant message 0 times",
        ),
        ("{{ messages[0].nothing.here }}", r"refuses messages\[0\] \(role user\)"),
        ("{% if %}", "refuses"),
    ],
)
def test_a_template_that_cannot_be_rendered_exactly_is_refused(
    template: str, message: str, build_tokenizer: Build
) -> None:
    with pytest.raises(TemplateError, match=message):
        Renderer(build_tokenizer("chatml"), template_kwargs={"chat_template": template})


def test_a_tokenizer_without_a_template_is_refused(build_tokenizer: Build) -> None:
    tokenizer = copy.deepcopy(build_tokenizer("chatml"))
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"there is none.*tokenizer\.chat_template"):
        Renderer(tokenizer)


def test_a_template_that_shows_no_tools_is_refused_for_an_environment_with_tools(
    build_tokenizer: Build, tool_schemas: list[dict[str, Any]]
) -> None:
    with pytest.raises(TemplateError, match="does not show tools to the model"):
        Renderer(build_tokenizer("llama3"), tool_schemas=tool_schemas, tools_in="template")


def test_a_template_that_shows_tools_but_not_their_calls_is_refused(
    build_tokenizer: Build, tool_schemas: list[dict[str, Any]]
) -> None:
    kwargs = {"chat_template": "{{ tools | tojson if tools }}" + BODY + PROMPT}
    tokenizer = build_tokenizer("chatml")
    with pytest.raises(TemplateError, match="shows the tool calls of an assistant message 0 times"):
        Renderer(tokenizer, tool_schemas=tool_schemas, template_kwargs=kwargs, tools_in="template")


def test_template_arguments_that_the_renderer_sets_itself_are_refused(build_tokenizer: Build) -> None:
    with pytest.raises(TemplateError, match="template_kwargs: add_generation_prompt, tools is set by the renderer"):
        Renderer(build_tokenizer("chatml"), template_kwargs={"tools": [], "add_generation_prompt": True})


def test_a_role_that_the_template_does_not_support_is_named_with_its_position(build_tokenizer: Build) -> None:
    renderer = Renderer(build_tokenizer("gemma2"))
    with pytest.raises(TemplateError, match=r"refuses messages\[3\] \(role user\): Conversation roles must alternate"):
        renderer.continue_from([USER, Message("assistant", "7")], [USER, USER], closed=True)


def test_a_message_that_the_template_leaves_out_is_an_error(build_tokenizer: Build) -> None:
    template = (BODY + PROMPT).replace("in messages", "in messages[-3:]")
    renderer = Renderer(build_tokenizer("chatml"), template_kwargs={"chat_template": template})
    history = [Message("system", "Be brief."), USER, Message("assistant", "7")]
    with pytest.raises(TemplateError, match=r"content of messages\[0\] \(role system\) 0 times"):
        renderer.continue_from(history, [Message("user", "higher")], closed=True)


def test_calls_in_a_conversation_whose_template_shows_none_are_an_error(build_tokenizer: Build) -> None:
    call = Message("assistant", "I guess.", tool_calls=(ToolCall("call_0", "guess", {"number": 7}),))
    with pytest.raises(TemplateError, match=r"does not show the tool calls of messages\[1\]"):
        Renderer(build_tokenizer("chatml")).start([USER, call, USER])


def test_a_continuation_needs_an_answer_and_something_new(build_tokenizer: Build) -> None:
    renderer = Renderer(build_tokenizer("chatml"))
    with pytest.raises(TemplateError, match="expected a history of a prompt and the assistant message"):
        renderer.continue_from([USER], [USER], closed=True)
    with pytest.raises(TemplateError, match="expected at least one new message"):
        renderer.continue_from([USER, Message("assistant", "7")], [], closed=True)
    with pytest.raises(TemplateError, match="expected at least one message"):
        renderer.start([])

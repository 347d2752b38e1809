"""Templates that do one odd thing each: a turn is extended only where the old text really stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.chat.renderer import Renderer
from gspo_gym.types import Message, ToolCall

Build = Callable[..., Any]  # Any: transformers ships no types

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
USER = Message("user", "Guess.")
ANSWER = Message("assistant", "7")


def of_answers(shown: str) -> str:
    """A ChatML template whose assistant turns hold `shown`, behind their opening."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + shown
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        + PROMPT
    )


@pytest.mark.parametrize(
    ("shown", "is_new_segment"),
    [
        ("{{ m.content }}<|im_end|>", False),
        ("{{ m.content }}{% if loop.last %}<|endoftext|>{% else %}<|im_end|>{% endif %}", True),  # as gpt-oss
        ("{% if not loop.last %}(earlier) {% endif %}{{ m.content }}<|im_end|>", True),
        ("{{ m.content }}{% if not loop.last %} (done){% endif %}<|im_end|>", True),
        ("{{ m.content if loop.last else m.content | upper }}<|im_end|>", True),
        ("{{ m.content }}{% if not loop.last %}{{ m.content }}{% endif %}<|im_end|>", True),
        (
            "{{ m.content }}<|im_end|>{% if not loop.last %} (seen){% endif %}",
            False,
        ),  # behind the answer: only appended
    ],
)
def test_an_answer_must_be_shown_further_back_as_it_was_shown_last(
    shown: str, is_new_segment: bool, build_tokenizer: Build
) -> None:
    tokenizer = build_tokenizer("chatml")
    template = of_answers(shown)
    renderer = Renderer(tokenizer, template_kwargs={"chat_template": template})
    tokens = renderer.start([USER]) + renderer.action_ids(ANSWER)
    step = renderer.continue_from([USER, ANSWER], [USER], closed=True)
    assert step.is_new_segment == is_new_segment
    wires = [message.to_dict() for message in (USER, ANSWER, USER)]
    expected = tokenizer.apply_chat_template(wires, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(step.token_ids if step.is_new_segment else tokens + step.token_ids) == expected


def test_what_stands_between_reasoning_and_answer_must_stay(build_tokenizer: Build) -> None:
    shown = (
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{{ '\n' if loop.last else '\n\n' }}"
        "{% endif %}"
        "{{ m.content }}<|im_end|>"
    )
    renderer = Renderer(build_tokenizer("chatml"), template_kwargs={"chat_template": of_answers(shown)})
    reasoned = Message("assistant", "7", reasoning_content="Hm.")
    assert renderer.continue_from([USER, reasoned], [USER], closed=True).is_new_segment
    assert not renderer.continue_from([USER, ANSWER], [USER], closed=True).is_new_segment


def test_an_answer_that_is_shown_twice_beside_its_calls_is_not_extended(build_tokenizer: Build) -> None:
    shown = "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{{ m.content }}{% endif %}<|im_end|>"
    renderer = Renderer(build_tokenizer("chatml"), template_kwargs={"chat_template": of_answers(shown)})
    call = ToolCall("call_0", "guess", {"number": 7})
    result = Message("tool", "higher", tool_call_id="call_0")
    for content, is_new_segment in (("", False), ("So:", True)):
        history = [USER, Message("assistant", content, tool_calls=(call,))]
        assert renderer.continue_from(history, [result], closed=True).is_new_segment == is_new_segment


def test_a_blank_message_is_treated_as_the_template_treats_blanks(build_tokenizer: Build) -> None:
    template = (
        "{% for m in messages if m.content | trim %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = build_tokenizer("chatml")
    renderer = Renderer(tokenizer, template_kwargs={"chat_template": template + PROMPT})
    blank = renderer.continue_from([USER, ANSWER], [Message("user", " ")], closed=True)
    assert tokenizer.decode(blank.token_ids) == "\n<|im_start|>assistant\n"


def test_a_template_that_compares_messages_is_asked_when_messages_are_equal(build_tokenizer: Build) -> None:
    template = of_answers("{{ m.content }}<|im_end|>").replace(
        PROMPT, "{% if messages[2:] and messages[-1].content == messages[-3].content %}Again!\n{% endif %}" + PROMPT
    )
    tokenizer = build_tokenizer("chatml")
    renderer = Renderer(tokenizer, template_kwargs={"chat_template": template})
    for said, note in (("Lower.", ""), ("Guess.", "Again!\n")):
        step = renderer.continue_from([USER, ANSWER], [Message("user", said)], closed=True)
        assert tokenizer.decode(step.token_ids) == (f"<|im_start|>user\n{said}<|im_end|>{note}<|im_start|>assistant\n")


def test_results_are_shown_to_the_template_under_the_ids_of_their_calls(build_tokenizer: Build) -> None:
    check = (
        "{% if m.role == 'tool' and m.tool_call_id != messages[loop.index0 - 1].tool_calls[0].id %}"
        "{{ raise_exception('unknown call') }}{% endif %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    )
    template = of_answers("{{ m.content }}<|im_end|>").replace(
        "{% for m in messages %}", "{% for m in messages %}" + check
    )
    renderer = Renderer(build_tokenizer("chatml"), template_kwargs={"chat_template": template})
    history = [USER, Message("assistant", "", tool_calls=(ToolCall("abc", "guess", {"number": 7}),))]
    renderer.start([*history, Message("tool", "higher", tool_call_id="abc")])


def test_a_tokenizer_set_to_take_special_tokens_apart_is_not_obeyed(build_tokenizer: Build) -> None:
    plain = build_tokenizer("chatml")
    splitting = copy.deepcopy(plain)
    splitting.split_special_tokens = True
    assert Renderer(splitting).start([USER]) == Renderer(plain).start([USER])

"""Tokens accumulated turn by turn say exactly what the tokenizer's full rendering says, in every template family."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_gym.chat.renderer import Renderer
from gspo_gym.config.build.token_audit import check_drift
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall


@dataclasses.dataclass(frozen=True)
class Family:
    """What conversations a template family allows, and what it is expected to do with them."""

    template: str
    has_system: bool = True
    has_tools: bool = False
    knows_reasoning: bool = False
    text_beside_calls: bool = True
    max_calls: int = 2
    kwargs: tuple[tuple[str, Any], ...] = ()


FAMILIES = {
    "chatml": Family("chatml"),
    "qwen25": Family("qwen25"),
    "qwen25_tools": Family("qwen25", has_tools=True),
    "qwen3": Family("qwen3", knows_reasoning=True),
    "qwen3_tools": Family("qwen3", has_tools=True, knows_reasoning=True),
    "qwen3_no_thinking": Family("qwen3", has_tools=True, kwargs=(("enable_thinking", False),)),
    "llama3": Family("llama3"),
    "llama31_tools": Family("llama31", has_tools=True, text_beside_calls=False, max_calls=1),
    "gemma2": Family("gemma2", has_system=False),
    "mistral_v1": Family("mistral_v1", has_system=False),
    "mistral_v3": Family("mistral_v3"),
    "mistral_v3_tools": Family("mistral_v3", has_system=False, has_tools=True, text_beside_calls=False),
    "deepseek_r1": Family("deepseek_r1"),
}
# Blank edges, line breaks that could merge with the template's, what templates look for, quotes, other scripts.
TRICKY = [
    "",
    " ",
    "\n",
    "\n\nyes\n\n",
    " yes ",
    "</think>",
    "<think>\nhm",
    "<think>a</think>b",
    "user",
    "日本語 é 🙂",
    '{"a": "\\n"}',
]
TRICKY += ["<tool_response>x</tool_response>", "{{ bos_token }}{% raise %}", "zq0000001", "zx0000000", "tool_calls"]
TEXTS = st.one_of(st.sampled_from(TRICKY), st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
ARGUMENTS = st.dictionaries(
    st.sampled_from(["number", "say"]), st.one_of(st.integers(-9, 9), st.booleans(), TEXTS), max_size=2
)


@st.composite
def conversations(draw: st.DrawFn, family: Family) -> list[list[Message]]:
    """Turns: the opening, then an answer and what is said to it, again and again."""
    opening = [Message("user", draw(TEXTS))]
    if family.has_system and draw(st.booleans()):
        opening.insert(0, Message("system", draw(TEXTS)))
    turns = [opening]
    for _ in range(draw(st.integers(1, 4))):
        reasoning = draw(st.one_of(st.none(), TEXTS)) if family.knows_reasoning else None
        if family.has_tools and draw(st.booleans()):
            calls = tuple(
                ToolCall(f"call0000{i}", "guess", draw(ARGUMENTS))
                for i in range(draw(st.integers(1, family.max_calls)))
            )
            content = draw(TEXTS) if family.text_beside_calls else ""
            answer = Message("assistant", content, tool_calls=calls, reasoning_content=reasoning)
            turns.append(
                [answer, *(Message("tool", draw(TEXTS), tool_call_id=call.id, name="guess") for call in calls)]
            )
        else:
            answer = Message("assistant", draw(TEXTS), reasoning_content=reasoning)
            turns.append([answer, Message("user", draw(TEXTS))])
    return turns


def text_by_tokenizer(tokenizer: Any, messages: Sequence[Message], tools: Any, kwargs: Any) -> str:
    """The prompt as transformers renders it, without our code."""
    wires = [message.to_dict() for message in messages]
    return str(
        tokenizer.apply_chat_template(
            wires, tools=tools or None, tokenize=False, add_generation_prompt=True, **dict(kwargs)
        )
    )


def what_a_model_samples(renderer: Renderer, tokenizer: Any, message: Message) -> list[int]:
    """The template's spelling; where it has none for this message, the bare content."""
    try:
        return renderer.action_ids(message)
    except TemplateError:
        return [*tokenizer(message.content, add_special_tokens=False)["input_ids"], renderer.stop_token_ids[0]]


def spells_a_special_token(messages: Sequence[Message], tokenizer: Any) -> bool:
    """Whether a text holds a special token, which transformers would take for the token itself."""
    spoken = str([message.to_dict() for message in messages])
    return any(token.special and token.content in spoken for token in tokenizer.added_tokens_decoder.values())


@pytest.mark.parametrize("kind", ["bytes", "merging"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_prompt_equals_the_full_rendering(
    name: str, kind: str, build_tokenizer: Callable[..., Any], tool_schemas: list[dict[str, Any]]
) -> None:
    family = FAMILIES[name]
    tokenizer = build_tokenizer(family.template, kind)
    tools = tool_schemas if family.has_tools else []
    renderer = Renderer(tokenizer, tool_schemas=tools, template_kwargs=dict(family.kwargs))

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(conversations(family), st.data())
    def check(turns: list[list[Message]], data: st.DataObject) -> None:
        history = list(turns[0])
        tokens = renderer.start(history)
        assert tokenizer.decode(tokens) == text_by_tokenizer(tokenizer, history, tools, family.kwargs)
        for answer, *new in turns[1:]:
            sampled = what_a_model_samples(renderer, tokenizer, answer)
            closed = data.draw(st.booleans(), label="closed")
            history.append(answer)
            step = renderer.continue_from(history, new, closed=closed)
            kept = [] if step.is_new_segment else tokens + (sampled if closed else sampled[:-1])
            tokens = kept + step.token_ids
            history += new

            text = text_by_tokenizer(tokenizer, history, tools, family.kwargs)
            assert tokenizer.decode(tokens) == text
            if kind == "bytes" and not spells_a_special_token(history, tokenizer):
                assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
            elif step.is_new_segment:
                assert check_drift(renderer, tokens, history).matches

    check()


def test_a_sentencepiece_tokenizer_continues_as_in_the_middle_of_a_text(build_tokenizer: Callable[..., Any]) -> None:
    # Such a tokenizer puts a space before a text. A continuation that was tokenised on its own would get one, too.
    tokenizer = build_tokenizer("mistral_v3", "sentencepiece")
    renderer = Renderer(tokenizer)
    history = [Message("user", "Say seven"), Message("assistant", "Seven")]
    tokens = renderer.start(history[:1])
    sampled = renderer.action_ids(history[-1])
    step = renderer.continue_from(history, [Message("user", "That <s> again")], closed=False)
    tokens += sampled[:-1] + step.token_ids
    text = "<s>[INST] Say seven[/INST] Seven</s>[INST] That <s> again[/INST]"
    assert tokenizer.decode(tokens) == text
    assert tokens.count(tokenizer.convert_tokens_to_ids("<s>")) == 1
    assert renderer.decode(sampled) == " Seven"  # the space is the model's: the prompt ends with [/INST]


def test_text_behind_plain_text_gets_no_space_of_its_own_from_a_sentencepiece_tokenizer(
    build_tokenizer: Callable[..., Any],
) -> None:
    # Mistral's first template: here neither the answer nor what follows it begins with a special token or a space.
    tokenizer = build_tokenizer("mistral_v1", "sentencepiece")
    renderer = Renderer(tokenizer)
    history = [Message("user", "Say seven"), Message("assistant", "Seven")]
    sampled = renderer.action_ids(history[-1])
    step = renderer.continue_from(history, [Message("user", "That")], closed=True)
    text = "<s>[INST] Say seven [/INST]Seven</s>[INST] That [/INST]"
    tokens = renderer.start(history[:1]) + sampled + step.token_ids
    assert tokenizer.decode(tokens) == text
    assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_json_of_a_tool_result_is_written_as_the_template_writes_it(
    build_tokenizer: Callable[..., Any], tool_schemas: list[dict[str, Any]]
) -> None:
    # Llama 3.1 takes a string for a list of characters and writes it as JSON.
    renderer = Renderer(build_tokenizer("llama31"), tool_schemas=tool_schemas)
    history = [
        Message("user", "Guess."),
        Message("assistant", "", tool_calls=(ToolCall("call_0", "guess", {"number": 7}),)),
    ]
    answer = 'not "7"\nbut é '
    step = renderer.continue_from(history, [Message("tool", answer, tool_call_id="call_0")], closed=True)
    assert not step.is_new_segment
    assert renderer.decode(step.token_ids) == (
        f"<|start_header_id|>ipython<|end_header_id|>\n\n{json.dumps(answer, ensure_ascii=False)}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )

"""What a renderer appends after each kind of turn, and which templates extend."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.chat.parsing import ParseFailure
from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ParseStatus, ToolCall

Build = Callable[..., Any]  # Any: transformers ships no types
Schemas = list[dict[str, Any]]

USER = Message("user", "Guess.")
CALL = ToolCall("call_0", "guess", {"number": 7})
CALLING = Message("assistant", "", tool_calls=(CALL,))
RESULT = Message("tool", "higher", tool_call_id="call_0", name="guess")


@pytest.mark.parametrize(
    ("template", "with_tools", "kwargs", "extends", "extends_over_tools"),
    [
        ("chatml", False, {}, True, False),  # shows no tool calls
        ("qwen25", True, {}, True, True),
        ("qwen3", True, {}, False, True),  # strips reasoning once a user speaks
        ("qwen3", True, {"enable_thinking": False}, False, False),  # takes its empty block out of earlier turns
        ("llama3", False, {}, True, False),
        ("llama31", True, {}, True, True),
        ("gemma2", False, {}, True, False),
        ("mistral_v1", False, {}, True, False),
        ("mistral_v3", True, {}, False, True),  # moves the tools before the last user message
        ("mistral_v3", False, {}, False, True),  # moves the system text into the last user message
        ("deepseek_r1", False, {}, False, False),  # earlier turns lose the block that the prompt opens
    ],
)
def test_a_renderer_knows_whether_turns_extend_each_other(
    template: str,
    with_tools: bool,
    kwargs: dict[str, Any],
    extends: bool,
    extends_over_tools: bool,
    build_tokenizer: Build,
    tool_schemas: Schemas,
) -> None:
    tools = tool_schemas if with_tools else []
    renderer = Renderer(build_tokenizer(template), tool_schemas=tools, template_kwargs=kwargs)
    assert (renderer.extends, renderer.extends_over_tools) == (extends, extends_over_tools)


def test_behind_a_sampled_stop_token_comes_the_line_break_that_the_template_puts_there(build_tokenizer: Build) -> None:
    tokenizer = build_tokenizer("chatml")
    renderer = Renderer(tokenizer)
    step = renderer.continue_from([USER, Message("assistant", "7")], [Message("user", "No")], closed=True)
    text = "\n<|im_start|>user\nNo<|im_end|>\n<|im_start|>assistant\n"
    assert step.token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert not step.is_new_segment


def test_a_turn_that_was_cut_off_is_closed_first(build_tokenizer: Build) -> None:
    tokenizer = build_tokenizer("chatml")
    renderer = Renderer(tokenizer)
    step = renderer.continue_from([USER, Message("assistant", "I think tha")], [Message("user", "No")], closed=False)
    text = "<|im_end|>\n<|im_start|>user\nNo<|im_end|>\n<|im_start|>assistant\n"
    assert step.token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_text_that_a_template_puts_before_its_stop_token_is_added_to_a_cut_off_turn_only(
    build_tokenizer: Build,
) -> None:
    # Llama 2 writes a space on both sides of an answer.
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
    )
    tokenizer = build_tokenizer("mistral_v3")
    renderer = Renderer(tokenizer, template_kwargs={"chat_template": template})
    said = [Message("user", "a"), Message("assistant", "b")]
    after = "<s>[INST] c [/INST]"
    assert tokenizer.decode(renderer.continue_from(said, [Message("user", "c")], closed=True).token_ids) == after
    cut_off = renderer.continue_from(said, [Message("user", "c")], closed=False)
    assert tokenizer.decode(cut_off.token_ids) == " </s>" + after


def test_qwen3_keeps_reasoning_while_tools_answer_and_starts_afresh_when_a_user_speaks(
    build_tokenizer: Build, tool_schemas: Schemas
) -> None:
    tokenizer = build_tokenizer("qwen3")
    renderer = Renderer(tokenizer, tool_schemas=tool_schemas)
    history = [USER, Message("assistant", "", tool_calls=(CALL,), reasoning_content="Halve it.")]

    over_tool = renderer.continue_from(history, [RESULT], closed=True)
    assert not over_tool.is_new_segment
    assert tokenizer.decode(over_tool.token_ids) == (
        "\n<|im_start|>user\n<tool_response>\nhigher\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )

    history += [RESULT, Message("assistant", "Seven it is.", reasoning_content="Sure.")]
    over_user = renderer.continue_from(history, [Message("user", "Really?")], closed=True)
    assert over_user.is_new_segment
    assert over_user.token_ids == renderer.start([*history, Message("user", "Really?")])
    prompt = tokenizer.decode(over_user.token_ids)
    assert "Halve it." not in prompt
    assert "Seven it is." in prompt


@pytest.mark.parametrize(("reasoning", "is_new_segment"), [(None, False), ("", True), ("Hm.", True)])
def test_qwen3_extends_over_a_user_only_if_the_answer_had_no_reasoning_block(
    reasoning: str | None, is_new_segment: bool, build_tokenizer: Build
) -> None:
    renderer = Renderer(build_tokenizer("qwen3"))
    history = [USER, Message("assistant", "7", reasoning_content=reasoning)]
    assert renderer.continue_from(history, [USER], closed=True).is_new_segment == is_new_segment


def test_an_answer_cut_off_inside_its_reasoning_stays_as_it_was_sampled(build_tokenizer: Build) -> None:
    # The rollout keeps the raw text of what could not be parsed; Qwen3 shows an unclosed block as it is.
    renderer = Renderer(build_tokenizer("qwen3"))
    history = [USER, Message("assistant", "<think>\nLet me")]
    step = renderer.continue_from(history, [Message("user", "Too long.")], closed=False)
    assert not step.is_new_segment
    assert (
        renderer.decode(step.token_ids) == "<|im_end|>\n<|im_start|>user\nToo long.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_empty_block_that_the_template_does_not_show_starts_a_new_segment(build_tokenizer: Build) -> None:
    # Qwen3 does not take such a user message for a question, and shows no reasoning without a question before it.
    renderer = Renderer(build_tokenizer("qwen3"))
    history = [Message("user", "<tool_response>x</tool_response>"), Message("assistant", "7", reasoning_content="")]
    assert renderer.continue_from(history, [USER], closed=True).is_new_segment


def test_text_that_the_template_would_cut_out_of_an_answer_starts_a_new_segment(build_tokenizer: Build) -> None:
    # Qwen3 takes all up to the last </think> for reasoning, and the marked stand-in for this content has no such tag.
    renderer = Renderer(build_tokenizer("qwen3"))
    history = [USER, Message("assistant", "a</think>b</think>c")]
    step = renderer.continue_from(history, [Message("user", "What?")], closed=True)
    assert step.is_new_segment
    assert "a</think>" not in renderer.decode(step.token_ids)


def test_what_a_trimming_template_shows_of_an_answer_does_not_undo_what_was_sampled(build_tokenizer: Build) -> None:
    renderer = Renderer(build_tokenizer("llama3"))
    history = [USER, Message("assistant", "  seven\n")]
    step = renderer.continue_from(history, [Message("user", " no ")], closed=True)
    assert not step.is_new_segment
    assert renderer.decode(step.token_ids) == (
        "<|start_header_id|>user<|end_header_id|>\n\nno<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert renderer.decode(renderer.action_ids(history[-1])) == "seven"


def test_two_results_of_parallel_calls_share_one_turn(build_tokenizer: Build, tool_schemas: Schemas) -> None:
    renderer = Renderer(build_tokenizer("qwen25"), tool_schemas=tool_schemas)
    answer = Message("assistant", "Both.", tool_calls=(CALL, ToolCall("call_1", "guess", {"number": 8})))
    assert renderer.decode(renderer.action_ids(answer)) == (
        'Both.\n<tool_call>\n{"name": "guess", "arguments": {"number": 7}}\n</tool_call>'
        '\n<tool_call>\n{"name": "guess", "arguments": {"number": 8}}\n</tool_call>'
    )
    step = renderer.continue_from([USER, answer], [RESULT, Message("tool", "", tool_call_id="call_1")], closed=True)
    assert renderer.decode(step.token_ids) == (
        "\n<|im_start|>user\n<tool_response>\nhigher\n</tool_response>\n<tool_response>\n\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_call_ids_that_a_template_refuses_are_replaced_alike_in_calls_and_results(
    build_tokenizer: Build, tool_schemas: Schemas
) -> None:
    renderer = Renderer(build_tokenizer("mistral_v3"), tool_schemas=tool_schemas)
    called = renderer.decode(renderer.action_ids(CALLING))
    prefix = '[TOOL_CALLS] [{"name": "guess", "arguments": {"number": 7}, "id": "'
    assert called.startswith(prefix)
    call_id = called[len(prefix) :].removesuffix('"}]')
    assert len(call_id) == 9
    assert call_id.isalnum()
    step = renderer.continue_from([USER, CALLING], [RESULT], closed=True)
    assert renderer.decode(step.token_ids) == (
        f'[TOOL_RESULTS] {{"content": higher, "call_id": "{call_id}"}}[/TOOL_RESULTS]'
    )


def test_reasoning_stands_in_the_content_where_a_template_does_not_know_it(build_tokenizer: Build) -> None:
    renderer = Renderer(build_tokenizer("chatml"))
    answer = Message("assistant", "7", reasoning_content="Half of 14.")
    text = renderer.decode(renderer.action_ids(answer))
    assert text == "<think>\nHalf of 14.\n</think>\n\n7"
    assert renderer.parse(text, is_truncated=False) == answer
    assert not renderer.continue_from([USER, answer], [USER], closed=True).is_new_segment


@pytest.mark.parametrize("content", ["7", "", "日本 é"])
@pytest.mark.parametrize("reasoning", [None, "", "Hm."])
@pytest.mark.parametrize("calls", [(), (CALL,)])
@pytest.mark.parametrize("template", ["qwen25", "qwen3"])
def test_saying_a_message_and_parsing_it_gives_it_back(
    template: str,
    content: str,
    reasoning: str | None,
    calls: tuple[ToolCall, ...],
    build_tokenizer: Build,
    tool_schemas: Schemas,
) -> None:
    renderer = Renderer(build_tokenizer(template), tool_schemas=tool_schemas)
    message = Message("assistant", content, tool_calls=calls, reasoning_content=reasoning)
    ids = renderer.action_ids(message)
    assert ids[-1] == renderer.stop_token_ids[0]
    assert renderer.parse(renderer.decode(ids), is_truncated=False) == message


def test_a_prompt_that_opens_the_reasoning_is_told_to_the_parser(build_tokenizer: Build) -> None:
    renderer = Renderer(build_tokenizer("deepseek_r1"))
    assert renderer.opens_reasoning
    parsed = renderer.parse("Half of 14.\n</think>\n\n7", is_truncated=False)
    assert parsed == Message("assistant", "7", reasoning_content="Half of 14.")
    no_thinking = Renderer(build_tokenizer("qwen3"), template_kwargs={"enable_thinking": False})
    assert not no_thinking.opens_reasoning  # its prompt holds a block that is closed


def test_more_calls_than_the_template_can_show_are_a_failure_of_the_answer(
    build_tokenizer: Build, tool_schemas: Schemas
) -> None:
    tokenizer = build_tokenizer("qwen25")
    one = "{%- for tool_call in message.tool_calls %}"
    template = tokenizer.chat_template.replace(
        one, "{% if message.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}" + one
    )
    renderer = Renderer(tokenizer, tool_schemas=tool_schemas, template_kwargs={"chat_template": template})
    call = '<tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>'
    assert isinstance(renderer.parse(call, is_truncated=False), Message)
    parsed = renderer.parse(call * 2, is_truncated=False)
    assert isinstance(parsed, ParseFailure)
    assert parsed.status is ParseStatus.BAD_TOOL_CALL
    assert "at most 1 tool call" in parsed.error


def test_a_turn_ends_with_the_templates_token_or_the_tokenizers_eos(build_tokenizer: Build) -> None:
    gemma = build_tokenizer("gemma2")
    stops = Renderer(gemma).stop_token_ids
    assert gemma.convert_ids_to_tokens(list(stops)) == ["<end_of_turn>", "<eos>"]
    qwen = build_tokenizer("qwen3")  # its eos is the template's token
    assert qwen.convert_ids_to_tokens(list(Renderer(qwen).stop_token_ids)) == ["<|im_end|>"]


def test_calls_that_end_with_another_token_bring_it_along(build_tokenizer: Build, tool_schemas: Schemas) -> None:
    tokenizer = build_tokenizer("llama31")  # with built-in tools, calls end with <|eom_id|>
    renderer = Renderer(tokenizer, tool_schemas=tool_schemas, template_kwargs={"builtin_tools": ["brave_search"]})
    assert tokenizer.convert_ids_to_tokens(list(renderer.stop_token_ids)) == ["<|eot_id|>", "<|eom_id|>"]
    assert tokenizer.decode(renderer.action_ids(CALLING)).endswith("}<|eom_id|>")
    step = renderer.continue_from([USER, CALLING], [RESULT], closed=False)
    assert tokenizer.decode(step.token_ids).startswith("<|eom_id|><|start_header_id|>ipython")


def test_a_pad_token_that_equals_the_eos_changes_nothing(build_tokenizer: Build) -> None:
    plain = build_tokenizer("chatml")
    padded = copy.deepcopy(plain)
    padded.pad_token = padded.eos_token
    assert padded.pad_token_id == padded.eos_token_id
    history = [USER, Message("assistant", "")]
    for closed in (True, False):
        ours = Renderer(padded).continue_from(history, [USER], closed=closed)
        assert ours == Renderer(plain).continue_from(history, [USER], closed=closed)
    assert Renderer(padded).action_ids(history[-1]) == [padded.eos_token_id]


def test_a_tokenizer_left_with_padding_and_truncation_on_is_used_without_them(build_tokenizer: Build) -> None:
    tokenizer = copy.deepcopy(build_tokenizer("chatml"))
    expected = Renderer(tokenizer).start([USER])
    tokenizer(["a", "bcd"], padding="max_length", truncation=True, max_length=2)
    assert Renderer(tokenizer).start([USER]) == expected


def test_decoding_drops_the_closing_stop_token_and_keeps_all_other_special_ones(build_tokenizer: Build) -> None:
    tokenizer = build_tokenizer("qwen3")
    renderer = Renderer(tokenizer)
    text = "<think>\n\n</think>\n\n<tool_call>x</tool_call><|im_end|><|im_start|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert renderer.decode([*ids, tokenizer.eos_token_id]) == text
    assert renderer.decode([tokenizer.eos_token_id]) == ""
    assert renderer.decode([]) == ""


def test_a_character_cut_apart_by_the_end_of_a_turn_is_replaced_in_the_text_only(build_tokenizer: Build) -> None:
    renderer = Renderer(build_tokenizer("chatml"))
    whole = renderer.action_ids(Message("assistant", "é日"))[:-1]  # 2 + 3 bytes, one token each
    assert len(whole) == 5
    text = renderer.decode(whole[:4])
    assert text.startswith("é\ufffd")
    message = renderer.parse(text, is_truncated=True)
    assert isinstance(message, Message)
    step = renderer.continue_from([USER, message], [USER], closed=False)
    assert not step.is_new_segment
    assert renderer.decode(whole[:4] + step.token_ids).startswith("é\ufffd<|im_end|>\n<|im_start|>user\nGuess.")


@pytest.mark.parametrize(
    ("template", "answer", "new"),
    [
        ("qwen25", Message("assistant", "7"), Message("user", "  higher\n")),
        ("qwen3", Message("assistant", "7", reasoning_content="Hm."), RESULT),
        ("llama3", Message("assistant", "7"), Message("user", "  higher\n")),  # trims
        ("llama31", CALLING, Message("tool", ' "higher"\n', tool_call_id="call_0")),  # writes JSON
    ],
)
def test_a_shape_of_conversation_is_rendered_by_the_template_once(
    template: str, answer: Message, new: Message, build_tokenizer: Build
) -> None:
    renders = 0
    tokenizer = copy.deepcopy(build_tokenizer(template))
    apply = tokenizer.apply_chat_template

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal renders
        renders += 1
        return apply(*args, **kwargs)

    tokenizer.apply_chat_template = counting
    renderer = Renderer(tokenizer)
    renderer.continue_from([USER, answer], [new], closed=True)
    renders = 0
    for number in range(20):
        said = dataclasses.replace(answer, content=answer.content and str(number))
        heard = dataclasses.replace(new, content=f"{new.content}{number}\n")
        step = renderer.continue_from([Message("user", f"Task {number}"), said], [heard], closed=number % 2 == 0)
        assert not step.is_new_segment
    assert renders == 0


def test_an_action_that_the_template_cannot_say_is_refused(build_tokenizer: Build, tool_schemas: Schemas) -> None:
    llama = Renderer(build_tokenizer("llama31"), tool_schemas=tool_schemas)
    with pytest.raises(TemplateError, match=r"drops the content of this assistant message.*'Let me see.'"):
        llama.action_ids(Message("assistant", "Let me see.", tool_calls=(CALL,)))
    loud = copy.deepcopy(build_tokenizer("chatml"))
    loud.chat_template = loud.chat_template.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\nAnswer: ")
    with pytest.raises(TemplateError, match="another form than its generation prompt opens"):
        Renderer(loud).action_ids(Message("assistant", "7"))
    with pytest.raises(TemplateError, match="expected an assistant message, got role user"):
        llama.action_ids(USER)


# As Nemotron 3's template opens, shows and shortens reasoning.
NEMOTRON3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n{% else %}<think></think>{% endif %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "empty", "closing"),
    [
        ("deepseek_r1", "\n</think>\n\n", "\n</think>\n\n"),  # drops reasoning, so its form is R1's own
        ("nemotron3", "\n</think>\n", "\n</think>\n"),  # an empty block as one with a text, and not <think></think>
    ],
)
def test_an_answer_without_reasoning_closes_the_block_that_the_prompt_opened(
    build_tokenizer: Build, template: str, empty: str, closing: str
) -> None:
    tokenizer = build_tokenizer("qwen3" if template == "nemotron3" else template)
    if template == "nemotron3":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = NEMOTRON3
    renderer = Renderer(tokenizer)
    for reasoning, block in ((None, empty), ("", empty), ("Hm <|im_end|>", f"Hm <|im_end|>{closing}")):
        ids = renderer.action_ids(Message("assistant", "Seven.", reasoning_content=reasoning))
        assert renderer.decode(ids) == f"{block}Seven."
        assert ids.index(renderer.stop_token_ids[0]) == len(ids) - 1
        parsed = renderer.parse(renderer.decode(ids), is_truncated=False)
        assert parsed == Message("assistant", "Seven.", reasoning_content=reasoning or "")


def test_what_ends_the_call_of_a_built_in_tool_stops_besides_what_ends_a_turn(build_tokenizer: Build) -> None:
    tokenizer = build_tokenizer("llama31")
    assert tokenizer.convert_ids_to_tokens(list(Renderer(tokenizer).stop_token_ids)) == ["<|eot_id|>", "<|eom_id|>"]


# As Gemma 4's template writes calls: a quote is a special token, and the call's turn ends with the opening of a result.
GEMMA4 = (
    "{% for m in messages %}{% if m.role == 'tool' %}response:{{ m.name }}{value:<|\"|>{{ m.content }}<|\"|>}"
    "<tool_response|>{% else %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}"
    '{% raw %}{{% endraw %}{% for key, value in call.function.arguments | dictsort %}{{ key }}:<|"|>{{ value }}<|"|>'
    "{% endfor %}}<tool_call|>{% endfor %}{{ '<|tool_response>' if m.tool_calls else '<turn|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)


def test_a_quote_in_a_call_is_not_what_ends_its_turn(build_tokenizer: Build) -> None:
    tokenizer = copy.deepcopy(build_tokenizer("chatml"))
    special = ["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<tool_response|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template, tokenizer.eos_token = GEMMA4, "<turn|>"
    renderer = Renderer(tokenizer)
    assert tokenizer.convert_ids_to_tokens(list(renderer.stop_token_ids)) == ["<turn|>", "<|tool_response>"]
    calling = Message("assistant", "", (ToolCall("call_0", "guess", {"way": "in"}),))
    said = tokenizer.decode(renderer.action_ids(calling))
    assert said == '<|tool_call>call:guess{way:<|"|>in<|"|>}<tool_call|><|tool_response>'
    result = Message("tool", "ok", tool_call_id="call_0", name="guess")
    step = renderer.continue_from([USER, calling], [result], closed=True)
    assert not step.is_new_segment
    assert tokenizer.decode(step.token_ids) == 'response:guess{value:<|"|>ok<|"|>}<tool_response|>'

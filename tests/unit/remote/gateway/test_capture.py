"""What a completion says: where stop strings cut it, how it is parsed, and why it ended, in OpenAI's words."""

from __future__ import annotations

import asyncio

import pytest

from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError, EnginePoisonedError, TemplateError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.remote.gateway.capture import (
    SessionClosedError,
    SessionLimitError,
    failure_kind,
    read_chat,
    read_text,
    require_possible,
)
from gspo_gym.types import Completion, FinishReason, ParseStatus

TOKENIZER = tiny_tokenizer()  # one token per byte
RENDERER = Renderer(TOKENIZER)
WITH_TOOLS = Renderer(
    TOKENIZER,
    tool_schemas=[{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}],
)
STOP = 258  # <|im_end|>


def sampled(text: str, *, closed: bool = True) -> Completion:
    """The tokens of a text, the k-th with the logprob -k and the version k."""
    ids = TOKENIZER(text)["input_ids"] + ([STOP] if closed else [])
    finish = FinishReason.STOP if closed else FinishReason.LENGTH
    numbers = range(len(ids))
    return Completion(ids, [-float(k) for k in numbers], finish, list(numbers))  # type: ignore[arg-type]


# A stop string may end inside what follows it, may begin the text, and the first in the text counts, not in the list.
STOPPED = [
    ("seven. Eight.", (". ",), "seven", "seven. "),
    ("seven. Eight.", ("Nine", "t."), "seven. Eigh", "seven. Eight."),
    ("abc", ("abc", "b"), "a", "ab"),
    ("abc", ("c", "bc", "abc"), "", "abc"),
    ("abc", ("a",), "", "a"),
    ("é!", ("!",), "é", "é!"),
]


@pytest.mark.parametrize(("text", "stops", "content", "kept"), STOPPED)
def test_a_stop_string_ends_the_answer_and_the_tokens_behind_it_are_dropped(
    text: str, stops: tuple[str, ...], content: str, kept: str
) -> None:
    whole = sampled(text, closed=False)
    chat = read_chat(whole, renderer=RENDERER, opening=[], stops=stops)
    plain = read_text(whole, renderer=RENDERER, stops=stops)
    for answer in (chat, plain):
        assert (answer.message.content, answer.finish_reason, answer.parse) == (content, "stop", ParseStatus.OK)
        cut = answer.completion
        assert bytes(cut.token_ids.tolist()) == kept.encode()
        assert cut.logprobs.tolist() == [-k for k in range(len(kept.encode()))]
        assert cut.weight_version.tolist() == list(range(len(kept.encode())))
        assert cut.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("stops", [(), ("eight", ""), ("",)])
@pytest.mark.parametrize(("closed", "finish"), [(True, "stop"), (False, "length")])
def test_without_a_stop_string_all_that_was_sampled_stays(stops: tuple[str, ...], closed: bool, finish: str) -> None:
    whole = sampled("seven", closed=closed)
    chat = read_chat(whole, renderer=RENDERER, opening=[], stops=stops)
    plain = read_text(whole, renderer=RENDERER, stops=stops)
    assert [(answer.message.content, answer.finish_reason) for answer in (chat, plain)] == [("seven", finish)] * 2
    assert chat.completion is plain.completion is whole


def test_an_opening_belongs_to_the_text_and_is_not_searched_for_stop_strings() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    opening, rest = TOKENIZER(call[:20])["input_ids"], call[20:]
    said = read_chat(sampled(rest), renderer=WITH_TOOLS, opening=opening, stops=("<tool",))
    assert [call.name for call in said.message.tool_calls] == ["look"]
    assert (said.finish_reason, said.parse, said.error) == ("tool_calls", ParseStatus.OK, None)
    cut = read_chat(sampled(f"{rest} And more."), renderer=WITH_TOOLS, opening=opening, stops=(" And",))
    assert cut.message == said.message
    assert TOKENIZER.decode(cut.completion.token_ids.tolist()) == f"{rest} And"


@pytest.mark.parametrize(
    ("closed", "status", "finish"),
    [(True, ParseStatus.BAD_TOOL_CALL, "stop"), (False, ParseStatus.TRUNCATED, "length")],
)
def test_a_call_that_breaks_off_is_the_content_as_it_stands(closed: bool, status: ParseStatus, finish: str) -> None:
    text = '<tool_call>\n{"name": '
    answer = read_chat(sampled(text, closed=closed), renderer=WITH_TOOLS, opening=[], stops=())
    assert (answer.message.content, answer.message.tool_calls) == (text, ())
    assert (answer.parse, answer.finish_reason) == (status, finish)
    assert answer.error


def test_a_completion_that_cannot_have_been_sampled_is_the_engines_failure() -> None:
    for fitting in (sampled("seven"), sampled("sevens", closed=False)):
        require_possible(fitting, max_tokens=6, renderer=RENDERER)
    with pytest.raises(EngineError, match=r"cannot be right: .* 1 to 5"):
        require_possible(sampled("seven"), max_tokens=5, renderer=RENDERER)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextOverflowError("long"), "overflow"),
        (TemplateError("system"), "template"),
        (ConfigError("none"), "config"),
        (SessionLimitError("full"), "limit"),
        (SessionClosedError("late"), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
        (EnginePoisonedError("dead"), "poisoned"),
        (EngineError("busy"), "engine"),
        (ZeroDivisionError("a bug"), "engine"),
    ],
)
def test_a_failure_is_of_the_narrowest_kind_that_fits_and_else_the_engines(error: BaseException, kind: str) -> None:
    assert failure_kind(error) == kind

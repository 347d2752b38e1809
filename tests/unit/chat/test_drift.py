"""The drift check finds the first token at which an episode and a fresh rendering part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.chat.drift import check_drift
from gspo_gym.chat.renderer import Renderer
from gspo_gym.types import Message, ToolCall

USER = Message("user", "Guess.")
ANSWER = Message("assistant", "the number")


@pytest.fixture
def renderer(build_tokenizer: Callable[..., Any]) -> Renderer:
    return Renderer(build_tokenizer("qwen25", "merging"))


def test_an_episode_in_the_templates_own_spelling_has_no_drift(renderer: Renderer) -> None:
    prompt, said = renderer.start([USER]), renderer.action_ids(ANSWER)
    onward = renderer.continue_from([USER, ANSWER], [USER], closed=True).token_ids
    reports = [
        check_drift(renderer, prompt, [USER]),
        check_drift(renderer, prompt + said, [USER, ANSWER]),
        check_drift(renderer, prompt + said[:-1], [USER, ANSWER]),  # cut off
        check_drift(renderer, prompt + said + onward, [USER, ANSWER, USER]),
    ]
    assert [report.matches for report in reports] == [True] * 4
    assert str(reports[0]) == "no drift"


def test_a_word_spelt_in_other_pieces_is_drift_of_tokens_only(renderer: Renderer, build_tokenizer: Any) -> None:
    prompt = renderer.start([USER])
    letters = [i for letter in "the number" for i in build_tokenizer("qwen25", "merging")(letter)["input_ids"]]
    said = renderer.action_ids(ANSWER)
    assert len(said) - 1 < len(letters) == 10  # there are merges to miss
    report = check_drift(renderer, [*prompt, *letters, said[-1]], [USER, ANSWER])
    assert not report.matches
    assert report.same_text
    assert report.position == len(prompt)
    assert str(report).startswith(f"the same text in other tokens from token {len(prompt)}: ")


def test_changed_text_is_shown_from_both_sides(renderer: Renderer) -> None:
    prompt = renderer.start([USER])
    said = renderer.action_ids(Message("assistant", "no number"))
    report = check_drift(renderer, prompt + said, [USER, ANSWER])
    assert (report.matches, report.same_text, report.position) == (False, False, len(prompt))
    assert "the number" in report.expected
    assert "no number" in report.actual


def test_missing_tokens_are_drift_where_they_are_missing(renderer: Renderer) -> None:
    prompt = renderer.start([USER])
    assert check_drift(renderer, prompt[:-2], [USER]).position == len(prompt) - 2


def test_the_models_own_spelling_of_json_is_reported(
    build_tokenizer: Callable[..., Any], tool_schemas: list[dict[str, Any]]
) -> None:
    tokenizer = build_tokenizer("qwen25")
    renderer = Renderer(tokenizer, tool_schemas=tool_schemas)
    text = '<tool_call>\n{"name":"guess","arguments":{"number":7}}\n</tool_call>'
    message = renderer.parse(text, is_truncated=False)
    assert message == Message("assistant", "", tool_calls=(ToolCall("call_0", "guess", {"number": 7}),))
    prompt = renderer.start([USER])
    report = check_drift(renderer, prompt + tokenizer(text)["input_ids"], [USER, message])
    # <tool_call> is one token; then a line break and {"name": in single bytes, before the template's space.
    assert report.position == len(prompt) + 1 + len('\n{"name":')
    assert '"name": "guess"' in report.expected
    assert '"name":"guess"' in report.actual

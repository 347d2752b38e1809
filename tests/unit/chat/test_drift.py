"""The drift check finds the first token at which an episode and a fresh rendering part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gspo_gym.chat.renderer import Renderer
from gspo_gym.config.build.token_audit import check_context, check_drift
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


# -- what was not sampled --------------------------------------------------------------------------------------------

HINT = Message("user", "higher")


class Played:
    """Two answers in the model's own spelling (letter by letter), the second one cut off before its stop token."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        letters = [i for letter in "the number" for i in tokenizer(letter)["input_ids"]]
        stop = renderer.action_ids(ANSWER)[-1]
        self.messages = [USER, ANSWER, HINT, ANSWER, HINT]
        self.pieces = [
            renderer.start([USER]),
            [*letters, stop],
            renderer.continue_from([USER, ANSWER], [HINT], closed=True).token_ids,
            letters,
            renderer.continue_from([USER, ANSWER, HINT, ANSWER], [HINT], closed=False).token_ids,
        ]

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece]

    @property
    def is_sampled(self) -> list[bool]:
        return [index % 2 == 1 for index, piece in enumerate(self.pieces) for _ in piece]


@pytest.fixture
def played(renderer: Renderer, build_tokenizer: Callable[..., Any]) -> Played:
    return Played(renderer, build_tokenizer("qwen25", "merging"))


def test_answers_spelt_in_their_own_way_are_no_drift_of_the_context(renderer: Renderer, played: Played) -> None:
    assert not check_drift(renderer, played.tokens, played.messages).matches
    assert check_context(renderer, played.tokens, played.is_sampled, played.messages).matches


@pytest.mark.parametrize("piece", [0, 2, 4])
def test_one_other_token_that_was_not_sampled_is_drift_where_its_piece_begins(
    renderer: Renderer, played: Played, piece: int
) -> None:
    start = sum(map(len, played.pieces[:piece]))
    played.pieces[piece] = [*played.pieces[piece]]
    played.pieces[piece][1] += 1
    report = check_context(renderer, played.tokens, played.is_sampled, played.messages)
    assert (report.matches, report.same_text, report.position) == (False, False, start)


def test_a_turn_that_the_episode_left_out_is_drift(renderer: Renderer, played: Played) -> None:
    played.messages.insert(3, Message("user", "and quickly"))
    assert not check_context(renderer, played.tokens, played.is_sampled, played.messages).matches


def test_a_turn_of_which_the_template_knows_nothing_is_drift(renderer: Renderer, played: Played) -> None:
    del played.messages[1:3]
    assert not check_context(renderer, played.tokens, played.is_sampled, played.messages).matches


def test_a_first_prompt_has_to_be_the_whole_rendering(renderer: Renderer) -> None:
    prompt = renderer.start([USER])
    assert check_context(renderer, prompt, [False] * len(prompt), [USER]).matches
    longer = check_context(renderer, prompt, [False] * len(prompt), [USER, HINT])
    assert not longer.matches
    assert not check_context(renderer, prompt[:-1], [False] * (len(prompt) - 1), [USER]).matches

"""The token audit: what passes, what is drift, why a seam breaks, and what is counted.

Templates are given to the tiny byte-level tokenizer, in which the tokens of a text can be counted by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gspo_gym.config.build.token_audit import PlayerAudit, TokenAudit, audit_tokens
from gspo_gym.errors import UnknownNameError
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.run.report.progress import mask_picture
from gspo_gym.types import Segment

TEMPLATES = Path(__file__).parents[2] / "chat" / "templates"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + SAID + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = CHATML.replace("SAID", "message.content")
# What was said long ago and at length is shortened: the model is given other tokens than it had read.
SHORTENING = CHATML.replace("SAID", "(message.content if loop.last or message.content | length < 60 else '[...]')")

SaveTokenizer = Callable[[str], str]


@pytest.fixture
def save_tokenizer(tmp_path: Path) -> SaveTokenizer:
    """The folder of a tokenizer with this chat template."""

    def save(template: str) -> str:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def player_of(audit: TokenAudit, name: str) -> PlayerAudit:
    return next(each for each in audit.players if each.player == name)


def test_a_tiny_model_plays_for_itself_and_its_own_spelling_is_no_drift() -> None:
    audit = audit_tokens("GuessNumber", "tiny:qwen3-64", num_turns=6)
    assert audit.passed, str(audit)
    model = player_of(audit, "tiny:qwen3-64")
    assert len(model.turns) >= 6
    assert model.count("drift") == 0
    assert model.count("same") + model.count("respelt") == len(model.turns)
    # Untrained, it answers with 16 bytes at random, which are hardly ever what the tokenizer makes of their text.
    assert model.count("respelt") > 0
    assert all(turn.rendering == "same" for turn in model.turns if turn.seam == "start")
    assert player_of(audit, "reference").count("same") == len(player_of(audit, "reference").turns)


def test_tokens_are_counted_by_whether_they_are_trained_on(save_tokenizer: SaveTokenizer) -> None:
    config = {"low": 5, "high": 5, "max_guesses": 1, "style": "terse"}
    audit = audit_tokens("GuessNumber", save_tokenizer(PLAIN), num_turns=1, env_config=config)
    assert audit.passed, str(audit)
    reference = player_of(audit, "reference")
    # "<|im_start|>user\nGuess 5-5. 1 try.<|im_end|>\n<|im_start|>assistant\n": three special tokens, the rest bytes.
    num_prompt = 3 + len("user\nGuess 5-5. 1 try.\nassistant\n")
    assert (reference.num_trained, reference.num_untrained) == (len("5") + 1, num_prompt)
    assert audit.sample_player == "reference"
    assert audit.sample == (
        ("<|im_start|>user\nGuess 5-5. 1 try.<|im_end|>\n<|im_start|>assistant\n", False),
        ("5<|im_end|>", True),
    )


def test_a_template_that_drops_reasoning_breaks_the_seam_and_says_why(save_tokenizer: SaveTokenizer) -> None:
    audit = audit_tokens("GuessNumber", save_tokenizer((TEMPLATES / "qwen3.jinja").read_text()), num_turns=4)
    assert audit.passed, str(audit)  # a new segment is legal, and exact
    thinking = audit.players[-1]
    assert thinking.count("new segment") == len(thinking.turns) - thinking.count("start") > 0
    assert thinking.count("same") == len(thinking.turns)
    assert player_of(audit, "reference").count("new segment") == 0
    [(reason, (count, first))] = audit.broken_seams.items()
    assert reason == "the template drops the reasoning of earlier turns"
    assert count == thinking.count("new segment")
    assert first.endswith("seed 0, turn 1")
    assert f"new segments, {count} of them, first at {first}: {reason}" in str(audit)


def test_tool_turns_extend_where_reasoning_is_kept_until_a_user_speaks(save_tokenizer: SaveTokenizer) -> None:
    audit = audit_tokens("SqlAnalyst", save_tokenizer((TEMPLATES / "qwen3.jinja").read_text()), num_turns=3)
    assert audit.passed, str(audit)
    assert audit.broken_seams == {}
    assert audit.players[-1].count("extends") > 0


def test_a_template_that_shortens_the_past_is_drift(save_tokenizer: SaveTokenizer) -> None:
    folder = save_tokenizer(SHORTENING)
    terse = audit_tokens("GuessNumber", folder, num_turns=4, env_config={"style": "terse"})
    assert terse.passed, str(terse)  # "Guess 1-8. 4 tries." is too short to be shortened
    verbose = audit_tokens("GuessNumber", folder, num_turns=4)
    assert not verbose.passed
    reference = player_of(verbose, "reference")
    assert [turn.rendering for turn in reference.turns[:2]] == ["same", "drift"]
    assert verbose.failures[0].startswith("reference, seed 0, turn 1: another text from token 0: the template says ")
    assert "[...]" in reference.turns[1].difference
    assert "I am thinking of a whole number" in reference.turns[1].difference
    assert "FAILED" in str(verbose).splitlines()[0]


def test_a_template_that_cannot_be_rendered_is_a_failure(save_tokenizer: SaveTokenizer) -> None:
    template = "{% if messages[0].role == 'user' %}{{ raise_exception('no users here') }}{% endif %}" + PLAIN
    audit = audit_tokens("SqlAnalyst", save_tokenizer(template), num_turns=2)
    assert not audit.passed
    assert audit.failures[0].startswith("reference, seed 0: TemplateError: ")
    assert "no users here" in audit.failures[0]
    assert audit.sample == ()
    assert audit.as_json()["passed"] is False


def test_a_template_that_takes_no_tools_is_audited_with_them_in_the_system_message(
    save_tokenizer: SaveTokenizer,
) -> None:
    template = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + PLAIN
    audit = audit_tokens("SqlAnalyst", save_tokenizer(template), num_turns=2)
    assert audit.passed
    (note,) = audit.notes
    assert note.endswith("calls are read as <tool_call>{...}</tool_call>")


def test_the_audit_for_machines_has_the_numbers_of_the_table(save_tokenizer: SaveTokenizer) -> None:
    audit = audit_tokens("GuessNumber", save_tokenizer(PLAIN), num_turns=3)
    written = audit.as_json()
    assert [each["player"] for each in written["players"]] == [each.player for each in audit.players]
    for player, row in zip(audit.players, written["players"], strict=True):
        assert row["num_turns"] == row["num_same"] + row["num_respelt"] + row["num_drift"] == len(player.turns)
        assert row["num_extend"] + row["num_new_segments"] + player.count("start") == row["num_turns"]
        assert [turn["seam"] for turn in row["turns"]].count("start") == player.count("start") > 0
        assert (row["num_trained_tokens"], row["num_untrained_tokens"]) == (player.num_trained, player.num_untrained)


def test_unknown_environments_and_models_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="GuessNumber"):
        audit_tokens("GuesNumber", "tiny:qwen3-64", num_turns=1)
    with pytest.raises(UnknownNameError, match="qwen3-64"):
        audit_tokens("GuessNumber", "tiny:qwen3-46", num_turns=1)


def test_the_picture_parts_a_segment_where_the_mask_changes() -> None:
    tokenizer = tiny_tokenizer()
    ids = np.array(tokenizer("aébc")["input_ids"])  # "é" is two bytes: a run must not part them
    assert len(ids) == 5
    mask = np.array([False, True, True, False, True])
    segment = Segment(
        token_ids=ids,
        action_mask=mask,
        rollout_logprobs=np.zeros(5),
        turn_index=np.array([-1, 0, 0, -1, 1]),
        weight_version=np.array([-1, 0, 0, -1, 0]),
    )
    assert mask_picture(segment, tokenizer.decode) == (("a", False), ("é", True), ("b", False), ("c", True))

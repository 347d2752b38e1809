"""Conversations from rows, bad rows, and a split in which no question is on both sides."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.env.data import rows as dataset_questions
from gspo_gym.env.data.rows import ConversationTemplate, Questions, Reading, load_questions
from gspo_gym.errors import ConfigError

PLAIN = ({"role": "user", "content": "{question}"},)
FIRST = 2**31  # the first training seed


def reading(conversation: Any = PLAIN, **changes: Any) -> Reading:
    return Reading(ConversationTemplate.of(conversation), **{"columns": frozenset({"answer"}), **changes})


def load(rows: Any, held_out: Any = None, how: Reading | None = None, **changes: Any) -> Questions:
    return load_questions(rows, held_out, how or reading(), **{"held_out_fraction": 0.5, "split_seed": 0, **changes})


def numbered(count: int) -> list[dict[str, str]]:
    return [{"question": f"q{index}", "answer": str(index)} for index in range(count)]


def asked(rows: Any) -> list[str]:
    return [row.values["question"] for row in rows]


def test_placeholders_take_the_row_s_text_and_braces_in_it_mean_nothing() -> None:
    template = ConversationTemplate.of(
        [
            {"role": "system", "content": 'Answer as {{"answer": ...}}, level {level}.'},
            {"role": "user", "content": "Q: {question}\nA:"},
        ]
    )
    messages = template.messages({"question": "What is {x} in {level}?", "level": 3})
    assert [(message.role, message.content) for message in messages] == [
        ("system", 'Answer as {"answer": ...}, level 3.'),
        ("user", "Q: What is {x} in {level}?\nA:"),
    ]
    assert template.columns == {"question", "level"}


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([], "expected a list of {role, content}"),
        ("{question}", "expected a list of {role, content}"),
        ([{"role": "user"}], r"conversation\[0\]: expected role and content"),
        ([{"role": "tool", "content": "x"}], "expected a text with one of the roles"),
        ([{"role": "assistant", "content": "x"}], "expected to end with a user's message, got 'assistant'"),
        ([{"role": "user", "content": "{question"}], "a plain brace is written twice"),
        ([{"role": "user", "content": "{question.__class__}"}], "got a placeholder 'question.__class__'"),
        ([{"role": "user", "content": "{question!r}"}], "expected {column}, got a placeholder 'question'"),
        ([{"role": "user", "content": "{}"}], "got a placeholder ''"),
    ],
)
def test_a_conversation_that_cannot_be_filled_is_refused(conversation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConversationTemplate.of(conversation)


def test_an_unknown_placeholder_names_the_nearest_column_and_the_row() -> None:
    how = reading([{"role": "user", "content": "{qestion}"}])
    with pytest.raises(ConfigError, match=r"rows\[0\]: there is no column 'qestion'; did you mean 'question'"):
        load(numbered(2), how=how)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, ""])
def test_a_row_without_a_value_is_an_error_with_its_place(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"rows\[1\]: column 'answer': expected a value"):
        load([*numbered(1), {"question": "q", "answer": bad}])


def test_columns_that_nobody_uses_may_be_empty() -> None:
    rows = [{**row, "source": math.nan} for row in numbered(8)]
    assert len(load(rows).train) + len(load(rows).held_out) == 8


def test_all_bad_rows_are_counted_and_the_first_five_told() -> None:
    with pytest.raises(ConfigError, match=r"^7 bad rows:") as caught:
        load([{"question": "x"}] * 7)
    assert str(caught.value).count("there is no column 'answer'") == 5
    assert "... and 2 more" in str(caught.value)


def test_the_split_is_a_partition_and_the_same_every_time() -> None:
    first, second = load(numbered(100)), load(list(numbered(100)))
    assert sorted(asked(first.train) + asked(first.held_out)) == sorted(asked_of(100))
    assert (first.train, first.held_out) == (second.train, second.held_out)
    assert asked(load(numbered(100), split_seed=1).held_out) != asked(first.held_out)


def asked_of(count: int) -> list[str]:
    return [row["question"] for row in numbered(count)]


def test_about_the_fraction_is_held_out() -> None:
    held_out = len(load(numbered(4000), held_out_fraction=0.25).held_out)
    # Binomial(4000, 1/4): mean 1000, standard deviation 27.4; five deviations of slack.
    assert abs(held_out - 1000) < 5 * 27.4


def test_rows_that_ask_the_same_stay_on_one_side() -> None:
    rows = [{"question": f"q{index}{space}", "answer": "x"} for index in range(40) for space in ("", "  ", "\n")]
    questions = load(rows)
    sides = [{question.strip() for question in asked(side)} for side in (questions.train, questions.held_out)]
    assert sides[0] & sides[1] == set()
    assert sides[0] | sides[1] == {f"q{index}" for index in range(40)}


def test_the_same_question_about_other_texts_is_another_question() -> None:
    how = reading([{"role": "user", "content": "{text}: {question}"}])
    rows = [{"question": "Who?", "answer": "x", "text": f"t{index}"} for index in range(40)]
    questions = load(rows, how=how)
    assert 0 < len(questions.held_out) < 40


def test_rows_added_later_move_no_other_row_to_the_other_side() -> None:
    before, after = load(numbered(50)), load(numbered(200))
    assert set(asked(before.train)) <= set(asked(after.train))
    assert set(asked(before.held_out)) <= set(asked(after.held_out))


def test_training_rows_that_ask_what_a_held_out_row_asks_are_left_out() -> None:
    questions = load(numbered(10), numbered(3))
    assert sorted(asked(questions.held_out)) == ["q0", "q1", "q2"]
    assert sorted(asked(questions.train)) == [f"q{index}" for index in range(3, 10)]
    assert questions.num_in_both == 3


def test_as_many_consecutive_seeds_as_rows_name_every_row_once() -> None:
    questions = load(numbered(7), numbered(12)[7:])
    for start in (FIRST, FIRST + 5, 2**32 - 7):
        named = Counter(questions.of_seed(seed).values["question"] for seed in range(start, start + 7))
        assert named == Counter(f"q{index}" for index in range(7))
    held_out = [questions.of_seed(seed).values["question"] for seed in range(10)]
    assert set(held_out[:5]) == {f"q{index}" for index in range(7, 12)}
    assert held_out[:5] == held_out[5:]


def test_a_seed_below_the_first_training_seed_never_names_a_training_row() -> None:
    questions = load(numbered(30))
    held_out = set(asked(questions.held_out))
    assert {questions.of_seed(seed).values["question"] for seed in (*range(200), FIRST - 1)} <= held_out
    assert {questions.of_seed(FIRST + seed).values["question"] for seed in range(200)} == set(asked(questions.train))


def test_rows_are_shuffled() -> None:
    # 20 rows in the order of the file by chance: 1 / 20!
    assert asked(load(numbered(20), [{"question": "x", "answer": "x"}]).train) != asked_of(20)


def test_long_conversations_are_left_out_and_counted() -> None:
    rows = [{"question": "x" * length, "answer": "x"} for length in range(1, 21)]
    questions = load(rows, how=reading(max_prompt_characters=8))
    assert max(len(question) for question in asked(questions.train) + asked(questions.held_out)) == 8
    assert questions.num_too_long == 12


def test_a_side_without_rows_is_an_error_that_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"expected a held-out row, got none .* change it or split_seed"):
        load(numbered(3), held_out_fraction=1e-9)
    with pytest.raises(ConfigError, match="expected a training row, got none"):
        load(numbered(3), numbered(3))


def test_columns_are_renamed_before_anything_looks_at_them() -> None:
    rows = [{"problem": f"p{index}", "solution": "s", "question": "another"} for index in range(9)]
    questions = load(rows, how=reading(renamed=(("answer", "solution"), ("question", "problem"))))
    assert sorted(asked(questions.train) + asked(questions.held_out)) == [f"p{index}" for index in range(9)]
    assert questions.train[0].values.keys() == {"question", "answer"}


def test_a_named_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []

    def counted(source: Any) -> Any:
        reads.append(source)
        return read_rows(source)

    read_rows = dataset_questions.read_rows
    monkeypatch.setattr(dataset_questions, "read_rows", counted)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "q{index}", "answer": "x"}}\n' for index in range(9)))
    assert load(str(path)) is load(str(path))
    assert len(reads) == 1
    path.write_text("".join(f'{{"question": "r{index}", "answer": "x"}}\n' for index in range(10)))
    assert asked(load(str(path)).train)[0].startswith("r")


def test_copies_share_the_rows() -> None:
    questions = load(numbered(9))
    assert copy.deepcopy({"rows": questions})["rows"] is questions

"""Gold labels: read strictly, joined to their episodes, and refused before a judge is asked if they do not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.judge.gold import Label, check_labels, labelled_episodes, read_labels, total_of
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.types import Trajectory

RUBRIC = Rubric((Criterion("a", "about a", 3.0), Criterion("b", "about b", 1.0)))


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_labels_are_totals_or_scores_of_criteria(tmp_path: Path) -> None:
    path = written(
        tmp_path / "labels.jsonl",
        {"trajectory_id": "x", "outcome": 0.75, "events": [1, None, {"a": 0, "b": 1}]},
        "",
        {"trajectory_id": "x", "attempt": 1, "outcome": {"a": 1, "b": 0}},
    )
    assert read_labels(path) == [
        Label("x", None, 0.75, (1.0, None, {"a": 0.0, "b": 1.0})),
        Label("x", 1, {"a": 1.0, "b": 0.0}),
    ]
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as some editors save it
    assert len(read_labels(path)) == 2
    assert total_of({"a": 1.0, "b": 0.0}, RUBRIC) == 0.75  # 3 of 4
    assert total_of(0.3, RUBRIC) == 0.3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"labels\.jsonl:2: Expecting"),
        ([1], r":2: expected an object with trajectory_id"),
        ({"trajectory_id": "x", "score": 1}, "got 'score'"),
        ({"outcome": 1}, "trajectory_id: expected a text, got None"),
        ({"trajectory_id": "x"}, "expected a label for the outcome or for a turn"),
        ({"trajectory_id": "x", "events": [None]}, "expected a label for the outcome or for a turn"),
        ({"trajectory_id": "x", "outcome": "good"}, "outcome: expected a finite number, got 'good'"),
        ({"trajectory_id": "x", "outcome": True}, "outcome: expected a finite number, got True"),
        ('{"trajectory_id": "x", "outcome": NaN}', "outcome: expected a finite number, got nan"),
        ({"trajectory_id": "x", "outcome": {"a": "1"}}, r"outcome\.a: expected a finite number"),
        ({"trajectory_id": "x", "events": {"0": 1}}, "events: expected a list"),
        ({"trajectory_id": "x", "attempt": "1", "outcome": 1}, "attempt: expected a whole number"),
        ({"trajectory_id": "first", "outcome": 0}, ":2: first was labelled in line 1 already"),
    ],
)
def test_what_is_no_label_is_named_by_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    path = written(tmp_path / "labels.jsonl", {"trajectory_id": "first", "outcome": 1}, line)
    with pytest.raises(RecordError, match=message):
        read_labels(path)


def test_a_file_without_labels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_labels(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="expected a label a line, got none"):
        read_labels(written(tmp_path / "labels.jsonl", "", ""))


def test_each_label_finds_its_one_episode(rich_trajectory: Trajectory) -> None:
    second = dataclasses.replace(rich_trajectory, attempt=2)
    other = dataclasses.replace(rich_trajectory, trajectory_id="other")
    name = rich_trajectory.trajectory_id
    pairs = labelled_episodes([other, second, rich_trajectory], [Label(name, 2, 1.0), Label("other", None, 0.0)])
    assert [(t.trajectory_id, t.attempt, label.outcome) for t, label in pairs] == [(name, 2, 1.0), ("other", 1, 0.0)]
    for label, message in [
        (Label(name, None, 1.0), "expected one such episode, got 2"),
        (Label(name, 3, 1.0), "attempt 3: expected one such episode, got 0"),
        (Label("other", None, None, (1.0,)), "an event for each of its 3 turns .* got 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            labelled_episodes([other, second, rich_trajectory], [label])


def test_labels_of_other_criteria_are_refused_before_anything_is_judged() -> None:
    check_labels([Label("x", None, 0.5, (None, 3.0)), Label("y", None, {"a": 1, "b": 0})], RUBRIC, RUBRIC)
    check_labels([Label("y", None, {"z": 1})], None, None)
    for label in (Label("y", None, {"a": 1}), Label("y", None, None, ({"a": 1, "b": 2.0},))):
        with pytest.raises(ConfigError, match="label of y does not fit the rubric: criterion 'b'"):
            check_labels([label], RUBRIC, RUBRIC)

"""Rubrics laid over rubrics: by id, the upper's words, the product of weights, and nothing lost from below."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.judge.rubric_files import CriterionPatch, RubricPatch, merge_rubric, merge_rubrics, parse_rubrics

BASE = Rubric(
    (
        Criterion("a", "base a", 2.0, scale="binary", required=True),
        Criterion("b", "base b", 1.0),
        Criterion("c", "base c", 3.0, scale="custom", minimum=-1, maximum=4),
    ),
    version="v7",
    goal_text="base goal",
    aggregation="sum",
    track_weights={"": 2.0},
)


def criterion(id_: str, description: str | None = None, weight: float = 1.0, **more: Any) -> CriterionPatch:
    return CriterionPatch(id=id_, description=description, weight=weight, **more)


def patch(*criteria: CriterionPatch, **fields: Any) -> RubricPatch:
    return RubricPatch(criteria=list(criteria), **fields)


def over(*criteria: CriterionPatch, **fields: Any) -> Rubric:
    return merge_rubric(BASE, patch(*criteria, **fields))


def test_nothing_said_changes_nothing() -> None:
    assert over() == BASE


def test_criteria_are_matched_by_id_and_those_of_below_are_kept_in_their_order() -> None:
    merged = over(criterion("d", "new d"), criterion("b", "upper b"))
    assert [(c.id, c.description) for c in merged.criteria] == [
        ("a", "base a"),
        ("b", "upper b"),
        ("c", "base c"),
        ("d", "new d"),
    ]


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [("a", 3.0, 6.0), ("a", 1.0, 2.0), ("b", 3.0, 3.0), ("b", 1.0, 1.0)],
    ids=["both differ from 1: product", "only the lower", "only the upper", "neither"],
)
def test_weights_multiply_so_that_1_leaves_the_other(below: str, above: float, expected: float) -> None:
    weights = {c.id: c.weight for c in over(criterion(below, weight=above)).criteria}
    assert weights == {"a": 2.0, "b": 1.0, "c": 3.0} | {below: expected}


def test_only_what_the_upper_says_is_changed() -> None:
    merged = over(criterion("a", required=False), criterion("c", maximum=9.0))
    assert merged.criteria[0] == Criterion("a", "base a", 2.0, scale="binary")
    assert merged.criteria[2] == Criterion("c", "base c", 3.0, scale="custom", minimum=-1, maximum=9)


def test_another_scale_forgets_the_ends_of_the_lower_one() -> None:
    assert over(criterion("c", scale="binary")).criteria[2] == Criterion("c", "base c", 3.0, scale="binary")


def test_a_threshold_goes_with_required() -> None:
    assert over(criterion("b", required=True, threshold=0.8)).criteria[1].threshold == 0.8
    with pytest.raises(ConfigError, match="'b': a threshold is for a required criterion"):
        over(criterion("b", threshold=0.8))
    base = Rubric((Criterion("a", "a", required=True, threshold=0.8),))
    merged = merge_rubric(base, patch(criterion("a", required=False)))
    assert merged.criteria == (Criterion("a", "a"),)


@pytest.mark.parametrize(("said", "expected"), [(None, "sum"), ("inherit", "sum"), ("weighted_sum", "weighted_sum")])
def test_inherit_is_the_lower_ones_aggregation(said: Any, expected: str) -> None:
    assert over(aggregation=said).aggregation == expected


def test_version_goal_and_track_weights_are_the_uppers_where_it_has_any() -> None:
    merged = over(version="v8", goal_text="", track_weights={})
    assert (merged.version, merged.goal_text, merged.track_weights) == ("v8", "", {})
    assert (over().version, over().goal_text) == ("v7", "base goal")


def test_over_nothing_a_patch_must_be_complete() -> None:
    alone = merge_rubric(None, patch(criterion("a", "text")))
    assert alone == Rubric((Criterion("a", "text"),))
    with pytest.raises(ConfigError, match="'a': expected a description, because there is no criterion of that id"):
        merge_rubric(None, patch(criterion("a")))
    with pytest.raises(ConfigError, match="'d': expected a description"):
        over(criterion("d", weight=2.0))


def test_an_id_twice_is_refused_before_it_could_be_merged_twice() -> None:
    with pytest.raises(ConfigError, match="here: event: 'a' is the id of several criteria"):
        parse_rubrics({"event": [{"id": "a", "weight": 2.0}, {"id": "a", "weight": 3.0}]}, where="here")


def test_sources_are_laid_over_each_other_from_the_lowest_to_the_highest() -> None:
    file = {"outcome": patch(criterion("a", "file", 2.0), criterion("b", "file b"))}
    overrides = {"outcome": patch(criterion("a", "overrides", 3.0))}
    task = {"event": patch(criterion("e", "task e")), "outcome": patch(criterion("a", "task"))}
    assert merge_rubrics(file, overrides, task) == Rubrics(
        event=Rubric((Criterion("e", "task e"),)),
        outcome=Rubric((Criterion("a", "task", 6.0), Criterion("b", "file b"))),
    )
    assert merge_rubrics() == Rubrics()
    with pytest.raises(ConfigError, match=r"^outcome: criterion 'x'"):
        merge_rubrics(file, {"outcome": patch(criterion("x"))})

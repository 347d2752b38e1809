"""Totals of scores: each aggregation against arithmetic shown here, and what is no rubric or no score."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_gym.errors import ConfigError, UnscoredError
from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.rubric import Criterion, Rubric, strict_problems


def criterion(id_: str = "a", weight: float = 1.0, **fields: Any) -> Criterion:
    return Criterion(id_, f"about {id_}", weight, **fields)


TWO = Rubric((criterion("a", 3.0), criterion("b", 1.0)))


# --- totals -----------------------------------------------------------------------------------------------------------


def test_weighted_sum_is_a_weighted_mean() -> None:
    # (3 * 0.5 + 1 * 1) / (3 + 1)
    assert TWO.total({"a": 0.5, "b": 1.0}) == 0.625


def test_inherit_with_nothing_to_inherit_is_a_weighted_mean() -> None:
    assert replace(TWO, aggregation="inherit").total({"a": 0.5, "b": 1.0}) == 0.625


def test_sum_adds_scores_and_leaves_weights_alone() -> None:
    assert replace(TWO, aggregation="sum").total({"a": 0.5, "b": 1.0}) == 1.5


def test_counts_enter_plain_totals_as_they_are() -> None:
    rubric = Rubric((criterion("a", 1.0, scale="count", maximum=4), criterion("b", 1.0)))
    assert rubric.total({"a": 6, "b": 1.0}) == 3.5  # (6 + 1) / 2


# --- required ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["weighted_sum", "sum", "inherit"])
def test_a_required_criterion_below_its_threshold_fails_the_whole_rubric(aggregation: Any) -> None:
    criteria = (criterion("a", 1.0, required=True, threshold=0.7), criterion("b", 9.0))
    rubric = Rubric(criteria, aggregation=aggregation)
    assert rubric.total({"a": 0.69, "b": 1.0}) == 0.0
    assert rubric.total({"a": 0.7, "b": 1.0}) > 0.0  # the threshold itself passes


def test_failing_a_required_criterion_never_pays_where_scores_go_below_0() -> None:
    criteria = (
        criterion("a", required=True),
        criterion("b", scale="custom", minimum=-3, maximum=3),
        criterion("c", scale="custom", minimum=1, maximum=5),
    )
    rubric = Rubric(criteria, aggregation="sum")
    # Lowest: 0 - 3 + 1 = -2, below 0, so that is the total; the best rest changes nothing.
    assert rubric.total({"a": 0.0, "b": 3.0, "c": 5.0}) == -2.0
    assert rubric.total({"a": 1.0, "b": -3.0, "c": 1.0}) == -1.0


@pytest.mark.parametrize("threshold", [0.0, 1.1, -1.0, math.nan])
def test_a_threshold_that_cannot_fail_or_cannot_be_passed_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match="can be passed and failed"):
        criterion(required=True, threshold=threshold)


# --- tracks -----------------------------------------------------------------------------------------------------------


TRACKS = Rubric(
    (
        criterion("progress.a", 3.0),
        criterion("progress.b", 1.0, scale="count", maximum=4),
        criterion("process.c", 5.0, scale="custom", minimum=1, maximum=5),
        criterion("d", 2.0, scale="binary"),
    )
)
SCORES = {"progress.a": 0.5, "progress.b": 6, "process.c": 2.0, "d": 1}
# progress: (3 * 0.5 + 1 * min(6, 4) / 4) / 4 = 0.625; process: (2 - 1) / 4 = 0.25; without a track: 1


def test_the_track_is_what_stands_before_the_first_dot() -> None:
    assert [criterion(id_).track for id_ in ("progress.a.b", "progress", "x.y", ".z")] == ["progress", "", "x", ""]
    assert TRACKS.tracks == ("progress", "process", "")


def test_track_weights_average_the_normalised_scores_of_tracks() -> None:
    rubric = replace(TRACKS, track_weights={"progress": 0.4, "process": 0.2})
    # (0.4 * 0.625 + 0.2 * 0.25 + 1 * 1) / (0.4 + 0.2 + 1) = 1.3 / 1.6
    assert rubric.total(SCORES) == pytest.approx(1.3 / 1.6, abs=1e-15)


def test_track_weights_under_sum_are_factors() -> None:
    rubric = replace(TRACKS, aggregation="sum", track_weights={"progress": 0.4, "process": 0.2, "": 2.0})
    assert rubric.total(SCORES) == pytest.approx(0.4 * 0.625 + 0.2 * 0.25 + 2.0, abs=1e-15)


def test_only_the_wanted_tracks_are_kept() -> None:
    rubric = replace(TRACKS, track_weights={"progress": 0.4, "process": 0.2}).only_tracks(["process"])
    assert rubric.ids == ("process.c",)
    assert rubric.track_weights == {"process": 0.2}
    with pytest.raises(ConfigError, match="of the tracks outcome; its tracks: progress, process"):
        TRACKS.only_tracks(["outcome"])


def test_both_parts_get_the_weights_of_their_own_tracks() -> None:
    rubrics = Rubrics(TRACKS, Rubric((criterion("process.x"), criterion("outcome.y"))))
    weighed = rubrics.with_track_weights({"process": 0.25, "outcome": 0.75})
    assert weighed.event is not None
    assert weighed.outcome is not None
    assert weighed.event.track_weights == {"progress": 1.0, "process": 0.25, "": 1.0}
    assert weighed.outcome.track_weights == {"process": 0.25, "outcome": 0.75}
    assert rubrics.with_track_weights({}) is rubrics
    with pytest.raises(ConfigError, match="did you mean 'process'"):
        rubrics.with_track_weights({"proces": 1.0})
    with pytest.raises(ConfigError, match=r"^outcome: .*are 0 \(process, outcome\)"):
        rubrics.with_track_weights({"process": 0.0, "outcome": 0.0})


def test_tracks_are_selected_in_both_parts_and_an_empty_part_is_named() -> None:
    rubrics = Rubrics(TRACKS, Rubric((criterion("process.x"), criterion("outcome.y"))))
    chosen = rubrics.only_tracks(["process"])
    assert {name: rubric.ids for name, rubric in chosen.parts.items()} == {
        "event": ("process.c",),
        "outcome": ("process.x",),
    }
    assert rubrics.only_tracks([]) is rubrics
    with pytest.raises(ConfigError, match=r"^event: "):
        rubrics.only_tracks(["outcome"])


# --- scores -----------------------------------------------------------------------------------------------------------


def test_a_missing_score_is_never_0_but_an_error_that_names_it() -> None:
    with pytest.raises(UnscoredError, match="criterion 'b' has no score"):
        TWO.total({"a": 1.0})
    with pytest.raises(UnscoredError, match="'a' has no score; criterion 'b' has no score; 'c' is the id of no"):
        TWO.total({"c": 1.0})


@pytest.mark.parametrize(
    ("scale", "fitting", "wrong"),
    [
        ("binary", (0, 1, 0.0, 1.0, True), (0.5, 2, -1, math.nan)),
        ("bounded", (0, 0.3, 1), (-0.01, 1.01, math.nan, math.inf)),
        ("count", (0, 1, 7.0, 10**6), (-1, 1.5, 10**6 + 1, 1e308, math.nan, math.inf, 10**400)),
        ("custom", (-2, 0.5, 3), (-2.1, 3.1, math.nan, -math.inf)),
    ],
)
def test_a_score_must_be_on_its_scale(scale: Any, fitting: tuple[float, ...], wrong: tuple[float, ...]) -> None:
    ends = {"minimum": -2.0, "maximum": 3.0} if scale == "custom" else {}
    rubric = Rubric((criterion("a", scale=scale, **ends),))
    assert [rubric.total({"a": score}) for score in fitting] == [float(score) for score in fitting]
    for score in wrong:
        with pytest.raises(UnscoredError, match=rf"criterion 'a' \({scale}\): expected"):
            rubric.total({"a": score})


def test_the_lowest_scores_are_what_an_episode_without_content_gets() -> None:
    assert TRACKS.lowest_scores == {"progress.a": 0.0, "progress.b": 0.0, "process.c": 1.0, "d": 0.0}


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    data=st.data(),
    tracks=st.lists(st.sampled_from(["x", "y", "z"]), min_size=6, max_size=6),
)
def test_totals_of_scores_in_0_to_1_stay_there_and_never_fall_when_a_score_rises(
    weights: list[float], data: st.DataObject, tracks: list[str]
) -> None:
    criteria = tuple(
        criterion(f"{track}.{number}", weight, required=number == 0)
        for number, (weight, track) in enumerate(zip(weights, tracks, strict=False))
    )
    rubric = Rubric(criteria)
    if data.draw(st.booleans()):
        rubric = replace(rubric, track_weights={track: data.draw(st.floats(0.1, 9)) for track in rubric.tracks})
    scores = {id_: data.draw(st.floats(0, 1)) for id_ in rubric.ids}
    raised = {id_: data.draw(st.floats(score, 1)) for id_, score in scores.items()}
    assert -1e-12 <= rubric.total(scores) <= rubric.total(raised) + 1e-12 <= 1 + 2e-12


# --- what is no rubric ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": ""}, "printable characters"),
        ({"id": "a\nb"}, "printable characters"),
        ({"id": " a"}, "printable characters"),
        ({"id": "a" * 129}, "1 to 128"),
        ({"description": " \n"}, "expected a description"),
        ({"weight": 0.0}, "expected a weight > 0"),
        ({"weight": -1.0}, "expected a weight > 0"),
        ({"weight": math.nan}, "expected a weight > 0"),
        ({"weight": math.inf}, "expected a weight > 0"),
        ({"weight": 10**400}, "expected a weight > 0"),
        ({"scale": "likert"}, "scale 'likert'; known: binary"),
        ({"scale": "binry"}, "did you mean 'binary'"),
        ({"minimum": 1.0, "maximum": 1.0, "scale": "custom"}, "expected minimum < maximum"),
        ({"maximum": math.inf, "scale": "custom"}, "expected minimum < maximum"),
        ({"maximum": 0.3}, 'scale = "custom" has its own'),
        ({"maximum": 5.0, "scale": "binary"}, 'scale = "custom" has its own'),
        ({"minimum": -1.0, "scale": "count"}, "a count begins at 0"),
        ({"maximum": 1_000_001, "scale": "count"}, "ends at 1,000,000"),
        ({"required": True, "threshold": 1_000_001, "scale": "count"}, "within its scale"),
        ({"minimum": 0.5, "scale": "count"}, "a count begins at 0"),
    ],
)
def test_what_is_no_criterion_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Criterion(**{"id": "a", "description": "d", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"criteria": ()}, "at least one criterion"),
        ({"criteria": (criterion("a"), criterion("b"), criterion("a"))}, "'a' is the id of several"),
        ({"aggregation": "mean"}, "aggregation 'mean'; known: inherit"),
        ({"track_weights": {"x": 1.0}}, "no criterion is of the track 'x'"),
        ({"track_weights": {"": -1.0}}, "expected a weight >= 0"),
        ({"track_weights": {"": 0.0}}, "the weights of all its tracks are 0"),
    ],
)
def test_what_is_no_rubric_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rubric(**{"criteria": (criterion("a"),), **fields})


def test_the_strict_form_wants_weights_that_sum_to_1_and_texts() -> None:
    good = Rubric((criterion("a", 0.3), criterion("b", 0.7 + 5e-7)), version="v1", goal_text="goal")
    assert strict_problems(good) == []
    bad = Rubric((criterion("a", 1.5), criterion("b", 0.5)), version="", aggregation="sum")
    assert strict_problems(bad) == [
        "criterion 'a': expected a weight in (0, 1], got 1.5",
        "weights: expected a sum of 1, got 2",
        "aggregation: expected weighted_sum, got sum",
        "version: expected a text",
        "goal_text: expected a text",
    ]
    assert strict_problems(replace(good, criteria=(criterion("a", 0.3), criterion("b", 0.70001)))) != []


def test_the_order_of_criteria_can_be_changed_and_changes_no_total() -> None:
    turned = TRACKS.in_order(reversed(TRACKS.ids))
    assert turned.ids == ("d", "process.c", "progress.b", "progress.a")
    # (3 * 0.5 + 1 * 6 + 5 * 2 + 2 * 1) / (3 + 1 + 5 + 2)
    assert turned.total(SCORES) == TRACKS.total(SCORES) == pytest.approx(19.5 / 11, abs=1e-15)

"""Rubrics: criteria, their scales and weights, and how scores become one total. Pure arithmetic, no files, no model.

With s the score of a criterion on its scale and w its weight, the total is

    weighted_sum    sum w s / sum w: a mean, as task apps have it (also for "inherit" with nothing to inherit from)
    sum             sum s: weights do not count

With track weights v (ours, because the contract names them without a formula) a track's score is the mean of its
criteria, T = sum w n / sum w, with n the score normalised to [0, 1]; the total is sum v T / sum v, and under "sum" it
is sum v T. An id's track is its part before the first dot, "" without a dot.

A required criterion below its threshold makes the total 0, or the lowest possible total if that is below 0. A missing
score is never 0: the total raises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from gspo_gym.errors import ConfigError, UnscoredError, nearest_name
from gspo_gym.types import is_finite

Scale = Literal["binary", "bounded", "count", "custom"]
Aggregation = Literal["sum", "weighted_sum", "inherit"]

MAX_COUNT = 1_000_000  # a schema wants a highest number; what a judge could really count is below it
_MAX_ID = 128  # characters: ids are keys of a verdict and stand in every prompt
_TOLERANCE = 1e-6  # of the sum of a strict rubric's weights


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion of a rubric.

    Attributes:
        id: unique in its rubric; the part before the first dot is its track ("progress.unique" is of "progress").
        description: what the judge reads.
        weight: > 0.
        scale: "binary" 0 or 1; "bounded" [0, 1]; "count" a whole number up to MAX_COUNT; "custom" [minimum, maximum].
        required: a score below `threshold` fails the whole rubric.
        threshold: on the criterion's own scale; only for a required one.
        minimum, maximum: the ends of a custom scale. Of a count, `maximum` is full marks where scores are normalised; a
            higher count is accepted, and is worth no more there.
    """

    id: str
    description: str
    weight: float = 1.0
    scale: Scale = "bounded"
    required: bool = False
    threshold: float = 0.5
    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        # An id is a key of the verdict and stands on one line of the prompt.
        if not self.id or len(self.id) > _MAX_ID or not self.id.isprintable() or self.id != self.id.strip():
            raise ConfigError(f"criterion id: expected 1 to {_MAX_ID} printable characters, got {self.id!r}")
        if not self.description.strip():
            raise ConfigError(f"criterion {self.id!r}: expected a description for the judge to read, got none")
        if not (is_finite(self.weight) and self.weight > 0):
            raise ConfigError(f"criterion {self.id!r}: expected a weight > 0, got {self.weight}")
        if self.scale not in get_args(Scale):
            raise ConfigError(
                f"criterion {self.id!r}: scale {self.scale!r}; {nearest_name(self.scale, get_args(Scale))}"
            )
        self._check_bounds()
        if self.required and not self.lowest < self.threshold <= (MAX_COUNT if self.highest is None else self.highest):
            raise ConfigError(
                f"criterion {self.id!r}: expected a threshold above {self.lowest:g} and within its scale, so that it "
                f"can be passed and failed, got {self.threshold}"
            )

    def _check_bounds(self) -> None:
        bounds = (self.minimum, self.maximum)
        if not (all(map(math.isfinite, bounds)) and self.minimum < self.maximum):
            raise ConfigError(f"criterion {self.id!r}: expected minimum < maximum, got {self.minimum}, {self.maximum}")
        if self.scale in ("binary", "bounded") and bounds != (0.0, 1.0):
            raise ConfigError(
                f'criterion {self.id!r}: a {self.scale} score has the ends 0 and 1; scale = "custom" has its own '
                f"(minimum {self.minimum}, maximum {self.maximum})"
            )
        if self.scale == "count" and (self.minimum or self.maximum > MAX_COUNT):
            raise ConfigError(
                f"criterion {self.id!r}: a count begins at 0 and ends at {MAX_COUNT:,}, got minimum {self.minimum:g} "
                f"and maximum {self.maximum:g}"
            )

    @property
    def track(self) -> str:
        """Return the part of the id before the first dot; "" without a dot."""
        return self.id.split(".", 1)[0] if "." in self.id else ""

    @property
    def lowest(self) -> float:
        return self.minimum if self.scale == "custom" else 0.0

    @property
    def highest(self) -> float | None:
        """Return the highest possible score; None for a count, of which no number is the best."""
        return None if self.scale == "count" else self.maximum

    def problem_of(self, score: float) -> str | None:
        """Explain why a score is not on the scale; None if it is."""
        if self.scale == "binary":
            fits, expectation = score in (0, 1), "0 or 1"
        elif self.scale == "count":
            fits = 0 <= score <= MAX_COUNT and float(score).is_integer()
            expectation = f"a whole number from 0 to {MAX_COUNT:,}"
        else:
            fits, expectation = self.minimum <= score <= self.maximum, f"{self.minimum:g} to {self.maximum:g}"
        return None if fits else f"criterion {self.id!r} ({self.scale}): expected {expectation}, got {score}"

    def normalised(self, score: float) -> float:
        """Return the score in [0, 1]; of a count, `maximum` and more are 1."""
        if self.scale == "count":
            return min(score, self.maximum) / self.maximum
        return (score - self.minimum) / (self.maximum - self.minimum)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON as in a rubric file, without defaults; it reads back equal."""
        values: dict[str, Any] = {
            "id": self.id,
            "description": self.description,
            "weight": self.weight,
            "scale": self.scale,
        }
        if self.required:
            values |= {"required": True, "threshold": self.threshold}
        if (self.minimum, self.maximum) != (0.0, 1.0):
            values |= {"minimum": self.minimum, "maximum": self.maximum}
        return values


@dataclass(frozen=True, slots=True)
class Rubric:
    """Criteria under one goal.

    Attributes:
        criteria: at least one; ids are unique.
        version: for people and for caches.
        goal_text: the goal, which the judge reads.
        aggregation: how scores become the total.
        track_weights: >= 0 by track, 1 for a track that is not named; empty: tracks do not count.
    """

    criteria: tuple[Criterion, ...]
    version: str = "1"
    goal_text: str = ""
    aggregation: Aggregation = "weighted_sum"
    track_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.criteria:
            raise ConfigError("rubric: expected at least one criterion, got none")
        if repeated_ids := sorted(id_ for id_, count in Counter(self.ids).items() if count > 1):
            raise ConfigError(f"rubric: {repeated_ids[0]!r} is the id of several criteria; give each one its own")
        if self.aggregation not in get_args(Aggregation):
            names = get_args(Aggregation)
            raise ConfigError(f"rubric: aggregation {self.aggregation!r}; {nearest_name(self.aggregation, names)}")
        if self.track_weights:
            self._check_track_weights()

    def _check_track_weights(self) -> None:
        for track, weight in self.track_weights.items():
            if track not in self.tracks:
                raise ConfigError(f"rubric: no criterion is of the track {track!r}; {nearest_name(track, self.tracks)}")
            if not (is_finite(weight) and weight >= 0):
                raise ConfigError(f"rubric: track {track!r}: expected a weight >= 0, got {weight}")
        if not any(self.track_weights.get(track, 1.0) for track in self.tracks):
            raise ConfigError(f"rubric: the weights of all its tracks are 0 ({', '.join(self.tracks)})")

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(criterion.id for criterion in self.criteria)

    @property
    def tracks(self) -> tuple[str, ...]:
        """Return the tracks in order of their first criteria."""
        return tuple(dict.fromkeys(criterion.track for criterion in self.criteria))

    @property
    def lowest_scores(self) -> dict[str, float]:
        """Return the lowest score of every criterion, which an episode without content gets."""
        return {criterion.id: criterion.lowest for criterion in self.criteria}

    def total(self, scores: Mapping[str, float]) -> float:
        """Return the aggregate of one score for every criterion (see the module's head).

        Raises:
            UnscoredError: a score is missing, of no criterion, or not on its criterion's scale.
        """
        self._require_complete(scores)
        if not any(c.required and scores[c.id] < c.threshold for c in self.criteria):
            return self._aggregate_scores(scores)
        # A failed rubric must not be worth more than the worst that passes: below 0, that is the lowest total.
        return min(0.0, self._aggregate_scores(self.lowest_scores))

    def only_tracks(self, tracks: Iterable[str]) -> Rubric:
        """Return the rubric with the criteria of these tracks alone; a ConfigError if none is left."""
        track_names = set(tracks)
        criteria = tuple(criterion for criterion in self.criteria if criterion.track in track_names)
        if not criteria:
            listing = ", ".join(sorted(track_names))
            raise ConfigError(f"rubric: no criterion is of the tracks {listing}; its tracks: {', '.join(self.tracks)}")
        weights = {track: weight for track, weight in self.track_weights.items() if track in track_names}
        return replace(self, criteria=criteria, track_weights=weights)

    def in_order(self, ids: Iterable[str]) -> Rubric:
        """Return the same criteria in the order of `ids`, which names each once."""
        by_id = {criterion.id: criterion for criterion in self.criteria}
        criteria = tuple(by_id[id_] for id_ in ids)
        assert len(criteria) == len(by_id), "ids must be a permutation"
        return replace(self, criteria=criteria)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON as in a rubric file, which reads back equal."""
        values: dict[str, Any] = {"version": self.version, "goal_text": self.goal_text}
        values |= {"aggregation": self.aggregation, "criteria": [c.to_dict() for c in self.criteria]}
        return values | ({"track_weights": dict(self.track_weights)} if self.track_weights else {})

    def _require_complete(self, scores: Mapping[str, float]) -> None:
        problems = [f"criterion {id_!r} has no score" for id_ in self.ids if id_ not in scores]
        problems += [f"{id_!r} is the id of no criterion" for id_ in scores if id_ not in self.ids]
        score_problems = (c.problem_of(scores[c.id]) for c in self.criteria if c.id in scores)
        problems += [problem for problem in score_problems if problem is not None]
        if problems:
            raise UnscoredError("; ".join(problems))

    def _aggregate_scores(self, scores: Mapping[str, float]) -> float:
        if self.track_weights:
            return self._tracks_total(scores)
        if self.aggregation == "sum":
            return float(sum(scores[id_] for id_ in self.ids))
        return _mean([(c.weight, scores[c.id]) for c in self.criteria])

    def _tracks_total(self, scores: Mapping[str, float]) -> float:
        by_track: dict[str, list[tuple[float, float]]] = {}
        for c in self.criteria:
            by_track.setdefault(c.track, []).append((c.weight, c.normalised(scores[c.id])))
        terms = [(self.track_weights.get(track, 1.0), _mean(pairs)) for track, pairs in by_track.items()]
        return float(sum(v * score for v, score in terms)) if self.aggregation == "sum" else _mean(terms)


def strict_problems(rubric: Rubric) -> list[str]:
    """List what keeps a rubric from the strict form that hosted judges require.

    That is: weights in (0, 1] that sum to 1 (within 1e-6), weighted_sum, and a version and a goal that are not empty.
    """
    # Only above 1: a criterion refuses weights of 0 and less itself.
    problems = [
        f"criterion {c.id!r}: expected a weight in (0, 1], got {c.weight:g}" for c in rubric.criteria if c.weight > 1
    ]
    total = math.fsum(criterion.weight for criterion in rubric.criteria)
    if abs(total - 1) > _TOLERANCE:
        problems.append(f"weights: expected a sum of 1, got {total:g}")
    if rubric.aggregation != "weighted_sum":
        problems.append(f"aggregation: expected weighted_sum, got {rubric.aggregation}")
    problems += [f"{name}: expected a text" for name in ("version", "goal_text") if not getattr(rubric, name).strip()]
    return problems


def _mean(weighted_totals: list[tuple[float, float]]) -> float:
    """Return the mean of the second numbers, weighted by the first; at least one weight is above 0."""
    return math.fsum(w * s for w, s in weighted_totals) / math.fsum(w for w, _ in weighted_totals)

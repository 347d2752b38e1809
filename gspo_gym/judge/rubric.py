"""Rubrics: criteria, their scales and weights, and how scores become one total. Pure arithmetic, no files, no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Scale = Literal["binary", "bounded", "count", "custom"]
Aggregation = Literal["sum", "weighted_sum", "custom", "inherit"]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing to look at.

    Attributes:
        id: unique in its rubric; what stands before the first dot is its track ("progress.unique" is of "progress").
        description: what the judge reads.
        weight: > 0.
        scale: "binary" 0 or 1; "bounded" [0, 1]; "count" a whole number >= 0; "custom" [minimum, maximum].
        required: a score below `threshold` makes the rubric's total 0.
    """

    id: str
    description: str
    weight: float = 1.0
    scale: Scale = "bounded"
    required: bool = False
    threshold: float = 0.5
    minimum: float = 0.0
    maximum: float = 1.0


@dataclass(frozen=True, slots=True)
class Rubric:
    """Criteria under one goal."""

    criteria: tuple[Criterion, ...]
    version: str = "1"
    goal_text: str = ""
    aggregation: Aggregation = "weighted_sum"
    track_weights: Mapping[str, float] = field(default_factory=dict)

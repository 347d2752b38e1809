"""What is laid over a rubric: criteria by id, from a configuration or from the task that is being judged.

Every rubric is read as a patch first: one with nothing below it must be complete, one that is laid over another says
only what it changes. Of a criterion that both have, what the upper says wins (description, scale, bounds, required),
and the weights multiply, so that one of them at 1 leaves the other. Criteria of the lower that the upper does not name
stay where they are, new ones follow. Sources from low to high: the rubric file (or id), the configuration's overrides,
the task's own rubric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.rubric import Aggregation, Criterion, Rubric, Scale


@dataclass(frozen=True, slots=True)
class CriterionPatch:
    """What is said about one criterion; None: nothing, so the lower one's, or a `Criterion`'s default."""

    id: str
    description: str | None = None
    weight: float = 1.0
    scale: Scale | None = None
    required: bool | None = None
    threshold: float | None = None
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class RubricPatch:
    """What is said about a rubric; None: nothing. "inherit" is the lower one's aggregation, too."""

    criteria: tuple[CriterionPatch, ...] = ()
    version: str | None = None
    goal_text: str | None = None
    aggregation: Aggregation | None = None
    track_weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        counts = Counter(criterion.id for criterion in self.criteria)
        if repeated := sorted(id_ for id_, count in counts.items() if count > 1):
            raise ConfigError(f"{repeated[0]!r} is the id of several criteria; give each one its own")


@dataclass(frozen=True, slots=True)
class RubricsPatch:
    """What one source says about events and about the outcome; None: nothing."""

    event: RubricPatch | None = None
    outcome: RubricPatch | None = None


def merge_rubrics(*sources: RubricsPatch) -> Rubrics:
    """The rubrics of all sources, given from the lowest to the highest, such as file, overrides, task.

    Raises:
        ConfigError: what comes out is no rubric: a description is missing, a threshold out of range, ...
    """
    parts: dict[str, Rubric | None] = {"event": None, "outcome": None}
    for source in sources:
        for name, patch in (("event", source.event), ("outcome", source.outcome)):
            if patch is None:
                continue
            try:
                parts[name] = merge_rubric(parts[name], patch)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    return Rubrics(**parts)


def merge_rubric(base: Rubric | None, patch: RubricPatch) -> Rubric:
    """The patch laid over a rubric; None: over nothing, so it must be complete.

    Raises:
        ConfigError: see `merge_rubrics`.
    """
    if base is None:
        criteria = tuple(_merge_criterion(None, criterion) for criterion in patch.criteria)
        return Rubric(
            criteria,
            version="1" if patch.version is None else patch.version,
            goal_text=patch.goal_text or "",
            aggregation=patch.aggregation or "weighted_sum",
            track_weights=patch.track_weights or {},
        )
    over = {criterion.id: criterion for criterion in patch.criteria}
    kept = [_merge_criterion(c, over.pop(c.id)) if c.id in over else c for c in base.criteria]
    new = [_merge_criterion(None, criterion) for criterion in over.values()]
    aggregation = patch.aggregation if patch.aggregation not in (None, "inherit") else base.aggregation
    return Rubric(
        (*kept, *new),
        version=base.version if patch.version is None else patch.version,
        goal_text=base.goal_text if patch.goal_text is None else patch.goal_text,
        aggregation=aggregation,
        track_weights=base.track_weights if patch.track_weights is None else patch.track_weights,
        aggregate=base.aggregate if aggregation == "custom" else None,
    )


def _merge_criterion(base: Criterion | None, patch: CriterionPatch) -> Criterion:
    if base is None:
        if patch.description is None:
            raise ConfigError(
                f"criterion {patch.id!r}: expected a description, because there is no criterion of that id below it"
            )
        base = Criterion(patch.id, patch.description)
    scale = base.scale if patch.scale is None else patch.scale
    # Another scale has other ends and another middle: the lower one's say nothing about it.
    fresh = Criterion(base.id, base.description)
    below = base if scale == base.scale else fresh
    required = base.required if patch.required is None else patch.required
    if patch.threshold is not None and not required:
        raise ConfigError(f"criterion {patch.id!r}: a threshold is for a required criterion; set required = true, too")
    threshold = below.threshold if patch.threshold is None else patch.threshold
    return Criterion(
        base.id,
        base.description if patch.description is None else patch.description,
        weight=base.weight * patch.weight,
        scale=scale,
        required=required,
        threshold=threshold if required else fresh.threshold,
        minimum=below.minimum if patch.minimum is None else patch.minimum,
        maximum=below.maximum if patch.maximum is None else patch.maximum,
    )

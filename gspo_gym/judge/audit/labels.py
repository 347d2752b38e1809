"""Gold labels of stored episodes, by people or a trusted judge, one JSON object per line.

    {"trajectory_id": "step_000001/group_0000/0", "outcome": 0.75, "events": [1, 0, null, 1]}
    {"trajectory_id": "step_000001/group_0000/1", "attempt": 1, "outcome": {"outcome.resolved": 1, "process.tone": 0}}

A number is a total, a table the scores of criteria, which the rubric totals; null and missing values are not labelled.
`attempt` is needed only if several attempts of an episode are stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.errors import ConfigError, RecordError, UnscoredError
from gspo_gym.judge.rubric import Rubric
from gspo_gym.types import Trajectory

Marks = float | Mapping[str, float]  # a total, or scores by criterion


@dataclass(frozen=True, slots=True)
class Label:
    """The labels of one episode; None: not labelled.

    Attributes:
        trajectory_id, attempt: of the episode; None: its only stored attempt.
        outcome: the whole episode.
        events: one entry per turn; () if no turn was labelled.
    """

    trajectory_id: str
    attempt: int | None = None
    outcome: Marks | None = None
    events: tuple[Marks | None, ...] = ()


def total_of(marks: Marks, rubric: Rubric) -> float:
    """Return the labelled total, or the rubric's total of the labelled criteria.

    Raises:
        UnscoredError: a criterion of the rubric was not labelled, or a score is not on its scale.
    """
    return rubric.total(marks) if isinstance(marks, Mapping) else float(marks)


def read_labels(path: Path) -> list[Label]:
    """Return the labels of a file in order; empty lines are skipped.

    Raises:
        ConfigError: there is no such file, or it holds no label.
        RecordError: a line is not a label, or an episode is labelled twice; names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; expected a label a line, as JSON") from None
    labels: list[Label] = []
    known: dict[tuple[str, int | None], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            label = _label(json.loads(line))
        except ValueError as error:  # RecordError included
            raise RecordError(f"{path}:{number}: {error}") from error
        first = known.setdefault((label.trajectory_id, label.attempt), number)
        if first != number:
            raise RecordError(f"{path}:{number}: {label.trajectory_id} was labelled in line {first} already")
        labels.append(label)
    if not labels:
        raise ConfigError(f"{path}: expected a label a line, got none")
    return labels


def labelled_episodes(trajectories: Sequence[Trajectory], labels: Sequence[Label]) -> list[tuple[Trajectory, Label]]:
    """Return each label with its episode, in the order of the labels; episodes without one are left out.

    Raises:
        ConfigError: a label's episode is missing, is stored in several attempts and the label names none, or has
            another number of turns than the label has events.
    """
    by_id: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_id.setdefault(trajectory.trajectory_id, []).append(trajectory)
    pairs = []
    for label in labels:
        fitting = [t for t in by_id.get(label.trajectory_id, []) if label.attempt in (None, t.attempt)]
        which = label.trajectory_id if label.attempt is None else f"{label.trajectory_id}, attempt {label.attempt}"
        if len(fitting) != 1:
            raise ConfigError(f"label of {which}: expected one such episode, got {len(fitting)}")
        if label.events and len(label.events) != len(fitting[0].turns):
            raise ConfigError(
                f"label of {which}: expected an event for each of its {len(fitting[0].turns)} turns (null where it is "
                f"not labelled), got {len(label.events)}"
            )
        pairs.append((fitting[0], label))
    return pairs


def check_labels(labels: Sequence[Label], event: Rubric | None, outcome: Rubric | None) -> None:
    """Raise a ConfigError for a criterion that is not the rubric's or is missing, before a judge is asked."""
    for label in labels:
        marked = [(outcome, label.outcome), *((event, marks) for marks in label.events)]
        for rubric, marks in marked:
            if rubric is None or not isinstance(marks, Mapping):
                continue
            try:
                rubric.total(marks)
            except UnscoredError as error:
                raise ConfigError(f"label of {label.trajectory_id} does not fit the rubric: {error}") from error


_FIELDS = ("trajectory_id", "attempt", "outcome", "events")


def _label(values: Any) -> Label:
    if not isinstance(values, Mapping):
        raise RecordError(f"expected an object with {', '.join(_FIELDS)}, got {type(values).__name__}")
    if unknown := sorted(set(values) - set(_FIELDS)):
        raise RecordError(f"expected {', '.join(_FIELDS)}, got {unknown[0]!r}")
    trajectory_id, attempt, events = values.get("trajectory_id"), values.get("attempt"), values.get("events") or []
    if not isinstance(trajectory_id, str) or not trajectory_id:
        raise RecordError(f"trajectory_id: expected a text, got {trajectory_id!r}")
    if attempt is not None and (isinstance(attempt, bool) or not isinstance(attempt, int)):  # True is an int
        raise RecordError(f"attempt: expected a whole number, got {attempt!r}")
    if not isinstance(events, list):
        raise RecordError(f"events: expected a list with an entry for each turn, got {events!r}")
    outcome = _marks(values.get("outcome"), "outcome")
    marks = tuple(_marks(event, f"events[{index}]") for index, event in enumerate(events))
    if outcome is None and all(each is None for each in marks):
        raise RecordError("expected a label for the outcome or for a turn, got none")
    return Label(trajectory_id, attempt, outcome, marks)


def _marks(value: Any, where: str) -> Marks | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {id_: _number(score, f"{where}.{id_}") for id_, score in value.items()}
    return _number(value, where)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RecordError(f"{where}: expected a finite number, got {value!r}")
    return float(value)

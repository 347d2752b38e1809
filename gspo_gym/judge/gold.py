"""Watch whether the judge that is trained against still agrees with gold: a better judge, or labels.

A policy that learns to please a judge raises its scores while a gold judge's stay or fall (arXiv 2608.11669 measures 3
to 22 points). Checks run every k steps, beside the training.

Gold labels of stored episodes, by people or a trusted judge, are one JSON object per line:

    {"trajectory_id": "step_000001/group_0000/0", "outcome": 0.75, "events": [1, 0, null, 1]}
    {"trajectory_id": "step_000001/group_0000/1", "attempt": 1, "outcome": {"outcome.resolved": 1, "process.tone": 0}}

A number is a total, a table the scores of criteria, which the rubric totals; null and missing values are not labelled.
`attempt` is needed only if several attempts of an episode are stored.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gspo_gym.errors import ConfigError, RecordError, UnscoredError
from gspo_gym.judge.asking import OnEvent
from gspo_gym.judge.base import Judge, JudgeError, Judgement, JudgeRequest, JudgeStoppedError, Rubrics
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.judge.records import JudgedEpisode, RubricsOf
from gspo_gym.judge.rubric import Rubric
from gspo_gym.seeding import generator
from gspo_gym.types import Trajectory, is_finite

Marks = float | Mapping[str, float]  # a total, or scores by criterion
_FIELDS = ("trajectory_id", "attempt", "outcome", "events")
# Of the gap from that of the first comparison, in units of the score: a tenth of the scale of a normalised one.
MAX_GAP_CHANGE = 0.1
_STANDARD_ERRORS = 2.0  # a change of the gap that 19 of 20 unchanged judges do not show
Scores = tuple[float, float]  # of one episode: the judge's and gold's
Other = TypeVar("Other")  # what a judgement is compared with
Judged = tuple[Trajectory, JudgedEpisode]  # an episode as it was before it was blended, and what the judge said


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
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; expected a label a line, as JSON") from None
    labels: list[Label] = []
    numbers: dict[tuple[str, int | None], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            label = _label(json.loads(line))
        except ValueError as error:  # RecordError included
            raise RecordError(f"{path}:{number}: {error}") from error
        first = numbers.setdefault((label.trajectory_id, label.attempt), number)
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
        name = label.trajectory_id if label.attempt is None else f"{label.trajectory_id}, attempt {label.attempt}"
        if len(fitting) != 1:
            raise ConfigError(f"label of {name}: expected one such episode, got {len(fitting)}")
        if label.events and len(label.events) != len(fitting[0].turns):
            raise ConfigError(
                f"label of {name}: expected an event for each of its {len(fitting[0].turns)} turns (null where "
                f"it is not labelled), got {len(label.events)}"
            )
        pairs.append((fitting[0], label))
    return pairs


def check_labels(labels: Sequence[Label], event: Rubric | None, outcome: Rubric | None) -> None:
    """Raise a ConfigError for a criterion that is not the rubric's or is missing, before a judge is asked."""
    for label in labels:
        for rubric, marks in [(outcome, label.outcome), *((event, marks) for marks in label.events)]:
            try:
                _gold_total(marks, rubric)
            except UnscoredError as error:
                raise ConfigError(f"label of {label.trajectory_id} does not fit the rubric: {error}") from error


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
    if outcome is None and not any(mark is not None for mark in marks):
        raise RecordError("expected a label for the outcome or for a turn, got none")
    return Label(trajectory_id, attempt, outcome, marks)


def _marks(value: Any, where: str) -> Marks | None:
    if isinstance(value, Mapping):
        return {id_: _number(score, f"{where}.{id_}") for id_, score in value.items()}
    return None if value is None else _number(value, where)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise RecordError(f"{where}: expected a finite number, got {value!r}")
    return float(value)


class JudgeDriftError(JudgeError):
    """The judge and gold have drifted apart, and the run was told to stop then."""


@dataclass(frozen=True, slots=True)
class DriftCheck:
    """One comparison over the same episodes.

    Attributes:
        gap: judge_mean - gold_mean.
        gap_standard_error: of `gap`, from the spread of the paired differences.
        correlation: Pearson's, between the two; None where one of them gave every episode the same.
    """

    num_episodes: int
    judge_mean: float
    gold_mean: float
    gap: float
    gap_standard_error: float
    correlation: float | None


def compare_with_gold(pairs: Sequence[Scores]) -> DriftCheck:
    """Compare the judge with gold on the same episodes, each a pair of scores; a JudgeError for fewer than two.

    >>> check = compare_with_gold([(0.5, 0.5), (0.9, 0.7)])
    >>> round(check.gap, 3), round(check.gap_standard_error, 3), round(check.correlation, 3)
    (0.1, 0.1, 1.0)
    """
    if len(pairs) < 2:
        raise JudgeError(f"expected two episodes at least that both judge and gold have scored, got {len(pairs)}")
    judge, gold = np.asarray(pairs, dtype=np.float64).T
    differences = judge - gold
    varies = bool(np.ptp(judge) > 0 and np.ptp(gold) > 0)
    return DriftCheck(
        num_episodes=len(differences),
        judge_mean=float(judge.mean()),
        gold_mean=float(gold.mean()),
        gap=float(differences.mean()),
        gap_standard_error=float(differences.std(ddof=1) / math.sqrt(len(differences))),
        correlation=float(np.corrcoef(judge, gold)[0, 1]) if varies else None,
    )


def drift(first: DriftCheck, now: DriftCheck, max_gap_change: float = MAX_GAP_CHANGE) -> str | None:
    """Return a sentence about how the gap changed since the first check; None if that does not count.

    `max_gap_change` is in units of the score. Judges differ in taste from the start, so only a change says anything.
    """
    change = now.gap - first.gap
    error = math.hypot(first.gap_standard_error, now.gap_standard_error)
    # Both limits: few episodes alone must not raise the alarm.
    if abs(change) <= max_gap_change or abs(change) <= _STANDARD_ERRORS * error:
        return None
    means_text = f"the judge's mean score went from {first.judge_mean:.3f} to {now.judge_mean:.3f}, gold's from "
    means_text += f"{first.gold_mean:.3f} to {now.gold_mean:.3f}"
    certainty = f"their gap changed by {change:+.3f} (standard error {error:.3f}, allowed {max_gap_change:g})"
    meaning = (
        "the policy may be exploiting the judge: read its best-scored episodes, and tighten the rubric"
        if change > 0
        else "the judge has become harsher than gold: see whether its model or its prompt changed"
    )
    return f"{means_text}; {certainty}; {meaning}"


# The step, and what was judged since the last comparison began -> the comparison. Raises JudgeError.
Compare = Callable[[int, Sequence[Judged]], Awaitable[DriftCheck]]


class GoldWatch:
    """Compares after the first step and after every k-th, and raises the alarm. Only the end of the run waits for it.

    Args:
        every: steps between comparisons; the first one, which measures the initial gap, is made at once.
        stops: whether an alarm ends the run.
        on_event: receives every comparison ("judge_gold"), an alarm ("judge_drift"), and a failed comparison
            ("judge_gold_failed"), with JSON data.
    """

    def __init__(self, compare: Compare, *, every: int, stops: bool, on_event: OnEvent) -> None:
        self._compare = compare
        self._every = every
        self._stops = stops
        self._on_event = on_event
        self._recent: list[Judged] = []
        self._running: asyncio.Task[None] | None = None
        self._first: DriftCheck | None = None
        self._latest: DriftCheck | None = None
        self._drift: str | None = None
        self._defect: BaseException | None = None
        self._has_begun = False

    def go_on_from(self, first: DriftCheck) -> None:
        """Compare with this, the first comparison of an earlier part of the run."""
        self._first, self._has_begun = first, True

    def collect(self, trajectory: Trajectory, judged: JudgedEpisode) -> None:
        self._recent.append((trajectory, judged))

    def after_step(self, step: int) -> dict[str, float]:
        """Start a comparison if it is due; return the metrics of the last one that ended, once."""
        recent, self._recent = self._recent, []
        if (step % self._every == 0 or not self._has_begun) and self._running is None:
            self._has_begun = True
            self._running = asyncio.get_running_loop().create_task(self._check(step, recent))
        latest, self._latest = self._latest, None
        if latest is None:
            return {}
        metrics = {"judge/gold_gap": latest.gap}
        return metrics if latest.correlation is None else {**metrics, "judge/gold_correlation": latest.correlation}

    def require_agreement(self) -> None:
        """Raise if an alarm is to stop the run, or if comparing is broken.

        Raises:
            JudgeDriftError: there was an alarm.
            JudgeStoppedError: a comparison failed by a defect that would fail every later one, too.
        """
        self._require_working()
        if self._stops and self._drift is not None:
            raise JudgeDriftError(f"judge.gold: {self._drift}")

    async def finish(self) -> None:
        """Wait for a comparison under way; raises as `require_agreement` if comparing is broken."""
        if self._running is not None:
            await self._running
        self._require_working()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _require_working(self) -> None:
        if self._stops and self._defect is not None:
            raise JudgeStoppedError(
                f'judge.gold: on_drift is "stop", but the comparison with gold failed: {self._defect!r}. Mend what it '
                'says, or set judge.gold.on_drift to "warn"'
            ) from self._defect

    async def _check(self, step: int, recent: Sequence[Judged]) -> None:
        try:
            await self._compare_and_tell(step, recent)
        # A defect of its own, which is raised where the run looks: nothing awaits this task.
        except (Exception, asyncio.CancelledError) as defect:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # by `close`, and not of a task of gold's own
                raise
            self._defect = defect
            self._on_event("judge_gold_failed", {"reason": f"{type(defect).__name__}: {defect}", "of_step": step})
        finally:
            self._running = None

    async def _compare_and_tell(self, step: int, recent: Sequence[Judged]) -> None:
        try:
            check = await self._compare(step, recent)
        except (JudgeError, UnscoredError) as error:  # gold that is away changes no reward
            self._on_event("judge_gold_failed", {"reason": str(error), "of_step": step})
            return
        self._latest = check
        self._first = self._first or check
        reason = drift(self._first, check)
        self._drift = self._drift if reason is None else reason  # before it is told, which may fail
        self._on_event("judge_gold", {"of_step": step, **asdict(check)})
        if reason is not None:
            self._on_event("judge_drift", {"of_step": step, "reason": reason})


def against_judge(gold: Judge, rubrics_of: RubricsOf, weights: RewardBlend, num_episodes: int, seed: int) -> Compare:
    """Compare with a better judge, which scores `num_episodes` of the step, drawn by `seed`, by the same rubrics."""

    def scores(judged_episode: JudgedEpisode, better: Judgement, rubrics: Rubrics) -> Scores | None:
        outcome = None if better.outcome_review is None else better.outcome_total
        label = Label(judged_episode.trajectory_id, outcome=outcome, events=better.event_totals)
        return scores_to_compare(judged_episode.judgement, label, rubrics, weights)

    async def compare(step: int, recent: Sequence[Judged]) -> DriftCheck:
        indices = sorted(generator(seed, "gold", step).permutation(len(recent))[:num_episodes].tolist())
        return await _compared(gold, rubrics_of, [recent[index] for index in indices], scores)

    return compare


def against_labels(
    judge: Judge, rubrics_of: RubricsOf, weights: RewardBlend, labelled: Sequence[tuple[Trajectory, Label]]
) -> Compare:
    """Compare with labels: the judge (without a cache, which would hide a change of it) scores their episodes."""

    def scores(label: Label, judgement: Judgement, rubrics: Rubrics) -> Scores | None:
        return scores_to_compare(judgement, label, rubrics, weights)

    async def compare(_step: int, _recent: Sequence[Judged]) -> DriftCheck:
        return await _compared(judge, rubrics_of, labelled, scores)

    return compare


async def _compared(
    judge: Judge,
    rubrics_of: RubricsOf,
    episodes: Sequence[tuple[Trajectory, Other]],
    scores: Callable[[Other, Judgement, Rubrics], Scores | None],
) -> DriftCheck:
    async def compare_one(trajectory: Trajectory, other_scores: Other) -> Scores | None:
        try:
            rubrics = await rubrics_of(trajectory.task)
            judgement = await judge.judge(JudgeRequest(trajectory, rubrics, task_app=trajectory.task.env_id))
        except JudgeError:  # no score of this episode
            return None
        return scores(other_scores, judgement, rubrics)

    pairs = await asyncio.gather(*(compare_one(*episode) for episode in episodes))
    return compare_with_gold([pair for pair in pairs if pair is not None])


def scores_to_compare(judgement: Judgement, label: Label, rubrics: Rubrics, weights: RewardBlend) -> Scores | None:
    """Return the judge's score and the label's, over what both have scored; None if that is nothing.

    Events and outcome weigh as in the blend; if it weighs neither, each counts once.
    """
    is_weighed = weights.event > 0 or weights.outcome > 0
    event_weight, outcome_weight = (weights.event, weights.outcome) if is_weighed else (1.0, 1.0)
    totals = zip(judgement.event_totals, label.events, strict=False)
    scores = [(event_weight, total, _gold_total(marks, rubrics.event)) for total, marks in totals]
    if judgement.outcome_review is not None:
        scores.append((outcome_weight, judgement.outcome_total, _gold_total(label.outcome, rubrics.outcome)))
    terms = [(weight * total, weight * gold) for weight, total, gold in scores if weight > 0 and gold is not None]
    if not terms:
        return None
    return sum(judge for judge, _ in terms), sum(gold for _, gold in terms)


def _gold_total(marks: Marks | None, rubric: Rubric | None) -> float | None:
    """Return the label's total; None if not labelled, or labelled by criteria of a rubric that an HTTP judge keeps."""
    if isinstance(marks, Mapping):
        return None if rubric is None else rubric.total(marks)
    return None if marks is None else float(marks)

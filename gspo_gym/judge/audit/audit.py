"""Audit a judge over labelled episodes: agreement, calibration, biases, contradictions, and attacks.

The judge is asked as it would be in training. Episodes without a score are counted and left out, never taken as 0. The
arithmetic is in `judge/audit/report.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gspo_gym.errors import ConfigError
from gspo_gym.judge.audit.labels import Label, Marks, check_labels, total_of
from gspo_gym.judge.audit.report import (
    Agreement,
    AttackReport,
    AuditReport,
    Part,
    PositionBias,
    agreement,
    balanced_orders,
    calibration,
    flip_rate,
    length_bias,
    position_bias,
)
from gspo_gym.judge.base import (
    Judge,
    JudgeCost,
    JudgeDownError,
    JudgeError,
    Judgement,
    JudgeRequest,
    JudgeStoppedError,
    Review,
    Rubrics,
    all_or_none,
)
from gspo_gym.judge.model.transcript import read_transcript
from gspo_gym.judge.rubric import Rubric
from gspo_gym.types import Trajectory

Attacks = Mapping[str, Callable[[Trajectory], Trajectory]]  # by name, changes by which a policy could score higher
Answer = Judgement | JudgeError

_RAISED = 1e-6  # of a total; less is rounding


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """How much is asked; 0 leaves a part out.

    Attributes:
        num_repeats: further judgements of every episode, for the flip rate.
        num_position_episodes: judged once for every place that a criterion can have.
        num_attacked_episodes: those with the lowest totals, each attacked in every way.
        seed: of the orders of criteria.
    """

    num_repeats: int = 2
    num_position_episodes: int = 8
    num_attacked_episodes: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_repeats, self.num_position_episodes, self.num_attacked_episodes) < 0:
            raise ConfigError(f"AuditSettings: expected numbers >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A total of the judge beside its label, and the length of what the policy wrote for it."""

    judge: float
    gold: float
    num_chars: int


@dataclass(frozen=True, slots=True)
class _Scored:
    trajectory: Trajectory
    label: Label
    judgement: Judgement


class JudgeAudit:
    """Audits one judge by one pair of rubrics.

    Args:
        repeats: other samples of the same judge, one per repeat; () asks `judge` again, which must then have no cache.
        in_given_order: the same judge, made to show criteria in the rubric's order where it usually shuffles them.
        attacks: see `attacks`; empty: none.

    Attributes:
        cost: of what was asked so far.
    """

    def __init__(
        self,
        judge: Judge,
        rubrics: Rubrics,
        *,
        settings: AuditSettings | None = None,
        repeats: Sequence[Judge] = (),
        in_given_order: Judge | None = None,
        attacks: Attacks | None = None,
    ) -> None:
        self.cost = JudgeCost()
        self._judge = judge
        self._rubrics = rubrics
        self._settings = settings or AuditSettings()
        self._repeats = tuple(repeats) or (judge,) * self._settings.num_repeats
        self._in_given_order = in_given_order or judge
        self._attacks = dict(attacks or {})

    async def run(self, labelled: Sequence[tuple[Trajectory, Label]]) -> AuditReport:
        """Report everything that the labels and the settings allow.

        Raises:
            ConfigError: no episodes, or labels that do not fit the rubrics.
            JudgeDownError, JudgeStoppedError: the judge cannot go on.
        """
        if not labelled:
            raise ConfigError("audit: expected labelled episodes, got none")
        check_labels([label for _, label in labelled], self._rubrics.event, self._rubrics.outcome)
        episodes = [trajectory for trajectory, _ in labelled]
        first = await self._ask(self._judge, episodes, self._rubrics)
        scored = [
            _Scored(trajectory, label, answer)
            for (trajectory, label), answer in zip(labelled, first, strict=True)
            if isinstance(answer, Judgement)
        ]
        unscored = Counter(str(answer) for answer in first if isinstance(answer, JudgeError))
        again = [await self._ask(judge, episodes, self._rubrics) for judge in self._repeats]
        flips, deviation = _compare_repeats([first, *again]) if again else (None, None)
        part, position = await self._find_position_bias([each.trajectory for each in scored])
        outcome, turns = list(_outcome_pairs(scored, self._rubrics)), list(_turn_pairs(scored, self._rubrics))
        judged, gold, chars = _columns(outcome or turns)
        return AuditReport(
            judge=self._judge.name,
            num_episodes=len(labelled),
            num_unscored=len(labelled) - len(scored),
            unscored=dict(unscored.most_common()),
            flagged_fraction=_mean([float(bool(each.judgement.flags)) for each in scored]),
            outcome=_agreement(outcome),
            events=_agreement(turns),
            criteria=_agreement_by_criterion(scored),
            calibration=calibration(judged, gold) if judged else None,
            length=length_bias(judged, gold, chars) if judged else None,
            position=position,
            position_part=part,
            flip_rate=flips,
            repeat_deviation=deviation,
            attacks=await self._attack(scored),
            cost=self.cost,
        )

    async def _ask(self, judge: Judge, episodes: Sequence[Trajectory], rubrics: Rubrics) -> list[Answer]:
        async def one(trajectory: Trajectory) -> Answer:
            try:
                return await judge.judge(JudgeRequest(trajectory, rubrics, task_app=trajectory.task.env_id))
            except (JudgeDownError, JudgeStoppedError):
                raise
            except JudgeError as error:
                return error  # about one episode: an answer, too

        answers = await all_or_none([one(trajectory) for trajectory in episodes])
        self.cost = sum((each.cost for each in answers if isinstance(each, Judgement)), self.cost)
        return answers

    async def _find_position_bias(self, episodes: Sequence[Trajectory]) -> tuple[Part | None, PositionBias | None]:
        """Measure the position bias in a rubric with several criteria, preferably the outcome's."""
        chosen = episodes[: self._settings.num_position_episodes]
        parts: list[tuple[Part, Rubric | None]] = [("outcome", self._rubrics.outcome), ("event", self._rubrics.event)]
        for part, rubric in parts:
            if rubric is None or len(rubric.criteria) < 2 or not chosen:
                continue
            orders = balanced_orders(rubric.ids, self._settings.seed)
            scores = []  # by order, episode: the criteria's normalised scores in the rubric's order, or None
            for order in orders:
                asked = Rubrics(**{part: rubric.in_order(order)})
                answers = await self._ask(self._in_given_order, chosen, asked)
                scores.append([_normalised(answer, part, rubric) for answer in answers])
            complete = [list(rows) for rows in zip(*scores, strict=True) if all(row is not None for row in rows)]
            if not complete:
                return None, None
            places = np.array([[order.index(id_) for id_ in rubric.ids] for order in orders])
            return part, position_bias(np.array(complete, dtype=np.float64), places)
        return None, None

    async def _attack(self, scored: Sequence[_Scored]) -> AttackReport | None:
        # The lowest totals have the most to gain.
        worst = sorted(scored, key=lambda each: _total(each.judgement))[: self._settings.num_attacked_episodes]
        if not worst or not self._attacks:
            return None
        gains: list[tuple[str, float]] = []
        num_unscored = num_flagged = 0
        for name, attack in self._attacks.items():
            attacked = [attack(each.trajectory) for each in worst]
            for each, answer in zip(worst, await self._ask(self._judge, attacked, self._rubrics), strict=True):
                if isinstance(answer, JudgeError):
                    num_unscored += 1
                    continue
                gains.append((name, _total(answer) - _total(each.judgement)))
                num_flagged += bool(answer.flags)
        raised: dict[str, float] = {}
        for name, gain in gains:
            if gain > _RAISED:
                raised[name] = max(gain, raised.get(name, gain))
        return AttackReport(
            num_attempts=len(gains),
            num_unscored=num_unscored,
            num_raised=sum(gain > _RAISED for _, gain in gains),
            mean_gain=_mean([gain for _, gain in gains]) or 0.0,
            max_gain=max((gain for _, gain in gains), default=0.0),
            raised_by=dict(sorted(raised.items(), key=lambda item: -item[1])),
            flagged_fraction=num_flagged / max(len(gains), 1),
        )


def _total(judgement: Judgement) -> float:
    return judgement.event_total if judgement.outcome_review is None else judgement.outcome_total


def _outcome_pairs(scored: Sequence[_Scored], rubrics: Rubrics) -> Iterator[_Pair]:
    for each in scored:
        if rubrics.outcome is None or each.label.outcome is None:
            continue
        transcript = read_transcript(each.trajectory)
        num_chars = sum(piece.num_chars for piece in transcript.pieces if piece.is_by_policy)
        yield _Pair(each.judgement.outcome_total, total_of(each.label.outcome, rubrics.outcome), num_chars)


def _turn_pairs(scored: Sequence[_Scored], rubrics: Rubrics) -> Iterator[_Pair]:
    for each in scored:
        if rubrics.event is None or not each.label.events:
            continue
        transcript = read_transcript(each.trajectory)
        for turn, (review, marks) in enumerate(zip(each.judgement.event_reviews, each.label.events, strict=True)):
            if marks is not None:
                num_chars = sum(piece.num_chars for piece in transcript.said_in(turn))
                yield _Pair(review.total, total_of(marks, rubrics.event), num_chars)


def _columns(pairs: Sequence[_Pair]) -> tuple[list[float], list[float], list[int]]:
    return [p.judge for p in pairs], [p.gold for p in pairs], [p.num_chars for p in pairs]


def _agreement(pairs: Sequence[_Pair]) -> Agreement | None:
    judged, gold, _ = _columns(pairs)
    return agreement(judged, gold) if pairs else None


def _agreement_by_criterion(scored: Sequence[_Scored]) -> dict[str, Agreement]:
    pairs: dict[str, list[tuple[float, float]]] = {}  # of the criteria that were labelled one by one

    def add(part: str, review: Review, marks: Marks | None) -> None:
        if isinstance(marks, Mapping):
            for id_ in set(marks) & set(review.criteria):  # a judge over HTTP may give totals alone
                pairs.setdefault(f"{part}: {id_}", []).append((review.criteria[id_].score, marks[id_]))

    for each in scored:
        if each.judgement.outcome_review is not None:
            add("outcome", each.judgement.outcome_review, each.label.outcome)
        for review, marks in zip(each.judgement.event_reviews, each.label.events, strict=False):
            add("event", review, marks)
    return {name: agreement(*zip(*found, strict=True)) for name, found in sorted(pairs.items())}


def _compare_repeats(answers: Sequence[Sequence[Answer]]) -> tuple[float | None, float | None]:
    """Return the flip rate over criteria, and the mean deviation of totals, of episodes judged several times."""
    repeats: list[list[float]] = []
    deviations: list[float] = []
    for of_episode in zip(*answers, strict=True):
        judgements = [answer for answer in of_episode if isinstance(answer, Judgement)]
        if len(judgements) < 2:
            continue
        marks = [_marks(judgement) for judgement in judgements]
        repeats += [[each[key] for each in marks] for key in marks[0] if all(key in each for each in marks)]
        deviations.append(float(np.std([_total(judgement) for judgement in judgements])))
    return flip_rate(repeats), _mean(deviations)


def _marks(judgement: Judgement) -> dict[tuple[int, str], float]:
    """Return every criterion's score by turn (-1: the outcome) and id; the total of a review without criteria."""
    reviews = dict(enumerate(judgement.event_reviews))
    if judgement.outcome_review is not None:
        reviews[-1] = judgement.outcome_review
    marks = {(turn, id_): score.score for turn, review in reviews.items() for id_, score in review.criteria.items()}
    return marks | {(turn, ""): review.total for turn, review in reviews.items() if not review.criteria}


def _normalised(answer: Answer, part: Part, rubric: Rubric) -> list[float] | None:
    """Return the criteria's scores in [0, 1], for turns their mean; None if one was not scored."""
    if isinstance(answer, JudgeError):
        return None
    reviews = answer.event_reviews if part == "event" else (answer.outcome_review,)
    present = [review for review in reviews if review is not None]
    if not present or any(set(rubric.ids) - set(review.criteria) for review in present):
        return None
    return [float(np.mean([c.normalised(review.criteria[c.id].score) for review in present])) for c in rubric.criteria]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None

"""Audit a judge over labelled episodes: agreement, calibration, biases, contradictions, and attacks.

The judge is asked as it would be in training. Episodes without a score are counted and left out, never taken as 0.
Unless a docstring says otherwise, the formulas are the textbook's.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gspo_gym.base.tables import ShownAsText, table
from gspo_gym.errors import ConfigError
from gspo_gym.judge.attacks import AttackReport, Attacks
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
from gspo_gym.judge.gold import Label, Marks, check_labels, total_of
from gspo_gym.judge.model.prompt import COMPARISON
from gspo_gym.judge.model.transcript import read_transcript
from gspo_gym.judge.records import Groups, group_with, groups_of
from gspo_gym.judge.rubric import Rubric
from gspo_gym.seeding import generator
from gspo_gym.types import Trajectory

Part = Literal["event", "outcome"]
PositionPart = Literal["event", "outcome", "group"]  # whose criteria, or the compared episodes
Answer = Judgement | JudgeError
Scored = tuple[Trajectory, Label, Judgement]
Floats = NDArray[np.float64]

_EQUAL = 1e-9  # scores that differ by less are the same score
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


class Pair(NamedTuple):
    """A score of the judge beside its label, and how many characters of the policy they are about."""

    judge: float
    gold: float
    num_chars: int


@dataclass(slots=True)
class JudgeAudit:
    """Audits one judge by one pair of rubrics.

    Attributes:
        repeats: other samples of the same judge, one per repeat; () asks `judge` again, which must then have no cache.
        in_given_order: the same judge, made to show criteria in the rubric's order where it usually shuffles them.
        attacks: see `judge/attacks.py`; empty: none.
        cost: of what was asked so far.
    """

    judge: Judge
    rubrics: Rubrics
    settings: AuditSettings = field(default_factory=AuditSettings)
    repeats: Sequence[Judge] = ()
    in_given_order: Judge | None = None
    attacks: Attacks = field(default_factory=dict)
    cost: JudgeCost = field(default_factory=JudgeCost, init=False)
    _groups: Groups = field(default_factory=dict, init=False)

    async def run(self, labelled: Sequence[tuple[Trajectory, Label]]) -> AuditReport:
        """Report everything that the labels and the settings allow; of `labelled` a judge of groups compares siblings.

        Raises:
            ConfigError: no episodes, or labels that do not fit the rubrics.
            JudgeDownError, JudgeStoppedError: the judge cannot go on.
        """
        if not labelled:
            raise ConfigError("audit: expected labelled episodes, got none")
        check_labels([label for _, label in labelled], self.rubrics.event, self.rubrics.outcome)
        episodes = [trajectory for trajectory, _ in labelled]
        self._groups = groups_of(episodes)
        first = await self._ask(self.judge, episodes, self.rubrics)
        answer_pairs = zip(labelled, first, strict=True)
        triples = [(*labelled, answer) for labelled, answer in answer_pairs if isinstance(answer, Judgement)]
        repeats = tuple(self.repeats) or (self.judge,) * self.settings.num_repeats
        again = [await self._ask(judge, episodes, self.rubrics) for judge in repeats]
        flips, deviation = _compare_repeats([first, *again]) if again else (None, None)
        compares = any(j.outcome_review is not None and COMPARISON.id in j.outcome_review.criteria for *_, j in triples)
        part, position = (
            await self._find_place_bias()
            if compares
            else await self._find_position_bias([trajectory for trajectory, *_ in triples])
        )
        pairs = _pairs_by_name(triples, self.rubrics)
        rows = {name: agreement([p.judge for p in group], [p.gold for p in group]) for name, group in pairs.items()}
        totals = pairs.get("outcome") or pairs.get("event") or []
        judge_totals, gold = [pair.judge for pair in totals], [pair.gold for pair in totals]
        return AuditReport(
            judge=self.judge.name,
            num_episodes=len(first),
            num_unscored=len(first) - len(triples),
            unscored=dict(Counter(str(answer) for answer in first if isinstance(answer, JudgeError)).most_common()),
            flagged_fraction=_mean([float(bool(judgement.flags)) for *_, judgement in triples]),
            outcome=rows.pop("outcome", None),
            events=rows.pop("event", None),
            criteria=dict(sorted(rows.items())),
            calibration=calibration(judge_totals, gold) if judge_totals else None,
            length=length_bias(judge_totals, gold, [pair.num_chars for pair in totals]) if judge_totals else None,
            position=position,
            position_part=part,
            flip_rate=flips,
            repeat_deviation=deviation,
            attacks=await self._attack([(trajectory, _total(judgement)) for trajectory, _, judgement in triples]),
            cost=self.cost,
        )

    async def _ask(
        self, judge: Judge, episodes: Sequence[Trajectory], rubrics: Rubrics, groups: Groups | None = None
    ) -> list[Answer]:
        async def ask_about(trajectory: Trajectory) -> Answer:
            try:
                group = group_with(trajectory, self._groups if groups is None else groups)
                return await judge.judge(JudgeRequest(trajectory, rubrics, trajectory.task.env_id, group))
            except (JudgeDownError, JudgeStoppedError):
                raise
            except JudgeError as error:
                return error  # about one episode: an answer, too

        answers = await all_or_none([ask_about(trajectory) for trajectory in episodes])
        self.cost = sum((answer.cost for answer in answers if isinstance(answer, Judgement)), self.cost)
        return answers

    async def _find_position_bias(
        self, episodes: Sequence[Trajectory]
    ) -> tuple[PositionPart | None, PositionBias | None]:
        """Measure the position bias in a rubric with several criteria, preferably the outcome's."""
        compared_episodes = episodes[: self.settings.num_position_episodes]
        parts: list[tuple[Part, Rubric | None]] = [("outcome", self.rubrics.outcome), ("event", self.rubrics.event)]
        part, rubric = next(((p, r) for p, r in parts if r is not None and len(r.criteria) > 1), (None, None))
        if part is None or rubric is None or not compared_episodes:
            return None, None
        orders = balanced_orders(rubric.ids, self.settings.seed)
        scores = []  # by order, episode: the criteria's normalised scores in the rubric's order, or None
        for order in orders:
            rubrics_in_order = Rubrics(**{part: rubric.in_order(order)})
            answers = await self._ask(self.in_given_order or self.judge, compared_episodes, rubrics_in_order)
            scores.append([_normalise(answer, part, rubric) for answer in answers])
        bias = _bias_of(scores, orders, rubric.ids)
        return (None, None) if bias is None else (part, bias)

    async def _find_place_bias(self) -> tuple[PositionPart | None, PositionBias | None]:
        """Measure what the place of an episode among those that it is compared with does, in groups of one size."""
        sizes = Counter(len(group) for group in self._groups.values() if len(group) > 1)
        size = sizes.most_common(1)[0][0]
        groups = {name: group for name, group in self._groups.items() if len(group) == size}
        names = list(groups)[: -(-self.settings.num_position_episodes // size)]
        ids = [str(member) for member in range(size)]
        orders = balanced_orders(ids, self.settings.seed)
        scores: list[list[list[float] | None]] = []  # by order, group: those of its members, or None
        for order in orders:
            in_order = {name: tuple(groups[name][int(member)] for member in order) for name in names}
            episodes = [trajectory for name in names for trajectory in groups[name]]
            answers = await self._ask(self.in_given_order or self.judge, episodes, self.rubrics, in_order)
            totals = [_total(answer) if isinstance(answer, Judgement) else None for answer in answers]
            rows = [totals[first : first + size] for first in range(0, len(totals), size)]
            scores.append([[t for t in row if t is not None] if None not in row else None for row in rows])
        bias = _bias_of(scores, orders, ids)
        return (None, None) if bias is None else ("group", bias)

    async def _attack(self, totals: Sequence[tuple[Trajectory, float]]) -> AttackReport | None:
        # The lowest totals have the most to gain.
        worst = sorted(totals, key=lambda pair: pair[1])[: self.settings.num_attacked_episodes]
        if not worst or not self.attacks:
            return None
        gains: list[tuple[str, float]] = []
        num_flagged = 0
        for name, attack in self.attacks.items():
            attacks = [attack(trajectory) for trajectory, _ in worst]
            for (_, total), answer in zip(worst, await self._ask(self.judge, attacks, self.rubrics), strict=True):
                if isinstance(answer, Judgement):
                    gains.append((name, _total(answer) - total))
                    num_flagged += bool(answer.flags)
        gains_found = sorted(((name, gain) for name, gain in gains if gain > _RAISED), key=lambda item: item[1])
        return AttackReport(
            num_attempts=len(gains),
            num_unscored=len(worst) * len(self.attacks) - len(gains),
            num_raised=len(gains_found),
            mean_gain=_mean([gain for _, gain in gains]) or 0.0,
            max_gain=max((gain for _, gain in gains), default=0.0),
            # Of each name the last, which is the highest.
            raised_by=dict(sorted(dict(gains_found).items(), key=lambda item: -item[1])),
            flagged_fraction=num_flagged / max(len(gains), 1),
        )


def _total(judgement: Judgement) -> float:
    return judgement.event_total if judgement.outcome_review is None else judgement.outcome_total


def _pairs_by_name(triples: Sequence[Scored], rubrics: Rubrics) -> Mapping[str, list[Pair]]:
    """Return what judge and labels both score: "outcome", "event", and criteria such as "outcome: process.tone"."""
    pairs: dict[str, list[Pair]] = defaultdict(list)

    def add(part: Part, rubric: Rubric | None, review: Review | None, marks: Marks | None, num_chars: int) -> None:
        if rubric is None or review is None or marks is None:
            return
        pairs[part].append(Pair(review.total, total_of(marks, rubric), num_chars))
        if isinstance(marks, Mapping):  # labelled by criteria, of which a judge over HTTP may give the total alone
            for id_ in set(marks) & set(review.criteria):
                pairs[f"{part}: {id_}"].append(Pair(review.criteria[id_].score, marks[id_], num_chars))

    for trajectory, label, judgement in triples:
        num_chars = Counter[int]()  # by turn
        for piece in read_transcript(trajectory).pieces:
            num_chars[piece.turn] += piece.num_chars if piece.is_by_policy else 0
        add("outcome", rubrics.outcome, judgement.outcome_review, label.outcome, num_chars.total())
        for turn, (review, marks) in enumerate(zip(judgement.event_reviews, label.events, strict=False)):
            add("event", rubrics.event, review, marks, num_chars[turn])
    return pairs


def _compare_repeats(answers: Sequence[Sequence[Answer]]) -> tuple[float | None, float | None]:
    """Return the flip rate over criteria, and the mean deviation of totals, of episodes judged several times."""
    repeats: list[list[float]] = []
    deviations: list[float] = []
    for of_episode in zip(*answers, strict=True):
        judgements = [answer for answer in of_episode if isinstance(answer, Judgement)]
        if len(judgements) > 1:
            first, *more_marks = map(_marks, judgements)
            common_keys = [key for key in first if all(key in marks for marks in more_marks)]
            repeats += [[marks[key] for marks in (first, *more_marks)] for key in common_keys]
            deviations.append(float(np.std([_total(judgement) for judgement in judgements])))
    return flip_rate(repeats), _mean(deviations)


def _marks(judgement: Judgement) -> dict[tuple[int, str], float]:
    """Return every criterion's score by turn (-1: the outcome) and id; the total of a review without criteria."""
    reviews = dict(enumerate(judgement.event_reviews))
    if judgement.outcome_review is not None:
        reviews[-1] = judgement.outcome_review
    marks = {(turn, id_): score.score for turn, review in reviews.items() for id_, score in review.criteria.items()}
    return marks | {(turn, ""): review.total for turn, review in reviews.items() if not review.criteria}


def _normalise(answer: Answer, part: Part, rubric: Rubric) -> list[float] | None:
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


@dataclass(frozen=True, slots=True)
class Agreement:
    """A judge against labels.

    Attributes:
        num: pairs.
        equal_fraction: share of pairs that are the same score.
        kappa: agreement beyond chance, 1 at best; see `kappa`. None where both gave every episode one score.
        correlation: Pearson's; None where either gave every episode one score.
    """

    num: int
    judge_mean: float
    gold_mean: float
    equal_fraction: float
    mean_absolute_error: float
    kappa: float | None
    correlation: float | None


def agreement(judge: Sequence[float], gold: Sequence[float]) -> Agreement:
    """Compare a judge with labels; raises a ConfigError for no pairs, or unequal numbers."""
    j, g = _arrays(judge, gold)
    # Without variance the correlation is 0 / 0.
    varies = bool(np.ptp(j) > 0 and np.ptp(g) > 0)
    return Agreement(
        num=len(j),
        judge_mean=float(j.mean()),
        gold_mean=float(g.mean()),
        equal_fraction=float((np.abs(j - g) < _EQUAL).mean()),
        mean_absolute_error=float(np.abs(j - g).mean()),
        kappa=kappa(judge, gold),
        correlation=float(np.corrcoef(j, g)[0, 1]) if varies else None,
    )


def kappa(judge: Sequence[float], gold: Sequence[float]) -> float | None:
    """Return 1 - (mean squared difference of the pairs) / (the same of independent pairs with these margins).

    For scores of 0 and 1 this is Cohen's kappa, for grades his kappa with quadratic weights, and for numbers Lin's
    concordance correlation: 2 cov / (var + var + (difference of the means)^2), all with 1/n. 0 is chance, 1 perfect.
    None if both gave every episode the same score, which says nothing.

    >>> kappa([1, 1, 0, 0], [1, 0, 0, 0])  # agreement 3/4, by chance 1/2 * 1/4 + 1/2 * 3/4 = 1/2
    0.5
    """
    j, g = _arrays(judge, gold)
    by_chance = j.var() + g.var() + (j.mean() - g.mean()) ** 2
    return float(1 - ((j - g) ** 2).mean() / by_chance) if by_chance > 0 else None


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Episodes with a judged score in [low, high), in the last bin in [low, high]."""

    low: float
    high: float
    num: int
    judge_mean: float
    gold_mean: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Whether a score of 0.8 means 0.8.

    Attributes:
        bins: those that hold episodes.
        expected_error: mean over episodes of |judge_mean - gold_mean| of their bin (ECE).
        brier: mean squared difference.
    """

    bins: tuple[CalibrationBin, ...]
    expected_error: float
    brier: float


def calibration(judge: Sequence[float], gold: Sequence[float], *, num_bins: int = 10) -> Calibration | None:
    """Return the calibration over bins of equal width; None if a score is outside [0, 1]."""
    j, g = _arrays(judge, gold)
    if min(j.min(), g.min()) < 0 or max(j.max(), g.max()) > 1 + _EQUAL:
        return None
    places = np.minimum((j * num_bins).astype(int), num_bins - 1)  # a score of 1 belongs to the last bin
    bins = []
    for place in np.unique(places).tolist():
        here = places == place
        means = float(j[here].mean()), float(g[here].mean())
        bins.append(CalibrationBin(place / num_bins, (place + 1) / num_bins, int(here.sum()), *means))
    error = math.fsum(row.num * abs(row.judge_mean - row.gold_mean) for row in bins) / len(j)
    return Calibration(tuple(bins), error, float(((j - g) ** 2).mean()))


@dataclass(frozen=True, slots=True)
class Slope:
    """A coefficient of a linear regression with its standard error, over `num` episodes."""

    value: float
    standard_error: float
    num: int


def length_bias(judge: Sequence[float], gold: Sequence[float], num_chars: Sequence[int]) -> Slope | None:
    """Return how much a judge's score rises with every 1,000 characters that the policy wrote, gold held fixed.

    The coefficient of the length in an ordinary least-squares fit of the judge's score to the length, gold and 1. None
    for fewer than 5 episodes, or if lengths are all the same or follow from gold.
    """
    j, g = _arrays(judge, gold)
    lengths = np.asarray(num_chars, dtype=np.float64) / 1000
    if len(lengths) != len(j):
        raise ConfigError(f"length bias: expected a length for each of {len(j)} episodes, got {len(lengths)}")
    # Equal gold scores would only repeat the column of ones.
    design = np.stack([np.ones_like(j), lengths] + ([g] if np.ptp(g) > 0 else []), axis=1)
    # Below that, a residual says nothing about the error, or the length cannot be told from gold.
    if len(j) < 5 or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    fit, *_ = np.linalg.lstsq(design, j, rcond=None)
    residual = j - design @ fit
    variance = float(residual @ residual) / (len(j) - design.shape[1])
    covariance = variance * np.linalg.inv(design.T @ design)
    # The max: rounding can leave a variance just below 0, which has no root.
    return Slope(float(fit[1]), math.sqrt(max(float(covariance[1, 1]), 0.0)), len(j))


def balanced_orders(ids: Sequence[str], seed: int) -> tuple[tuple[str, ...], ...]:
    """Return the rotations of a drawn order: as many orders as ids, with each id once at each place."""
    drawn_order = [ids[int(index)] for index in generator(seed, "orders").permutation(len(ids))]
    return tuple(tuple(drawn_order[shift:] + drawn_order[:shift]) for shift in range(len(drawn_order)))


def _bias_of(
    scores: Sequence[Sequence[list[float] | None]], orders: Sequence[Sequence[str]], ids: Sequence[str]
) -> PositionBias | None:
    """Return the bias of scores by order and episode; None if no episode was scored in every order."""
    complete = [list(rows) for rows in zip(*scores, strict=True) if None not in rows]
    places = np.array([[order.index(id_) for id_ in ids] for order in orders])
    return position_bias(np.array(complete, dtype=np.float64), places) if complete else None


@dataclass(frozen=True, slots=True)
class PositionBias:
    """The effect of a criterion's place among the others on its score, in [0, 1] normalised scores.

    Where episodes are compared: of an episode's place among those of its group.

    Attributes:
        effects: by place, the mean score there minus the mean over all places.
        spread: the highest effect minus the lowest.
        fixed_order_bias: the largest bias of a criterion under one order for all episodes: the mean over episodes of
            its score there minus its mean over all orders.
        permuted_bias: the same where orders alternate between episodes; the bias that is left.
        num_episodes: judged in every order; groups, where episodes are compared.
    """

    effects: tuple[float, ...]
    spread: float
    fixed_order_bias: float
    permuted_bias: float
    num_episodes: int


def position_bias(scores: Floats, places: NDArray[np.int64]) -> PositionBias:
    """Measure the position bias from the scores of the same episodes in balanced orders.

    Args:
        scores: [E, K, K] normalised: by episode, order, criterion.
        places: [K, K]: by order and criterion, its place; each criterion once at each place.
    """
    num_episodes, num_orders, num_criteria = scores.shape
    if places.shape != (num_orders, num_criteria) or num_orders != num_criteria:
        raise ConfigError(f"position bias: expected as many orders as criteria, got scores of shape {scores.shape}")
    # Every criterion stands at every place: the mean at a place holds all episodes and criteria alike, and differences
    # of such means are due to the place alone (and chance).
    effects = np.array([scores[:, places == place].mean() for place in range(num_criteria)]) - scores.mean()
    deviations = scores - scores.mean(axis=1, keepdims=True)  # [E, K, K]: what each order does to each score
    alternating = deviations[np.arange(num_episodes), np.arange(num_episodes) % num_orders]  # [E, K]
    return PositionBias(
        effects=tuple(float(effect) for effect in effects),
        spread=float(np.ptp(effects)),
        fixed_order_bias=float(np.abs(deviations.mean(axis=0)).max()),
        permuted_bias=float(np.abs(alternating.mean(axis=0)).max()),
        num_episodes=num_episodes,
    )


def flip_rate(repeats: Sequence[Sequence[float]]) -> float | None:
    """Return the chance that two judgements of the same thing differ: mean over things of the share of pairs that do.

    Things judged fewer than two times do not count; None if all are such.

    >>> flip_rate([[1, 1, 0], [1, 1, 1]])  # of three pairs two differ, then none
    0.3333333333333333
    """
    pairs = [list(itertools.combinations(scores, 2)) for scores in repeats if len(scores) > 1]
    return _mean([sum(abs(a - b) > _EQUAL for a, b in marks) / len(marks) for marks in pairs])


def _arrays(judge: Sequence[float], gold: Sequence[float]) -> tuple[Floats, Floats]:
    if not len(judge) == len(gold) > 0:
        raise ConfigError(f"audit: expected pairs of scores, got {len(judge)} of the judge and {len(gold)} labels")
    return np.asarray(judge, dtype=np.float64), np.asarray(gold, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class AuditReport(ShownAsText):
    """The results of an audit; None: not asked for, or no data.

    Attributes:
        num_episodes: labelled ones; num_unscored: those of them without a score, by reason in `unscored`.
        flagged_fraction: of the scored episodes, in which the judge suspects manipulation.
        outcome, events: agreement of the totals, of episodes and of turns.
        criteria: agreement of one criterion, by names such as "outcome: process.tone".
        calibration, length: of the outcome's totals, or of the turns' if no outcome is labelled.
        position: of the outcome's criteria, or of the turns' if there are not two of them, or of the compared episodes
            (`position_part`).
        flip_rate: the chance that two judgements of the same criterion of the same episode differ.
        repeat_deviation: mean over episodes of the standard deviation of the total over repeats.
    """

    judge: str
    num_episodes: int
    num_unscored: int
    unscored: Mapping[str, int] = field(default_factory=dict)
    flagged_fraction: float | None = None
    outcome: Agreement | None = None
    events: Agreement | None = None
    criteria: Mapping[str, Agreement] = field(default_factory=dict)
    calibration: Calibration | None = None
    length: Slope | None = None
    position: PositionBias | None = None
    position_part: PositionPart | None = None
    flip_rate: float | None = None
    repeat_deviation: float | None = None
    attacks: AttackReport | None = None
    cost: JudgeCost = field(default_factory=JudgeCost)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: AuditReport) -> Iterator[str]:
    num_scored = report.num_episodes - report.num_unscored
    yield f"audit of {report.judge}: {num_scored} of {report.num_episodes} labelled episodes scored"
    for reason, count in report.unscored.items():
        yield f"  unscored {count}: {reason}"
    yield from _agreement_lines(report)
    yield from _bias_lines(report)
    if (attacks := report.attacks) is not None:
        yield (
            f"attacks: {attacks.num_raised} of {attacks.num_attempts} raised the total (mean gain "
            f"{attacks.mean_gain:+.3f}, highest {attacks.max_gain:+.3f}); {attacks.num_unscored} more got no score; "
            f"{attacks.flagged_fraction:.1%} were flagged"
        )
        yield from (f"  {gain:+.3f} {name}" for name, gain in attacks.raised_by.items())
    if report.flagged_fraction is not None:
        yield f"flagged: {report.flagged_fraction:.1%} of the episodes as they are"
    yield f"cost: {report.cost}"


def _agreement_lines(report: AuditReport) -> Iterator[str]:
    cells = [
        (
            name,
            str(row.num),
            f"{row.judge_mean:.3f}",
            f"{row.gold_mean:.3f}",
            f"{row.equal_fraction:.1%}",
            f"{row.mean_absolute_error:.3f}",
            *("-" if value is None else f"{value:.3f}" for value in (row.kappa, row.correlation)),
        )
        for name, row in {"outcome": report.outcome, "turns": report.events, **report.criteria}.items()
        if row is not None
    ]
    if cells:
        yield from table(("agreement", "n", "judge", "gold", "equal", "error", "kappa", "corr."), cells).splitlines()


def _bias_lines(report: AuditReport) -> Iterator[str]:
    if (calibration := report.calibration) is not None:
        yield f"calibration: expected error {calibration.expected_error:.3f}, Brier score {calibration.brier:.3f}"
        for row in calibration.bins:
            yield (
                f"  judged {row.low:.1f} to {row.high:.1f}: {row.num} with mean {row.judge_mean:.3f}, labelled "
                f"{row.gold_mean:.3f}"
            )
    if (length := report.length) is not None:
        yield (
            f"length: {length.value:+.4f} of the total for every 1,000 characters of the policy (standard error "
            f"{length.standard_error:.4f})"
        )
    if (position := report.position) is not None:
        effects = " ".join(f"{effect:+.3f}" for effect in position.effects)
        subject, things = ("an episode", "groups") if report.position_part == "group" else ("a criterion", "episodes")
        yield f"position ({report.position_part}, {position.num_episodes} {things} in every order): {effects} by place"
        yield (
            f"  {subject} gains or loses up to {position.fixed_order_bias:.3f} in one order for all episodes, "
            f"{position.permuted_bias:.3f} where orders alternate"
        )
    if report.flip_rate is not None:
        yield (
            f"repeats: two judgements of a criterion differ with a chance of {report.flip_rate:.1%}; totals deviate by "
            f"{report.repeat_deviation or 0.0:.3f}"
        )

"""The arithmetic of an audit (agreement with labels, biases, contradictions), and its report as JSON and as lines.

Pure functions of numbers; `audit.py` asks the judges. Unless a docstring says otherwise, the formulas are the
textbook's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gspo_gym.base.tables import table
from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import JudgeCost
from gspo_gym.seeding import generator

_EQUAL = 1e-9  # scores that differ by less are the same score


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
    j, g = _pairs(judge, gold)
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
    j, g = _pairs(judge, gold)
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
    j, g = _pairs(judge, gold)
    if min(j.min(), g.min()) < 0 or max(j.max(), g.max()) > 1 + _EQUAL:
        return None
    places = np.minimum((j * num_bins).astype(int), num_bins - 1)  # a score of 1 belongs to the last bin
    bins = tuple(
        CalibrationBin(
            low=place / num_bins,
            high=(place + 1) / num_bins,
            num=int((places == place).sum()),
            judge_mean=float(j[places == place].mean()),
            gold_mean=float(g[places == place].mean()),
        )
        for place in np.unique(places)
    )
    error = math.fsum(each.num * abs(each.judge_mean - each.gold_mean) for each in bins) / len(j)
    return Calibration(bins, error, float(((j - g) ** 2).mean()))


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
    j, g = _pairs(judge, gold)
    lengths = np.asarray(num_chars, dtype=np.float64) / 1000
    if len(lengths) != len(j):
        raise ConfigError(f"length bias: expected a length for each of {len(j)} episodes, got {len(lengths)}")
    # Equal gold scores would only repeat the column of ones.
    columns = [np.ones_like(j), lengths] + ([g] if np.ptp(g) > 0 else [])
    design = np.stack(columns, axis=1)
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
    drawn = [ids[int(index)] for index in generator(seed, "orders").permutation(len(ids))]
    return tuple(tuple(drawn[shift:] + drawn[:shift]) for shift in range(len(drawn)))


@dataclass(frozen=True, slots=True)
class PositionBias:
    """The effect of a criterion's place among the others on its score, in [0, 1] normalised scores.

    Attributes:
        effects: by place, the mean score there minus the mean over all places.
        spread: the highest effect minus the lowest.
        fixed_order_bias: the largest bias of a criterion under one order for all episodes: the mean over episodes of
            its score there minus its mean over all orders.
        permuted_bias: the same where orders alternate between episodes; the bias that is left.
        num_episodes: judged in every order.
    """

    effects: tuple[float, ...]
    spread: float
    fixed_order_bias: float
    permuted_bias: float
    num_episodes: int


def position_bias(scores: NDArray[np.float64], places: NDArray[np.int64]) -> PositionBias:
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
    moved = scores - scores.mean(axis=1, keepdims=True)  # [E, K, K]: what each order does to each score
    fixed = np.abs(moved.mean(axis=0)).max()
    alternating = moved[np.arange(num_episodes), np.arange(num_episodes) % num_orders]  # [E, K]
    return PositionBias(
        effects=tuple(float(effect) for effect in effects),
        spread=float(np.ptp(effects)),
        fixed_order_bias=float(fixed),
        permuted_bias=float(np.abs(alternating.mean(axis=0)).max()),
        num_episodes=num_episodes,
    )


def flip_rate(repeats: Sequence[Sequence[float]]) -> float | None:
    """Return the chance that two judgements of the same thing differ: mean over things of the share of pairs that do.

    Things judged fewer than two times do not count; None if all are such.

    >>> flip_rate([[1, 1, 0], [1, 1, 1]])  # of three pairs two differ, then none
    0.3333333333333333
    """
    shares = []
    for scores in repeats:
        pairs = [(a, b) for index, a in enumerate(scores) for b in scores[index + 1 :]]
        if pairs:
            shares.append(sum(abs(a - b) > _EQUAL for a, b in pairs) / len(pairs))
    return float(np.mean(shares)) if shares else None


def _pairs(judge: Sequence[float], gold: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if not len(judge) == len(gold) > 0:
        raise ConfigError(f"audit: expected pairs of scores, got {len(judge)} of the judge and {len(gold)} labels")
    return np.asarray(judge, dtype=np.float64), np.asarray(gold, dtype=np.float64)


Part = Literal["event", "outcome"]


@dataclass(frozen=True, slots=True)
class AttackReport:
    """The effect of attacks on the totals of episodes, compared with the same episodes without them.

    Attributes:
        num_attempts: attacks times episodes with a score; num_unscored: those without one, which earn nothing.
        num_raised: those that earned more than without the attack.
        raised_by: the attacks that earned more, and the most that each did, the worst first.
        flagged_fraction: of the attempts, in which the judge suspects manipulation.
    """

    num_attempts: int
    num_unscored: int
    num_raised: int
    mean_gain: float
    max_gain: float
    raised_by: Mapping[str, float]
    flagged_fraction: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The results of an audit; None: not asked for, or no data.

    Attributes:
        num_episodes: labelled ones; num_unscored: those of them without a score, by reason in `unscored`.
        flagged_fraction: of the scored episodes, in which the judge suspects manipulation.
        outcome, events: agreement of the totals, of episodes and of turns.
        criteria: agreement of one criterion, by names such as "outcome: process.tone".
        calibration, length: of the outcome's totals, or of the turns' if no outcome is labelled.
        position: of the outcome's criteria, or of the turns' if there are not two of them (`position_part`).
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
    position_part: Part | None = None
    flip_rate: float | None = None
    repeat_deviation: float | None = None
    attacks: AttackReport | None = None
    cost: JudgeCost = field(default_factory=JudgeCost)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: AuditReport) -> Iterator[str]:
    scored = report.num_episodes - report.num_unscored
    yield f"audit of {report.judge}: {scored} of {report.num_episodes} labelled episodes scored"
    for reason, count in report.unscored.items():
        yield f"  unscored {count}: {reason}"
    yield from _agreement_lines(report)
    yield from _bias_lines(report)
    if report.attacks is not None:
        yield from _attack_lines(report.attacks)
    if report.flagged_fraction is not None:
        yield f"flagged: {report.flagged_fraction:.1%} of the episodes as they are"
    cost = report.cost
    tokens = f"{cost.input_tokens:,} tokens read, {cost.output_tokens:,} written, {cost.usd:.4f} USD"
    yield f"cost: {cost.num_calls:,} calls, {tokens}"


def _agreement_lines(report: AuditReport) -> Iterator[str]:
    rows = {"outcome": report.outcome, "turns": report.events, **report.criteria}
    shown = {name: row for name, row in rows.items() if row is not None}
    if not shown:
        return
    cells = [
        (
            name,
            str(row.num),
            f"{row.judge_mean:.3f}",
            f"{row.gold_mean:.3f}",
            f"{row.equal_fraction:.1%}",
            f"{row.mean_absolute_error:.3f}",
            _number(row.kappa),
            _number(row.correlation),
        )
        for name, row in shown.items()
    ]
    yield from table(("agreement", "n", "judge", "gold", "equal", "error", "kappa", "corr."), cells).splitlines()


def _bias_lines(report: AuditReport) -> Iterator[str]:
    if (calibration := report.calibration) is not None:
        yield f"calibration: expected error {calibration.expected_error:.3f}, Brier score {calibration.brier:.3f}"
        for each in calibration.bins:
            yield (
                f"  judged {each.low:.1f} to {each.high:.1f}: {each.num} with mean {each.judge_mean:.3f}, labelled "
                f"{each.gold_mean:.3f}"
            )
    if (length := report.length) is not None:
        yield (
            f"length: {length.value:+.4f} of the total for every 1,000 characters of the policy (standard error "
            f"{length.standard_error:.4f})"
        )
    if (position := report.position) is not None:
        effects = " ".join(f"{effect:+.3f}" for effect in position.effects)
        yield f"position ({report.position_part}, {position.num_episodes} episodes in every order): {effects} by place"
        yield (
            f"  a criterion gains or loses up to {position.fixed_order_bias:.3f} in one order for all episodes, "
            f"{position.permuted_bias:.3f} where orders alternate"
        )
    if report.flip_rate is not None:
        yield (
            f"repeats: two judgements of a criterion differ with a chance of {report.flip_rate:.1%}; totals deviate by "
            f"{report.repeat_deviation or 0.0:.3f}"
        )


def _attack_lines(attacks: AttackReport) -> Iterator[str]:
    yield (
        f"attacks: {attacks.num_raised} of {attacks.num_attempts} raised the total (mean gain "
        f"{attacks.mean_gain:+.3f}, highest {attacks.max_gain:+.3f}); {attacks.num_unscored} more got no score; "
        f"{attacks.flagged_fraction:.1%} were flagged"
    )
    for name, gain in attacks.raised_by.items():
        yield f"  {gain:+.3f} {name}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

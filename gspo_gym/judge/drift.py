"""Does the judge that is trained against still agree with a better one? If less and less, the policy exploits it.

A policy that learns to please a judge raises its scores while a gold judge's stay or fall (arXiv 2608.11669 measures 3
to 22 points). What is watched is the gap, score minus gold over the same episodes, against what it was at the first
check: judges differ in taste from the start, and only a change says anything. Gold is another judge's score of episodes
of the run, or the labels of a fixed set that the judge scores again and again; the arithmetic is the same. Pure: who
asks whom is in `judging_gold.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import JudgeError

_STANDARD_ERRORS = 2.0  # a change of the gap that 19 of 20 unchanged judges do not show


class JudgeDriftError(JudgeError):
    """The judge and gold have drifted apart, and the run was told to stop then."""


@dataclass(frozen=True, slots=True)
class DriftCheck:
    """One comparison over the same episodes.

    Attributes:
        num_episodes: compared.
        judge_mean, gold_mean: of the scores.
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


def compare_with_gold(judge_scores: Sequence[float], gold_scores: Sequence[float]) -> DriftCheck:
    """How far the judge is from gold on these episodes, pair by pair.

    Raises:
        ConfigError: fewer than two pairs, or not as many of one as of the other.

    >>> check = compare_with_gold([0.5, 0.9], [0.5, 0.7])
    >>> round(check.gap, 3), round(check.gap_standard_error, 3), round(check.correlation, 3)
    (0.1, 0.1, 1.0)
    """
    if len(judge_scores) != len(gold_scores) or len(gold_scores) < 2:
        raise ConfigError(
            f"drift: expected two pairs of scores at least, got {len(judge_scores)} of the judge and "
            f"{len(gold_scores)} of gold"
        )
    judge, gold = np.asarray(judge_scores, dtype=np.float64), np.asarray(gold_scores, dtype=np.float64)
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


class DriftAlarm:
    """Sounds when the gap is no longer what it was at the first check.

    Args:
        max_gap_change: in units of the score; a smaller change is nobody's business, however certain.
        first: the check that others are compared with, from an earlier part of the run; None: the next one is it.

    Attributes:
        max_gap_change: see above.

    The alarm asks for both: a change of more than `max_gap_change`, and one of more than twice its standard error
    sqrt(se_first^2 + se_now^2), so that few episodes do not cry wolf.
    """

    def __init__(self, max_gap_change: float, first: DriftCheck | None = None) -> None:
        if not max_gap_change > 0:
            raise ConfigError(f"max_gap_change: expected > 0, got {max_gap_change}")
        self.max_gap_change = max_gap_change
        self._first = first

    @property
    def first(self) -> DriftCheck | None:
        """The check that later ones are compared with; None before there was one."""
        return self._first

    def check(self, now: DriftCheck) -> str | None:
        """What has changed since the first check, in a sentence; None: nothing that counts."""
        first = self._first = self._first or now
        change = now.gap - first.gap
        error = math.hypot(first.gap_standard_error, now.gap_standard_error)
        if abs(change) <= self.max_gap_change or abs(change) <= _STANDARD_ERRORS * error:
            return None
        moved = f"the judge's mean score went from {first.judge_mean:.3f} to {now.judge_mean:.3f}, gold's from "
        moved += f"{first.gold_mean:.3f} to {now.gold_mean:.3f}"
        certainty = f"their gap changed by {change:+.3f} (standard error {error:.3f}, allowed {self.max_gap_change:g})"
        meaning = (
            "the policy may be exploiting the judge: read its best-scored episodes, and tighten the rubric"
            if change > 0
            else "the judge has become harsher than gold: see whether its model or its prompt changed"
        )
        return f"{moved}; {certainty}; {meaning}"

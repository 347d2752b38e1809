"""The alarm of a teacher with feedback that is worse than its student, by the facts of the training episodes.

The sign of the mean advantage says nothing: it is -KL, and negative for the best teacher, too. What can be measured
without playing is whether the teacher, compared with the student, prefers the episodes that earned more: the
correlation `distillation/agreement` of each step (`learning/feedback.py`). An evaluation of the policy with feedback
would need feedback about turns that were not played yet, and cost as many episodes again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

NUM_STEPS = 16  # whose correlations count
MIN_STEPS = 8
# Of the mean of the steps. It is looked at after every step: a test counts how often chance alone sounds it.
MAX_STANDARD_ERRORS = 4.0


@dataclass(frozen=True, slots=True)
class TeachingEvidence:
    """Correlations of the last steps that had one, up to `NUM_STEPS`, since the last alarm."""

    recent: tuple[float, ...] = ()


class TeachingAlarm:
    """Alarm for a teacher that prefers what earns less; `evidence` is that of an earlier part of the run."""

    def __init__(self, evidence: TeachingEvidence | None = None) -> None:
        self.evidence = evidence or TeachingEvidence()

    def check(self, metrics: Mapping[str, float]) -> str | None:
        """Return what the steps up to this one show, in a sentence; None: nothing. An alarm uses its evidence up."""
        agreement = metrics.get("distillation/agreement")
        if agreement is None or not math.isfinite(agreement):
            return None
        recent = (*self.evidence.recent, agreement)[-NUM_STEPS:]
        self.evidence = TeachingEvidence(recent)
        if len(recent) < MIN_STEPS:
            return None
        mean, error = statistics.fmean(recent), statistics.stdev(recent) / math.sqrt(len(recent))
        if mean >= -MAX_STANDARD_ERRORS * error:
            return None
        self.evidence = TeachingEvidence()
        return (
            f"over {len(recent)} steps, what the teacher makes likelier correlates with the advantages by reward at "
            f"{mean:.2f} (standard error {error:.2f}): it teaches what earns less"
        )

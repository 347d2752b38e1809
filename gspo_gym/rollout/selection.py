"""Whether what was kept of what was played is a random part of it, and a watch over the attempts of a training run.

An attempt that ends in a failure of the environment is played again with another sample. If what fails depends on what
the policy did, the episodes that are kept are those that did not cause it: they are better, or tamer, than the policy.
Nothing here retries or drops anything; it counts, and says when the counts part from chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gspo_gym.rollout.ledger import Disposition
from gspo_gym.types import Outcome, Trajectory

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "rollout/attempts": "attempts at episodes that ended in this step, kept or not",
        "rollout/kept_fraction": "share of these attempts that ended well; the others were played again or dropped",
        "rollout/env_failed_at_reset": "share of these attempts in which the environment failed before any action",
        "rollout/env_failed_after_action": "share of these attempts in which the environment failed after an action, "
        "which may be the cause: then a retry keeps only episodes without it",
    }
)
# Standard errors: by chance alone, one test in 16,000 is beyond them (two-sided, normal).
MAX_STANDARD_ERRORS = 4.0
_ENV_FAILURES = (Outcome.ENV_ERROR, Outcome.ENV_TIMEOUT)


@dataclass(slots=True)
class Selection:
    """Numbers of a population, some of which were selected: whether the selected ones are a random sample of them.

    Attributes:
        num_all, sum_all, sum_of_squares: of the population.
        num_selected, sum_selected: of the part.

    >>> selection = Selection()
    >>> for value in [0.0] * 90 + [1.0] * 10:
    ...     selection.add(value, is_selected=value > 0)
    >>> selection.mean_all, selection.mean_selected, selection.parts_from_chance
    (0.1, 1.0, True)
    """

    num_all: int = 0
    sum_all: float = 0.0
    sum_of_squares: float = 0.0
    num_selected: int = 0
    sum_selected: float = 0.0

    def add(self, value: float, *, is_selected: bool, count: int = 1) -> None:
        """Add `count` equal numbers."""
        self.num_all += count
        self.sum_all += count * value
        self.sum_of_squares += count * value * value
        if is_selected:
            self.num_selected += count
            self.sum_selected += count * value

    @property
    def mean_all(self) -> float:
        """The mean of the population; NaN if it is empty."""
        return self.sum_all / self.num_all if self.num_all else math.nan

    @property
    def mean_selected(self) -> float:
        """The mean of what was selected; NaN if nothing was."""
        return self.sum_selected / self.num_selected if self.num_selected else math.nan

    @property
    def excess(self) -> float:
        """By how much the sum of the selected exceeds what as many random ones add up to on average."""
        return self.sum_selected - self.num_selected * self.mean_all if self.num_all else 0.0

    @property
    def variance(self) -> float:
        """The variance of `excess` under random selection; 0 where nothing can differ.

        The sum of n of N numbers drawn without replacement has the variance n S^2 (1 - n/N), S^2 being the variance of
        all with denominator N - 1 (Cochran, Sampling Techniques, theorem 2.2).
        """
        n, size = self.num_selected, self.num_all
        if not 0 < n < size:
            return 0.0
        spread = max(self.sum_of_squares - size * self.mean_all**2, 0.0) / (size - 1)
        # of equal numbers only the rounding of the sums is left
        is_constant = spread <= 1e-12 * max(1.0, self.sum_of_squares / size)
        return 0.0 if is_constant else n * spread * (1 - n / size)

    @property
    def standard_errors(self) -> float:
        """How far the selected lie from a random selection, in standard errors of one."""
        return self.excess / math.sqrt(self.variance) if self.variance else 0.0

    @property
    def parts_from_chance(self) -> bool:
        """Whether they differ by more than `MAX_STANDARD_ERRORS`."""
        return abs(self.standard_errors) > MAX_STANDARD_ERRORS


@dataclass(slots=True)
class _Counts:
    attempts: int = 0
    kept: int = 0
    failed_at_reset: int = 0
    failed_after_action: int = 0


@dataclass(slots=True)
class AttemptWatch:
    """Counts how attempts at training episodes end; give it to a pool as `on_episode`.

    Failures that the policy did not cause come at resets as often as at steps. So the calls of a step's attempts are
    the population, those that failed are the selected ones, and whether a call answered an action is their number.
    Steps are added up, each compared with itself: over the run, both failures and the length of episodes change.
    """

    _step: _Counts = field(default_factory=_Counts)
    _calls: Selection = field(default_factory=Selection)  # of the present step
    _excess: float = 0.0
    _variance: float = 0.0
    _failed_after_action: int = 0
    _told: int = 0  # failures after an action at the last alarm

    def __call__(self, trajectory: Trajectory, disposition: Disposition) -> None:
        """Count one finished attempt."""
        is_failure, num_actions = trajectory.outcome in _ENV_FAILURES, len(trajectory.turns)
        is_after_action = is_failure and num_actions > 0
        self._step.attempts += 1
        self._step.kept += disposition is Disposition.KEPT
        self._step.failed_at_reset += is_failure and not is_after_action
        self._step.failed_after_action += is_after_action
        self._failed_after_action += is_after_action
        self._calls.add(0.0, is_selected=is_failure and not is_after_action)
        self._calls.add(1.0, is_selected=False, count=num_actions - is_after_action)
        if is_after_action:
            self._calls.add(1.0, is_selected=True)

    def metrics(self) -> dict[str, float]:
        """Return the shares of the attempts that ended since this was last asked, a step; none if none did."""
        counts, self._step = self._step, _Counts()
        calls, self._calls = self._calls, Selection()
        self._excess += calls.excess
        self._variance += calls.variance
        if not counts.attempts:
            return {}
        return {
            "rollout/attempts": float(counts.attempts),
            "rollout/kept_fraction": counts.kept / counts.attempts,
            "rollout/env_failed_at_reset": counts.failed_at_reset / counts.attempts,
            "rollout/env_failed_after_action": counts.failed_after_action / counts.attempts,
        }

    def alarm(self) -> str | None:
        """Return what the steps so far show, in a sentence, at first and whenever there is twice as much; else None."""
        failed, errors = self._failed_after_action, self._excess / math.sqrt(self._variance) if self._variance else 0.0
        if errors <= MAX_STANDARD_ERRORS or failed < 2 * self._told:
            return None
        self._told = failed
        return (
            f"{failed} attempts failed in the environment after an action of the policy, {self._excess:.0f} more than "
            f"if calls failed whatever the policy did ({errors:.1f} standard errors). If an action is the cause, a "
            "retry keeps only episodes that did not do it: let the environment answer it with a text and a reward, or "
            "raise ActionLimitError"
        )

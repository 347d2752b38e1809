"""Intervals and tests for evaluations: closed forms and seeded resampling, without scipy.

Pure functions of numbers. `evaluation.py` calls them.

A watch over the attempts of a training run: whether what is kept of what was played is a random part of it.

An attempt that ends in a failure of the environment is played again with another sample. If what fails depends on what
the policy did, the episodes that are kept are those that did not cause it: they are better, or tamer, than the policy.
Nothing here retries or drops anything; it counts, and says when the counts part from chance.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from gspo_gym.errors import ConfigError
from gspo_gym.rollout.ledger import Disposition
from gspo_gym.seeding import generator
from gspo_gym.types import Outcome, Trajectory

_Z_95 = 1.959963984540054  # the 97.5% point of the standard normal distribution
_NUM_RESAMPLES = 10_000
_MAX_RESAMPLED_NUMBERS = 2_000_000  # held at once, so that 100,000 episodes do not need gigabytes


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% interval."""

    low: float
    high: float


def wilson_interval(num_successes: int, num_trials: int) -> Interval:
    """The 95% score interval of a success probability (Wilson 1927, without continuity correction).

    With p = num_successes / num_trials, n = num_trials and z = 1.96: centre (p + z^2/2n) / (1 + z^2/n), half width
    z sqrt(p (1 - p)/n + z^2/4n^2) / (1 + z^2/n). Unlike p +- z sqrt(p (1 - p)/n) it keeps its coverage near 0 and 1.

    Raises:
        ConfigError: no trials, or more successes than trials.

    >>> interval = wilson_interval(0, 10)
    >>> interval.low, round(interval.high, 4)
    (0.0, 0.2775)
    """
    if num_trials < 1 or not 0 <= num_successes <= num_trials:
        raise ConfigError(f"wilson_interval: expected 0 <= successes <= trials >= 1, got {num_successes}/{num_trials}")
    n, p, z2 = num_trials, num_successes / num_trials, _Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At the ends the exact bounds are 0 and 1; the subtraction only rounds to them.
    low = 0.0 if num_successes == 0 else centre - half
    high = 1.0 if num_successes == n else centre + half
    return Interval(low, high)


def bootstrap_mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval | None:
    """The 95% percentile bootstrap interval of the mean (Efron 1979), 10,000 resamples, seeded.

    Bootstrap rather than Student's t because returns are often two-valued or skewed. None for fewer than 2 values, from
    which no spread can be seen. If all values are equal the interval is that value, which says nothing about values
    that were not drawn.
    """
    if len(values) < 2:
        return None
    sample = np.asarray(values, dtype=np.float64)
    rng = generator(seed, "bootstrap")
    block = max(1, _MAX_RESAMPLED_NUMBERS // len(sample))
    means = np.concatenate(
        [
            sample[rng.integers(len(sample), size=(min(block, _NUM_RESAMPLES - done), len(sample)))].mean(axis=1)
            for done in range(0, _NUM_RESAMPLES, block)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(low), float(high))


def mcnemar_exact_p(num_only_first: int, num_only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test: are successes of one side more frequent on the same tasks?

    Only pairs that differ count. Under the null hypothesis each of the n = num_only_first + num_only_second goes either
    way with probability 1/2 (the sign test), so p = min(1, 2 P[Binomial(n, 1/2) <= min of the two]); 1 if no pair
    differs.

    >>> mcnemar_exact_p(0, 5)  # 2 / 2**5
    0.0625
    """
    n = num_only_first + num_only_second
    tail: int = sum(math.comb(n, k) for k in range(min(num_only_first, num_only_second) + 1))
    p: float = 2 * tail / 2**n  # integers divide exactly, however large
    return min(1.0, p)


def as_list(interval: Interval | None) -> list[float] | None:
    """Return an interval as JSON values."""
    return None if interval is None else [interval.low, interval.high]


def as_text(interval: Interval | None) -> str:
    """Return an interval for a table for people."""
    return "-" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


METRICS: Mapping[str, str] = MappingProxyType(
    {
        "rollout/attempts": "attempts at episodes that ended in this step, kept or not",
        "rollout/kept_fraction": "share of these attempts that ended well; the others were played again or dropped",
        "rollout/env_failed_at_reset": "share of these attempts in which the environment failed before any action",
        "rollout/env_failed_after_action": "share of these attempts in which the environment failed after an action, "
        "which may be the cause: then a retry keeps only episodes without it",
        "rollout/lost_after_action": "share of these attempts that were lost after an action, because the environment "
        "or app failed or did not answer in time: nothing is known of what they would have returned",
    }
)
# Standard errors: by chance alone, one test in 16,000 is beyond them (two-sided, normal).
MAX_STANDARD_ERRORS = 4.0
_ENV_FAILURES = (Outcome.ENV_ERROR, Outcome.ENV_TIMEOUT)
_LOSSES = (*_ENV_FAILURES, Outcome.EPISODE_TIMEOUT)
# Of the attempts at task apps: a share lost after an action that is told of, and from how many lost ones on.
MAX_LOST_FRACTION = 0.05
MIN_LOST = 8
_NUM_STEPS = 32  # whose attempts are counted together


@dataclass(slots=True)
class AttemptCounts:
    """How the attempts of a step ended, each of which made one call for the reset and one for every action.

    Attributes:
        attempts, kept, failed_at_reset, failed_after_action: attempts.
        num_actions: of all of them together.
        lost_after_action: attempts that failed after an action, or ran out of the episode's time after one.
    """

    attempts: int = 0
    kept: int = 0
    failed_at_reset: int = 0
    failed_after_action: int = 0
    num_actions: int = 0
    lost_after_action: int = 0

    @property
    def excess(self) -> float:
        """How many more failures answered an action than if as many random ones of the calls had failed."""
        num_failed = self.failed_at_reset + self.failed_after_action
        return self.failed_after_action - num_failed * self.num_actions / (self.attempts + self.num_actions)

    @property
    def variance(self) -> float:
        """The variance of `excess` if random calls fail, which is that of the hypergeometric distribution."""
        if not self.num_actions:
            return 0.0
        num_failed, num_calls = self.failed_at_reset + self.failed_after_action, self.attempts + self.num_actions
        share = self.num_actions / num_calls
        return num_failed * share * (1 - share) * (num_calls - num_failed) / (num_calls - 1)


@dataclass(slots=True)
class AttemptWatch:
    """Counts how attempts at training episodes end; give it to a pool as `on_episode`.

    Failures that the policy did not cause come at resets as often as at steps. So of the calls of a step's attempts,
    those that failed are compared with random ones, by how many of them answered an action. Steps are added up, each
    compared with itself: over the run, both failures and the length of episodes change.
    """

    _step: AttemptCounts = field(default_factory=AttemptCounts)
    _excess: float = 0.0
    _variance: float = 0.0
    _failed_after_action: int = 0
    _told: int = 0  # failures after an action at the last alarm
    _recent: deque[AttemptCounts] = field(default_factory=lambda: deque(maxlen=_NUM_STEPS))

    def __call__(self, trajectory: Trajectory, disposition: Disposition) -> None:
        """Count one finished attempt."""
        is_failure, num_actions = trajectory.outcome in _ENV_FAILURES, len(trajectory.turns)
        is_after_action = is_failure and num_actions > 0
        self._step.attempts += 1
        self._step.kept += disposition is Disposition.KEPT
        self._step.failed_at_reset += is_failure and not is_after_action
        self._step.failed_after_action += is_after_action
        self._step.lost_after_action += trajectory.outcome in _LOSSES and num_actions > 0
        self._step.num_actions += num_actions
        self._failed_after_action += is_after_action

    def metrics(self) -> dict[str, float]:
        """Return the shares of the attempts that ended since this was last asked, a step; none if none did."""
        counts, self._step = self._step, AttemptCounts()
        if not counts.attempts:
            return {}
        self._recent.append(counts)
        self._excess += counts.excess
        self._variance += counts.variance
        return {
            "rollout/attempts": float(counts.attempts),
            "rollout/kept_fraction": counts.kept / counts.attempts,
            "rollout/env_failed_at_reset": counts.failed_at_reset / counts.attempts,
            "rollout/env_failed_after_action": counts.failed_after_action / counts.attempts,
            "rollout/lost_after_action": counts.lost_after_action / counts.attempts,
        }

    def alarm(self) -> str | None:
        """Return what the steps so far show, in a sentence, at first and whenever there is twice as much; else None."""
        failed, standard_error = self._failed_after_action, math.sqrt(self._variance)
        if self._excess <= MAX_STANDARD_ERRORS * standard_error or failed < 2 * self._told:
            return None
        self._told = failed
        return (
            f"{failed} attempts failed in the environment after an action of the policy, {self._excess:.0f} more than "
            f"if calls failed whatever the policy did ({self._excess / standard_error:.1f} standard errors). If an "
            "action is the cause, a retry keeps only episodes that did not do it: let the environment answer it with a "
            "text and a reward, or raise ActionLimitError"
        )

    def app_alarm(self) -> str | None:
        """Return what the last 32 steps show of task apps, in a sentence; None: nothing. It uses the evidence up.

        An app that fails at what the policy says takes the return with it, so that no return shows what is left out;
        and what it turns away before its first call is asked for again unseen, so that nothing shows what chance would
        do. Hence a bound of ours: more than `MAX_LOST_FRACTION` of the attempts, and at least `MIN_LOST`.
        """
        lost = sum(counts.lost_after_action for counts in self._recent)
        attempts = sum(counts.attempts for counts in self._recent)
        if lost < MIN_LOST or lost <= MAX_LOST_FRACTION * attempts:
            return None
        self._recent.clear()
        return (
            f"{lost} of {attempts} attempts ({lost / attempts:.0%}; the bound is {MAX_LOST_FRACTION:.0%}) were lost "
            "after the policy had answered, because the app failed, aborted or gave no result in time. If it does so "
            "at what the policy says, only episodes without that are learned from, and no return shows it: let the app "
            "answer 200 with the return of such an episode; its log, and ledger.jsonl's reasons, say where it fails"
        )

"""Whether the episodes that are kept are a random part of those that were played.

An attempt that is dropped or played again because of what happened in it selects by outcome: the policy then learns
from episodes that are better, or tamer, than those it plays. `AttemptWatch` compares where attempts fail,
`SelectionAlarm` what they return, where a task app says so of all of them. Nothing here decides which are kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from gspo_gym.rollout.ledger import Disposition
from gspo_gym.rollout.summary import PlayedReturns
from gspo_gym.seeding import generator
from gspo_gym.types import Outcome, Trajectory

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
NUM_STEPS = 32  # that are tested together


@dataclass(slots=True)
class AttemptCounts:
    """Counts of how a step's attempts ended; each made one call for the reset and one for every action.

    Attributes:
        attempts, kept, failed_at_reset, failed_after_action: attempts.
        num_actions: of all of them together.
        lost_after_action: attempts that failed after an action, or ran out of the episode's time after one.
        of_apps, lost_by_apps: attempts at environments that task apps play, and those of them lost after an action.
    """

    attempts: int = 0
    kept: int = 0
    failed_at_reset: int = 0
    failed_after_action: int = 0
    num_actions: int = 0
    lost_after_action: int = 0
    of_apps: int = 0
    lost_by_apps: int = 0

    @property
    def excess(self) -> float:
        """Failures that answered an action, less those expected if as many random calls had failed."""
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


@dataclass(frozen=True, slots=True)
class AttemptEvidence:
    """The evidence of an `AttemptWatch` from the steps so far; plain numbers, which a checkpoint holds exactly.

    Attributes:
        excess, variance: sums of those of the steps.
        failed_after_action: attempts; `told` of them were there at the last alarm.
        recent: the last 32 steps.
    """

    excess: float = 0.0
    variance: float = 0.0
    failed_after_action: int = 0
    told: int = 0
    recent: tuple[AttemptCounts, ...] = ()


@dataclass(slots=True)
class AttemptWatch:
    """Counts how attempts at training episodes end; give it to a pool as `on_episode`.

    Failures that the policy did not cause come at resets as often as at steps. So of the calls of a step's attempts,
    those that failed are compared with random ones, by how many of them answered an action. `app_envs` are the
    environments that task apps play; None: all. `evidence` is that of an earlier part of the run.
    """

    app_envs: Collection[str] | None = None
    evidence: AttemptEvidence = field(default_factory=AttemptEvidence)
    _step: AttemptCounts = field(default_factory=AttemptCounts)

    def __call__(self, trajectory: Trajectory, disposition: Disposition) -> None:
        """Count one finished attempt."""
        is_failure, num_actions = trajectory.outcome in _ENV_FAILURES, len(trajectory.turns)
        is_after_action = is_failure and num_actions > 0
        self._step.attempts += 1
        self._step.kept += disposition is Disposition.KEPT
        self._step.failed_at_reset += is_failure and not is_after_action
        self._step.failed_after_action += is_after_action
        is_lost = trajectory.outcome in _LOSSES and num_actions > 0
        is_of_app = self.app_envs is None or trajectory.task.env_id in self.app_envs
        self._step.lost_after_action += is_lost
        self._step.of_apps += is_of_app
        self._step.lost_by_apps += is_of_app and is_lost
        self._step.num_actions += num_actions

    def metrics(self) -> dict[str, float]:
        """Return the shares of the attempts that ended since this was last asked, a step; none if none did."""
        counts, self._step = self._step, AttemptCounts()
        if not counts.attempts:
            return {}
        before = self.evidence
        # Each step is compared with itself: over the run, both failures and the length of episodes change.
        self.evidence = AttemptEvidence(
            excess=before.excess + counts.excess,
            variance=before.variance + counts.variance,
            failed_after_action=before.failed_after_action + counts.failed_after_action,
            told=before.told,
            recent=(*before.recent, counts)[-NUM_STEPS:],
        )
        return {
            "rollout/attempts": float(counts.attempts),
            "rollout/kept_fraction": counts.kept / counts.attempts,
            "rollout/env_failed_at_reset": counts.failed_at_reset / counts.attempts,
            "rollout/env_failed_after_action": counts.failed_after_action / counts.attempts,
            "rollout/lost_after_action": counts.lost_after_action / counts.attempts,
        }

    def alarm(self) -> str | None:
        """Return what the steps so far show, in a sentence, at first and whenever there is twice as much; else None."""
        before = self.evidence
        num_failed, standard_error = before.failed_after_action, math.sqrt(before.variance)
        if before.excess <= MAX_STANDARD_ERRORS * standard_error or num_failed < 2 * before.told:
            return None
        self.evidence = replace(before, told=num_failed)
        return (
            f"{num_failed} attempts failed in the environment after an action of the policy, {before.excess:.0f} more "
            f"than if calls failed whatever the policy did ({before.excess / standard_error:.1f} standard errors)"
        )

    def app_alarm(self) -> str | None:
        """Return what the last 32 steps show of task apps, in a sentence; None: nothing. It uses the evidence up."""
        # An app that fails at what the policy says takes the return with it, so that no return shows what is left out;
        # and what it turns away before its first call is asked for again unseen, so that nothing shows what chance
        # would do. Hence a bound of ours.
        lost = sum(counts.lost_by_apps for counts in self.evidence.recent)
        attempts = sum(counts.of_apps for counts in self.evidence.recent)
        if lost < MIN_LOST or lost <= MAX_LOST_FRACTION * attempts:
            return None
        self.evidence = replace(self.evidence, recent=())
        return (
            f"{lost} of {attempts} attempts ({lost / attempts:.0%}; the bound is {MAX_LOST_FRACTION:.0%}) were lost "
            "after the policy had answered, because the app failed, aborted or gave no result in time"
        )


ERROR_RATE = 5e-4  # of each of the two tests of a step
_NUM_DRAWS = 1999  # the smallest p is 1 / (1999 + 1) = ERROR_RATE
_MAX_DRAWN = 1_000_000  # random numbers held at once
_ROUNDING = 1e-9  # of the sum of sizes: draws that give the same sum in another order are equal


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept and played returns part beyond chance, in this step or in the last `num_steps` together."""

    num_steps: int
    num_played: int
    num_kept: int
    mean_played: float
    mean_kept: float | None
    p: float

    def sentence(self) -> str:
        """Return the finding in a sentence, for people."""
        mean = "none of them is kept" if self.mean_kept is None else f"the mean of those kept is {self.mean_kept:.4g}"
        return (
            f"task apps finished {self.num_played} attempts with a mean return of {self.mean_played:.4g}, {mean} "
            f"({self.num_kept}; p <= {self.p:.2g} over {self.num_steps} steps)"
        )


@dataclass(frozen=True, slots=True)
class SelectionEvidence:
    """The evidence of a `SelectionAlarm` from the steps so far; plain numbers, which a checkpoint holds exactly.

    Attributes:
        num_tests: steps that were tested, which number the seeds of the subsets.
        recent: the returns of the last of them, up to 32, since the last alarm.
    """

    num_tests: int = 0
    recent: tuple[PlayedReturns, ...] = ()


class SelectionAlarm:
    """Permutation test of whether the lost attempts are a random draw from those played, regardless of their returns.

    The statistic is the sum over lost attempts of (return - mean of the step's attempts). Under the null hypothesis,
    given how many are lost, every subset of that size of the step's attempts is as likely to be the lost one. So the
    two-sided p is the share of random subsets with a statistic as far from 0 as the one seen, (1 + those) / (1 + 1999)
    with subsets drawn by a seeded generator, which is exact: P(p <= a) <= a. A step is tested by itself, and together
    with those before it, up to 32 in all, by the sum of their statistics. The alarm sounds at p <= 0.0005 in either
    test: by chance, once in 1,000 steps that lose attempts at most (union bound). An alarm uses its evidence up.
    `evidence` is that of an earlier part of the run.
    """

    def __init__(self, *, seed: int, evidence: SelectionEvidence | None = None) -> None:
        before = evidence or SelectionEvidence()
        self._seed = seed
        self._num_tests = before.num_tests
        first = before.num_tests - len(before.recent) + 1
        # A checkpoint holds no subsets: each step's are drawn again from its seed.
        self._steps: deque[_Tested] = deque(
            (_tested(returns, generator(seed, number)) for number, returns in enumerate(before.recent, first)),
            maxlen=NUM_STEPS,
        )

    @property
    def evidence(self) -> SelectionEvidence:
        return SelectionEvidence(self._num_tests, tuple(step.returns for step in self._steps))

    def check(self, returns: PlayedReturns) -> Selection | None:
        """Return what a step's returns show; None: nothing beyond chance."""
        if not returns.lost or not returns.kept:  # no evidence
            return None
        self._num_tests += 1
        self._steps.append(_tested(returns, generator(self._seed, self._num_tests)))
        for steps in ([self._steps[-1]], list(self._steps)):
            p = _p_of(steps)
            if p <= ERROR_RATE:
                self._steps.clear()
                return _selection([step.returns for step in steps], p)
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Tested:
    """A step's statistic, and [_NUM_DRAWS] float64 of what it is for random subsets; `scale` of their rounding."""

    returns: PlayedReturns
    statistic: float
    drawn: NDArray[np.float64]
    scale: float


def _tested(returns: PlayedReturns, random: np.random.Generator) -> _Tested:
    values = np.array([*returns.lost, *returns.kept], dtype=np.float64)
    deviations = values - values.mean()
    num_lost = len(returns.lost)
    num_rows = max(1, _MAX_DRAWN // len(deviations))
    # Within each step, since the policy changes between them.
    drawn_sums = [
        _sums_of_subsets(deviations, num_lost, min(num_rows, _NUM_DRAWS - first), random)
        for first in range(0, _NUM_DRAWS, num_rows)
    ]
    return _Tested(returns, float(deviations[:num_lost].sum()), np.concatenate(drawn_sums), float(np.abs(values).sum()))


def _sums_of_subsets(
    values: NDArray[np.float64], size: int, count: int, random: np.random.Generator
) -> NDArray[np.float64]:
    keys = random.random((count, len(values)))  # those with the smallest keys are a random subset
    indices = np.argpartition(keys, size - 1, axis=1)[:, :size]
    sums: NDArray[np.float64] = values[indices].sum(axis=1)
    return sums


def _p_of(steps: Sequence[_Tested]) -> float:
    statistic = abs(sum(step.statistic for step in steps))
    drawn_sums = np.abs(np.sum([step.drawn for step in steps], axis=0))
    rounding = _ROUNDING * sum(step.scale for step in steps)
    return float((1 + np.count_nonzero(drawn_sums >= statistic - rounding)) / (1 + _NUM_DRAWS))


def _selection(steps: Sequence[PlayedReturns], p: float) -> Selection:
    kept_values = tuple(value for step in steps for value in step.kept)
    lost = tuple(value for step in steps for value in step.lost)
    together = PlayedReturns(kept_values, lost)
    mean_played = together.mean_played
    assert mean_played is not None  # a step that was tested has attempts
    return Selection(len(steps), len(kept_values) + len(lost), len(kept_values), mean_played, together.mean_kept, p)

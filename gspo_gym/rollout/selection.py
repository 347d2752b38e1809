"""A watch over the attempts of a training run: whether what is kept of what was played is a random part of it.

An attempt that ends in a failure of the environment is played again with another sample. If what fails depends on what
the policy did, the episodes that are kept are those that did not cause it: they are better, or tamer, than the policy.
Nothing here retries or drops anything; it counts, and says when the counts part from chance.
"""

from __future__ import annotations

import math
from collections import deque
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

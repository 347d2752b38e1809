"""What one probe rollout of a task app came to: whether return, turns and trained tokens reconcile, and what does not.

Pure functions of a rollout that has ended; who plays it, and with which model, is elsewhere.

Whether the episodes that are kept are worth something else than those that were played.

An attempt that is dropped or played again because of what happened in it selects by outcome, and the policy then learns
from what is left. Apps say what every attempt that they finished is worth, so the two can be compared. Nothing here
decides what is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo_gym.remote.apps.episodes import AppCounters
from gspo_gym.remote.apps.rewards import AppRollout
from gspo_gym.seeding import generator
from gspo_gym.types import Outcome, Trajectory

NO_RETURN = "no return: expected metrics.mean_return, outcome_score or step rewards, got none of them"
_TOLERANCE = 1e-6  # of the larger one: below it, two returns are the same


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """One probe.

    Attributes:
        name: which probe. asked: what the app was given to cope with.
        outcome, error: how the episode ended.
        app_return: what the app says that it is worth; None: nothing. episode_return: the sum of its turns' rewards;
            None if it is not scored.
        step_rewards: how many of the app's steps have a positive, zero, negative or null reward.
        num_decisions: that the app lists. num_turns: that were captured. calls: of the model, by what became of them.
        num_sampled_tokens, num_trained_tokens: sampled for the calls, and trained on.
        reports_events: the app says what its decisions achieved.
        problems: what must be mended before training. notices: what is allowed, and may not be meant.
    """

    name: str
    asked: str
    outcome: str
    error: str | None = None
    app_return: float | None = None
    episode_return: float | None = None
    step_rewards: Mapping[str, int] = field(default_factory=dict)
    num_decisions: int = 0
    num_turns: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    num_sampled_tokens: int = 0
    num_trained_tokens: int = 0
    reports_events: bool = False
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values (hence Any)."""
        return {"ok": not self.problems, **asdict(self)}


def report_of(
    name: str, asked: str, trajectory: Trajectory, counters: AppCounters, rollout: AppRollout | None
) -> ProbeReport:
    """The report of one attempt, played with counters of its own; `rollout` is the app's answer, None if none came."""
    problems, notices = _findings(trajectory, counters, rollout)
    return ProbeReport(
        name=name,
        asked=asked,
        outcome=trajectory.outcome.value,
        error=trajectory.error,
        app_return=None if rollout is None else rollout.episode_return,
        episode_return=trajectory.reward if trajectory.is_scored else None,
        step_rewards=_kinds_of(rollout),
        num_decisions=0 if rollout is None else len(rollout.decisions),
        num_turns=len(trajectory.turns),
        calls=dict(counters.calls),
        num_sampled_tokens=counters.num_sampled_tokens,
        num_trained_tokens=counters.num_trained_tokens,
        reports_events=rollout is not None and rollout.reports_events,
        problems=tuple(problems),
        notices=tuple(notices),
    )


def _findings(trajectory: Trajectory, counters: AppCounters, rollout: AppRollout | None) -> tuple[list[str], list[str]]:
    """Problems and notices."""
    if trajectory.error is not None:
        return [f"the episode is a failure and would be played again: {trajectory.error}"], []
    problems: list[str] = []
    app_return = None if rollout is None else rollout.episode_return
    if app_return is None:
        problems.append(NO_RETURN)
    elif not trajectory.is_scored or abs(trajectory.reward - app_return) > _TOLERANCE * max(1.0, abs(app_return)):
        told = trajectory.reward if trajectory.is_scored else None
        problems.append(f"returns do not reconcile: the app says {app_return:g}, and the turns' rewards sum to {told}")
    num_masked = sum(int(segment.action_mask.sum()) for segment in trajectory.segments)
    if num_masked != counters.num_trained_tokens:
        problems.append(f"tokens do not reconcile: {num_masked} in masks, {counters.num_trained_tokens} counted")
    untrained = {why: count for why, count in counters.calls.items() if why != "trained"}
    told_calls = ", ".join(f"{count} {why}" for why, count in sorted(untrained.items()))
    if counters.num_trained_tokens == 0:
        problems.append(f"nothing to train on: no token of the model's calls can be trained on ({told_calls})")
        return problems, []
    notices = [f"calls that are not trained on: {told_calls}"] if untrained else []
    notices += list(counters.first_warnings.values())
    return problems, notices


def _kinds_of(rollout: AppRollout | None) -> dict[str, int]:
    rewards = () if rollout is None else rollout.turn_rewards
    scored = [reward for reward in rewards if reward is not None]
    return {
        "positive": sum(reward > 0 for reward in scored),
        "zero": sum(not reward for reward in scored),
        "negative": sum(reward < 0 for reward in scored),
        "null": len(rewards) - len(scored),
    }


def is_result(report: ProbeReport) -> bool:
    """Whether the app finished the episode, so that it says something about the app's contract."""
    return report.error is None and report.outcome not in _FAILURES


_FAILURES = frozenset(outcome.value for outcome in Outcome if outcome.is_infrastructure_failure)


ERROR_RATE = 5e-4  # of each of the two tests of a step
NUM_STEPS = 32  # steps that the second test pools
_NUM_DRAWS = 1999  # the smallest p is 1 / (1999 + 1) = ERROR_RATE
_MAX_DRAWN = 1_000_000  # random numbers held at once
_ROUNDING = 1e-9  # of the sum of sizes: draws that give the same sum in another order are equal


@dataclass(frozen=True, slots=True)
class PlayedReturns:
    """What apps said that the finished attempts at a step's episodes are worth.

    Attributes:
        kept: of those that are in the step's groups.
        lost: of the others: dropped, dropped with their group, or played again.
    """

    kept: tuple[float, ...] = ()
    lost: tuple[float, ...] = ()

    @property
    def mean_played(self) -> float | None:
        """The mean of all; None without any."""
        return _mean((*self.kept, *self.lost))

    @property
    def mean_kept(self) -> float | None:
        """The mean of those that are kept; None without any."""
        return _mean(self.kept)


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
        """What a person should know of it."""
        kept = "none of them is kept" if self.mean_kept is None else f"the mean of those kept is {self.mean_kept:.4g}"
        return (
            f"task apps finished {self.num_played} attempts with a mean return of {self.mean_played:.4g}, {kept} "
            f"({self.num_kept}; p <= {self.p:.2g} over {self.num_steps} steps): what is dropped or played again "
            "depends on its outcome, and the policy is trained on the rest; ledger.jsonl has the reasons"
        )


class SelectionAlarm:
    """Permutation test of whether what is lost is a draw from what was played, whatever it returned.

    The statistic is the sum over lost attempts of (return - mean of the step's attempts). Under the null hypothesis,
    given how many are lost, every subset of that size of the step's attempts is as likely to be the lost one. So the
    two-sided p is the share of random subsets with a statistic as far from 0 as the one seen, (1 + those) / (1 + 1999)
    with subsets drawn by a seeded generator, which is exact: P(p <= a) <= a. A step is tested by itself, and together
    with those before it, up to 32 in all, by the sum of their statistics, subsets being drawn within each step, since
    the policy changes between them. The alarm sounds at p <= 0.0005 in either test: by chance, once in 1,000 steps that
    lose attempts at most (union bound). Steps that lose none are no evidence and are not tested. An alarm uses its
    evidence up.

    Args:
        seed: of the subsets.
    """

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._num_tests = 0
        self._steps: deque[_Tested] = deque(maxlen=NUM_STEPS)

    def check(self, returns: PlayedReturns) -> Selection | None:
        """What a step's returns show; None: nothing beyond chance."""
        if not returns.lost or not returns.kept:
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
    played = np.array([*returns.lost, *returns.kept], dtype=np.float64)
    centred = played - played.mean()
    num_lost = len(returns.lost)
    num_rows = max(1, _MAX_DRAWN // len(centred))
    drawn = [
        _sums_of_subsets(centred, num_lost, min(num_rows, _NUM_DRAWS - first), random)
        for first in range(0, _NUM_DRAWS, num_rows)
    ]
    return _Tested(returns, float(centred[:num_lost].sum()), np.concatenate(drawn), float(np.abs(played).sum()))


def _sums_of_subsets(
    values: NDArray[np.float64], size: int, count: int, random: np.random.Generator
) -> NDArray[np.float64]:
    """[count] sums of random subsets of that size: those whose random keys are the smallest."""
    keys = random.random((count, len(values)))
    chosen = np.argpartition(keys, size - 1, axis=1)[:, :size]
    sums: NDArray[np.float64] = values[chosen].sum(axis=1)
    return sums


def _p_of(steps: Sequence[_Tested]) -> float:
    seen = abs(sum(step.statistic for step in steps))
    drawn = np.abs(np.sum([step.drawn for step in steps], axis=0))
    rounding = _ROUNDING * sum(step.scale for step in steps)
    return float((1 + np.count_nonzero(drawn >= seen - rounding)) / (1 + _NUM_DRAWS))


def _selection(steps: Sequence[PlayedReturns], p: float) -> Selection:
    kept = tuple(value for step in steps for value in step.kept)
    lost = tuple(value for step in steps for value in step.lost)
    together = PlayedReturns(kept, lost)
    mean_played = together.mean_played
    assert mean_played is not None  # a step that was tested has attempts
    return Selection(len(steps), len(kept) + len(lost), len(kept), mean_played, together.mean_kept, p)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

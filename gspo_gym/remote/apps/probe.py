"""Report on a probe rollout of a task app: whether return, turns and trained tokens reconcile. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gspo_gym.remote.apps.episodes import AppCounters
from gspo_gym.remote.apps.rewards import AppRollout
from gspo_gym.types import Outcome, Trajectory

NO_RETURN = "no return: expected metrics.mean_return, outcome_score or step rewards, got none of them"
_TOLERANCE = 1e-6  # of the larger one: below it, two returns are the same


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The report on one probe.

    Attributes:
        name: of the probe. asked: what the app had to cope with.
        outcome, error: the end of the episode.
        app_return: the app's return; None: none. episode_return: the sum of the turns' rewards; None if it is not
            scored.
        step_rewards: how many of the app's steps have a positive, zero, negative or null reward.
        num_decisions: listed by the app. num_turns: captured. calls: of the model, by their use.
        num_sampled_tokens, num_trained_tokens: sampled for the calls, and trained on.
        reports_events: the app reports what its decisions achieved.
        problems: to be mended before training. notices: allowed, but perhaps not intended.
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
        """Return the report as JSON."""
        return {"ok": not self.problems, **asdict(self)}


def report_of(
    name: str, asked: str, trajectory: Trajectory, counters: AppCounters, rollout: AppRollout | None
) -> ProbeReport:
    """Report on one attempt that was played with new counters; `rollout` is the app's answer, None if none came."""
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
    """Return problems and notices."""
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
    """Return whether the app finished the episode; otherwise it tells nothing about the app's contract."""
    return report.error is None and report.outcome not in _FAILURES


_FAILURES = frozenset(outcome.value for outcome in Outcome if outcome.is_infrastructure_failure)

"""Metrics of task apps' rollouts, step by step. Nothing here feeds back into training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from gspo_gym.remote.gateway.capture import Untrained
from gspo_gym.rollout.summary import PlayedReturns
from gspo_gym.types import TrajectoryGroup

if TYPE_CHECKING:
    from gspo_gym.remote.apps.episodes import AppCounters

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "gateway/calls": "calls of the model by apps, in rollouts that are episodes",
        "gateway/trained_fraction": "share of the tokens sampled in those calls that reach training",
        "gateway/untrained_calls": "calls of them that are not trained on, for whatever reason",
        "gateway/auxiliary_calls": "of these, beside the task: a title, a summary",
        "gateway/not_awaited_calls": "of these, still open when the app answered its rollout: no turns of the episode",
        "gateway/undelivered_calls": "of these, not attributable: the answer reached nobody, and nobody asked again",
        "gateway/constrained_calls": "of these, sampled under a JSON schema",
        "gateway/other_sampling_calls": "of these, with sampling settings of their own",
        "gateway/untrained_episodes": "episodes with a return of which no token is trained on",
        "gateway/played_return_mean": "mean return, as apps say, of every attempt that they finished at the step's "
        "episodes",
        "gateway/kept_return_mean": "the same of those attempts that are kept; event return_selection if they part",
        "gateway/app_requests": "rollouts that apps were asked for, those that failed included",
        "gateway/app_warnings": "answers of apps that do not fit together, such as two different returns",
    }
)
_TRAINED = "trained"  # in `AppCounters.calls`; every other name there is a reason why not
_NAMED = {
    "gateway/auxiliary_calls": Untrained.AUXILIARY,
    "gateway/not_awaited_calls": Untrained.NOT_AWAITED,
    "gateway/undelivered_calls": Untrained.UNDELIVERED,
    "gateway/constrained_calls": Untrained.CONSTRAINED,
    "gateway/other_sampling_calls": Untrained.OTHER_SAMPLING,
}


class AppMetrics:
    """Reads the counters of all apps, added up, step by step."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def since_last(self, counters: Sequence[AppCounters]) -> dict[str, float]:
        """Return the metrics since the last call; the fraction only if anything was sampled."""
        totals = _totals(counters)
        new = {name: total - self._before.get(name, 0) for name, total in totals.items()}
        self._before = totals
        # A fraction of nothing would be a point on the chart that means nothing.
        metrics = {name: float(new[name]) for name in METRICS if name in new}
        if new["sampled"]:
            metrics["gateway/trained_fraction"] = new["trained"] / new["sampled"]
        return metrics


def take_returns(counters: Sequence[AppCounters], groups: Sequence[TrajectoryGroup]) -> PlayedReturns:
    """Return the apps' returns of the attempts at these groups' episodes, and remove them from the counters."""
    is_kept = {(t.trajectory_id, t.attempt) for group in groups for t in group.trajectories}
    trajectory_ids = {name for name, _ in is_kept} | {lost.trajectory_id for group in groups for lost in group.dropped}
    kept_returns: list[float] = []
    lost: list[float] = []
    # Returns of later steps' episodes stay until their step.
    for app_counters in counters:
        for key in [key for key in app_counters.returns if key[0] in trajectory_ids]:
            (kept_returns if key in is_kept else lost).append(app_counters.returns.pop(key))
    return PlayedReturns(tuple(kept_returns), tuple(lost))


def return_metrics(returns: PlayedReturns) -> dict[str, float]:
    """Return the two means, if there are any."""
    means = {"gateway/played_return_mean": returns.mean_played, "gateway/kept_return_mean": returns.mean_kept}
    return {name: mean for name, mean in means.items() if mean is not None}


def _totals(counters: Sequence[AppCounters]) -> dict[str, int]:
    calls = [counter.calls for counter in counters]
    num_calls = sum(counter.total() for counter in calls)
    return {
        "gateway/calls": num_calls,
        "gateway/untrained_calls": num_calls - sum(counter[_TRAINED] for counter in calls),
        **{name: sum(counter[why.value] for counter in calls) for name, why in _NAMED.items()},
        "gateway/untrained_episodes": sum(counter.num_untrained_episodes for counter in counters),
        "gateway/app_requests": sum(counter.num_attempts for counter in counters),
        "gateway/app_warnings": sum(counter.warnings.total() for counter in counters),
        "sampled": sum(counter.num_sampled_tokens for counter in counters),
        "trained": sum(counter.num_trained_tokens for counter in counters),
    }

"""What the rollouts of task apps came to, step by step, as metrics by name. Nothing here feeds back into training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo_gym.remote.app_episodes import AppCounters

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "gateway/calls": "calls of the model by apps, in rollouts that are episodes",
        "gateway/trained_fraction": "share of the tokens sampled in those calls that reach training",
        "gateway/untrained_calls": "calls of them that are not trained on, for whatever reason",
        "gateway/auxiliary_calls": "of these, beside the task: a title, a summary",
        "gateway/retried_calls": "of these, asked again, and the conversation went on from the other answer",
        "gateway/ambiguous_calls": "of these, quarantined: asked again, and nothing shows which answer was used",
        "gateway/app_requests": "rollouts that apps were asked for, those that failed included",
        "gateway/app_warnings": "answers of apps that do not fit together, such as two different returns",
    }
)
_TRAINED = "trained"  # in `AppCounters.calls`; every other name there is a reason why not
_NAMED = ("auxiliary", "retried", "ambiguous")


class AppMetrics:
    """Reads counters step by step; several apps are one."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def since_last(self, counters: Sequence[AppCounters]) -> dict[str, float]:
        """The metrics of what was counted since the last call; the fraction only if anything was sampled."""
        totals = _totals(counters)
        new = {name: total - self._before.get(name, 0) for name, total in totals.items()}
        self._before = totals
        metrics = {name: float(new[name]) for name in METRICS if name in new}
        if new["sampled"]:
            metrics["gateway/trained_fraction"] = new["trained"] / new["sampled"]
        return metrics


def _totals(counters: Sequence[AppCounters]) -> dict[str, int]:
    calls = [each.calls for each in counters]
    num_calls = sum(each.total() for each in calls)
    return {
        "gateway/calls": num_calls,
        "gateway/untrained_calls": num_calls - sum(each[_TRAINED] for each in calls),
        **{f"gateway/{name}_calls": sum(each[name] for each in calls) for name in _NAMED},
        "gateway/app_requests": sum(each.num_attempts for each in counters),
        "gateway/app_warnings": sum(each.warnings.total() for each in counters),
        "sampled": sum(each.num_sampled_tokens for each in counters),
        "trained": sum(each.num_trained_tokens for each in counters),
    }

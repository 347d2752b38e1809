"""The checkpoints of a run that are kept when a newer one is complete. Light: reading a configuration loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from gspo_gym.base.settings import Settings

# Numbers of an evaluation by name, and under "score" the name of the one that counts; JSON, hence Any.
Numbers = Mapping[str, Any]
EVALUATION_NUMBERS = ("score", "success_rate", "mean_return", "mean_env_return")


class RetentionSettings(Settings):
    """The keys of [training] that say which checkpoints stay on the disk."""

    keep_last: int = Field(default=2, gt=0, description="newest checkpoints that are kept")
    keep_best: int = Field(
        default=1,
        ge=0,
        description="checkpoints with the best evaluations that are kept besides, of those whose step was evaluated",
    )
    keep_best_metric: Literal["score", "success_rate", "mean_return", "mean_env_return"] = Field(
        default="score", description="the evaluation's number that keep_best goes by; score: what the run's scores are"
    )
    keep_best_direction: Literal["max", "min"] = Field(
        default="max", description="whether the largest or the smallest of keep_best_metric is the best"
    )
    keep_every: int | None = Field(
        default=None,
        gt=0,
        description="checkpoints after every so many iterations are never removed, which the one before the first is "
        "not; absent: of none",
    )

    def kept(self, evaluations: Mapping[int, Numbers | None]) -> set[int]:
        """Return the steps whose checkpoints stay, given the evaluation of each step, None where there is none.

        >>> scores = {2: {"mean_return": 0.9}, 4: {"mean_return": 0.5}, 6: None, 8: {"mean_return": 0.7}}
        >>> sorted(RetentionSettings(keep_last=1, keep_best_metric="mean_return", keep_every=3).kept(scores))
        [2, 6, 8]
        """
        steps = sorted(evaluations)
        # Not 0: it is there for a kill before the first checkpoint, and holds the weights that the run began with.
        periodic = {step for step in steps if self.keep_every and step and step % self.keep_every == 0}
        return {*steps[-self.keep_last :], *periodic, *self.best(evaluations)[: self.keep_best]}

    def best(self, evaluations: Mapping[int, Numbers | None]) -> list[int]:
        """Return the steps that have the metric, the best first; of equal ones the earlier."""
        evaluated = {step: numbers for step, numbers in sorted(evaluations.items()) if numbers is not None}
        metric = self.keep_best_metric
        if metric == "score":
            # What a run's scores are may be decided by a later evaluation than its first.
            metric = next((numbers["score"] for numbers in reversed(evaluated.values())), metric)
        found = {step: numbers.get(metric) for step, numbers in evaluated.items()}
        if self.keep_best_metric == "score" and metric == "success_rate":
            found = {step: value or 0.0 for step, value in found.items()}  # undecided episodes are no successes
        sign = -1 if self.keep_best_direction == "max" else 1
        ranked = sorted((sign * value, step) for step, value in found.items() if value is not None)
        return [step for _, step in ranked]

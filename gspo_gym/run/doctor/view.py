"""The run as the doctor's checks read it, and the form of their findings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["serious", "warning", "note"]

# A quarter of the run shows how the run is now, not how it was on average; a mean of less than 10 steps says little,
# because one batch is a sample of a few dozen episodes.
_WINDOW_FRACTION = 0.25
_MIN_WINDOW = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a run.

    Attributes:
        severity: "serious": the run fails its purpose; "warning": it could do better; "note": good to know.
        check: the check's name.
        problem: a sentence.
        evidence: the numbers and steps that show it.
        key: the configuration key to change first.
        suggestion: its new value, and what else could be done.
    """

    severity: Severity
    check: str
    problem: str
    evidence: str
    key: str
    suggestion: str


Check = Callable[["RunView"], Finding | list[Finding] | None]


@dataclass(frozen=True, slots=True)
class Window:
    """The finite values of a metric over some steps, at least one.

    Attributes:
        first_step, last_step: of the first and the last value.
        values: in the order of the steps.
    """

    first_step: int
    last_step: int
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def steps(self) -> str:
        """Return "steps 3 to 12", or "step 3"."""
        if self.first_step == self.last_step:
            return f"step {self.first_step}"
        return f"steps {self.first_step} to {self.last_step}"


@dataclass(frozen=True, slots=True)
class RunView:
    """The contents of a run's folder, for checks.

    Attributes:
        config: the sections of config.toml.
        metrics, events: the lines of metrics.jsonl and events.jsonl, oldest first.
        status: of summary.json; None without one, if the run goes on or was killed.
        outcomes: number of attempts at training episodes, by outcome.
        reasons: most frequent reason, for outcomes that are failures and for actions that exceeded a limit.
    """

    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    status: str | None = "completed"
    outcomes: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Return the last step with a line of metrics, or 0."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of "section.key", or `default`; config.toml leaves out None."""
        *above, name = key.split(".")
        table: Any = self.config
        for part in above:
            table = table.get(part, {})
        return table.get(name, default)

    def all(self, name: str) -> Window | None:
        """Return a metric over the whole run; None if no line has it."""
        return _window(self.metrics, name)

    def recent(self, name: str) -> Window | None:
        """Return a metric over the last quarter of the run, at least 10 lines; None if none of them has it."""
        return _window(self.metrics[-self._window_size :], name)

    def early(self, name: str) -> Window | None:
        """Return a metric over the first quarter of the run, at least 10 lines; None if none of them has it."""
        return _window(self.metrics[: self._window_size], name)

    def events_of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the events of a kind."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def error(self) -> str | None:
        """Return the error in the last "finished" event, or None."""
        ended = self.events_of("finished")
        return ended[-1]["data"].get("error") if ended else None

    @property
    def score_name(self) -> str:
        """Return the unit of the run's scores."""
        # By the last evaluation: the first ones may not have decided it yet.
        last: Mapping[str, Any] = next((event["data"] for event in reversed(self.events_of("evaluation"))), {})
        return str(last.get("score", "mean_return" if last.get("success_rate") is None else "success_rate"))

    @property
    def is_succeeding(self) -> bool:
        """Return whether nine of ten recent episodes succeed; False if rescored."""
        success = self.recent("rollout/success_rate")
        # Above 0.9, little is left to learn, so that flat curves are no problem.
        return success is not None and success.mean >= 0.9 and not self.is_rescored

    @property
    def is_rescored(self) -> bool:
        """Return whether an endpoint plays the training episodes; their returns then say nothing about the policy."""
        return bool(self.setting("rollout.rescore", False))

    @property
    def _window_size(self) -> int:
        return max(_MIN_WINDOW, round(_WINDOW_FRACTION * len(self.metrics)))


def _window(lines: Sequence[Mapping[str, Any]], name: str) -> Window | None:
    points = [(line["step"], float(line[name])) for line in lines if line.get(name) is not None]
    return Window(points[0][0], points[-1][0], tuple(value for _, value in points)) if points else None

"""The view of a run that findings are functions of: its folder, and a step's episodes token by token.

A finding maps a run to a `Finding`, several, or None; it is silent about metrics that the run does not have. Each
threshold is a constant with its reason, and each finding has a planted fault that it names; see `findings.py`.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

Json = Any  # the values of json.loads
Array = Any  # numpy's; in `StepView` [A], over the sampled tokens of a step
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
        problem: a sentence.
        evidence: the numbers and steps that show it.
        key: the configuration key to change first; "": no setting is at fault.
        suggestion: its new value, and what else could be done.
        check: the name of the function that found it.
    """

    severity: Severity
    problem: str
    evidence: str
    key: str
    suggestion: str
    check: str = ""


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

    def number(self, key: str) -> float:
        """Return a setting that is a number; 0 if it is absent."""
        return float(self.setting(key) or 0.0)

    @property
    def unit(self) -> str:
        """Return what shares an importance ratio."""
        return str(self.setting("loss.unit", "trajectory"))

    @property
    def clips_the_ratio(self) -> bool:
        """Return whether a clip bounds the ratio that a unit shares; another surrogate bounds something else."""
        return self.learns_from_reward and bool(self.setting("loss.surrogate", "clip") == "clip")

    @property
    def learns_from_reward(self) -> bool:
        """Return whether episodes are compared by their rewards; False if a teacher alone is learned from."""
        return bool(self.setting("distillation.reward", True))

    @property
    def uses_the_ratio(self) -> bool:
        """Return whether a term has an importance ratio; False if an exact divergence alone is learned from."""
        return self.learns_from_reward or bool(self.setting("distillation.divergence", "sampled") == "sampled")

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
        return [event for event in self.events if event["kind"] == kind]

    @property
    def error(self) -> str | None:
        """Return the error in the last "finished" event, or None."""
        finish_events = self.events_of("finished")
        return finish_events[-1]["data"].get("error") if finish_events else None

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


class StepView:
    """The data of one step on a page, as arrays; from `step_values`.

    Attributes:
        run, values: as on the page.
        rules: the settings that numbers follow from.
        step: its number. is_training: it is no evaluation.
        episodes: of all groups.
        episode, segment, turn: [A] the place of each sampled token; turn -1: it is in no turn's action.
    """

    def __init__(self, run: Mapping[str, Json], values: Mapping[str, Json]) -> None:
        self.run, self.values = run, values
        self.rules: Mapping[str, Json] = run["rules"]
        self.step, self.is_training = int(values["step"]), values["name"].startswith("step_")
        groups: Sequence[Mapping[str, Json]] = values["groups"]
        self.episodes: list[Mapping[str, Json]] = [episode for group in groups for episode in group["episodes"]]
        places = [np.zeros((3, 0), np.int64)]
        for number, episode in enumerate(self.episodes):
            for index, part in enumerate(episode["segments"]):
                turns = np.full(len(part["ids"]), -1)
                for k in (k for k, turn in enumerate(episode["turns"]) if turn["segment"] == index):
                    turns[slice(*episode["turns"][k]["action"])] = k
                own = turns[np.array(part["sampled"], np.int64)]
                places.append(np.stack([np.full(len(own), number), np.full(len(own), index), own]))
        self.episode, self.segment, self.turn = np.concatenate(places, axis=1)

    def column(self, name: str, number: int | None = None) -> Array:
        """Return [A] float64 a column of all episodes, or one of a pass; NaN where it is not known."""
        parts = [np.zeros(0)]
        for episode, length in zip(self.episodes, np.bincount(self.episode, minlength=len(self.episodes)), strict=True):
            passes = [*episode["passes"], {}]
            columns = episode["columns"] if number is None else passes[min(number, len(passes) - 1)]
            parts.append(np.array(columns.get(name, [np.nan] * length), np.float64))
        return np.concatenate(parts)

    def optimizer_step(self, number: int) -> Array:
        """Return [A] the optimizer step that counts each token in a pass; -1: none."""
        steps = [[*episode.get("optimizer_steps", []), *[-1] * (number + 1)][number] for episode in self.episodes]
        return np.array(steps, np.int64)[self.episode]

    @cached_property
    def before_update(self) -> Array:
        """Return [A] the learner's logprobs before the first optimizer step; NaN where later ones are known only."""
        return np.where(self.optimizer_step(0) == 0, self.column("logprob", 0), np.nan)

    @property
    def takes_the_engines(self) -> bool:
        return bool(self.rules["correction"].get("old_logprobs") == "rollout")

    @property
    def num_passes(self) -> int:
        return max((len(episode["passes"]) for episode in self.episodes), default=0)

    @property
    def is_half(self) -> bool:
        return bool(set(self.rules["dtypes"]) - {"float32"})

    def contexts(self) -> Array:
        """Return [A] a hash of all that the policy had read of the segment before it sampled the token."""
        hashes: list[int] = []
        for part in (part for episode in self.episodes for part in episode["segments"]):
            prefix_hashes = list(itertools.accumulate(part["ids"], lambda before, i: hash((before, i)), initial=0))
            hashes += [prefix_hashes[position] for position in part["sampled"]]
        return np.array(hashes, np.int64)

    def groups(self) -> dict[str, list[int]]:
        """Return the numbers of the episodes by their group, whose name their ids begin with."""
        groups = defaultdict(list)
        for number, episode in enumerate(self.episodes):
            groups[episode["id"].rpartition("/")[0]].append(number)
        return groups

    def first(self, tokens: Array) -> tuple[int, str]:
        """Return the first of [A] chosen tokens, and where it is, for people."""
        token = int(np.flatnonzero(tokens)[0])
        episode = self.episodes[self.episode[token]]
        return token, f"{self.values['name']}, episode {episode['id']}, turn {self.turn[token]}"

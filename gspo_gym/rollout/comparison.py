"""Comparison of two evaluations of the same tasks, pair by pair."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gspo_gym.base.tables import table
from gspo_gym.errors import ConfigError
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow, Samples, task_return, task_success
from gspo_gym.rollout.statistics import Interval, as_list, as_text, bootstrap_mean_interval, mcnemar_exact_p


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations of the same tasks, pair by pair; differences are second minus first.

    A pair is a task. Of several samples of it, means are compared: sample by sample nothing else than the task is
    shared.

    Attributes:
        num_pairs: tasks that both could score; everything below is about these.
        difference_interval: 95% percentile bootstrap interval of it over pairs; None for a single pair.
        num_only_first, num_only_second: tasks on which only that side succeeded, or more often; None without a notion
            of success.
        success_p_value: McNemar's exact test of these, two-sided, with several samples the sign test that it is; None
            without a notion of success.
    """

    num_pairs: int
    num_unpaired: int
    mean_difference: float
    difference_interval: Interval | None
    num_only_first: int | None
    num_only_second: int | None
    success_p_value: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON values, the interval as [low, high] or None."""
        return asdict(self) | {"difference_interval": as_list(self.difference_interval)}


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Compare two evaluations; a ConfigError for different environments or seeds, or no scored seed in common."""
    if first.env_id != second.env_id:
        raise ConfigError(f"compare: evaluations of different environments, {first.env_id} and {second.env_id}")
    first_tasks, second_tasks = _scored_by_task(first), _scored_by_task(second)
    differing = {seed for _, seed in first_tasks.keys() ^ second_tasks.keys()}
    if differing:
        raise ConfigError(f"compare: evaluations of different seeds; only one side has {sorted(differing)[:5]}")
    all_pairs = [(task, second_tasks[key]) for key, task in first_tasks.items()]
    pairs = [(a, b) for a, b in all_pairs if a and b]
    if not pairs:
        raise ConfigError("compare: no seed was scored in both evaluations")
    differences = [task_return(b) - task_return(a) for a, b in pairs]
    has_success = any(row.success is not None for a, b in pairs for row in (*a, *b))
    only_first = sum(task_success(a) > task_success(b) for a, b in pairs)
    only_second = sum(task_success(b) > task_success(a) for a, b in pairs)
    return Comparison(
        num_pairs=len(pairs),
        num_unpaired=len(all_pairs) - len(pairs),
        mean_difference=sum(differences) / len(pairs),
        difference_interval=bootstrap_mean_interval(differences),
        num_only_first=only_first if has_success else None,
        num_only_second=only_second if has_success else None,
        success_p_value=mcnemar_exact_p(only_first, only_second) if has_success else None,
    )


def _scored_by_task(evaluation: Evaluation) -> dict[tuple[str, int], Samples]:  # () for a task without any
    keyed_rows = [((part.env_id, row.seed), row) for part in evaluation.parts or (evaluation,) for row in part.rows]
    samples: dict[tuple[str, int], list[EvaluationRow]] = {key: [] for key, _ in keyed_rows}
    for key, row in keyed_rows:
        samples[key] += [] if row.episode_return is None else [row]
    return {key: tuple(rows) for key, rows in samples.items()}


def comparison_table(comparison: Comparison, *, first: str, second: str, width: int | None = None) -> str:
    """Return a table for people: what changed from the evaluation named `first` to that named `second`."""
    rows = [
        ("pairs (tasks)", str(comparison.num_pairs)),
        ("mean return, difference", f"{comparison.mean_difference:+.3f}"),
        ("  95% interval", as_text(comparison.difference_interval)),
    ]
    if comparison.success_p_value is not None:
        rows += [
            (f"{second} succeeded more often", str(comparison.num_only_second)),
            (f"{first} succeeded more often", str(comparison.num_only_first)),
            ("p-value (McNemar, exact)", f"{comparison.success_p_value:.4g}"),
        ]
    if comparison.num_unpaired:
        rows.append(("tasks left out (failed)", str(comparison.num_unpaired)))
    return table((f"{second} against {first}", "value"), rows, width=width)

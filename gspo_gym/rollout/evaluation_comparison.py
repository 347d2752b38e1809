"""Two evaluations of the same seeds, pair by pair: what changed, and whether chance explains it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Column, Table

from gspo_gym.errors import ConfigError
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow
from gspo_gym.rollout.statistics import Interval, as_list, as_text, bootstrap_mean_interval, mcnemar_exact_p


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations of the same seeds, pair by pair; differences are second minus first.

    Attributes:
        num_pairs: seeds that both could score; everything below is about these.
        difference_interval: 95% percentile bootstrap interval of it over pairs; None for a single pair.
        num_only_first, num_only_second: seeds on which only that side succeeded; None without a notion of success.
        success_p_value: McNemar's exact test, two-sided; None without a notion of success.
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
    rows, others = _rows_by_task(first), _rows_by_task(second)
    differing = {seed for _, seed in rows.keys() ^ others.keys()}
    if differing:
        raise ConfigError(f"compare: evaluations of different seeds; only one side has {sorted(differing)[:5]}")
    pairs: list[tuple[EvaluationRow, EvaluationRow]] = []
    differences: list[float] = []
    for task, a in rows.items():
        b = others[task]
        if a.episode_return is not None and b.episode_return is not None:
            pairs.append((a, b))
            differences.append(b.episode_return - a.episode_return)
    if not pairs:
        raise ConfigError("compare: no seed was scored in both evaluations")
    has_success = any(row.success is not None for pair in pairs for row in pair)
    only_first = sum(a.success is True and b.success is not True for a, b in pairs)
    only_second = sum(b.success is True and a.success is not True for a, b in pairs)
    return Comparison(
        num_pairs=len(pairs),
        num_unpaired=len(first.rows) - len(pairs),
        mean_difference=sum(differences) / len(pairs),
        difference_interval=bootstrap_mean_interval(differences),
        num_only_first=only_first if has_success else None,
        num_only_second=only_second if has_success else None,
        success_p_value=mcnemar_exact_p(only_first, only_second) if has_success else None,
    )


def _rows_by_task(evaluation: Evaluation) -> dict[tuple[str, int], EvaluationRow]:
    return {(part.env_id, row.seed): row for part in evaluation.parts or (evaluation,) for row in part.rows}


def comparison_table(comparison: Comparison, *, first: str, second: str) -> Table:
    """Return a table for people: what changed from the evaluation named `first` to that named `second`."""
    table = Table(Column(f"{second} against {first}", overflow="fold"), "value")
    table.add_row("pairs of episodes", str(comparison.num_pairs))
    table.add_row("mean return, difference", f"{comparison.mean_difference:+.3f}")
    table.add_row("  95% interval", as_text(comparison.difference_interval))
    if comparison.success_p_value is not None:
        table.add_row(f"only {second} succeeded", str(comparison.num_only_second))
        table.add_row(f"only {first} succeeded", str(comparison.num_only_first))
        table.add_row("p-value (McNemar, exact)", f"{comparison.success_p_value:.4g}")
    if comparison.num_unpaired:
        table.add_row("seeds left out (failed)", str(comparison.num_unpaired))
    return table

"""Seeded evaluation: one episode per seed. The same seeds are the same tasks for ever, to be compared pair by pair.

An episode that failed for infrastructure reasons is counted, never scored 0. Intervals and tests are closed forms and
seeded resampling, without scipy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from gspo_gym.base.settings import parse_seeds
from gspo_gym.base.tables import Row, html_table, table
from gspo_gym.errors import ConfigError
from gspo_gym.rollout.pool import RolloutPool, require_episodes
from gspo_gym.seeding import generator
from gspo_gym.types import Outcome, Task, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """The episode of one seed. `episode_return` is None if it failed, and `error` then says why.

    `success` is what the environment declared last; None if it never did. `env_return` is the environment's own return
    where `episode_return` is blended with a judge's scores; None without a judge, or if it gave none.
    """

    seed: int
    episode_return: float | None
    success: bool | None
    num_turns: int
    outcome: Outcome
    error: str | None = None
    env_return: float | None = None


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """The row of an episode that was scored; `num_retries` are the failed attempts before it."""

    env_id: str
    row: EvaluationRow
    num_retries: int

    @classmethod
    def of(cls, episode: Trajectory, env_return: float | None) -> PlayedRow:
        task, num_turns = episode.task, len(episode.turns)
        row = EvaluationRow(
            task.seed, episode.reward, episode.success, num_turns, episode.outcome, env_return=env_return
        )
        return cls(task.env_id, row, episode.attempt)

    def to_json(self) -> dict[str, Any]:
        """JSON values (hence Any) that `from_json` turns into an equal row."""
        row = asdict(self.row) | {"outcome": self.row.outcome.value}
        return {"env_id": self.env_id, "num_retries": self.num_retries, **row}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PlayedRow:
        """Return the row that was written; raises KeyError, TypeError or ValueError for anything else."""
        row = {key: value for key, value in values.items() if key not in ("env_id", "num_retries")}
        row["outcome"] = Outcome(row["outcome"])
        return cls(values["env_id"], EvaluationRow(**row), values["num_retries"])


def _ignore(_: PlayedRow, __: Trajectory) -> None: ...


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows with which an interrupted evaluation goes on.

    Attributes:
        found: rows of an earlier attempt; their episodes are not played again.
        add: receives each further row and its episode as soon as that is over, in no order; must be quick. Episodes
            that fail give none and are therefore played again.
    """

    found: tuple[PlayedRow, ...] = ()
    add: Callable[[PlayedRow, Trajectory], None] = _ignore


ScoreName = Literal["success_rate", "mean_return"]


@dataclass(frozen=True, slots=True)
class ScoreUnit:
    """The unit of all scores of a run: decided once, because they are compared.

    Attributes:
        name: which number of an evaluation is its score.
        success_of: the environments over which a success rate is taken: those that say whether a task was achieved.
            () for a mean return, which is over all of them.
    """

    name: ScoreName
    success_of: tuple[str, ...] = ()

    @classmethod
    def of_first(cls, first: Evaluation, *, has_success_goal: bool) -> ScoreUnit | None:
        """Return the unit that a run's first evaluations decide; None: not yet.

        It is the success rate of the environments that declared a success or a failure. If none did, it is the mean
        return, unless the run is to stop at a success rate (`has_success_goal`). See `restated` for the scores before.
        """
        parts, declaring = first.parts or (first,), first.declaring
        if not declaring and has_success_goal:  # their episodes were merely cut off before it showed
            declaring = tuple(part.env_id for part in parts)
        elif not all(part.is_decided for part in parts):  # every episode was cut off: a later evaluation decides
            return None
        return cls("success_rate", declaring) if declaring else cls("mean_return")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Episodes of one environment over given seeds, in the order of the seeds.

    Every mean is over the episodes that did not fail (`num_episodes` of them). An episode in which the environment
    declared neither success nor failure (it was cut off first) is not a success; but if it declared nothing in any
    episode, nor `unit` says that it has such a notion, `success_rate` is None.

    `parts` are the evaluations of single environments that this one joins; see `join`. `unit` is what the score is
    measured in; None: what this evaluation alone suggests. `num_retries` are the failed attempts that were played
    again.
    """

    env_id: str
    rows: tuple[EvaluationRow, ...]
    parts: tuple[Evaluation, ...] = ()
    unit: ScoreUnit | None = None
    num_retries: int = 0

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds asked for, failed ones included; of several environments, each once."""
        return tuple(dict.fromkeys(row.seed for row in self.rows))

    @property
    def scored_rows(self) -> tuple[EvaluationRow, ...]:
        """The episodes that count."""
        return tuple(row for row in self.rows if row.episode_return is not None)

    @property
    def num_episodes(self) -> int:
        return len(self.scored_rows)

    @property
    def num_failed(self) -> int:
        """Episodes that were asked for and could not be scored."""
        return len(self.rows) - self.num_episodes

    @property
    def returns(self) -> tuple[float, ...]:
        return tuple(row.episode_return for row in self.rows if row.episode_return is not None)

    @property
    def mean_return(self) -> float:
        """Mean return over `num_episodes`."""
        return sum(self.returns) / self.num_episodes

    @property
    def mean_env_return(self) -> float | None:
        """Mean of the environment's own returns, over the episodes that have one beside a judge's; None if none has."""
        env_returns = [row.env_return for row in self.scored_rows if row.env_return is not None]
        return sum(env_returns) / len(env_returns) if env_returns else None

    @property
    def mean_return_interval(self) -> Interval | None:
        """95% percentile bootstrap interval of the mean return; None for a single episode."""
        return bootstrap_mean_interval(self.returns)

    @property
    def num_successes(self) -> int | None:
        """Episodes in which the task was achieved; None if the environment has no notion of success."""
        rows = self._rows_with_success
        return sum(row.success is True for row in rows) if rows else None

    @property
    def declaring(self) -> tuple[str, ...]:
        """The environments in which an episode was declared a success or a failure."""
        return tuple(part.env_id for part in self.parts or (self,) if part.success_rate is not None)

    @property
    def is_decided(self) -> bool:
        """Whether an episode that counts came to its end, or says whether its task was achieved."""
        return any(row.success is not None or row.outcome is Outcome.TERMINATED for row in self.scored_rows)

    @property
    def success_rate(self) -> float | None:
        """`num_successes` over `num_episodes`, of several environments over those that have such a notion."""
        return None if self.num_successes is None else self.num_successes / len(self._rows_with_success)

    @property
    def success_interval(self) -> Interval | None:
        """95% Wilson interval of the success rate."""
        num_successes = self.num_successes
        return None if num_successes is None else wilson_interval(num_successes, len(self._rows_with_success))

    @property
    def _rows_with_success(self) -> tuple[EvaluationRow, ...]:  # of environments that have a notion of success
        env_ids = () if self.unit is None else self.unit.success_of
        if self.parts:
            counted_parts = [part for part in self.parts if not env_ids or part.env_id in env_ids]
            return tuple(row for part in counted_parts for row in part._rows_with_success)
        # Cut off before anything was declared is no success where the environment declares such a thing at all.
        is_declared = self.env_id in env_ids or any(row.success is not None for row in self.scored_rows)
        return self.scored_rows if is_declared else ()

    @property
    def mean_turns(self) -> float:
        """Mean number of turns over `num_episodes`."""
        return sum(row.num_turns for row in self.scored_rows) / self.num_episodes

    @property
    def score_name(self) -> ScoreName:
        """Name of the score: that of `unit`; without one, the success rate where there is one."""
        if self.unit is not None:
            return self.unit.name
        return "mean_return" if self.success_rate is None else "success_rate"

    @property
    def score(self) -> float:
        """The number named by `score_name`. A success rate over no scored episode is 0."""
        return self.mean_return if self.score_name == "mean_return" else self.success_rate or 0.0

    def in_unit(self, unit: ScoreUnit) -> Evaluation:
        """Return this evaluation measured in a run's unit; parts that have no success keep their mean return."""
        without = ScoreUnit("mean_return")
        parts = (replace(part, unit=unit if part.env_id in unit.success_of else without) for part in self.parts)
        return replace(self, unit=unit, parts=tuple(parts))

    def summary(self) -> dict[str, Any]:
        """Return what matters as JSON values, without single episodes; `score` names the number that counts."""
        return {
            "score": self.score_name,
            "mean_return": self.mean_return,
            **({} if self.mean_env_return is None else {"mean_env_return": self.mean_env_return}),
            "success_rate": self.success_rate,
            "success_interval": as_list(self.success_interval),
            "num_episodes": self.num_episodes,
            "num_failed": self.num_failed,
            "seeds": list(self.seeds),
            **({"parts": {part.env_id: part.summary() for part in self.parts}} if self.parts else {}),
        }

    def sentence(self) -> str:
        """Return the result on one line, for people."""
        parts = [f"mean return {self.mean_return:.3f}", f"{self.mean_turns:.2f} turns", f"{self.num_episodes} episodes"]
        if self.success_rate is not None:
            parts.insert(0, f"success {self.success_rate:.3f} (95% {as_text(self.success_interval)})")
        if self.mean_env_return is not None:
            parts.insert(-2, f"of it without the judge {self.mean_env_return:.3f}")
        if self.num_failed:
            parts.append(f"{self.num_failed} failed and left out")
        if self.num_retries:
            parts.append(f"{self.num_retries} failed attempts played again")
        return "; ".join([", ".join(parts), *(f"{part.env_id}: {part.sentence()}" for part in self.parts)])

    def _repr_html_(self) -> str:
        """Return the result and that of each environment, for a notebook."""
        return evaluations_html({self.env_id: self, **{part.env_id: part for part in self.parts}})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation that `to_dict` wrote, without its unit."""
        rows = (EvaluationRow(**{**row, "outcome": Outcome(row["outcome"])}) for row in values["rows"])
        parts = tuple(cls.from_dict(part) for part in values.get("parts", {}).values())
        return cls(values["env_id"], tuple(rows), parts, num_retries=values.get("num_retries", 0))

    def to_dict(self) -> dict[str, Any]:
        """JSON values: the summary, more about it, and one row a seed. Intervals are [low, high] or None."""
        return {
            "env_id": self.env_id,
            **self.summary(),
            "mean_return_interval": as_list(self.mean_return_interval),
            "mean_turns": self.mean_turns,
            "num_retries": self.num_retries,
            "rows": [asdict(row) | {"outcome": row.outcome.value} for row in self.rows],
            **({"parts": {part.env_id: part.to_dict() for part in self.parts}} if self.parts else {}),
        }


async def evaluate(
    pool: RolloutPool,
    env_id: str,
    seeds: str | Sequence[int],
    *,
    label: str = "evaluation",
    options: Mapping[str, Any] | None = None,
    env_return_of: Callable[[Trajectory], float | None] | None = None,
    found: Sequence[PlayedRow] = (),
) -> Evaluation:
    """Play one episode per seed.

    Args:
        seeds: which tasks; see `settings.parse_seeds`.
        label: names the occasion in the ledger; it changes no result.
        options: given to every `reset`.
        env_return_of: returns what the environment gave an episode with rewards that are blended with a judge's scores.
        found: rows that an earlier attempt left; their episodes are not played again. Those of other environments or
            seeds are left out.

    Raises:
        ConfigError: no seeds, or one twice. RolloutError: no episode could be scored.
    """
    all_seeds = parse_seeds(seeds)
    num_before = pool.num_retries
    played_by_seed = {
        played_row.row.seed: played_row
        for played_row in found
        if played_row.env_id == env_id and played_row.row.seed in all_seeds
    }
    missing = [Task(env_id, seed, dict(options or {})) for seed in all_seeds if seed not in played_by_seed]
    # The ledger takes an episode's name only once: one pool evaluates repeatedly under other labels.
    groups = await pool.run_tasks(missing, label=label)
    if not played_by_seed:  # else there is an earlier result, and all that is missing may have failed
        require_episodes(groups)
    rows = {played_row.row.seed: played_row.row for played_row in played_by_seed.values()}
    rows |= {group.task.seed: _row_of(group, env_return_of) for group in groups}
    num_retries = pool.num_retries - num_before + sum(played_row.num_retries for played_row in played_by_seed.values())
    return Evaluation(env_id, tuple(rows[seed] for seed in all_seeds), num_retries=num_retries)


def evaluation_of_rows(env_ids: Sequence[str], seeds: Sequence[int], found: Sequence[PlayedRow]) -> Evaluation | None:
    """Return an evaluation made of rows that are there already; None if one is missing."""
    played_by_key = {(played.env_id, played.row.seed): played for played in found}
    if not all((env_id, seed) in played_by_key for env_id in env_ids for seed in seeds):
        return None
    parts = []
    for env_id in env_ids:
        played = [played_by_key[env_id, seed] for seed in seeds]
        num_retries = sum(played_row.num_retries for played_row in played)
        parts.append(Evaluation(env_id, tuple(played_row.row for played_row in played), num_retries=num_retries))
    return join(parts)


def in_one_unit(evaluations: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """Return evaluations of the same environments, by name, in the unit of the first with a success rate."""
    names = {env_id: None for evaluation in evaluations.values() for env_id in evaluation.declaring}
    unit = ScoreUnit("success_rate", tuple(names)) if names else ScoreUnit("mean_return")
    return {name: evaluation.in_unit(unit) for name, evaluation in evaluations.items()}


def restated(summary: Mapping[str, Any], unit: ScoreUnit) -> dict[str, Any]:
    """Return the summary of an evaluation that was made before its run had a unit, measured in that (Any: JSON)."""
    parts_by_env: Mapping[str, Mapping[str, Any]] = summary.get("parts", {})
    parts = {
        env_id: restated(part, unit if env_id in unit.success_of else ScoreUnit("mean_return"))
        for env_id, part in parts_by_env.items()
    }
    new_summary = {**summary, "score": unit.name, **({"parts": parts} if parts else {})}
    if unit.name == "success_rate":
        counted_parts = [parts[env_id] for env_id in unit.success_of] if parts else [new_summary]
        num_episodes = sum(part["num_episodes"] for part in counted_parts)
        # Cut off undecided is no success; the rate is a share of whole episodes, so that rounding finds their number.
        num_successes = sum(round((part["success_rate"] or 0.0) * part["num_episodes"]) for part in counted_parts)
        new_summary["success_rate"] = num_successes / num_episodes if num_episodes else 0.0
        new_summary["success_interval"] = (
            as_list(wilson_interval(num_successes, num_episodes)) if num_episodes else None
        )
    return new_summary


def join(parts: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluations of several environments as one, in which every episode counts the same."""
    if len(parts) == 1:
        return parts[0]
    rows = tuple(row for part in parts for row in part.rows)
    num_retries = sum(part.num_retries for part in parts)
    return Evaluation(" + ".join(part.env_id for part in parts), rows, tuple(parts), num_retries=num_retries)


def _row_of(group: TrajectoryGroup, env_return_of: Callable[[Trajectory], float | None] | None = None) -> EvaluationRow:
    if group.dropped:
        dropped_episode = group.dropped[0]
        return EvaluationRow(group.task.seed, None, None, 0, dropped_episode.outcome, dropped_episode.reason)
    episode = group.trajectories[0]
    return PlayedRow.of(episode, None if env_return_of is None else env_return_of(episode)).row


def evaluation_table(evaluations: Mapping[str, Evaluation], *, width: int | None = None) -> str:
    """Return a table for people: one row per named evaluation. `width` as for `tables.table`."""
    head, rows = _evaluation_rows(evaluations)
    return table(head, rows, width=width)


def evaluations_html(evaluations: Mapping[str, Evaluation]) -> str:
    """Return the same table for a notebook."""
    return html_table(*_evaluation_rows(evaluations))


def _evaluation_rows(evaluations: Mapping[str, Evaluation]) -> tuple[Row, list[Row]]:
    """Return the head and the rows of the table."""
    has_failed = any(result.num_failed for result in evaluations.values())
    head = ("", "success", "95%", "mean return", "95%", "turns", "episodes", *(["failed"] if has_failed else []))
    rows: list[Row] = [
        (
            name,
            "-" if result.success_rate is None else f"{result.success_rate:.3f}",
            as_text(result.success_interval),
            f"{result.mean_return:.3f}",
            as_text(result.mean_return_interval),
            f"{result.mean_turns:.2f}",
            str(result.num_episodes),
            *([str(result.num_failed)] if has_failed else []),
        )
        for name, result in evaluations.items()
    ]
    return head, rows


_Z_95 = 1.959963984540054  # the 97.5% point of the standard normal distribution
_NUM_RESAMPLES = 10_000
_MAX_RESAMPLED_NUMBERS = 2_000_000  # held at once, so that 100,000 episodes do not need gigabytes


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% interval."""

    low: float
    high: float


def wilson_interval(num_successes: int, num_trials: int) -> Interval:
    """Return the 95% score interval of a success probability (Wilson 1927, without continuity correction).

    With p = num_successes / num_trials, n = num_trials and z = 1.96: centre (p + z^2/2n) / (1 + z^2/n), half width
    z sqrt(p (1 - p)/n + z^2/4n^2) / (1 + z^2/n). Unlike p +- z sqrt(p (1 - p)/n) it keeps its coverage near 0 and 1.

    >>> interval = wilson_interval(0, 10)
    >>> interval.low, round(interval.high, 4)
    (0.0, 0.2775)
    """
    if num_trials < 1 or not 0 <= num_successes <= num_trials:
        raise ConfigError(f"wilson_interval: expected 0 <= successes <= trials >= 1, got {num_successes}/{num_trials}")
    n, p, z2 = num_trials, num_successes / num_trials, _Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # At the ends the exact bounds are 0 and 1; the subtraction only rounds to them.
    low = 0.0 if num_successes == 0 else centre - half
    high = 1.0 if num_successes == n else centre + half
    return Interval(low, high)


def bootstrap_mean_interval(values: Sequence[float], *, seed: int = 0) -> Interval | None:
    """Return the 95% percentile bootstrap interval of the mean (Efron 1979), 10,000 resamples, seeded.

    None for fewer than 2 values, from which no spread can be seen. If all values are equal the interval is that value,
    which says nothing about values that were not drawn.
    """
    # And not Student's t: returns are often two-valued or skewed.
    if len(values) < 2:
        return None
    sample = np.asarray(values, dtype=np.float64)
    rng = generator(seed, "bootstrap")
    block = max(1, _MAX_RESAMPLED_NUMBERS // len(sample))
    means = np.concatenate(
        [
            sample[rng.integers(len(sample), size=(min(block, _NUM_RESAMPLES - done), len(sample)))].mean(axis=1)
            for done in range(0, _NUM_RESAMPLES, block)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(low), float(high))


def mcnemar_exact_p(num_only_first: int, num_only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: are successes of one side more frequent on the same tasks?

    Only pairs that differ count. Under the null hypothesis each of the n = num_only_first + num_only_second goes either
    way with probability 1/2 (the sign test), so p = min(1, 2 P[Binomial(n, 1/2) <= min of the two]); 1 if no pair
    differs.

    >>> mcnemar_exact_p(0, 5)  # 2 / 2**5
    0.0625
    """
    n = num_only_first + num_only_second
    tail: int = sum(math.comb(n, k) for k in range(min(num_only_first, num_only_second) + 1))
    p: float = 2 * tail / 2**n  # integers divide exactly, however large
    return min(1.0, p)


def as_list(interval: Interval | None) -> list[float] | None:
    """Return an interval as JSON values."""
    return None if interval is None else [interval.low, interval.high]


def as_text(interval: Interval | None) -> str:
    """Return an interval for a table for people."""
    return "-" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


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
    first_rows, second_rows = _rows_by_task(first), _rows_by_task(second)
    differing = {seed for _, seed in first_rows.keys() ^ second_rows.keys()}
    if differing:
        raise ConfigError(f"compare: evaluations of different seeds; only one side has {sorted(differing)[:5]}")
    pairs: list[tuple[EvaluationRow, EvaluationRow]] = []
    differences: list[float] = []
    for task, a in first_rows.items():
        b = second_rows[task]
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


def comparison_table(comparison: Comparison, *, first: str, second: str, width: int | None = None) -> str:
    """Return a table for people: what changed from the evaluation named `first` to that named `second`."""
    rows = [
        ("pairs of episodes", str(comparison.num_pairs)),
        ("mean return, difference", f"{comparison.mean_difference:+.3f}"),
        ("  95% interval", as_text(comparison.difference_interval)),
    ]
    if comparison.success_p_value is not None:
        rows += [
            (f"only {second} succeeded", str(comparison.num_only_second)),
            (f"only {first} succeeded", str(comparison.num_only_first)),
            ("p-value (McNemar, exact)", f"{comparison.success_p_value:.4g}"),
        ]
    if comparison.num_unpaired:
        rows.append(("seeds left out (failed)", str(comparison.num_unpaired)))
    return table((f"{second} against {first}", "value"), rows, width=width)

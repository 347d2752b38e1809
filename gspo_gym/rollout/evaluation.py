"""Seeded evaluation: samples of each seed's task. The same seeds are the same tasks for ever, to be compared in pairs.

An episode that failed for infrastructure reasons is counted, never scored 0. Intervals and tests are those of
`statistics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

from gspo_gym.base.settings import parse_seeds
from gspo_gym.base.tables import Row, html_table, table
from gspo_gym.rollout.pool import RolloutPool, member_of, require_episodes
from gspo_gym.rollout.statistics import (
    Interval,
    as_list,
    as_text,
    bootstrap_mean_interval,
    pass_at_k,
    pass_hat_k,
    share_interval,
    wilson_interval,
)
from gspo_gym.types import Outcome, Task, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One episode of a seed. `episode_return` is None if it failed, and `error` then says why.

    `success` is what the environment declared last; None if it never did. `env_return` is the environment's own return
    where `episode_return` is blended with a judge's scores; None without a judge, or if it gave none. `sample` is the
    episode's number among those of its seed, from 0.
    """

    seed: int
    episode_return: float | None
    success: bool | None
    num_turns: int
    outcome: Outcome
    error: str | None = None
    env_return: float | None = None
    sample: int = 0


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """The row of an episode that was scored; `num_retries` are the failed attempts before it."""

    env_id: str
    row: EvaluationRow
    num_retries: int

    @classmethod
    def of(cls, episode: Trajectory, env_return: float | None) -> PlayedRow:
        task = episode.task
        row = EvaluationRow(
            task.seed,
            episode.reward,
            episode.success,
            len(episode.turns),
            episode.outcome,
            env_return=env_return,
            sample=member_of(episode.trajectory_id),
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


Samples = tuple[EvaluationRow, ...]  # the scored episodes of one task


def task_success(task: Samples) -> float:
    """Return the share of a task's samples that succeeded; one without a declared success did not."""
    return sum(row.success is True for row in task) / len(task)


def task_return(task: Samples) -> float:
    """Return the mean return of a task's samples."""
    return sum(row.episode_return for row in task if row.episode_return is not None) / len(task)


@dataclass(frozen=True, slots=True)
class PassRate:
    """Means over tasks of the estimates of `pass_at_k` and `pass_hat_k`, with their 95% intervals.

    `num_tasks` tasks have at least `k` scored samples; others are left out.
    """

    k: int
    num_tasks: int
    pass_at: float
    pass_at_interval: Interval
    pass_hat: float
    pass_hat_interval: Interval

    @classmethod
    def of(cls, tasks: Sequence[Samples], k: int) -> PassRate:
        """Return the rates of tasks of which at least one has k samples."""
        counts = [(len(task), sum(row.success is True for row in task)) for task in tasks if len(task) >= k]
        num_samples, num_tasks = [n for n, _ in counts], len(counts)
        at, hat = ([estimate(n, c, k) for n, c in counts] for estimate in (pass_at_k, pass_hat_k))
        at_interval, hat_interval = (share_interval(shares, num_samples, is_weighted=False) for shares in (at, hat))
        return cls(k, num_tasks, sum(at) / num_tasks, at_interval, sum(hat) / num_tasks, hat_interval)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, the intervals as [low, high]."""
        intervals = {
            "pass_at_interval": as_list(self.pass_at_interval),
            "pass_hat_interval": as_list(self.pass_hat_interval),
        }
        return asdict(self) | intervals


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Episodes of one environment over given seeds, in the order of the seeds and their samples.

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
    def tasks(self) -> tuple[Samples, ...]:
        """The episodes that count, task by task; a task without any is left out."""
        if self.parts:
            return tuple(task for part in self.parts for task in part.tasks)
        rows_by_seed: dict[int, list[EvaluationRow]] = {}
        for row in self.scored_rows:
            rows_by_seed.setdefault(row.seed, []).append(row)
        return tuple(map(tuple, rows_by_seed.values()))

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
        """95% percentile bootstrap interval of the mean return, over tasks; None for a single task."""
        means = [task_return(task) for task in self.tasks]
        return bootstrap_mean_interval(means, weights=[len(task) for task in self.tasks])

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
        """95% interval of the success rate: Wilson's, of several samples a task as `share_interval` has it."""
        tasks = self._tasks_with_success
        shares = [task_success(task) for task in tasks]
        return share_interval(shares, [len(task) for task in tasks]) if tasks else None

    @property
    def pass_rates(self) -> tuple[PassRate, ...]:
        """pass@k and pass^k for k = 2, 4, 8, ... and the samples of a task; () for one, or without success."""
        tasks = self._tasks_with_success
        most = max(map(len, tasks), default=0)
        powers = [2**i for i in range(1, most.bit_length()) if 2**i < most]
        return tuple(PassRate.of(tasks, k) for k in (*powers, *([most] if most > 1 else [])))

    @property
    def _rows_with_success(self) -> tuple[EvaluationRow, ...]:
        return tuple(row for task in self._tasks_with_success for row in task)

    @property
    def _tasks_with_success(self) -> tuple[Samples, ...]:  # of environments that have a notion of success
        env_ids = () if self.unit is None else self.unit.success_of
        if self.parts:
            counted_parts = [part for part in self.parts if not env_ids or part.env_id in env_ids]
            return tuple(task for part in counted_parts for task in part._tasks_with_success)
        # Cut off before anything was declared is no success where the environment declares such a thing at all.
        is_declared = self.env_id in env_ids or any(row.success is not None for row in self.scored_rows)
        return self.tasks if is_declared else ()

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
            **({"pass_rates": [rate.to_dict() for rate in self.pass_rates]} if self.pass_rates else {}),
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
        if rates := self.pass_rates:
            k, most = rates[-1].k, rates[-1]
            parts.insert(1, f"pass@{k} {most.pass_at:.3f}, pass^{k} {most.pass_hat:.3f}")
        if self.mean_env_return is not None:
            parts.insert(-2, f"of it without the judge {self.mean_env_return:.3f}")
        if self.num_failed:
            parts.append(f"{self.num_failed} failed and left out")
        if self.num_retries:
            parts.append(f"{self.num_retries} failed attempts played again")
        return "; ".join([", ".join(parts), *(f"{part.env_id}: {part.sentence()}" for part in self.parts)])

    def __str__(self) -> str:
        return self.sentence()  # the rows are many

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
        """JSON values: the summary, more about it, and one row an episode. Intervals are [low, high] or None."""
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
    samples_per_task: int = 1,
    label: str = "evaluation",
    options: Mapping[str, Any] | None = None,
    env_return_of: Callable[[Trajectory], float | None] | None = None,
    found: Sequence[PlayedRow] = (),
) -> Evaluation:
    """Play so many episodes per seed.

    Args:
        seeds: which tasks; see `settings.parse_seeds`.
        samples_per_task: episodes of each; the first is the same however many follow.
        label: names the occasion in the ledger; it changes no result.
        options: given to every `reset`.
        env_return_of: returns what the environment gave an episode with rewards that are blended with a judge's scores.
        found: rows that an earlier attempt left; their episodes are not played again. Those of other environments,
            seeds or samples are left out.

    Raises:
        ConfigError: no seeds, or one twice. RolloutError: no episode could be scored.
    """
    keys = list(product(parse_seeds(seeds), range(samples_per_task)))
    num_before = pool.num_retries
    played_by_key = _by_key(found, env_id, keys)
    missing = [key for key in keys if key not in played_by_key]
    # The ledger takes an episode's name only once: one pool evaluates repeatedly under other labels.
    groups = await pool.run_tasks(
        [Task(env_id, seed, dict(options or {})) for seed, _ in missing],
        samples=[sample for _, sample in missing],
        label=label,
    )
    if not played_by_key:  # else there is an earlier result, and all that is missing may have failed
        require_episodes(groups)
    rows = {key: played_row.row for key, played_row in played_by_key.items()}
    rows |= {key: _row_of(group, env_return_of) for key, group in zip(missing, groups, strict=True)}
    num_retries = pool.num_retries - num_before + sum(played_row.num_retries for played_row in played_by_key.values())
    return Evaluation(env_id, tuple(rows[key] for key in keys), num_retries=num_retries)


def evaluation_of_rows(
    env_ids: Sequence[str], seeds: Sequence[int], found: Sequence[PlayedRow], *, samples_per_task: int = 1
) -> Evaluation | None:
    """Return an evaluation made of rows that are there already; None if one is missing."""
    keys, parts = list(product(seeds, range(samples_per_task))), list[Evaluation]()
    for env_id in env_ids:
        played_by_key = _by_key(found, env_id, keys)
        if len(played_by_key) < len(keys):
            return None
        num_retries = sum(played_row.num_retries for played_row in played_by_key.values())
        parts.append(Evaluation(env_id, tuple(played_by_key[key].row for key in keys), num_retries=num_retries))
    return join(parts)


def _by_key(
    found: Sequence[PlayedRow], env_id: str, keys: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], PlayedRow]:
    """Return the rows of one environment with one of these seeds and samples."""
    rows = {(played.row.seed, played.row.sample): played for played in found if played.env_id == env_id}
    return {key: rows[key] for key in keys if key in rows}


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
        # The samples of each task are not in a summary: that there are as many trials as tasks is safe.
        num_trials = min(num_episodes, sum(len(part["seeds"]) for part in counted_parts))
        interval = wilson_interval(num_successes * num_trials / num_episodes, num_trials) if num_episodes else None
        new_summary["success_interval"] = as_list(interval)
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
        lost = group.dropped[0]
        sample = member_of(lost.trajectory_id)
        return EvaluationRow(group.task.seed, None, None, 0, lost.outcome, lost.reason, sample=sample)
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


def pass_table(evaluations: Mapping[str, Evaluation], *, width: int | None = None) -> str:
    """Return a table for people: the pass rates of each named evaluation; "" if none has several samples a task."""
    rows = [
        (
            name,
            str(rate.k),
            f"{rate.pass_at:.3f}",
            as_text(rate.pass_at_interval),
            f"{rate.pass_hat:.3f}",
            as_text(rate.pass_hat_interval),
            str(rate.num_tasks),
        )
        for name, result in evaluations.items()
        for rate in result.pass_rates
    ]
    return table(("", "k", "pass@k", "95%", "pass^k", "95%", "tasks"), rows, width=width) if rows else ""

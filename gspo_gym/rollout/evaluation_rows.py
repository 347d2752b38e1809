"""The rows of an evaluation, one a seed, as values and as JSON lines. What they say together is not here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gspo_gym.types import Outcome, Trajectory


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One seed's episode. `episode_return` is None if it failed, and `error` then says why.

    `success` is what the environment declared last; None if it never did. `env_return` is the environment's own return
    where `episode_return` is blended with a judge's scores; None if nobody judges, or it gave none.
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
        """Return the row of an episode; `env_return` as in `EvaluationRow`."""
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


def _ignore(_: PlayedRow) -> None:
    pass


@dataclass(frozen=True, slots=True)
class KeptRows:
    """How an evaluation goes on after an interruption.

    Attributes:
        found: rows of an earlier attempt, whose episodes are not played again.
        add: receives each further row as soon as its episode is over, in no order; must be quick. Episodes that fail
            give none, so that they are played again.
    """

    found: tuple[PlayedRow, ...] = ()
    add: Callable[[PlayedRow], None] = _ignore

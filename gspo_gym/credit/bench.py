"""CreditBench: play, fork and score. One policy, one environment, every estimator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gspo_gym.credit.estimators import estimators_for, of_scores
from gspo_gym.credit.forks import ForkedGroup, Player, fork_group, truth_of
from gspo_gym.credit.scores import Score, as_truth, score
from gspo_gym.types import Trajectory

JUDGED = "a judge's events, turn"
# The episodes -> a judge's score of each of their turns.
ScoreTurns = Callable[[Sequence[Trajectory]], Awaitable[Sequence[Sequence[float]]]]


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Size of a measurement.

    Attributes:
        group_size: episodes of each task. num_continuations: of each of their prefixes, for the truth.
        discount: per turn, of the returns that are to be estimated.
    """

    group_size: int = 8
    num_continuations: int = 32
    discount: float = 1.0


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Result of a measurement: the scores of each estimator, over `num_turns` turns.

    `ceiling` is the highest correlation that the errors of the truth allow.
    """

    num_turns: int
    ceiling: float
    scores: tuple[Score, ...]

    def as_json(self) -> dict[str, Any]:
        rows = [{**asdict(s), "is_biased": s.is_biased, "is_shifted": s.is_shifted} for s in self.scores]
        return {"num_turns": self.num_turns, "ceiling": self.ceiling, "rows": rows}


async def measure(
    player: Player,
    seeds: Sequence[int],
    settings: BenchSettings,
    on_group: Callable[[], None] = lambda: None,
    *,
    score_turns: ScoreTurns | None = None,
) -> BenchReport:
    """Play and fork a group of each seed, and score all estimators; `on_group` is called after each group.

    `score_turns` is a judge, whose scores are another estimator.

    Raises:
        ConfigError, ContractError: see `fork_group` and `score`.
        UnscoredError: the environment gives no reward.
    """
    groups = []
    for seed in seeds:
        groups.append(
            await fork_group(
                player,
                seed,
                group_size=settings.group_size,
                num_continuations=settings.num_continuations,
                discount=settings.discount,
            )
        )
        on_group()
    if score_turns is None:
        return report_of(groups, settings.discount)
    trajectories = [episode.trajectory for group in groups for episode in group.episodes]
    return report_of(groups, settings.discount, await score_turns(trajectories))


def report_of(
    groups: Sequence[ForkedGroup], discount: float, judged: Sequence[Sequence[float]] | None = None
) -> BenchReport:
    """Return the scores of all estimators over groups that were played.

    `judged` are a judge's scores of the turns of each episode, group after group.
    """
    truth = as_truth([truth_of(group, discount) for group in groups])
    scores = tuple(
        score(name, np.concatenate(estimate(groups, discount)), truth)
        for name, estimate in estimators_for(groups).items()
    )
    if judged is not None:
        scores += (score(JUDGED, np.concatenate(of_scores(groups, judged, discount)), truth),)
    return BenchReport(len(truth.advantages), truth.ceiling, scores)

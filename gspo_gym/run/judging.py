"""The judge of a run: scorers for the pools, metrics of a step, and the comparison with gold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gspo_gym.judge.asking import JudgeBudget, PausingJudge
from gspo_gym.judge.base import Judge, JudgeCost
from gspo_gym.judge.blend import EnvRewards, RewardBlend, env_rewards
from gspo_gym.judge.gold import DriftCheck, GoldWatch
from gspo_gym.judge.records import (
    JUDGEMENTS_FILE,
    EpisodeScorer,
    JudgedEpisode,
    JudgementRecorder,
    OnJudged,
    RubricsOf,
    read_judgements,
)
from gspo_gym.rollout.limits import GroupScoring, Scoring, ScoringLimits
from gspo_gym.run.records import read_events
from gspo_gym.types import Trajectory

# As `RunRecorder.event`: a kind of EVENTS, the step that ended last, JSON values (hence Any).
OnEventOfStep = Callable[[str, int, Mapping[str, Any]], None]


class Closable(Protocol):
    """An object that holds connections or tasks."""

    async def close(self) -> None: ...


class Judging:
    """Scorer of training and evaluation episodes, for one event loop; close it.

    Args:
        judge: asked for scores; an outage is waited out.
        rubrics_of: returns the rubrics of an episode.
        weights: of the blend.
        limits: of scores that are late or missing.
        rewards: returns what stands for the environment's rewards in the blend.
        budget: of the judge, with what it has spent.
        compares_groups: whether training episodes are judged beside their group; those of evaluations are judged alone.

    Attributes:
        judge: the same, waiting.
        for_training: scoring for a pool whose episodes are learned from.
        for_evaluation: scoring for a pool that evaluates; see `env_return`.
    """

    def __init__(
        self,
        judge: Judge,
        rubrics_of: RubricsOf,
        weights: RewardBlend,
        *,
        limits: ScoringLimits,
        rewards: EnvRewards = env_rewards,
        budget: JudgeBudget | None = None,
        compares_groups: bool = False,
    ) -> None:
        self.judge = PausingJudge(judge, on_event=self.tell)
        self._budget = budget or JudgeBudget()
        self._reported_cost = self._budget.spent
        self._reported_pause_seconds = 0.0
        self._gold: GoldWatch | None = None
        self._closables: list[Closable] = []
        self._write: JudgementRecorder | None = None
        self._on_event: OnEventOfStep | None = None
        self._step = 0
        self._env_returns: dict[str, float | None] = {}
        self._reasons: dict[str, Sequence[str | None]] | None = None

        def scorer(*on_judged: OnJudged) -> EpisodeScorer:
            return EpisodeScorer(
                self.judge, rubrics_of, weights, rewards=rewards, may_score=self._may_score, on_judged=on_judged
            )

        self._training = scorer(self._record, self._collect)
        self._evaluation = scorer(self._record, self._remember)
        self.for_training: Scoring | GroupScoring = (
            GroupScoring(self._training) if compares_groups else Scoring(self._training, limits)
        )
        self.for_evaluation = Scoring(self._evaluation, limits)

    def env_return(self, trajectory: Trajectory) -> float | None:
        """Remove and return the environment's return of an evaluation episode; None if it gave none."""
        return self._env_returns.pop(trajectory.trajectory_id, None)

    def keep_reasons(self) -> None:
        """Keep what the judge says of training episodes for `reasons_about`, from now on."""
        self._reasons = {}

    def reasons_about(self, trajectory_id: str) -> Sequence[str | None]:
        """Remove and return the judge's reasons about each turn of a training episode; () if it is not known."""
        return () if self._reasons is None else self._reasons.pop(trajectory_id, ())

    def watch(self, gold: GoldWatch) -> None:
        """Compare the judge with gold from now on."""
        self._gold = gold

    def close_too(self, other: Closable) -> None:
        """Close another object, such as a gold judge or a cache, when this is closed."""
        self._closables.append(other)

    def record_into(self, folder: Path, on_event: OnEventOfStep, *, step: int = 0) -> None:
        """Write judgements into a run's folder, which is at `step`, and report events.

        What the run's earlier processes spent counts from now on, and so does their first comparison with gold.

        Raises:
            RecordError: its judgements or events cannot be read.
        """
        path = folder / JUDGEMENTS_FILE
        self._write = JudgementRecorder(path)
        self._on_event, self._step = on_event, step
        first = next((event["data"] for event in read_events(folder) if event["kind"] == "judge_gold"), None)
        if self._gold is not None and first is not None:
            self._gold.go_on_from(DriftCheck(**{name: value for name, value in first.items() if name != "of_step"}))
        # Every judgement records the total so far, so the largest is that of the earlier processes. What was asked for
        # episodes that are played again was spent as well.
        paths = [path, *folder.glob(f"discarded/*/{JUDGEMENTS_FILE}")]
        judgements = (episode for judgement_path in paths for episode in read_judgements(judgement_path))
        cost = max((episode.spent for episode in judgements), key=lambda c: c.num_calls, default=JudgeCost())
        self._budget.spent = self._budget.spent + cost
        self._reported_cost = self._budget.spent

    def after_step(self, step: int) -> dict[str, float]:
        """Return the metrics since the previous step; begin a comparison with gold if one is due."""
        self._step = step
        self._evaluation.drain()  # an evaluation's numbers are its own
        cost, reported_cost = self._budget.spent, self._reported_cost
        pause_seconds = self.judge.pause_seconds
        metrics = {
            **self._training.drain(),
            "judge/calls": float(cost.num_calls - reported_cost.num_calls),
            "judge/input_tokens": float(cost.input_tokens - reported_cost.input_tokens),
            "judge/output_tokens": float(cost.output_tokens - reported_cost.output_tokens),
            "judge/cost_usd": cost.usd - reported_cost.usd,
            "judge/pause_seconds": pause_seconds - self._reported_pause_seconds,
            **({} if self._gold is None else self._gold.after_step(step)),
        }
        self._reported_cost, self._reported_pause_seconds = cost, pause_seconds
        return metrics

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        """Report an event (Any: JSON) to the run's recorder."""
        if self._on_event is not None:
            self._on_event(kind, self._step, data)

    async def finish(self) -> None:
        """Wait for the comparison with gold that runs beside the training."""
        if self._gold is not None:
            await self._gold.finish()

    async def close(self) -> None:
        """Cancel the comparison and close the connections; closing twice is fine."""
        if self._gold is not None:
            await self._gold.close()
        for closable in (self.judge, *self._closables):
            await closable.close()

    def _may_score(self) -> None:
        if self._gold is not None:
            self._gold.require_agreement()

    def _record(self, _: Trajectory, judged_episode: JudgedEpisode) -> None:
        if self._write is not None:
            self._write(dataclasses.replace(judged_episode, spent=self._budget.spent))

    def _collect(self, trajectory: Trajectory, judged_episode: JudgedEpisode) -> None:
        if self._gold is not None:
            self._gold.collect(trajectory, judged_episode)
        if self._reasons is not None:
            self._reasons[trajectory.trajectory_id] = judged_episode.judgement.reasons_of_turns(len(trajectory.turns))

    def _remember(self, trajectory: Trajectory, judged_episode: JudgedEpisode) -> None:
        self._env_returns[trajectory.trajectory_id] = judged_episode.env_return

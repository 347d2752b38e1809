"""Score finished episodes with a judge, blend and record them (`rollout.limits.Scoring`).

An episode without a score raises `UnscoredError`, and the pool retries or drops it; it never becomes 0. A judge that is
down is waited for (`PausingJudge`); one with a spent budget or a refused key ends the run, which can go on from its
checkpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gspo_gym.errors import UnscoredError
from gspo_gym.judge.base import Judge, JudgeBudgetError, JudgeError, Judgement, JudgeRequest, JudgeStoppedError, Rubrics
from gspo_gym.judge.blend import EnvRewards, RewardBlend, blend, env_rewards, unjudged
from gspo_gym.judge.records import JudgedEpisode
from gspo_gym.types import Outcome, Task, Trajectory

# The rubrics of a task; a task app may have its own for every one. Raises JudgeError if they cannot be had.
RubricsOf = Callable[[Task], Awaitable[Rubrics]]
OnJudged = Callable[[Trajectory, JudgedEpisode], None]  # of an episode that got a score, as it was before

_JUDGED = "mean over the episodes judged since the last line"
METRICS: Mapping[str, str] = MappingProxyType(
    {
        "judge/env": f"environment's own return, before the blend's weight: {_JUDGED}",
        "judge/event": f"sum of event totals, before the blend's weight: {_JUDGED}; absent if events are not judged",
        "judge/outcome": f"outcome's total, before the blend's weight: {_JUDGED}; absent if it is not judged",
        "judge/num_judged": "episodes that got a score since the last line",
        "judge/unscored": "episodes that got no score since the last line; none of them is trained on",
        "judge/flags": "episodes since the last line in which the judge suspects manipulation",
        "judge/num_cut": "episodes judged since the last line of which the judge was not shown all, for their length",
        "judge/disagreement": f"standard deviation of the panel's totals, {_JUDGED}; absent with a single judge",
        "judge/calls": "calls of the judge since the last line, those without a score and evaluations' included",
        "judge/input_tokens": "tokens that the judge read in these calls",
        "judge/output_tokens": "tokens that the judge wrote in these calls",
        "judge/cost_usd": "US dollars of these calls, at the prices of judge.options",
        "judge/pause_seconds": "seconds since the last line in which the judge was down and nothing could be scored",
        "judge/gold_gap": "mean score of the judge minus gold's, over the episodes of the last check",
        "judge/gold_correlation": "between the judge's scores and gold's in the last check",
    }
)


@dataclass(slots=True)
class _Tally:
    """Counts since the last `drain`."""

    env_returns: list[float]
    judgements: list[Judgement]
    num_unscored: int = 0


class EpisodeScorer:
    """Gives episodes the blended reward of environment and judge.

    Args:
        rewards: replace the environment's rewards in the blend.
        may_score: raises if nothing may be scored any more.
        on_judged: receives every score.
    """

    def __init__(
        self,
        judge: Judge,
        rubrics_of: RubricsOf,
        weights: RewardBlend,
        *,
        rewards: EnvRewards = env_rewards,
        may_score: Callable[[], None] = lambda: None,
        on_judged: Sequence[OnJudged] = (),
    ) -> None:
        self._judge = judge
        self._rubrics_of = rubrics_of
        self._weights = weights
        self._rewards = rewards
        self._may_score = may_score
        self._on_judged = tuple(on_judged)
        self._tally = _Tally([], [])

    async def __call__(self, trajectory: Trajectory) -> Trajectory:
        """Return the episode with blended rewards.

        Raises:
            UnscoredError: the judge has no score for it.
            JudgeStoppedError: nor will it have one for any other. JudgeDriftError: its scores are not to be trusted.
        """
        self._may_score()
        if trajectory.outcome is Outcome.ACTION_LIMIT:  # it is scored, and no judge may find it worth more
            return unjudged(trajectory, self._weights, self._rewards)
        try:
            scored, judgement = await self._ask(trajectory)
        except UnscoredError:
            self._tally.num_unscored += 1
            raise
        judged = JudgedEpisode.of(trajectory, judgement, self._rewards(trajectory), self._weights, scored.reward)
        self._tally.judgements.append(judgement)
        if (env_return := judged.env_return) is not None:
            self._tally.env_returns.append(env_return)
        for receive in self._on_judged:
            receive(trajectory, judged)
        return scored

    def drain(self) -> dict[str, float]:
        """Return those of METRICS that are about scores, since the last call."""
        tally, self._tally = self._tally, _Tally([], [])
        judgements = tally.judgements
        means = {
            "judge/env": tally.env_returns,
            "judge/event": [judgement.event_total for judgement in judgements if judgement.event_reviews],
            "judge/outcome": [judgement.outcome_total for judgement in judgements if judgement.outcome_review],
            "judge/disagreement": [j.disagreement for j in judgements if j.disagreement is not None],
        }
        return {
            **{name: sum(values) / len(values) for name, values in means.items() if values},
            "judge/num_judged": float(len(judgements)),
            "judge/unscored": float(tally.num_unscored),
            "judge/flags": float(sum(bool(judgement.flags) for judgement in judgements)),
            "judge/num_cut": float(sum(bool(judgement.cuts) for judgement in judgements)),
        }

    async def _ask(self, trajectory: Trajectory) -> tuple[Trajectory, Judgement]:
        task = trajectory.task
        # Asked once: `Asking` retries a failed call or an unreadable answer within one bound, so an episode that cannot
        # be scored costs `judge.options.max_attempts` calls.
        try:
            rubrics = await self._rubrics_of(task)
            judgement = await self._judge.judge(JudgeRequest(trajectory, rubrics, task_app=task.env_id))
            return blend(trajectory, judgement, self._weights, self._rewards), judgement
        except JudgeStoppedError as error:
            is_spent = isinstance(error, JudgeBudgetError)
            advice = "raise judge.options.max_calls or max_cost_usd" if is_spent else "mend that"
            raise type(error)(f"{error}: {advice}, and go on with --resume") from error
        except JudgeError as error:
            raise UnscoredError(f"{self._judge.name}: {error}") from error

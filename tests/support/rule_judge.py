"""Episodes made of what the policy said, and a judge that follows a rule in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gspo_gym.judge.base import CriterionScore, JudgeCost, Judgement, JudgeRequest, Review
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn

# The episode, the criterion, its place in the rubric, and the turn (-1: the outcome) -> a score.
Rule = Callable[[Trajectory, Criterion, int, int], float]


def spoken_episode(name: str, said: Sequence[str], *, rewards: Sequence[float | None] | None = None) -> Trajectory:
    """One turn of one sampled token for each text; the environment answers "ok"."""
    earned = [0.0] * len(said) if rewards is None else list(rewards)
    mask = np.arange(2 * len(said)) % 2 == 1
    segment = Segment(
        token_ids=np.arange(2 * len(said)),
        action_mask=mask,
        rollout_logprobs=np.where(mask, -0.5, 0.0),
        turn_index=np.where(mask, np.arange(2 * len(said)) // 2, -1),
        weight_version=np.where(mask, 0, -1),
    )
    turns = tuple(
        Turn(k, 0, (2 * k, 2 * k + 1), (2 * k + 1, 2 * k + 2), FinishReason.STOP, reward=earned[k])
        for k in range(len(said))
    )
    messages = [Message("user", "Please.")]
    for text in said:
        messages += [Message("assistant", text), Message("user", "ok")]
    task = Task("tests/Spoken-v0", 7)
    return Trajectory(name, 0, task, 0, (segment,), turns, tuple(messages), Outcome.TERMINATED)


def said_by_policy(trajectory: Trajectory, turn: int = -1) -> str:
    """What the policy said in a turn, or (-1) in all of them."""
    said = [message.content for message in trajectory.messages if message.role == "assistant"]
    return "\n".join(said) if turn < 0 else said[turn]


class RuleJudge:
    """Gives every criterion what the rule says, one call an episode; what the rule raises, it raises.

    Attributes:
        asked: the requests so far.
    """

    name = "rule"

    def __init__(self, rule: Rule, *, flags: Callable[[Trajectory], tuple[str, ...]] = lambda trajectory: ()) -> None:
        self.asked: list[JudgeRequest] = []
        self._rule = rule
        self._flags = flags

    async def judge(self, request: JudgeRequest) -> Judgement:
        """See `Judge.judge`."""
        self.asked.append(request)
        trajectory, event, outcome = request.trajectory, request.rubrics.event, request.rubrics.outcome
        turns = range(len(trajectory.turns)) if event else ()
        return Judgement(
            self.name,
            event_reviews=tuple(self._review(trajectory, event, turn) for turn in turns if event),
            outcome_review=self._review(trajectory, outcome, -1) if outcome else None,
            flags=self._flags(trajectory),
            cost=JudgeCost(1, 100, 10, 0.25),
        )

    async def close(self) -> None:
        """There is nothing to give back."""

    def _review(self, trajectory: Trajectory, rubric: Rubric, turn: int) -> Review:
        scores = {
            criterion.id: self._rule(trajectory, criterion, place, turn)
            for place, criterion in enumerate(rubric.criteria)
        }
        return Review({id_: CriterionScore(score) for id_, score in scores.items()}, rubric.total(scores))

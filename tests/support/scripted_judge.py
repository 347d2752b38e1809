"""A judge that says what it is told, and episodes for it to read. No model, no network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gspo_gym.judge.base import CriterionScore, JudgeCost, Judgement, JudgeRequest, Review
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn


def review(total: float) -> Review:
    """A review of one criterion."""
    return Review({"it": CriterionScore(0.0, "because")}, total)


def judgement(events: Sequence[float] = (), outcome: float | None = None, **more: object) -> Judgement:
    """What a judge says in totals."""
    return Judgement(
        judge="scripted",
        event_reviews=tuple(review(total) for total in events),
        outcome_review=None if outcome is None else review(outcome),
        cost=JudgeCost(num_calls=1, input_tokens=10, output_tokens=2),
        **more,  # type: ignore[arg-type]
    )


def episode(
    rewards: Sequence[float | None],
    *,
    name: str = "g/0",
    terms: Sequence[dict[str, float]] | None = None,
    outcome: Outcome = Outcome.TERMINATED,
) -> Trajectory:
    """An episode of so many turns, one prompt token and one sampled token each."""
    num_turns = len(rewards)
    mask = [position % 2 == 1 for position in range(2 * num_turns)]
    segment = Segment(
        token_ids=list(range(2 * num_turns)),  # type: ignore[arg-type]
        action_mask=mask,  # type: ignore[arg-type]
        rollout_logprobs=[-1.0 if sampled else 0.0 for sampled in mask],  # type: ignore[arg-type]
        turn_index=[position // 2 if sampled else -1 for position, sampled in enumerate(mask)],  # type: ignore[arg-type]
        weight_version=[0 if sampled else -1 for sampled in mask],  # type: ignore[arg-type]
    )
    turns = tuple(
        Turn(
            index,
            0,
            (2 * index, 2 * index + 1),
            (2 * index + 1, 2 * index + 2),
            FinishReason.STOP,
            reward=reward,
            reward_terms={} if terms is None else terms[index],
        )
        for index, reward in enumerate(rewards)
    )
    messages = [Message("user" if k % 2 == 0 else "assistant", f"message {k}") for k in range(2 * num_turns)]
    error = "it broke" if outcome.is_infrastructure_failure else None
    return Trajectory(name, 0, Task("Test-v0", 7), 1, (segment,), turns, tuple(messages), outcome, error=error)


class ScriptedJudge:
    """Answers each request with what `answer` gives or raises; counts.

    Attributes:
        requests: all that it was asked, in their order.
    """

    def __init__(self, answer: Callable[[JudgeRequest], Judgement], name: str = "scripted") -> None:
        self.name = name
        self.requests: list[JudgeRequest] = []
        self.num_closed = 0
        self._answer = answer

    async def judge(self, request: JudgeRequest) -> Judgement:
        """See `Judge.judge`."""
        self.requests.append(request)
        await asyncio.sleep(0)
        return self._answer(request)

    async def close(self) -> None:
        """Count it."""
        self.num_closed += 1


def say_half(_: object) -> float:
    """A judge as a function, for configurations."""
    return 0.5


def say_one(_: object) -> float:
    """Another one."""
    return 1.0

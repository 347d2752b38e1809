"""Episodes and rubrics for tests of judges: what was said is given, tokens stand for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_gym.judge.base import JudgeRequest, Rubrics
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.judge.settings import JudgeModelSettings, ModelJudgeSettings, ReadingSettings
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn

# By the fake judge's rule: "heron" in a turn is 1 in its binary criterion, each "dot" one more in the count, and the
# outcome is the share of "heron" and "cobalt" that the model has said.
EVENT = Rubric(
    (
        Criterion("progress.bird", 'The policy says "heron".', weight=3.0, scale="binary"),
        Criterion("progress.marks", 'How often the policy says "dot".', scale="count"),
    ),
    goal_text="Name the bird.",
)
OUTCOME = Rubric((Criterion("outcome.names", 'The policy has said "heron" and "cobalt".'),), goal_text="Name both.")
BOTH = Rubrics(event=EVENT, outcome=OUTCOME)


def episode(
    *said: str | Message,
    answers: Sequence[str] | None = None,
    task: Sequence[Message] = (Message("system", "You name things."), Message("user", "Name them.")),
    trajectory_id: str = "episode",
    outcome: Outcome = Outcome.TERMINATED,
) -> Trajectory:
    """An episode in which the model said these texts, one a turn, and the environment answered "go on" each time."""
    messages = list(task)
    answers = ["go on"] * len(said) if answers is None else answers
    for text, answer in zip(said, answers, strict=True):
        messages.append(text if isinstance(text, Message) else Message("assistant", text))
        messages.append(Message("user", answer))
    turns = tuple(
        Turn(turn, 0, (2 * turn, 2 * turn + 1), (2 * turn + 1, 2 * turn + 2), FinishReason.STOP, reward=0.125)
        for turn in range(len(said))
    )
    mask = np.tile(np.array([False, True]), len(said))
    turn_index = np.where(mask, np.arange(2 * len(said)) // 2, -1)
    ids, logprobs = np.zeros(2 * len(said), np.int32), np.zeros(2 * len(said), np.float32)
    segments = (Segment(ids, mask, logprobs, turn_index, np.where(mask, 0, -1)),)
    error = "on purpose" if outcome.is_infrastructure_failure else None
    return Trajectory(trajectory_id, 0, Task("Naming-v0", 7), 1, segments, turns, tuple(messages), outcome, error=error)


def request(*said: str | Message, rubrics: Rubrics = BOTH) -> JudgeRequest:
    """That episode, to be judged."""
    return JudgeRequest(episode(*said), rubrics, task_app="naming")


def model_settings(model: str, **given: Any) -> ModelJudgeSettings:
    """Settings of a judging model; keys of the records of which they are made go there."""
    which = {"model": model} | {name: given.pop(name) for name in JudgeModelSettings.model_fields if name in given}
    reading = {name: given.pop(name) for name in ReadingSettings.model_fields if name in given}
    return ModelJudgeSettings(JudgeModelSettings(**which), ReadingSettings(**reading), **given)

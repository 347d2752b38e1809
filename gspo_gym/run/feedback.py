"""Feedback of a training step for the teacher "self": found, checked for the hidden answer, and written into prompts.

Of every turn in the batch: its text from the source that distillation.feedback names; whether the text says the answer
(`env/checks/answers.py`), which refuses it; the prompt in which the teacher reads it, unless that is longer than the
model's window. What was refused is counted and recorded, and in no sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from gspo_gym.chat.renderer import Renderer
from gspo_gym.env.checks.answers import AnswerCheck, UncheckableError
from gspo_gym.errors import TemplateError, shortened
from gspo_gym.learning.batching import BuiltBatch, TeacherPrompt
from gspo_gym.rollout.feedback import (
    answers_of,
    conversation_before,
    prompt_with,
    require_recorded,
    siblings_success,
    told_of,
)
from gspo_gym.run.feedback_files import FeedbackFate, TurnFeedback
from gspo_gym.types import Message, Trajectory, TrajectoryGroup

FeedbackSource = Literal["environment", "judge", "sibling"]
# The judge's reasons about each turn of an episode, by trajectory id; None: none about this turn.
JudgesReasons = Callable[[str], Sequence[str | None]]


FEEDBACK_METRICS: Mapping[str, str] = MappingProxyType(
    {
        "feedback/num_turns": "turns in the batch",
        "feedback/num_texts": "of these, turns about which there is feedback",
        "feedback/num_taught": "of these, those before which the teacher read it",
        "feedback/num_leak": "of these, refused: the text says the hidden answer",
        "feedback/num_unchecked": "of these, refused: whether it says the answer cannot be found out",
        "feedback/num_too_long": "of these, refused: the prompt would not fit rollout.max_model_len",
        "feedback/num_template": "of these, refused: the chat template cannot show it",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class StepFeedback:
    """A batch with its teacher's prompts, the feedback that made them and all that was refused, and the counts."""

    built: BuiltBatch
    turns: tuple[TurnFeedback, ...]
    metrics: Mapping[str, float]


# From the groups to train on, and the batch built of them.
GiveFeedback = Callable[[Sequence[TrajectoryGroup], BuiltBatch], Coroutine[Any, Any, StepFeedback]]


@dataclass(frozen=True, slots=True)
class FeedbackEnvironment:
    """What feedback about an environment's episodes is written and checked with."""

    renderer: Renderer
    check: AnswerCheck


class Feedback:
    """Source of a run's feedback.

    Args:
        source: where texts come from.
        environments: by the env_id of tasks.
        max_model_len: tokens that the model reads, of a prompt and a turn together.
        judges_reasons: for the source "judge".
    """

    def __init__(
        self,
        source: FeedbackSource,
        *,
        environments: Mapping[str, FeedbackEnvironment],
        max_model_len: int,
        judges_reasons: JudgesReasons = lambda _id: (),
    ) -> None:
        self._source, self._environments, self._max_model_len = source, environments, max_model_len
        self._judges_reasons = judges_reasons

    async def give(self, groups: Sequence[TrajectoryGroup], built: BuiltBatch) -> StepFeedback:
        """Return the batch with a prompt for every turn that has feedback.

        Raises:
            TemplateError: an episode's recorded prompt is not what its messages make.
            EnvError, EnvTimeoutError: an environment could not be made for the check of texts.
        """
        if built.batch is None:
            return StepFeedback(built, (), {})
        for environment in self._environments.values():
            environment.check.forget()
        number_by_id = {name: number for number, name in enumerate(built.trajectory_ids)}
        turns: list[TurnFeedback] = []
        num_turns = 0
        for group in groups:
            for trajectory in group.trajectories:
                if trajectory.trajectory_id in number_by_id:
                    trained = _trained_turns(trajectory)
                    num_turns += len(trained)
                    turns += [feedback async for feedback in self._of_episode(trajectory, group, trained)]
        prompts = tuple(
            TeacherPrompt(number_by_id[f.trajectory_id], f.turn, np.array(f.prompt_token_ids, np.int32))
            for f in turns
            if f.fate is FeedbackFate.TAUGHT
        )
        fates = [feedback.fate for feedback in turns]
        metrics = {"feedback/num_turns": float(num_turns), "feedback/num_texts": float(len(turns))}
        metrics |= {f"feedback/num_{fate.value}": float(fates.count(fate)) for fate in FeedbackFate}
        taught = dataclasses.replace(built, batch=dataclasses.replace(built.batch, prompts=prompts))
        return StepFeedback(taught, tuple(turns), metrics)

    async def _of_episode(
        self, trajectory: Trajectory, group: TrajectoryGroup, turns: Sequence[int]
    ) -> AsyncIterator[TurnFeedback]:
        texts, actions = self._texts(trajectory, group)
        if any(texts):
            require_recorded(self._environments[trajectory.task.env_id].renderer, trajectory)
        for turn in turns:
            if turn < len(texts) and (text := texts[turn]):
                yield await self._of_turn(trajectory, turn, text, actions)

    def _texts(
        self, trajectory: Trajectory, group: TrajectoryGroup
    ) -> tuple[Sequence[str | None], tuple[Message, ...]]:
        """Return the text about each turn, and the actions of another episode that it tells of."""
        match self._source:
            case "environment":
                return answers_of(trajectory), ()
            case "judge":
                return self._judges_reasons(trajectory.trajectory_id), ()
            case "sibling":
                sibling = siblings_success(trajectory, group.trajectories)
                if sibling is None:
                    return (), ()
                actions = [message for message in sibling.messages if message.role == "assistant"]
                told = [told_of(sibling)] * len(trajectory.turns)
                return told, tuple(actions[len(actions) - len(sibling.turns) :])

    async def _of_turn(self, trajectory: Trajectory, turn: int, text: str, actions: Sequence[Message]) -> TurnFeedback:
        environment, name = self._environments[trajectory.task.env_id], trajectory.trajectory_id
        shown = conversation_before(trajectory, turn)
        try:
            declares_success = trajectory.success is not None
            leak = await environment.check.leak(
                trajectory.task, text, shown=shown, actions=actions, declares_success=declares_success
            )
        except UncheckableError as error:
            return TurnFeedback(name, turn, text, FeedbackFate.UNCHECKED, str(error))
        if leak is not None:
            return TurnFeedback(name, turn, text, FeedbackFate.LEAK, f"{shortened(leak, 80)!r} wins by itself")
        try:
            prompt = prompt_with(environment.renderer, trajectory, turn, text)
        except TemplateError as error:
            return TurnFeedback(name, turn, text, FeedbackFate.TEMPLATE, str(error))
        first, stop = trajectory.turns[turn].action_span
        if len(prompt) + stop - first > self._max_model_len:
            reason = f"{len(prompt)} + {stop - first} tokens, and rollout.max_model_len = {self._max_model_len}"
            return TurnFeedback(name, turn, text, FeedbackFate.TOO_LONG, reason)
        return TurnFeedback(name, turn, text, FeedbackFate.TAUGHT, prompt_token_ids=tuple(prompt))


def leak_reason(feedback: StepFeedback) -> str | None:
    """Return, in a sentence, that texts of a step say the answer; None: none does."""
    leaks = [turn for turn in feedback.turns if turn.fate is FeedbackFate.LEAK]
    if not leaks:
        return None
    first = leaks[0]
    return (
        f"{len(leaks)} of {len(feedback.turns)} texts of feedback say the hidden answer and were not used; in "
        f"{first.trajectory_id}, turn {first.turn}, {first.reason}"
    )


def _trained_turns(trajectory: Trajectory) -> list[int]:
    """Return the turns with a token that the policy sampled: one may have been written for it."""
    present = {int(k) for segment in trajectory.segments for k in np.unique(segment.turn_index[segment.action_mask])}
    return [turn.index for turn in trajectory.turns if turn.index in present]

"""Feedback about the turns of an episode, and the prompts in which a teacher reads it before them.

The sources are what is recorded of an episode anyway: the environment's answer to a turn, a judge's reasons, a
successful episode of the same task. `info` is for people, and no source. Whether a text says the hidden answer is found
out in `env/checks/answers.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import TemplateError
from gspo_gym.types import FinishReason, Message, Trajectory

# Hindsight has to be told from what the environment said, and short: a small model's context is.
_WORDS = "Feedback on an earlier try of this turn:\n"


def conversation_before(trajectory: Trajectory, turn: int) -> tuple[Message, ...]:
    """Return the messages that the policy had been shown, or had said, before it answered in this turn."""
    return trajectory.messages[: _actions(trajectory)[turn]]


def answers_of(trajectory: Trajectory) -> list[str | None]:
    """Return what the environment answered to each turn; None: nothing, as at a limit of ours.

    An observation after the last turn is there if the environment gave one, such as the tests that failed.
    """
    actions = [*_actions(trajectory), len(trajectory.messages)]
    texts = [
        "\n".join(message.content for message in trajectory.messages[action + 1 : following]).strip()
        for action, following in itertools.pairwise(actions)
    ]
    return [text or None for text in texts]


def siblings_success(trajectory: Trajectory, group: Sequence[Trajectory]) -> Trajectory | None:
    """Return the first other episode of the group that succeeded; None: there is none."""
    others = (other for other in group if other.trajectory_id != trajectory.trajectory_id)
    return next((other for other in others if other.success and other.turns), None)


def told_of(sibling: Trajectory) -> str:
    """Return an episode from its first action on, as a text."""
    lines = []
    for message in sibling.messages[_actions(sibling)[0] :]:
        calls = (f"{call.name}({json.dumps(dict(call.arguments))})" for call in message.tool_calls)
        text = "\n".join(part for part in (message.content.strip(), *calls) if part)
        lines.append(f"{message.role}: {text}")
    return "\n".join(lines)


def prompt_with(renderer: Renderer, trajectory: Trajectory, turn: int, text: str | None) -> list[int]:
    """Return the ids that a teacher reads before this turn's sampled tokens: the policy's prompt, with the feedback.

    The tokens of the turns before are the recorded ones; only what stands between the last of them and this turn is
    rendered again. The feedback stands in a user's message, after what the environment said last: in the same message,
    if that is a user's, because many templates refuse two of them in a row. None: the recorded prompt, as it should be.

    Raises:
        TemplateError: the template refuses the messages, or cannot show them exactly.
    """
    actions = _actions(trajectory)
    shown = with_feedback(conversation_before(trajectory, turn), text)
    if turn == 0:
        return renderer.start(shown)
    before, last = trajectory.turns[turn - 1], actions[turn - 1]
    is_closed = before.finish_reason is FinishReason.STOP
    continuation = renderer.continue_from(trajectory.messages[: last + 1], shown[last + 1 :], closed=is_closed)
    if continuation.is_new_segment:
        return continuation.token_ids
    read = trajectory.segments[before.segment].token_ids[: before.action_span[1]].tolist()
    return [*read, *continuation.token_ids]


def with_feedback(messages: Sequence[Message], text: str | None) -> tuple[Message, ...]:
    """Return a conversation that ends before a turn, with feedback about that turn at its end.

    >>> with_feedback([Message("user", "Guess.")], "Too low.")[0].content
    'Guess.\\n\\nFeedback on an earlier try of this turn:\\nToo low.'
    """
    if text is None:
        return tuple(messages)
    *before, last = messages
    if last.role == "user":
        return (*before, Message("user", f"{last.content}\n\n{_WORDS}{text}"))
    return (*messages, Message("user", _WORDS + text))


def require_recorded(renderer: Renderer, trajectory: Trajectory) -> None:
    """Refuse an episode whose first prompt is not what the renderer makes of its messages.

    Raises:
        TemplateError: as where an environment offers other tools in each task: feedback would not be all that differs.
    """
    turn = trajectory.turns[0]
    recorded = trajectory.segments[turn.segment].token_ids[: turn.action_span[0]].tolist()
    if prompt_with(renderer, trajectory, 0, None) != recorded:
        raise TemplateError(
            f"distillation.feedback: {trajectory.trajectory_id} ({trajectory.task.task_id}): its messages make another "
            "first prompt than the recorded one, as where tools differ from task to task; set distillation.feedback = "
            '"none" with another teacher, or remove [distillation]'
        )


def _actions(trajectory: Trajectory) -> list[int]:
    """Return where each turn's action stands among the messages; examples of answers stand in the opening only."""
    places = [index for index, message in enumerate(trajectory.messages) if message.role == "assistant"]
    return places[len(places) - len(trajectory.turns) :]

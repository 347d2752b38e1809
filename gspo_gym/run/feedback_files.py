"""The file of a step's feedback: tokens/step_NNNNNN.feedback.jsonl, one object a line, beside the step's tokens.

{trajectory_id, turn, text, fate, reason, prompt_token_ids}. It is read without loading the learner.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_gym.errors import RecordError


class FeedbackFate(enum.Enum):
    """What became of the feedback about a turn."""

    TAUGHT = "taught"
    LEAK = "leak"  # it says the hidden answer
    UNCHECKED = "unchecked"  # nobody can say what wins the task, so that it may say the answer
    TOO_LONG = "too_long"  # its prompt and the turn's tokens do not fit the model's window
    TEMPLATE = "template"  # the chat template refuses it


@dataclass(frozen=True, slots=True)
class TurnFeedback:
    """The feedback about one turn and what became of it; `prompt_token_ids` are () unless it was taught."""

    trajectory_id: str
    turn: int
    text: str
    fate: FeedbackFate
    reason: str = ""
    prompt_token_ids: tuple[int, ...] = ()


def feedback_path(folder: Path, step: int) -> Path:
    """Return the path of a step's feedback in a run's folder."""
    return folder / "tokens" / f"step_{step:06d}.feedback.jsonl"


def pack_feedback(turns: Sequence[TurnFeedback]) -> str:
    """Return the lines of a step's file."""
    values = ({**dataclasses.asdict(turn), "fate": turn.fate.value} for turn in turns)
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


def read_feedback(path: Path) -> list[TurnFeedback]:
    """Return what `pack_feedback` wrote; [] if there is no file.

    Raises:
        RecordError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8") as file:  # str.splitlines would end a line at U+2028 in a text, too
            lines = [json.loads(line) for line in file]
        return [
            TurnFeedback(
                **line | {"fate": FeedbackFate(line["fate"]), "prompt_token_ids": tuple(line["prompt_token_ids"])}
            )
            for line in lines
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: no file of feedback: {error!r}") from error

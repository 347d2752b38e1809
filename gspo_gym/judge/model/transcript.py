"""An episode as a judge reads it: pieces with their writer and turn, shortened by a stated rule.

A piece is one message, or one tool call: text that only looks like a call is not one. All text is made visible
(`judge/model/suspicion.py`). A message's content is shown whole, because the environment or app received it whole. Left
out are the separated reasoning (`reasoning_content`), unless it is asked for, and every reward and score.

The rule for episodes longer than `max_chars`, each step only as far as the one before did not suffice:

1. Texts of the environment between the first turn and the last keep at most 600 characters.
2. So do those of the first and last turn; the task itself keeps at most 4,000.
3. All texts of the environment but the task get shorter, the longest first, down to nothing; then the task, to 1,000.
4. What the policy wrote in turns that are not judged, the longest texts first, down to 600 characters each.
5. What the policy wrote in any turn, the longest texts first, down to 80 characters each.

A shortened text keeps its beginning (two thirds) and its end, and a note says how much was left out where; texts of up
to 80 characters stay. Thus padding shortens itself, and neither padding nor a talkative environment removes a short
turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gspo_gym.judge.base import JudgeError
from gspo_gym.judge.model.suspicion import says_nothing, visible
from gspo_gym.types import Message, Trajectory

Writer = Literal["system", "user", "assistant", "tool call", "tool"]

TASK = -1  # the turn of what was said before the first one
_BY_POLICY = ("assistant", "tool call")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_MAX_ENV_CHARS = 600  # of a text of the environment, and of the policy's in turns that are not judged
_MAX_TASK_CHARS, _MIN_TASK_CHARS = 4000, 1000
_MIN_POLICY_CHARS = 80
_MAX_TURNS_NAMED = 8  # in a record of what was cut
_NOTE_CHARS = 80  # at most, of a mark and a note together: no text is cut that would not get shorter by it
_MARK = "\n[...]\n"  # in the place of what was left out of the middle


@dataclass(frozen=True, slots=True)
class Piece:
    """One message or tool call.

    Attributes:
        writer: the role of the message, or "tool call".
        turn: from 0, the turn in which the model said it or that it answers; TASK before the first.
        text: visible.
        note: what was left out; "" if nothing was.
        is_empty: it has no content; see `says_nothing`.
        num_chars: of the text before anything was left out of it.
        num_left_out: of those that are not in `text`.
    """

    writer: Writer
    turn: int
    text: str
    note: str = ""
    is_empty: bool = False
    num_chars: int = 0
    num_left_out: int = 0

    @property
    def is_by_policy(self) -> bool:
        """Return whether the judged model wrote it."""
        return self.writer in _BY_POLICY


@dataclass(frozen=True, slots=True)
class Transcript:
    """The pieces in order, and the number of turns, those left out included."""

    pieces: tuple[Piece, ...]
    num_turns: int

    @property
    def num_chars(self) -> int:
        """Return the characters of all texts and notes."""
        return sum(len(piece.text) + len(piece.note) for piece in self.pieces)

    def said_in(self, turn: int) -> tuple[Piece, ...]:
        """Return what the model wrote in a turn."""
        return tuple(piece for piece in self.pieces if piece.turn == turn and piece.is_by_policy)

    def is_empty_turn(self, turn: int) -> bool:
        """Return whether the model neither called a tool nor wrote content in a turn."""
        return all(piece.is_empty for piece in self.said_in(turn))

    @property
    def cuts(self) -> tuple[str, ...]:
        """Return what was left out of the words of the policy and of the environment; () if nothing was."""
        policy = [piece for piece in self.pieces if piece.is_by_policy]
        rest = [piece for piece in self.pieces if not piece.is_by_policy]
        told = (("the policy", policy), ("the environment", rest))
        return tuple(_cut_of(writer, pieces) for writer, pieces in told if any(p.num_left_out for p in pieces))

    def until(self, turn: int) -> Transcript:
        """Return the pieces up to a turn and the environment's answer to it: what came later must not judge it."""
        return replace(self, pieces=tuple(piece for piece in self.pieces if piece.turn <= turn))


def read_transcript(trajectory: Trajectory, *, show_reasoning: bool = False) -> Transcript:
    """Return the episode's whole transcript.

    Raises:
        JudgeError: it failed, has no turn, or fewer messages of the model than turns.
    """
    where = f"episode {trajectory.trajectory_id}"
    if trajectory.outcome.is_infrastructure_failure:
        raise JudgeError(f"{where}: {trajectory.outcome.value}: a failed episode is not judged")
    said = [index for index, message in enumerate(trajectory.messages) if message.role == "assistant"]
    num_turns = len(trajectory.turns)
    if not 0 < num_turns <= len(said):
        raise JudgeError(
            f"{where}: expected at least one turn and a message of the model for each, got {num_turns} turns and "
            f"{len(said)} such messages"
        )
    starts = said[-num_turns:]  # those before them are examples in the task
    turn_of = {index: turn for turn, index in enumerate(starts)}
    pieces: list[Piece] = []
    turn = TASK
    for index, message in enumerate(trajectory.messages):
        turn = turn_of.get(index, turn)
        pieces.extend(_pieces(message, turn, show_reasoning=show_reasoning))
    return Transcript(tuple(pieces), num_turns)


def compacted(transcript: Transcript, judged: Collection[int], max_chars: int) -> Transcript:
    """Return the transcript in about `max_chars` characters by the module's rule; `judged` are turns."""
    last = max(piece.turn for piece in transcript.pieces)

    def is_answer(piece: Piece) -> bool:
        return piece.turn != TASK and not piece.is_by_policy

    def is_inner_answer(piece: Piece) -> bool:
        return is_answer(piece) and piece.turn not in (0, last)

    def is_task(piece: Piece) -> bool:
        return piece.turn == TASK

    def is_context(piece: Piece) -> bool:
        return piece.is_by_policy and piece.turn not in judged

    steps: tuple[tuple[Callable[[Piece], bool], int, bool], ...] = (  # least length, and whether it is taken at once
        (is_inner_answer, _MAX_ENV_CHARS, True),
        (is_answer, _MAX_ENV_CHARS, True),
        (is_task, _MAX_TASK_CHARS, True),
        (is_answer, 0, False),
        (is_task, _MIN_TASK_CHARS, False),
        (is_context, _MAX_ENV_CHARS, False),
        (lambda piece: piece.is_by_policy, _MIN_POLICY_CHARS, False),
    )
    whole = transcript
    limits: dict[int, int] = {}
    for is_meant, least, is_at_once in steps:
        excess = transcript.num_chars - max_chars
        if excess <= 0:
            break
        lengths = {index: len(piece.text) for index, piece in enumerate(transcript.pieces) if is_meant(piece)}
        needed = _limit(list(lengths.values()), excess + _NOTE_CHARS * len(lengths))
        limit = least if is_at_once else max(least, needed)
        limits |= {index: limit for index, length in lengths.items() if length > limit + _NOTE_CHARS}
        # From the whole texts each time: what is cut twice would hold two marks, and its count would be wrong.
        pieces = tuple(
            _shortened(piece, limits[index]) if index in limits else piece for index, piece in enumerate(whole.pieces)
        )
        transcript = replace(whole, pieces=pieces)
    return transcript


def _limit(lengths: list[int], excess: int) -> int:
    """Return the length to which the longest are cut to lose `excess` in all; 0 if they are too short.

    >>> _limit([10, 4, 8], 5)  # 10 and 8 become 6: 4 and 2 less, one more than it takes
    6
    """
    room = sum(lengths) - excess
    for rank, length in enumerate(sorted(lengths)):
        num_left = len(lengths) - rank
        if length * num_left > room:
            return max(0, room // num_left)
        room -= length
    return max(lengths, default=0)


def _pieces(message: Message, turn: int, *, show_reasoning: bool) -> Iterable[Piece]:
    text = message.content
    is_policy = message.role == "assistant" and turn != TASK
    if message.reasoning_content and (show_reasoning or message.role != "assistant"):
        text = f"(thought) {message.reasoning_content}\n(said) {text}"
    writer: Writer = message.role
    if not is_policy and message.role == "assistant":
        writer = "user"  # an example in the task: nothing that this model did
        text = f"(example of an answer) {text}"
    if text or not message.tool_calls:
        yield _piece(writer, turn, text)
    for call in message.tool_calls:
        said = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False, default=str)
        yield _piece("tool call" if is_policy else "user", turn, said)


def _piece(writer: Writer, turn: int, text: str) -> Piece:
    shown = visible(text)
    is_empty = writer == "assistant" and says_nothing(_THOUGHT.sub("", text))  # thinking alone says nothing
    return Piece(writer, turn, shown, is_empty=is_empty, num_chars=len(shown))


def _shortened(piece: Piece, limit: int) -> Piece:
    head = 2 * limit // 3
    left_out = len(piece.text) - limit
    end = piece.text[len(piece.text) - (limit - head) :]
    return replace(
        piece,
        text=f"{piece.text[:head]}{_MARK}{end}" if limit else "",
        note=f"{left_out:,} characters were left out" + (" of the middle of this text" if limit else ""),
        num_left_out=left_out,
    )


def _cut_of(writer: str, pieces: Sequence[Piece]) -> str:
    left_out, said = sum(piece.num_left_out for piece in pieces), sum(piece.num_chars for piece in pieces)
    turns = sorted({piece.turn for piece in pieces if piece.num_left_out})
    where = ", ".join("the task" if turn == TASK else f"turn {turn + 1}" for turn in turns[:_MAX_TURNS_NAMED])
    more = f" and {len(turns) - _MAX_TURNS_NAMED} more" if len(turns) > _MAX_TURNS_NAMED else ""
    return f"{left_out:,} of the {said:,} characters of {writer} were not shown ({where}{more})"

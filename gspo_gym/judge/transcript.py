"""An episode as a judge reads it: pieces of text, each with who wrote it and in which turn, shortened by a stated rule.

A piece is one message, or one tool call, so that text which looks like a call is not one. All of it has been made
visible (`characters.py`). Left out: what the model thought before it answered, unless it is asked for, and every reward
and score that the record holds.

The rule for episodes longer than `max_chars`, each step only if the one before did not suffice:

1. Of the turns between the first and the last, texts of the environment longer than 600 characters keep their first
   400 and their last 200, and so do the model's where the turn is not judged.
2. Those turns are left out, the earliest first, except for judged ones.
3. What the environment wrote elsewhere is shortened as in 1, the task itself to its first and last 2,000.

Whatever is left out is counted where it was. What the model wrote in a judged turn, in the first and in the last one is
never shortened, however long it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from gspo_gym.judge.base import JudgeError
from gspo_gym.judge.characters import says_nothing, visible
from gspo_gym.types import Message, Trajectory

Writer = Literal["system", "user", "assistant", "tool call", "tool"]

TASK = -1  # the turn of what was said before the first one
_BY_POLICY = ("assistant", "tool call")
_HEAD, _TAIL = 400, 200  # characters kept of a shortened text
_TASK_HEAD = _TASK_TAIL = 2000
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that was said.

    Attributes:
        writer: the role of the message, or "tool call".
        turn: from 0, the turn that it was said in (by the model) or that it answers; TASK before the first.
        text: visible. "" for a turn that was left out: then `note` says so.
        note: what was left out; "" if nothing was.
        is_empty: it says nothing; see `characters.says_nothing`.
        num_chars: of the text before anything was left out of it.
    """

    writer: Writer
    turn: int
    text: str
    note: str = ""
    is_empty: bool = False
    num_chars: int = 0

    @property
    def is_by_policy(self) -> bool:
        """Whether the model wrote it that is being judged."""
        return self.writer in _BY_POLICY


@dataclass(frozen=True, slots=True)
class Transcript:
    """The pieces in their order, and how many turns the episode had, those left out included."""

    pieces: tuple[Piece, ...]
    num_turns: int

    @property
    def num_chars(self) -> int:
        """Of all texts and notes."""
        return sum(len(piece.text) + len(piece.note) for piece in self.pieces)

    def said_in(self, turn: int) -> tuple[Piece, ...]:
        """What the model wrote in a turn."""
        return tuple(piece for piece in self.pieces if piece.turn == turn and piece.is_by_policy)

    def is_empty_turn(self, turn: int) -> bool:
        """Whether the model neither called a tool nor said anything in a turn."""
        return all(piece.is_empty for piece in self.said_in(turn))

    def until(self, turn: int) -> Transcript:
        """What was said up to a turn and as the environment's answer to it: a turn is not judged by what came later."""
        return replace(self, pieces=tuple(piece for piece in self.pieces if piece.turn <= turn))


def read_transcript(trajectory: Trajectory, *, show_reasoning: bool = False) -> Transcript:
    """The episode's transcript, whole.

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
    """The transcript in about `max_chars` characters by the rule at the module's head; `judged` are turns."""
    last = max(piece.turn for piece in transcript.pieces)
    kept = {TASK, 0, last, *judged}

    def is_middle(piece: Piece) -> bool:
        return piece.turn not in (TASK, 0, last) and not (piece.is_by_policy and piece.turn in kept)

    def is_environment(piece: Piece) -> bool:
        return piece.turn != TASK and not piece.is_by_policy

    steps: tuple[Callable[[Transcript], Transcript], ...] = (
        lambda whole: _each(whole, is_middle, _HEAD, _TAIL),
        lambda whole: _without_turns(whole, [t for t in range(last) if t not in kept], max_chars),
        lambda whole: _each(whole, is_environment, _HEAD, _TAIL),
        lambda whole: _each(whole, lambda piece: piece.turn == TASK, _TASK_HEAD, _TASK_TAIL),
    )
    for step in steps:
        if transcript.num_chars <= max_chars:
            break
        transcript = step(transcript)
    return transcript


def without_thoughts(text: str) -> str:
    """What the model said, without reasoning that the parser left in the text because it was cut off or came twice."""
    return _THOUGHT.sub("", text)


def _pieces(message: Message, turn: int, *, show_reasoning: bool) -> Iterable[Piece]:
    text = message.content
    is_policy = message.role == "assistant" and turn != TASK
    if message.role == "assistant" and not show_reasoning:
        text = without_thoughts(text)
    elif message.reasoning_content:
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
    is_empty = writer == "assistant" and says_nothing(text)
    return Piece(writer, turn, shown, is_empty=is_empty, num_chars=len(shown))


def _each(transcript: Transcript, is_meant: Callable[[Piece], bool], head: int, tail: int) -> Transcript:
    pieces = (_shortened(piece, head, tail) if is_meant(piece) else piece for piece in transcript.pieces)
    return replace(transcript, pieces=tuple(pieces))


def _shortened(piece: Piece, head: int, tail: int) -> Piece:
    if piece.note or len(piece.text) <= head + tail:
        return piece
    left_out = len(piece.text) - head - tail
    note = f"{left_out:,} characters were left out of the middle of this text"
    return replace(piece, text=f"{piece.text[:head]}\n[...]\n{piece.text[-tail:]}", note=note)


def _without_turns(transcript: Transcript, turns: Iterable[int], max_chars: int) -> Transcript:
    """Without the first of those turns, as many as it takes; each row of them leaves one note."""
    excess = transcript.num_chars - max_chars
    gone: set[int] = set()
    for turn in turns:
        if excess <= 0:
            break
        gone.add(turn)
        excess -= sum(len(piece.text) + len(piece.note) for piece in transcript.pieces if piece.turn == turn)
    pieces: list[Piece] = []
    for piece in transcript.pieces:
        if piece.turn not in gone:
            pieces.append(piece)
        elif pieces and pieces[-1].turn in gone:
            pieces[-1] = replace(pieces[-1], turn=piece.turn, num_chars=pieces[-1].num_chars + piece.num_chars)
        else:
            pieces.append(Piece("user", piece.turn, "", note="-", num_chars=piece.num_chars))
    return replace(transcript, pieces=tuple(_counted(pieces, gone)))


def _counted(pieces: list[Piece], gone: set[int]) -> Iterable[Piece]:
    """The rows that were left out, with a note of how much that was."""
    before = TASK
    for piece in pieces:
        if piece.turn not in gone:
            yield piece
        else:
            first, last = before + 2, piece.turn + 1  # as they are called: from 1
            turns = f"turn {first} was" if first == last else f"turns {first} to {last} were"
            yield replace(piece, note=f"{turns} left out: {piece.num_chars:,} characters")
        before = piece.turn

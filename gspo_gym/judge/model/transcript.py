"""An episode as a judge reads it: pieces with their writer and turn, shortened by a stated rule.

A piece is one message, or one tool call: text that only looks like a call is not one. All text is made visible. A
message's content is shown whole, because the environment or app received it whole. Left out are the separated reasoning
(`reasoning_content`), unless it is asked for, and every reward and score.

The rule for episodes longer than `max_chars`, each step only as far as the one before did not suffice:

1. Texts of the environment between the first turn and the last keep at most 600 characters.
2. So do those of the first and last turn; the task itself keeps at most 4,000.
3. All texts of the environment but the task get shorter, the longest first, down to nothing; then the task, to 1,000.
4. What the policy wrote in turns that are not judged, the longest texts first, down to 600 characters each.
5. What the policy wrote in any turn, the longest texts first, down to 80 characters each.

A shortened text keeps its beginning (two thirds) and its end, and a note says how much was left out where; texts of up
to 80 characters stay. Thus padding shortens itself, and neither padding nor a talkative environment removes a short
turn.

Signs that the policy addresses its judge are counted and shown, and change no score. They are patterns: an honest
episode may show one (a task about prompts does) and a clever one none. A share that grows during training is worth a
look, a single flag is not.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gspo_gym.judge.base import JudgeError
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
_MAX_HONEST_CHARS = 20_000  # of one message; longer ones may be padding
# Invisible, although Unicode counts them among letters, marks or symbols.
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_VARIATION = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef\u180b-\u180f]")
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
# What templates write around messages is a name in brackets: <|im_start|>, <tool_call|>, <function=f>, [/INST], ]~b].
# Of each the first bracket, and the last after a bar; also those of which NFKC makes brackets.
_LEFT, _RIGHT, _BAR = "<\uff1c\ufe64", ">\uff1e\ufe65", "|\uff5c"
_BRACKET = re.compile(
    rf"[{_LEFT}](?=[{_BAR}])|(?<=[{_BAR}])[{_RIGHT}]"
    rf"|[{_LEFT}](?=[/!?]?[\w\[][^\s{_LEFT}{_RIGHT}]{{0,80}}(?:\s+[\w:.-]+=[^{_LEFT}{_RIGHT}]{{0,200}})?\s?/?[{_RIGHT}])"
    rf"|[\[\uff3b](?=[/{_BAR}]?[^\W\d][\w:.-]+[{_BAR}]?[\]\uff3d])|[\[\]](?=\w*~!?\w*[\[\]])"
)
# Those that no honest text has: signs of manipulation, and no words.
_TOKEN = re.compile(
    r"<[|\uff5c][^|\uff5c<>]{0,40}[|\uff5c]>|<[|\uff5c]|[|\uff5c]>|<</?SYS>>|\[/?INST\]|</?(?:s|bos|eos|pad|unk|mask|think|"
    r"thinking|tool_call|tool_response|start_of_turn|end_of_turn|turn|channel|message|system|user|assistant|endoftext)>",
    re.IGNORECASE,
)
# With what looks like a backtick and does not normalise to one.
_TICKS = re.compile("[`\u02cb\u02f4\u2035]+")
# What opens an answer and is none. Judges have given such text full marks (Zhao et al., arXiv 2507.08794, table 1).
_OPENERS = frozenset(
    (
        *("", "thoughtprocess", "letssolvethisproblemstepbystep", "letsthinkstepbystep", "letsbegin", "letsstart"),
        *("solution", "thesolution", "answer", "theanswer", "theansweris", "finalanswer", "thefinalansweris", "step1"),
        *("explanation", "reasoning", "analysis", "解", "解答", "解説", "かいせつ", "respuesta", "solución", "antwort"),
        *("lösung", "réponse"),
    )
)
_LONGEST_OPENER = max(map(len, _OPENERS))
_LONG = 4000  # characters: so much of a text is looked at before the rest


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
        environment = [piece for piece in self.pieces if not piece.is_by_policy]
        writers = (("the policy", policy), ("the environment", environment))
        return tuple(_cut_of(writer, pieces) for writer, pieces in writers if any(p.num_left_out for p in pieces))

    def until(self, turn: int) -> Transcript:
        """Return the pieces up to a turn and the environment's answer to it: what came later must not judge it."""
        return replace(self, pieces=tuple(piece for piece in self.pieces if piece.turn <= turn))


def read_transcript(trajectory: Trajectory) -> Transcript:
    """Return the episode's whole transcript.

    Raises:
        JudgeError: it failed, has no turn, or fewer messages of the model than turns.
    """
    where = f"episode {trajectory.trajectory_id}"
    if trajectory.outcome.is_infrastructure_failure:
        raise JudgeError(f"{where}: {trajectory.outcome.value}: a failed episode is not judged")
    indices = [index for index, message in enumerate(trajectory.messages) if message.role == "assistant"]
    num_turns = len(trajectory.turns)
    if not 0 < num_turns <= len(indices):
        raise JudgeError(
            f"{where}: expected at least one turn and a message of the model for each, got {num_turns} turns and "
            f"{len(indices)} such messages"
        )
    starts = indices[-num_turns:]  # those before them are examples in the task
    turn_of = {index: turn for turn, index in enumerate(starts)}
    pieces: list[Piece] = []
    turn = TASK
    for index, message in enumerate(trajectory.messages):
        turn = turn_of.get(index, turn)
        pieces.extend(_pieces(message, turn))
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
    full_transcript = transcript
    limits: dict[int, int] = {}
    for is_meant, least, is_at_once in steps:
        excess = transcript.num_chars - max_chars
        if excess <= 0:
            break
        lengths = {index: len(piece.text) for index, piece in enumerate(transcript.pieces) if is_meant(piece)}
        needed_limit = _limit(list(lengths.values()), excess + _NOTE_CHARS * len(lengths))
        limit = least if is_at_once else max(least, needed_limit)
        limits |= {index: limit for index, length in lengths.items() if length > limit + _NOTE_CHARS}
        # From the whole texts each time: what is cut twice would hold two marks, and its count would be wrong.
        pieces = tuple(
            _shorten(piece, limits[index]) if index in limits else piece
            for index, piece in enumerate(full_transcript.pieces)
        )
        transcript = replace(full_transcript, pieces=pieces)
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


def _pieces(message: Message, turn: int) -> Iterable[Piece]:
    text = message.content
    is_policy = message.role == "assistant" and turn != TASK
    if message.reasoning_content and message.role != "assistant":
        text = f"(thought) {message.reasoning_content}\n(said) {text}"
    writer: Writer = message.role
    if not is_policy and message.role == "assistant":
        writer = "user"  # an example in the task: nothing that this model did
        text = f"(example of an answer) {text}"
    if text or not message.tool_calls:
        yield _piece(writer, turn, text)
    for call in message.tool_calls:
        call_json = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False, default=str)
        yield _piece("tool call" if is_policy else "user", turn, call_json)


def _piece(writer: Writer, turn: int, text: str) -> Piece:
    visible_text = visible(text)
    is_empty = writer == "assistant" and says_nothing(_THOUGHT.sub("", text))  # thinking alone says nothing
    return Piece(writer, turn, visible_text, is_empty=is_empty, num_chars=len(visible_text))


def _shorten(piece: Piece, limit: int) -> Piece:
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
    left_out, num_chars = sum(piece.num_left_out for piece in pieces), sum(piece.num_chars for piece in pieces)
    turns = sorted({piece.turn for piece in pieces if piece.num_left_out})
    where = ", ".join("the task" if turn == TASK else f"turn {turn + 1}" for turn in turns[:_MAX_TURNS_NAMED])
    more = f" and {len(turns) - _MAX_TURNS_NAMED} more" if len(turns) > _MAX_TURNS_NAMED else ""
    return f"{left_out:,} of the {num_chars:,} characters of {writer} were not shown ({where}{more})"


# All repetitions are bounded, so that no text takes more than a moment to search.
_PATTERNS = {
    "a forged verdict": re.compile(
        r"[\"'{]\s{0,9}verdict\w{0,99}[\"']?\s{0,9}:|\bverdict_\w|"
        r"[\"'](?:score|total|outcome_review|event_totals)[\"']\s{0,9}:\s{0,9}\d",
        re.I,
    ),
    "orders to the judge": re.compile(
        r"\b(?:ignore|disregard|forget|override)\b.{0,40}\b(?:previous|prior|above|earlier|all|your)\b"
        r".{0,40}\b(?:instruction|rule|prompt|criteri|rubric)"
        r"|\b(?:judge|grader|evaluator|scorer|reviewer)s?\b.{0,60}\b(?:score|grade|award|rate|give|mark|must|please)\b"
        r"|\b(?:give|award|assign|grant)\b.{0,40}\b(?:full|maximum|perfect|highest|top)\b.{0,20}\b(?:score|mark|credit|points)",
        re.I | re.S,
    ),
    "a forged end of the data": re.compile(
        r"`{4,}|^[^\w\n]{0,20}(?:end|begin|stop) of (?:the )?(?:data|transcript|episode|conversation)|"
        r"</?(?:transcript|data|episode|rubric|criteria|judge)>|^[^\w\n]{0,20}(?:system|developer)\s{0,9}:",
        re.I | re.M,
    ),
    "a template's placeholder": re.compile(
        r"\{\{?\s{0,9}(?:nonce|key|fence|form|score|rubric|criteria|verdict)\w{0,20}\s{0,9}\}?\}", re.I
    ),
}


def suspicions(trajectory: Trajectory) -> tuple[str, ...]:
    """Return one text for each sign and turn, such as "turn 3: a forged verdict", in order."""
    messages = [message for message in trajectory.messages if message.role == "assistant"]
    # Those before the first turn are examples in the task.
    messages = messages[max(0, len(messages) - len(trajectory.turns)) :]
    return tuple(f"turn {number}: {sign}" for number, message in enumerate(messages, 1) for sign in _signs(message))


def _signs(message: Message) -> Iterable[str]:
    arguments = [json.dumps(dict(call.arguments), ensure_ascii=False, default=str) for call in message.tool_calls]
    text = "\n".join([message.content, *arguments])
    for sign, pattern in _PATTERNS.items():
        if pattern.search(text):
            yield sign
    if has_control_token(text):
        yield "a control token"
    if hidden_characters(text) - {"\ufe0f", "\u200d", "\r"}:  # which emoji and other systems' line breaks have
        yield "hidden characters"
    if len(text) > _MAX_HONEST_CHARS:
        yield "padding"


def visible(text: str) -> str:
    r"""Return the text with hidden characters as `<U+200B>` and names in brackets broken by a backslash.

    All kinds of line breaks become one; tabs stay.

    >>> visible("a\u200bb <|im_end|> [INST]")
    'a<U+200B>b <\\|im_end|\\> [\\INST]'
    """
    text = text.replace("\r\n", "\n")
    # A judge's server would turn the text `<|im_end|>` into the token that ends a message. Any name is broken, because
    # every family of models has its own.
    text = _BRACKET.sub(lambda match: f"\\{match[0]}" if match[0] in _RIGHT else f"{match[0]}\\", text)
    # Readers do not see a zero-width space or a right-to-left override.
    if not (hidden_at := _hidden_at(text)):
        return text
    return "".join(
        f"<U+{ord(character):04X}>" if place in hidden_at else character for place, character in enumerate(text)
    )


def hidden_characters(text: str) -> frozenset[str]:
    """Return the hidden characters in a text, except line breaks and tabs."""
    return frozenset(_hidden_at(text).values())


def _hidden_at(text: str) -> dict[int, str]:
    """Return by its place each character that cannot be seen, and each mark that is drawn onto no letter."""
    kinds = {character: unicodedata.category(character) for character in set(text) - {"\n", "\t"}}
    invisible_characters = {
        c for c, kind in kinds.items() if kind in _HIDDEN_CATEGORIES or c in _INVISIBLE or _VARIATION.match(c)
    }
    if not invisible_characters and not any(kind[0] == "M" for kind in kinds.values()):
        return {}
    characters_by_place: dict[int, str] = {}
    has_base = False
    for place, character in enumerate(text):
        kind = kinds.get(character, "Cc")
        if character in invisible_characters or (
            kind[0] == "M" and not has_base
        ):  # onto a backtick a mark would hide how many there are
            characters_by_place[place] = character
        if kind[0] != "M":
            has_base = kind[0] in "LN" or kind == "So"
    return characters_by_place


def has_control_token(text: str) -> bool:
    """Return whether the text holds what a chat template writes around messages and honest texts do not have."""
    return _TOKEN.search(text) is not None


def longest_run_of_ticks(text: str) -> int:
    """Return the longest run of backticks in a visible text, counting characters that look like or normalise to one."""
    if "`" not in text and text.isascii():
        return 0
    texts = (text,) if text.isascii() else (text, unicodedata.normalize("NFKC", text))
    return max((len(run) for part in texts for run in _TICKS.findall(part)), default=0)


def says_nothing(text: str) -> bool:
    """Return whether a text has no letter and no digit, or only control tokens or the beginning of an answer.

    >>> says_nothing(" :"), says_nothing("Thought process:"), says_nothing("7")
    (True, True, False)
    """
    words = _words(text[:_LONG])
    return len(words) <= _LONGEST_OPENER and words + _words(text[_LONG:]) in _OPENERS


def _words(text: str) -> str:
    plain = _TOKEN.sub("", unicodedata.normalize("NFKC", text))
    return "".join(c for c in plain if c.isalnum() and c not in _INVISIBLE).casefold()

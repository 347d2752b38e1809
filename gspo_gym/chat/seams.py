"""Seams between turns in a template's text: whether the old text can stay, and what comes after it.

A conversation continues *exactly* if the template's text for (history + new messages) begins with the text that the
model was prompted with, repeats its answer in the same form, and closes it by the same token. The text after that token
is then all that has to be appended. If the template rewrites anything before, there is no seam and the prompt starts
afresh. "In the same form" allows the model's own white space: only what the template drops or adds is rewriting.

Templates are asked about *marked* conversations, in which each text is a unique mark. The result is a plan for every
conversation of the same shape (roles, which texts are empty, number of tool calls), cached and filled with real texts.
A text that the template may treat differently from a mark goes through the template itself, which is slow.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.chat.encoding import Escapes
from gspo_gym.chat.template import ChatTemplate, TemplateFacts, Wire, mark, to_wire
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall

_Shape = str | tuple[Any, ...]  # a nest of strings and booleans, only compared

_MARK = re.compile(r"zq\d{7}")
_NAME = re.compile(r"[\w.:-]*")
_MAX_REMEMBERED = 4096
# Quotes, braces, escapes, other scripts and blank edges, which a template may trim or encode.
_AWKWARD = '\n \t"{text}"\\ é日<&>\'{{% x %}}\n{text} \t\n\n'
# What templates do to a content: nothing, some trimming, or JSON.
_TREATMENTS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    lambda text: text.strip("\n"),
    str.lstrip,
    str.rstrip,
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)


@dataclass(frozen=True, slots=True)
class Seam:
    """The text after a sampled answer.

    Attributes:
        unclosed: template text between a cut-off answer and its stop token.
        rest: from the stop token to the end of the next prompt.
    """

    unclosed: str
    stop: str
    rest: str


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place for a text in a plan: `field` of the new message `index`, as the template treats it."""

    index: int
    field: str
    treatment: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class _Plan:
    """The seam of every conversation of one shape; `pieces` with `slots` between them make its `rest`."""

    unclosed: str
    stop: str
    pieces: tuple[str, ...]
    slots: tuple[_Slot, ...]


class _NoPlan(enum.Enum):
    REWRITES = enum.auto()  # the template rewrites what was said
    UNREADABLE = enum.auto()  # it does something unknown to a text, so render each time


@dataclass(frozen=True, slots=True)
class _TurnText:
    """An assistant turn in rendered text, taken apart at its marks."""

    head: str  # before the first text that the model said
    body: str  # from its first to its last text
    ending: str  # from there to the stop token
    stop: str
    rest: str

    @property
    def answer_text(self) -> str:
        return self.head + self.body + self.ending

    def seam_behind(self, answer: Message) -> Seam:
        # After tool calls, the ending belongs to the calls, and a cut-off answer has said all that it has.
        ends_in_content = bool(answer.content) and not answer.tool_calls
        return Seam(self.ending if ends_in_content else "", self.stop, self.rest)


class Seams:
    """Finder and cache of the seams of one template."""

    def __init__(self, template: ChatTemplate, facts: TemplateFacts) -> None:
        self._template = template
        self._facts = facts
        self._closers = re.compile("|".join(map(re.escape, facts.closers)))
        self._plans: dict[_Shape, _Plan | _NoPlan] = {}
        self._shown_shapes: set[_Shape] = set()
        self._plain_texts: set[str] = set()

    def wires(self, messages: Sequence[Message], escapes: Escapes, *, first_index: int = 0) -> list[Wire]:
        """Return the messages in this template's form; `first_index` is the first one's position, for errors."""
        return [to_wire(message, first_index + i, self._facts.style, escapes) for i, message in enumerate(messages)]

    def find(self, history: Sequence[Message], new: Sequence[Message], escapes: Escapes) -> Seam | None:
        """Return the seam between `history`, which ends with an answer, and `new`; None if the template rewrites.

        Raises:
            TemplateError: the template refuses the conversation or does not show one of its texts.
        """
        messages = [*history, *new]
        shapes = self._predictable_shapes(messages)
        if shapes is None or any(message.role == "assistant" for message in new):
            return self._find_by_rendering(history, new, escapes)
        shape = (len(history), *shapes)
        if (plan := self._plans.get(shape)) is None:
            plan = self._make_plan(history, new)
            _make_room(self._plans)
            self._plans[shape] = plan
        if plan is _NoPlan.REWRITES:
            return None
        if isinstance(plan, _NoPlan):
            return self._find_by_rendering(history, new, escapes)
        wires = self.wires(new, escapes, first_index=len(history))
        rest = [plan.pieces[0]]
        for slot, piece in zip(plan.slots, plan.pieces[1:], strict=True):
            rest += (slot.treatment(wires[slot.index][slot.field]), piece)
        return Seam(plan.unclosed, plan.stop, "".join(rest))

    def require_shown(self, messages: Sequence[Message]) -> None:
        """Raise a TemplateError if the template does not show what the model must see; checked once for each shape."""
        shape = tuple(map(_shape_of, messages))
        if shape in self._shown_shapes:
            return
        name = self._template.name
        marked_messages = _mark_texts(messages)
        text = self._template.text(self._marked_wires(marked_messages), add_generation_prompt=False)
        for index, message in enumerate(marked_messages):
            if message.tool_calls and not self._facts.renders_calls:
                raise TemplateError(
                    f"{name} does not show the tool calls of messages[{index}]; use one with tool support"
                )
            num_shown = text.count(message.content) if message.content else 1
            if message.role != "assistant" and num_shown != 1:
                raise TemplateError(
                    f"{name} shows the content of messages[{index}] (role {message.role}) {num_shown} times in a "
                    f"conversation of {len(messages)}, expected once; say it in another message or change the template"
                )
        _make_room(self._shown_shapes)
        self._shown_shapes.add(shape)

    def _predictable_shapes(self, messages: Sequence[Message]) -> list[_Shape] | None:
        """Return the shapes of messages that the template must treat like marked ones; None if it need not."""
        if self._facts.compares_messages and len({message.content for message in messages}) < len(messages):
            return None
        shapes = []
        for message in messages:  # each turn asks about all messages before it
            shape = _shape_of(message)
            is_known = shape is message.role and message.content in self._plain_texts
            if not is_known and not self._is_predictable(message):
                return None
            shapes.append(shape)
        return shapes

    def _is_predictable(self, message: Message) -> bool:
        names = (message.name, message.tool_call_id, *(n for call in message.tool_calls for n in (call.name, call.id)))
        return all(name is None or _NAME.fullmatch(name) for name in names) and all(
            text is None or text in self._plain_texts or self._is_plain(text)
            for text in (message.content, message.reasoning_content)
        )

    def _is_plain(self, text: str) -> bool:
        if text.isspace() or self._facts.literals.search(text) is not None:
            return False
        _make_room(self._plain_texts)
        self._plain_texts.add(text)
        return True

    def _make_plan(self, history: Sequence[Message], new: Sequence[Message]) -> _Plan | _NoPlan:
        self.require_shown([*history, *new])
        marked_messages = _mark_texts([*history, *new])
        wires = self._marked_wires(marked_messages)
        count = len(history)
        turn = self._find_marked(marked_messages[count - 1], wires[: count - 1], wires[count - 1], wires[count:])
        if turn is None:
            return _NoPlan.REWRITES
        seam = turn.seam_behind(history[-1])
        slots = {
            text: _Slot(index, field)
            for index, wire in enumerate(wires[count:])
            for field in ("content", "tool_call_id")
            if _MARK.fullmatch(text := wire.get(field, ""))
        }
        pieces = tuple(_MARK.split(seam.rest))
        marks = _MARK.findall(seam.rest)
        if not all(text in slots for text in marks):
            return _NoPlan.UNREADABLE
        treated_slots = self._learn_treatments(wires, count, pieces, [(text, slots[text]) for text in marks])
        return _NoPlan.UNREADABLE if treated_slots is None else _Plan(seam.unclosed, seam.stop, pieces, treated_slots)

    def _learn_treatments(
        self, wires: list[Wire], count: int, pieces: tuple[str, ...], marked_slots: list[tuple[str, _Slot]]
    ) -> tuple[_Slot, ...] | None:
        """Return the slots with the template's treatment of awkward texts; None if it is unknown."""
        awkward = [
            {**wire, "content": _AWKWARD.format(text=wire["content"])} if _MARK.fullmatch(wire["content"]) else wire
            for wire in wires[count:]
        ]
        text = self._template.text([*wires[:count], *awkward], add_generation_prompt=True)
        texts = [_AWKWARD.format(text=mark) if slot.field == "content" else mark for mark, slot in marked_slots]
        plain_rest = "".join(a + b for a, b in zip(pieces, [*(mark for mark, _ in marked_slots), ""], strict=True))
        plain = self._template.text(wires, add_generation_prompt=True)
        start = len(plain) - len(plain_rest)
        if not text.startswith(plain[:start]):
            return None
        slots: list[_Slot] = []
        position = start + len(pieces[0])
        for (_, slot), original, piece in zip(marked_slots, texts, pieces[1:], strict=True):
            for treatment in _TREATMENTS:
                treated_text = treatment(original)
                if text.startswith(treated_text + piece, position):
                    slots.append(dataclasses.replace(slot, treatment=treatment))
                    position += len(treated_text + piece)
                    break
            else:
                return None
        return tuple(slots) if position == len(text) else None

    def _find_marked(self, last: Message, prior: list[Wire], wire: Wire, later: list[Wire]) -> _TurnText | None:
        """Return the turn of `last`, with marks for its texts, between the others; None if it was rewritten."""
        prompt = self._template.text(prior, add_generation_prompt=True)
        closed_text = self._template.text([*prior, wire], add_generation_prompt=False)
        onward = self._template.text([*prior, wire, *later], add_generation_prompt=True)
        if not (closed_text.startswith(prompt) and onward.startswith(prompt)):
            return None
        marks = _marks_of(last)
        closed_turn = self._take_apart(closed_text[len(prompt) :], marks)
        continued_turn = self._take_apart(onward[len(prompt) :], marks)
        if closed_turn is None or continued_turn is None:
            return None
        # An answer without reasoning was sampled without the empty block that some templates put before the last
        # answer.
        head = (
            closed_turn.head
            if last.reasoning_content is not None
            else closed_turn.head.removeprefix(self._facts.empty_reasoning)
        )
        if (head, closed_turn.body, closed_turn.ending, closed_turn.stop) != (
            continued_turn.head,
            continued_turn.body,
            continued_turn.ending,
            continued_turn.stop,
        ):
            return None
        if (
            last.reasoning_content == "" and self._facts.style.reasoning_tags[1] not in continued_turn.head
        ):  # an empty block has no mark
            return None
        return continued_turn

    def _find_by_rendering(self, history: Sequence[Message], new: Sequence[Message], escapes: Escapes) -> Seam | None:
        # As with marks, but with the real answer in their place.
        self.require_shown([*history, *new])
        prior = self.wires(history[:-1], escapes)
        later = self.wires(new, escapes, first_index=len(history))
        last = history[-1]
        marked_message = _mark_texts([last], keep_ids=True)[0]
        turn = self._find_marked(marked_message, prior, self.wires([marked_message], escapes)[0], later)
        if turn is None:
            return None
        # Arguments stay marked: a template can only write JSON out, and it may repeat the content.
        half = dataclasses.replace(marked_message, content=last.content, reasoning_content=last.reasoning_content)
        answer_wires = self.wires([half], escapes, first_index=len(history) - 1)
        prompt = self._template.text(prior, add_generation_prompt=True)
        onward = self._template.text([*prior, *answer_wires, *later], add_generation_prompt=True)
        forms = [
            dict.fromkeys(treatment(escapes(text)) for treatment in _TREATMENTS)
            for text in (last.content, last.reasoning_content or "")
        ]
        for content, reasoning in itertools.product(*forms):
            answer_text = _put_in(
                turn.answer_text, {marked_message.content: content, marked_message.reasoning_content or "": reasoning}
            )
            if onward == prompt + answer_text + turn.stop + turn.rest:
                return turn.seam_behind(last)
        return None

    def _take_apart(self, text: str, marks: list[str]) -> _TurnText | None:
        """Return the turn at the start of `text`; None unless each mark occurs in it exactly once."""
        starts = [text.find(mark) for mark in marks]
        if -1 in starts:
            return None
        end = max((start + len(mark) for start, mark in zip(starts, marks, strict=True)), default=0)
        stop = self._closers.search(text, end)
        if stop is None or any(text.count(mark, 0, stop.start()) != 1 for mark in marks):
            return None
        start, end = (min(starts), end) if marks else (stop.start(), stop.start())
        return _TurnText(text[:start], text[start:end], text[end : stop.start()], stop.group(), text[stop.end() :])

    def _marked_wires(self, marked_messages: Sequence[Message]) -> list[Wire]:
        return [to_wire(message, index, self._facts.style) for index, message in enumerate(marked_messages)]


def _shape_of(message: Message) -> _Shape:  # all but texts that a template may decide by
    reasoning = message.reasoning_content
    if reasoning is message.tool_call_id is message.name is None and message.content and not message.tool_calls:
        return message.role  # most are a text and nothing else; the hash of a string is kept
    return (
        message.role,
        bool(message.content),
        None if reasoning is None else bool(reasoning),
        message.name,
        message.tool_call_id is not None,
        tuple((call.name, bool(call.arguments)) for call in message.tool_calls),
    )


def _mark_texts(messages: Sequence[Message], *, keep_ids: bool = False) -> list[Message]:
    """Return the conversation with a mark for every non-empty text; an id has the same mark everywhere."""
    numbers = itertools.count()
    ids: dict[str, str] = {}

    def call_id(original: str) -> str:
        return original if keep_ids else ids.setdefault(original, mark(next(numbers)))

    return [
        dataclasses.replace(
            message,
            content=message.content and mark(next(numbers)),
            reasoning_content=message.reasoning_content and mark(next(numbers)),
            tool_call_id=message.tool_call_id and call_id(message.tool_call_id),
            tool_calls=tuple(
                ToolCall(call_id(call.id), call.name, {"key": mark(next(numbers))} if call.arguments else {})
                for call in message.tool_calls
            ),
        )
        for message in messages
    ]


def _marks_of(message: Message) -> list[str]:
    texts = [message.content, message.reasoning_content or ""]
    return [text for text in texts if text] + [call.arguments["key"] for call in message.tool_calls if call.arguments]


def _put_in(marked_text: str, texts: Mapping[str, str]) -> str:
    return _MARK.sub(lambda match: texts.get(match.group(), match.group()), marked_text)


def _make_room(store: dict[Any, Any] | set[Any]) -> None:  # of what can be computed again
    if len(store) >= _MAX_REMEMBERED:
        store.clear()

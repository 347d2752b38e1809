"""A tokenizer's chat template as a function from messages to text, and facts about it from rendering marked texts.

The only file that calls `apply_chat_template`. What no rendering can show is read off the source (source.py).
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from gspo_gym.chat.encoding import TextCodec
from gspo_gym.chat.formats import THINK_TAGS, all_reasoning_tags
from gspo_gym.chat.source import NOW, compares_messages, searched_literals
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ToolCall

Wire = dict[str, Any]  # a message for a template, JSON-like

_RESERVED = frozenset(
    {"conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)  # fmt: skip
# Exceptions of a template: Jinja's own (which `raise_exception` raises) and Python's.
_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_NINE_ALPHANUMERICS = re.compile(r"[A-Za-z0-9]{9}")
_LAST_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_MARK = re.compile(r"zq\d{7}")  # of `mark`


@dataclass(frozen=True, slots=True)
class WireStyle:
    """The form in which a template wants its messages, found by probing.

    Attributes:
        reasoning_key: key of a message under which it renders reasoning; None if under none. The block is then put
            into the content, as the model wrote it.
        reasoning_tags: texts before and after reasoning.
        arguments_are_text: it wants the arguments of a call as JSON text (DeepSeek V3).
        needs_nine_character_ids: it refuses ids of tool calls that are not nine letters and digits (Mistral).
        names_in_ids: it shows the id of a call in place of the tool's name, as functions.NAME:NUMBER (Kimi K2).
        answer_opening: plain text that opens an assistant turn, or None if a special token does. Other messages may not
            contain it, because its tokens would look like the template's.
    """

    reasoning_key: str | None = "reasoning_content"
    reasoning_tags: tuple[str, str] = THINK_TAGS
    arguments_are_text: bool = False
    needs_nine_character_ids: bool = False
    names_in_ids: bool = False
    answer_opening: str | None = None


class ChatTemplate:
    """Messages to text, by the tokenizer's template with fixed tools and template arguments.

    `date` is what the template shows as today's; None: the day on which it is rendered.

    Raises:
        TemplateError: the tokenizer has no template, or an argument is reserved for the renderer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_schemas: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
    ) -> None:
        kwargs = dict(template_kwargs or {})
        self.name = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'this tokenizer'}"
        if reserved_names := sorted(_RESERVED & kwargs.keys()):
            raise TemplateError(
                f"template_kwargs: {', '.join(reserved_names)} is set by the renderer itself; remove it"
            )
        self.tools = [plain_json(schema) for schema in tool_schemas]
        try:
            self.source: str = tokenizer.get_chat_template(kwargs.pop("chat_template", None), self.tools or None)
        except (AttributeError, ValueError) as error:
            raise TemplateError(
                f"{self.name}: there is none ({_first_line(error)}). Use a chat or instruct model, set "
                f'tokenizer.chat_template, or pass template_kwargs={{"chat_template": ...}}'
            ) from error
        self._tokenizer = tokenizer
        # Given as an argument, it goes over transformers' function, which reads the clock.
        self._kwargs = kwargs if date is None else {NOW: _clock_at(date), **kwargs}
        self._turn_ends = ("", "")

    def end_turns_by(self, answer: str, calls: str) -> None:
        """Put the opening of the next turn behind a last answer, or one with calls: it ends the answer (GLM 4)."""
        self._turn_ends = (answer, calls)

    def text(self, wires: Sequence[Wire], *, add_generation_prompt: bool, with_tools: bool = True) -> str:
        """Return the conversation as text, with or without the opening of an assistant turn at its end.

        Raises:
            TemplateError: the template refused; names the first message that it refuses.
        """
        if not wires:
            raise TemplateError(f"{self.name}: expected at least one message, got none")
        try:
            return self._apply(wires, add_generation_prompt, with_tools)
        except _TEMPLATE_FAILURES as error:
            index = self._first_refused(wires, add_generation_prompt, with_tools)
            raise TemplateError(
                f"{self.name} refuses messages[{index}] (role {wires[index]['role']}): {_first_line(error)}"
            ) from error

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """Return the same template with further arguments."""
        variant = copy.copy(self)
        variant._kwargs = {**self._kwargs, **arguments}
        return variant

    def accepts(self, wires: Sequence[Wire], *, with_tools: bool = True) -> bool:
        """Return whether the template renders the messages at all."""
        try:
            self._apply(wires, False, with_tools)
        except _TEMPLATE_FAILURES:
            return False
        return True

    def _apply(self, wires: Sequence[Wire], add_generation_prompt: bool, with_tools: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(wires),
            tools=(self.tools or None) if with_tools else None,
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._kwargs,
        )
        assert isinstance(text, str)
        if not add_generation_prompt and wires[-1]["role"] == "assistant":
            text += self._turn_ends[bool(wires[-1].get("tool_calls"))]
        return text

    def _first_refused(self, wires: Sequence[Wire], add_generation_prompt: bool, with_tools: bool) -> int:
        # Templates read from the front, so the last message of the shortest refused beginning is the refused one.
        for count in range(1, len(wires)):
            try:
                self._apply(wires[:count], add_generation_prompt, with_tools)
            except _TEMPLATE_FAILURES:
                return count - 1
        return len(wires) - 1


def to_wire(message: Message, index: int, style: WireStyle, escape: Callable[[str], str] = str) -> Wire:
    """Return a message in the template's form, with every text of an author passed through `escape`.

    Raises:
        TemplateError: a message that is not the model's contains the plain text that opens an answer.
    """
    opening = style.answer_opening
    if opening is not None and message.role != "assistant" and opening in message.content:
        raise TemplateError(
            f"messages[{index}] (role {message.role}) contains {opening!r}. This chat template opens the model's turn "
            "with that plain text instead of a special token, so the message could speak for the model; remove it"
        )
    wire: Wire = {"role": message.role, "content": escape(message.content)}
    if (reasoning := message.reasoning_content) is not None:
        if style.reasoning_key is not None:
            wire[style.reasoning_key] = escape(reasoning)
        else:
            opening, closing = style.reasoning_tags
            wire["content"] = f"{opening}\n{escape(reasoning)}\n{closing}\n\n{wire['content']}"
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": escape(_call_id(call.id, style, call.name)),
                "type": "function",
                "function": {"name": escape(call.name), "arguments": _arguments(call, style, escape)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = escape(_call_id(message.tool_call_id, style, message.name))
    if message.name is not None:
        wire["name"] = escape(message.name)
    return wire


def _clock_at(date: datetime.date) -> Callable[[str], str]:
    midnight = datetime.datetime.combine(date, datetime.time())
    return midnight.strftime


def plain_json(value: Any, escape: Callable[[str], str] = str) -> Any:
    """Return mappings and sequences as dict and list, which `tojson` can write."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape(str(key)): plain_json(item, escape) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain_json(item, escape) for item in value]
    return value


def _arguments(call: ToolCall, style: WireStyle, escape: Callable[[str], str]) -> Any:
    arguments = plain_json(call.arguments, escape)
    return json.dumps(arguments, ensure_ascii=False) if style.arguments_are_text else arguments


def _call_id(call_id: str, style: WireStyle, tool: str | None) -> str:
    if (
        style.names_in_ids
        and tool is not None
        and not call_id.startswith("functions.")
        and not _MARK.fullmatch(call_id)
    ):
        number = _LAST_NUMBER.search(call_id)
        return f"functions.{tool}:{int(number.group()) if number else 0}"
    if not style.needs_nine_character_ids or _NINE_ALPHANUMERICS.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


EMPTY_REASONING = re.compile(r"\A\s*<think>\s*</think>\s*")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the last is gpt-oss's


def mark(number: int) -> str:
    """Return a text that no template writes: nine letters and digits, which also pass for Mistral's call ids."""
    return f"zq{number:07d}"


_USER, _ANSWER, _REASONING, _ARGUMENT, _RESULT = (mark(9_000_000 + i) for i in range(5))


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Results of probing.

    Attributes:
        style: the form in which the template wants messages.
        closers: the special tokens that close an assistant turn, first that of an ordinary answer.
        empty_reasoning: the empty reasoning block that the template writes before a last answer without reasoning
            (Qwen3), or "".
        opens_reasoning: the generation prompt ends inside a reasoning block.
        renders_calls: tool calls of an assistant message are shown.
        max_tool_calls: most calls in one assistant message; None for no limit.
        literals: finds the texts that the template looks for inside messages.
        compares_messages: the template compares values with each other, so equal messages may matter (Mistral).
    """

    style: WireStyle
    closers: tuple[str, ...]
    empty_reasoning: str
    opens_reasoning: bool
    renders_calls: bool
    max_tool_calls: int | None
    literals: re.Pattern[str]
    compares_messages: bool


def probe(template: ChatTemplate, codec: TextCodec) -> TemplateFacts:
    """Return the facts of a template, and tell `codec` which tokens messages may not contain.

    Raises:
        TemplateError: the template has no generation prompt, closes no turn, drops or repeats texts, or does not show
            its tools.
    """
    user = {"role": "user", "content": _USER}
    _require_tools_taken(template, user)
    prompt = template.text([user], add_generation_prompt=True)
    answer = template.text([user, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    for text, message_kind in ((_USER, "a user message"), (_ANSWER, "an assistant message")):
        if answer.count(text) != 1:
            raise TemplateError(
                f"{template.name} shows the content of {message_kind} {answer.count(text)} times, expected once"
            )
    head = _check_generation_prompt(template, user, prompt, answer)
    tail = answer[answer.index(_ANSWER) + len(_ANSWER) :]
    between = answer[answer.index(_USER) + len(_USER) : answer.index(_ANSWER)]
    if not tail.strip():
        tail = _end_turns_by_the_next(template, codec, user, between)
    closer = codec.find_special(tail) or codec.find_added(tail)
    if closer is None:
        raise TemplateError(
            f"{template.name} closes an assistant turn with {tail!r}, which holds no special token of this tokenizer: "
            "the model could not end its turn. Add the token (tokenizer.add_special_tokens) or use another template"
        )
    tags = next((pair for pair in all_reasoning_tags() if pair[1] and pair[1] in template.source), THINK_TAGS)
    arguments_are_text = _wants_arguments_as_text(template, user)
    style = WireStyle(
        reasoning_key=next((key for key in _REASONING_KEYS if _shows_reasoning(template, user, key)), None),
        reasoning_tags=tags,
        arguments_are_text=arguments_are_text,
        needs_nine_character_ids=not template.accepts([user, _call("call_0", arguments_are_text)])
        and template.accepts([user, _call(mark(0), arguments_are_text)]),
        names_in_ids=_shows_names_in_ids(template, user, arguments_are_text),
        answer_opening=(between.strip() or None) if codec.find_added(between) is None else None,
    )
    codec.guard({token for token in codec.added if token in between + tail} - set(tags))
    calls = _probe_calls(template, codec, closer.group(), style)
    if template.tools:
        _check_tools(template, user, calls)
    last = prompt[prompt.index(_USER) :]
    return TemplateFacts(
        style=style,
        closers=calls.closers,
        empty_reasoning=head if EMPTY_REASONING.fullmatch(head) else "",
        opens_reasoning=last.rfind(tags[0]) > last.rfind(tags[1]),
        renders_calls=calls.error is None,
        max_tool_calls=calls.max_tool_calls,
        literals=searched_literals(template.source),
        compares_messages=compares_messages(template.source),
    )


def _end_turns_by_the_next(template: ChatTemplate, codec: TextCodec, user: Wire, own_opening: str) -> str:
    """Let the special tokens that open the next turns end answers, if the template closes none; return that of a user.

    GLM 4 ends an answer by sampling <|user|> and a call by sampling <|observation|>, which open the next message. A
    token that also opens the model's turn (`own_opening`) ends none.
    """
    answer = {"role": "assistant", "content": _ANSWER}
    call_conversation = [user, _call("call_0")]
    result = {"role": "tool", "content": _RESULT, "tool_call_id": "call_0", "name": _PROBE_TOOL}
    openings = []
    for before, after in (([user, answer], user), (call_conversation, result)):
        conversation = [*before, after]
        if not (template.accepts(before) and template.accepts(conversation)):
            openings.append("")
            continue
        text = template.text(before, add_generation_prompt=False)
        whole = template.text(conversation, add_generation_prompt=False)
        opening_match = codec.find_special(whole[len(text) :].lstrip()) if whole.startswith(text) else None
        is_end = opening_match is not None and opening_match.start() == 0 and opening_match.group() not in own_opening
        openings.append(opening_match.group() if opening_match is not None and is_end else "")
    template.end_turns_by(openings[0], openings[1] or openings[0])
    return openings[0]


def _check_generation_prompt(template: ChatTemplate, user: Wire, prompt: str, answer: str) -> str:
    """Return the text between the generation prompt and the answer; "" if the template rewrites the prompt."""
    head = answer[len(prompt) : answer.index(_ANSWER)] if answer.startswith(prompt) else None
    if prompt == template.text([user], add_generation_prompt=False) and (head is None or head.strip()):
        raise TemplateError(
            f"{template.name} has no generation prompt: add_generation_prompt changes nothing, although an assistant "
            f"message opens with {answer[answer.index(_USER) + len(_USER) : answer.index(_ANSWER)]!r}. Write that "
            "opening at the template's end under {% if add_generation_prompt %}"
        )
    return head or ""


@dataclass(frozen=True, slots=True)
class _Calls:
    """How tool calls are rendered; `error` says why they cannot be used, or is None."""

    closers: tuple[str, ...]
    error: str | None
    max_tool_calls: int | None = None


def _shows_reasoning(template: ChatTemplate, user: Wire, key: str) -> bool:
    answers = [{"role": "assistant", "content": _ANSWER, key: _REASONING}, {**_call("call_0"), key: _REASONING}]
    conversations = [[user, answer] for answer in answers]  # some show it beside calls alone (Gemma 4)
    return any(
        _REASONING in template.text(conversation, add_generation_prompt=False)
        for conversation in conversations
        if template.accepts(conversation)
    )


def _wants_arguments_as_text(template: ChatTemplate, user: Wire) -> bool:
    ids = ("call_0", mark(0))
    return not any(template.accepts([user, _call(call_id)]) for call_id in ids) and any(
        template.accepts([user, _call(call_id, as_text=True)]) for call_id in ids
    )


def _shows_names_in_ids(template: ChatTemplate, user: Wire, as_text: bool) -> bool:
    conversations = [[user, _call(call_id, as_text)] for call_id in ("call_0", f"functions.{_PROBE_TOOL}:0")]
    if not all(map(template.accepts, conversations)):
        return False
    text_without_name, text_with_name = (
        template.text(conversation, add_generation_prompt=False) for conversation in conversations
    )
    return _PROBE_TOOL not in text_without_name and _PROBE_TOOL in text_with_name


def _probe_calls(template: ChatTemplate, codec: TextCodec, closer: str, style: WireStyle) -> _Calls:
    user = {"role": "user", "content": _USER}
    call_id = mark(0) if style.needs_nine_character_ids else "call_0"
    as_text = style.arguments_are_text
    conversation = [user, _call(call_id, as_text)]
    try:
        text = template.text(conversation, add_generation_prompt=False)
        if text.count(_ARGUMENT) != 1:
            return _Calls(
                (closer,), f"{template.name} shows the tool calls of an assistant message {text.count(_ARGUMENT)} times"
            )
        result = {"role": "tool", "content": _RESULT, "tool_call_id": call_id, "name": _PROBE_TOOL}
        text_with_result = template.text([*conversation, result], add_generation_prompt=True)
    except TemplateError as error:
        return _Calls((closer,), str(error))
    if text_with_result.count(_RESULT) != 1:
        return _Calls((closer,), f"{template.name} shows the result of a tool {text_with_result.count(_RESULT)} times")
    closers = [closer, *_call_closers(template, codec, conversation, closer)]
    twice = _call(call_id, as_text)
    twice["tool_calls"] += _call(mark(1), as_text)["tool_calls"]
    two_calls_text = (
        template.text([user, twice], add_generation_prompt=False) if template.accepts([user, twice]) else ""
    )
    shows_both = two_calls_text.count(_ARGUMENT) == 2  # gpt-oss shows the first alone
    return _Calls(tuple(dict.fromkeys(closers)), None, None if shows_both else 1)


def _call_closers(template: ChatTemplate, codec: TextCodec, conversation: Sequence[Wire], closer: str) -> list[str]:
    """Return the tokens that end a turn with a call where `closer` does not, also a call of a built-in tool."""
    templates = [template]
    if _BUILTIN_TOOLS in template.source:  # Llama 3.1 ends them by a token of its own, and at times others, too
        templates.append(template.with_arguments({_BUILTIN_TOOLS: [_PROBE_TOOL]}))
    closers = []
    for variant in templates:
        _, _, tail = variant.text(conversation, add_generation_prompt=False).rpartition(_ARGUMENT)
        # The last special token: those before it end the argument or the call (Gemma 4's quote), and not the turn.
        if closer not in tail and (tokens := codec.special_in(tail)):
            closers.append(tokens[-1])
    return closers


class ToolsNotShownError(TemplateError):
    """The template does not show tools to the model, or not what becomes of them."""


def _require_tools_taken(template: ChatTemplate, user: Wire) -> None:
    if template.tools and not template.accepts([user]) and template.accepts([user], with_tools=False):
        raise ToolsNotShownError(
            f"{template.name} refuses tools; use another one, or put them into the system message "
            '(rollout.tools_in = "system_message")'
        )


def _check_tools(template: ChatTemplate, user: Wire, calls: _Calls) -> None:
    with_tools = template.text([user], add_generation_prompt=True)
    needs_tools = not template.accepts([user], with_tools=False)  # Hermes 3
    if not needs_tools and with_tools == template.text([user], add_generation_prompt=True, with_tools=False):
        raise ToolsNotShownError(
            f"{template.name} does not show tools to the model: it renders the same with and without tool_schemas. Use "
            'a template with tool support, or put them into the system message (rollout.tools_in = "system_message")'
        )
    if calls.error is not None:
        raise ToolsNotShownError(
            f"{calls.error}; an environment with tools needs calls and results shown once each, or "
            'rollout.tools_in = "system_message"'
        )


_PROBE_TOOL = "probe_tool"
_BUILTIN_TOOLS = "builtin_tools"  # argument of Llama's templates


def _call(call_id: str, as_text: bool = False) -> Wire:
    arguments = {"key": _ARGUMENT}
    function = {"name": _PROBE_TOOL, "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}

"""Messages to token ids and back, for any transformers tokenizer with a chat template. Only chat/ knows templates.

Sampled tokens are never rendered again: a turn appends the closing and the new messages to the existing ids. If the
template would rewrite those (Qwen3 strips earlier reasoning when a user speaks), the whole prompt is rendered again and
a new segment begins; seams.py decides that.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gspo_gym.chat.encoding import Escapes, TextCodec
from gspo_gym.chat.formats import FORMATS, Arguments, Field, Format, first_text, pieces, plain_formats
from gspo_gym.chat.parsing import ParseFailure, parameters_of, parse_action
from gspo_gym.chat.plain import PlainWords, ToolsIn, has_system_role, tools_text
from gspo_gym.chat.proof import Proof, prove
from gspo_gym.chat.seams import Seam, Seams
from gspo_gym.chat.template import EMPTY_REASONING, ChatTemplate, ToolsNotShownError, mark, probe
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message, ParseStatus, TokenIds, ToolCall

# Attribute of a tokenizer: the ids at which its model ends an answer, as the model's configuration files say.
MODEL_STOPS = "model_stops"
# Stand for a tool's name, an argument and reasoning, to be found in a rendered answer.
_ANY_TOOL, _ARGUMENT, _REASONING = mark(9_000_010), mark(9_000_011), mark(9_000_012)
_HELLO = {"role": "user", "content": "Hello"}
_CALL_NAME = re.compile(rf'\s*"{_ANY_TOOL}"')
_CALL_ARGUMENTS = re.compile(rf'\s*\{{\s*"key"\s*:\s*"{_ARGUMENT}"')


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the model reads next.

    Attributes:
        token_ids: ids to append after the sampled ones, or the whole new prompt. None was sampled, so all are masked.
        is_new_segment: `token_ids` is a whole prompt, because the template rewrites what stands before it.
    """

    token_ids: list[int]
    is_new_segment: bool


class Renderer:
    """One chat template with one set of tools, probed when built.

    An assistant message whose `reasoning_content` is None has no reasoning block, one with "" an empty block. For
    templates without `reasoning_content`, the block becomes part of the content.

    Text that spells a special token inside a message is encoded as ordinary tokens, so no environment can forge a turn.
    If the template opens the model's turn by plain text (Mistral's first), a message with that text is refused.

    Args:
        tokenizer: any transformers tokenizer.
        tool_schemas: the environment's tools as OpenAI function schemas.
        template_kwargs: passed to the template, such as {"enable_thinking": False}; "chat_template" replaces the
            template.
        tools_in: where the model is shown the tools; see `plain.py`.
        date: that the template shows as today's; None: the day on which it is rendered.

    Attributes:
        notice: says that the tools stand in the system message although nobody asked for that; None if they do not.
        stop_token_ids: tokens that end a turn: the template's closers, the tokenizer's eos, then the model's (see
            `MODEL_STOPS`).
        extends: every turn only appends, whether a user or a tool speaks next.
        extends_over_tools: turns append at least while tools answer; the template may rewrite when a user speaks.
        opens_reasoning: the prompt ends inside a reasoning block, where the answer starts.
        format: how the template writes reasoning and calls, proved by reading awkward answers back (proof.py).

    Raises:
        TemplateError: the template cannot be rendered exactly, or what it writes cannot be read back; says which part,
            and what to do.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_schemas: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        tools_in: ToolsIn = "auto",
        date: datetime.date | None = None,
    ) -> None:
        make = partial(ChatTemplate, tokenizer, template_kwargs=template_kwargs, date=date)
        self._codec = TextCodec(tokenizer)
        self._has_tools = bool(tool_schemas)
        self.notice: str | None = None
        template_tools = () if tools_in == "system_message" else tool_schemas
        try:
            self._template = make(tool_schemas=template_tools)
            self._facts = probe(self._template, self._codec)
        except ToolsNotShownError:
            if tools_in == "template":
                raise
            template_tools, self._template = (), make()
            self.notice = (
                f"{self._template.name} does not show tools, their calls and results: the system message says what "
                "tools there are, and calls are read as <tool_call>{...}</tool_call>"
            )
            self._facts = probe(self._template, self._codec)
        self._words = PlainWords(
            tools=tools_text(tool_schemas) if tool_schemas and not template_tools else None,
            has_system_role=has_system_role(self._template, self._facts.style),
        )
        self._seams = Seams(self._template, self._facts)
        self.stop_token_ids = _stop_token_ids(tokenizer, self._codec, self._facts.closers)
        self.opens_reasoning = self._facts.opens_reasoning
        self._parameters = parameters_of(tool_schemas)
        self._max_tool_calls = self._facts.max_tool_calls if self._words.tools is None else None
        self._proof: Proof | None = None
        self._proof = prove(
            lambda message: self.decode(self.action_ids(message)),
            self._codec.spellable,
            name=self._template.name,
            formats=FORMATS if self._words.tools is None else plain_formats(),
            tool_schemas=tool_schemas,
            max_tool_calls=self._max_tool_calls,
            starts_in_reasoning=self.opens_reasoning,
            reasoning_tags=self._facts.style.reasoning_tags,
        )
        self.format = self._proof.format
        self.extends_over_tools = self._extends_over(_TOOL_TURNS)
        self.extends = self._extends_over(_USER_TURNS) and (self.extends_over_tools or not tool_schemas)

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of an episode: the whole conversation and the opening of the model's turn.

        Raises a TemplateError where the template refuses a message, or does not show it exactly once.
        """
        return self.full(messages, add_generation_prompt=True)

    def continue_from(
        self, history: Sequence[Message], new_messages: Sequence[Message], *, closed: bool
    ) -> Continuation:
        """Return the tokens to append so the model sees `new_messages` and answers.

        Args:
            history: the conversation so far; its last message is the model's, parsed.
            new_messages: the answer to it.
            closed: the sampled ids ended with a stop token; if not, the closing is appended too.

        Raises:
            TemplateError: the template refuses a message or does not show it, or `history` does not end with the model.
        """
        if len(history) < 2 or history[-1].role != "assistant":
            raise TemplateError(
                "continue_from: expected a history of a prompt and the assistant message that answered it"
            )
        if not new_messages:
            raise TemplateError("continue_from: expected at least one new message, got none; the episode is over")
        escapes = self._codec.escapes()
        seam = self._find_seam(history, new_messages, escapes)
        if seam is None:
            return Continuation(self.start([*history, *new_messages]), is_new_segment=True)
        # They are the ids of the whole text, because they begin after a special token, across which nothing merges.
        after_stop = self._codec.encode(seam.rest, escapes, after=seam.stop)
        if closed:
            return Continuation(after_stop, is_new_segment=False)
        closing = [*self._codec.encode(seam.unclosed, after=seam.stop), self._codec.added[seam.stop]]
        return Continuation(closing + after_stop, is_new_segment=False)

    def _find_seam(self, history: Sequence[Message], new: Sequence[Message], escapes: Escapes) -> Seam | None:
        return self._seams.find(self._words.beginning(history), self._words.further(new), escapes)

    def action_ids(self, message: Message) -> list[int]:
        """Return the tokens that a model would sample for `message`, with the stop token, in the template's spelling.

        A template that trims contents trims here too. If the prompt opens a reasoning block, a message without one
        closes it empty.

        Raises:
            TemplateError: the template would drop a part of it, such as text beside tool calls in Llama 3.1.
        """
        if message.role != "assistant":
            raise TemplateError(f"action_ids: expected an assistant message, got role {message.role}")
        if message.content and message.tool_calls and self._proof and not self._proof.keeps_text_beside_calls:
            raise TemplateError(
                f"{self._template.name} does not write a text beside tool calls so that it could be read back; leave "
                "it out, or give it as reasoning"
            )
        escapes = self._codec.escapes()
        text, stop = self._answer_and_stop(message, escapes)
        return [*self._codec.encode(text, escapes, after=stop), self._codec.added[stop]]

    def call_opening(self, name: str | None) -> list[int]:
        """Return the beginning of an answer that calls the tool `name`, or any tool if None, to force a call.

        It ends where the arguments begin, or for any tool, its name. If the prompt opens a reasoning block, it is
        closed first.

        Raises:
            TemplateError: the template shows no calls.
        """
        escapes = self._codec.escapes()
        call = ToolCall("call_0", _ANY_TOOL if name is None else name, {"key": _ARGUMENT})
        reasoning = "" if self.opens_reasoning else None
        text, stop = self._answer_and_stop(Message("assistant", "", (call,), reasoning_content=reasoning), escapes)
        end = _call_start(text, self.format, is_named=name is not None)
        if end is None:
            raise TemplateError(f"{self._template.name} shows no tool call that could be begun: {text!r}")
        # White space at the end is left out: the model samples it in one token with what follows.
        return self._codec.encode(text[:end], escapes, after=stop)

    def _answer_and_stop(self, message: Message, escapes: Escapes) -> tuple[str, str]:
        """Return an answer's text as the template writes it, and the stop token that closes it."""
        prompt = self._template.text([_HELLO], add_generation_prompt=True)
        (message,) = self._words.further([message])
        if self.opens_reasoning and message.reasoning_content is None:
            message = dataclasses.replace(message, reasoning_content="")  # the model cannot leave out what is open
        text = self._conversation_text(message, escapes)
        if not text.startswith(prompt) and self.opens_reasoning:
            text = self._in_opened_block(message, prompt, escapes)
        if not text.startswith(prompt):
            raise TemplateError(
                f"{self._template.name} shows an answer in another form than its generation prompt opens "
                f"({prompt[-40:]!r}), so what the model would have to sample cannot be read off it"
            )
        text = text[len(prompt) :]
        stops = [(at, closer) for closer in self._facts.closers if (at := text.find(closer)) >= 0]
        if not stops:
            raise TemplateError(f"{self._template.name} does not close this answer: {text[-40:]!r}")
        at, stop = min(stops)
        _require_said(message, escapes, text[:at], self._template.name)
        return text[:at], stop

    def _conversation_text(self, message: Message, escapes: Escapes) -> str:
        """Return a conversation of a greeting and this answer as the template writes it."""
        answer_wire = self._seams.wires([message], escapes, first_index=1)[0]
        # Some templates put an empty reasoning block before a last answer that had none. Followed by a user message,
        # the answer stands as it was said.
        is_decorated = message.reasoning_content is None and bool(self._facts.empty_reasoning)
        return self._template.text(
            [_HELLO, answer_wire, _HELLO] if is_decorated else [_HELLO, answer_wire], add_generation_prompt=False
        )

    def _in_opened_block(self, message: Message, prompt: str, escapes: Escapes) -> str:
        """Return `_conversation_text` with the reasoning that the prompt opened, if the template has another form.

        An empty block is closed as the template closes one with a text (Nemotron 3 writes an empty one differently); a
        template that drops reasoning (DeepSeek R1) is taken at its word for the answer, behind a block in R1's form.
        """
        text = self._conversation_text(dataclasses.replace(message, reasoning_content=_REASONING), escapes)
        if not message.reasoning_content and text.startswith(prompt) and text.count(_REASONING) == 1:
            return text.replace(_REASONING, "")
        text = self._conversation_text(dataclasses.replace(message, reasoning_content=None), escapes)
        tag, closing = self._facts.style.reasoning_tags
        opening = prompt[: prompt.rindex(tag)]
        if not text.startswith(opening):
            return text
        answer = EMPTY_REASONING.sub("", text[len(opening) :], count=1)
        return f"{prompt}{escapes(message.reasoning_content or '')}\n{closing}\n\n{answer}"

    def full(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        """Return the ids of the whole conversation, rendered from nothing; raises as `start`."""
        escapes = self._codec.escapes()
        messages = self._words.beginning(messages)
        wires = self._seams.wires(messages, escapes)
        text = self._template.text(wires, add_generation_prompt=add_generation_prompt)
        self._seams.require_shown(messages)
        return self._codec.encode(text, escapes)

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of sampled ids without a final stop token; other special tokens are kept.

        A character that the end of the turn cut apart becomes U+FFFD.
        """
        ids = [int(token_id) for token_id in token_ids]
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self._codec.decode(ids, after=self.stop_token_ids[0])

    def parse(self, text: str, *, is_truncated: bool) -> Message | ParseFailure:
        """Return `parse_action` of the text for this template and its tools."""
        result = parse_action(
            text,
            self.format,
            has_tools=self._has_tools,
            is_truncated=is_truncated,
            starts_in_reasoning=self.opens_reasoning,
            parameters=self._parameters,
        )
        most = self._max_tool_calls
        if isinstance(result, Message) and most is not None and len(result.tool_calls) > most:
            error = f"expected at most {most} tool call in one answer, got {len(result.tool_calls)}"
            return ParseFailure(ParseStatus.BAD_TOOL_CALL, error, text)
        return result

    def _extends_over(self, turns: Sequence[tuple[Message, ...]]) -> bool:
        verdicts: list[bool] = []
        for messages in turns:
            answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
            try:
                for answer, end in zip(answers, [*answers[1:], len(messages)], strict=True):
                    self.action_ids(messages[answer])
                    seam = self._find_seam(messages[: answer + 1], messages[answer + 1 : end], self._codec.escapes())
                    verdicts.append(seam is not None)
            except TemplateError:  # what the template cannot render does not count
                continue
        return bool(verdicts) and all(verdicts)


def _stop_token_ids(tokenizer: Any, codec: TextCodec, closers: Sequence[str]) -> tuple[int, ...]:
    added_ids = set(codec.added.values())
    # Model configs have defaults that may be ids of ordinary text in this vocabulary.
    of_model = [token for token in getattr(tokenizer, MODEL_STOPS, ()) if token in added_ids]
    eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return tuple(dict.fromkeys([*(codec.added[closer] for closer in closers), *eos, *of_model]))


def _call_start(text: str, form: Format, *, is_named: bool) -> int | None:
    """Return where a written call's arguments begin, or if not `is_named`, its name; None if nowhere."""
    pattern = _CALL_ARGUMENTS if is_named else _CALL_NAME
    has_object = any(isinstance(piece, Field) and piece.name in ("call", "calls") for piece in pieces(form.calls[0]))
    if has_object or (is_named and form.arguments is Arguments.JSON):
        match = pattern.search(text)
        return None if match is None else match.start()
    if not is_named:
        return text.find(_ANY_TOOL) if _ANY_TOOL in text else None
    first = first_text(form.parameter) or "key"
    start = text.rfind(first, 0, text.find(_ARGUMENT))
    if start < 0:
        return None
    before_arguments = text[:start].rstrip()
    return len(before_arguments) if before_arguments.endswith(">") else start  # else the white space ends the name


def _require_said(message: Message, escapes: Escapes, text: str, name: str) -> None:
    parts = {"content": message.content, "reasoning": message.reasoning_content or ""}
    parts |= {f"call of {call.name}": call.name for call in message.tool_calls}
    for part, words in parts.items():
        if escapes(words).strip() not in text:
            raise TemplateError(
                f"{name} drops the {part} of this assistant message, so a model would not say it: {words!r}"
            )


def _conversation(letters: str) -> tuple[Message, ...]:  # one letter a message, see `kinds`
    call = (ToolCall("call_0", "probe_tool", {"key": "value"}),)
    kinds = {
        "s": Message("system", "Be brief."),
        "u": Message("user", "And?"),
        "a": Message("assistant", "Seven."),
        "r": Message("assistant", "Seven.", reasoning_content="Hm."),
        "c": Message("assistant", "", tool_calls=call),
        "d": Message("assistant", "", tool_calls=call, reasoning_content="Hm."),
        "t": Message("tool", "7", tool_call_id="call_0", name="probe_tool"),
    }
    return tuple(kinds[letter] for letter in letters)


_USER_TURNS = tuple(map(_conversation, ("uauau", "suau", "uruau", "uctau", "udtru")))
_TOOL_TURNS = tuple(map(_conversation, ("uct", "uctct", "udtdt", "suct")))


def cannot_fit(messages: Sequence[Message], tokenizer: Any, max_model_len: int) -> bool:
    """Return whether the text is too long for the context in any tokens."""
    # A text of n characters has at least n / (characters of the longest token) tokens; the factor 4 allows for
    # normalisers that merge characters. Encoding ten megabytes would block every other episode for seconds.
    num_characters = sum(len(message.content) for message in messages)
    if num_characters <= 64 * max_model_len:  # quick to encode, while asking for the vocabulary takes time
        return False
    longest = max(map(len, tokenizer.get_vocab()))
    return num_characters > 4 * longest * max_model_len


def with_system_prompt(messages: tuple[Message, ...], prompt: str | None) -> tuple[Message, ...]:
    """Return the first messages with the trainer's prompt before them, merged into a first system message.

    >>> with_system_prompt((Message("system", "Be fair."), Message("user", "Go.")), "Be brief.")[0].content.split()
    ['Be', 'brief.', 'Be', 'fair.']
    """
    if prompt is None:
        return messages
    if messages and messages[0].role == "system":  # templates take one system message
        return (Message("system", f"{prompt}\n\n{messages[0].content}"), *messages[1:])
    return (Message("system", prompt), *messages)


class RendererCache:
    """One renderer per set of tools: probing a template is slow, and the episodes of an environment share it.

    `system_prompt` is the beginning of every conversation, before the environment's messages. The other settings are
    those of `Renderer`.
    """

    _MAX_KEPT = 64  # tools may differ from task to task, so old renderers are dropped

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        tools_in: ToolsIn = "auto",
        date: datetime.date | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self._template_kwargs = dict(template_kwargs or {})
        self._tools_in = tools_in
        self._date = date
        self._renderers: dict[str, Renderer] = {}

    def for_tools(self, tool_schemas: Sequence[Mapping[str, Any]]) -> Renderer:
        """Return the renderer of conversations with these tools; a TemplateError if it cannot be exact."""
        key = json.dumps(list(tool_schemas))  # unsorted: the order of keys reaches the prompt
        if key not in self._renderers:
            if len(self._renderers) >= self._MAX_KEPT:
                del self._renderers[next(iter(self._renderers))]
            self._renderers[key] = Renderer(
                self.tokenizer,
                tool_schemas=tool_schemas,
                template_kwargs=self._template_kwargs,
                tools_in=self._tools_in,
                date=self._date,
            )
        return self._renderers[key]

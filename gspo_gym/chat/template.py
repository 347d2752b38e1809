"""A tokenizer's chat template as a function from messages to text, and facts about it from rendering marked texts.

The only file that calls `apply_chat_template`. A template's source is read only for the literals that it looks for
inside texts, because a message with one of them may be treated differently from any marked text, and for comparisons.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from gspo_gym.chat.parsing import REASONING_CLOSE, REASONING_OPEN
from gspo_gym.errors import TemplateError
from gspo_gym.types import Message

Wire = dict[str, Any]  # a message for a template, JSON-like

_RESERVED = frozenset(
    {"conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)  # fmt: skip
# Exceptions of a template: Jinja's own (which `raise_exception` raises) and Python's.
_TEMPLATE_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_NINE_ALPHANUMERICS = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class WireStyle:
    """The form in which a template wants its messages, found by probing.

    Attributes:
        knows_reasoning: it renders `reasoning_content`. If not, the block is put into the content, as the model wrote
            it.
        needs_nine_character_ids: it refuses ids of tool calls that are not nine letters and digits (Mistral).
        answer_opening: plain text that opens an assistant turn, or None if a special token does. Other messages may not
            contain it, because its tokens would look like the template's.
    """

    knows_reasoning: bool = True
    needs_nine_character_ids: bool = False
    answer_opening: str | None = None


class ChatTemplate:
    """Messages to text, by the tokenizer's template with fixed tools and template arguments.

    Raises:
        TemplateError: the tokenizer has no template, or an argument is reserved for the renderer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_schemas: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        kwargs = dict(template_kwargs or {})
        self.name = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'this tokenizer'}"
        if taken := sorted(_RESERVED & kwargs.keys()):
            raise TemplateError(f"template_kwargs: {', '.join(taken)} is set by the renderer itself; remove it")
        self.tools = [plain_json(schema) for schema in tool_schemas]
        try:
            self.source: str = tokenizer.get_chat_template(kwargs.pop("chat_template", None), self.tools or None)
        except (AttributeError, ValueError) as error:
            raise TemplateError(
                f"{self.name}: there is none ({_first_line(error)}). Use a chat or instruct model, set "
                f'tokenizer.chat_template, or pass template_kwargs={{"chat_template": ...}}'
            ) from error
        self._tokenizer = tokenizer
        self._kwargs = kwargs

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

    def accepts(self, wires: Sequence[Wire]) -> bool:
        """Return whether the template renders the messages at all."""
        try:
            self._apply(wires, False, True)
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
        if style.knows_reasoning:
            wire["reasoning_content"] = escape(reasoning)
        else:
            wire["content"] = f"{REASONING_OPEN}\n{escape(reasoning)}\n{REASONING_CLOSE}\n\n{wire['content']}"
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": escape(_call_id(call.id, style)),
                "type": "function",
                "function": {"name": escape(call.name), "arguments": plain_json(call.arguments, escape)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = escape(_call_id(message.tool_call_id, style))
    if message.name is not None:
        wire["name"] = escape(message.name)
    return wire


def plain_json(value: Any, escape: Callable[[str], str] = str) -> Any:
    """Return mappings and sequences as dict and list, which `tojson` can write."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape(str(key)): plain_json(item, escape) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain_json(item, escape) for item in value]
    return value


def _call_id(call_id: str, style: WireStyle) -> str:
    if not style.needs_nine_character_ids or _NINE_ALPHANUMERICS.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

"""The OpenAI chat API: its messages to `types.Message` and back, and requests without the fields that are refused.

Reading is lenient where clients and servers differ (content null or in parts, arguments as text or as an object,
unknown fields) and strict where a guess would change what was said. No I/O.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from gspo_gym.errors import RecordError, described
from gspo_gym.types import Message, ToolCall

Json = Any  # dict with text keys, list, str, int, float, bool or None

_ROLES = {"developer": "system", "function": "tool"}  # other names of the same roles
_OTHER_TEXTS = ("tool_call_id", "name", "reasoning_content")
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image", "image")


def message_from_wire(value: Json, *, where: str) -> Message:
    """Return one message of a request or of an answer.

    Content may be text, null (beside tool calls) or a list of text parts, which become lines of one text; the arguments
    of a call JSON text or an object. Role "developer" is system. Unknown fields are ignored.

    Raises:
        RecordError: it is no message, or holds an image. Starts with `where`.

    >>> message_from_wire({"role": "assistant", "content": None, "refusal": None}, where="here").content
    ''
    """
    if not isinstance(value, Mapping):
        raise RecordError(f"{where}: expected a message with role and content, got {described(value)}")
    role, content, calls = value.get("role"), value.get("content"), value.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RecordError(f"{where}: expected tool_calls as a list, got {described(calls)}")
    text = "" if content is None else text_from_wire(content, where=where)  # null stands beside tool calls
    tool_calls = tuple(
        tool_call_from_wire(call, where=f"{where}: tool call {index}") for index, call in enumerate(calls)
    )
    rest = {key: _text_or_none(value, key, where) for key in _OTHER_TEXTS if key in value}
    try:
        return Message(_ROLES.get(role, role) if isinstance(role, str) else "(none)", text, tool_calls, **rest)  # type: ignore[arg-type]  # it checks
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from error


def messages_from_wire(value: Json, *, where: str) -> tuple[Message, ...]:
    """Return `message_from_wire` of each message.

    Raises:
        RecordError: it is no list, or something in it is no message. Starts with `where`.
    """
    return ConversationReader().read(value, where=where)


class ConversationReader:
    """Reads lists of messages of which each mostly repeats the last one and adds to it.

    What is repeated is the same `Message` object, which was checked and read before.
    """

    def __init__(self) -> None:
        self._values: Sequence[Json] = ()
        self._messages: tuple[Message, ...] = ()

    def read(self, value: Json, *, where: str) -> tuple[Message, ...]:
        """Return `messages_from_wire` of a list that nobody changes afterwards.

        Raises:
            RecordError: as there.
        """
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise RecordError(f"{where}: expected a list of messages, got {described(value)}")
        num_known = len(list(itertools.takewhile(bool, map(_is_repeated, value, self._values))))
        new = (message_from_wire(value[k], where=f"{where}[{k}]") for k in range(num_known, len(value)))
        self._messages = (*self._messages[:num_known], *new)
        self._values = value
        return self._messages


def _is_repeated(value: Json, earlier_value: Json) -> bool:
    # To Python, an argument of true equals one of 1.
    return bool(value == earlier_value) and (not value.get("tool_calls") or repr(value) == repr(earlier_value))


def text_from_wire(content: Json, *, where: str) -> str:
    r"""Return content as one text: itself, or its text parts as lines (as vLLM shows them to a text model).

    Raises:
        RecordError: it is neither, or a part is an image. Starts with `where`.

    >>> text_from_wire([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], where="here")
    'a\nb'
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise RecordError(f"{where}: expected content as text or a list of text parts, got {described(content)}")
    return "\n".join(text_of_part(part, where=f"{where}: part {index}") for index, part in enumerate(content))


def text_of_part(part: Json, *, where: str) -> str:
    """Return the text of one content part.

    Raises:
        RecordError: it is no text part. Starts with `where`.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _IMAGE_PARTS:
        raise RecordError(
            f"{where}: expected text, got an image ({kind!r}); no renderer here shows images to a model: leave it out, "
            "or say in text what it shows"
        )
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise RecordError(f'{where}: expected {{"type": "text", "text": ...}}, got {described(part)}')
    return text


def tool_call_from_wire(value: Json, *, where: str) -> ToolCall:
    """Return a tool call; its arguments may be JSON text (empty for none) or an object.

    Raises:
        RecordError: it is no call, or its arguments are no JSON object. Starts with `where`.
    """
    function = value.get("function") if isinstance(value, Mapping) else None
    if isinstance(function, Mapping):
        name, arguments = function.get("name"), function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (json.JSONDecodeError, RecursionError) as error:
                raise RecordError(f"{where}: the arguments of {name!r} are not JSON: {error}") from error
        if isinstance(name, str) and isinstance(arguments, Mapping):
            return ToolCall(str(value.get("id") or ""), name, dict(arguments))
    raise RecordError(
        f'{where}: expected a tool call {{"id": ..., "function": {{"name": ..., "arguments": {{...}}}}}}, '
        f"got {described(value)}"
    )


def message_to_wire(message: Message) -> dict[str, Json]:
    """Return a message in the API's form, with arguments as JSON text.

    >>> message_to_wire(Message("user", "Hi."))
    {'role': 'user', 'content': 'Hi.'}
    """
    wire = message.to_dict()
    wire.pop("reasoning_content", None)  # other servers refuse it, or show it to their model
    for call in wire.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return wire


def require_encodable(text: str, *, where: str) -> None:
    """Raise for a lone surrogate, which JSON can spell and no tokenizer can read.

    Raises:
        RecordError: there is one. Starts with `where`.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RecordError(f"{where}: expected text that can be encoded, got a lone surrogate: {error}") from error


def _text_or_none(value: Mapping[str, Json], key: str, where: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        raise RecordError(f"{where}: expected {key} as text, got {described(text)}")
    return text


Answer = TypeVar("Answer")
Refusal = TypeVar("Refusal", bound=Exception)

_log = logging.getLogger(__name__)

_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")  # two names of one field
_MAX_READ = 4000  # characters of a refusal; some repeat the whole request after the message


class RefusedFields:
    """The fields that one endpoint refuses; remembered once a request without them was accepted.

    Args:
        name: of the endpoint, for the log.
        refused: fields known from the start.
    """

    def __init__(self, name: str, refused: Collection[str] = ()) -> None:
        self._name = name
        self._refused_fields = frozenset(refused)

    async def ask(
        self,
        send: Callable[[frozenset[str]], Awaitable[Answer]],
        is_about: Callable[[Refusal, frozenset[str]], frozenset[str]],
        refusals: tuple[type[Refusal], ...],
    ) -> Answer:
        """Send a request, again without the fields that a refusal is about, and return the answer.

        Args:
            send: sends the request without these fields.
            is_about: returns the fields that a refusal of the request without these may be about; empty raises the
                refusal.
            refusals: exceptions that are refusals.
        """
        refused_fields = self._refused_fields
        while True:
            try:
                answer = await send(refused_fields)
            except refusals as error:
                more = is_about(error, refused_fields) - refused_fields
                if not more:
                    raise
                refused_fields |= more
            else:
                self._remember(refused_fields)
                return answer

    def _remember(self, refused_fields: frozenset[str]) -> None:
        if new := refused_fields - self._refused_fields:
            self._refused_fields |= new
            _log.warning("%s refuses %s and is asked without", self._name, ", ".join(sorted(new)))


def without(request: Mapping[str, Any], refused: Collection[str]) -> dict[str, Any]:
    """Return the request without these fields; a refused limit of tokens gets its other name.

    >>> without({"model": "m", "max_tokens": 9, "seed": 1}, {"max_tokens", "seed"})
    {'model': 'm', 'max_completion_tokens': 9}
    """
    names = (name for name in request if name not in refused or name in _TOKEN_LIMITS)
    return {_other_name(name) if name in refused else name: request[name] for name in names}


def refused_fields(refusal: str, request: Mapping[str, Any], *, optional: Collection[str]) -> frozenset[str]:
    """Return the fields of the request that the refusal names, among the optional ones and the limit of tokens.

    Args:
        refusal: text of an HTTP 4xx.
        request: as it was sent.
        optional: fields that may be left out.

    >>> sorted(refused_fields('Unknown name "seed": Cannot find field.', {"seed": 1}, optional=["seed"]))
    ['seed']
    """
    candidates = {*optional, *_TOKEN_LIMITS} & request.keys()
    return frozenset(name for name in candidates if re.search(rf"\b{name}\b", refusal[:_MAX_READ]))


def _other_name(name: str) -> str:
    first, second = _TOKEN_LIMITS
    return second if name == first else first

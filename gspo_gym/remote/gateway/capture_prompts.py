"""Build a request's token ids: the tokens of the earlier call that it continues, and those of its new messages.

A caller sends the whole conversation every time, and clients do not repeat it letter for letter: they drop the
reasoning, rename the ids of tool calls, write null for an empty content, trim an answer. Answers are compared without
those, while the caller's own messages have to be equal. What the model reads never comes from such a comparison:
nothing that was sampled is encoded again. Where the chat template rewrites earlier turns, or nothing is continued, the
whole prompt is rendered afresh; `capture_build.py` begins a new segment there, as a rollout does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.chat.renderer import Renderer, cannot_fit
from gspo_gym.errors import ConfigError, ContextOverflowError, nearest_name
from gspo_gym.remote.gateway.capture import REQUIRED, CapturedCall, ChatCall, CompletionCall
from gspo_gym.types import Int32Array, Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one call.

    Attributes:
        parent, appends, new_messages: as in `CapturedCall`.
        token_ids: all of it.
        context_ids: all of it, or if `appends`, what follows the parent's prompt and sampled tokens.
        opening: the last of `context_ids`, if they begin the answer itself (a forced tool call).
        digest: equal for the same conversation.
    """

    parent: CapturedCall | None
    appends: bool
    new_messages: tuple[Message, ...]
    token_ids: Int32Array
    context_ids: Int32Array
    opening: list[int]
    digest: bytes


def chat_prompt(
    call: ChatCall,
    tools_key: str,
    *,
    renderer: Renderer,
    conversations: Conversations,
    tokenizer: Any,  # transformers is untyped
    max_model_len: int,
) -> Prompt:
    """Return the prompt of a conversation.

    Raises:
        ContextOverflowError: it leaves no room for one token. TemplateError: the template cannot render it.
        ConfigError: there are no messages, or the tool that must be called is not offered, or cannot be called in an
            answer that must be JSON.
    """
    if not call.messages:
        raise ConfigError("messages: expected at least one, got none")
    if call.tool_choice is not None and call.json_schema is not None:
        raise ConfigError("response_format: expected none beside a tool that must be called, got a JSON schema")
    # Checked before rendering, which takes long for a text that is far too long.
    conversation = conversations.find(call.messages, tools_key)
    if cannot_fit(conversation.new, tokenizer, max_model_len):
        raise overflow(f"{sum(len(message.content) for message in conversation.new)} characters", max_model_len)
    # The prompt begins the call as the template would write it, and the model samples the rest. The opening counts as
    # context, so such an answer can be trained on; it may fail to be a call, which is an error and never repaired.
    opening = renderer.call_opening(forced_tool(call.tool_choice, call.tools)) if call.tool_choice else []
    if conversation.parent is None:
        added_ids, appends = renderer.start(conversation.new), False
    else:
        # A sampled stop token ends the turn in the template's words; a cut one must be closed first.
        is_closed = int(conversation.parent.completion.token_ids[-1]) in renderer.stop_token_ids
        continuation = renderer.continue_from(conversation.known, conversation.new, closed=is_closed)
        added_ids, appends = continuation.token_ids, not continuation.is_new_segment
    whole = context = np.array([*added_ids, *opening], dtype=np.int32)
    if conversation.parent is not None and appends:
        whole = np.concatenate([conversations.tokens_of(conversation.parent), context])
    prompt = Prompt(
        conversation.parent, appends, conversation.new, whole, context, opening, conversation.request_digest
    )
    return _fitting(prompt, max_model_len)


def raw_prompt(
    call: CompletionCall, *, renderer: Renderer, conversations: Conversations, tokenizer: Any, max_model_len: int
) -> Prompt:
    """Return the prompt of a request without a template; it continues a call if it begins with exactly its tokens.

    Raises:
        ContextOverflowError: as for `chat_prompt`. ConfigError: the prompt is empty, or holds an invalid id.
    """
    if isinstance(call.prompt, str):
        if cannot_fit([Message("user", call.prompt)], tokenizer, max_model_len):
            raise overflow(f"{len(call.prompt)} characters", max_model_len)
        ids = [int(token_id) for token_id in tokenizer(call.prompt)["input_ids"]]
    else:
        ids = list(call.prompt)
        _require_ids(ids, below=2**31, vocab_size=len(tokenizer))
    if not ids:
        raise ConfigError("prompt: expected a text or token ids, got nothing")
    whole = np.array(ids, dtype=np.int32)
    parent, num_known = _longest_beginning(whole, conversations)
    context = whole[num_known:]
    # What was sampled before may be a row that fills a vocabulary up, and comes back as it is.
    _require_ids(ids[num_known:], below=len(tokenizer), vocab_size=len(tokenizer))
    # People read the record; ids of any client need not be text.
    new = (Message("user", renderer.decode(context)),) if len(context) else ()
    digest = b",".join(str(token_id).encode() for token_id in ids)
    return _fitting(Prompt(parent, parent is not None, new, whole, context, [], digest), max_model_len)


def overflow(size: str, max_model_len: int) -> ContextOverflowError:
    """Return the error for a prompt of so many tokens or characters."""
    return ContextOverflowError(
        f"the prompt has {size}, which leaves no room for an answer in max_model_len = {max_model_len}; shorten the "
        "conversation"
    )


def _fitting(prompt: Prompt, max_model_len: int) -> Prompt:
    if len(prompt.token_ids) >= max_model_len:
        raise overflow(f"{len(prompt.token_ids)} tokens", max_model_len)
    return prompt


def _require_ids(ids: Sequence[Any], *, below: int, vocab_size: int) -> None:  # Any: whatever a client sent
    wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < below]
    if wrong:
        raise ConfigError(f"prompt: expected token ids in [0, {vocab_size}), got {wrong[0]!r}")


def _longest_beginning(ids: Int32Array, conversations: Conversations) -> tuple[CapturedCall | None, int]:
    calls_with_tokens = [(call, conversations.tokens_of(call)) for call in conversations.raw_calls()]
    beginnings = [
        (call, len(tokens)) for call, tokens in calls_with_tokens if np.array_equal(ids[: len(tokens)], tokens)
    ]
    return max(beginnings, key=lambda beginning: beginning[1], default=(None, 0))


def forced_tool(tool_choice: str, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the tool that must be called; None if it may be any of several.

    Raises:
        ConfigError: no tool of that name is offered, or none at all.
    """
    names = tool_names(tools)
    if not names:
        raise ConfigError(f"tool_choice {tool_choice!r}: expected tools to choose from, got none; send them in `tools`")
    if tool_choice == REQUIRED:
        return names[0] if len(names) == 1 else None
    if tool_choice not in names:
        raise ConfigError(f"tool_choice: no tool {tool_choice!r} is offered; {nearest_name(tool_choice, names)}")
    return tool_choice


def call_problem(answer: Message, name: str | None, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Explain the fault of an answer that had to call the tool `name` (None: any); None if nothing."""
    expected_call = f"a call of {name}" if name is not None else "a call of one of " + ", ".join(tool_names(tools))
    called_names = [call.name for call in answer.tool_calls]
    if not called_names:
        return f"expected {expected_call}, got a text"
    allowed_names = tool_names(tools) if name is None else [name]
    if called_names[0] not in allowed_names:
        return f"expected {expected_call}, got a call of {called_names[0]}"
    return None


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of OpenAI function schemas, in order."""
    return [str(tool.get("function", tool).get("name")) for tool in tools]  # some clients send the function alone


_ENCODER = json.JSONEncoder(sort_keys=True)
_Place = tuple[int, int]  # of a tool call: the number of its message, and its number within


@dataclass(frozen=True, slots=True)
class Continued:
    """A request as a continuation of a known conversation.

    Attributes:
        parent: the call that it continues, None if none.
        known: the parent's conversation with its answer, as first said; () without a parent.
        new: the messages after it, with the parent's ids of tool calls.
        request_digest: equal for the same conversation.
    """

    parent: CapturedCall | None
    known: tuple[Message, ...]
    new: tuple[Message, ...]
    request_digest: bytes


class Conversations:
    """The answered calls of one session, by their conversations. Grows only."""

    def __init__(self) -> None:
        self._calls: dict[int, CapturedCall] = {}
        self._by_digest: dict[bytes, list[int]] = {}
        self._last = _Digested("")

    def add(self, call: CapturedCall, request_digest: bytes) -> None:
        """Add a call that others may continue."""
        self._calls[call.index] = call
        if call.kind == "completion":
            return
        # As its answer will stand in a later request; tool calls have no places before it.
        key = _key_of(call.answer, {})
        self._by_digest.setdefault(_extend_digest(request_digest, key), []).append(call.index)

    def find(self, messages: Sequence[Message], tools_key: str) -> Continued:
        """Return the longest known conversation that `messages` begins with, if something follows it.

        Of several with the same words take the one with the same reasoning, if the caller repeats any, then the last
        begun.
        """
        # A request mostly repeats the last one, and says something more.
        if not self._last.begins(messages, tools_key):
            self._last = _Digested(tools_key)
        digests = self._last.extended_by(messages)
        # The longest first. Only an assistant's message can be the answer of a call.
        for count in range(len(messages) - 1, 0, -1):
            candidates = self._by_digest.get(digests[count]) if messages[count - 1].role == "assistant" else None
            if candidates:
                parent = self._choose_parent(candidates, messages[count - 1].reasoning_content)
                parent_messages = self.messages_of(parent)
                return Continued(parent, parent_messages, _restore_call_ids(messages, parent_messages), digests[-1])
        return Continued(None, (), tuple(messages), digests[-1])

    def raw_calls(self) -> list[CapturedCall]:
        """Return the calls without a template."""
        return [call for call in self._calls.values() if call.kind == "completion"]

    def messages_of(self, call: CapturedCall) -> tuple[Message, ...]:
        """Return the conversation that a call continued, with what it added and its answer."""
        line = reversed(list(self._line_of(call)))
        return tuple(message for line_call in line for message in (*line_call.new_messages, line_call.answer))

    def tokens_of(self, call: CapturedCall) -> Int32Array:
        """Return the whole prompt of a call and its sampled tokens."""
        parts: list[Int32Array] = []
        for line_call in self._line_of(call):
            parts += (line_call.completion.token_ids, line_call.context_ids)
            if not line_call.appends:
                break
        return np.concatenate(parts[::-1])

    def _line_of(self, call: CapturedCall) -> Iterable[CapturedCall]:
        line: CapturedCall | None = call
        while line is not None:
            yield line
            line = None if line.parent is None else self._calls[line.parent]

    def _choose_parent(self, candidates: Sequence[int], reasoning: str | None) -> CapturedCall:
        # The same reasoning, if the caller repeats any: several answers may have the same words.
        calls = [self._calls[index] for index in candidates]
        same = [call for call in calls if call.answer.reasoning_content == reasoning] if reasoning is not None else []
        return max(same or calls, key=lambda call: call.index)


class _Digested:
    """The messages of a request, and a digest of every beginning of them."""

    def __init__(self, tools_key: str) -> None:
        self._tools_key, self._messages = tools_key, list[Message]()
        # The tools count: another set of tools begins another conversation.
        self._digests = [_extend_digest(b"", tools_key)]
        self._places: dict[str, _Place] = {}

    def begins(self, messages: Sequence[Message], tools_key: str) -> bool:
        """Return whether a request begins with these message objects (of one reader), under the same tools."""
        return (
            tools_key == self._tools_key
            and len(messages) >= len(self._messages)
            and all(map(operator.is_, messages, self._messages))
        )

    def extended_by(self, messages: Sequence[Message]) -> list[bytes]:
        """Return the digests of a request that begins with these messages, and keep what it adds."""
        for number, message in enumerate(messages[len(self._messages) :], len(self._messages)):
            self._digests.append(_extend_digest(self._digests[-1], _key_of(message, self._places)))
            self._places |= {call.id: (number, within) for within, call in enumerate(message.tool_calls)}
            self._messages.append(message)
        return self._digests


def _extend_digest(digest: bytes, key: str) -> bytes:
    return hashlib.sha256(digest + key.encode(errors="surrogatepass")).digest()


def _key_of(message: Message, places: dict[str, _Place]) -> str:
    if message.role == "assistant":
        calls = [[call.name, _plain(call.arguments)] for call in message.tool_calls]
        # Without reasoning and ids, and trimmed: clients change these.
        identifying_parts: list[Any] = [message.role, message.content.strip(), calls]  # Any: JSON
    elif message.role == "tool":
        identifying_parts = [
            message.role,
            message.content,
            places.get(message.tool_call_id or "", message.tool_call_id),
        ]
    else:
        identifying_parts = [message.role, message.content, message.name]
    return _ENCODER.encode(identifying_parts)


def _plain(value: Any) -> Any:
    # Clients may change 1.0 to 1.
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _restore_call_ids(messages: Sequence[Message], parent_messages: tuple[Message, ...]) -> tuple[Message, ...]:
    ids: dict[str, str] = {}
    for sent_message, first in zip(messages, parent_messages, strict=False):
        ids |= {call.id: ours.id for call, ours in zip(sent_message.tool_calls, first.tool_calls, strict=False)}
    return tuple(
        dataclasses.replace(message, tool_call_id=ids.get(message.tool_call_id or "", message.tool_call_id))
        for message in messages[len(parent_messages) :]
    )

"""Find the earlier call that a conversation continues, by what its caller repeats of it.

A caller sends the whole conversation every time, and clients do not repeat it letter for letter: they drop the
reasoning, rename the ids of tool calls, write null for an empty content, trim an answer. Answers are compared without
those, while the caller's own messages have to be equal. What the model reads never comes from such a comparison: the
tokens of the earlier call stand as they were sampled, and its messages as they were first said.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.remote.gateway.capture import CapturedCall
from gspo_gym.types import Int32Array, Message

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

    def add(self, call: CapturedCall, request_digest: bytes) -> None:
        """Add a call that others may continue."""
        self._calls[call.index] = call
        if call.kind == "completion":
            return
        key = _key_of(call.answer, {})
        self._by_digest.setdefault(_extended(request_digest, key), []).append(call.index)

    def find(self, messages: Sequence[Message], tools_key: str) -> Continued:
        """Return the longest known conversation that `messages` begins with, if something follows it.

        Of several with the same words take the one with the same reasoning, if the caller repeats any, then the last
        begun.
        """
        digests = list(_digests(messages, tools_key))
        for count in range(len(messages) - 1, 0, -1):
            candidates = self._by_digest.get(digests[count]) if messages[count - 1].role == "assistant" else None
            if candidates:
                parent = self._chosen(candidates, messages[count - 1].reasoning_content)
                known = self.messages_of(parent)
                return Continued(parent, known, _renamed(messages, known), digests[-1])
        return Continued(None, (), tuple(messages), digests[-1])

    def raw_calls(self) -> list[CapturedCall]:
        """Return the calls without a template."""
        return [call for call in self._calls.values() if call.kind == "completion"]

    def messages_of(self, call: CapturedCall) -> tuple[Message, ...]:
        """Return the conversation that a call continued, with what it added and its answer."""
        line = reversed(list(self._line_of(call)))
        return tuple(message for one in line for message in (*one.new_messages, one.answer))

    def tokens_of(self, call: CapturedCall) -> Int32Array:
        """Return the whole prompt of a call and its sampled tokens."""
        parts: list[Int32Array] = []
        for one in self._line_of(call):
            parts += (one.completion.token_ids, one.context_ids)
            if not one.appends:
                break
        return np.concatenate(parts[::-1])

    def _line_of(self, call: CapturedCall) -> Iterable[CapturedCall]:
        """Yield the call, its parent, and so on."""
        line: CapturedCall | None = call
        while line is not None:
            yield line
            line = None if line.parent is None else self._calls[line.parent]

    def _chosen(self, candidates: Sequence[int], reasoning: str | None) -> CapturedCall:
        calls = [self._calls[index] for index in candidates]
        same = [call for call in calls if call.answer.reasoning_content == reasoning] if reasoning is not None else []
        return max(same or calls, key=lambda call: call.index)


def _digests(messages: Sequence[Message], tools_key: str) -> Iterable[bytes]:
    """Yield the digest of the tools alone, then of the conversation up to each message."""
    digest = _extended(b"", tools_key)
    yield digest
    places: dict[str, _Place] = {}
    for number, message in enumerate(messages):
        digest = _extended(digest, _key_of(message, places))
        places |= {call.id: (number, within) for within, call in enumerate(message.tool_calls)}
        yield digest


def _extended(digest: bytes, key: str) -> bytes:
    return hashlib.sha256(digest + key.encode(errors="surrogatepass")).digest()


def _key_of(message: Message, places: dict[str, _Place]) -> str:
    """Return what has to be equal for two messages to match; `places` of tool calls by their present ids."""
    if message.role == "assistant":
        calls = [[call.name, _plain(call.arguments)] for call in message.tool_calls]
        said: list[Any] = [message.role, message.content.strip(), calls]  # Any: JSON
    elif message.role == "tool":
        said = [message.role, message.content, places.get(message.tool_call_id or "", message.tool_call_id)]
    else:
        said = [message.role, message.content, message.name]
    return json.dumps(said, sort_keys=True)


def _plain(value: Any) -> Any:
    """Return JSON with whole floats as integers, because clients may change 1.0 to 1."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _renamed(messages: Sequence[Message], known: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages behind those known, with tool results under the ids of the known calls."""
    ids: dict[str, str] = {}
    for sent, first in zip(messages, known, strict=False):
        ids |= {call.id: ours.id for call, ours in zip(sent.tool_calls, first.tool_calls, strict=False)}
    return tuple(
        dataclasses.replace(message, tool_call_id=ids.get(message.tool_call_id or "", message.tool_call_id))
        for message in messages[len(known) :]
    )

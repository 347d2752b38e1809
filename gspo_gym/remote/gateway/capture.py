"""What the gateway writes down: the calls of one session, exactly as they were asked and answered.

Records only. `gateway_session.py` makes them, `capture_matching.py` finds which call continues which, and
`capture_build.py` turns a frozen session into the parts of a trajectory. No HTTP: `gateway_app.py` stands before it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo_gym.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EnginePoisonedError,
    TemplateError,
    UsageError,
)
from gspo_gym.types import Completion, Int32Array, Message, ParseStatus

ToolChoice = str | None
"""None: the model decides. "required": some tool must be called. Else the name of the tool that must be called."""

REQUIRED = "required"
FailureKind = Literal["overflow", "template", "config", "limit", "engine", "poisoned", "cancelled", "open"]
WireFinish = Literal["stop", "length", "tool_calls"]


class Untrained(enum.Enum):
    """Why a call is not trained on."""

    FAILED = "failed"  # there is no completion
    NOT_AWAITED = "not awaited"  # there is none, since the app ended its rollout while the call was open
    UNTRAINED_BY_REQUEST = "untrained by request"  # the caller said so
    CONSTRAINED = "constrained"  # a schema narrowed the distribution, so that the logprobs are of another one
    OTHER_SAMPLING = "other sampling"  # its temperature or top_p were its own; a batch is scored under one
    UNDELIVERED = "undelivered"  # its answer reached nobody, and no retry asked for it
    AUXILIARY = "auxiliary"  # beside the task: a title or a summary


class SessionClosedError(UsageError):
    """The session was frozen or aborted: nothing more is sampled for it."""


class SessionLimitError(UsageError):
    """The session has made as many calls, or holds as many tokens, as it may."""


class ForcedCallError(EngineError):
    """A tool had to be called, and what was sampled is no valid call of it. `call` is what was captured."""

    def __init__(self, message: str, call: CapturedCall) -> None:
        super().__init__(message)
        self.call = call


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One request for an answer to a conversation.

    Attributes:
        messages: the whole conversation, as the caller knows it.
        tools: OpenAI function schemas (Any: JSON).
        max_tokens: most tokens to answer with; None: as many as the session allows.
        temperature, top_p: other than the session's; None: the session's.
        stop: texts that end the answer and are not part of it.
        tool_choice: see `ToolChoice`.
        json_schema: JSON text that the answer must obey; None: anything.
        is_trained: what the caller wants; None leaves it to the rules.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    tool_choice: ToolChoice = None
    json_schema: str | None = None
    is_trained: bool | None = None


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One request to continue a text or token ids as they stand, without a chat template. Fields as in `ChatCall`."""

    prompt: str | Sequence[int]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    is_trained: bool | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """One call that was answered.

    Attributes:
        index: how many calls began before it in its session, failed ones included.
        kind: "chat", or "completion" for a prompt without a template.
        number: which of the session's completions it is; its seed is child_seed(sampling_seed, "turn", number).
        parent: the index of the call whose conversation it continues; None if of none.
        appends: its prompt is the parent's prompt, the parent's sampled tokens and `context_ids`; otherwise
            `context_ids` is the whole prompt.
        context_ids: int32, see `appends`; nobody sampled them.
        num_prompt_tokens: of the whole prompt.
        new_messages: what it adds to the parent's conversation; all messages if there is no parent.
        answer: what the model said; where that cannot be parsed, the whole text is its content.
        parse: what became of the text. error: what is wrong with it, in words that the model can act on, else None.
        finish_reason: in OpenAI's words.
        completion: exactly what was sampled. Of a forced tool call, the part behind its opening.
        tools_key: the tools offered, as JSON text; "" for none.
        request_key: equal for calls that asked for the same thing.
        num_begun: how many calls of the session had begun when it was answered, itself included.
        untrained: why it cannot be trained on whatever the others are; None if it can.
        is_trained: what the caller wanted.
        is_delivered: its answer reached the caller, as far as is known.
    """

    index: int
    kind: Literal["chat", "completion"]
    number: int
    parent: int | None
    appends: bool
    context_ids: Int32Array
    num_prompt_tokens: int
    new_messages: tuple[Message, ...]
    answer: Message
    parse: ParseStatus
    error: str | None
    finish_reason: WireFinish
    completion: Completion
    tools_key: str
    request_key: str
    num_begun: int
    untrained: Untrained | None = None
    is_trained: bool | None = None
    is_delivered: bool = True

    def __repr__(self) -> str:
        tokens = f"{self.num_prompt_tokens} tokens read, {self.num_sampled_tokens} sampled"
        return f"CapturedCall(<{self.index}, {self.kind}, {tokens}, {self.finish_reason}>)"

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.completion.token_ids)


@dataclass(frozen=True, slots=True)
class FailedCall:
    """One call that has no answer.

    `kind`: "overflow" (the prompt does not fit), "template" (the conversation cannot be rendered), "config" (it asks
    for what cannot be done here), "limit" (the session holds as much as it may), "engine", "poisoned" (the engine will
    never answer again), "cancelled" (its caller gave up, or came too late) or "open" (its session ended first).
    """

    index: int
    kind: FailureKind
    error: str


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A session that has ended: its calls in the order in which they began.

    `engine_seconds` is the time that callers waited for the engine, one after another.
    """

    session: str
    sampling_seed: int
    calls: tuple[CapturedCall, ...]
    engine_seconds: float
    failed: tuple[FailedCall, ...] = ()


def failure_kind(error: BaseException) -> FailureKind:
    """The kind of failure that an exception is; what nobody foresaw is the engine's."""
    for kinds, kind in _KINDS:
        if isinstance(error, kinds):
            return kind
    return "engine"


_KINDS: tuple[tuple[type[BaseException], FailureKind], ...] = (
    (ContextOverflowError, "overflow"),
    (TemplateError, "template"),
    (ConfigError, "config"),
    (SessionLimitError, "limit"),
    (SessionClosedError, "cancelled"),
    (asyncio.CancelledError, "cancelled"),
    (EnginePoisonedError, "poisoned"),
)

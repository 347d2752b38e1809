"""Records of a session's calls, exactly as they were asked and answered, and the reading of sampled tokens as answers.

`session.py` makes the records, `capture_prompts.py` finds which call continues which, and `capture_build.py` turns a
frozen session into the parts of a trajectory.
"""

from __future__ import annotations

import asyncio
import enum
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo_gym.chat.parsing import ParseFailure
from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EnginePoisonedError,
    RecordError,
    TemplateError,
    UsageError,
)
from gspo_gym.rollout import record
from gspo_gym.types import Completion, FinishReason, Int32Array, Message, ParseStatus

ToolChoice = str | None
"""None: the model decides. "required": some tool must be called. Else the name of the tool that must be called."""

REQUIRED = "required"
FailureKind = Literal["overflow", "template", "config", "limit", "engine", "poisoned", "cancelled", "open"]
WireFinish = Literal["stop", "length", "tool_calls"]


class Untrained(enum.Enum):
    """The reason for not training on a call."""

    FAILED = "failed"  # there is no completion
    NOT_AWAITED = "not awaited"  # there is none, since the app ended its rollout while the call was open
    UNTRAINED_BY_REQUEST = "untrained by request"  # the caller said so
    CONSTRAINED = "constrained"  # a schema narrowed the distribution, so that the logprobs are of another one
    OTHER_SAMPLING = "other sampling"  # it set a field of `Sampling` otherwise; a batch is scored under one
    UNDELIVERED = "undelivered"  # its answer reached nobody, and no retry asked for it
    AUXILIARY = "auxiliary"  # beside the task: a title or a summary


class SessionClosedError(UsageError):
    """The session was frozen or aborted: nothing more is sampled for it."""


class SessionLimitError(UsageError):
    """The session has reached its limit of calls or tokens."""


class ForcedCallError(EngineError):
    """A tool had to be called, and the sampled text is no valid call of it. `call` is what was captured."""

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
        sampling: fields of `Sampling` that the caller sets, by name (Any: integers and floats); the others are the
            session's.
        stop: texts that end the answer and are not part of it.
        tool_choice: see `ToolChoice`.
        json_schema: JSON text that the answer must obey; None: anything.
        is_trained: what the caller wants; None leaves it to the rules.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    tool_choice: ToolChoice = None
    json_schema: str | None = None
    is_trained: bool | None = None


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One request to continue a text or token ids without a chat template. Fields as in `ChatCall`."""

    prompt: str | Sequence[int]
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    is_trained: bool | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """One answered call.

    Attributes:
        index: how many calls began before it in its session, failed ones included.
        kind: "chat", or "completion" for a prompt without a template.
        number: its number among the session's completions; its seed is child_seed(sampling_seed, "turn", number).
        parent: the index of the call whose conversation it continues; None if of none.
        appends: its prompt is the parent's prompt, the parent's sampled tokens and `context_ids`; otherwise
            `context_ids` is the whole prompt.
        context_ids: int32, see `appends`; not sampled.
        num_prompt_tokens: of the whole prompt.
        new_messages: what it adds to the parent's conversation; all messages if there is no parent.
        answer: the model's message; if it cannot be parsed, the whole text is its content.
        parse: how parsing ended. error: the fault of the text, in words that the model can act on, else None.
        finish_reason: in OpenAI's words.
        completion: exactly what was sampled. Of a forced tool call, the part behind its opening.
        tools_key: the tools offered, as JSON text; "" for none.
        request_key: equal for calls that asked for the same thing.
        num_begun: how many calls of the session had begun when it was answered, itself included.
        untrained: the reason, if it cannot be trained on by itself; else None.
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
    """One call without an answer.

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
    """Return the kind of failure of an exception; an unexpected one counts as the engine's."""
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


@dataclass(frozen=True, slots=True)
class Answer:
    """The reading of a completion; fields as in `CapturedCall`."""

    completion: Completion
    message: Message
    parse: ParseStatus
    error: str | None
    finish_reason: WireFinish


def require_possible(completion: Completion, *, max_tokens: int, renderer: Renderer) -> None:
    """Check that an engine's claimed sample is possible.

    Raises:
        EngineError: it is not.
    """
    try:
        record.require_possible(completion.token_ids, max_tokens=max_tokens, stop_token_ids=renderer.stop_token_ids)
    except RecordError as error:
        raise EngineError(f"the engine's answer cannot be right: {error}") from error


def read_chat(completion: Completion, *, renderer: Renderer, opening: Sequence[int], stops: Sequence[str]) -> Answer:
    """Read the message of a completion behind `opening`; if it cannot be parsed, its whole text is the content."""
    completion, text, is_cut = _cut_at_stops(completion, stops, renderer, opening)
    is_stopped = is_cut or int(completion.token_ids[-1]) in renderer.stop_token_ids
    result = renderer.parse(text, is_truncated=not is_stopped)
    finish: WireFinish = "stop" if is_stopped else "length"
    if isinstance(result, ParseFailure):
        # What cannot be parsed is still the model's turn: its text is the content.
        return Answer(completion, Message("assistant", text), result.status, result.error, finish)
    finish = "tool_calls" if result.tool_calls else finish
    return Answer(completion, result, ParseStatus.OK, None, finish)


def read_text(completion: Completion, *, renderer: Renderer, stops: Sequence[str]) -> Answer:
    """Read the plain text of a completion."""
    completion, text, is_cut = _cut_at_stops(completion, stops, renderer, ())
    is_stopped = is_cut or int(completion.token_ids[-1]) in renderer.stop_token_ids
    return Answer(completion, Message("assistant", text), ParseStatus.OK, None, "stop" if is_stopped else "length")


def _cut_at_stops(
    completion: Completion, stops: Sequence[str], renderer: Renderer, opening: Sequence[int]
) -> tuple[Completion, str, bool]:
    # The rest is an exact sample of a policy that stops there, because whether it stops depends on its own tokens only.
    # Its finish reason is STOP, whatever the engine said of the tokens that were cut off.
    ids = completion.token_ids.tolist()
    whole = renderer.decode([*opening, *ids])
    # Searched in the answer alone: a stop string may stand in the opening.
    if not stops or not _places(renderer.decode(ids), stops):
        return completion, whole, False
    # Of the shortest beginning that holds a stop string; longer ones hold it, too.
    count = bisect_left(range(len(ids)), True, key=lambda count: bool(_places(renderer.decode(ids[:count]), stops)))
    beginning = renderer.decode(ids[:count])
    num_lost = len(beginning) - min(_places(beginning, stops))
    cut = Completion(
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        finish_reason=FinishReason.STOP,
        weight_version=completion.weight_version[:count],
    )
    return cut, renderer.decode([*opening, *ids[:count]])[:-num_lost], True


def _places(text: str, stops: Sequence[str]) -> list[int]:
    return [place for stop in stops if stop and (place := text.find(stop)) >= 0]

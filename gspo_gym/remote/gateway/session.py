"""Sessions of the gateway: each answers an agent's calls in one attempt at one episode, and records the tokens.

A session renders the agent's messages, samples from the engine exactly as `rollout.actors.EngineActor` does, and keeps
what was sampled; `capture_build.py` makes a trajectory of it afterwards. `Gateway` finds the open sessions on one
engine by the ids given to agents. No HTTP here (`app.py`).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gspo_gym.chat.plain import ToolsIn
from gspo_gym.chat.renderer import Renderer, RendererCache
from gspo_gym.engine.base import Capabilities, Engine, SamplingParams
from gspo_gym.errors import ConfigError, EngineError, UnknownNameError
from gspo_gym.remote.gateway.capture import (
    Answer,
    Capture,
    CapturedCall,
    ChatCall,
    CompletionCall,
    FailedCall,
    ForcedCallError,
    SessionClosedError,
    SessionLimitError,
    Untrained,
    failure_kind,
    read_chat,
    read_text,
    require_possible,
)
from gspo_gym.remote.gateway.capture_prompts import (
    Conversations,
    Prompt,
    call_problem,
    chat_prompt,
    forced_tool,
    raw_prompt,
)
from gspo_gym.seeding import child_seed
from gspo_gym.types import Completion, Sampling, TokenIds

SESSION_IS_OVER = "the session is over: its episode has ended, and nothing more is sampled for it"
_MAX_ERROR_CHARACTERS = 500
_ID_BYTES = 24  # 192 bits, because an id is all that opens a session


class Sampler(Protocol):
    """The part of an `Engine` that a session uses."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion: ...

    async def abort(self, session_id: str) -> None: ...

    async def end_session(self, session_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class GatewaySessionSettings:
    """One attempt at one episode.

    Attributes:
        name: of the attempt at the engine, as `EpisodeRequest.session_id`; never shown to the agent.
        sampling_seed: of the episode; a call derives another from it.
        max_output_tokens: of one answer. max_model_len: prompt plus answer.
        sampling: how tokens are drawn; a call may set any of its fields otherwise, and is then not trained on.
        chat_template_kwargs: handed to the chat template; None: the gateway's own.
        max_calls: answered and failed ones together. max_captured_tokens: held for the session, prompts included.
        call_timeout_seconds: for one answer, waiting included; None waits for ever.
    """

    name: str
    sampling_seed: int
    max_output_tokens: int
    max_model_len: int
    sampling: Sampling = field(default_factory=Sampling)
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_calls: int = 1024
    max_captured_tokens: int = 4_000_000
    call_timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_output_tokens", "max_calls", "max_captured_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"GatewaySessionSettings.{name}: expected at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ConfigError(f"GatewaySessionSettings.max_model_len: expected at least 2, got {self.max_model_len}")


class GatewaySession:
    """One attempt at one episode; made by `Gateway.open_session`.

    Calls may overlap. A call's seed depends on how many successful calls began before it: a failed call gives its
    number to the next one, and asking again gives the tokens that the first time would have given.

    Attributes:
        id: by which the agent finds it; a secret.
        settings: as given.
    """

    def __init__(
        self,
        settings: GatewaySessionSettings,
        *,
        engine: Sampler,
        renderers: RendererCache,
        clock: Callable[[], float],
        forget: Callable[[str], None],
    ) -> None:
        self.id = secrets.token_urlsafe(_ID_BYTES)
        self.settings = settings
        self._engine = engine
        self._renderers = renderers
        self._clock = clock
        self._forget = forget
        self._conversations = Conversations()
        self._calls: dict[int, CapturedCall] = {}
        self._failed_calls: dict[int, FailedCall] = {}
        self._in_flight: set[int] = set()
        self._undelivered_calls: set[int] = set()
        self._numbers: set[int] = set()  # of completions, sampled or being sampled
        self._num_begun = 0
        self._num_tokens = 0
        self._engine_seconds = 0.0
        self._is_closed = False
        self._capture: Capture | None = None

    @property
    def is_closed(self) -> bool:
        """Return whether it was frozen or aborted."""
        return self._is_closed

    async def chat(self, call: ChatCall) -> CapturedCall:
        """Answer a conversation. An answer that cannot be parsed is returned, too: see `CapturedCall.parse`.

        Raises:
            SessionClosedError: the session is over, or ended meanwhile.
            SessionLimitError: it has reached its limit of calls or tokens.
            ContextOverflowError: the conversation leaves no room for one token.
            TemplateError: the chat template cannot render it.
            ConfigError: it asks for what this engine, template or session cannot do.
            ForcedCallError: a tool had to be called, and was not; the call is captured all the same.
            EngineTimeoutError, EnginePoisonedError, EngineError: as `Engine.generate`.
        """
        index = self._begin()
        with self._failing(index):
            tools_key = sys.intern(json.dumps(list(call.tools)) if call.tools else "")  # one for all calls
            renderer = self._renderers.for_tools(call.tools)
            prompt = chat_prompt(
                call,
                tools_key,
                renderer=renderer,
                conversations=self._conversations,
                tokenizer=self._renderers.tokenizer,
                max_model_len=self.settings.max_model_len,
            )
            number, completion = await self._sample(call, prompt, renderer)
            answer = read_chat(completion, renderer=renderer, opening=prompt.opening, stops=call.stop)
            captured_call = self._keep(call, prompt, answer, index=index, number=number, tools_key=tools_key)
        # After it was kept: the tokens were sampled, and the answer stays the same for a retry.
        if call.tool_choice is not None:
            name = forced_tool(call.tool_choice, call.tools)
            if (problem := captured_call.error or call_problem(captured_call.answer, name, call.tools)) is not None:
                raise ForcedCallError(f"tool_choice {call.tool_choice!r}: {problem}", captured_call)
        return captured_call

    async def complete(self, call: CompletionCall) -> CapturedCall:
        """Continue a text or token ids without a template; the answer is plain text.

        Raises:
            as `chat`, without TemplateError and ForcedCallError.
        """
        index = self._begin()
        with self._failing(index):
            renderer = self._renderers.for_tools(())
            prompt = raw_prompt(
                call,
                renderer=renderer,
                conversations=self._conversations,
                tokenizer=self._renderers.tokenizer,
                max_model_len=self.settings.max_model_len,
            )
            number, completion = await self._sample(call, prompt, renderer)
            answer = read_text(completion, renderer=renderer, stops=call.stop)
            return self._keep(call, prompt, answer, index=index, number=number, tools_key="")

    def note_delivery(self, index: int, *, is_delivered: bool) -> None:
        """Record whether the answer of a call reached its caller. By default it did."""
        (self._undelivered_calls.discard if is_delivered else self._undelivered_calls.add)(index)

    def renderer_of(self, call: CapturedCall) -> Renderer:
        """Return the renderer with which a call was answered, for the texts of its tokens."""
        return self._renderers.for_tools(json.loads(call.tools_key) if call.tools_key else ())

    async def freeze(self) -> Capture:
        """End the session and return all that was captured. Calls in flight are cancelled and count as failed.

        Freezing again returns the same capture.

        Raises:
            SessionClosedError: it was aborted.
            EngineError: the engine failed to forget the session; the next freeze returns the capture.
        """
        if self._capture is not None:
            return self._capture
        self._require_open()
        # They are part of the record: a reward may have been earned without their answers.
        given_up = (FailedCall(i, "open", "in flight when the session ended") for i in self._in_flight)
        failed_calls = [*self._failed_calls.values(), *given_up]
        self._capture = Capture(
            session=self.settings.name,
            sampling_seed=self.settings.sampling_seed,
            calls=tuple(
                replace(call, is_delivered=False) if index in self._undelivered_calls else call
                for index, call in sorted(self._calls.items())
            ),
            failed=tuple(sorted(failed_calls, key=lambda call: call.index)),
            engine_seconds=self._engine_seconds,
        )
        await self._end()
        return self._capture

    async def abort(self) -> None:
        """End the session and forget what was captured. Aborting again, or after freezing, is allowed."""
        if not self._is_closed:
            await self._end()

    async def _end(self) -> None:
        was_busy = bool(self._in_flight)
        # First, so that calls that arrive while the engine ends find it closed.
        self._is_closed = True
        self._forget(self.id)
        self._conversations, self._calls, self._failed_calls = Conversations(), {}, {}
        # An engine without requests of it is not troubled.
        if was_busy:
            await self._engine.abort(self.settings.name)
        await self._engine.end_session(self.settings.name)

    # -- one call ---------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._is_closed:
            raise SessionClosedError(SESSION_IS_OVER)

    def _begin(self) -> int:
        self._require_open()
        if self._num_begun >= self.settings.max_calls:
            raise SessionLimitError(f"the session has made {self._num_begun} calls, as many as it may (max_calls)")
        index = self._num_begun
        self._num_begun += 1
        return index

    @contextlib.contextmanager
    def _failing(self, index: int) -> Iterator[None]:
        self._in_flight.add(index)
        try:
            yield
        except BaseException as error:
            self._failed_calls[index] = FailedCall(
                index, failure_kind(error), " ".join(str(error).split())[:_MAX_ERROR_CHARACTERS]
            )
            raise
        finally:
            self._in_flight.discard(index)

    async def _sample(
        self, call: ChatCall | CompletionCall, prompt: Prompt, renderer: Renderer
    ) -> tuple[int, Completion]:
        sampling = self._sampling(call, prompt, renderer)
        # What the answer may need at most is held from now on, because calls overlap.
        num_reserved = len(prompt.context_ids) + sampling.max_tokens
        if self._num_tokens + num_reserved > self.settings.max_captured_tokens:
            raise SessionLimitError(
                f"the session holds {self._num_tokens} tokens, and {num_reserved} more would be over its "
                f"max_captured_tokens = {self.settings.max_captured_tokens}"
            )
        # The number of a failed call is free again, so asking again gives the tokens of the first time.
        number = next(k for k in itertools.count() if k not in self._numbers)
        self._numbers.add(number)
        self._num_tokens += num_reserved
        try:
            completion = await self._generate(
                prompt, replace(sampling, seed=child_seed(self.settings.sampling_seed, "turn", number))
            )
            require_possible(completion, max_tokens=sampling.max_tokens, renderer=renderer)
        except BaseException:
            self._numbers.discard(number)
            self._num_tokens -= num_reserved
            raise
        self._num_tokens -= sampling.max_tokens - len(completion.token_ids)  # as many as were not needed
        return number, completion

    async def _generate(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        start = self._clock()
        try:
            completion = await self._engine.generate(
                prompt.token_ids,
                sampling,
                session_id=self.settings.name,
                deadline_seconds=self.settings.call_timeout_seconds,
            )
        except EngineError:
            self._require_open()  # then it was given up
            raise
        finally:
            self._engine_seconds += self._clock() - start
        self._require_open()  # too late: the capture was handed out
        return completion

    def _sampling(self, call: ChatCall | CompletionCall, prompt: Prompt, renderer: Renderer) -> SamplingParams:
        settings = self.settings
        schema = call.json_schema if isinstance(call, ChatCall) else None
        if schema is not None and not self._engine.capabilities.structured_output:
            raise ConfigError(
                "response_format: this engine cannot obey a JSON schema; leave it out, or serve with vLLM"
            )
        sampling = replace(settings.sampling, **call.sampling)
        if schema is not None and sampling.min_tokens:
            raise ConfigError(
                f"response_format: a schema ends with the model's own end tokens, which min_tokens = "
                f"{sampling.min_tokens} withholds: leave one of them out"
            )
        most = min(settings.max_output_tokens, settings.max_model_len - len(prompt.token_ids))
        max_tokens = most if call.max_tokens is None else min(most, call.max_tokens)
        return SamplingParams.of(
            sampling,
            max_tokens=max_tokens,
            stop_token_ids=renderer.stop_token_ids,
            seed=0,
            json_schema=schema,
        )

    def _keep(
        self,
        call: ChatCall | CompletionCall,
        prompt: Prompt,
        answer: Answer,
        *,
        index: int,
        number: int,
        tools_key: str,
    ) -> CapturedCall:
        captured_call = CapturedCall(
            index=index,
            kind="chat" if isinstance(call, ChatCall) else "completion",
            number=number,
            parent=None if prompt.parent is None else prompt.parent.index,
            appends=prompt.appends,
            context_ids=prompt.context_ids,
            num_prompt_tokens=len(prompt.token_ids),
            new_messages=prompt.new_messages,
            answer=answer.message,
            parse=answer.parse,
            error=answer.error,
            finish_reason=answer.finish_reason,
            completion=answer.completion,
            tools_key=tools_key,
            request_key=_request_key(call, prompt),
            untrained=_reason_not_to_train(call, self.settings),
            is_trained=call.is_trained,
            num_begun=self._num_begun,
        )
        self._calls[index] = captured_call
        self._conversations.add(captured_call, prompt.digest)
        return captured_call


def _request_key(call: ChatCall | CompletionCall, prompt: Prompt) -> str:
    # Whatever their temperature and length, calls that ask for the same thing have one key.
    request_parts = [call.stop] + (
        [call.tool_choice, call.json_schema] if isinstance(call, ChatCall) else ["completion"]
    )
    return hashlib.blake2b(prompt.digest + json.dumps(request_parts).encode(), digest_size=16).hexdigest()


def _reason_not_to_train(call: ChatCall | CompletionCall, settings: GatewaySessionSettings) -> Untrained | None:
    if call.is_trained is False:
        return Untrained.UNTRAINED_BY_REQUEST
    if isinstance(call, ChatCall) and call.json_schema is not None:
        return Untrained.CONSTRAINED
    # The learner scores a batch under one distribution.
    is_other = any(getattr(settings.sampling, name) != value for name, value in call.sampling.items())
    return Untrained.OTHER_SAMPLING if is_other else None


_MAX_CLOSED = 65_536  # to tell a late call from a wrong address


class Gateway:
    """Opens sessions on one engine, and finds them by id.

    Args:
        engine: answers the calls.
        tokenizer: a transformers tokenizer with a chat template.
        template_kwargs: for the chat template, unless a session has some.
        tools_in, date: see `Renderer`.
        max_sessions: open at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        tools_in: ToolsIn = "auto",
        date: datetime.date | None = None,
        max_sessions: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._tools_in, self._date = tools_in, date
        self._max_sessions = max_sessions
        self._clock = clock
        self._renderers: dict[str, RendererCache] = {}  # by the template's arguments, as JSON
        self._sessions: dict[str, GatewaySession] = {}
        self._closed_ids: OrderedDict[str, None] = OrderedDict()

    @property
    def num_sessions(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    def open_session(self, settings: GatewaySessionSettings) -> GatewaySession:
        """Open a session with an unguessable id.

        Raises:
            SessionLimitError: the maximum number is open.
        """
        if len(self._sessions) >= self._max_sessions:
            raise SessionLimitError(f"{len(self._sessions)} sessions are open, as many as may be (max_sessions)")
        session = GatewaySession(
            settings,
            engine=self.engine,
            renderers=self._renderers_with(settings.chat_template_kwargs),
            clock=self._clock,
            forget=self._forget,
        )
        self._sessions[session.id] = session
        return session

    def session(self, session_id: str) -> GatewaySession:
        """Return the open session of that id.

        Raises:
            SessionClosedError: it is over. UnknownNameError: there was none lately; names no other session.
        """
        if session_id in self._closed_ids:
            raise SessionClosedError(SESSION_IS_OVER)
        if session_id not in self._sessions:
            raise UnknownNameError(
                "there is no such session; its address was changed on the way, or it is of another run"
            )
        return self._sessions[session_id]

    async def close(self) -> None:
        """Abort all sessions."""
        # A copy, because aborting forgets the session.
        for session in list(self._sessions.values()):
            await session.abort()

    def _forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._closed_ids[session_id] = None
        # The oldest: an agent that calls after so many others is told that there is no such session.
        if len(self._closed_ids) > _MAX_CLOSED:
            self._closed_ids.popitem(last=False)

    def _renderers_with(self, template_kwargs: Mapping[str, Any] | None) -> RendererCache:
        kwargs = self._template_kwargs if template_kwargs is None else dict(template_kwargs)
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self._renderers:
            self._renderers[key] = RendererCache(
                self._tokenizer, template_kwargs=kwargs, tools_in=self._tools_in, date=self._date
            )
        return self._renderers[key]

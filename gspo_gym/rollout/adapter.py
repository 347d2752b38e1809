"""A text environment as a model sees it: token ids in, token ids out.

Episodes that we drive put their tokens together here and nowhere else. What was sampled is stored as it came and never
encoded again. Nothing is sampled or scored here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from gspo_gym.chat.parsing import ParseFailure
from gspo_gym.chat.renderer import Renderer, cannot_fit, with_system_prompt
from gspo_gym.env.blame import Action, answer_to, floor_of
from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.session import EnvSession
from gspo_gym.errors import ConfigError, ContextOverflowError, UsageError
from gspo_gym.rollout.record import EpisodeRecord, OpenEpisode, completion_of, require_possible
from gspo_gym.types import Completion, FinishReason, Int32Array, Message, Outcome, ParseStatus, StepResult, TokenIds

_Answer = TypeVar("_Answer")
ResetTuple = tuple[Int32Array, dict[str, Any]]
StepTuple = tuple[Int32Array, float | None, bool, bool, dict[str, Any]]


class TokenObservationWrapper:
    """Environment with prompts in token ids as observations and sampled token ids as actions.

    `reset` gives the prompt of the first turn; `step` takes the ids that were sampled for it and gives the next prompt.
    Each prompt extends the one before it, except where the chat template rewrites earlier turns: there a new segment
    starts. When the episode is over, the ids are those of the last segment as they stand: the model never reads the
    final observation, so it is kept as messages only.

    Inside an event loop use `reset_async`, `step_async` and `close_async`. Use it as a context manager or close it.

    Args:
        env: anything with Gymnasium's `reset` and `step` (plain or async), or an `EnvSession` around it.
        tokenizer: a transformers tokenizer with a chat template.
        max_turns: actions per episode; the last one is answered, then the episode counts as truncated.
        pad_id: fills exported arrays (`episode().padded`); it may equal a token that is really used.
        max_model_len: prompt plus completion, in tokens.
        max_output_tokens: sampled tokens per turn, the stop token included.
        env_id: the environment's name in errors; its class name if None.
        renderer: the chat template's renderer for this environment's tools; made from the tokenizer if None.
        system_prompt: put before the environment's first messages, or before the text of a system message there.
        step_timeout_seconds: for each reset, step and close of the environment; None waits for ever.

    Attributes:
        session: the environment.
        env_seconds: time spent waiting for the environment since the last reset.
        action_seconds: the part of it that went into answering actions.

    Raises:
        ConfigError: a limit or `pad_id` is out of range.
        TemplateError: the tokenizer's chat template cannot be rendered exactly.
    """

    # Any: transformers is untyped, and an environment may be any object with reset and step.
    def __init__(
        self,
        env: Any,
        tokenizer: Any,
        max_turns: int,
        pad_id: int,
        max_model_len: int,
        max_output_tokens: int,
        *,
        env_id: str | None = None,
        renderer: Renderer | None = None,
        system_prompt: str | None = None,
        step_timeout_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _require_range("max_turns", max_turns, 1)
        _require_range("max_model_len", max_model_len, 2)
        _require_range("max_output_tokens", max_output_tokens, 1)
        _require_range("pad_id", pad_id, 0, len(tokenizer) - 1)
        if isinstance(env, EnvSession):
            self.session = env
        else:
            name = env_id or type(env).__name__
            self.session = EnvSession(env, env_id=name, step_timeout_seconds=step_timeout_seconds)
        self.renderer = renderer or Renderer(tokenizer, tool_schemas=self.session.tool_schemas)
        self.env_seconds = self.action_seconds = 0.0
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._max_model_len = max_model_len
        self._max_output_tokens = max_output_tokens
        self._pad_id = pad_id
        self._system_prompt = system_prompt
        self._clock = clock
        self._generator: np.random.Generator | None = None  # of the seeds of unseeded episodes
        self._last_seed: int | None = None  # that the generator is made from
        self._runner: asyncio.Runner | None = None
        self._open = OpenEpisode()
        self._actions: list[Action] = []
        self._is_turn_open = False

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetTuple:
        """Start an episode, outside an event loop; see `reset_async`."""
        return self._drive("reset", lambda: self.reset_async(seed, options))

    def step(
        self,
        token_ids: TokenIds,
        logprobs: Sequence[float] | np.ndarray[Any, Any] | None = None,
        weight_version: int | Sequence[int] | np.ndarray[Any, Any] | None = None,
    ) -> StepTuple:
        """Play one turn, outside an event loop; see `step_async`, also for the errors.

        Args:
            token_ids: exactly what was sampled, the stop token included: 1 to `max_tokens` ids.
            logprobs: nats, one a token, of the distribution sampled from; None (not sampled from a model) stores 0.
            weight_version: of the weights that sampled, one number or one a token; None (no model) stores -1.
        """

        async def play() -> StepTuple:
            self._require_open_turn()
            return await self.step_async(
                completion_of(token_ids, logprobs, weight_version, require_possible=self._require_possible)
            )

        return self._drive("step", play)

    def close(self) -> None:
        """Close the environment. Closing twice is fine."""
        self._drive("close", self.close_async)
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> TokenObservationWrapper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _drive(self, method: str, call: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._runner = self._runner or asyncio.Runner()
            return self._runner.run(call())
        raise UsageError(
            f"TokenObservationWrapper.{method}() was called inside a running event loop, which it would block; "
            f"use `await wrapper.{method}_async(...)` there"
        )

    async def reset_async(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetTuple:
        """Start an episode: (ids int32 [L], info) with the whole prompt of the first turn.

        `seed` None draws one as `splits.next_seed` says; `info["seed"]` is the seed.

        Raises:
            EnvError, EnvTimeoutError, ContractError: the environment failed.
            ContextOverflowError: the first prompt leaves no room for one token in `max_model_len`.
        """
        self._open = OpenEpisode()
        self._actions = []
        self._is_turn_open = False
        self.env_seconds = self.action_seconds = 0.0
        if seed is None:
            if self._generator is None:  # most episodes have seeds, and making it takes longer than a turn
                self._generator = np.random.default_rng(self._last_seed)
            seed = next_seed(self._generator)
        else:
            self._generator, self._last_seed = None, seed
        result = await self._time_call(self.session.reset(seed, options))
        messages = with_system_prompt(result.messages, self._system_prompt)
        self._open.messages.extend(messages)
        # Ten megabytes of text would hold up every other episode while they are encoded, to be refused afterwards.
        is_hopeless = cannot_fit(messages, self._tokenizer, self._max_model_len)
        prompt = None if is_hopeless else self.renderer.start(self._open.messages)
        if prompt is None or len(prompt) >= self._max_model_len:
            self._open.outcome = Outcome.CONTEXT_OVERFLOW
            raise ContextOverflowError(
                f"{self.session.env_id}: the first prompt has {_size(prompt, messages)}, which leaves no room "
                f"for an answer in max_model_len = {self._max_model_len}; raise it or shorten the first observation"
            )
        self._open.open_turn(prompt, is_new_segment=True)
        self._is_turn_open = True
        return self.prompt, {**result.info, "seed": seed, "new_messages": messages}

    async def step_async(self, sampled: Completion) -> StepTuple:
        """Play one turn with what was sampled for it: (ids int32 [L], reward, terminated, truncated, info).

        Text that cannot be parsed as an action is not given to the environment's `step`; its `invalid_action` answers.
        `truncated` is also True at the limit on turns and where the next prompt does not fit; `outcome` says which.
        The reward is None where the turn was not scored; info has "new_messages", "parse" and "outcome", too.

        Raises:
            UsageError: no turn is open (before `reset`, or after the episode ended or failed).
            RecordError: `sampled` cannot have been sampled here; the turn stays open.
            EnvError, EnvTimeoutError, ContractError: the environment failed; the turn stays in the record, unscored.
        """
        self._require_open_turn()
        self._require_possible(sampled.token_ids)
        self._is_turn_open = False  # before the environment is asked: if it fails, the turn must not be played again
        action = self._record_action(sampled)
        self._actions.append(action.error if isinstance(action, ParseFailure) else action)  # kept for a retrial
        result: StepResult = await self._time_call(answer_to(self.session, self._actions[-1]))
        history = self.messages
        self._open.append_answer(result)
        self._advance(history, result)
        turn = self._open.turns[-1]
        info = {**result.info, "new_messages": result.messages, "parse": turn.parse, "outcome": self.outcome}
        truncated = result.truncated or self.outcome in (Outcome.MAX_TURNS, Outcome.CONTEXT_OVERFLOW)
        return self.prompt, turn.reward, result.terminated, truncated, info

    def end_at_limit(self, stated_return: float | None = None) -> None:
        """End the episode at its unanswered last action, with the lowest return; see `blame.floor_of`."""
        assert self._actions, "no action was taken"
        self._open.end_at_limit(floor_of(self.session.env, self._open.earned, stated_return))

    async def close_async(self) -> None:
        """Close the environment. Closing twice is fine."""
        self._is_turn_open = False
        await self.session.close()

    @property
    def prompt(self) -> Int32Array:
        """[L] int32, read-only: the current segment, which is the prompt of the open turn."""
        return self._open.segments[-1].token_ids if self._open.segments else np.empty(0, dtype=np.int32)

    @property
    def max_tokens(self) -> int:
        """Most tokens that may be sampled in the open turn."""
        return min(self._max_output_tokens, self._max_model_len - self._open.length)

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._open.messages)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions that the environment was given so far."""
        return tuple(self._actions)

    @property
    def num_turns(self) -> int:
        return len(self._open.turns)

    @property
    def outcome(self) -> Outcome | None:
        """The way the episode ended; None while it goes on."""
        return self._open.outcome

    @property
    def is_turn_open(self) -> bool:
        """Whether `step` may be called."""
        return self._is_turn_open

    def episode(self) -> EpisodeRecord:
        return self._open.freeze(pad_id=self._pad_id)

    def _require_open_turn(self) -> None:
        if not self._is_turn_open:
            raise UsageError(
                f"{self.session.env_id}: step() without an open turn (outcome: {self.outcome}); call reset() first"
            )

    def _require_possible(self, token_ids: Int32Array) -> None:
        require_possible(
            token_ids,
            max_tokens=self.max_tokens,
            stop_token_ids=self.renderer.stop_token_ids,
        )

    def _record_action(self, completion: Completion) -> Message | ParseFailure:
        # Stored before anything can go wrong with the tokens; what they say comes after.
        is_stopped = completion.token_ids[-1] in self.renderer.stop_token_ids
        self._open.append_action(completion, FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        text = self.renderer.decode(completion.token_ids)
        result = self.renderer.parse(text, is_truncated=not is_stopped)
        if isinstance(result, ParseFailure):
            self._open.append_meaning(Message("assistant", text), result.status)
        else:
            self._open.append_meaning(result, ParseStatus.OK)
        return result

    def _advance(self, history: Sequence[Message], result: StepResult) -> None:
        """Open the next turn, or end the episode; `history` ends with the action that `result` answers."""
        episode = self._open
        # The first of the limits decides, in the order that `limits.py` states.
        if result.done:
            episode.outcome = Outcome.TERMINATED if result.terminated else Outcome.TRUNCATED
        elif len(episode.turns) >= self._max_turns:
            episode.outcome = Outcome.MAX_TURNS
        elif cannot_fit(result.messages, self._tokenizer, self._max_model_len):
            episode.outcome = Outcome.CONTEXT_OVERFLOW
        else:
            is_closed = episode.turns[-1].finish_reason is FinishReason.STOP
            continuation = self.renderer.continue_from(history, result.messages, closed=is_closed)
            num_kept = 0 if continuation.is_new_segment else episode.length
            if num_kept + len(continuation.token_ids) >= self._max_model_len:
                episode.outcome = Outcome.CONTEXT_OVERFLOW
            else:
                episode.open_turn(continuation.token_ids, is_new_segment=continuation.is_new_segment)
                self._is_turn_open = True

    async def _time_call(self, call: Coroutine[Any, Any, _Answer]) -> _Answer:
        start = self._clock()
        try:
            return await call
        finally:
            seconds = self._clock() - start
            self.env_seconds += seconds
            self.action_seconds += seconds if self._actions else 0.0  # without an action, it was the reset


def _require_range(name: str, value: int, low: int, high: int | None = None) -> None:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)  # True is an int
    if not is_integer or value < low or (high is not None and value > high):
        range_text = f"at least {low}" if high is None else f"{low} to {high}"
        raise ConfigError(f"TokenObservationWrapper.{name}: expected an integer, {range_text}, got {value!r}")


def _size(prompt: Sequence[int] | None, messages: Sequence[Message]) -> str:
    if prompt is not None:
        return f"{len(prompt)} tokens"
    return f"{sum(len(message.content) for message in messages)} characters"

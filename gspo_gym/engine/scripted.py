"""An engine without a model: it replays given answers, takes the time it is told to, and fails when it is told to.

For tests, examples and benchmarks, of users too. It is no policy: it learns nothing, and its logprobs are one fixed
number.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gspo_gym.engine.base import (
    Capabilities,
    SamplingParams,
    WeightUpdate,
    num_tokens_to_sample,
    refuse_schema,
    token_list,
)
from gspo_gym.engine.gate import GatedEngine
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.seeding import generator
from gspo_gym.types import Completion, FinishReason, TokenIds

Answer = Callable[[tuple[int, ...], int], Sequence[int]]
"""(prompt token ids, turn) -> reply token ids; the turn counts the session's earlier calls."""

Replies = Answer | Mapping[tuple[int, ...], Sequence[int]] | Sequence[Sequence[int]]
"""A function, or replies by prompt, or replies in the order of the calls."""


@dataclass(frozen=True, slots=True)
class Latency:
    """The duration of a call: (per_call_seconds + tokens * per_token_seconds) * a factor.

    The factor is uniform in [1 - jitter_fraction, 1 + jitter_fraction], drawn for each call from `seed` and its number.
    """

    per_call_seconds: float = 0.0
    per_token_seconds: float = 0.0
    jitter_fraction: float = 0.0
    seed: int = 0

    def seconds(self, call_index: int, num_tokens: int) -> float:
        """Return the duration of the call of that number, from 0, with a reply of so many tokens."""
        jitter = generator(self.seed, "latency", call_index).uniform(-1.0, 1.0) * self.jitter_fraction
        return float((self.per_call_seconds + num_tokens * self.per_token_seconds) * (1.0 + jitter))


@dataclass(frozen=True, slots=True)
class Failures:
    """The calls that fail: every k-th of them, or each with a probability, drawn from `seed` and its number.

    `kind` "error" raises EngineError after the latency; "hang" never answers (cancelling the call ends it).
    """

    every: int = 0
    prob: float = 0.0
    kind: Literal["error", "hang"] = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.every < 0 or not 0 <= self.prob <= 1:
            raise ConfigError(f"Failures: expected every >= 0 and 0 <= prob <= 1, got {self.every} and {self.prob}")

    def hits(self, call_index: int) -> bool:
        """Return whether the call of that number, from 0, fails."""
        if self.every and (call_index + 1) % self.every == 0:
            return True
        return bool(self.prob and generator(self.seed, "failure", call_index).random() < self.prob)


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it came in."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    session_id: str | None


class ScriptedEngine(GatedEngine):
    """Replays replies. A reply is cut after its first stop token, at max_tokens and at the context's end.

    A reply that ends before a stop token counts as cut off by its length (`FinishReason.LENGTH`), which scripts
    truncated turns. Tests may read `calls`, `updates` and `num_failures`.

    >>> engine = ScriptedEngine([[7, 8, 2], [9, 9, 9, 9]])
    >>> sampling = SamplingParams(max_tokens=3, stop_token_ids=(2,), seed=0)
    >>> first = asyncio.run(engine.generate([1], sampling))
    >>> first.token_ids.tolist(), first.finish_reason.value
    ([7, 8, 2], 'stop')
    >>> asyncio.run(engine.generate([1], sampling)).finish_reason.value
    'length'
    """

    def __init__(
        self,
        replies: Replies,
        *,
        max_model_len: int = 4096,
        latency: Latency | None = None,
        failures: Failures | None = None,
        logprob: float = -0.5,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`logprob`, in nats, is reported for every token. `sleep` replaces the clock; it is called once per call."""
        super().__init__()
        self.calls: list[Call] = []
        self.num_failures = 0
        self.updates: list[WeightUpdate] = []
        self._replies = replies
        self._max_model_len = max_model_len
        self._latency = latency
        self._failures = failures
        self._logprob = logprob
        self._sleep = sleep
        self._turns: Counter[str] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            is_trainable=True,
            seeds_per_request=False,
            reuses_prefixes=False,
            max_model_len=self._max_model_len,
            update_kinds=("shared", "full", "adapter", "transfer"),
            pause_modes=("wait", "keep"),
        )

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Return the next reply of the script. See `Engine.generate`.

        Raises:
            ConfigError: there is a JSON schema.
            EngineError: the script says so, has no (further) reply, or the engine is closed.
            ContextOverflowError: the prompt leaves no room for a single token.
        """
        refuse_schema(sampling, "ScriptedEngine")
        prompt = tuple(token_list(prompt_token_ids))
        max_new = num_tokens_to_sample(len(prompt), sampling, self._max_model_len)
        async with self._gate.admit(session_id, deadline_seconds):
            index = len(self.calls)
            self.calls.append(Call(prompt, sampling, session_id))
            reply = _cut(self._reply(prompt, session_id, index), sampling.stop_token_ids, max_new)
            version = self._gate.weight_version  # before the wait, in which it may change
            await self._take_time_or_fail(index, len(reply))
        return Completion(
            token_ids=np.array(reply, np.int32),
            logprobs=np.full(len(reply), self._logprob, np.float32),
            finish_reason=FinishReason.STOP if reply[-1] in sampling.stop_token_ids else FinishReason.LENGTH,
            weight_version=np.full(len(reply), version, np.int32),
        )

    async def end_session(self, session_id: str) -> None:
        """Forget how many turns the session had."""
        self._turns.pop(session_id, None)

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Note the version; there are no weights. A call that is kept over it carries the version it began with."""
        self._gate.require_paused()
        self.updates.append(update)

    async def close(self) -> None:
        """Further calls raise EngineError."""
        self._gate.close()

    def _reply(self, prompt: tuple[int, ...], session_id: str | None, index: int) -> Sequence[int]:
        turn = 0
        if session_id is not None:
            turn = self._turns[session_id]
            self._turns[session_id] += 1
        if callable(self._replies):
            reply = self._replies(prompt, turn)
        elif isinstance(self._replies, Mapping):
            if prompt not in self._replies:
                raise EngineError(f"the script has no reply to the prompt {prompt}")
            reply = self._replies[prompt]
        else:
            if index >= len(self._replies):
                raise EngineError(f"the script has {len(self._replies)} replies, and this is call {index + 1}")
            reply = self._replies[index]
        if len(reply) == 0:
            raise EngineError(f"the script's reply to call {index + 1} is empty: an engine samples at least one token")
        return reply

    async def _take_time_or_fail(self, index: int, num_tokens: int) -> None:
        fails = self._failures is not None and self._failures.hits(index)
        if fails:
            self.num_failures += 1
        if fails and self._failures is not None and self._failures.kind == "hang":
            await asyncio.Event().wait()  # for ever: only a cancellation ends it
        if self._latency is not None:
            await self._sleep(self._latency.seconds(index, num_tokens))
        if fails:
            raise EngineError(f"scripted failure of call {index + 1}")


def _cut(reply: Sequence[int], stop_token_ids: tuple[int, ...], max_new: int) -> list[int]:
    tokens = []
    for token in reply[:max_new]:
        tokens.append(int(token))
        if token in stop_token_ids:
            break
    return tokens

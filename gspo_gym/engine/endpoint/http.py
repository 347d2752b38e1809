"""An engine behind any OpenAI-compatible endpoint, with frozen weights.

A few short requests at the start find out whether the endpoint takes token ids and obeys seeds, and the distribution of
its logprobs: its claims are not believed. With exact token ids and logprobs its samples can be trained on; with text
only they are good for evaluation.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from gspo_gym.base.retries import Retries, RetryCounters, RetrySettings, Sleep
from gspo_gym.base.settings import read_key
from gspo_gym.engine.base import (
    Capabilities,
    SamplingParams,
    WeightUpdate,
    num_tokens_to_sample,
    refuse_schema,
    token_list,
)
from gspo_gym.engine.endpoint.routes import (
    CompletionsRoute,
    Route,
    SampleChecks,
    SampleRequest,
    SglangRoute,
    TextRoute,
    Tokenizer,
)
from gspo_gym.engine.endpoint.wire import AnswerError, EngineClient, RefusedError
from gspo_gym.engine.gate import GatedEngine
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.types import Completion, TokenIds

# (prompt, sampling) -> a completion; retried as the engine's other requests are.
Ask = Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]

_COMPLETIONS = "/completions"
_PROMPT = tuple(range(11, 19))  # any vocabulary has these, and in no sane text: the next token is not certain
_LENGTH = 8
_PLAIN = SamplingParams(max_tokens=_LENGTH, stop_token_ids=(), seed=1)
_NUM_PAIRS = 8
# Of a logit difference d at temperature 1, in nats: too small to see a temperature act on it, or too large for float32
# to hold the logprob of the likelier token.
_MIN_DIFFERENCE, _MAX_DIFFERENCE = 0.1, 9.0


@dataclass(frozen=True, slots=True)
class LogprobFacts:
    """The distribution of an endpoint's logprobs.

    Attributes:
        mode: "processed": after the temperature. "raw": the model's own. "none": it gives none.
        is_renormalised: over the tokens that top_p and its kin leave; otherwise the logprobs of truncated samples
            are not known.
    """

    mode: Literal["processed", "raw", "none"]
    is_renormalised: bool


async def model_length(client: EngineClient, model: str) -> int | None:
    """Return the longest prompt plus completion as `/v1/models` says (vLLM and SGLang do); None if it does not.

    Raises:
        EngineAttemptError: there is no answer.
    """
    try:
        answer = await client.get_object("/models")
    except RefusedError:  # it may be an endpoint without the route
        return None
    entries = answer.get("data")
    cards = [card for card in entries if isinstance(card, dict)] if isinstance(entries, list) else []
    lengths = [card.get("max_model_len") for card in cards if card.get("id") == model]
    return lengths[0] if len(lengths) == 1 and type(lengths[0]) is int and lengths[0] > 1 else None


async def why_not(route: Route, settings: HttpSettings, call_id: str, attempt: int) -> str | None:
    """Return why the endpoint cannot be used by this route; None if it can.

    Raises:
        EngineAttemptError: there is no answer.
    """
    try:
        await route.sample(_request(settings, _PROMPT, _PLAIN, _LENGTH, call_id), attempt)
    except (RefusedError, AnswerError) as error:
        return f"{route.name}: {error}"
    return None


async def obeys_seeds(ask: Ask) -> bool:
    """Return whether equal seeds sample equal tokens and different seeds different tokens."""
    hot = replace(_PLAIN, temperature=2.0)  # peaked distributions give equal tokens for different seeds
    first, again, third = [await ask(_PROMPT, replace(hot, seed=seed)) for seed in (1, 1, 2)]
    return _same(first, again) and not _same(first, third)


async def find_logprob_facts(ask: Ask) -> LogprobFacts:
    """Find the distribution of the logprobs, by three identities that need no model to compare with.

    With top_k = 1 one token is left, and its logprob is 0 if the logprobs are renormalised. With top_k = 2 two are
    left, and the difference of their logits, ln(p / (1 - p)), is halved when the temperature is doubled, if the
    temperature acts on the logprobs. If it does not, greedily chosen tokens have equal logprobs at temperatures 1 and
    2; if it does, lower ones at 2.

    Raises:
        EngineError: none of these holds: the logprobs are of no distribution that can be trained on.
    """
    greedy = replace(_PLAIN, top_k=1)
    cold, hot = [await ask(_PROMPT, replace(greedy, temperature=t)) for t in (1.0, 2.0)]
    if _same(cold, hot) and (cold.logprobs > -1e-3).all() and (hot.logprobs > -1e-3).all():
        if await _temperature_halves_differences(ask):
            return LogprobFacts("processed", is_renormalised=True)
        raise EngineError(
            "the endpoint's logprobs follow top_k but not the temperature: they are not of the distribution that is "
            "sampled from"
        )
    if _same(cold, hot) and np.abs(cold.logprobs - hot.logprobs).max() < 0.02:
        return LogprobFacts("raw", is_renormalised=False)
    if _same(cold, hot) and (hot.logprobs < cold.logprobs + 1e-3).all():
        return LogprobFacts("processed", is_renormalised=False)
    raise EngineError(
        "the endpoint's logprobs are of no known distribution: the likeliest tokens have "
        f"{cold.logprobs.tolist()} at temperature 1 and {hot.logprobs.tolist()} at 2"
    )


async def _temperature_halves_differences(ask: Ask) -> bool:
    sampling = replace(_PLAIN, max_tokens=1, top_k=2)
    num_seen = 0
    for number in range(_NUM_PAIRS):
        prompt = (*_PROMPT, *range(21, 21 + number))
        at_1, at_2 = [abs(_logit(await ask(prompt, replace(sampling, temperature=t)))) for t in (1.0, 2.0)]
        if _MIN_DIFFERENCE <= at_1 <= _MAX_DIFFERENCE:
            num_seen += 1
            if abs(2 * at_2 - at_1) > max(0.02, 0.1 * at_1):
                return False
    if num_seen == 0:
        raise EngineError(
            f"the endpoint's logprobs cannot be told apart: after {_NUM_PAIRS} prompts the two likeliest tokens were "
            "always equally likely or one of them certain"
        )
    return True


def _logit(completion: Completion) -> float:
    # Not ln(p) - ln(1 - p): near p = 1 the subtraction loses all digits.
    logprob = min(float(completion.logprobs[0]), 0.0)
    return math.inf if logprob > -1e-7 else logprob - math.log(-math.expm1(logprob))


def _same(first: Completion, second: Completion) -> bool:
    return bool(np.array_equal(first.token_ids, second.token_ids))


NO_LOGPROBS = LogprobFacts("none", is_renormalised=False)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of an endpoint: its address, time limits and retries.

    Attributes:
        base_url: such as "http://127.0.0.1:8000/v1"; without user and password.
        model: its name at the endpoint.
        api_key_env: the environment variable that holds the key, which must then be set; None: no key is sent.
        tier: "trainable": token ids and logprobs, or an error that says what the endpoint lacks. "text": text only,
            even if the endpoint can do better. "auto": the best that it can do.
        rescore: all its samples are trainable, text too: the caller promises to replace the endpoint's logprobs, which
            may be zeros, by the learner's, and to correct nothing by these (`rollout.rescore`). That other weights
            sampled is then ignored, which must be meant.
        max_model_len: longest prompt plus completion, in tokens; None: as the endpoint says.
        vocab_size: token ids are below it; None: not known, and only negative ones are refused.
        cache_salt: keeps the server's prefix cache apart from that of others (vLLM); None: shared.
        timeout_seconds: for one attempt, its last byte included.
        deadline_seconds: for one call, attempts and waits included, unless the caller says otherwise.
        retries: see `RetrySettings`.
        seed: of the jitter between retries; never of samples.
    """

    base_url: str
    model: str
    api_key_env: str | None = None
    tier: Literal["auto", "trainable", "text"] = "auto"
    rescore: bool = False
    max_model_len: int | None = None
    vocab_size: int | None = None
    cache_salt: str | None = None
    timeout_seconds: float = 300.0
    deadline_seconds: float = 900.0
    retries: RetrySettings = field(default_factory=RetrySettings)
    seed: int = 0

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise ConfigError(f"HttpSettings.base_url: expected http(s)://HOST[:PORT]/PATH, got {url.geturl()!r}")
        if url.username or url.password:
            raise ConfigError("HttpSettings.base_url: expected no user or password in it; name a key by api_key_env")
        if not self.model:
            raise ConfigError("HttpSettings.model: expected a model's name, got an empty text")
        if not (self.timeout_seconds > 0 and self.deadline_seconds > 0):
            raise ConfigError(
                "HttpSettings: expected timeout_seconds > 0 and deadline_seconds > 0, got "
                f"{self.timeout_seconds} and {self.deadline_seconds}"
            )
        length, vocab_size = self.max_model_len, self.vocab_size
        if (length is not None and length < 2) or (vocab_size is not None and vocab_size < 1):
            raise ConfigError(
                f"HttpSettings: expected max_model_len >= 2 and vocab_size >= 1 or none, got {length} and {vocab_size}"
            )


class HttpEngine(GatedEngine):
    """Samples from an endpoint. Made by `HttpEngine.start`; use it within one event loop, and close it.

    Its weights never change: `update_kinds` is empty, an update is refused, and every token carries version -1, because
    the weights behind a URL are not known.

    Attributes:
        route: by which the endpoint is asked. logprobs: the distribution of its logprobs.
        why_not_trainable: None if its samples can be trained on.
    """

    def __init__(
        self, settings: HttpSettings, client: EngineClient, route: Route, *, max_model_len: int, retries: Retries
    ) -> None:
        """Make it without a probe: nothing is known about logprobs and seeds. Use `start`."""
        super().__init__()
        self.route = route
        self.logprobs = NO_LOGPROBS
        self.why_not_trainable: str | None = "not probed"
        self._settings = settings
        self._client = client
        self._max_model_len = max_model_len
        self._retries = retries
        self._seeds_per_request = False
        self._name = uuid.uuid4().hex  # no two processes may share call ids
        self._num_calls = 0

    @classmethod
    async def start(
        cls, settings: HttpSettings, tokenizer: Tokenizer | None = None, *, sleep: Sleep = asyncio.sleep
    ) -> HttpEngine:
        """Start the engine: find out what the endpoint can do.

        Args:
            settings: of the endpoint.
            tokenizer: of the policy's tokens; needed for text, and compares tokens with their text elsewhere.
            sleep: waits between retries; replaces the clock.

        Raises:
            ConfigError: the key's variable is not set, or the context's length is not known, or text without tokenizer.
            EngineError: nothing answers, or it can do less than `settings.tier` asks for.
            MissingExtraError: httpx is not installed.
        """
        key = read_key(settings.api_key_env, "HttpSettings.api_key_env")
        client = EngineClient(settings.base_url, api_key=key, timeout_seconds=settings.timeout_seconds)
        try:
            retries = Retries(settings.retries, gives_up_with=EngineError, seed=settings.seed, sleep=sleep)
            return await cls._start(settings, client, tokenizer, retries)
        except BaseException:
            await client.close()
            raise

    @classmethod
    async def _start(
        cls, settings: HttpSettings, client: EngineClient, tokenizer: Tokenizer | None, retries: Retries
    ) -> HttpEngine:
        length = settings.max_model_len or await retries.run(lambda _: model_length(client, settings.model))
        if length is None:
            raise ConfigError(
                f"HttpSettings.max_model_len: {settings.base_url} does not say how long a context {settings.model} "
                "has; set it"
            )
        route = await _find_route(settings, client, tokenizer, retries)
        engine = cls(settings, client, route, max_model_len=length, retries=retries)
        await engine._probe()
        if settings.tier == "trainable" and engine.why_not_trainable is not None:
            raise EngineError(f"{settings.base_url}: {engine.why_not_trainable}")
        return engine

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            is_trainable=self.why_not_trainable is None or self._settings.rescore,
            seeds_per_request=self._seeds_per_request,
            reuses_prefixes=False,
            max_model_len=self._max_model_len,
            logprob_mode=self.logprobs.mode,
            # The weights behind a URL may be replaced at any time.
            reports_versions=False,
            update_kinds=(),
            pause_modes=("wait",),
        )

    @property
    def counters(self) -> RetryCounters:
        """Return the calls, attempts and failures so far, those of the probe included."""
        return self._retries.counters

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Sample one completion; see `Engine.generate`. A call gives one sample at most, also where it is retried.

        Raises:
            ContextOverflowError: the prompt leaves no room for a single token.
            ConfigError: a sampling parameter under which the endpoint's logprobs would be of another distribution, or
                which it does not know, such as a JSON schema.
            EngineTimeoutError, EnginePoisonedError: see `Engine.generate`.
            EngineError: refused, or the last attempt failed.
        """
        refuse_schema(sampling, "HttpEngine")
        prompt = token_list(prompt_token_ids)
        top = self._settings.vocab_size
        if wrong := [token for token in prompt if token < 0 or (top is not None and token >= top)]:
            raise EngineError(f"generate: expected prompt tokens in [0, {top or 'vocab_size'}), got {wrong[0]}")
        max_tokens = num_tokens_to_sample(len(prompt), sampling, self._max_model_len)
        # The logprob of a truncated sample would be that of the whole distribution.
        if self.logprobs.mode == "processed" and not self.logprobs.is_renormalised:
            _require_untruncated(sampling)
        deadline = self._settings.deadline_seconds if deadline_seconds is None else deadline_seconds
        async with self._gate.admit(session_id, deadline):
            return await self._sample(prompt, sampling, max_tokens)

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Refuse: the weights are frozen.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"HttpEngine: {self._settings.base_url} is a frozen policy, whose weights cannot become version "
            f"{update.version}; train with an engine that has update_kinds (local, vllm), and evaluate with this one"
        )

    async def close(self) -> None:
        """Give the connections back. Calls in flight, and all later ones, raise EngineError."""
        await self._close_gate()
        await self._client.close()

    async def _sample(self, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int) -> Completion:
        self._num_calls += 1
        request = _request(self._settings, prompt, sampling, max_tokens, f"{self._name}-{self._num_calls}")
        return await self._retries.run(partial(self.route.sample, request))

    async def _probe(self) -> None:
        async def ask(prompt: Sequence[int], sampling: SamplingParams) -> Completion:
            return await self._sample(prompt, sampling, sampling.max_tokens)

        # Asked even of a text route: seeds matter to an evaluation, too.
        self._seeds_per_request = await obeys_seeds(ask)
        if not self.route.has_logprobs:
            self.why_not_trainable = (
                f"{self.route.name} gives no token ids and logprobs. Evaluate with it; to train on its text all the "
                "same, with the learner's own logprobs in place of the sampler's, set rollout.rescore = true"
            )
            return
        self.logprobs = await find_logprob_facts(ask)
        self.why_not_trainable = None
        if self.logprobs.mode == "raw":
            self.why_not_trainable = (
                "its logprobs are the model's own, before temperature and truncation, so they are not of the "
                "distribution that is sampled from; start vLLM with --logprobs-mode processed_logprobs"
            )


async def _find_route(
    settings: HttpSettings, client: EngineClient, tokenizer: Tokenizer | None, retries: Retries
) -> Route:
    # Best first; the first that works is taken.
    if settings.tier == "text" and tokenizer is None:
        raise ConfigError('HttpEngine: tier "text" needs the tokenizer of the prompts, got none')
    vocab_size = settings.vocab_size
    routes: list[Route] = []
    checks = SampleChecks(tokenizer, is_rescored=settings.rescore)
    if settings.tier != "text":
        routes.append(CompletionsRoute(client, _COMPLETIONS, vocab_size=vocab_size, checks=checks))
        root = client.base_url.removesuffix("/v1")
        routes.append(SglangRoute(client, f"{root}/generate", vocab_size=vocab_size, checks=checks))
    if settings.tier != "trainable" and tokenizer is not None:
        routes.append(TextRoute(client, _COMPLETIONS, tokenizer=tokenizer))
    reasons = [] if tokenizer is not None else ["text: needs the tokenizer of the prompts, got none"]
    for route in routes:
        reason = await retries.run(partial(why_not, route, settings, uuid.uuid4().hex))
        if reason is None:
            return route
        reasons.append(reason)
    raise EngineError(f"{settings.base_url}: cannot sample from {settings.model}:\n  " + "\n  ".join(reasons))


def _request(
    settings: HttpSettings, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int, call_id: str
) -> SampleRequest:
    return SampleRequest(
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        model=settings.model,
        call_id=call_id,
        cache_salt=settings.cache_salt,
    )


def _require_untruncated(sampling: SamplingParams) -> None:
    if sampling.is_truncated:
        raise ConfigError(
            "HttpEngine: the endpoint's logprobs are not renormalised over what truncation leaves; leave top_p, "
            f"top_k and their kin at their defaults, got {sampling}"
        )

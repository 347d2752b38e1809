"""A vLLM server as an engine: token ids in and out over HTTP, and weights that this process changes.

The server is ours (`gspo-gym serve --engine vllm`) or the user's. The handshake finds its capabilities out when the
engine starts, by asking it, and by samples where its word is no proof; a server that would spoil training is refused.
Samples may come from another machine; weights are changed on this one only (`engine/vllm/control.py`). Tried with vLLM
0.32 on the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gspo_gym.base.retries import Retries, RetryCounters, RetrySettings, Sleep
from gspo_gym.base.settings import read_key
from gspo_gym.engine.base import (
    Capabilities,
    EngineHealth,
    PauseMode,
    SamplingParams,
    UpdateKind,
    WeightUpdate,
    num_tokens_to_sample,
    refuse_schema,
    require_vocabulary,
    token_list,
)
from gspo_gym.engine.endpoint.http import find_logprob_facts
from gspo_gym.engine.endpoint.routes import CompletionsRoute, GenerateRoute, Route, SampleChecks, SampleRequest, Served
from gspo_gym.engine.endpoint.wire import EngineClient, RefusedError, shorten
from gspo_gym.engine.gate import GatedEngine
from gspo_gym.engine.vllm.adapters import ServedVersions, new_name, weights_folder
from gspo_gym.engine.vllm.control import Address, ServerInfo, VllmControl, address_of, client_of
from gspo_gym.engine.vllm.requests import padding_ids, sampling_fields
from gspo_gym.engine.vllm.worker import WORKER_EXTENSION
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.types import Completion, TokenIds

# For a server to say that it is well, or to forget an adapter.
_HEALTH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class VllmHttpSettings:
    """Settings of a server: its addresses, time limits and retries.

    Attributes:
        url: "http://127.0.0.1:8000", or "unix:/absolute/path" of a socket.
        vocab_size: token ids of prompts and samples are below it. A server without a tokenizer dies of a larger one.
        num_token_ids: ids from there on are not the tokenizer's, and are not to be sampled; None: all are its.
        control_url: for changing its weights, on this machine; None: `url` if that is on this machine.
        model: the name that it serves the model under; None: the only one.
        api_key_env: the environment variable that holds the key, which must then be set; None: no key is sent.
        dtype: in which the server must compute; None: any.
        max_model_len: longest prompt plus completion, in tokens; None: as the server says.
        timeout_seconds: for one attempt, its last byte and pauses of the server included.
        control_timeout_seconds: for one step of an update; a large model takes minutes to read.
        deadline_seconds: for one call, attempts and waits included, unless the caller says otherwise.
        retries: of samples; see `RetrySettings`. Steps of an update are never tried twice.
        seed: of the jitter between retries; never of samples.
    """

    url: str
    vocab_size: int
    num_token_ids: int | None = None
    control_url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_model_len: int | None = None
    timeout_seconds: float = 300.0
    control_timeout_seconds: float = 900.0
    deadline_seconds: float = 900.0
    retries: RetrySettings = field(default_factory=RetrySettings)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or (self.max_model_len or 2) < 2:
            raise ConfigError(
                "VllmHttpSettings: expected vocab_size >= 1 and max_model_len >= 2 or none, got "
                f"{self.vocab_size} and {self.max_model_len}"
            )
        if min(self.timeout_seconds, self.control_timeout_seconds, self.deadline_seconds) <= 0:
            raise ConfigError("VllmHttpSettings: expected timeouts and the deadline > 0")


class VllmHttpEngine(GatedEngine):
    """Samples from a vLLM server. Made by `start`; use it within one event loop, and close it.

    Between `start` and the first update the server's weights count as version 0. A prompt is salted with the version:
    keys and values computed under other weights are never found again. In flight ("keep") a whole-model update has the
    frozen requests computed again, and every token carries the version that sampled it; an adapter update leaves
    requests in flight on the adapter that they began with.

    Attributes:
        handshake: the capabilities of the server.
    """

    def __init__(
        self,
        settings: VllmHttpSettings,
        client: EngineClient,
        control: VllmControl | None,
        handshake: Handshake,
        retries: Retries,
    ) -> None:
        super().__init__()
        self.handshake = handshake
        self._settings = settings
        self._client = client
        self._control = control
        self._retries = retries
        self._route: Route = handshake.route
        self._served = ServedVersions(
            control, model=handshake.model, label=handshake.label, has_adapters="adapter" in handshake.update_kinds
        )
        self._name = uuid.uuid4().hex  # an identity: no two processes may share request ids
        self._num_calls = 0

    @classmethod
    async def start(cls, settings: VllmHttpSettings, *, sleep: Sleep = asyncio.sleep) -> VllmHttpEngine:
        """Connect and find out what the server can do. `sleep` waits between retries; it replaces the clock.

        Raises:
            ConfigError: the server computes in another dtype, its logprobs are not of the sampling distribution, the
                control URL is another machine's, or the key's variable is not set.
            EngineError: it does not answer, or not with token ids and logprobs.
            MissingExtraError: httpx is not installed.
        """
        key = read_key(settings.api_key_env, "VllmHttpSettings.api_key_env")
        address = address_of(settings.url)
        control_url = settings.control_url or (settings.url if address.is_local else None)
        timeout = settings.control_timeout_seconds
        control = VllmControl(control_url, api_key=key, timeout_seconds=timeout) if control_url else None
        client = client_of(address, api_key=key, timeout_seconds=settings.timeout_seconds)
        try:
            retries = Retries(settings.retries, gives_up_with=EngineError, seed=settings.seed, sleep=sleep)
            handshake = await shake_hands(address, client, control, retries, settings)
        except BaseException:
            await client.close()
            if control is not None:
                await control.close()
            raise
        if control is not None and not handshake.update_kinds:
            await control.close()
            control = None
        return cls(settings, client, control, handshake, retries)

    @property
    def capabilities(self) -> Capabilities:
        found = self.handshake
        # Without the versions of single tokens it could not be told which weights sampled a kept call.
        can_keep = bool(found.update_kinds) and (found.route.says_versions or "adapter" in found.update_kinds)
        return Capabilities(
            is_trainable=True,
            seeds_per_request=True,
            reuses_prefixes=found.reuses_prefixes,
            max_model_len=found.max_model_len,
            update_kinds=found.update_kinds,
            pause_modes=("wait", "keep") if can_keep else ("wait",),
            has_checksums=found.has_checksums,
            structured_output=found.has_tokenizer,
        )

    @property
    def counters(self) -> RetryCounters:
        """Return the calls, attempts and failures so far, those of the handshake included."""
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
            ConfigError: a temperature, `min_tokens` or JSON schema that the server would not obey.
            ContextOverflowError: the prompt leaves no room for a single token.
            EngineTimeoutError, EnginePoisonedError: see `Engine.generate`.
            EngineError: a prompt token is not in the vocabulary, the server refused, or the last attempt failed.
        """
        prompt = token_list(prompt_token_ids)
        max_new = num_tokens_to_sample(len(prompt), sampling, self.handshake.max_model_len)
        require_vocabulary(min(prompt), max(prompt), self._settings.vocab_size)
        if sampling.min_tokens > 0 and self.handshake.has_own_end_tokens:
            raise ConfigError(
                "SamplingParams.min_tokens: this server withholds end tokens of the model's own, too; use one that "
                "`gspo-gym serve --engine vllm` started"
            )
        if not self.handshake.has_tokenizer:
            refuse_schema(sampling, "this vLLM server (it runs without a tokenizer)")
        sampling_fields(sampling, max_new)  # refuses what vLLM would change
        deadline = self._settings.deadline_seconds if deadline_seconds is None else deadline_seconds
        async with self._gate.admit(session_id, deadline):
            return await self._sample(prompt, sampling, max_new, session_id)

    async def pause(self, mode: PauseMode) -> None:
        """Admit no calls; requests in flight end first ("wait") or freeze ("keep"). Then the server is idle."""
        await super().pause(mode)
        if self._control is not None:
            await self._control.pause(mode)

    async def apply_weights(self, update: WeightUpdate) -> None:
        """Have the server read a whole model ("full") or an adapter ("adapter"); see `Engine.apply_weights`.

        Raises:
            ConfigError: a kind that is not in the capabilities; says why not.
            EngineError: the engine is not paused, or the weights cannot be loaded.
        """
        if update.kind not in self.handshake.update_kinds:
            raise ConfigError(
                f"VllmHttpEngine: expected an update of kind {' or '.join(self.handshake.update_kinds) or 'none'}, got "
                f"{update.kind!r}; {self.handshake.why_no_updates or 'see --max-lora-rank of gspo-gym serve'}"
            )
        self._gate.require_paused()
        assert self._control is not None
        assert update.folder is not None
        try:
            if update.kind == "adapter":
                await self._served.load_adapter(update)
            else:
                folder = weights_folder(update.folder, self.handshake.model_folder)
                await self._control.reload_weights(folder, has_our_workers=self.handshake.has_our_workers)
                await self._served.relabel(update.version)
            # For the attestation of the new weights; the gate lets no answer out before `resume`.
            await self._control.resume()
        except EngineError as error:
            raise EngineError(f"the weights of version {update.version} could not be loaded: {error}") from error

    async def checksums(self) -> Mapping[str, str]:
        """Return the sha256 of each tensor, by rank and vLLM's name; {} without `capabilities.has_checksums`.

        vLLM fuses tensors, so the digests can be compared with those of another vLLM engine, but not with files. On the
        CPU its linear layers are packed and have none: they must be attested by logprobs. Adapters have none.
        """
        if self._control is None or not self.handshake.has_checksums:
            return {}
        return await self._control.checksums()

    async def resume(self, version: int) -> None:
        """Commit; see `Engine.resume`. Without `apply_weights` before it, the weights go on under a new version."""
        self._gate.require_paused()
        # Without an update the weights go on under a new name.
        if version != self._served.current.version:
            await self._served.relabel(version)
        if self._control is not None:
            await self._control.resume()
        self._gate.resume(version)

    async def health(self) -> EngineHealth:
        """Return the state; asks the server."""
        if not self._gate.health().is_alive:
            return self._gate.health()
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await self._client.get("/health")
        except (EngineError, TimeoutError) as error:
            return self._gate.health(f"the server is not well: {error or f'no answer in {_HEALTH_SECONDS:g} seconds'}")
        return self._gate.health()

    async def close(self) -> None:
        """Give the connections back; the server goes on. Calls in flight, and all later ones, raise EngineError."""
        await self._close_gate()
        await self._client.close()
        if self._control is not None:
            await self._control.close()

    async def _sample(
        self, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int, session_id: str | None
    ) -> Completion:
        self._num_calls += 1
        served = self._served.begin()
        request = SampleRequest(
            prompt=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            served=served,
            call_id=f"{self._name}-{self._num_calls}",
            session_id=session_id,
            padding_ids=padding_ids(self._settings.num_token_ids, self._settings.vocab_size),
        )

        async def attempt(number: int) -> Completion:
            sampled = await self._route.sample(request, number)
            versions = self._served.versions_of(sampled, served)
            return replace(sampled.completion, weight_version=np.array(versions, np.int32))

        try:
            return await self._retries.run(attempt)
        finally:
            await self._end(served)

    async def _end(self, served: Served) -> None:
        # A server that is dead has failed the call already; a slow one only keeps a name that is not used again.
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_HEALTH_SECONDS):
                await self._served.end(served)


_PROCESSED = "processed_logprobs"
_PROMPT = (1, 2, 3)
_SHORT = SamplingParams(max_tokens=1, stop_token_ids=(), seed=0)
_ANOTHER_MACHINE = "the server is not on this machine; bring it here with: ssh -L 8000:127.0.0.1:8000 HOST"
_NO_DEV_MODE = "the server has no control routes; start it with VLLM_SERVER_DEV_MODE=1, on 127.0.0.1"
_NO_ADAPTERS = "the server takes adapters, but not while it runs; start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
_NO_CPU_RELOAD = (
    "on the CPU vLLM's own reload may keep an old output head; start the server with `gspo-gym serve --engine vllm` "
    f"or with --worker-extension-cls {WORKER_EXTENSION}"
)


@dataclass(frozen=True, slots=True)
class Handshake:
    """The capabilities of a server.

    Attributes:
        route: by which samples are asked for.
        model: the name of the served model.
        max_model_len: longest prompt plus completion, in tokens.
        label: the server's name for its weights.
        update_kinds: the ways by which new weights can reach it; only ("adapter",) if it takes adapters: they would not
            fit a base model that is read again.
        why_no_updates: None if there are ways.
        reuses_prefixes: as far as it is known.
        has_checksums: of whole models.
        has_own_end_tokens: `min_tokens` would withhold more than the request's stop tokens.
        has_tokenizer: it can obey schemas, as far as it is known.
        has_our_workers: they reload whole models completely on every device.
        model_folder: the served model's, if it is known and a folder.
    """

    route: Route
    model: str
    max_model_len: int
    label: str
    update_kinds: tuple[UpdateKind, ...]
    why_no_updates: str | None
    reuses_prefixes: bool
    has_checksums: bool
    has_own_end_tokens: bool
    has_tokenizer: bool
    has_our_workers: bool
    model_folder: Path | None


async def shake_hands(
    address: Address, client: EngineClient, control: VllmControl | None, retries: Retries, settings: VllmHttpSettings
) -> Handshake:
    """Ask the server; afterwards it runs, and its weights have a name that we gave, if it takes one.

    Args:
        client, control: connections for samples and for weights; no control: the server is another machine's.

    Raises:
        ConfigError: it computes in another dtype, or its logprobs are not of the sampling distribution.
        EngineError: it does not answer, or not with token ids and logprobs.
    """
    card = await retries.run(lambda _: _model_card(client, address.url, settings.model))
    info = await _info(control)
    if info is not None:
        _require_fit(address.url, info, settings.dtype)
    if control is not None and info is not None:
        await control.resume()  # a client that died in an update left it paused
    else:
        control = None
    why_not = _why_no_updates(control, info, is_here=address.is_local)
    kinds: tuple[UpdateKind, ...] = ()
    if why_not is None and info is not None:
        kinds = ("adapter",) if info.max_lora_rank else ("full",)
    route = await _find_route(client, retries, model=card["id"], vocab_size=settings.vocab_size)
    ask = _ask(route, retries, model=card["id"])
    await _require_processed(address.url, ask)
    return Handshake(
        route=route,
        model=card["id"],
        max_model_len=settings.max_model_len or _length(address.url, card),
        label=await _label(control, ask),
        update_kinds=kinds,
        why_no_updates=why_not,
        reuses_prefixes=info is not None and info.reuses_prefixes,
        has_checksums=control is not None and kinds == ("full",) and bool(await control.checksums()),
        has_own_end_tokens=info is None or info.has_own_end_tokens,
        has_tokenizer=info is not None and info.has_tokenizer,
        has_our_workers=info is not None and info.has_our_workers,
        model_folder=None if info is None else info.model_folder,
    )


async def _model_card(client: EngineClient, url: str, model: str | None) -> dict[str, Any]:
    # Adapters are listed, too: they have a parent.
    answer = await client.get("/v1/models")
    listed = answer.get("data") if isinstance(answer, dict) else None
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    names = [card.get("id") for card in cards if card.get("parent") is None]
    if not names or not isinstance(names[0], str) or (model is not None and model not in names):
        raise EngineError(f"{url}: expected the model {model or 'that is served'}, got {shorten(names)}")
    # Several names are aliases of one model.
    return next(card for card in cards if card.get("id") == (model or names[0]))


def _length(url: str, card: dict[str, Any]) -> int:
    length = card.get("max_model_len")
    if type(length) is not int or length < 2:
        raise ConfigError(f"{url}: does not say how long its context is; set max_model_len")
    return length


async def _info(control: VllmControl | None) -> ServerInfo | None:
    # A server without the development mode has no such route.
    if control is None:
        return None
    try:
        return await control.server_info()
    except RefusedError:
        return None


def _require_fit(url: str, info: ServerInfo, dtype: str | None) -> None:
    if info.logprobs_mode != _PROCESSED:
        raise ConfigError(
            f"{url}: its logprobs are {info.logprobs_mode}, not of the distribution that is sampled from; start it "
            f"with --logprobs-mode {_PROCESSED}"
        )
    if dtype is not None and info.dtype != dtype:
        raise ConfigError(f"{url}: expected a server in {dtype}, it computes in {info.dtype}; start it with --dtype")


def _why_no_updates(control: VllmControl | None, info: ServerInfo | None, *, is_here: bool) -> str | None:
    if control is None or info is None:
        return _NO_DEV_MODE if is_here else _ANOTHER_MACHINE
    if info.max_lora_rank:
        return None if info.loads_adapters else _NO_ADAPTERS
    return _NO_CPU_RELOAD if info.device == "cpu" and not info.has_our_workers else None


async def _find_route(client: EngineClient, retries: Retries, *, model: str, vocab_size: int) -> Route:
    # Best first: the first route also tells which weights sampled each token.
    routes: list[Route] = [
        GenerateRoute(client, "/inference/v1/generate", vocab_size=vocab_size, checks=SampleChecks(is_ours=True)),
        CompletionsRoute(client, "/v1/completions", vocab_size=vocab_size, checks=SampleChecks(is_ours=True)),
    ]
    reasons = []
    for route in routes:
        try:
            await _ask(route, retries, model=model)(_PROMPT, _SHORT)
        except RefusedError as error:
            reasons.append(str(error))
        else:
            return route
    raise EngineError("the server gives no token ids and logprobs:\n  " + "\n  ".join(reasons))


def _ask(route: Route, retries: Retries, *, model: str) -> _Ask:
    # A name that no update uses: its keys and values are never found again.
    return _Ask(route, retries, Served(version=0, model=model, salt=new_name(0)))


class _Ask:
    """Samples for the handshake; `labels` are those that the tokens carried."""

    def __init__(self, route: Route, retries: Retries, served: Served) -> None:
        self.labels: set[str] = set()
        self._route = route
        self._retries = retries
        self._served = served
        self._num_calls = 0

    async def __call__(self, prompt: Sequence[int], sampling: SamplingParams) -> Completion:
        self._num_calls += 1
        request = SampleRequest(
            prompt=prompt,
            sampling=sampling,
            max_tokens=sampling.max_tokens,
            served=self._served,
            call_id=f"{self._served.salt}-{self._num_calls}",
        )
        sampled = await self._retries.run(partial(self._route.sample, request))
        self.labels |= {label for label, _, _ in sampled.versions}
        return sampled.completion


async def _require_processed(url: str, ask: _Ask) -> None:
    # Shown by samples, because a plugin could change the server's mode.
    facts = await find_logprob_facts(ask)
    if facts.mode != "processed" or not facts.is_renormalised:
        raise ConfigError(
            f"{url}: its logprobs are {facts.mode}, not of the distribution that is sampled from; start it with "
            f"--logprobs-mode {_PROCESSED}"
        )


async def _label(control: VllmControl | None, ask: _Ask) -> str:
    # A new one, so that a later label that is not ours shows another client.
    if control is not None:
        label = new_name(0)
        await control.set_version(label)
        return label
    if len(ask.labels) > 1:
        raise EngineError(f"the server's weights changed during the handshake: {sorted(ask.labels)}")
    return next(iter(ask.labels), "")

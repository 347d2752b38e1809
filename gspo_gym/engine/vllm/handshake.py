"""The capabilities of a vLLM server, found out once: by asking it, and by samples where its word is no proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gspo_gym.base.retries import Retries
from gspo_gym.engine.base import SamplingParams, UpdateKind
from gspo_gym.engine.endpoint.http import find_logprob_facts
from gspo_gym.engine.endpoint.routes import (
    CompletionsRoute,
    GenerateRoute,
    Route,
    SampleChecks,
    SampleRequest,
    Served,
)
from gspo_gym.engine.endpoint.wire import EngineClient, RefusedError, shorten
from gspo_gym.engine.vllm.control import Address, ServerInfo, VllmControl
from gspo_gym.engine.vllm.versions import new_name
from gspo_gym.engine.vllm.worker import WORKER_EXTENSION
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.types import Completion

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
    address: Address,
    client: EngineClient,
    control: VllmControl | None,
    retries: Retries,
    *,
    model: str | None,
    vocab_size: int,
    dtype: str | None,
    max_model_len: int | None,
) -> Handshake:
    """Ask the server; afterwards it runs, and its weights have a name that we gave, if it takes one.

    Args:
        address: of the server.
        client, control: connections for samples and for weights; no control: the server is another machine's.
        retries: of samples.
        model, max_model_len: None: as the server says.
        vocab_size: token ids are below it.
        dtype: in which it must compute; None: any.

    Raises:
        ConfigError: it computes in another dtype, or its logprobs are not of the sampling distribution.
        EngineError: it does not answer, or not with token ids and logprobs.
    """
    card = await retries.run(lambda _: _model_card(client, address.url, model))
    info = await _info(control)
    if info is not None:
        _require_fit(address.url, info, dtype)
    if control is not None and info is not None:
        await control.resume()  # a client that died in an update left it paused
    else:
        control = None
    why_not = _why_no_updates(control, info, is_here=address.is_local)
    kinds: tuple[UpdateKind, ...] = ()
    if why_not is None and info is not None:
        kinds = ("adapter",) if info.max_lora_rank else ("full",)
    route = await _find_route(client, retries, model=card["id"], vocab_size=vocab_size)
    ask = _ask(route, retries, model=card["id"])
    await _require_processed(address.url, ask)
    return Handshake(
        route=route,
        model=card["id"],
        max_model_len=max_model_len or _length(address.url, card),
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
    """Return the entry of `/v1/models` for the model; adapters, which have a parent, are left out."""
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
    """Return the settings that the server was started with; None if it does not tell."""
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
    """Return the first route that works, best first.

    Raises:
        EngineError: none does; says why, for each.
    """
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
    return _Ask(route, retries, Served(version=0, model=model, salt=new_name(0)))


class _Ask:
    """Samples for the handshake, under a name that no update uses; `labels` are those that the tokens carried."""

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
    """Require logprobs of the sampling distribution, shown by samples: a plugin could change the server's mode."""
    facts = await find_logprob_facts(ask)
    if facts.mode != "processed" or not facts.is_renormalised:
        raise ConfigError(
            f"{url}: its logprobs are {facts.mode}, not of the distribution that is sampled from; start it with "
            f"--logprobs-mode {_PROCESSED}"
        )


async def _label(control: VllmControl | None, ask: _Ask) -> str:
    """Return the server's name for its weights; it gets a new one if there is control."""
    if control is not None:
        label = new_name(0)
        await control.set_version(label)
        return label
    if len(ask.labels) > 1:
        raise EngineError(f"the server's weights changed during the handshake: {sorted(ask.labels)}")
    return next(iter(ask.labels), "")

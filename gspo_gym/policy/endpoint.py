"""A teacher behind an endpoint: an episode's token ids go out as a prompt, and the logprobs of these tokens come back.

Asked is `/v1/completions` with `prompt_logprobs`, as vLLM and `gspo-gym models serve` answer it. These logprobs are the
model's own, at temperature 1 and of the whole vocabulary, whatever a request says of sampling. The endpoint's claims
about its model are kept, and compared with those of later answers. Not for sampling, which `engine/endpoint` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_gym.base.http import HttpClient, call_headers
from gspo_gym.base.loops import all_of, run_to_end
from gspo_gym.base.retries import AttemptError, Retries, RetrySettings, Sleep
from gspo_gym.base.settings import read_key
from gspo_gym.errors import ConfigError, ServiceError, shortened
from gspo_gym.learning.batching import TokenBatch

Json = Any  # a JSON value, not checked

VOCABULARY = "vocabulary_sha256"  # of a model's entry in /v1/models, as `vocabulary_digest` computes it
WEIGHTS = "weights_sha256"  # the same of its weights, as `weights_digest`; and an answer's system_fingerprint

_MAX_REQUESTS = 32  # at the same time; an engine queues what it cannot take
_TIMEOUT_SECONDS = 300.0  # of an attempt at one episode, its last byte included
_CONNECT_SECONDS = 10.0
_DEADLINE_SECONDS = 900.0  # of all attempts at it, and the waits between them
# Any vocabulary has these; in no sane text, so that another model is surprised otherwise.
_PROBE = tuple(range(11, 27))
# Nats between two answers about the probe. Logits of 16 bits have steps of 0.06 to 0.13 where these logprobs lie, and
# another batch rounds otherwise; other weights differ by some nats.
_MAX_DRIFT = 0.5
_MAX_LOGPROB = 1e-3  # rounding may leave one a little above 0
_MINUS_INFINITY = -9999.0  # vLLM writes this for it, as JSON has none


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What an endpoint says of a model.

    Attributes:
        name: what requests call it.
        root: where its server has it from; None: it does not say.
        max_model_len: longest prompt plus completion, in tokens; None: it does not say.
        vocabulary: digest of tokens and merges; None: it publishes none.
        weights: digest of the weights; None: it publishes none.
    """

    name: str
    root: str | None = None
    max_model_len: int | None = None
    vocabulary: str | None = None
    weights: str | None = None

    @property
    def proves_itself(self) -> bool:
        """Return whether it is `gspo-gym models serve`: its answers sample nothing, and name the weights."""
        return self.vocabulary is not None


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A served model, and its logprobs [15] of a fixed prompt, nats."""

    model: ServedModel
    probe: tuple[float, ...]

    def drift(self, other: ProbedModel) -> float:
        """Return the largest distance between the two's logprobs of the prompt, nats."""
        return max(abs(a - b) for a, b in zip(self.probe, other.probe, strict=True))


class EndpointTeacher:
    """Scores episodes by the model at an endpoint.

    Each update asks for all of its rows at once, one request each, up to their last sampled token. Connections live as
    long as that.

    Args:
        url: up to and with /v1.
        model: its name there; None: the only one that the endpoint lists.
        api_key_env: environment variable that holds the key; None: no key is sent.
        retries, sleep: of failed attempts.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key_env: str | None = None,
        retries: RetrySettings | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.url, self._model, self._api_key_env = url, model, api_key_env
        self._first: ProbedModel | None = None  # all later ones must be like it
        self._retry_settings, self._sleep = retries or RetrySettings(), sleep
        self._prepared: list[tuple[TokenBatch, Tensor]] = []

    async def find(self) -> ProbedModel:
        """Return what the endpoint says of the model now, after it has scored a short prompt; keep the first such.

        Raises:
            ConfigError: the key is not set, or it is not clear which model is meant.
            ServiceError: there is no answer, or no logprobs of a prompt; or another model than before.
            MissingExtraError: httpx is not installed.
        """
        async with self._asking() as asking:
            return await self._find(asking)

    def prepare(self, batches: Sequence[TokenBatch]) -> None:
        """Ask for the logprobs of these batches, for which `logprobs` is called later.

        Raises:
            ServiceError: one could not be had, or the model is not the one that was found. All is forgotten then.
        """
        self._prepared = []
        rows = [
            batch.token_ids[row, : int(batch.action_mask[row].nonzero()[-1]) + 1].tolist()
            for batch in batches
            for row in range(len(batch.token_ids))
            if bool(batch.action_mask[row].any())
        ]
        scores = iter(run_to_end(self._score_all(rows)))
        for batch in batches:
            values = torch.zeros(batch.action_mask.shape, dtype=torch.float32)
            for row in torch.nonzero(batch.action_mask.any(1)).flatten().tolist():
                row_scores = torch.tensor(next(scores), dtype=torch.float32)
                values[row, : len(row_scores)] = row_scores
            mask = batch.action_mask
            self._prepared.append((batch, values.to(mask.device) * mask))

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return [B, T] float32 of the sampled tokens, constants, on the batch's device; 0 where nothing was sampled.

        Raises:
            ServiceError: see `prepare`, if it was not called for the batch.
        """
        for place, (prepared, values) in enumerate(self._prepared):
            if prepared is batch:
                del self._prepared[place]
                return values
        self.prepare([batch])
        return self._prepared.pop()[1]

    async def _score_all(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        try:
            async with self._asking() as asking:
                model = (await self._find(asking)).model
                return await all_of(asking.score(model, row) for row in rows)
        except ServiceError as error:
            raise ServiceError(
                f"distillation.teacher: {error}. The step's episodes were not learned from; see that the endpoint "
                "answers, and go on with --resume"
            ) from error

    async def _find(self, asking: _Asking) -> ProbedModel:
        model = await asking.look(self._model)
        present = ProbedModel(model, tuple((await asking.score(model, _PROBE))[1:]))
        if self._first is None:
            self._first = present
        if (difference := _difference(self._first, present)) is not None:
            raise ServiceError(f"{self.url}: {difference}: a run has one teacher; serve that one again")
        return present

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[_Asking]:
        client = HttpClient(
            self.url,
            timeout_seconds=_TIMEOUT_SECONDS,
            api_key=read_key(self._api_key_env, "distillation.api_key_env"),
            max_connections=_MAX_REQUESTS,
            max_connect_seconds=_CONNECT_SECONDS,
        )
        try:
            yield _Asking(client, Retries(self._retry_settings, gives_up_with=ServiceError, sleep=self._sleep))
        finally:
            await client.close()


class _Asking:
    """Requests of one update, over the same connections and with a common budget of retries."""

    def __init__(self, client: HttpClient, retries: Retries) -> None:
        self._client, self._retries = client, retries
        self._places = asyncio.Semaphore(_MAX_REQUESTS)  # a request's time begins when it is sent

    async def look(self, name: str | None) -> ServedModel:
        """Return what the endpoint says of the model of that name; None: of its only one."""
        answer = await self._retries.run(lambda _: self._client.get_object("/models"))
        entries = answer.get("data")
        cards = [card for card in entries if isinstance(card, dict)] if isinstance(entries, list) else []
        chosen = cards if name is None else [card for card in cards if card.get("id") == name]
        if len(chosen) != 1 or not isinstance(chosen[0].get("id"), str):
            names = ", ".join(str(card.get("id")) for card in cards) or "none"
            raise ConfigError(
                f"distillation.teacher_model: expected {'one model' if name is None else repr(name)} at "
                f"{self._client.base_url}, which lists {shortened(names, 300)}; name one of these"
            )
        card = chosen[0]
        texts = {key: card[key] if isinstance(card.get(key), str) else None for key in ("root", VOCABULARY, WEIGHTS)}
        length = card.get("max_model_len")
        return ServedModel(
            name=card["id"],
            root=texts["root"],
            max_model_len=length if type(length) is int else None,
            vocabulary=texts[VOCABULARY],
            weights=texts[WEIGHTS],
        )

    async def score(self, model: ServedModel, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token, nats; 0 of the first, which nothing precedes."""
        call_id = uuid.uuid4().hex
        body = {
            "model": model.name,
            "prompt": list(token_ids),
            "prompt_logprobs": 0,  # the prompt's own tokens', and no alternatives
            # vLLM samples one token at least; the other fields say how, and that it is not looked at.
            "max_tokens": 0 if model.proves_itself else 1,
            "temperature": 0.0,
            "n": 1,
            "stream": False,
            "add_special_tokens": False,
            "return_token_ids": True,
        }

        async def attempt(number: int) -> list[float]:
            headers = call_headers(call_id, number)
            answer = await self._client.post_object("/completions", body, headers=headers)
            return _read(answer, token_ids, model)

        async with self._places:
            try:
                async with asyncio.timeout(_DEADLINE_SECONDS):
                    return await self._retries.run(attempt)
            except TimeoutError as error:
                raise ServiceError(
                    f"{self._client.base_url}: no logprobs of {len(token_ids)} tokens within {_DEADLINE_SECONDS:g} "
                    "seconds, attempts and waits included"
                ) from error


def _difference(before: ProbedModel, now: ProbedModel) -> str | None:
    """Return why the model is not the one of before; None: nothing says so."""
    has_digests = None not in (before.model.weights, now.model.weights)
    names = ("vocabulary", "weights") if has_digests else ("name", "root", "vocabulary")
    pairs = [(name, getattr(before.model, name), getattr(now.model, name)) for name in names]
    if changes := [f"{name} {old!r} became {new!r}" for name, old, new in pairs if old != new]:
        return f"serves another model than before ({', '.join(changes)})"
    if (drift := before.drift(now)) > _MAX_DRIFT:
        return (
            f"{now.model.name} gives a fixed prompt logprobs that are {drift:.2g} nats from those at first (at "
            f"most {_MAX_DRIFT}), so that it has other weights now"
        )
    return None


def _read(answer: Json, token_ids: Sequence[int], model: ServedModel) -> list[float]:
    """Return the logprobs in an answer, read with suspicion: a wrong one must never be learned from.

    Raises:
        AttemptError: they are not complete, are another prompt's or another model's, or are no logprobs.
    """
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(choice, dict):
        raise _wrong(f"expected one choice, got {shortened(repr(choices), 120)}")
    if choice.get("prompt_token_ids") != list(token_ids):
        raise _wrong("expected prompt_token_ids as they were sent, got another prompt or none")
    fingerprint = answer.get("system_fingerprint")
    if model.proves_itself and fingerprint != (model.weights or model.root):
        raise _wrong(f"of the weights {shortened(repr(fingerprint), 80)}, expected those of {model.name} in /v1/models")
    places = choice.get("prompt_logprobs")
    if not isinstance(places, list) or len(places) != len(token_ids):
        raise _wrong(
            f"expected prompt_logprobs of {len(token_ids)} tokens, got {shortened(repr(places), 120)}; vLLM and "
            "gspo-gym models serve give them"
        )
    logprobs = [0.0]
    for place, (token, entries) in enumerate(zip(token_ids[1:], places[1:], strict=True), 1):
        entry = entries.get(str(token)) if isinstance(entries, dict) else None
        value: Json = entry.get("logprob") if isinstance(entry, dict) else None
        if type(value) not in (int, float) or not _MINUS_INFINITY < value <= _MAX_LOGPROB:  # NaN is not, either
            text = shortened(repr(value), 60)
            raise _wrong(f"expected a finite logprob <= 0 of token {token} at {place}, got {text}")
        logprobs.append(float(value))
    return logprobs


def _wrong(message: str) -> AttemptError:
    return AttemptError(f"answer: {message}", kind="answer")

"""Every field of `Sampling` reaches every place that samples as it was asked, or is refused there: one rule for all.

A wire takes parameters to what it sends, or to what the local engine computes with, under our names.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from gspo_gym.config.build.episode_collection import endpoint_settings
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.routes import SampleRequest, TextRoute
from gspo_gym.engine.endpoint.wire import completions_request, sglang_request
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.local.rows import RowTable
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.engine.vllm.requests import sampling_fields
from gspo_gym.errors import ConfigError
from gspo_gym.policy.load import load_policy
from gspo_gym.remote.gateway.slices import SlicedEngine
from gspo_gym.types import SAMPLING_NAMES

Json = dict[str, Any]
# A value of each that asks for something else than the default; a field without one here is one that no wire was
# looked at for.
OTHER: Json = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 7,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "min_tokens": 3,
}
PLAIN = SamplingParams(max_tokens=40, stop_token_ids=(9,), seed=1)
ASKED = {"model": "m", "max_tokens": 40, "request_id": "r"}


class Letters:
    """Token ids are letters from "a" on."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(ord("a") + token) for token in token_ids)


class Listening:
    """A client that answers every request with one letter, and keeps the last body."""

    body: Mapping[str, Any]

    async def post_object(self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str]) -> Json:
        assert path
        assert headers
        self.body = body
        return {"choices": [{"text": "b", "finish_reason": "stop"}]}


def by_text(sampling: SamplingParams) -> Json:
    client = Listening()
    route = TextRoute(client, "/v1/completions", tokenizer=Letters())  # type: ignore[arg-type]
    request = SampleRequest(prompt=[1], sampling=sampling, max_tokens=40, model="m", call_id="c")
    asyncio.run(route.sample(request, 0))
    return dict(client.body)


def by_sglang(sampling: SamplingParams) -> Json:
    sent = sglang_request([1], sampling, max_tokens=40, request_id="r")["sampling_params"]
    return {**sent, "min_tokens": sent["min_new_tokens"]}


def by_local_engine(sampling: SamplingParams) -> Json:
    table, slot = RowTable(1), np.zeros(1, np.int64)
    table.start(0, sampling, 40, np.zeros(1, np.int32))
    rows = table.sampling(slot, torch.device("cpu"))
    found = {name: getattr(rows, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    found["repetition_penalty"] = None if rows.repetition is None else rows.repetition.penalty
    num_forbidding = 0
    while table.sampling(slot, torch.device("cpu")).forbidden is not None:
        table.append(slot, np.ones(1, np.int64), np.zeros(1, np.float32))
        num_forbidding += 1
    return {"min_tokens": num_forbidding} | {n: None if v is None else v.item() for n, v in found.items()}


def by_slices(sampling: SamplingParams) -> Json:
    engine = ScriptedEngine(lambda prompt, _turn: [5] * 64 if len(prompt) < 17 else [9])
    asyncio.run(SlicedEngine(engine).generate([1], sampling))
    first = engine.calls[0].sampling
    assert first.max_tokens == 16
    return first.values()


def by_chat(sampling: SamplingParams) -> Json:
    return dataclasses.asdict(endpoint_settings("openai:m@http://127.0.0.1:9/v1", sampling=sampling, max_tokens=40))


WIRES: dict[str, Callable[[SamplingParams], Json]] = {
    "vLLM": lambda sampling: sampling_fields(sampling, 40),
    "/v1/completions with token ids": lambda sampling: completions_request([1], sampling, **ASKED),
    "SGLang": by_sglang,
    "/v1/completions with text": by_text,
    "the local engine": by_local_engine,
    "models serve, in slices": by_slices,
    "a model behind a chat route": by_chat,
}
REFUSED = {
    "SGLang": {"repetition_penalty"},  # it passes over the prompt
    "/v1/completions with text": {"top_k", "min_p", "repetition_penalty", "min_tokens"},  # OpenAI has no such fields
    "a model behind a chat route": {"top_k", "min_p", "repetition_penalty", "min_tokens"},
}


def test_every_field_was_looked_at() -> None:
    assert set(OTHER) == set(SAMPLING_NAMES)


@pytest.mark.parametrize("name", SAMPLING_NAMES)
@pytest.mark.parametrize("wire", WIRES)
def test_a_field_is_sent_as_it_was_asked_or_refused(wire: str, name: str) -> None:
    sampling = dataclasses.replace(PLAIN, **{name: OTHER[name]})
    if name in REFUSED.get(wire, ()):
        with pytest.raises(ConfigError, match=name):
            WIRES[wire](sampling)
    else:
        assert WIRES[wire](sampling)[name] == OTHER[name]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoreParams(SamplingParams):
    """A record that has gained a parameter, of which some wires used to write a constant."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def values(self) -> Json:
        penalties = {"frequency_penalty": self.frequency_penalty, "presence_penalty": self.presence_penalty}
        return SamplingParams.values(self) | penalties


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("wire", ["vLLM", "/v1/completions with token ids", "SGLang"])
def test_no_constant_goes_over_a_value_of_the_record(wire: str, name: str) -> None:
    sampling = MoreParams(max_tokens=40, stop_token_ids=(9,), seed=1, **{name: 0.5})  # type: ignore[arg-type]
    assert WIRES[wire](sampling)[name] == 0.5


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_the_local_engine_refuses_a_setting_that_it_does_not_obey(name: str) -> None:
    sampling = MoreParams(max_tokens=40, stop_token_ids=(9,), seed=1, **{name: 0.5})  # type: ignore[arg-type]

    async def main() -> None:
        engine = LocalEngine(load_policy("tiny:qwen3-64").model, max_model_len=64)
        try:
            await engine.generate([1], sampling)
        finally:
            await engine.close()

    with pytest.raises(ConfigError, match=f"LocalEngine takes .* only; leave {name} at the default"):
        asyncio.run(main())


def test_what_counts_sampled_tokens_is_sampled_in_one_call_and_not_in_slices() -> None:
    engine = ScriptedEngine(lambda _prompt, _turn: [5] * 64)
    sampling = MoreParams(max_tokens=40, stop_token_ids=(9,), seed=1, frequency_penalty=0.5)
    completion = asyncio.run(SlicedEngine(engine).generate([1], sampling))
    assert [call.sampling.max_tokens for call in engine.calls] == [40]
    assert len(completion.token_ids) == 40

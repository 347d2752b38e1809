"""The engine contract over the engines that need nothing but this package; vLLM's are in tests/vllm."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import engine_contract_life
import engine_contract_sampling
import hash_model
import numpy as np
import pytest
import torch
from agreement import nudge
from engine_contract import Clause, Subject, cases_of, lacking, sampling
from faulty_server import MAX_MODEL_LEN, MODEL, FaultyServer
from tiers import slow_but

from gspo_gym.engine.base import Engine, WeightUpdate
from gspo_gym.engine.endpoint.http import HttpEngine, HttpSettings
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.engine.scripted import Latency, ScriptedEngine
from gspo_gym.errors import ConfigError
from gspo_gym.policy.load import load_policy

CLAUSES = [*engine_contract_sampling.CLAUSES, *engine_contract_life.CLAUSES]
MAX_LEN = 512


def plain_logits(model: Any) -> Callable[[Any], Any]:
    """Logits [T, V] of token ids [T] by one plain forward of transformers."""

    def logits(token_ids: Any) -> Any:
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].double().numpy()

    return logits


@asynccontextmanager
async def _scripted() -> AsyncIterator[Subject]:
    """Replies depend on the prompt; a token takes a tenth of a millisecond, so that a call can be caught in flight."""
    engine = ScriptedEngine(
        lambda tokens, turn: [(sum(tokens) + 7 * turn + k) % 64 for k in range(MAX_LEN)],
        max_model_len=MAX_LEN,
        latency=Latency(per_token_seconds=1e-4),
    )
    yield Subject(engine, MAX_LEN, 64, change=lambda version: WeightUpdate(version, "full", Path("staged")))
    await engine.close()


@asynccontextmanager
async def _local(
    *, is_copy: bool = False, is_rebuildable: bool = False, num_replicas: int = 1
) -> AsyncIterator[Subject]:
    """On the learner's weights, or on copies of them; `change` is what the learner does to its own."""
    learner = load_policy("tiny:qwen3-64", seed=1).model

    async def make() -> LocalEngine:
        if is_copy:
            return LocalEngine(copy.deepcopy(learner), max_model_len=MAX_LEN, source=learner)
        return LocalEngine(learner, max_model_len=MAX_LEN)

    def change(version: int) -> WeightUpdate:
        nudge(learner, seed=version)
        return WeightUpdate(version, "shared")

    engine: Engine = await make()
    if is_rebuildable:
        engine = RebuildableEngine(engine, make)
    if num_replicas > 1:
        engine = RoutedEngine([engine, *[await make() for _ in range(num_replicas - 1)]])
    yield Subject(engine, MAX_LEN, learner.config.vocab_size, logits=plain_logits(learner), change=change)
    await engine.close()


@asynccontextmanager
async def _http(**server_options: Any) -> AsyncIterator[Subject]:
    """Behind a real server on loopback, whose model anyone can compute."""
    with FaultyServer(**server_options) as server:
        length = MAX_MODEL_LEN if server_options.get("dialect") == "text" else None  # which does not tell
        settings = HttpSettings(server.base_url, MODEL, max_model_len=length, vocab_size=hash_model.VOCAB_SIZE)
        engine = await HttpEngine.start(settings, hash_model.LetterTokenizer())
        is_sglang = server_options.get("dialect") == "sglang"
        yield Subject(
            engine, MAX_MODEL_LEN, hash_model.VOCAB_SIZE, logits=hash_logits, has_repetition_penalty=not is_sglang
        )
        await engine.close()


def hash_logits(token_ids: Any) -> Any:
    """Logits [T, 64] of the hash model after each token."""
    return np.stack([hash_model.logits(list(token_ids)[: end + 1]) for end in range(len(token_ids))])


ENGINES: dict[str, Callable[[], AbstractAsyncContextManager[Subject]]] = {
    "scripted": _scripted,
    "local": _local,
    "local on its own copy": lambda: _local(is_copy=True),
    "local, rebuildable": lambda: _local(is_rebuildable=True),
    "two local ones behind a router": lambda: _local(is_copy=True, num_replicas=2),
    "http": _http,
    "http with SGLang's dialect": lambda: _http(dialect="sglang"),
    "http with text only": lambda: _http(dialect="text"),
}


# By engine: what it declares not to have. Clauses that need it are no cases; what is refused instead is tested below.
_SHARED = {"pause_mode keep", "an update from a folder"}
_FROZEN = {"update_kinds", "an update from a folder", "pause_mode keep", "reports_versions"}
LACKS: dict[str, Collection[str]] = {
    "scripted": {"seeds_per_request", "a model"},
    "local": _SHARED,
    "local on its own copy": {"an update from a folder"},
    "local, rebuildable": _SHARED,
    "two local ones behind a router": {"an update from a folder"},
    "http": _FROZEN,
    "http with SGLang's dialect": {"repetition_penalty", *_FROZEN},
    "http with text only": {"is_trainable", *_FROZEN},
}
CASES = cases_of(CLAUSES, LACKS)


@pytest.mark.parametrize(
    ("name", "clause"),
    # The routes of an endpoint differ in their wires, which have tests of their own.
    slow_but(CASES, LACKS.keys() - {"http with SGLang's dialect", "http with text only"}),
    ids=lambda value: getattr(value, "name", value),
)
def test_the_engine_keeps(name: str, clause: Clause) -> None:
    async def keep() -> None:
        async with ENGINES[name]() as subject:
            await clause.keep(subject)

    asyncio.run(keep())


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_lacks_what_it_declares_to_lack_and_refuses_to_be_asked_for_it(name: str) -> None:
    async def ask() -> None:
        async with ENGINES[name]() as subject:
            engine = subject.engine
            assert lacking(subject) == LACKS[name]
            if "pause_mode keep" in LACKS[name]:
                with pytest.raises(ConfigError, match="got 'keep'"):
                    await engine.pause("keep")
            if "repetition_penalty" in LACKS[name]:
                with pytest.raises(ConfigError, match=r"repetition_penalty passes over the prompt.*got 1\.2"):
                    await engine.generate([1, 2, 3], sampling(repetition_penalty=1.2))
            if "an update from a folder" in LACKS[name]:
                await engine.pause("wait")
                with pytest.raises(ConfigError):
                    await engine.apply_weights(WeightUpdate(1, "full", Path("staged")))
                await engine.resume(0)
            assert len((await engine.generate([1, 2, 3], sampling())).token_ids) > 0  # as well as before

    asyncio.run(ask())

"""The engine contract over the engines that need nothing but this package; vLLM's are in tests/vllm."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator
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
from engine_contract import Clause, Excuses, Subject
from faulty_server import MAX_MODEL_LEN, MODEL, FaultyServer

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.http import HttpEngine, HttpSettings
from gspo_gym.engine.local import LocalEngine
from gspo_gym.engine.rebuildable import RebuildableEngine
from gspo_gym.engine.scripted import Latency, ScriptedEngine
from gspo_gym.models import load_policy

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
async def _local(*, is_copy: bool, is_rebuildable: bool = False) -> AsyncIterator[Subject]:
    """On the learner's weights, or on a copy of them; `change` is what the learner does to its own."""
    learner = load_policy("tiny:qwen3-64", seed=1).model

    async def make() -> LocalEngine:
        if is_copy:
            return LocalEngine(copy.deepcopy(learner), max_model_len=MAX_LEN, source=learner)
        return LocalEngine(learner, max_model_len=MAX_LEN)

    def change(version: int) -> WeightUpdate:
        nudge(learner, seed=version)
        return WeightUpdate(version, "shared")

    engine = await make()
    yield Subject(
        RebuildableEngine(engine, make) if is_rebuildable else engine,
        MAX_LEN,
        learner.config.vocab_size,
        logits=plain_logits(learner),
        change=change,
    )
    await engine.close()


@asynccontextmanager
async def _http(**server_options: Any) -> AsyncIterator[Subject]:
    """Behind a real server on loopback, whose model anyone can compute."""
    with FaultyServer(**server_options) as server:
        settings = HttpSettings(server.base_url, MODEL, vocab_size=hash_model.VOCAB_SIZE)
        engine = await HttpEngine.start(settings, hash_model.LetterTokenizer())
        yield Subject(engine, MAX_MODEL_LEN, hash_model.VOCAB_SIZE, logits=hash_logits)
        await engine.close()


def hash_logits(token_ids: Any) -> Any:
    """Logits [T, 64] of the hash model after each token."""
    return np.stack([hash_model.logits(list(token_ids)[: end + 1]) for end in range(len(token_ids))])


ENGINES: dict[str, Callable[[], AbstractAsyncContextManager[Subject]]] = {
    "scripted": _scripted,
    "local": lambda: _local(is_copy=False),
    "local on its own copy": lambda: _local(is_copy=True),
    "rebuildable": lambda: _local(is_copy=False, is_rebuildable=True),
    "http": _http,
    "http with SGLang's dialect": lambda: _http(dialect="sglang"),
    "http with text only": lambda: _http(dialect="text"),
}


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda clause: clause.name)
@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_keeps(name: str, clause: Clause, excuses: Excuses) -> None:
    async def keep() -> None:
        async with ENGINES[name]() as subject:
            await excuses.keep_or_excuse(name, clause, subject)

    asyncio.run(keep())

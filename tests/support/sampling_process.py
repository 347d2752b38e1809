"""A process that samples from a tiny model, `python -m tests.support.sampling_process`, and what starts one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from gspo_gym.base.ranks import LocalProcess, Rank
from gspo_gym.engine.base import Engine
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.replicas.process import ProcessEngine, ProcessSettings, serve
from gspo_gym.policy.load import load_policy


async def start_process(model: Any, *, max_model_len: int, **order: Any) -> ProcessEngine:
    """Start a process with a model of the same shape, which gets the weights of this one (Any: untyped)."""
    settings = ProcessSettings(
        start=partial(LocalProcess, "tests.support.sampling_process", ()),
        order={"max_model_len": max_model_len, **order},
        name="the process",
        silence_seconds=20.0,
        step_seconds=100.0,
    )
    return await ProcessEngine.start(settings, list(model.named_parameters()))


async def build(order: Mapping[str, Any], tensors: Iterator[tuple[str, torch.Tensor]]) -> Engine:
    torch.set_num_threads(1)
    model = load_policy("tiny:qwen3-64", seed=9).model
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors:
            own[name].copy_(tensor)
    return LocalEngine(model, takes_tensors=True, max_model_len=order["max_model_len"])


if __name__ == "__main__":
    serve(Rank.here(), build)

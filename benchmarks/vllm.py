"""vLLM for `python -m benchmarks engines`, where it is installed: started once: that is not sampling."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gspo_gym.engine.base import Engine
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.policy.load import Policy, save_policy

# Runs what samples from an engine to its end, and gives the number of tokens sampled.
RunWithEngine = Callable[[Callable[[Engine], Awaitable[int]]], int]


def has_vllm() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


@contextmanager
def running_vllm(policy: Policy, *, max_model_len: int, dtype: Any) -> Iterator[RunWithEngine]:
    """vLLM on a copy of the policy's weights (Any: a name of torch's; vLLM refuses what it has not)."""
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder, asyncio.Runner() as runner:
        save_policy(policy, Path(folder) / "policy")
        on_processor = policy.model.device.type == "cpu"
        settings = VllmSettings(
            model=str(Path(folder) / "policy"),
            max_model_len=max_model_len,
            dtype=dtype,
            gpu_memory_utilization=0.5,  # beside the other engines' model
            kv_cache_gib=1.0 if on_processor else None,
            enforce_eager=on_processor,
        )
        engine = runner.run(VllmEngine.start(settings))

        async def use(sample: Callable[[Engine], Awaitable[int]]) -> int:
            return await sample(engine)

        try:
            yield lambda sample: runner.run(use(sample))
        finally:
            runner.run(engine.close())

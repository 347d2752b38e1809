"""What new weights cost until vLLM samples under them: `python -m benchmarks weights`.

The same engine gets the same number of updates by files on disk, by files in memory (/dev/shm), and handed over through
this machine's memory, in turn, so that all are measured under the same load. Without attestation, which costs the same
everywhere; nothing is being sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gspo_gym.engine.base import UpdateKind
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.policy.load import Policy, load_policy, save_policy
from gspo_gym.policy.staging import Handover, Staging


@dataclass(slots=True)
class Costs:
    """Of one way, in seconds, an entry an update: until the weights are staged, and until they sample."""

    staging: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Way:
    """How updates reach the engine."""

    kind: UpdateKind
    staging: Staging | Handover


def run_weights(base: str, *, dtype: Any, num_updates: int) -> int:
    """Measure and print; the exit status (Any: a name of torch's; vLLM refuses what it has not)."""
    policy = load_policy(base, dtype=dtype)
    costs = asyncio.run(_measure_all(policy, dtype=dtype, num_updates=num_updates))
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in policy.model.parameters())
    console = Console()
    console.print(
        f"{base}, {num_bytes / 1e6:.0f} MB of weights, {dtype}; "
        f"{num_updates} updates each, in turn; medians, the first of each not counted"
    )
    console.print(render(costs))
    return 0


async def measure(engine: VllmEngine, policy: Policy, folder: Path, *, num_updates: int) -> dict[str, Costs]:
    """The costs of each way, for an engine that takes both kinds of updates. The policy is changed before each."""
    with _ways(policy, folder) as ways:
        costs = {name: Costs() for name in ways}
        for number in range(num_updates + 1):
            for name, way in ways.items():
                next(policy.model.parameters()).data.mul_(1.001)
                await _update(engine, way, costs[name] if number else Costs())
        return costs


def render(costs: Mapping[str, Costs]) -> Table:
    """The table."""
    table = Table("way")
    for heading in ("staging, s", "update, s", "update, times the fastest"):
        table.add_column(heading, justify="right")
    totals = {name: statistics.median(cost.total) for name, cost in costs.items()}
    for name, cost in costs.items():
        ratio = totals[name] / min(totals.values())
        table.add_row(name, _seconds(cost.staging), _seconds(cost.total), f"{ratio:.2f}")
    return table


@contextlib.contextmanager
def _ways(policy: Policy, folder: Path) -> Iterator[dict[str, Way]]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="gspo_gym-benchmark-", dir=memory if memory.is_dir() else None
    ) as in_memory:
        yield {
            "files on disk": Way("full", Staging(policy, folder / "staged")),
            "files in /dev/shm": Way("full", Staging(policy, Path(in_memory))),
            "shared_memory": Way("transfer", Handover(policy)),
        }


async def _measure_all(policy: Policy, *, dtype: Any, num_updates: int) -> dict[str, Costs]:
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder:
        save_policy(policy, Path(folder) / "policy")
        engine = await VllmEngine.start(_settings(Path(folder) / "policy", dtype))
        try:
            return await measure(engine, policy, Path(folder), num_updates=num_updates)
        finally:
            await engine.close()


async def _update(engine: VllmEngine, way: Way, costs: Costs) -> None:
    version = engine.weight_version + 1
    started = time.perf_counter()
    update = await asyncio.to_thread(way.staging.stage, version, way.kind)
    costs.staging.append(time.perf_counter() - started)
    await engine.pause("wait")
    await engine.apply_weights(update)
    await engine.resume(version)
    costs.total.append(time.perf_counter() - started)
    way.staging.retire(version)


def _settings(folder: Path, dtype: Any) -> VllmSettings:
    return VllmSettings(
        model=str(folder),
        max_model_len=128,
        dtype=dtype,
        max_num_seqs=1,
        kv_cache_gib=0.25,
        enforce_eager=True,
        transfer="shared_memory",
    )


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}"

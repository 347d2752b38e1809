"""What a worker process costs, beside a thread: `python -m benchmarks isolation`.

The same episodes of GuessNumber, played by its reference, in turn in a thread and in a worker process, so that both are
measured under the same load.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from gspo_gym.env.playing import spoken_by
from gspo_gym.env.registry import make, resolve
from gspo_gym.env.session import open_session
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.isolation import IsolatedFactory, isolated_factory
from gspo_gym.types import Message

_PLACES = ("thread", "process")
_TIMEOUT_SECONDS = 60.0


@dataclass(slots=True)
class Costs:
    """Of one place, in seconds, an entry a call: to open and close a session, and for each reset and step.

    `private_bytes` is the memory that a worker shares with nobody, an entry an episode; empty for a thread.
    """

    open_and_close: list[float] = field(default_factory=list)
    reset: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    private_bytes: list[int] = field(default_factory=list)


def run_isolation(num_episodes: int) -> int:
    """Measure and print; the exit status."""
    costs = asyncio.run(measure(num_episodes))
    console = Console()
    console.print(f"GuessNumber, its reference, {num_episodes} episodes each, in turn; medians; workers are warm")
    console.print(render(costs))
    return 0


async def measure(num_episodes: int) -> dict[str, Costs]:
    """The costs of each place; the first episode of each is played before and not counted."""
    costs = {place: Costs() for place in _PLACES}
    factories = {place: isolated_factory("GuessNumber", isolation=place) for place in _PLACES}
    for place in _PLACES:
        await _play(factories[place], 0, Costs())
    for seed in range(num_episodes):
        for place in _PLACES:
            await _play(factories[place], seed, costs[place])
    return costs


def render(costs: Mapping[str, Costs]) -> Table:
    """The table."""
    table = Table("place")
    for heading in ("open + close, ms", "reset, ms", "step, ms", "private memory, MB"):
        table.add_column(heading, justify="right")
    for place, cost in costs.items():
        memory = f"{statistics.median(cost.private_bytes) / 1e6:.1f}" if cost.private_bytes else "-"
        table.add_row(place, *(_milliseconds(row) for row in (cost.open_and_close, cost.reset, cost.step)), memory)
    return table


def private_bytes_of(pid: int) -> int:
    """Memory of a process that it shares with no other, as Linux counts it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


async def _play(factory: IsolatedFactory, seed: int, costs: Costs) -> None:
    env_id = resolve("GuessNumber")
    started = time.perf_counter()
    session = await open_session(factory, env_id=env_id, step_timeout_seconds=_TIMEOUT_SECONDS)
    opening = time.perf_counter() - started
    # The player runs here in both cases: its thinking is no cost of the place.
    player = make(env_id).unwrapped.policies["reference"](make(env_id).unwrapped, np.random.default_rng(seed))
    started = time.perf_counter()
    messages = list((await session.reset(seed)).messages)
    costs.reset.append(time.perf_counter() - started)
    is_over = False
    while not is_over:
        said = await spoken_by(player, messages)
        action = Message("assistant", said) if isinstance(said, str) else said
        started = time.perf_counter()
        answer = await session.step(action)
        costs.step.append(time.perf_counter() - started)
        messages += [action, *answer.messages]
        is_over = answer.done
    if isinstance(session.env, ProcessEnv):
        costs.private_bytes.append(private_bytes_of(session.env.pid))
    started = time.perf_counter()
    await session.close()
    costs.open_and_close.append(opening + time.perf_counter() - started)


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.2f}"

"""What the capturing gateway adds to a generation: `python -m benchmarks gateway`.

A scripted engine takes 50 ms a call. It is asked directly, and through the gateway by agents in another process, by the
same episodes: turns of conversation that grow, with environments that take their time between them. What a call takes
longer than the engine's own calls is the gateway's, the agents' and the sockets' share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.scripted import Latency, ScriptedEngine
from gspo_gym.errors import ServiceError
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.remote.gateway.app import create_gateway_app, rollout_url
from gspo_gym.remote.gateway.session import Gateway, GatewaySessionSettings
from gspo_gym.remote.serving import LoopServer
from gspo_gym.seeding import generator

ENGINE_SECONDS = 0.05
LARGEST_SHARE = 0.1  # of the engine's time that a median call through the gateway may take longer, at 128 episodes
_REPLY = "The number is 512, I guess."
_SETTINGS = GatewaySessionSettings("benchmark", sampling_seed=0, max_output_tokens=64, max_model_len=8192)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked at once: episodes, and the mean seconds that their environments take between two calls.

    Times are drawn uniformly from [0, 2 * mean], the first ones included, so that episodes do not march in step.
    """

    num_episodes: int
    env_seconds: float
    num_turns: int = 10

    def pauses(self, *, seed: int = 0) -> list[list[float]]:
        """Seconds before each call, by episode and turn."""
        drawn = generator(seed, "pauses", self.num_episodes).uniform(0, 2, (self.num_episodes, self.num_turns))
        return (drawn * self.env_seconds).tolist()  # type: ignore[no-any-return]  # numpy's is untyped


LOADS = (Load(1, 0.2), Load(16, 0.2), Load(128, 0.2), Load(128, 0.0))


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of every call: of the engine asked directly, and through the gateway.

    `wall_seconds` and `cpu_seconds` are the latter's altogether; CPU time is that of the process with gateway and
    scripted engine, and says more than waiting times where other programs are at work.
    """

    bare: Sequence[float]
    gateway: Sequence[float]
    wall_seconds: float
    cpu_seconds: float

    def overhead(self, percentile: float) -> float:
        """Seconds that the call at this percentile takes longer through the gateway."""
        return float(np.percentile(self.gateway, percentile) - np.percentile(self.bare, percentile))


async def measure(load: Load) -> Measured:
    """Ask the engine both ways."""
    tokenizer = tiny_tokenizer()
    stop = int(tokenizer.eos_token_id)
    reply = [*tokenizer.encode(_REPLY, add_special_tokens=False), stop]
    engine = ScriptedEngine(lambda _prompt, _turn: reply, latency=Latency(ENGINE_SECONDS), max_model_len=8192)
    bare = await _ask_engine(engine, load, stop)
    gateway = Gateway(engine, tokenizer)
    server = LoopServer(create_gateway_app(gateway), host="127.0.0.1", port=0)
    await server.start()
    try:
        await _ask_gateway(gateway, server.url, Load(4, 0.0, num_turns=2))  # renderers are probed, sockets opened
        gc.collect()
        gc.freeze()  # a full collection over a loaded transformers takes longer than a call of the engine
        started = time.process_time()
        through = await _ask_gateway(gateway, server.url, load)
        cpu_seconds = time.process_time() - started
        return Measured(bare, through["seconds"], through["wall_seconds"], cpu_seconds)
    finally:
        gc.unfreeze()
        await gateway.close()
        await server.stop()


async def _ask_engine(engine: ScriptedEngine, load: Load, stop: int) -> list[float]:
    seconds: list[float] = []
    sampling = SamplingParams(max_tokens=64, stop_token_ids=(stop,), seed=0)

    async def play(index: int, pauses: Sequence[float]) -> None:
        for pause in pauses:
            await asyncio.sleep(pause)
            started = time.perf_counter()
            await engine.generate([1] * 600, sampling, session_id=f"bare-{index}")
            seconds.append(time.perf_counter() - started)

    await asyncio.gather(*(play(index, pauses) for index, pauses in enumerate(load.pauses())))
    return seconds


async def _ask_gateway(gateway: Gateway, url: str, load: Load) -> dict[str, Any]:
    """What the agents' process counts: the seconds of every call, and of all of it (Any: JSON)."""
    sessions = [gateway.open_session(replace(_SETTINGS, name=f"benchmark-{i}")) for i in range(load.num_episodes)]
    plan = {"urls": [rollout_url(url, session.id) for session in sessions], "pauses": load.pauses()}
    agents = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gateway_client"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await agents.communicate(json.dumps(plan).encode())
    if agents.returncode:
        raise ServiceError(f"the agents' process ended with status {agents.returncode}; its errors stand above")
    for session in sessions:
        await session.abort()
    counted: dict[str, Any] = json.loads(printed)
    return counted


def run_gateway(*, repeats: int) -> int:
    """Measure and print; 1 if the gateway adds more than it may."""
    console = Console(width=130)
    console.print(
        f"engine: {ENGINE_SECONDS * 1e3:.0f} ms a call; 10 turns an episode; milliseconds of a call, 50% and 99%; in "
        f"brackets what the gateway adds, in parts of the engine's time; medians of {repeats} round(s)"
    )
    results: dict[Load, list[Measured]] = {load: [] for load in LOADS}
    for _ in range(repeats):
        for load, rounds in results.items():
            rounds.append(asyncio.run(measure(load)))
    console.print(render(results))
    largest = [load for load in LOADS if load.env_seconds][-1]
    added = statistics.median(measured.overhead(50) for measured in results[largest])
    return 0 if added / ENGINE_SECONDS <= LARGEST_SHARE else 1


def render(results: Mapping[Load, Sequence[Measured]]) -> Table:
    """The table: what a call takes either way, and the ratio of the difference to the engine's time."""
    table = Table("episodes", "env")
    for heading in ("bare p50", "gateway", "added", "bare p99", "gateway", "added", "calls/s", "CPU/call"):
        table.add_column(heading, justify="right", no_wrap=True)
    for load, rounds in results.items():
        cells = []
        for percentile in (50.0, 99.0):
            for kind in ("bare", "gateway"):
                seconds = statistics.median(float(np.percentile(getattr(each, kind), percentile)) for each in rounds)
                cells.append(f"{seconds * 1e3:.1f}")
            added = statistics.median(each.overhead(percentile) for each in rounds)
            cells.append(f"{added * 1e3:.1f} ({added / ENGINE_SECONDS:.0%})")
        calls = statistics.median(len(each.gateway) / each.wall_seconds for each in rounds)
        cpu = statistics.median(each.cpu_seconds / len(each.gateway) for each in rounds)
        cells += [f"{calls:,.0f}", f"{cpu * 1e3:.2f}"]
        table.add_row(str(load.num_episodes), f"{load.env_seconds * 1e3:.0f} ms", *cells)
    return table

"""How close the pool comes to what it waits for: `python -m benchmarks pool`.

128 episodes of the `pipeline` benchmark are played at once; their environments take 0.2 seconds a turn with a heavy
tail. No pool is faster than the longer of two: the slowest episode played alone, and all of them without waits. Both
are measured in the same round, the former as the longest wait for an environment and one episode without waits.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from rich.console import Console

from benchmarks.pipeline import ENV_ID, MAX_MODEL_LEN, Workload, make_pool
from benchmarks.record import Value, render
from gspo_gym.config.build.threads import compute_in, computing_elsewhere
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.policy.load import load_policy
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.types import Task

LARGEST_RATIO = 1.05  # of the time for all episodes to the bound
_NO_SECONDS = 1e-9  # a lognormal has no mean of 0


def longest_wait(workload: Workload) -> float:
    """Return the seconds for which the slowest episode's environment keeps it waiting."""
    return max(
        sum(workload.latency(seed, member, turn) for turn in range(workload.num_turns))
        for seed in range(workload.num_groups)
        for member in range(workload.group_size)
    )


async def play(workload: Workload) -> float:
    """Return the seconds that the pool takes for the workload's episodes, after a few to warm up."""
    with computing_elsewhere("cpu") as num_threads:
        policy = load_policy(workload.model, seed=0)
        engine = LocalEngine(policy.model, max_model_len=MAX_MODEL_LEN)
        try:
            await compute_in(engine, policy.model, num_threads)
            await make_pool(workload, policy, engine).collect(_requests(replace(workload, num_groups=1)))
            pool = make_pool(workload, policy, engine)
            started = time.perf_counter()
            await pool.collect(_requests(workload))
            return time.perf_counter() - started
        finally:
            await engine.close()


def _requests(workload: Workload) -> list[GroupRequest]:
    return [
        GroupRequest(f"g{seed}", Task(ENV_ID, seed), size=workload.group_size) for seed in range(workload.num_groups)
    ]


def run_pool(workload: Workload, *, repeats: int) -> list[Value]:
    """Measure and print; return the pool's seconds beside the bound."""
    at_once = replace(workload, turn_seconds=_NO_SECONDS)
    alone = replace(at_once, num_groups=1, group_size=1)
    wait = longest_wait(workload)
    rounds = [tuple(asyncio.run(play(each)) for each in (workload, at_once, alone)) for _ in range(repeats)]
    num_episodes = workload.num_groups * workload.group_size
    value = Value(
        f"{num_episodes} episodes of {workload.num_turns} turns of {workload.turn_seconds:g} s",
        tuple(played for played, _, _ in rounds),
        tuple(max(sampled, wait + one) for _, sampled, one in rounds),
        "the slowest alone, or all without waits",
        goal=1 / LARGEST_RATIO,
    )
    console = Console(width=160)
    console.print(f"{workload.model}; longest wait {wait:.2f} s; medians of {repeats} round(s)", render([value]))
    for played, sampled, one in rounds:
        console.print(f"played {played:.2f} s; without waits {sampled:.2f} s; one without waits {one:.2f} s")
    return [value]

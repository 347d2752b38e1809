"""Seconds of playing a training batch with a real model: `python -m benchmarks engines --model smollm2`.

vLLM, where it is installed, beside the local engine: the same configuration, 96 episodes of a number from 1 to 8 in
four guesses with an adapter on all linear layers, and everything around the sampling. They take turns; a round begins
with other weights, as a step of a run does, so that nothing is found in a cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engines import has_vllm
from benchmarks.record import Value
from gspo_gym.config.build.engines import build_weight_sync
from gspo_gym.config.build.rollouts import Player, build_training_player, build_training_pool
from gspo_gym.config.build.threads import compute_in, computing_elsewhere
from gspo_gym.config.build.trainer import build_policy
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.run.recording import RunRecorder
from gspo_gym.types import Task


@dataclass(frozen=True, slots=True)
class Side:
    """An engine that plays: `player`, and the `sync` that gives it weights."""

    name: str
    player: Player
    sync: WeightSync
    config: RunConfig


def make_config(model: str, engine: str, folder: Path, *, num_episodes: int = 96, **vllm: Any) -> RunConfig:
    """Return the configuration, that of configs/smollm2_guess.toml; `vllm`: keys of its section (Any: as TOML's)."""
    overrides = {
        "run.folder": folder,
        "model.base": model,
        "model.label": engine,
        "rollout.engine": engine,
        "rollout.episodes_per_batch": num_episodes,
        "rollout.max_concurrent_rollouts": num_episodes,
        "training.batch_size": num_episodes // 4,
        **{f"vllm.{key}": value for key, value in ({"max_model_len": 256, **vllm} if engine == "vllm" else {}).items()},
    }
    return load_config("smollm2_guess", [f"{key}={value}" for key, value in overrides.items()])


async def play(side: Side, step: int) -> int:
    """Play a batch under new weights; return the number of sampled tokens."""
    config = side.config
    pool = build_training_pool(config, side.player)
    group_size = config.training.group_size
    num_groups = config.rollout.episodes_per_batch // group_size
    env_id = config.rollout.env_name
    seeds = range(step * num_groups, (step + 1) * num_groups)
    groups = await pool.play_groups([GroupRequest(f"seed{seed}", Task(env_id, seed), group_size) for seed in seeds])
    return sum(trajectory.num_actions for group in groups for trajectory in group.trajectories)


async def measure(configs: Sequence[RunConfig], *, repeats: int) -> dict[str, tuple[tuple[float, ...], int]]:
    """Return the seconds of each engine's batches, and the sampled tokens of the last."""
    seconds: dict[str, list[float]] = {config.rollout.engine: [] for config in configs}
    sampled: dict[str, int] = {}
    async with contextlib.AsyncExitStack() as stack:
        num_threads = stack.enter_context(computing_elsewhere("cpu"))
        policy = build_policy(configs[0])
        sides = []
        for config in configs:
            player = await build_training_player(config, policy)
            stack.push_async_callback(player.close)
            await compute_in(player.engine, policy.model, num_threads)
            recorder = RunRecorder.create(config.run_folder, config.to_toml())
            stack.callback(recorder.close)
            sync = build_weight_sync(config, policy, player.engine, recorder)
            stack.callback(sync.close)
            sides.append(Side(config.rollout.engine, player, sync, config))
        for step in range(repeats + 1):  # the first warms up
            _change(policy.model, step)
            for side in sides:
                await side.sync.publish(step + 1)
                began = time.perf_counter()
                sampled[side.name] = await play(side, step)
                if step:
                    seconds[side.name].append(time.perf_counter() - began)
    return {name: (tuple(rounds), sampled[name]) for name, rounds in seconds.items()}


@torch.no_grad()
def _change(model: Any, step: int) -> None:  # Any: transformers and peft are untyped
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1e-4)


def run_batches(model: str, *, num_episodes: int, repeats: int) -> list[Value]:
    """Measure and print; return the local engine's seconds beside vLLM's, if that is installed."""
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder:
        names = ["local", "vllm"] if has_vllm() else ["local"]
        configs = [make_config(model, name, Path(folder), num_episodes=num_episodes) for name in names]
        measured = asyncio.run(measure(configs, repeats=repeats))
    values = {name: Value(f"{num_episodes} guessing games, {model}", rounds) for name, (rounds, _) in measured.items()}
    table = Table("engine", "sampled tokens", "seconds", "times the local engine's")
    medians = {name: statistics.median(value.ours) for name, value in values.items()}
    for name, seconds in medians.items():
        table.add_row(name, f"{measured[name][1]:,}", f"{seconds:.2f}", f"{seconds / medians['local']:.2f}")
    Console().print(f"{num_episodes} episodes of GuessNumber with {model} and an adapter; median of {repeats}", table)
    peer = values["vllm"].ours if "vllm" in values else ()
    local = values["local"]
    return [Value(local.name, local.ours, peer, "vLLM 0.32 on the CPU" if peer else "")]

"""Two ranks against one process: `python -m benchmarks cluster`.

The same updates, in turn, in this process and on two ranks that it starts, as `gspo-gym train` does; each with all
cores. Then what a checkpoint makes the trainer wait, how long an update takes for which killed ranks are started again,
and what a rank holds: of two, and alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.chaos import processes_below
from benchmarks.prefixes import make_groups, with_advantages
from benchmarks.record import Value, render
from gspo_gym.cluster.sharding import shard_model
from gspo_gym.config.build.processes import launching, learning
from gspo_gym.config.build.trainer import build_learner, build_policy
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.learning.batching import TrainBatch
from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.update import AnyLearner, Learner
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy

_QUICKSTART = Path(__file__).parents[1] / "configs/quickstart.toml"
_ALONE = "one process"


def run_cluster(base: str, *, repeats: int, threads: int) -> list[Value]:
    """Measure and print; `repeats`: updates of each, checkpoints and kills."""
    batch = with_advantages(make_groups(8, num_tokens=64))
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder:
        values = _measure_runs(base, Path(folder), batch, repeats=repeats, threads=threads)
        alone, shared = (_held(base, Path(folder), world_size) for world_size in (1, 2))
    for kind, of_two in shared.items():
        values.append(Value(f"{kind} of a rank of two", (of_two,), (alone[kind],), _ALONE, "MB"))
    Console(width=160).print(
        f"{base}, {batch.token_ids.shape[0]} rows, {batch.num_actions} trained tokens, {repeats} round(s); medians"
    )
    Console(width=160).print(render(values))
    return values


def _measure_runs(base: str, folder: Path, batch: TrainBatch, *, repeats: int, threads: int) -> list[Value]:
    """Return the costs of whole learners, one round after the other."""
    one, two = (_configure(base, folder, number) for number in (1, 2))
    with _learner(one, threads) as (alone, policy), _learner(two, threads) as (shared, gathered):
        for learner in (alone, shared):
            learner.update(batch)  # not counted: memory is made
        seconds = [(_seconds(lambda: alone.update(batch)), *_of_an_update(shared, batch)) for _ in range(repeats)]
        saves = [(_of_a_save(one, policy, alone, k), _of_a_save(two, gathered, shared, k)) for k in range(repeats)]
        recoveries = []
        for _ in range(repeats):
            os.kill(_ranks()[0], signal.SIGKILL)
            recoveries.append(_seconds(lambda: shared.update(batch)))
    updates, ours, inside = zip(*seconds, strict=True)
    outside = tuple(whole - within for whole, within in zip(ours, inside, strict=True))
    waits = tuple(zip(*saves, strict=True))
    return [
        Value("update by two ranks", ours, updates, _ALONE),
        Value("of it, outside of the ranks' learners", outside),
        Value("a step waits for a checkpoint", waits[1], waits[0], _ALONE),
        Value("update after kill -9 of a rank", tuple(recoveries), ours, "an update undisturbed"),
    ]


def _configure(base: str, folder: Path, num_ranks: int) -> RunConfig:
    given = ["compute.gpu_count=0", "topology.type=cluster", "topology.gpus_for_vllm=1", "rollout.engine=local"]
    given += [f"topology.gpus_for_training={num_ranks}", f"model.base={base}", f"model.label=of{num_ranks}"]
    return load_config(_QUICKSTART, [*given, f"run.folder={folder}"])


@contextlib.contextmanager
def _learner(config: RunConfig, threads: int) -> Iterator[tuple[AnyLearner, Policy]]:
    policy = build_policy(config)
    with (
        launching(config) as fleet,
        learning(config, policy, None, fleet=fleet, num_threads=threads, on_restart=lambda *_: None) as learner,
    ):
        yield learner, policy


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _of_an_update(learner: AnyLearner, batch: TrainBatch) -> tuple[float, float]:
    """Return the seconds of an update, and those that a rank says it took."""
    started = time.perf_counter()
    metrics = learner.update(batch).metrics
    return time.perf_counter() - started, metrics["time/score_seconds"] + metrics["time/train_seconds"]


def _of_a_save(config: RunConfig, policy: Policy, learner: AnyLearner, number: int) -> float:
    """Return the seconds until a step could go on; the files are written after them."""
    store = CheckpointStore(config.run_folder / "checkpoints")
    started = time.perf_counter()
    draft = store.copy(number, policy=policy, learner=learner, trainer_state={})
    seconds = time.perf_counter() - started
    store.write(draft)
    return seconds


def _ranks() -> list[int]:
    below = processes_below(os.getpid())
    return [process.pid for process in below if "gspo_gym.config.build.processes learner" in process.command]


def _held(base: str, folder: Path, world_size: int) -> dict[str, float]:
    """Return the MB that rank 0 of so many holds in an update, by what they are."""
    place = folder / f"held{world_size}"
    place.mkdir()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cluster", base, str(place), str(rank), str(world_size)], env=environment
        )
        for rank in range(world_size)
    ]
    try:
        codes = [process.wait(600) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"ranks that were to be measured ended with {codes}")
    held: dict[str, float] = json.loads((place / "held.json").read_text(encoding="utf-8"))
    return held


def hold(base: str, place: Path, rank: int, world_size: int) -> None:
    """Be a rank: update once, and write what it held."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )
    config = _configure(base, place, world_size)
    policy = build_policy(config)
    collective = shard_model(policy.model) if world_size > 1 else None
    learner = build_learner(config, policy, collective=collective)
    held = _watch(policy.model, learner)
    learner.update(with_advantages(make_groups(8, num_tokens=64)))
    held["optimizer"] = sum(map(_megabytes, learner.tensors().values()))
    held["parameters, gradients and optimizer"] = held["parameters"] + held["gradients"] + held["optimizer"]
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    held["resident memory"] = int(status.split("VmHWM:")[1].split()[0]) / 1e3
    if rank == 0:
        (place / "held.json").write_text(json.dumps(held), encoding="utf-8")
    dist.destroy_process_group()


def _watch(model: nn.Module, learner: Learner) -> dict[str, float]:
    """Return what gets the MB of parameters and gradients when a step is taken."""
    held: dict[str, float] = {}
    take_step = learner._optimizer.step

    def step(loss: float) -> StepReport:
        held["parameters"] = sum(map(_megabytes, model.parameters()))
        held["gradients"] = sum(_megabytes(p.grad) for p in model.parameters() if p.grad is not None)
        return take_step(loss)

    step_of: Any = learner._optimizer  # Any: a method is replaced
    step_of.step = step
    return held


def _megabytes(tensor: Tensor) -> float:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size() / 1e6


if __name__ == "__main__":
    hold(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

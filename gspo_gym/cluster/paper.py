"""The table of the room's README: named models on 8, 64 and 512 GPUs, from the arithmetic of `cluster/memory.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Literal

from gspo_gym.cluster.memory import (
    SHAPES,
    USABLE,
    Learning,
    ModelShape,
    ReplicaMemory,
    parallel_sizes,
    rank_memory,
    replica_memory,
)
from gspo_gym.cluster.placement import GIB, Offer, Part, Resources, assign
from gspo_gym.errors import PlacementError

_NOT_HERE = ("reference", "offloaded")  # columns that would be empty
GPU_BYTES, GPUS_OF_A_NODE, EPISODE = 80 * GIB, 8, 8192
# Trained weights are float32, so full training is; both with the defaults of [training].
_LEARNING = {
    "full": Learning("full", "float32", gradient_checkpointing=True),
    "lora": Learning("lora", "bfloat16", gradient_checkpointing=True),
}


def table() -> str:
    """Return the table as Markdown."""
    kinds = [name for name in asdict(rank_memory(next(iter(SHAPES.values())), Learning())) if name not in _NOT_HERE]
    head = ["GPUs", "model", "trained", "ranks", *kinds, "in all", "fits from", "replicas", "tokens", "nodes"]
    rows = [_row(*case) for case in _cases()]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def _cases() -> Iterator[tuple[int, str, Literal["full", "lora"]]]:
    for num_gpus in (8, 64, 512):
        for name in SHAPES:
            yield num_gpus, name, "full"
            yield num_gpus, name, "lora"


def _row(num_gpus: int, name: str, trained: Literal["full", "lora"]) -> list[str]:
    shape, learning, num_ranks = SHAPES[name], _LEARNING[trained], num_gpus // 2
    memory = rank_memory(shape, learning, num_ranks)
    sizes = [size for kind, size in asdict(memory).items() if kind not in _NOT_HERE]
    total = f"{memory.total / GIB:.1f}" + ("" if memory.total <= USABLE * GPU_BYTES else " (too much)")
    tensor, replica = _smallest(shape)
    num_replicas = (num_gpus - num_ranks) // tensor
    cells = [str(num_gpus), name, trained, str(num_ranks), *(f"{size / GIB:.1f}" for size in sizes), total]
    cells += [_fits_from(shape, learning), f"{num_replicas} x {tensor}", f"{replica.num_tokens:,}"]
    return [*cells, _nodes(num_gpus, num_ranks, num_replicas, tensor)]


def _smallest(shape: ModelShape) -> tuple[int, ReplicaMemory]:
    """Return the fewest GPUs of a replica that leave room for eight episodes."""
    for tensor in parallel_sizes(shape):
        replica = replica_memory(shape, dtype="bfloat16", tensor_parallel=tensor, budget=USABLE * GPU_BYTES)
        if replica.num_tokens >= 8 * EPISODE:
            break
    return tensor, replica


def _fits_from(shape: ModelShape, learning: Learning) -> str:
    """Return the fewest ranks, a power of two, of which each fits; with fewer tokens if no number is enough."""
    for num_tokens in (learning.num_tokens, EPISODE):
        for power in range(11):
            memory = rank_memory(shape, replace(learning, num_tokens=num_tokens), 2**power)
            if memory.total <= USABLE * GPU_BYTES:
                return f"{2**power}" + ("" if num_tokens == learning.num_tokens else f" at {num_tokens:,} tokens")
    return "no number"


def _nodes(num_gpus: int, num_ranks: int, num_replicas: int, tensor: int) -> str:
    parts = [Part("learner", num_ranks, Resources(1)), Part("replica", num_replicas, Resources(tensor))]
    nodes = [Offer(f"node-{i}", tuple(range(GPUS_OF_A_NODE))) for i in range(num_gpus // GPUS_OF_A_NODE)]
    try:
        places = assign(parts, nodes)
    except PlacementError:
        return "no room"
    learners = {place.node for place in places if place.role == "learner"}
    samplers = {place.node for place in places if place.role == "replica"}
    return f"{len(learners)} + {len(samplers - learners)}"

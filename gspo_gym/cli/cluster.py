"""`gspo-gym cluster check | table`: whether a run has room on several GPUs and machines, without starting anything.

The table is of named models on 8, 64 and 512 GPUs, half of which learn and half sample; nodes have 8 GPUs of 80 GiB.
Full training is in float32, LoRA (rank 16) in bfloat16. Sizes are GiB of a rank; "fits from" is the fewest ranks that
would fit, "replicas" are servers x GPUs of each, "tokens" those whose keys and values fit on one, "nodes" those with
ranks + those with replicas only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
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
from gspo_gym.config.machines import check, describe, machines_of, parse_nodes, with_all_gpus
from gspo_gym.config.run_config import RunConfig, load_config, model_name
from gspo_gym.errors import ConfigError, PlacementError
from gspo_gym.policy.bases import gguf_of, parse_hub_id, parse_tiny

_NOT_HERE = ("reference",)  # columns that would be empty
GPU_BYTES, GPUS_OF_A_NODE, EPISODE = 80 * GIB, 8, 8192
# Trained weights are float32, so full training is; both with the defaults of [training].
_LEARNING = {
    "full": Learning("full", "float32", gradient_checkpointing=True),
    "lora": Learning("lora", "bfloat16", gradient_checkpointing=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `cluster`."""
    commands = parser.add_subparsers(dest="cluster_command", required=True, metavar="COMMAND")
    checking = commands.add_parser(
        "check", help="say where the parts of a run stand, what they take, what does not fit"
    )
    checking.add_argument("file", help="a TOML, YAML or JSON file; configs/ holds examples")
    checking.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")
    checking.add_argument(
        "--nodes",
        action="append",
        metavar="NODESxGPUS[:GPU[:CORES[:MEMORY]]]",
        help="machines, such as 8x8:80GiB; once for each kind (default: those of [compute])",
    )
    checking.add_argument("--json", action="store_true", help="print it as JSON")
    checking.set_defaults(run=check_file)
    printing = commands.add_parser("table", help="print the table of named models on 8, 64 and 512 GPUs")
    printing.set_defaults(run=print_table)


def check_file(arguments: argparse.Namespace) -> int:
    """Print where everything would stand and what it would take; return 0 if it fits, else 1."""
    config = load_config(arguments.file, arguments.overrides)
    machines = parse_nodes(arguments.nodes or (), machines_of(config))
    num_nodes = sum(bool(offer.gpus) for offer in machines.offers)
    config, gpus = with_all_gpus(config, sum(len(offer.gpus) for offer in machines.offers), num_nodes)
    paper = check(config, shape_of(config), machines)
    if arguments.json:
        print(json.dumps(paper.to_dict(), indent=2))
    else:
        print(f"{'DOES NOT FIT' if paper.problems else 'FITS'}: {arguments.file}")
        print("\n".join([*([] if gpus is None else [gpus]), *describe(paper, config, machines)]))
    return 1 if paper.problems else 0


def print_table(_: argparse.Namespace) -> int:
    """Print the table."""
    print(table(), end="")
    return 0


def shape_of(config: RunConfig) -> ModelShape:
    """Return the sizes of model.base, from its name, its folder or the hub's cache; nothing is downloaded.

    Raises:
        ConfigError: they are not known here, or of a kind that is not counted.
    """
    base = config.model.base or ""
    shapes_by_name = {name.lower(): shape for name, shape in SHAPES.items()}
    if (shape := shapes_by_name.get(base.rpartition("/")[2].lower())) is not None:
        return shape
    if base.startswith("tiny:"):
        from gspo_gym.policy.tiny import build_tiny

        return ModelShape.from_config(build_tiny(parse_tiny(base)[0], 0).config.to_dict())
    path = Path(base or model_name(config)).expanduser() / "config.json"
    if gguf_of(base) is not None:
        from gspo_gym.policy.gguf import converted

        path = (converted(base) or path.parent) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        hub = parse_hub_id(model_name(config))
        cached_path = None if hub is None else try_to_load_from_cache(hub.name, "config.json", revision=hub.revision)
        if not isinstance(cached_path, str):
            raise ConfigError(
                f"model.base: the sizes of {base or str(path.parent)!r} are not known here: expected a folder with "
                f"config.json, a model in the hub's cache, or one of {', '.join(SHAPES)}"
            )
        path = Path(cached_path)
    return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))


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


def _row(num_gpus: int, name: str, method: Literal["full", "lora"]) -> list[str]:
    shape, learning, num_ranks = SHAPES[name], _LEARNING[method], num_gpus // 2
    memory = rank_memory(shape, learning, num_ranks)
    sizes = [size for kind, size in asdict(memory).items() if kind not in _NOT_HERE]
    total = f"{memory.total / GIB:.1f}" + ("" if memory.total <= USABLE * GPU_BYTES else " (too much)")
    tensor, replica = _smallest(shape)
    num_replicas = (num_gpus - num_ranks) // tensor
    cells = [str(num_gpus), name, method, str(num_ranks), *(f"{size / GIB:.1f}" for size in sizes), total]
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

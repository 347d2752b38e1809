"""What a configuration demands of machines, and whether it fits: on paper, for any number of GPUs.

Roles of parts: "learner" is a rank on one GPU, "replica" a vLLM server, "reference" a dedicated one; with colocated
GPUs "learner and replica" is a copy of the model that samples and the ranks on its GPUs. Without GPUs each is a process
that takes memory of its node, and processes share the cores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gspo_gym.cluster.memory import (
    BYTES,
    USABLE,
    Learning,
    ModelShape,
    RankMemory,
    ReplicaMemory,
    rank_memory,
    replica_memory,
)
from gspo_gym.cluster.placement import GIB, Offer, Part, Place, Resources, assign, only_counted
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import (
    OWN_GPU,
    SHARED_GPU,
    VllmSection,
    has_replicas,
    missing_machinery,
    num_servers,
    place,
    refuse_to_run,
)
from gspo_gym.errors import ConfigError, PlacementError

# GiB of a GPU, where a name stands for one size only (the vendor's data sheets).
_KNOWN_GPUS = {"H200": 141, "H100": 80, "L40S": 48, "L4": 24, "T4": 16}
_GIB = r"(\d+(?:\.\d+)?)GiB"
_NODES = re.compile(rf"(\d+)x(\d+)(?::(?:{_GIB})?(?::(\d+)?(?::{_GIB})?)?)?")


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes on paper. `gpu_bytes`: of a GPU, the smallest of them; None: not known, so that nothing is compared."""

    offers: tuple[Offer, ...]
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Paper:
    """What `check` found; with no problems, everything has a place and fits.

    Attributes:
        places: () if there is no room.
        replica: None if nothing of vLLM's or of a local server is to be placed, or a GPU's memory is not known.
        problems: what does not fit, in sentences.
        refused: what fits or not, but `gspo-gym train` cannot start.
    """

    parts: tuple[Part, ...]
    places: tuple[Place, ...]
    rank: RankMemory
    replica: ReplicaMemory | None
    problems: tuple[str, ...]
    refused: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON holds it (Any: of several types)."""
        return asdict(self) | {
            "parts": [{"role": p.role, "count": p.count, **p.each._asdict()} for p in self.parts],
            "rank": asdict(self.rank) | {"total": self.rank.total},
            "replica": None if self.replica is None else asdict(self.replica) | {"num_tokens": self.replica.num_tokens},
        }


def parse_nodes(texts: Sequence[str], default: Machines) -> Machines:
    """Return the nodes of texts such as "8x8:80GiB" (8 nodes of 8 GPUs of 80 GiB); without any, the default.

    Cores and memory of a node may follow: "2x8:80GiB:96:1024GiB". What is absent is not counted.

    Raises:
        ConfigError: another text, or texts that say different things of the nodes.

    >>> [len(offer.gpus) for offer in parse_nodes(["1x8:80GiB", "2x4:40GiB"], Machines(())).offers]
    [8, 4, 4]
    """
    if not texts:
        return default
    offers: list[Offer] = []
    gpu_bytes: list[int | None] = []
    for text in texts:
        if (match := _NODES.fullmatch(text)) is None:
            raise ConfigError(
                "--nodes: expected NODESxGPUS, then the memory of a GPU, the cores and the memory of a node, such as "
                f"8x8:80GiB or 2x0::8:32GiB, got {text!r}"
            )
        nodes, gpus, size, cores, memory = match.groups()
        for _ in range(int(nodes)):
            free = (tuple(range(int(gpus))), int(cores or 0), int(float(memory or 0) * GIB))
            offers.append(Offer(f"node-{len(offers)}", *free))
        gpu_bytes.append(int(float(size) * GIB) if size else None)
    for amounts in ([o.cores for o in offers], [o.memory_bytes for o in offers], gpu_bytes):
        if any(amounts) and not all(amounts):
            raise ConfigError("--nodes: give a GPU's memory, the cores and the node's memory for all nodes or for none")
    sizes = [size for size in gpu_bytes if size is not None]
    return Machines(tuple(offers), min(sizes) if sizes else None)


def machines_of(config: RunConfig) -> Machines:
    """Return the nodes of [compute]: compute.gpu_count GPUs shared out to compute.nodes, as evenly as it goes."""
    compute = config.compute
    if compute is None:
        return Machines((Offer("node-0"),))
    least, more = divmod(compute.gpu_count, compute.nodes)
    offers = tuple(Offer(f"node-{i}", tuple(range(least + (i < more)))) for i in range(compute.nodes))
    size = _KNOWN_GPUS.get((compute.gpu_type or "").upper())
    return Machines(offers, None if size is None else size * GIB)


def with_all_gpus(config: RunConfig, num_gpus: int, num_nodes: int = 1) -> tuple[RunConfig, str | None]:
    """Return the configuration with what several GPUs do, and a sentence about that.

    Half of them sample, one more where they are odd, and the others learn; each is an actor's own. [compute] goes over
    the numbers here. A configuration with [topology] or sizes of vLLM says itself what they do, and stays as it is; so
    does one that cannot be spread, with the reason if it can run on one.
    """
    vllm, compute = config.vllm, config.compute
    if compute is not None:
        num_gpus, num_nodes = compute.gpu_count, compute.nodes
    has_sizes = vllm is not None and vllm.tensor_parallel_size > 1
    if num_gpus < 2 or config.topology is not None or has_sizes:
        return config, None
    num_ranks = num_gpus // 2
    values = config.model_dump(exclude_none=True)
    values |= {
        "compute": {**values.get("compute", {}), "gpu_count": num_gpus, "nodes": num_nodes},
        "topology": {"type": "cluster", "gpus_for_vllm": num_gpus - num_ranks, "gpus_for_training": num_ranks},
    }
    try:
        spread_config = RunConfig.from_dict(values)
        refuse_to_run(spread_config.sections)
    except ConfigError as error:
        return config, f"one of {num_gpus} GPUs is used, because spread over all: {error}" if compute is None else None
    return spread_config, (
        f"{num_gpus} GPUs: {num_gpus - num_ranks} sample and {num_ranks} learn, as [topology] can say; "
        "compute.gpu_count = 1 takes one"
    )


def learning_of(config: RunConfig) -> Learning:
    """Return what memory depends on, of [model], [training], [optimizer] and [reference]."""
    model, training, reference = config.model, config.training, config.reference
    is_copy = reference.source == "copy" or (reference.source == "auto" and model.trainer_mode == "full")
    return Learning(
        trained=model.trainer_mode,
        dtype=model.dtype,
        lora_rank=16 if training.lora is None else training.lora.r,
        quantization=model.quantization,
        has_8bit_moments="8bit" in config.optimizer.kind,
        gradient_checkpointing=model.gradient_checkpointing,
        # A longer row than a micro-batch is one by itself.
        num_tokens=max(training.max_tokens_per_microbatch, config.rollout.max_model_len),
        keeps_reference=reference.placement == "shared" and is_copy,
        compute_dtype=config.learner.compute_dtype,
        sequence_parallel=config.learner.sequence_parallel,
    )


def check(config: RunConfig, shape: ModelShape, machines: Machines) -> Paper:
    """Place the parts of a run and compare their memory with that of the GPUs or nodes.

    Raises:
        ConfigError: quantized weights on several ranks.
    """
    topology, has_gpus = config.topology, _has_gpus(config, machines)
    rank = rank_memory(shape, learning_of(config), 1 if topology is None else topology.gpus_for_training)
    replica = _replica(config, shape, machines.gpu_bytes, has_gpus) if _samples_here(config) else None
    model_bytes = shape.num_parameters * BYTES[config.model.dtype]
    parts = _gpu_parts(config) if has_gpus else _process_parts(config, rank, replica, model_bytes)
    offers = machines.offers
    if topology is None or topology.type == "single_node_split":
        offers = tuple(sorted(offers, key=lambda offer: offer.free, reverse=True)[:1])
    problems = _degree_problems(config, shape)
    places: tuple[Place, ...] = ()
    try:
        places = assign(only_counted(parts, offers), offers)
    except PlacementError as error:
        problems.append(str(error))
    if has_gpus and machines.gpu_bytes is not None:
        problems += _too_large(config, shape, rank, replica, machines.gpu_bytes)
    return Paper(tuple(parts), places, rank, replica, tuple(problems), tuple(missing_machinery(config.sections)))


def _degree_problems(config: RunConfig, shape: ModelShape) -> list[str]:
    degree = config.learner.sequence_parallel
    if shape.num_heads % degree == 0:
        return []
    return [f"learner.sequence_parallel = {degree} does not divide the model's {shape.num_heads} attention heads"]


def _has_gpus(config: RunConfig, machines: Machines) -> bool:
    if config.compute is not None:
        return config.compute.gpu_count > 0
    # Without [compute] a run takes a GPU if there is one.
    return any(offer.gpus for offer in machines.offers)


def _samples_here(config: RunConfig) -> bool:
    is_cluster = config.topology is not None and config.topology.type == "cluster"
    return config.rollout.engine == "vllm" or is_cluster


def _sizes(config: RunConfig) -> tuple[int, int, int]:
    """Return tensor-parallel GPUs of a copy, copies of a server, and servers."""
    placement = place(config.sections)
    topology = config.topology
    if topology is None or topology.type != "cluster":
        return placement.tensor_parallel_size, placement.data_parallel_size, 1
    return placement.tensor_parallel_size, placement.data_parallel_size, num_servers(topology)


def _gpu_parts(config: RunConfig) -> list[Part]:
    topology = config.topology
    tensor, copies, servers = _sizes(config)
    is_split = topology is not None and topology.type != "colocated"
    num_ranks = 1 if topology is None else topology.gpus_for_training
    parts = []
    if is_split:
        parts = [_part("learner", num_ranks, 1), _part("replica", servers, tensor * copies)]
    elif _samples_here(config):
        # Copies of one server may stand on several nodes here: with one node they cannot.
        num_shared = copies * tensor
        shared_part = _part("learner and replica", copies, tensor)
        parts = [shared_part, _part("learner", max(0, num_ranks - num_shared), 1)]
    else:
        parts = [_part("learner", num_ranks, 1)]
    if topology is not None and topology.gpus_for_ref:
        parts.append(_part("reference", 1, topology.gpus_for_ref))
    return [part for part in parts if part.count]


def _part(role: str, count: int, gpus: int) -> Part:
    # A process a GPU, each of which keeps a core busy.
    return Part(role, count, Resources(gpus=gpus, cores=gpus))


def _process_parts(config: RunConfig, rank: RankMemory, replica: ReplicaMemory | None, model_bytes: int) -> list[Part]:
    num_ranks = 1 if config.topology is None else config.topology.gpus_for_training
    parts = [Part("learner", num_ranks, Resources(memory_bytes=rank.total))]
    # The driver is the learner, or has a whole model beside the learner's ranks; it samples with it where nothing else
    # does, from a copy if episodes are played ahead.
    has_copy = config.training.max_staleness > 0
    weight_bytes = 0 if num_ranks == 1 else model_bytes
    if replica is not None and config.rollout.engine == "local" and not has_replicas(config.sections):
        weight_bytes += replica.cache + has_copy * model_bytes
    elif replica is not None:
        tensor, copies, servers = _sizes(config)
        size = tensor * copies * (replica.weights + replica.cache)
        parts.append(Part("replica", servers, Resources(memory_bytes=size)))
    if num_ranks == 1:
        parts[0] = Part("learner", 1, Resources(memory_bytes=rank.total + weight_bytes))
    else:
        parts.append(Part("driver", 1, Resources(memory_bytes=weight_bytes)))
    return parts


def _replica(config: RunConfig, shape: ModelShape, gpu_bytes: int | None, has_gpus: bool) -> ReplicaMemory | None:
    vllm, tensor = config.vllm or VllmSection(), _sizes(config)[0]
    dtype, cache_gib = vllm.dtype or config.model.dtype, vllm.kv_cache_gib
    if cache_gib is None and has_gpus:
        if gpu_bytes is None:
            return None
        return replica_memory(shape, dtype=dtype, tensor_parallel=tensor, budget=_fraction(config) * gpu_bytes)
    bare = replica_memory(shape, dtype=dtype, tensor_parallel=tensor, budget=0)
    return replace(bare, cache=int((1 if cache_gib is None else cache_gib) * GIB))


def _fraction(config: RunConfig) -> float:
    vllm = config.vllm or VllmSection()
    default = OWN_GPU if place(config.sections).is_split else SHARED_GPU
    return vllm.gpu_memory_utilization or default


def _too_large(
    config: RunConfig, shape: ModelShape, rank: RankMemory, replica: ReplicaMemory | None, gpu_bytes: int
) -> list[str]:
    problems, room, deduction = [], USABLE * gpu_bytes, ""
    is_shared = replica is not None and not place(config.sections).is_split
    sleeps = config.vllm is not None and config.vllm.sleep_while_learning
    if is_shared and replica is not None and not sleeps:
        replica_bytes = replica.weights + replica.cache
        room, deduction = room - replica_bytes, f", of which vLLM on the same GPU takes {_gib(replica_bytes)}"
    if rank.total > room:
        problems.append(
            f"a learner rank: {_gib(rank.total)} are needed, and {_gib(max(0, room))} of {_gib(gpu_bytes)} are there"
            f"{deduction} ({_most(rank)}){_advice(config, shape, room)}"
        )
    length = config.rollout.max_model_len
    if replica is not None and replica.num_tokens < length:
        share = f"its part of the weights takes {_gib(replica.weights)}"
        problems.append(
            f"a replica's GPU: {share}, which leaves room for {replica.num_tokens} tokens of "
            f"rollout.max_model_len = {length}, at {_gib(replica.token * length)}; raise tensor_parallel"
        )
    if config.topology is not None and config.topology.gpus_for_ref:
        reference_bytes = shape.num_parameters * BYTES[config.model.dtype] / config.topology.gpus_for_ref
        if reference_bytes > USABLE * gpu_bytes:
            problems.append(f"the reference: {_gib(reference_bytes)} of weights a GPU, and {_gib(gpu_bytes)} are there")
    return problems


def _advice(config: RunConfig, shape: ModelShape, room: float) -> str:
    learning, num_ranks = learning_of(config), 1 if config.topology is None else config.topology.gpus_for_training
    if rank_memory(shape, replace(learning, gradient_checkpointing=True), num_ranks).total <= room:
        return "; it fits with model.gradient_checkpointing = true"
    return ""


def _most(rank: RankMemory) -> str:
    rows = sorted(((name, size) for name, size in asdict(rank).items()), key=lambda row: -row[1])
    return ", ".join(f"{name} {_gib(size)}" for name, size in rows[:3])


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def describe(paper: Paper, config: RunConfig, machines: Machines) -> list[str]:
    """Return the lines that say where everything stands, what it takes and what does not fit."""
    lines = [_nodes_line(machines)]
    for part in paper.parts:
        mine = [part_place for part_place in paper.places if part_place.role == part.role]
        lines.append(f"{part.role}: {part.count} x {part.each}{_where(mine)}")
    breakdown = ", ".join(f"{name} {_gib(size)}" for name, size in asdict(paper.rank).items() if size)
    lines.append(f"a learner rank takes {_gib(paper.rank.total)}: {breakdown}")
    if (replica := paper.replica) is not None:
        length = config.rollout.max_model_len
        lines.append(
            f"{_sampler(paper)} {_gib(replica.weights)} of weights and {_gib(max(0, replica.cache))} of keys "
            f"and values: {replica.num_tokens} tokens, {replica.num_tokens // length} episodes of {length} at once"
        )
    lines += [f"does not fit: {problem}" for problem in paper.problems]
    return lines + [f"note: gspo-gym train refuses it: {text}" for text in paper.refused]


def _sampler(paper: Paper) -> str:
    if not any("replica" in part.role for part in paper.parts):
        return "the engine, in the driver's process, takes"
    return "a replica takes on each GPU" if any(part.each.gpus for part in paper.parts) else "a replica's process takes"


def _nodes_line(machines: Machines) -> str:
    gpus = sum(len(offer.gpus) for offer in machines.offers)
    size = "" if machines.gpu_bytes is None else f" of {_gib(machines.gpu_bytes)}"
    return f"nodes: {len(machines.offers)}, with {gpus} GPUs{size} in all"


def _where(places: Sequence[Place]) -> str:
    nodes: dict[str, list[Place]] = {}
    for part_place in places:
        nodes.setdefault(part_place.node, []).append(part_place)
    rows = []
    for node, here in nodes.items():
        gpus = [gpu for part_place in here for gpu in part_place.gpus]
        rows.append(f"{node} ({_numbers(gpus)})" if gpus else f"{node} (x {len(here)})")
    return " on " + ", ".join(rows) if rows else ""


def _numbers(gpus: Sequence[int]) -> str:
    return f"GPUs {gpus[0]}-{gpus[-1]}" if gpus == list(range(gpus[0], gpus[-1] + 1)) else f"GPUs {list(gpus)}"

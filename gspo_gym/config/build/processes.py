"""The processes of a run besides the driver, from [topology]: ranks of the learner, and replicas that sample.

All are actors of Ray, which `launching` joins or starts. With one process nothing of Ray is imported.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gspo_gym.base.leftovers import temporary_folder
from gspo_gym.cluster.actors import Actors, Cluster
from gspo_gym.cluster.learner import LearnerOnRanks, LearnerRank, RecoverySettings, Started
from gspo_gym.cluster.placement import Part, Resources
from gspo_gym.cluster.ray import joined
from gspo_gym.cluster.sharding import shard_model
from gspo_gym.config.build.engines import REPLICA, held_tensors, sampling_parts, start_vllm_here
from gspo_gym.config.build.teacher import FoundTeacher
from gspo_gym.config.build.threads import compute_in
from gspo_gym.config.build.trainer import actors_device, build_learner, build_policy, build_skeleton
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import has_gpu_actors, ray_address
from gspo_gym.engine.base import Engine
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.vllm.settings import allowed_cores
from gspo_gym.errors import CheckpointError
from gspo_gym.learning.reference import ReferencePolicy
from gspo_gym.learning.update import AnyLearner, Learner
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy
from gspo_gym.policy.parallel import JOIN_SECONDS, copy_into, host_store, join_group
from gspo_gym.run.process import Phases

_ROLE = "learner"
FOLDER = "learner"  # of the run's folder, while ranks learn: their batches; and their log


def num_ranks(config: RunConfig) -> int:
    """Return the number of processes that share the learner's model; 0: it is whole in this process."""
    num = 1 if config.topology is None else config.topology.gpus_for_training
    return num if num > 1 or has_gpu_actors(config.sections) else 0


@contextlib.contextmanager
def launching(config: RunConfig) -> Iterator[Cluster | None]:
    """Yield the places of the processes that the run starts besides this one, on Ray; None: there are none.

    Raises:
        PlacementError: there is no room. MissingExtraError, ServiceError: see `joined`.
    """
    resources = Resources(gpus=int(has_gpu_actors(config.sections)), cores=1)
    ranks = [Part(_ROLE, num_ranks(config), resources)] if num_ranks(config) else []
    if not (parts := ranks + sampling_parts(config)):
        yield None
        return
    assert config.topology is not None
    num_nodes = 1 if config.compute is None else config.compute.nodes
    # One that is started for this run has room for it: its processes share the cores.
    num_cores = sum(part.count * part.each.cores for part in parts) + 1
    num_gpus = sum(part.count * part.each.gpus for part in parts)
    with (
        joined(ray_address(), num_cores=num_cores, num_gpus=num_gpus) as ray,
        contextlib.closing(Cluster(ray, parts, num_nodes=num_nodes, builds={REPLICA: build_replica})) as cluster,
    ):
        yield cluster


@contextlib.contextmanager
def learning(
    config: RunConfig,
    policy: Policy,
    reference: ReferencePolicy | None,
    *,
    cluster: Cluster | None,
    num_threads: int,
    on_restart: Callable[[int, str], None],
    phases: Phases | None = None,
    teacher: FoundTeacher | None = None,
) -> Iterator[AnyLearner]:
    """Yield the learner of the configuration: of this process, or on ranks that this process starts and ends.

    Args:
        policy: gets the trained weights, in place.
        reference, teacher: see `build_learner`.
        cluster: of `launching`.
        num_threads: of torch, of all ranks.
        on_restart: see `LearnerOnRanks`.
        phases: told of the optimizer steps that this process takes.
    """
    if not num_ranks(config):
        yield build_learner(config, policy, reference, phases=phases, teacher=teacher)
        return
    assert config.topology is not None
    assert cluster is not None
    checkpoints = CheckpointStore(config.run_folder / "checkpoints")
    learner = LearnerOnRanks(
        policy.model,
        start=partial(_start, config, cluster, policy.base, max(1, num_threads // num_ranks(config))),
        newest=lambda: checkpoints.load_newest_sound() if checkpoints.steps() else None,
        num_saved=partial(_num_saved, checkpoints),
        folder=config.run_folder / FOLDER,
        settings=RecoverySettings(config.topology.group_timeout_seconds, config.topology.max_restarts),
        on_restart=on_restart,
    )
    try:
        yield learner
    finally:
        learner.close()


def _num_saved(checkpoints: CheckpointStore) -> int:
    """Return the number of updates in the newest checkpoint but one, for the newest may turn out to be damaged."""
    try:
        steps = checkpoints.steps()[-2:]
        return checkpoints.num_updates(steps[0]) if steps else 0
    except CheckpointError:  # it has just been removed for a newer one
        return 0


def _start(config: RunConfig, cluster: Cluster, base: str, num_threads: int, checkpoint: str | None) -> Started:
    assert config.topology is not None
    size, host = num_ranks(config), str(cluster.ray.util.get_node_ip_address())
    store, port = host_store(size, seconds=JOIN_SECONDS, host=host)
    arguments = [(rank, build_rank) for rank in range(size)]
    ranks = Actors(cluster, _ROLE, LearnerRank, arguments, silence_seconds=config.topology.heartbeat_seconds)
    order = {
        "config": config.model_dump(mode="json", exclude_none=True),
        "base": checkpoint or base,
        "num_ranks": size,
        "store": [host, port],
        "num_threads": num_threads,
    }
    return Started(ranks, order, kept=store)


def build_rank(rank: int, order: Any) -> tuple[nn.Module, Callable[[], Learner]]:
    """Return this rank's part of the model, and what builds its learner (Any: the driver's JSON)."""
    config = RunConfig.from_dict(order["config"])
    assert config.topology is not None
    torch.set_num_threads(order["num_threads"])
    seconds = config.topology.group_timeout_seconds
    host, port = order["store"]
    device = actors_device(config)
    join_group(port, rank, order["num_ranks"], device, seconds=seconds, host=host)
    policy, settings = build_skeleton(config, order["base"], device), config.learner
    collective = shard_model(
        policy.model,
        device=device,
        compute_dtype=None if settings.compute_dtype is None else getattr(torch, settings.compute_dtype),
        sequence_parallel=settings.sequence_parallel,
    )
    return policy.model, lambda: build_learner(config, policy, collective=collective)


async def build_replica(order: Any, tensors: Mapping[str, Tensor]) -> Engine:
    """Return the engine of the driver's order (Any: JSON), with the driver's weights."""
    config = RunConfig.from_dict(order["config"])
    num, has_vllm = order["num_replicas"], config.rollout.engine == "vllm"
    num_threads = max(1, torch.get_num_threads() // num)
    torch.set_num_threads(num_threads if has_vllm else 1)
    if has_vllm:
        _take_cores(order["number"], num)
    # vLLM takes a GPU's memory for itself: the weights that it is given stand beside it.
    policy = build_policy(config, order["base"], "cpu" if has_vllm else actors_device(config))
    own = dict(held_tensors(policy.model))
    for name, tensor in tensors.items():
        with torch.no_grad():
            copy_into(own[name], tensor)
    if has_vllm:
        folder = Path(order["folder"])
        if not folder.parent.is_dir():  # it is the driver's, on another machine
            folder = Path(temporary_folder("gspo_gym-replica-")) / folder.name
        return await start_vllm_here(config, policy, folder)
    engine = LocalEngine(
        policy.model,
        takes_tensors=True,
        max_model_len=config.rollout.max_model_len,
        max_batch_size=config.rollout.max_concurrent_rollouts,
    )
    await compute_in(engine, policy.model, num_threads)
    return engine


def _take_cores(number: int, num_replicas: int) -> None:
    """Keep this process and vLLM's to its share of the cores, which vLLM's threads are bound to; if each has one."""
    cores = allowed_cores()
    share = len(cores) // num_replicas
    if share and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[number * share : (number + 1) * share])

"""The engine of a configuration: transformers on the learner's weights, vLLM in this process, or endpoints.

Also the path of new weights into it: the weight sync, the canary that attests them, and the alarm on engine mismatch.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.util
import logging
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gspo_gym.base.leftovers import remove_folder, temporary_folder
from gspo_gym.cluster.actors import Cluster
from gspo_gym.cluster.placement import Part, Resources
from gspo_gym.cluster.replica import ReplicaEngine, ReplicaLostError, ReplicaSettings, Shipment
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import (
    OWN_GPU,
    SHARED_GPU,
    VllmSection,
    has_gpu_actors,
    has_replicas,
    num_replicas,
    place,
)
from gspo_gym.diagnosis.alarms import MismatchAlarm, differ_on_purpose
from gspo_gym.engine.base import Engine, PauseMode, UpdateKind, WeightUpdate, require_sleeping
from gspo_gym.engine.endpoint.http import HttpEngine, HttpSettings
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.replicas.rebuildable import MakeEngine, RebuildableEngine
from gspo_gym.engine.replicas.replica_set import RouterSettings
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.settings import Transfer, VllmSettings
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.attestation import TOLERANCES, Canary, Score, canary_prompts
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy, save_base
from gspo_gym.policy.lora import ADAPTER, is_adapter
from gspo_gym.policy.staging import Handover, Staging, num_weight_bytes, staging_root
from gspo_gym.policy.weight_sync import Target, WeightSync, choose_kind
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.trainer import WhileLearning
from gspo_gym.types import Float32Array, Sampling

_log = logging.getLogger(__name__)

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM knows
REPLICA = "replica"  # the role of a process that samples
_LOOK_SECONDS = 1.0  # between looks at replicas, which cost nothing: a lost one is started anew after it
_API_KEY = "OPENAI_API_KEY"  # the openai package's name for it, with any provider


async def build_engine(config: RunConfig, policy: Policy, cluster: Cluster | None = None) -> Engine:
    """Return the engine of rollout.engine; it holds the policy's weights as version 0, unless its weights are fixed.

    `cluster` has the places of the processes that sample (`sampling_parts`), if there are any.

    Raises:
        ConfigError: the model, the endpoints or this machine cannot do what the config asks for.
        MissingExtraError: vLLM or httpx is not installed.
        EngineError: it did not start, or nothing answers at services.engine_urls.
    """
    check_context(config, policy.base, getattr(policy.model.config, "max_position_embeddings", None))
    check_engine(config)
    # With rescore it is the local one: what the endpoint's samples teach is seen by playing the policy itself.
    if config.rollout.engine == "http" and not config.rollout.rescore:
        return await build_endpoint(config, policy)
    if has_replicas(config.sections) and cluster is not None:  # an evaluation has one engine, here
        return await _start_replicas(config, policy, cluster)
    if config.rollout.engine == "vllm":
        return await _start_vllm(config, policy)
    is_ahead = config.training.max_staleness > 0  # it samples while the learner changes its own weights
    return LocalEngine(
        copy.deepcopy(policy.model) if is_ahead else policy.model,
        source=policy.model if is_ahead else None,
        max_model_len=config.rollout.max_model_len,
        max_batch_size=config.rollout.max_concurrent_rollouts,
    )


def check_context(config: RunConfig, base: str, longest: int | None) -> None:
    """Refuse contexts beyond `longest`, the most tokens that the model reads; None: unknown.

    Raises:
        ConfigError: names the key.
    """
    lengths = {"rollout.max_model_len": config.rollout.max_model_len}
    if config.vllm is not None and config.vllm.max_model_len is not None:
        lengths["vllm.max_model_len"] = config.vllm.max_model_len
    for key, length in lengths.items():
        if longest is not None and length > longest:
            raise ConfigError(f"{key}: {base} reads at most {longest} tokens, got {length}")


def check_engine(config: RunConfig) -> None:
    """Refuse an engine with a package that is not installed here.

    Raises:
        MissingExtraError: vLLM or httpx is missing.
    """
    engine = config.rollout.engine
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            'rollout.engine = "vllm": vLLM is not installed; pip install \'gspo-gym[vllm]\', or set "local"'
        )
    if engine == "http" and importlib.util.find_spec("httpx") is None:
        raise MissingExtraError("rollout.engine = \"http\": httpx is not installed; pip install 'gspo-gym[openai]'")


async def build_endpoint(config: RunConfig, policy: Policy) -> Engine:
    """Connect to the external endpoint at `services.engine_urls`; token ids are those of the policy's tokenizer.

    Raises:
        ConfigError, MissingExtraError, EngineError: see `build_engine`.
    """
    urls = config.endpoints.engine_urls
    return await _connect([_openai_endpoint(config, policy, url) for url in urls])


def vllm_settings(config: RunConfig, policy: Policy, folder: Path) -> VllmSettings:
    """Return vLLM's settings for the weights in that folder, from [vllm], [rollout] and [training.weight_sync]."""
    vllm, on_processor = config.vllm or VllmSection(), _is_on_processor(config, policy)
    placement = place(config.sections)
    rank = policy.model.peft_config[ADAPTER].r if sends_adapters(config, policy) else 0
    # vLLM starts only with ranks of its own list, and reads smaller adapters, too.
    return VllmSettings(
        model=str(folder),
        max_model_len=vllm.max_model_len or config.rollout.max_model_len,
        dtype=vllm.dtype or config.model.dtype,
        num_token_ids=_num_token_ids(policy),
        max_num_seqs=config.rollout.max_concurrent_rollouts,
        tensor_parallel_size=placement.tensor_parallel_size,
        data_parallel_size=placement.data_parallel_size,
        # A replica's process sees its own GPUs only.
        device_ids=placement.vllm if placement.is_split and not (on_processor or has_replicas(config.sections)) else (),
        gpu_memory_utilization=vllm.gpu_memory_utilization or (OWN_GPU if placement.is_split else SHARED_GPU),
        kv_cache_gib=1.0 if vllm.kv_cache_gib is None and on_processor else vllm.kv_cache_gib,
        enforce_eager=on_processor,
        seed=config.run.seed,
        max_lora_rank=next((size for size in _LORA_RANKS if size >= rank), rank) if rank else 0,
        max_loras=config.training.max_staleness + 2,
        enable_sleep_mode=vllm.sleep_while_learning and not on_processor,  # where there is no memory to give back
        # Schemas come from task apps alone, and know the model's own end tokens, which a minimum would withhold.
        structured_output=config.has_app and config.rollout.min_output_tokens == 0,
        transfer=_transfer(config, policy),
    )


def _is_on_processor(config: RunConfig, policy: Policy) -> bool:
    return policy.model.device.type == "cpu" and not has_gpu_actors(config.sections)


def build_while_learning(config: RunConfig, engine: Engine) -> WhileLearning:
    """Return the context for the learner's work on a batch: with vllm.sleep_while_learning, the engine sleeps in it.

    Raises:
        ConfigError: the engine cannot sleep.
    """
    if config.vllm is None or not config.vllm.sleep_while_learning:
        return contextlib.nullcontext
    # Raised here and not after the first batch.
    sleeping = require_sleeping(engine)

    @contextlib.asynccontextmanager
    async def lend() -> AsyncIterator[None]:
        await sleeping.sleep()
        # If the learner fails, the run ends: no engine is to take back memory which may be in use.
        yield
        torch.cuda.empty_cache()  # what the learner used and keeps for later is the engine's again
        await sleeping.wake_up()

    return lend


def sends_adapters(config: RunConfig, policy: Policy) -> bool:
    """Return whether vLLM in this process takes LoRA adapters as they are, not merged into the base."""
    if not is_adapter(policy.model):
        return False
    sync = config.weight_sync
    if sync.mode != "auto":
        return sync.mode == "direct"
    # On a processor vLLM's products with an adapter take several times as long as those with the merged weights.
    is_whole = sync.transfer != "files" or has_replicas(config.sections)
    return not is_whole and policy.model.device.type != "cpu"


def _transfer(config: RunConfig, policy: Policy) -> Transfer:
    transfer = config.weight_sync.transfer
    if has_replicas(config.sections):  # what arrives in a replica's process goes on to vLLM's
        transfer = "shared_memory"
    if transfer in ("ipc", "nccl") and policy.model.device.type != "cuda":
        raise ConfigError(
            f'training.weight_sync.direct: "{transfer}" is from GPU to GPU, but the policy is on the '
            f'{policy.model.device.type}; set "shared_memory" or true'
        )
    if transfer == "shared_memory" and not hasattr(os, "memfd_create"):
        raise ConfigError('training.weight_sync.direct: "shared_memory" needs Linux; set true')
    return transfer


async def _start_vllm(config: RunConfig, policy: Policy) -> Engine:
    folder = Path(temporary_folder("gspo_gym-start-"))

    async def start() -> Engine:
        return await VllmEngine.start(settings)

    try:
        if sends_adapters(config, policy):
            await asyncio.to_thread(save_base, policy, folder / "base")
            # The base alone: the adapter follows as the first update.
            settings = vllm_settings(config, policy, folder / "base")
        else:
            checkpoint = await asyncio.to_thread(_stage, config, policy, folder, "full")
            settings = vllm_settings(config, policy, checkpoint.folder or folder)
        engine = RebuildableEngine(await start(), start, on_close=lambda: remove_folder(folder))
        if sends_adapters(config, policy):
            await _give_adapter(config, policy, engine)
        return engine
    except BaseException:
        remove_folder(folder)
        raise


async def start_vllm_here(config: RunConfig, policy: Policy, folder: Path) -> Engine:
    """Start vLLM in a replica's process, on the policy's weights, which are left in `folder` for it.

    Raises:
        MissingExtraError: vLLM is not installed. EngineError: it did not start.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of the process in whose place this one was started
    checkpoint = await asyncio.to_thread(_stage, config, policy, folder, "full")
    return await VllmEngine.start(vllm_settings(config, policy, checkpoint.folder or folder))


def sampling_parts(config: RunConfig) -> list[Part]:
    """Return the processes that sample, to be placed on nodes; none if this process does."""
    num, placement = num_replicas(config.sections), place(config.sections)
    cores = placement.tensor_parallel_size * placement.data_parallel_size
    gpus = cores if has_gpu_actors(config.sections) else 0
    return [Part(REPLICA, num, Resources(gpus=gpus, cores=cores))] if num else []


async def _start_replicas(config: RunConfig, policy: Policy, cluster: Cluster) -> Engine:
    # A replica that is lost is started anew, and gets the committed weights, while the others play on. If all are lost
    # before an update, or fail it, all are started anew, and get the new weights.
    folder, shipment = temporary_folder("gspo_gym-replicas-"), Shipment(cluster.ray)
    assert config.topology is not None
    topology, max_restarts, num = config.topology, config.topology.max_restarts, num_replicas(config.sections)

    async def start(number: int) -> Engine:
        order = {
            "config": config.model_dump(mode="json", exclude_none=True),
            "base": _base_now(config, policy.base),
            "number": number,
            "num_replicas": num,
            "folder": str(Path(folder) / f"model_{number}"),
        }
        settings = ReplicaSettings(
            REPLICA, number, cluster.builds[REPLICA], order, topology.heartbeat_seconds, topology.group_timeout_seconds
        )
        tensors = {name: tensor.detach().cpu() for name, tensor in held_tensors(policy.model)}
        return await ReplicaEngine.start(cluster, settings, shipment, tensors)

    async def start_again(number: int) -> Engine:
        for num_lost in range(1, max_restarts + 1):
            try:
                return await start(number)
            except ReplicaLostError as error:
                _log.warning("replica %d is started again, %d of %d: %s", number, num_lost, max_restarts, error)
        return await start(number)

    async def start_all() -> Engine:
        starts = [asyncio.ensure_future(start_again(number)) for number in range(num)]
        try:
            engines = await asyncio.gather(*starts)
        except BaseException:
            for task in starts:
                task.cancel()  # ends what it began; one that is up must be closed
            for result in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(result, ReplicaEngine):
                    await result.close()
            raise
        rebuildable = [
            RebuildableEngine(engine, partial(start, number), max_rebuilds=max_restarts)
            for number, engine in enumerate(engines)
        ]
        return RoutedEngine(rebuildable, settings=RouterSettings(health_interval_seconds=_LOOK_SECONDS))

    try:
        return RebuildableEngine(
            await start_all(), start_all, max_rebuilds=max_restarts, on_close=lambda: remove_folder(folder)
        )
    except BaseException:
        remove_folder(folder)
        raise


def _base_now(config: RunConfig, base: str) -> str:
    """Return what a process that samples builds its model from; it is given other weights."""
    checkpoints = config.run_folder / "checkpoints"
    if Path(base).is_dir() or Path(base).parent != checkpoints.resolve():
        return base
    return str(CheckpointStore(checkpoints).newest())  # that one, from which the run went on, has made room for others


def held_tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and saved buffers of a model (Any: untyped), whose weights need not be its files' ones."""
    keys = model.state_dict().keys()
    return [*model.named_parameters(), *((name, tensor) for name, tensor in model.named_buffers() if name in keys)]


def _openai_endpoint(config: RunConfig, policy: Policy, url: str) -> MakeEngine:
    engine_model = config.endpoints.engine_model
    settings = HttpSettings(
        url if url.endswith("/v1") else f"{url}/v1",  # as the openai package wants it
        engine_model or config.model.base or policy.base,
        api_key_env=_API_KEY if os.environ.get(_API_KEY) else None,
        max_model_len=config.rollout.max_model_len,
        vocab_size=_vocab_size(policy),
        rescore=config.rollout.rescore,
        seed=config.run.seed,
    )

    async def start() -> Engine:
        return await HttpEngine.start(settings, policy.tokenizer)

    return start


async def _connect(starts: list[MakeEngine]) -> Engine:
    engines: list[Engine] = []
    try:
        for start in starts:
            engines.append(RebuildableEngine(await start(), start))
    except BaseException:
        for engine in engines:
            await engine.close()
        raise
    return engines[0] if len(engines) == 1 else RoutedEngine(engines)


async def _give_adapter(config: RunConfig, policy: Policy, engine: Engine) -> None:
    folder = Path(temporary_folder("gspo_gym-start-"))
    try:
        update = await asyncio.to_thread(_stage, config, policy, folder, "adapter")
        await engine.pause("wait")
        await engine.apply_weights(update)
        await engine.resume(0)
    finally:
        remove_folder(folder)


def _stage(config: RunConfig, policy: Policy, folder: Path, kind: UpdateKind) -> WeightUpdate:
    dtype = (config.vllm or VllmSection()).dtype or config.model.dtype
    return Staging(policy, folder, dtype=dtype).stage(0, kind)


def _vocab_size(policy: Policy) -> int:
    return int(policy.model.get_input_embeddings().weight.shape[0])  # with padded rows


def _num_token_ids(policy: Policy) -> int | None:
    return getattr(policy.model, "num_token_ids", None)  # see `load_policy`


def build_weight_sync(config: RunConfig, policy: Policy, engine: Engine, recorder: RunRecorder) -> WeightSync:
    """Return the weight sync of [training.weight_sync]; it restores the last weights in an engine that can be rebuilt.

    A canary is asked of every engine that holds separate weights.

    Raises:
        ConfigError: the settings allow no way in which the engine takes new weights.
    """
    sync_section, max_staleness = config.weight_sync, config.training.max_staleness
    kind = choose_kind(
        engine,
        is_adapter=is_adapter(policy.model),
        mode=sync_section.mode,
        direct=sync_section.direct is not False,
        is_handed_over=sync_section.transfer != "files" or has_replicas(config.sections),
    )
    canary = build_canary(config, policy) if kind != "shared" or max_staleness > 0 else None
    rebuildable = engine if isinstance(engine, RebuildableEngine) else None
    weight_sync = WeightSync(
        [Target(engine, None if rebuildable is None else rebuildable.rebuild)],
        mode=_pause_mode(config, engine),
        kind=kind,
        staging=_staging(config, policy, kind),
        canary=canary,
        verify_every_k=sync_section.verify_every_k,
        interval=config.training.weight_sync_interval,
        on_event=lambda name, values: recorder.event(name, values["version"], values),
    )
    if has_replicas(config.sections):
        weight_sync.begin()  # others are started with a folder, which stays

    def watch(engine_of_calls: Engine) -> None:
        if isinstance(engine_of_calls, RoutedEngine):
            if canary is not None:
                engine_of_calls.attest = canary.check  # of each replica, where a call would reach one of them
            engine_of_calls.set_rebuild(partial(_rebuild, weight_sync))

    watch(engine if rebuildable is None else rebuildable.engine)
    if rebuildable is not None:
        rebuildable.on_fresh = watch
        # After a crash it comes up with the committed weights, not with those of the start. Replicas do so one by one.
        if not isinstance(rebuildable.engine, RoutedEngine):
            rebuildable.bring_up = weight_sync.restore
    return weight_sync


def _pause_mode(config: RunConfig, engine: Engine) -> PauseMode:
    # With vLLM's long requests every update would wait for the longest.
    can_keep = config.training.max_staleness > 0 and "keep" in engine.capabilities.pause_modes
    return "keep" if can_keep and config.rollout.engine == "vllm" else "wait"


async def _rebuild(weight_sync: WeightSync, replica: Engine) -> None:
    # An excluded replica of another kind stays excluded. One that could not be given its weights now is not started in
    # vain: the next health check is soon.
    if isinstance(replica, RebuildableEngine) and await asyncio.to_thread(weight_sync.can_restore):
        await replica.rebuild(weight_sync.restore)


def build_canary(config: RunConfig, policy: Policy) -> Canary:
    """Return a canary of fixed prompts at the rollouts' temperature, scored by the policy's own forward pass."""
    temperature = config.rollout.temperature
    return Canary(
        canary_prompts(policy.tokenizer.vocab_size, config.rollout.max_model_len),
        score=learner_score(policy.model, temperature),
        tolerance=max(TOLERANCES[dtype] for dtype in _dtypes(config)),
        temperature=temperature,
    )


def learner_score(model: nn.Module, temperature: float) -> Score:
    """Return a function that scores whole sequences under the model's present weights, without truncated sampling."""
    computer = LogprobComputer(model, sampling=Sampling(temperature=temperature))
    device = next(model.parameters()).device

    @torch.no_grad()
    def score(rows: Sequence[Sequence[int]]) -> Sequence[Float32Array]:
        longest = max(len(row) for row in rows)
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        attention = torch.arange(longest, device=device) < torch.tensor([[len(row)] for row in rows], device=device)
        actions = attention.clone()
        actions[:, 0] = False  # the first token has no logprob
        logprobs = computer.compute(ids, attention, actions).logprobs.float().cpu().numpy()
        return [values[1 : len(row)] for values, row in zip(logprobs, rows, strict=True)]

    return score


def build_alarm(config: RunConfig, *, num_in_a_row: int = 0) -> MismatchAlarm | None:
    """Return the alarm of correction.max_engine_gap; None if it is absent and the logprobs differ on purpose.

    `num_in_a_row` batches were wrong when an earlier part of the run stopped.
    """
    rollout, training, max_gap = config.rollout, config.training, config.correction.max_engine_gap
    if rollout.rescore or (
        max_gap is None
        and differ_on_purpose(
            rollout.sampling,
            is_cut_when_scored=config.scores_truncated,
            dropout=0.0 if training.lora is None else training.lora.dropout,
        )
    ):
        return None
    is_half = set(_dtypes(config)) != {"float32"}
    return MismatchAlarm(max_gap=max_gap, has_16_bits=is_half, num_in_a_row=num_in_a_row)


def _staging(config: RunConfig, policy: Policy, kind: UpdateKind) -> Staging | Handover | None:
    if kind == "shared":
        return None
    if kind == "transfer":
        return Handover(policy, dtype=_dtypes(config)[1], trained_only=config.rollout.engine == "local")
    # Each version that a request in flight may have, and the next one.
    keep = config.training.max_staleness + 2
    num_bytes = (keep + 1) * num_weight_bytes(policy.model)  # the oldest goes one commit later
    in_memory = config.weight_sync.direct is not False
    root = staging_root(config.run_folder, in_memory=in_memory, num_bytes=num_bytes)
    return Staging(policy, root, keep=keep, dtype=_dtypes(config)[1])


def _dtypes(config: RunConfig) -> tuple[str, str]:
    own = config.model.dtype
    # vLLM may compute in another dtype than the learner's.
    return own, getattr(config.vllm, "dtype", None) or own

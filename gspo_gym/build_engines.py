"""The engine that a config names: transformers on the learner's weights, vLLM in this process, or servers that run.

Called by `build.py`. How the engine gets new weights is `weight_sync`'s affair; here it gets the first ones.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import re
import shutil
import tempfile
from pathlib import Path

from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import VllmSection
from gspo_gym.engine.base import Engine
from gspo_gym.engine.local import LocalEngine
from gspo_gym.engine.rebuildable import RebuildableEngine
from gspo_gym.engine.vllm import VllmEngine
from gspo_gym.engine.vllm_settings import VllmSettings
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.models import Policy
from gspo_gym.models_adapters import ADAPTER, is_adapter
from gspo_gym.staging import Staging

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM knows


async def build_engine(config: RunConfig, policy: Policy) -> Engine:
    """The engine of rollout.engine, with the policy's present weights as version 0.

    Raises:
        ConfigError: the model, or this machine, cannot do what the config asks for.
        MissingExtraError: vLLM is not installed.
        EngineError: it did not start, or nobody answers at services.engine_urls.
    """
    _require_context(config, policy)
    if config.rollout.engine == "vllm":
        return await _start_vllm(config, policy)
    is_ahead = config.training.max_staleness > 0  # it samples while the learner changes its own weights
    return LocalEngine(
        copy.deepcopy(policy.model) if is_ahead else policy.model,
        source=policy.model if is_ahead else None,
        max_model_len=config.rollout.max_model_len,
        max_batch_size=config.rollout.max_concurrent_rollouts,
    )


def vllm_settings(config: RunConfig, policy: Policy, folder: Path) -> VllmSettings:
    """How vLLM is to run the weights in that folder, as [vllm], [rollout] and [training.weight_sync] say."""
    vllm, on_processor = config.vllm or VllmSection(), policy.model.device.type == "cpu"
    rank = policy.model.peft_config[ADAPTER].r if sends_adapters(config, policy) else 0
    return VllmSettings(
        model=str(folder),
        max_model_len=vllm.max_model_len or config.rollout.max_model_len,
        dtype=vllm.dtype or config.model.dtype,
        max_num_seqs=config.rollout.max_concurrent_rollouts,
        tensor_parallel_size=vllm.tensor_parallel_size,
        data_parallel_size=vllm.data_parallel_size,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        kv_cache_gib=1.0 if vllm.kv_cache_gib is None and on_processor else vllm.kv_cache_gib,
        enforce_eager=on_processor if vllm.enforce_eager is None else vllm.enforce_eager,
        seed=config.run.seed,
        max_lora_rank=next((known for known in _LORA_RANKS if known >= rank), rank) if rank else 0,
    )


def sends_adapters(config: RunConfig, policy: Policy) -> bool:
    """Whether vLLM is started for adapters: a LoRA that is sent as it is, not merged into its base."""
    weight_sync = config.training.weight_sync
    return is_adapter(policy.model) and (weight_sync is None or weight_sync.mode == "direct")


async def _start_vllm(config: RunConfig, policy: Policy) -> Engine:
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            'rollout.engine = "vllm": vLLM is not installed; pip install \'gspo-gym[vllm]\', or set "local"'
        )
    folder = Path(tempfile.mkdtemp(prefix="gspo_gym-start-"))
    try:
        await asyncio.to_thread(_write_start, config, policy, folder)
        settings = vllm_settings(config, policy, folder / "policy-v0")

        async def start() -> Engine:
            return await VllmEngine.start(settings)

        return RebuildableEngine(await start(), start, on_close=lambda: shutil.rmtree(folder, ignore_errors=True))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_start(config: RunConfig, policy: Policy, folder: Path) -> None:
    """The weights that vLLM starts with, in transformers layout: the base alone if adapters come later."""
    if not sends_adapters(config, policy):
        Staging(policy, folder).stage(0, "full")
        return
    base = policy.model.get_base_model()
    weights = {
        re.sub(r"(\.base_layer)+\.", ".", name): tensor.detach()
        for name, tensor in base.state_dict().items()
        if "lora_" not in name
    }
    base.save_pretrained(folder / "policy-v0", state_dict=weights)
    policy.tokenizer.save_pretrained(folder / "policy-v0")


def _require_context(config: RunConfig, policy: Policy) -> None:
    longest = getattr(policy.model.config, "max_position_embeddings", None)
    asked = {"rollout.max_model_len": config.rollout.max_model_len}
    if config.vllm is not None and config.vllm.max_model_len is not None:
        asked["vllm.max_model_len"] = config.vllm.max_model_len
    for key, length in asked.items():
        if longest is not None and length > longest:
            raise ConfigError(f"{key}: {policy.base} reads at most {longest} tokens, got {length}")

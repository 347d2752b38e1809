"""Rules about weights that are handed to vLLM in memory (training.weight_sync.transfer) instead of read from files."""

from __future__ import annotations

from gspo_gym.config.rules.rule import Rule
from gspo_gym.config.words import show

_KEY = "training.weight_sync.transfer"


def _is_files(transfer: str | None) -> bool:
    return transfer is None or transfer == "files"


def _vllm_is_here(transfer: str | None, engine: str, urls: tuple[str, ...] | None) -> str | None:
    if _is_files(transfer) or (engine == "vllm" and not urls):
        return None
    if urls:
        return (
            f"{show(transfer)} hands weights to vLLM in this process, not to servers at services.engine_urls, which "
            'read files: set "files", or remove the URLs'
        )
    return f'has no effect with rollout.engine {show(engine)}: set that to "vllm", or remove this'


def _weights_are_whole(transfer: str | None, trainer_mode: str, mode: str | None) -> str | None:
    if _is_files(transfer) or trainer_mode == "full":
        return None
    if trainer_mode == "qlora":
        return f'{show(transfer)} hands over whole models, and quantized weights cannot be: set "files"'
    if mode == "full":
        return None
    return (
        f"{show(transfer)} hands over whole models, but training.weight_sync.mode {show(mode)} sends an adapter alone: "
        'set that to "full", which merges it, or this to "files"'
    )


def _weights_stay(transfer: str | None, max_staleness: int) -> str | None:
    if _is_files(transfer) or max_staleness == 0:
        return None
    return (
        f"{show(transfer)} keeps no copy of a version, so that an engine that dies could not be given the one that it "
        f'had: set training.max_staleness = 0, which is {max_staleness}, or "files"'
    )


def _direct_is_of_files(direct: bool | None, transfer: str | None) -> str | None:
    if _is_files(transfer) or direct is not False:
        return None
    return f"has no effect with {_KEY} {show(transfer)}, which writes no files: set true, or remove this"


def _gpus_are_reached(
    transfer: str | None, has_topology: bool, tensor_parallel: int | None, data_parallel: int | None
) -> str | None:
    if transfer == "nccl" and not has_topology:
        return '"nccl" needs [topology], which gives vLLM GPUs of its own; on the learner\'s own GPU set "ipc"'
    if transfer != "ipc":
        return None
    if has_topology:
        return '"ipc" needs vLLM on the learner\'s own GPU, but [topology] gives it others: set "nccl"'
    if (num_gpus := (tensor_parallel or 1) * (data_parallel or 1)) > 1:
        return (
            f'"ipc" needs vLLM on the learner\'s own GPU alone, but vllm.tensor_parallel_size x '
            f'vllm.data_parallel_size is {num_gpus}: set "files", or "nccl" with [topology]'
        )
    return None


TRANSFER_RULES = (
    Rule((_KEY, "rollout.engine", "services.engine_urls"), _vllm_is_here),
    Rule((_KEY, "model.trainer_mode", "training.weight_sync.mode"), _weights_are_whole),
    Rule((_KEY, "training.max_staleness"), _weights_stay),
    Rule(("training.weight_sync.direct", _KEY), _direct_is_of_files),
    Rule((_KEY, "topology", "vllm.tensor_parallel_size", "vllm.data_parallel_size"), _gpus_are_reached),
)

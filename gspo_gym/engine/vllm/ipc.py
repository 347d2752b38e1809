"""vLLM's own CUDA IPC transfer, with handles that are plain values on their way to the workers.

vLLM sends a handle as it comes from torch, with classes among its values, which reach a worker only if both unpickle
what they are sent (VLLM_ALLOW_INSECURE_SERIALIZATION). But these classes are always the same ones: they stay behind,
and the worker puts them back.

Not run on a GPU; tested are the handles' way to a worker and back, and that vLLM takes what they become. Imports vLLM:
by workers, and by `vllm_transfer` when an engine has started.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from gspo_gym.errors import EngineError

# Arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor` that are the same for every chunk, by position:
# the class of the tensor, of its storage, and the type of its elements; a chunk is a vector of bytes.
_CONSTANTS = {0: torch.Tensor, 4: torch.TypedStorage, 5: torch.uint8}
_NUM_ARGUMENTS = 15


class PlainIpcEngine(IPCWeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped
    """A worker's end that takes plain handles."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """Return the update that vLLM's own engine takes (Any: untyped)."""
        handles = {gpu: handle_of(values) for gpu, values in update_dict["ipc_handles"].items()}
        return super().parse_update_info({**update_dict, "ipc_handles": handles})


def plain_update(update_info: dict[str, Any]) -> dict[str, Any]:
    """Return the update of one chunk with plain handles."""
    handles = {gpu: plain_of(handle) for gpu, handle in update_info["ipc_handles"].items()}
    return {**update_info, "ipc_handles": handles}


def plain_of(handle: tuple[Any, ...]) -> list[Any]:
    """Return the values of a handle that differ between handles (Any: numbers, bytes, shapes).

    Raises:
        EngineError: it is not a handle that torch 2.13 makes of a vector of bytes.
    """
    found = {position: handle[position] for position in _CONSTANTS} if len(handle) == _NUM_ARGUMENTS else {}
    if found != _CONSTANTS:
        raise EngineError(
            f"expected a CUDA IPC handle of {_NUM_ARGUMENTS} values with {_CONSTANTS}, got {len(handle)} with {found}: "
            'another version of torch; set training.weight_sync.transfer = "files"'
        )
    return [
        list(value) if isinstance(value, tuple) else value
        for position, value in enumerate(handle)
        if position not in _CONSTANTS
    ]


def handle_of(plain: list[Any]) -> tuple[Any, ...]:
    """Return the handle with these values."""
    values = iter([tuple(value) if isinstance(value, list) else value for value in plain])
    return tuple(_CONSTANTS[position] if position in _CONSTANTS else next(values) for position in range(_NUM_ARGUMENTS))

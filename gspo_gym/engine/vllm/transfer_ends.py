"""Our ends of vLLM's weight transfers: both of "shared_memory", and the worker's of "ipc". Imports vLLM.

Shared memory: no transfer of vLLM's runs on a processor. The trainer's end writes a chunk of tensors into memory
without a name in any file system, tells the workers its path under /proc, and closes it when all have loaded it. They
map it, so the only copy is into the model. When either side dies, the kernel takes the memory back.

IPC: vLLM sends a handle with torch's classes among its values, which reach a worker only if both unpickle what they are
sent (VLLM_ALLOW_INSECURE_SERIALIZATION). These classes are always the same: here they stay behind, and the worker puts
them back. Not run on a GPU; tested are the handles' way and back, and that vLLM takes the result.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from gspo_gym.engine.base import TensorMeta
from gspo_gym.engine.vllm.worker import TRANSFER_BACKENDS, WorkerExtension, repack
from gspo_gym.errors import EngineError


class TransferWorkerExtension(WorkerExtension):
    """The methods that every worker gains; importing this module has registered the transfer."""


# By name, because vLLM makes its transfer engine after the extension was imported.
WeightTransferEngineFactory.register_engine(TRANSFER_BACKENDS["shared_memory"], __name__, "SharedMemoryEngine")
WeightTransferEngineFactory.register_engine(TRANSFER_BACKENDS["ipc"], __name__, "PlainIpcEngine")


_ALIGNMENT = 64  # bytes; of each tensor in a chunk, for a tensor cannot begin between two of its elements


@dataclass
class SharedMemoryTrainerInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is untyped
    """The settings of the trainer's end: no chunk is larger than this, unless a single tensor is."""

    backend: ClassVar[str] = TRANSFER_BACKENDS["shared_memory"]

    chunk_bytes: int = 256 * 2**20


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped
    """Nothing need be agreed on before."""


@dataclass
class Chunk(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is untyped
    """Some tensors in one piece of memory.

    Attributes:
        path: where the memory can be opened while the trainer holds it.
        num_bytes: of all of it.
        names, dtype_names, shapes, offsets: of each tensor; offsets in bytes.
    """

    path: str
    num_bytes: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]

    def tensors(self, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield views of that memory, [num_bytes] uint8."""
        for name, dtype_name, shape, offset in zip(
            self.names, self.dtype_names, self.shapes, self.offsets, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            piece = memory[offset : offset + math.prod(shape) * dtype.itemsize]
            yield name, piece.view(dtype).view(shape)


class SharedMemoryTrainer(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped
    """The trainer's end: one chunk after another, each gone before the next is made."""

    init_info_cls = SharedMemoryTrainerInfo

    def __init__(self, *, client: Any, source: Any, chunk_bytes: int) -> None:
        """Use `trainer_init`. They are vLLM's `VLLMWeightSyncClient` and `WeightSource` (Any: untyped)."""
        super().__init__(client=client, source=source)
        self._chunk_bytes = chunk_bytes

    @classmethod
    def trainer_init(cls, init_info: SharedMemoryTrainerInfo, *, client: Any, source: Any = None) -> Self:
        """Return a trainer's end with workers that are ready."""
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source, chunk_bytes=init_info.chunk_bytes)

    def send_weights(self) -> None:
        """Hand over all tensors of the source.

        Raises:
            EngineError: the source gives other tensors than it said it would.
        """
        self.client.start_weight_update()
        tensors = iter(self.source)
        for metas in plan_chunks(self.source.metadata(), self._chunk_bytes):
            with _write_chunk(metas, tensors) as chunk:
                self.client.update_weights(asdict(chunk))
        if (extra := next(tensors, None)) is not None:
            raise EngineError(f"the source gave {extra[0]!r} after all that its metadata has")
        self.client.finish_weight_update()


class SharedMemoryEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped
    """A worker's end: loads chunks layer by layer into the live model, as vLLM's own transfers do."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = Chunk

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Expect the tensors of a whole model."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a chunk."""
        # vLLM's own method waits for the accelerator, which raises where there is none.
        if torch.accelerator.is_available():
            super().update_weights(update_info)
        else:
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Chunk) -> None:
        """Map a chunk and load it; a layer that is not complete yet keeps its part of the mapping."""
        with disable_mtp_completeness_check():
            self.model.load_weights(update_info.tensors(_map_chunk(update_info)))

    def finish_weight_update(self) -> None:
        """Complete the weights that are not complete, and the copies that vLLM computes with."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


WeightTransferTrainerFactory.register_engine(SharedMemoryTrainerInfo.backend, SharedMemoryTrainer)


def plan_chunks(metadata: Sequence[TensorMeta], chunk_bytes: int) -> Iterator[list[TensorMeta]]:
    """Split tensors into chunks of at most that many bytes, in order; a larger one is a chunk alone."""
    chunk: list[TensorMeta] = []
    for meta in metadata:
        if chunk and _layout([*chunk, meta])[1] > chunk_bytes:
            yield chunk
            chunk = []
        chunk.append(meta)
    if chunk:
        yield chunk


def _layout(metas: Sequence[TensorMeta]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for meta in metas:
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + math.prod(meta.shape) * meta.dtype.itemsize
    return offsets, end


@contextmanager
def _write_chunk(metas: Sequence[TensorMeta], tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Chunk]:
    # In memory that other processes can open by its path until this ends.
    offsets, end = _layout(metas)
    num_bytes = max(end, 1)  # nothing cannot be mapped
    file = os.memfd_create("gspo_gym-weights")
    try:
        os.ftruncate(file, num_bytes)  # what lies between tensors, too
        chunk = Chunk(
            path=f"/proc/{os.getpid()}/fd/{file}",
            num_bytes=num_bytes,
            names=[meta.name for meta in metas],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
            offsets=offsets,
        )
        for meta, offset in zip(metas, offsets, strict=True):
            name, tensor = next(tensors)
            # The workers cut the bytes by the metadata, so another tensor would become a wrong weight.
            if TensorMeta(name, tensor.dtype, tuple(tensor.shape)) != meta:
                raise EngineError(f"the source gave {name!r}, {tensor.dtype} {tuple(tensor.shape)}, and not {meta}")
            _write(file, offset, tensor)
        yield chunk
    finally:
        os.close(file)


def _write(file: int, offset: int, tensor: Tensor) -> None:
    # Written and not mapped: the kernel then need not clear memory that is about to be filled.
    rest = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    while rest:  # a call writes 2 GiB at most
        num_written = os.pwrite(file, rest, offset)
        rest, offset = rest[num_written:], offset + num_written


def _map_chunk(chunk: Chunk) -> Tensor:
    # Copy on access: writes stay in this process, and torch wants memory that can be written.
    with open(chunk.path, "rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), chunk.num_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


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
    values = {position: handle[position] for position in _CONSTANTS} if len(handle) == _NUM_ARGUMENTS else {}
    if values != _CONSTANTS:
        raise EngineError(
            f"expected a CUDA IPC handle of {_NUM_ARGUMENTS} values with {_CONSTANTS}, got {len(handle)} with {values}"
            ": another version of torch; set training.weight_sync.direct = true"
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

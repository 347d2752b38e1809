"""Weights handed to vLLM's workers in memory, through vLLM's own weight transfer interface.

vLLM has a trainer's end, which sends a source's tensors, and a worker's end, which loads them; they meet through a
client of four calls. Here are the source, the client, a thread for the transfer, and an end when either side fails.
By backend:

* "ipc": vLLM on the learner's GPU maps a buffer of the learner (CUDA IPC).
* "nccl": vLLM on other GPUs gets packed broadcasts.
* "shared_memory": through this machine's memory (`engine/vllm/transfer_ends.py`); the only backend for a processor.

"ipc" and "nccl" were not run on a GPU: they were written from the source of vLLM 0.32, and tested as far as a processor
goes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from gspo_gym.base.loops import retrieve_exception
from gspo_gym.engine.base import TensorMeta, TensorSource
from gspo_gym.engine.vllm.adapters import require_tensors
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.errors import EngineError

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 256 * 2**20  # of memory that a transfer takes besides the weights, or the largest tensor if that is more

_GRACE_SECONDS = 10.0  # for the sending thread to notice that its transfer failed


class WeightTransfer:
    """One engine's transfer; opened by the first update. After a failure it is over, as the engine is.

    Args:
        llm: a running `AsyncLLM` (Any: untyped) of the event loop in which `send` is called.
        settings: that it runs by; `transfer` is not "files".
    """

    def __init__(self, llm: Any, settings: VllmSettings) -> None:
        self._settings = settings
        self._source = _Source()
        self._client = _Client(llm, has_ipc=settings.transfer == "ipc")
        self._trainer: Any = None  # vLLM's `TrainerWeightTransferEngine`, untyped

    async def send(self, tensors: TensorSource) -> None:
        """Load these tensors into the live model of every worker.

        Raises:
            EngineError: they are not the model's, which is seen before any is sent; or the workers or the source
                failed, and the weights of the workers are not known.
        """
        shapes = {meta.name: meta.shape for meta in tensors.metadata()}
        require_tensors(shapes, self._settings.model_folder, where="the weights to be handed over")
        self._client.require_sound()
        self._source.tensors = tensors
        sending = _in_thread(partial(self._send, tensors))
        futures: set[asyncio.Future[Any]] = {sending, self._client.failure}
        try:
            # Not for the thread alone: with NCCL it may wait for ever for workers that failed.
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            self._client.require_sound()
            sending.result()
        except BaseException as error:
            await self._client.give_up(sending, error)
            raise

    async def close(self) -> None:
        """Let go of what the trainer's end holds; the workers' end with their processes."""
        # Cleared first: closing twice is fine, and a failed shutdown is not tried again.
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            closing = _in_thread(trainer.shutdown)
            closing.add_done_callback(retrieve_exception)
            await asyncio.wait({closing}, timeout=_GRACE_SECONDS)

    def _send(self, tensors: TensorSource) -> None:
        with _on_device(tensors.device):
            if self._trainer is None:
                self._trainer = self._open(tensors)
            self._trainer.send_weights()

    def _open(self, tensors: TensorSource) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        info = trainer_info(self._settings, tensors)
        return WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=self._source)


def trainer_info(settings: VllmSettings, tensors: TensorSource) -> Any:
    """Return the settings of vLLM's trainer's end for a backend (Any: an untyped `TrainerInitInfo`).

    Tensors are packed, which bounds the memory for a transfer. All ends are on this machine.
    """
    # The largest tensor must fit, too: it is packed as a whole.
    buffer_bytes = max(CHUNK_BYTES, *(math.prod(meta.shape) * meta.dtype.itemsize for meta in tensors.metadata()))
    if settings.transfer == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes)
    if settings.transfer == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        return NCCLTrainerInitInfo(
            rank=0,
            master_address="127.0.0.1",
            master_port=get_open_port(),
            world_size=1 + settings.num_workers,
            packed_buffer_size_bytes=buffer_bytes,
        )
    from gspo_gym.engine.vllm.transfer_ends import SharedMemoryTrainerInfo

    return SharedMemoryTrainerInfo(rank=0, chunk_bytes=CHUNK_BYTES)


class _Source:
    """The tensors to be sent next, as the part of vLLM's `WeightSource` that dense models need.

    Its metadata agrees with its iteration element for element: the workers cut the received bytes by it.
    """

    tensors: TensorSource

    def metadata(self) -> list[TensorMeta]:
        return list(self.tensors.metadata())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors)


class _Client:
    """vLLM's `VLLMWeightSyncClient`: synchronous calls, made in other threads, that reach vLLM in the event loop.

    Attributes:
        failure: done when a call has failed, with its exception.
    """

    def __init__(self, llm: Any, *, has_ipc: bool) -> None:
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._has_ipc = has_ipc
        self._calls: set[asyncio.Task[Any]] = set()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the workers' ends ready."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait_for(partial(self._llm.init_weight_transfer_engine, WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._wait_for(self._llm.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load some tensors."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._has_ipc:
            from gspo_gym.engine.vllm.transfer_ends import plain_update

            update_info = plain_update(update_info)
        self._wait_for(partial(self._llm.update_weights, WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002 vLLM's signature
        """End an update; the engine keeps the version."""
        self._wait_for(self._llm.finish_weight_update)

    def require_sound(self) -> None:
        """Raise if a call has failed.

        Raises:
            EngineError: says how.
        """
        if self.failure.done():
            error = self.failure.result()
            raise EngineError(f"the transfer failed: {type(error).__name__}: {error}") from error

    async def give_up(self, sending: asyncio.Future[None], error: BaseException) -> None:
        """End all calls, and give the thread that makes them the time to end, too."""
        if not self.failure.done():
            self.failure.set_result(error)
        for call in self._calls:
            call.cancel()
        sending.add_done_callback(retrieve_exception)
        await asyncio.wait({sending}, timeout=_GRACE_SECONDS)

    def _wait_for(self, call: Callable[[], Awaitable[None]]) -> None:
        asyncio.run_coroutine_threadsafe(self._call(call), self._loop).result()

    async def _call(self, call: Callable[[], Awaitable[None]]) -> None:
        self.require_sound()
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            await call()
        except Exception as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise
        finally:
            self._calls.discard(task)


def _in_thread(work: Callable[[], object]) -> asyncio.Future[None]:
    """Run the work in a daemon thread, without which the process can end: NCCL may never return."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="gspo_gym weight transfer", daemon=True).start()
    return asyncio.wrap_future(done)


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one of this thread, with all its writes done: packing uses other streams."""
    if device.type != "cuda":
        yield
        return
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield

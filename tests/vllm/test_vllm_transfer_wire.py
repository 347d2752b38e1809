"""What goes between the ends of a transfer, without an engine: chunks of memory, handles, and how a sender gives up.

"ipc" and "nccl" need GPUs; here is as much of them as a processor can run, all of it vLLM's own code on our source.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine, NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from gspo_gym.engine.base import TensorMeta
from gspo_gym.engine.vllm import transfer as vllm_transfer
from gspo_gym.engine.vllm import transfer_ends
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.engine.vllm.transfer import WeightTransfer, trainer_info
from gspo_gym.engine.vllm.transfer_ends import (
    Chunk,
    PlainIpcEngine,
    SharedMemoryEngine,
    SharedMemoryTrainer,
    handle_of,
    plain_of,
    plain_update,
    plan_chunks,
)
from gspo_gym.errors import EngineError
from gspo_gym.policy.load import Policy
from gspo_gym.policy.staging import PolicyTensors

HANDLE = (
    torch.Tensor, torch.Size([256]), (1,), 0, torch.TypedStorage, torch.uint8, 0, b"handle", 512, 64, False,
    b"counter", 3, b"event", True,
)  # fmt: skip  # as torch makes it of a vector of 256 bytes


class Given:
    """These tensors, and what is said of them."""

    device = torch.device("cpu")

    def __init__(self, tensors: dict[str, torch.Tensor], said: dict[str, torch.Tensor] | None = None) -> None:
        self.tensors, self.said = tensors, tensors if said is None else said

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.said.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


MANY = Given(
    {
        "matrix": torch.arange(6, dtype=torch.float32).view(2, 3),
        "half": torch.tensor([1.5, -2.5, 3.5], dtype=torch.bfloat16),
        "number": torch.tensor(7),
        "nothing": torch.empty(0, 4),
        "transposed": torch.arange(6, dtype=torch.float64).view(2, 3).T,
        "byte": torch.tensor([200], dtype=torch.uint8),
    }
)


class Receiver:
    """A worker's view, as vLLM's client: maps each chunk, keeps its tensors, and notes the path."""

    def __init__(self, fails_at: int = 0) -> None:
        self.calls: list[str] = []
        self.paths: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.fails_at = fails_at

    @property
    def model(self) -> Receiver:
        return self

    def load_weights(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.tensors.update(pairs)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(f"init {init_info}")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        (decoded,) = MsgpackDecoder().decode(MsgpackEncoder().encode([update_info]))  # as it travels
        self.calls.append(f"{decoded['num_bytes']} bytes: {', '.join(decoded['names'])}")
        self.paths.append(decoded["path"])
        if len(self.paths) == self.fails_at:
            raise EngineError("the worker broke")
        SharedMemoryEngine.receive_weights(self, Chunk(**decoded))

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def test_all_kinds_of_tensors_arrive_in_chunks_which_are_gone_when_they_were_loaded() -> None:
    """Each begins at a multiple of 64 bytes: 24 bytes, then 6 at 64, 8 at 128, nothing at 192; 48, then 1 at 64."""
    receiver = Receiver()
    SharedMemoryTrainer(client=receiver, source=MANY, chunk_bytes=200).send_weights()
    assert receiver.calls == [
        "start", "192 bytes: matrix, half, number, nothing", "65 bytes: transposed, byte", "finish"
    ]  # fmt: skip
    assert not any(os.path.exists(path) for path in receiver.paths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of what earlier tests of the session left to the collector
        gc.collect()  # and what the worker holds of them stays
    assert receiver.tensors.keys() == MANY.tensors.keys()
    for name, tensor in MANY.tensors.items():
        assert torch.equal(receiver.tensors[name], tensor)
        assert receiver.tensors[name].dtype == tensor.dtype


def test_a_tensor_larger_than_a_chunk_has_one_of_its_own() -> None:
    metas = [TensorMeta(name, torch.uint8, (size,)) for name, size in (("a", 10), ("b", 500), ("c", 64), ("d", 36))]
    assert [[meta.name for meta in chunk] for chunk in plan_chunks(metas, 100)] == [["a"], ["b"], ["c", "d"]]
    assert list(plan_chunks([], 100)) == []


@pytest.mark.parametrize(
    ("source", "fails_at", "reason"),
    [
        (MANY, 2, "the worker broke"),
        (Given(MANY.tensors, {**MANY.tensors, "number": torch.tensor(7.0)}), 0, r"gave 'number', torch\.int64 \(\)"),
        (Given(MANY.tensors, {"matrix": MANY.tensors["matrix"]}), 0, "the source gave 'half' after all"),
    ],
)  # fmt: skip
def test_a_transfer_that_breaks_off_holds_no_memory_and_is_not_finished(
    source: Given, fails_at: int, reason: str
) -> None:
    receiver = Receiver(fails_at)
    with pytest.raises(EngineError, match=reason):
        SharedMemoryTrainer(client=receiver, source=source, chunk_bytes=200).send_weights()
    assert "finish" not in receiver.calls
    assert not any(os.path.exists(path) for path in receiver.paths)
    receiver.tensors.clear()
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    assert not any("gspo_gym" in os.readlink(link) for link in links if os.path.islink(link))


def test_a_handle_reaches_a_worker_without_being_pickled() -> None:
    """As torch makes it, vLLM refuses to send it; as we send it, it arrives as torch made it."""
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert (len(names), names[0], names[4], names[5]) == (len(HANDLE), "tensor_cls", "storage_cls", "dtype")
    assert type(torch.empty(1, dtype=torch.uint8)._typed_storage()) is HANDLE[4]
    with pytest.raises(TypeError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        MsgpackEncoder().encode([HANDLE])
    sent = asdict(
        IPCWeightTransferUpdateInfo(
            names=["w"], dtype_names=["bfloat16"], shapes=[[2, 64]], ipc_handles={"GPU-1": HANDLE}, tensor_sizes=[256]
        )
    )
    (arrived,) = MsgpackDecoder().decode(MsgpackEncoder().encode([plain_update(sent)]))
    worker = PlainIpcEngine.__new__(PlainIpcEngine)  # its other parts need a GPU
    assert worker.parse_update_info(arrived) == IPCWeightTransferUpdateInfo(**sent)
    assert handle_of(plain_of(HANDLE)) == HANDLE


@pytest.mark.parametrize("handle", [HANDLE[:-1], (*HANDLE[:5], torch.float32, *HANDLE[6:])])
def test_a_handle_of_another_kind_is_refused(handle: tuple[Any, ...]) -> None:
    with pytest.raises(EngineError, match=r"expected a CUDA IPC handle of 15 values with .*torch\.uint8"):
        plain_of(handle)


def tensors_of(policy: Policy) -> PolicyTensors:
    return PolicyTensors(policy.model, torch.bfloat16)


def settings(transfer: Any, **more: Any) -> VllmSettings:
    return VllmSettings(model="nowhere", max_model_len=512, transfer=transfer, **more)


def test_each_transfer_is_opened_by_what_its_ends_take(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer holds the largest tensor: 263 x 64 embeddings of 2 bytes. NCCL counts the trainer and 2 x 3 workers."""
    tensors = tensors_of(policy)
    monkeypatch.setattr(vllm_transfer, "CHUNK_BYTES", 1000)
    ipc = trainer_info(settings("ipc"), tensors)
    assert (ipc.backend, ipc.is_sender, ipc.packed, ipc.packed_buffer_size_bytes) == ("ipc", True, True, 33_664)
    assert PlainIpcEngine.__new__(PlainIpcEngine).parse_init_info({"packed": ipc.packed}).packed
    nccl = trainer_info(settings("nccl", tensor_parallel_size=2, data_parallel_size=3), tensors)
    assert (nccl.backend, nccl.is_sender, nccl.packed, nccl.packed_buffer_size_bytes) == ("nccl", True, True, 33_664)
    assert (nccl.master_address, nccl.world_size) == ("127.0.0.1", 7)
    worker = NCCLWeightTransferInitInfo(
        master_address=nccl.master_address, master_port=nccl.master_port, rank_offset=1, world_size=nccl.world_size
    )
    engine = NCCLWeightTransferEngine.__new__(NCCLWeightTransferEngine)
    assert engine.parse_init_info(worker_init_payload(worker)) == worker
    assert trainer_info(settings("shared_memory"), tensors).chunk_bytes == 1000


def test_packed_broadcasts_cut_a_policys_tensors_where_its_metadata_says(policy: Policy) -> None:
    """vLLM's own check of the sender, its packing, and its unpacking by the metadata that the workers are told."""
    tensors = tensors_of(policy)
    metas = list(tensors.metadata())
    pairs = NCCLTrainerWeightTransferEngine._checked_iter(tensors, metas)
    arrived: dict[str, torch.Tensor] = {}
    while (chunk := pack_tensors(pairs, lambda pair: pair[1], 40_000)) is not None:
        told, metas = metas[: len(chunk.names)], metas[len(chunk.names) :]
        sizes = [
            tensor.numel() * tensor.element_size() for tensor in (torch.empty(m.shape, dtype=m.dtype) for m in told)
        ]
        arrived |= unpack_tensor(
            chunk.packed_tensor, [m.name for m in told], [m.shape for m in told], [m.dtype for m in told], sizes
        )  # fmt: skip
    own = policy.model.state_dict()
    assert arrived.keys() == own.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, own[name].to(torch.bfloat16)) for name, tensor in arrived.items())


class Llm:
    """In the place of vLLM's `AsyncLLM`: its workers refuse to load, or never answer."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.asked = asyncio.Event()
        self.num_cancelled = 0

    async def update_weights(self, request: Any) -> None:
        self.asked.set()
        if self.refuses:
            raise ValueError("no room for 'matrix'")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class Broadcast:
    """A trainer's end that waits for workers who never come, as NCCL does."""

    def __init__(self, client: Any, let_go: threading.Event) -> None:
        self.client, self.let_go = client, let_go

    def send_weights(self) -> None:
        asking = threading.Thread(target=self._ask, daemon=True)
        asking.start()
        self.let_go.wait()

    def _ask(self) -> None:
        try:
            self.client.update_weights({})
        except BaseException:
            return  # which a future of NCCL's would hold, if anybody came to ask for it


@pytest.mark.parametrize("refuses", [True, False])
def test_a_sender_that_waits_for_ever_keeps_nobody(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when a worker fails, nor when the caller gives up, which is also what it does when vLLM dies."""
    monkeypatch.setattr(vllm_transfer, "_GRACE_SECONDS", 0.01)
    let_go = threading.Event()

    async def main() -> Llm:
        llm = Llm(refuses=refuses)
        transfer = WeightTransfer(llm, settings("nccl"))
        transfer._trainer = Broadcast(transfer._client, let_go)
        sending = asyncio.create_task(transfer.send(MANY))
        await llm.asked.wait()
        if refuses:
            with pytest.raises(EngineError, match="ValueError: no room for 'matrix'"):
                await sending
        else:
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        with pytest.raises(EngineError, match="the transfer failed: "):  # the engine must be rebuilt
            await transfer.send(MANY)
        return llm

    try:
        llm = asyncio.run(main())
    finally:
        let_go.set()
    assert llm.num_cancelled == (not refuses)


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [("ipc", PlainIpcEngine), ("nccl", NCCLWeightTransferEngine), ("shared_memory", SharedMemoryEngine)],
)
def test_a_worker_finds_its_end_by_what_it_is_told(transfer: str, expected: type) -> None:
    fields = settings(transfer).engine_args()
    assert fields["worker_extension_cls"] == f"{transfer_ends.__name__}.TransferWorkerExtension"
    find = WeightTransferEngineFactory._registry[fields["weight_transfer_config"]["backend"]]
    assert find() is expected

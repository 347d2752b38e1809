"""vLLM's worker processes for weights that are handed over in memory: registers the receiving ends of our own.

Imported by workers only, which are told its name (`worker_extension_cls`) before they make their transfer engine.
"""

from __future__ import annotations

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from gspo_gym.engine.vllm.worker import TRANSFER_BACKENDS, WorkerExtension


class TransferWorkerExtension(WorkerExtension):
    """The methods that every worker gains; importing this module has registered the transfer."""


WeightTransferEngineFactory.register_engine(
    TRANSFER_BACKENDS["shared_memory"], "gspo_gym.engine.vllm.shared_memory", "SharedMemoryEngine"
)
WeightTransferEngineFactory.register_engine(TRANSFER_BACKENDS["ipc"], "gspo_gym.engine.vllm.ipc", "PlainIpcEngine")

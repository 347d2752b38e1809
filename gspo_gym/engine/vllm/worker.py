"""What runs inside vLLM's worker processes, which mix the class in by its name (`worker_extension_cls`).

Called over `collective_rpc` by method name. Imports nothing of vLLM's: everything is reached through the worker.
Workers that are handed tensors have more (`engine/vllm/transfer_ends.py`).
"""

from __future__ import annotations

from typing import Any

WORKER_EXTENSION = "gspo_gym.engine.vllm.worker.WorkerExtension"
TRANSFER_EXTENSION = "gspo_gym.engine.vllm.transfer_ends.TransferWorkerExtension"
RELOAD_METHOD = "reload_whole_model"

# What workers call their end of each transfer: vLLM's own, or ours, which the transfer extension registers.
TRANSFER_BACKENDS = {"ipc": "gspo_gym_ipc", "nccl": "nccl", "shared_memory": "gspo_gym_shared_memory"}


class WorkerExtension:
    """Methods that a worker gains."""

    def reload_whole_model(self, weights_path: str) -> None:
        """Read all weights from a folder into the live model."""
        worker: Any = self  # Any: the class that this is mixed into is vLLM's
        worker.reload_weights(weights_path=weights_path)
        repack(worker.model_runner.get_model())


def repack(model: Any) -> None:
    """Make every repacked copy of weights again, of a vLLM model (Any) with weights that have just changed.

    On the CPU vLLM computes with such copies. The reload repacks what it loaded, but an output head that is tied to
    the embeddings is not among that: it would go on with the old ones (seen in 0.32.0: a model that is neither the old
    nor the new, by half a nat). So every copy is made again if the original is still there.
    """
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)

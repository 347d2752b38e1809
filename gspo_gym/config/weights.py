"""The section of a configuration file about how new weights reach the engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gspo_gym.base.settings import Settings


class WeightSyncSection(Settings):
    """[training.weight_sync]: how new weights reach the engine. The local engine has the learner's own: no choice."""

    enable: bool = Field(default=True, description="whether the engine gets new weights at all: it must")
    targets: tuple[Literal["policy"], ...] = Field(default=("policy",), description="whose weights are sent")
    mode: Literal["direct", "full"] = Field(
        default="direct", description="an adapter alone where the engine takes adapters, or always all weights, merged"
    )
    direct: bool = Field(
        default=True, description="through memory (the learner's own, or /dev/shm), not through the run's folder"
    )
    verify_every_k: int = Field(
        default=0, ge=0, description="updates between checks of files and checksums, besides the canary's; 0: none"
    )
    transfer: Literal["files", "ipc", "nccl", "shared_memory"] = Field(
        default="files",
        description="how all weights reach vLLM in this process: as files that it reads, or handed over in memory: by "
        "CUDA IPC on the learner's own GPU, by NCCL to GPUs of [topology], or through this machine's memory; ipc and "
        "nccl were never run on a GPU, hence the default",
    )

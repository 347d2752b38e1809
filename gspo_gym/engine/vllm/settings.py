"""The settings of vLLM (0.32) that a run may choose, and the places of its parallel ranks. Does not import vLLM.

All other settings are fixed by the needs of training. A rank's place is the cores of a processor, and the copy of the
model that a session stays with.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gspo_gym.engine.vllm.worker import TRANSFER_BACKENDS, TRANSFER_EXTENSION, WORKER_EXTENSION
from gspo_gym.errors import ConfigError

# The ways of whole models to vLLM: it reads files, or they are handed over in memory; see `engine/vllm/transfer.py`.
Transfer = Literal["files", "ipc", "nccl", "shared_memory"]

_GIB = 2**30
_TOKENS_PER_STEP = 4096  # on the CPU; vLLM's own default there
_PROCESSOR_BLOCK = 32  # CPU_ATTN takes multiples; vLLM's own there, 128, never finds the prefix of a short conversation
_SAME_IN_VLLM = (
    "max_model_len", "dtype", "max_num_seqs", "tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization",
    "enforce_eager", "seed", "enable_prefix_caching", "enable_sleep_mode",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of a model that vLLM runs.

    Attributes:
        model: folder in transformers layout, or a name that vLLM resolves itself.
        max_model_len: longest prompt plus completion, in tokens.
        dtype: of weights and activations; "auto" is that of the model's files. float32 agrees best with a trainer in
            float32: only there can agreement be held to 1e-4.
        num_token_ids: ids from there on are not the tokenizer's, and are not sampled; None: all are its.
        max_num_seqs: most requests in work at once; further ones wait.
        tensor_parallel_size: devices that share each layer.
        data_parallel_size: copies of the model, on separate devices; sessions are spread over them.
        device_ids: the GPUs for these, numbered as this process sees them; () takes the first. Not for a processor.
        gpu_memory_utilization: fraction of a GPU's memory for weights and cache together; without meaning on the CPU.
        kv_cache_gib: memory for keys and values; None leaves it to `gpu_memory_utilization`, or on the CPU to vLLM's
            own guess, which is a large part of the machine.
        enforce_eager: no compilation, so without a compiler, too, and no CUDA graphs: starts in seconds, decodes more
            slowly.
        seed: of everything that no request's seed decides.
        max_lora_rank: > 0 makes weights arrive as LoRA adapters of at most this rank, and no longer as whole models.
        max_loras: adapters that can be in work at once; requests in flight hold on to theirs, so a run that updates in
            flight needs its staleness bound plus 2.
        enable_prefix_caching: keep keys and values: a turn costs its new tokens only.
        enable_sleep_mode: let `VllmEngine.sleep` give the memory back; CUDA and ROCm only.
        structured_output: obey `SamplingParams.json_schema`. vLLM then loads the model's tokenizer with its end tokens,
            which `min_tokens` would withhold: it must be 0.
        transfer: the way by which whole models can reach it besides files; with adapters there is none.

    >>> VllmSettings(model="policy", max_model_len=512, max_lora_rank=12)
    Traceback (most recent call last):
    gspo_gym.errors.ConfigError: VllmSettings.max_lora_rank: vLLM knows 1, 8, 16, 32, 64, 128, 256, 320 and 512, ...
    """

    model: str
    max_model_len: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_token_ids: int | None = None
    max_num_seqs: int = 256
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    device_ids: tuple[int, ...] = ()
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    enforce_eager: bool = False
    seed: int = 0
    max_lora_rank: int = 0
    max_loras: int = 2
    enable_prefix_caching: bool = True
    enable_sleep_mode: bool = False
    structured_output: bool = False
    transfer: Transfer = "files"

    def __post_init__(self) -> None:
        smallest = {"max_model_len": 2, "max_num_seqs": 1, "tensor_parallel_size": 1, "data_parallel_size": 1}
        for name, least in {**smallest, "max_loras": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"VllmSettings.{name}: expected at least {least}, got {getattr(self, name)}")
        if self.device_ids and not len(self.device_ids) == len(set(self.device_ids)) == self.num_workers:
            raise ConfigError(
                f"VllmSettings.device_ids: expected {self.tensor_parallel_size} x {self.data_parallel_size} different "
                f"GPUs (tensor_parallel_size x data_parallel_size), got {list(self.device_ids)}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"VllmSettings.gpu_memory_utilization: expected a fraction in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise ConfigError(f"VllmSettings.kv_cache_gib: expected > 0 or None, got {self.kv_cache_gib}")
        if self.max_lora_rank not in (0, 1, 8, 16, 32, 64, 128, 256, 320, 512):
            raise ConfigError(
                "VllmSettings.max_lora_rank: vLLM knows 1, 8, 16, 32, 64, 128, 256, 320 and 512, "
                f"or 0 for no adapters; got {self.max_lora_rank}. Take the next one above the adapter's rank"
            )
        if self.transfer != "files" and self.max_lora_rank:
            raise ConfigError(
                f"VllmSettings.transfer: expected 'files' with max_lora_rank = {self.max_lora_rank}, got "
                f"{self.transfer!r}: adapters are read from files"
            )

    @property
    def model_folder(self) -> Path | None:
        """Return the model's folder; None if `model` is a name."""
        folder = Path(self.model)
        return folder.resolve() if folder.is_dir() else None

    @property
    def num_workers(self) -> int:
        """Return the number of processes that compute."""
        return self.tensor_parallel_size * self.data_parallel_size

    def environment(self) -> dict[str, str]:
        """Return the variables that vLLM's processes need, unless the environment sets others."""
        variables = {"VLLM_NO_USAGE_STATS": "1"}  # else it tells its makers about this machine and the model
        if _sees_gpus():
            return variables
        if self.enforce_eager:
            # Even so vLLM compiles a helper at the first sample, for seconds; without a compiler it dies.
            variables["TORCHDYNAMO_DISABLE"] = "1"
        if self.num_workers > 1:
            variables[BINDING] = binding_of(self.num_workers, allowed_cores())
        elif BINDING not in os.environ:
            # What schedules computes, too, as on one GPU. vLLM's own choice is a second process, whose threads it can
            # bind: it starts half as fast, and on a few cores each of the two takes the other's time by waiting for it.
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            variables["OMP_NUM_THREADS"] = str(max(1, len(allowed_cores()) - 1))  # a core is left for this process
        return variables

    def engine_args(self) -> dict[str, Any]:
        """Return the fields of vLLM's `AsyncEngineArgs`, what training needs included.

        Logprobs are those of the sampling distribution, no sampling default is read from the model's files, and there
        is no tokenizer unless a schema needs one, because only token ids go in and out.
        """
        folder = self.model_folder
        fields: dict[str, Any] = {
            "model": str(folder) if folder else self.model,
            **{name: getattr(self, name) for name in _SAME_IN_VLLM},
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "skip_tokenizer_init": not self.structured_output,
            "worker_extension_cls": WORKER_EXTENSION,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,  # or every update draws a bar
        }
        if not _sees_gpus():
            # Read in parts, a prompt would have its first draws taken back, which the CPU's generator cannot: vLLM 0.32
            # dies of a request with a seed that does not fit into the step. So whole prompts wait for the next one.
            longest = max(self.max_model_len, _TOKENS_PER_STEP)
            fields |= {"enable_chunked_prefill": False, "max_num_batched_tokens": longest}
            fields["block_size"] = _PROCESSOR_BLOCK
        if self.device_ids:
            fields["device_ids"] = list(self.device_ids)
        if self.kv_cache_gib is not None:
            fields["kv_cache_memory_bytes"] = int(self.kv_cache_gib * _GIB)
        if self.transfer != "files":
            fields |= {
                "weight_transfer_config": {"backend": TRANSFER_BACKENDS[self.transfer]},
                "worker_extension_cls": TRANSFER_EXTENSION,
            }
        if self.max_lora_rank:
            fields |= {
                "enable_lora": True,
                "max_lora_rank": self.max_lora_rank,
                "max_loras": self.max_loras,
                "max_cpu_loras": self.max_loras + 1,  # the new version arrives before the oldest leaves
            }
        return fields


def _sees_gpus() -> bool:
    import torch  # here: it is slow to load, and reading settings needs none

    return torch.cuda.is_available()


# The cores of each worker: lists by rank, or "nobind" for any that the system chooses.
BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def binding_of(num_workers: int, cores: Sequence[int]) -> str:
    """Return the value of `BINDING` that gives every worker of a processor equally many cores, and none twice.

    vLLM's own choice is one NUMA node for each rank of a tensor-parallel model: with fewer nodes it does not start. It
    binds the copies of a data-parallel one to the same cores. If there are fewer cores than workers, none is bound.

    >>> binding_of(2, [0, 1, 2, 3, 4])
    '0,1|2,3'
    >>> binding_of(4, [0, 1])
    'nobind'
    """
    cores_per_worker = len(cores) // num_workers
    if cores_per_worker == 0:
        return "nobind"
    lists = (cores[rank * cores_per_worker : (rank + 1) * cores_per_worker] for rank in range(num_workers))
    return "|".join(",".join(str(core) for core in some) for some in lists)


def allowed_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let children started within inherit these variables; those that are set already stay as they are."""
    new_variables = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new_variables)
    try:
        yield
    finally:
        for name in new_variables:
            os.environ.pop(name, None)


class SessionRanks:
    """The copies of a data-parallel model that answer sessions: always the same one, because it has the prefix.

    New sessions go round all copies.

    >>> ranks = SessionRanks(2)
    >>> [ranks.of(session) for session in ("a", "b", "a", "c", "b", None)]
    [0, 1, 0, 0, 1, None]
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._turns = itertools.cycle(range(num_ranks))
        self._rank_of: dict[str, int] = {}

    def of(self, session_id: str | None) -> int | None:
        """Return the rank of the copy; None, which leaves it to vLLM, without a session or without copies."""
        if session_id is None or self._num_ranks == 1:
            return None  # vLLM chooses by load
        if session_id not in self._rank_of:
            self._rank_of[session_id] = next(self._turns)
        return self._rank_of[session_id]

    def forget(self, session_id: str) -> None:
        """Forget a session that has ended; unknown ones are fine."""
        self._rank_of.pop(session_id, None)

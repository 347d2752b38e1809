"""Which GPU is whose: the learner's, vLLM's in this process, the reference server's.

A plan from what the configuration says: no device is touched, and torch is not loaded. Numbers count the GPUs that this
process sees, from 0; with CUDA_VISIBLE_DEVICES these are other numbers than the machine's.

| what is given                                        | learner     | vLLM        | reference server     |
| ---------------------------------------------------- | ----------- | ----------- | -------------------- |
| compute.gpu_count = 0, or a machine without GPUs     | processor   | processor   | processor            |
| no [topology]: vLLM, if it is there, takes tp x dp   | 0           | 0 .. tp*dp-1| 0                    |
| [topology] with v for vLLM, 1 to train, r for ref    | v           | 0 .. v-1    | v+1 .. v+r           |

tp and dp are vllm.tensor_parallel_size and vllm.data_parallel_size; with [topology] they are its tensor_parallel and
v / tensor_parallel. Where vLLM and the learner share a GPU, vllm.gpu_memory_utilization says how much of it is vLLM's.

Asked by `build*.py`. Not run on several GPUs: what vLLM 0.32 makes of its numbers is from its source, which looks them
up in CUDA_VISIBLE_DEVICES as is done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gspo_gym.config.services import TopologySection, VllmSection
from gspo_gym.errors import ConfigError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of each part, if there are GPUs; the sizes count on a processor, too.

    Attributes:
        learner: its GPU.
        vllm: those of vLLM in this process, in the order in which its ranks take them.
        reference: those of this run's own reference server.
        is_split: no two parts share one.
        tensor_parallel_size, data_parallel_size: of vLLM in this process; their product is the number of its GPUs.
    """

    learner: int
    vllm: tuple[int, ...]
    reference: tuple[int, ...]
    is_split: bool
    tensor_parallel_size: int
    data_parallel_size: int

    @property
    def num_gpus(self) -> int:
        """How many this process must see."""
        return 1 + max(self.learner, *self.vllm, *self.reference)


def place(topology: TopologySection | None, vllm: VllmSection | None) -> Placement:
    """The plan of these sections, which are valid; see the table above.

    Without [topology] the GPUs of vLLM are those that it would take if it ran in this process.
    """
    if topology is None:
        tensor, data = (1, 1) if vllm is None else (vllm.tensor_parallel_size, vllm.data_parallel_size)
        return Placement(
            learner=0,
            vllm=tuple(range(tensor * data)),
            reference=(0,),
            is_split=False,
            tensor_parallel_size=tensor,
            data_parallel_size=data,
        )
    for_vllm, first = topology.gpus_for_vllm, topology.gpus_for_vllm + topology.gpus_for_training
    return Placement(
        learner=for_vllm,
        vllm=tuple(range(for_vllm)),
        reference=tuple(range(first, first + topology.gpus_for_ref)),
        is_split=True,
        tensor_parallel_size=topology.tensor_parallel,
        data_parallel_size=for_vllm // topology.tensor_parallel,
    )


def require_gpus(wanted: int, num_visible: int, environment: Mapping[str, str], key: str) -> None:
    """Refuse to build for more GPUs than there are. `key` is what asks for them.

    Raises:
        ConfigError: says what hides GPUs, if anything does.

    >>> require_gpus(4, 2, {"CUDA_VISIBLE_DEVICES": "6,7"}, "compute.gpu_count")
    Traceback (most recent call last):
    gspo_gym.errors.ConfigError: compute.gpu_count: expected 4 GPUs, and this process sees 2 (CUDA_VISIBLE_DEVICES ...
    """
    if num_visible >= wanted:
        return
    said = environment.get(VISIBLE_GPUS)
    hides = "" if said is None else f" ({VISIBLE_GPUS} = {said!r})"
    raise ConfigError(f"{key}: expected {wanted} GPUs, and this process sees {num_visible}{hides}; use fewer")


def names_of(gpus: Iterable[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """What a child's CUDA_VISIBLE_DEVICES must list for it to see these GPUs of this process, and no others.

    Raises:
        ConfigError: this process does not see one of them.

    >>> names_of([1, 2], {"CUDA_VISIBLE_DEVICES": "3,GPU-5d1c,7"})
    ('GPU-5d1c', '7')
    >>> names_of([1, 2], {})
    ('1', '2')
    """
    said = environment.get(VISIBLE_GPUS)
    if said is None:
        return tuple(str(gpu) for gpu in gpus)
    visible: list[str] = []
    for name in (part.strip() for part in said.split(",")):
        if name in ("", "-1"):  # CUDA reads no further
            break
        visible.append(name)
    wanted = tuple(gpus)
    require_gpus(1 + max(wanted, default=-1), len(visible), environment, "topology")
    return tuple(visible[gpu] for gpu in wanted)

"""The sections of a configuration file about machines and services, and which of them this version can run.

All of it is read and checked: a file of the hosted trainer gets every answer at once. `missing_machinery` lists what
this version cannot run; `refuse_to_run` is called before anything is built.

`place` allots GPUs to the learner, to vLLM in this process and to a dedicated reference. It touches no device. Numbers
count the GPUs that this process sees, from 0; CUDA_VISIBLE_DEVICES makes them differ from the machine's.

| what is given                                        | learner     | vLLM        | dedicated reference  |
| ---------------------------------------------------- | ----------- | ----------- | -------------------- |
| compute.gpu_count = 0, or a machine without GPUs     | processor   | processor   | processor            |
| no [topology]: vLLM, if it is there, takes all n     | 0           | 0 .. n-1    | 0                    |
| [topology] with v for vLLM, 1 to train, r for ref    | v           | 0 .. v-1    | v+1 .. v+r           |
| the same with type = "colocated"                     | 0           | 0 .. v-1    | v .. v+r-1           |
| type = "cluster", or a split with 2 and more to train| those that Ray gives its actors; here none         |

Copies of the model of vllm.tensor_parallel_size GPUs each fill what vLLM gets; with type = "cluster" each is an engine
of its own (`num_servers`). n is compute.gpu_count, and without that, vllm.tensor_parallel_size. Where vLLM and the
learner share a GPU, vllm.gpu_memory_utilization says how much of it is vLLM's.

Never run on several GPUs. vLLM 0.32 looks its numbers up in CUDA_VISIBLE_DEVICES, as is done here (from its source).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from gspo_gym.base.settings import Settings, Url, checked_url
from gspo_gym.errors import ConfigError

# Fractions of a GPU's memory for vLLM: with the learner on it, and without.
SHARED_GPU, OWN_GPU = 0.4, 0.9


class ServicesSection(Settings):
    """[services]: what runs already, and where it answers. Keys for it come from the environment variables."""

    task_url: Url | None = Field(
        default=None,
        description="base URL of the task app that plays rollout.env_name's episodes (key: ENVIRONMENT_API_KEY); "
        "--task-url and TASK_APP_URL go over it",
    )
    judge_url: Url | None = Field(
        default=None, description="base URL of a judge that answers the hosted trainer's protocol (key: JUDGE_API_KEY)"
    )
    engine_urls: tuple[str, ...] = Field(
        default=(), description='base URLs of endpoints that generate, alike; with rollout.engine "http"'
    )
    engine_model: str | None = Field(
        default=None, min_length=1, description='their model\'s name, with rollout.engine "http"; absent: model.base'
    )

    @field_validator("engine_urls")
    @classmethod
    def _are_different_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        valid_urls = tuple(checked_url(url) for url in urls)
        if len(set(valid_urls)) < len(valid_urls):
            raise ValueError(f"names a server twice: {', '.join(sorted(valid_urls))}")
        return valid_urls


class ComputeSection(Settings):
    """[compute]: the machine; without the section, a run takes a GPU if there is one."""

    gpu_type: str | None = Field(
        default=None, min_length=1, description='part of the device\'s name, such as "H100"; another device is an error'
    )
    gpu_count: int = Field(ge=0, description="GPUs in all; 0: the processor, although there may be GPUs")
    nodes: int = Field(default=1, gt=0, description="machines")


class TopologySection(Settings):
    """[topology]: which GPUs do what: the first generate, the next learn; with compute.gpu_count = 0, processes do."""

    type: Literal["single_node_split", "colocated", "cluster"] = Field(
        default="single_node_split",
        description="disjoint sets of one machine's GPUs, whose sum is compute.gpu_count; colocated: the same GPUs "
        "generate and learn; cluster: disjoint sets of all machines' GPUs (`gspo-gym cluster check` says whether it "
        "fits), each process an actor of Ray",
    )
    gpus_for_vllm: int = Field(
        gt=0,
        description="GPUs that generate; without GPUs and with type cluster processes that do: each with a copy of the "
        "model where rollout.engine is local, else tensor_parallel for each vLLM, which stand behind a "
        "router if there is more than one",
    )
    gpus_for_training: int = Field(
        gt=0,
        description="processes that share the learner's model, each on a GPU; more than 1 is refused with type "
        "colocated",
    )
    gpus_for_ref: int = Field(default=0, ge=0, description="GPUs that score the reference, with placement dedicated")
    tensor_parallel: int = Field(
        default=1, gt=0, description="GPUs that share each layer while generating; divides gpus_for_vllm"
    )
    heartbeat_seconds: float = Field(
        default=30.0,
        ge=1,
        description="a process that learns, samples or scores is lost without a sign of life for so long",
    )
    group_timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="for an update by several learner processes, or for a process that samples to take new weights; "
        "then one of them hangs",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="of lost learner processes in a row, after which the run ends and can go on by --resume; and of "
        "each process that samples between two updates of the weights, after which the others play on without it until "
        "the next",
    )


class LearnerSection(Settings):
    """[learner]: how the processes of topology.gpus_for_training compute; the model is shared out over all of them."""

    sequence_parallel: int = Field(
        default=1,
        gt=0,
        description="processes that compute the same rows together, each a part of the tokens (Ulysses, arXiv "
        "2309.14509); divides topology.gpus_for_training and the model's attention heads",
    )
    compute_dtype: Literal["bfloat16"] | None = Field(
        default=None,
        description="in which they compute; weights, sums of gradients and the optimizer's state stay as they are; "
        "absent: model.dtype",
    )


class VllmSection(Settings):
    """[vllm]: how vLLM runs the policy in this process. Its presence is rollout.engine = "vllm"."""

    tensor_parallel_size: int = Field(
        default=1, gt=0, description="devices that share each layer while generating; with [topology], its own"
    )
    max_model_len: int | None = Field(
        default=None,
        gt=1,
        description="tokens; rollout.max_model_len if that is absent; absent: that, and 8192 without either",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="in which vLLM computes; absent: model.dtype"
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="fraction of a GPU's memory that vLLM takes; absent: 0.4, the rest is the learner's, or 0.9 with "
        "[topology], where nobody else is on its GPUs",
    )
    kv_cache_gib: float | None = Field(
        default=None, gt=0, description="GiB for keys and values; absent: what is left of that, or 1 on a processor"
    )
    sleep_while_learning: bool = Field(
        default=False,
        description="give the GPU's memory to the learner between sampling and new weights; on a processor it waits",
    )


SinkName = Literal["wandb", "tensorboard", "trackio", "mlflow"]


class TrackingSection(Settings):
    """[tracking]: where metrics go besides metrics.jsonl."""

    report_to: tuple[SinkName, ...] = Field(
        default=(),
        description="sinks (which must be installed); a key for W&B is in WANDB_API_KEY, MLflow's store in "
        "MLFLOW_TRACKING_URI, Trackio's folder in TRACKIO_DIR",
    )
    wandb_project: str | None = Field(
        default=None,
        min_length=1,
        description="project in W&B and Trackio, and experiment in MLflow; absent: gspo-gym",
    )


def missing_machinery(sections: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting of a valid configuration that this version cannot run."""
    compute = sections["compute"]
    faults = []
    if compute is not None:
        faults += [*_missing_split(compute.gpu_count, sections), *_cannot_start_yet(sections, compute)]
    is_quantized = sections["model"].trainer_mode == "qlora"
    if is_quantized and sections["rollout"].engine == "vllm":
        faults.append(
            'model.trainer_mode = "qlora": vLLM would sample from other weights than the quantized; use "lora"'
        )
    if is_quantized and sections["reference"].placement == "dedicated":
        faults.append(
            'reference.placement = "dedicated": quantized weights cannot be handed to another process; set "shared"'
        )
    return faults


def _cannot_start_yet(sections: Mapping[str, Any], compute: ComputeSection) -> list[str]:
    """Return what `gspo-gym train` cannot start of these sections; all of it is checked, and placed on paper."""
    topology: TopologySection | None = sections["topology"]
    problems = []
    if topology is not None and topology.type == "cluster":
        if sections["rollout"].engine == "local" and topology.tensor_parallel > 1:
            problems.append(
                f"topology.tensor_parallel = {topology.tensor_parallel}: the local engine shares no layer out; set 1"
            )
        elif has_replicas(sections):
            problems += _missing_of_replicas(topology, sections)
    if topology is not None and ((num := topology.gpus_for_training) > 1 or has_gpu_actors(sections)):
        if compute.gpu_count and topology.type == "colocated":
            problems.append(
                f'topology.gpus_for_training = {num}: with topology.type = "colocated" one GPU learns; set "cluster"'
            )
        elif sections["reference"].placement == "dedicated":
            problems.append(
                f'reference.placement = "dedicated": topology.gpus_for_training = {num} processes hold the reference '
                'themselves; set "shared"'
            )
        if sections["distillation"] is not None:
            problems.append(
                f"distillation.teacher: topology.gpus_for_training = {num} processes cannot share a teacher; set 1, or "
                "remove [distillation]"
            )
        if sections["model"].trainer_mode == "qlora":
            problems.append(
                f'model.trainer_mode = "qlora": topology.gpus_for_training = {num} processes cannot share quantized '
                'weights; use "lora"'
            )
        if "8bit" in (kind := sections["optimizer"].kind):
            problems.append(
                f'optimizer.kind = "{kind}": topology.gpus_for_training = {num} processes cannot share moments in 8 '
                'bits; use "adamw"'
            )
    if compute.nodes > 1 and (topology is None or topology.type != "cluster" or topology.gpus_for_training == 1):
        problems.append(
            f'compute.nodes = {compute.nodes}: training takes one machine; with topology.type = "cluster" and several '
            "gpus_for_training it takes more"
        )
    return problems


def _missing_of_replicas(topology: TopologySection, sections: Mapping[str, Any]) -> list[str]:
    mode, sync = sections["model"].trainer_mode, sections["training"].weight_sync
    replicas, problems = f"topology.gpus_for_vllm = {topology.gpus_for_vllm} processes", []
    if mode == "qlora" and sections["rollout"].engine == "local":  # with vLLM nothing can be quantized
        problems.append(f'model.trainer_mode = "qlora": {replicas} cannot be given quantized weights; use "lora"')
    if mode == "lora" and sections["rollout"].engine == "vllm" and sync is not None and sync.mode == "direct":
        problems.append(
            f'training.weight_sync.mode = "direct": {replicas} with vLLM take whole weights, one at a time, and no '
            'adapter; set "auto" or "full", which merges it'
        )
    if sync is not None and sync.transfer != "files":
        problems.append(
            f'training.weight_sync.direct = "{sync.transfer}": {replicas} are always given weights one at a time, '
            "over their connections; remove it"
        )
    return problems


def num_servers(topology: TopologySection) -> int:
    """Return the number of engines of a cluster, each of tensor_parallel devices."""
    return topology.gpus_for_vllm // topology.tensor_parallel


def num_replicas(sections: Mapping[str, Any]) -> int:
    """Return the number of engines that sample behind a router, each in a process of its own; 0: there is one, here."""
    topology: TopologySection | None = sections["topology"]
    has_actors = has_gpu_actors(sections)
    if topology is None or not (topology.type == "cluster" or has_actors):
        return 0
    num = num_servers(topology) if topology.type == "cluster" else 1
    return num if num > 1 or has_actors else 0


def has_gpu_actors(sections: Mapping[str, Any]) -> bool:
    """Return whether all GPUs are those of actors of Ray, which sample and learn, and this process has none."""
    compute: ComputeSection | None = sections["compute"]
    topology: TopologySection | None = sections["topology"]
    if topology is None or compute is None or compute.gpu_count == 0 or topology.type == "colocated":
        return False
    return topology.type == "cluster" or topology.gpus_for_training > 1


def ray_address() -> str | None:
    """Return the address of the Ray that a run joins; None: one is started for it."""
    return os.environ.get("RAY_ADDRESS") or None


def has_replicas(sections: Mapping[str, Any]) -> bool:
    """Return whether several engines sample, each in a process of its own."""
    return num_replicas(sections) > 0


def _missing_split(gpu_count: int, sections: Mapping[str, Any]) -> list[str]:
    if gpu_count < 2 or sections["topology"] is not None or sections["vllm"] is not None:
        return []
    return [
        f"compute.gpu_count = {gpu_count}: training takes 0 GPUs or 1; split them by [topology], or let vLLM in this "
        "process take them all: add [vllm]"
    ]


def refuse_to_run(sections: Mapping[str, Any]) -> None:
    """Raise if this version cannot run the configuration; see `missing_machinery`.

    Raises:
        ConfigError: lists everything that is missing.
    """
    if problems := missing_machinery(sections):
        problem_lines = "\n  ".join(problems)
        raise ConfigError(
            "the configuration is valid, but asks for what this version does not have. Remove these to train in this "
            f"process:\n  {problem_lines}"
        )


def refuse_to_train(sections: Mapping[str, Any]) -> None:
    """Raise as `refuse_to_run` does, and if other weights sample than the learner's without rollout.rescore.

    Raises:
        ConfigError: says what to change.
    """
    refuse_to_run(sections)
    rollout = sections["rollout"]
    if rollout.engine == "http" and not rollout.rescore:
        raise ConfigError(
            'rollout.engine: the weights behind an "http" endpoint never change, so nothing could learn from its own '
            'samples; train with "local" or "vllm", and use this to evaluate. To learn from what the endpoint samples '
            "all the same, set rollout.rescore = true: the learner's own logprobs then stand for the sampler's, and "
            "samples of other weights are trained on without correction, off-policy on purpose"
        )


def num_gpus_of_both(topology: TopologySection) -> int:
    """Return the GPUs that generate or learn: together, or the larger number where they are the same."""
    counts = (topology.gpus_for_vllm, topology.gpus_for_training)
    return max(counts) if topology.type == "colocated" else sum(counts)


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of each part, if there are GPUs; the sizes count on a processor, too.

    Attributes:
        learner: the learner's GPU.
        vllm: the GPUs of vLLM in this process, in the order in which its ranks take them.
        reference: the GPUs of a dedicated reference.
        is_split: the learner and vLLM share none.
        tensor_parallel_size, data_parallel_size: of vLLM in this process; their product is its number of GPUs.
    """

    learner: int
    vllm: tuple[int, ...]
    reference: tuple[int, ...]
    is_split: bool
    tensor_parallel_size: int
    data_parallel_size: int

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs that this process must see."""
        return 1 + max(self.learner, *self.vllm, *self.reference)


def place(sections: Mapping[str, Any]) -> Placement:
    """Return the placement of a valid configuration; see the table above.

    Without [topology] the GPUs of vLLM are those that it would take if it ran in this process.
    """
    topology, vllm, compute = sections["topology"], sections["vllm"], sections["compute"]
    if topology is None:
        tensor = 1 if vllm is None else vllm.tensor_parallel_size
        data = 1 if vllm is None or compute is None else max(1, compute.gpu_count // tensor)
        return Placement(0, tuple(range(tensor * data)), (0,), False, tensor, data)
    for_vllm, is_split = topology.gpus_for_vllm, topology.type != "colocated"
    first = num_gpus_of_both(topology)
    return Placement(
        learner=for_vllm if is_split else 0,
        vllm=tuple(range(for_vllm)),
        reference=tuple(range(first, first + topology.gpus_for_ref)),
        is_split=is_split,
        tensor_parallel_size=topology.tensor_parallel,
        data_parallel_size=1 if topology.type == "cluster" else for_vllm // topology.tensor_parallel,
    )


def require_gpus(wanted: int, num_visible: int, environment: Mapping[str, str], key: str) -> None:
    """Refuse to build for more GPUs than there are; `key` is the setting that asks for them.

    Raises:
        ConfigError: says what hides GPUs, if anything does.

    >>> require_gpus(4, 2, {"CUDA_VISIBLE_DEVICES": "6,7"}, "compute.gpu_count")
    Traceback (most recent call last):
    gspo_gym.errors.ConfigError: compute.gpu_count: expected 4 GPUs, and this process sees 2 (CUDA_VISIBLE_DEVICES ...
    """
    if num_visible >= wanted:
        return
    visible_text = environment.get(VISIBLE_GPUS)
    hides = "" if visible_text is None else f" ({VISIBLE_GPUS} = {visible_text!r})"
    raise ConfigError(f"{key}: expected {wanted} GPUs, and this process sees {num_visible}{hides}; use fewer")


def names_of(gpus: Iterable[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the CUDA_VISIBLE_DEVICES with which a child process sees these GPUs of this process, and no others.

    Raises:
        ConfigError: this process does not see one of them.

    >>> names_of([1, 2], {"CUDA_VISIBLE_DEVICES": "3,GPU-5d1c,7"})
    ('GPU-5d1c', '7')
    >>> names_of([1, 2], {})
    ('1', '2')
    """
    visible_text = environment.get(VISIBLE_GPUS)
    if visible_text is None:
        return tuple(str(gpu) for gpu in gpus)
    visible: list[str] = []
    for name in (part.strip() for part in visible_text.split(",")):
        if name in ("", "-1"):  # CUDA reads no further
            break
        visible.append(name)
    # By the number that this process sees, because CUDA would count a name twice or read on after an empty one.
    gpu_ids = tuple(gpus)
    require_gpus(1 + max(gpu_ids, default=-1), len(visible), environment, "topology")
    return tuple(visible[gpu] for gpu in gpu_ids)

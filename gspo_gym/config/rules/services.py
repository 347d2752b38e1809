"""Rules about machines, engines, trackers, weights on their way to an engine, and endpoints without any."""

from __future__ import annotations

from gspo_gym.config.record import RunRecord, acts_with, default_of, idle, no_effect, rule, rules_in, value_at
from gspo_gym.config.services import LearnerSection, num_gpus_of_both
from gspo_gym.config.words import show


@rule("topology")
def _gpus_add_up(c: RunRecord) -> str | None:
    topology, gpu_count = c.topology, c.gpu_count
    if topology is None:
        return None
    if gpu_count is None:
        return "splits GPUs, but there is no compute.gpu_count: give it"
    num_shared, for_ref = num_gpus_of_both(topology), topology.gpus_for_ref
    total = num_shared + for_ref
    if gpu_count in (0, total):  # without GPUs these count processes
        return None
    if topology.type == "colocated":
        return (
            f"expected compute.gpu_count = {gpu_count}, got the larger of gpus_for_vllm and gpus_for_training, which "
            f"are the same GPUs, and gpus_for_ref: {num_shared} + {for_ref} = {total}"
        )
    return (
        f"expected a sum of compute.gpu_count = {gpu_count}, got gpus_for_vllm + gpus_for_training + gpus_for_ref = "
        f"{topology.gpus_for_vllm} + {topology.gpus_for_training} + {for_ref} = {total}"
    )


@rule("topology.tensor_parallel")
def _tensor_parallel_divides(c: RunRecord) -> str | None:
    topology = c.topology
    if topology is None or topology.gpus_for_vllm % topology.tensor_parallel == 0:
        return None
    return f"expected a divisor of topology.gpus_for_vllm = {topology.gpus_for_vllm}, got {topology.tensor_parallel}"


@rule("vllm.tensor_parallel_size")
def _tensor_parallel_agrees(c: RunRecord) -> str | None:
    if c.vllm is None or c.topology is None or c.vllm.tensor_parallel_size == c.topology.tensor_parallel:
        return None
    return f"expected topology.tensor_parallel = {c.topology.tensor_parallel}, got {c.vllm.tensor_parallel_size}"


@rule("vllm")
def _vllm_has_gpus(c: RunRecord) -> str | None:
    if c.vllm is None or c.topology is not None or not c.gpu_count:
        return None
    tensor = c.vllm.tensor_parallel_size
    if c.gpu_count % tensor == 0:
        return None
    return f"copies of tensor_parallel_size = {tensor} devices do not fill compute.gpu_count = {c.gpu_count}"


@rule("learner.sequence_parallel")
def _sequence_parallel_divides(c: RunRecord) -> str | None:
    degree, num = c.learner.sequence_parallel, 1 if c.topology is None else c.topology.gpus_for_training
    if num == 1 or num % degree == 0:  # one process has no use for the key at all
        return None
    return f"expected a divisor of topology.gpus_for_training = {num}, got {degree}"


@rule("learner.sequence_parallel")
def _rows_drop_out_whole(c: RunRecord) -> str | None:
    dropout = 0.0 if c.training.lora is None else c.training.lora.dropout
    if c.learner.sequence_parallel == 1 or not dropout:
        return None
    return f"processes with parts of a row would drop out others: set 1, or training.lora.dropout = {dropout} to 0"


@rule("topology.type")
def _one_node_is_split(c: RunRecord) -> str | None:
    if c.topology is None or c.topology.type != "single_node_split" or c.compute is None or c.compute.nodes == 1:
        return None
    return f'{show(c.topology.type)} splits one machine\'s GPUs, but compute.nodes = {c.compute.nodes}: set "cluster"'


def _asks_a_teacher(c: RunRecord) -> bool:
    return c.distillation is not None and c.distillation.is_endpoint


def _has_places(c: RunRecord) -> bool:
    # A cluster may have copies of the local engine, for machines without vLLM.
    is_cluster = c.topology is not None and c.topology.type == "cluster"
    return c.rollout.engine == "vllm" or (is_cluster and c.rollout.engine == "local")


def _not_of_vllm(c: RunRecord) -> str:
    return f'has no effect with rollout.engine {show(c.rollout.engine)}: set that to "vllm", or remove this section'


@rule("vllm.max_model_len")
def _lengths_agree(c: RunRecord) -> str | None:
    most, num = None if c.vllm is None else c.vllm.max_model_len, c.rollout.max_model_len
    if most is None or num <= most:
        return None
    return f"expected at least rollout.max_model_len = {num}, which episodes may need, got {most}"


@rule("rollout.engine")
def _http_has_urls(c: RunRecord) -> str | None:
    if c.rollout.engine != "http" or c.endpoints.engine_urls:
        return None
    return '"http" needs services.engine_urls: name the endpoint, such as ["http://localhost:8000"]'


@rule("reference.placement")
def _reference_has_gpus(c: RunRecord) -> str | None:
    placement = c.reference.placement
    if c.topology is None:
        return None
    num = c.topology.gpus_for_ref
    if placement == "dedicated" and num != 1:
        return f'"dedicated" needs topology.gpus_for_ref = 1, because one process scores the reference, got {num}'
    if placement != "dedicated" and num > 0:
        return f'expected "dedicated" with topology.gpus_for_ref = {num}, got {show(placement)}'
    return None


@rule("training.weight_sync.mode")
def _mode_acts(c: RunRecord) -> str | None:
    engine = c.rollout.engine
    if c.weight_sync.mode != "full" or engine == "vllm":
        return None  # "direct" is what the hosted trainer's files say, and changes as little elsewhere as "auto"
    reason = "it shares the learner's weights" if engine == "local" else "it gets no weights"
    return f'has no effect with rollout.engine = {show(engine)}: {reason}; set "auto", or remove this'


@rule("training.weight_sync_interval")
def _sync_meets(c: RunRecord) -> str | None:
    interval = c.training.weight_sync_interval
    # An evaluation plays with the weights that the engine has, and a run resumes with those of the checkpoint.
    looked_at = {
        "training's iterations": c.training.num_epochs * c.training.iterations_per_epoch,
        "evaluation.every_n_iters": c.evaluation.every_n_iters,
        "training.checkpoint_every_n_iters": c.training.checkpoint_every_n_iters,
    }
    for name, every in looked_at.items():
        if every % interval:
            return f"expected a divisor of {name}, so that the engine has the present weights then, got {interval}"
    return None


@rule("tracking.report_to")
def _sinks_are_different(c: RunRecord) -> str | None:
    names = c.tracking.report_to
    return None if len(set(names)) == len(names) else f"names a sink twice: {show(list(names))}"


_DIRECT = "training.weight_sync.direct"


@rule(_DIRECT)
def _weights_are_whole(c: RunRecord) -> str | None:
    transfer, mode = c.weight_sync.transfer, c.weight_sync.mode
    if transfer == "files" or c.model.trainer_mode == "full":
        return None
    if c.model.trainer_mode == "qlora":
        return f"{show(transfer)} hands over whole models, and quantized weights cannot be: set true"
    if mode != "direct":
        return None
    return (
        f"{show(transfer)} hands over whole models, but training.weight_sync.mode {show(mode)} sends an adapter alone: "
        'set that to "auto" or "full", which merge it, or this to true'
    )


@rule(_DIRECT)
def _weights_stay(c: RunRecord) -> str | None:
    transfer, age = c.weight_sync.transfer, c.training.max_staleness
    # A restarted engine gets the version that it had, which is read from files.
    if transfer == "files" or age == 0:
        return None
    return (
        f"{show(transfer)} keeps no copy of a version, so that an engine that dies could not be given the one that it "
        f"had: set training.max_staleness = 0, which is {age}, or this to true"
    )


@rule(_DIRECT)
def _gpus_are_reached(c: RunRecord) -> str | None:
    transfer, has_own_gpus = c.weight_sync.transfer, c.topology is not None and c.topology.type != "colocated"
    if transfer == "nccl" and not has_own_gpus:
        return '"nccl" needs [topology], which gives vLLM GPUs of its own; on the learner\'s own GPU set "ipc"'
    if transfer != "ipc":
        return None
    if has_own_gpus:
        return '"ipc" needs vLLM on the learner\'s own GPU, but [topology] gives it others: set "nccl"'
    if (num := max(1 if c.vllm is None else c.vllm.tensor_parallel_size, c.gpu_count or 1)) > 1:
        return (
            f'"ipc" needs vLLM on the learner\'s own GPU alone, but it takes {num}: set true, or "nccl" with [topology]'
        )
    return None


def _has_processes(c: RunRecord) -> bool:
    return c.topology is None or c.topology.gpus_for_training > 1 or c.has_replicas


def _has_no_endpoint(c: RunRecord) -> str:
    # An endpoint has weights of its own; the other engines have the learner's.
    engine = c.rollout.engine
    sampler = "this process starts vLLM" if engine == "vllm" else "the learner's weights sample"
    return f'has no effect with rollout.engine {show(engine)}: {sampler}. Remove this, or set that to "http"'


SERVICE_RULES = (
    *rules_in(globals()),
    *(
        no_effect(
            f"learner.{name}",
            "topology.gpus_for_training",
            lambda num: num is not None and num > 1,
            "one process learns; have more",
        )
        for name in LearnerSection.model_fields
    ),
    *(
        idle(
            f"topology.{name}",
            _has_processes,
            "has no effect with topology.gpus_for_training = 1: one process learns, and nothing waits for it; have "
            "more, or remove this",
        )
        for name in ("group_timeout_seconds", "max_restarts")
    ),
    idle(
        "topology.heartbeat_seconds",
        lambda c: _has_processes(c) or c.reference.placement == "dedicated",
        "has no effect where one process learns, samples and scores: have more, or remove this",
    ),
    *(
        no_effect("vllm.sleep_while_learning", other, acts, advice)
        for other, acts, advice in (
            (
                "topology.type",
                lambda kind: kind in (None, "colocated"),
                "vLLM has GPUs of its own there; set false",
            ),
            (
                "training.max_staleness",
                lambda steps: steps == 0,
                "episodes are played while the learner works; set 0",
            ),
        )
    ),
    *(
        idle(
            key,
            lambda c: c.rollout.engine != "local" or c.has_replicas,
            'has no effect with rollout.engine = "local": it shares the learner\'s weights; set '
            f"{show(default_of(key))}, or remove this",
        )
        for key in ("training.weight_sync_interval", "training.weight_sync.verify_every_k")
    ),
    no_effect(
        "training.weight_sync.direct",
        "rollout.engine",
        lambda engine: engine != "local",
        "it shares the learner's weights; set true",
    ),
    no_effect(
        "tracking.wandb_project",
        "tracking.report_to",
        lambda names: bool(set(names) - {"tensorboard"}),
        'add "wandb", "trackio" or "mlflow" there',
    ),
    acts_with("services.engine_model", "rollout.engine", "http"),
    *(
        idle(
            f"training.{name}",
            lambda c: c.rollout.engine != "http",
            'has no effect with rollout.engine "http", which gets no weights: set '
            f"{show(default_of(f'training.{name}'))}, or remove this",
        )
        for name in ("weight_sync_interval", "weight_sync.direct", "weight_sync.verify_every_k")
    ),
    idle(
        "learner.sequence_parallel",
        lambda c: not c.model.torch_compile,
        "layers that exchange tokens are not compiled: set 1, or model.torch_compile to false",
    ),
    idle(
        "compute.gpu_type",
        lambda c: c.gpu_count != 0,
        "has no effect with compute.gpu_count = 0: remove one of them",
    ),
    idle("vllm", lambda c: c.rollout.engine == "vllm", _not_of_vllm),
    idle("topology", _has_places, _not_of_vllm),
    *(
        idle(
            f"distillation.{name}",
            _asks_a_teacher,
            lambda c: (
                f"has no effect with distillation.teacher = {show(value_at(c, 'distillation.teacher'))}, which is no "
                "endpoint: remove this, or set that to a URL"
            ),
        )
        for name in ("teacher_model", "teacher_tokenizer", "api_key_env")
    ),
    idle("services.engine_urls", lambda c: c.rollout.engine == "http", _has_no_endpoint),
    # Training on the samples of an endpoint: the learner's own logprobs take the place of the sampler's, which are
    # zeros if the endpoint gives text only. So nothing may read the sampler's.
    idle(
        "rollout.rescore",
        lambda c: c.rollout.engine == "http",
        lambda c: (
            f"has no effect with rollout.engine {show(c.rollout.engine)}, which samples from the learner's own "
            'weights: set that to "http", or remove this'
        ),
    ),
    # A gateway asks one engine, and with rescore training and evaluation have one each.
    idle(
        "rollout.rescore",
        lambda c: not c.has_app,
        "true trains on environments that are played here, not by task apps: remove services.task_url, or this",
    ),
    idle(
        "training.max_staleness",
        lambda c: not c.rollout.rescore,
        lambda c: (
            f"expected 0 with rollout.rescore = true, got {c.training.max_staleness}: the weights that sample have "
            "no version to be behind"
        ),
    ),
)

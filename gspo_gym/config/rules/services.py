"""Rules about machines, engines, trackers, weights on their way to an engine, and endpoints without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo_gym.config.rules.judge import has_app
from gspo_gym.config.rules.objective import Rule, acts_with, default_of, no_effect
from gspo_gym.config.sections import WeightSyncSection
from gspo_gym.config.services import LearnerSection, TopologySection, VllmSection
from gspo_gym.config.words import show
from gspo_gym.learning.settings import CorrectionSettings


def _gpus_add_up(
    has_topology: bool,
    kind: str | None,
    gpu_count: int | None,
    for_vllm: int | None,
    for_training: int | None,
    for_ref: int | None,
) -> str | None:
    if not has_topology:
        return None
    if gpu_count is None:
        return "splits GPUs, but there is no compute.gpu_count: give it"
    # An absent section has no numbers, and a required one that is missing is reported as such.
    both = (for_vllm or 0, for_training or 0)
    total = (max(both) if kind == "colocated" else sum(both)) + (for_ref or 0)
    if gpu_count in (0, total):  # without GPUs these count processes
        return None
    if kind == "colocated":
        return (
            f"expected compute.gpu_count = {gpu_count}, got the larger of gpus_for_vllm and gpus_for_training, which "
            f"are the same GPUs, and gpus_for_ref: {max(both)} + {for_ref or 0} = {total}"
        )
    return (
        f"expected a sum of compute.gpu_count = {gpu_count}, got gpus_for_vllm + gpus_for_training + gpus_for_ref = "
        f"{for_vllm} + {for_training} + {for_ref or 0} = {total}"
    )


def _tensor_parallel_divides(tensor_parallel: int | None, for_vllm: int | None) -> str | None:
    # Otherwise `_gpus_add_up` or the key itself has the problem.
    if tensor_parallel is None or for_vllm is None or for_vllm % tensor_parallel == 0:
        return None
    return f"expected a divisor of topology.gpus_for_vllm = {for_vllm}, got {tensor_parallel}"


def _tensor_parallel_agrees(size: int | None, tensor_parallel: int | None) -> str | None:
    if size is None or tensor_parallel is None or size == tensor_parallel:
        return None
    return f"expected topology.tensor_parallel = {tensor_parallel}, got {size}"


def _data_parallel_agrees(
    size: int | None, kind: str | None, tensor_parallel: int | None, for_vllm: int | None
) -> str | None:
    if size is None or tensor_parallel is None or for_vllm is None or for_vllm % tensor_parallel:
        return None
    if kind == "cluster":  # servers of so many copies each
        if for_vllm // tensor_parallel % size == 0:
            return None
        return (
            f"expected a divisor of topology.gpus_for_vllm / topology.tensor_parallel = {for_vllm} / "
            f"{tensor_parallel}, the copies that servers of this size share out, got {size}"
        )
    if size == for_vllm // tensor_parallel:
        return None
    return (
        f"expected topology.gpus_for_vllm / topology.tensor_parallel = {for_vllm} / {tensor_parallel} = "
        f"{for_vllm // tensor_parallel}, got {size}"
    )


def _vllm_has_gpus(
    has_vllm: bool, has_topology: bool, tensor_parallel: int | None, data_parallel: int | None, gpu_count: int | None
) -> str | None:
    if not has_vllm or has_topology or not gpu_count or tensor_parallel is None or data_parallel is None:
        return None
    if tensor_parallel * data_parallel <= gpu_count:
        return None
    return (
        f"{tensor_parallel} x {data_parallel} devices (tensor_parallel_size x data_parallel_size) are more than "
        f"compute.gpu_count = {gpu_count}"
    )


def _sequence_parallel_divides(degree: int, num_ranks: int | None) -> str | None:
    if num_ranks in (None, 1) or num_ranks % degree == 0:  # one process has no use for the key at all
        return None
    return f"expected a divisor of topology.gpus_for_training = {num_ranks}, got {degree}"


def _rows_drop_out_whole(degree: int, dropout: float | None) -> str | None:
    if degree == 1 or not dropout:
        return None
    return f"processes with parts of a row would drop out others: set 1, or training.lora.dropout = {dropout} to 0"


def _layers_are_not_compiled(degree: int, torch_compile: bool) -> str | None:
    if degree == 1 or not torch_compile:
        return None
    return "layers that exchange tokens are not compiled: set 1, or model.torch_compile to false"


def _offloads_from_gpus(cpu_offload: bool, gpu_count: int | None) -> str | None:
    if not cpu_offload or gpu_count != 0:
        return None
    return "with compute.gpu_count = 0 all of it is in the processor's memory already: set false, or have GPUs"


def _split_gpus_are_used(has_topology: bool, urls: tuple[str, ...] | None) -> str | None:
    if not has_topology or not urls:
        return None
    return "splits GPUs with vLLM in this process, but services.engine_urls names servers: remove one of them"


def _one_node_is_split(kind: str | None, nodes: int | None) -> str | None:
    if kind != "single_node_split" or nodes is None or nodes == 1:
        return None
    return f'{show(kind)} splits one machine\'s GPUs, but compute.nodes = {nodes}: set "cluster"'


def _type_is_of_a_gpu(gpu_type: str | None, gpu_count: int | None) -> str | None:
    if gpu_type is None or gpu_count != 0:
        # gpu_count is None without [compute]: then any device is fine.
        return None
    return "has no effect with compute.gpu_count = 0: remove one of them"


def _device_is_there(device: str, gpu_count: int | None) -> str | None:
    if device == "cuda" and gpu_count == 0:
        return 'expected "auto" or "cpu" with compute.gpu_count = 0, got "cuda"'
    if device == "cpu" and gpu_count is not None and gpu_count > 0:
        return f'expected "auto" or "cuda" with compute.gpu_count = {gpu_count}, got "cpu"'
    return None


def _vllm_is_the_engine(is_given: bool, engine: str) -> str | None:
    if not is_given or engine == "vllm":
        return None
    return f'has no effect with rollout.engine {show(engine)}: set that to "vllm", or remove this section'


def _engine_has_places(is_given: bool, engine: str, kind: str | None) -> str | None:
    # A cluster may have copies of the local engine, for machines without vLLM.
    return None if kind == "cluster" and engine == "local" else _vllm_is_the_engine(is_given, engine)


def _urls_are_used(urls: tuple[str, ...] | None, engine: str) -> str | None:
    if not urls or engine != "local":
        return None
    # A server has its own weights; the local engine has the learner's.
    return 'has no effect with rollout.engine "local": set that to "vllm" or "http", or remove this'


def _http_has_urls(engine: str, urls: tuple[str, ...] | None) -> str | None:
    if engine != "http" or urls:
        return None
    return '"http" needs services.engine_urls: name the endpoint, such as ["http://localhost:8000"]'


def _lengths_agree(max_model_len: int | None, rollout_len: int) -> str | None:
    if max_model_len is None or rollout_len <= max_model_len:
        return None
    return f"expected at least rollout.max_model_len = {rollout_len}, which episodes may need, got {max_model_len}"


def _reference_has_gpus(placement: str, for_ref: int | None, tp: int) -> str | None:
    if for_ref is None:
        return None
    if placement == "dedicated" and for_ref != tp:
        return f'"dedicated" needs topology.gpus_for_ref = reference.tp = {tp}, got {for_ref}'
    if placement != "dedicated" and for_ref > 0:
        return f'expected "dedicated" with topology.gpus_for_ref = {for_ref}, got {show(placement)}'
    return None


def _of_own_server(key: str, default: Any, urls: str) -> Rule:
    # These were chosen when the server was started: here they would change nothing.
    return no_effect(key, default, urls, lambda urls: not urls, "such a server was told by who started it")


def _is_of_replicas(kind: str | None, for_vllm: int | None, tensor_parallel: int | None, copies: int | None) -> bool:
    return kind == "cluster" and (for_vllm or 0) // ((tensor_parallel or 1) * (copies or 1)) > 1


def _of_processes(key: str) -> Rule:
    default = default_of(TopologySection, key.partition(".")[2])

    def check(value: Any, learners: int | None, *sampling: Any) -> str | None:
        if value in (None, default) or learners is None or learners > 1 or _is_of_replicas(*sampling):
            return None
        return (
            "has no effect with topology.gpus_for_training = 1: one process learns, and nothing waits for it; have "
            "more, or remove this"
        )

    return Rule((key, "topology.gpus_for_training", *_REPLICAS), check)


def _of_weights_on_their_way(key: str, default: Any) -> Rule:
    def check(value: Any, engine: str, *sampling: Any) -> str | None:
        if value in (None, default) or engine != "local" or _is_of_replicas(*sampling):
            return None
        return (
            f'has no effect with rollout.engine = "local": it shares the learner\'s weights; set {show(default)}, or '
            "remove this"
        )

    return Rule((key, "rollout.engine", *_REPLICAS), check)


def _something_is_in_flight(in_flight: str | None, max_staleness: int) -> str | None:
    if in_flight is None or max_staleness > 0:
        return None
    return (
        "has no effect with training.max_staleness = 0: no call is in flight at an update; raise that, or remove this"
    )


_SHARED = "it shares the learner's weights"


def _of_sent_weights(key: str, default: Any) -> Rule:
    advice = f"{_SHARED}; set {show(default)}"
    return no_effect(key, default, "rollout.engine", lambda engine: engine != "local", advice)


def _mode_acts(mode: str | None, engine: str) -> str | None:
    if mode != "full" or engine == "vllm":
        return None  # "direct" is what the hosted trainer's files say, and changes as little elsewhere as "auto"
    reason = _SHARED if engine == "local" else "it gets no weights"
    return f'has no effect with rollout.engine = {show(engine)}: {reason}; set "auto", or remove this'


def _stale_weights_are_allowed(max_staleness: int, interval: int, engine: str, *sampling: Any) -> str | None:
    has_interval = engine == "vllm" or _is_of_replicas(*sampling)
    if max_staleness >= interval - 1 or not has_interval:
        # A run that samples k iterations under old weights must allow samples of that age.
        return None
    return (
        f"expected at least training.weight_sync_interval - 1 = {interval - 1}, which samples lie behind before new "
        f"weights are sent, got {max_staleness}"
    )


def _sync_is_not_off(enable: bool | None) -> str | None:
    if enable is not False:
        return None
    return "false would train one policy on the episodes of another, which never learns: set true"


def _sync_has_a_target(targets: tuple[str, ...] | None) -> str | None:
    if targets is None or len(targets) == 1:
        return None
    return f'expected ["policy"], which is all that samples, got {show(list(targets))}'


def _sync_meets(
    interval: int, num_epochs: int, iterations_per_epoch: int, evaluate: int, checkpoint: int
) -> str | None:
    # An evaluation plays with the weights that the engine has, and a run resumes with those of the checkpoint.
    looked_at = {
        "training's iterations": num_epochs * iterations_per_epoch,
        "evaluation.every_n_iters": evaluate,
        "training.checkpoint_every_n_iters": checkpoint,
    }
    for name, every in looked_at.items():
        if every % interval:
            return f"expected a divisor of {name}, so that the engine has the present weights then, got {interval}"
    return None


def _sinks_are_different(report_to: tuple[str, ...] | None) -> str | None:
    if report_to is None or len(set(report_to)) == len(report_to):
        return None
    return f"names a sink twice: {show(list(report_to))}"


_SYNC, _SENT = "training.weight_sync", ("direct", "verify_every_k")
_REPLICAS = ("topology.type", "topology.gpus_for_vllm", "topology.tensor_parallel", "vllm.data_parallel_size")
_GPUS = (
    "topology.type",
    "compute.gpu_count",
    "topology.gpus_for_vllm",
    "topology.gpus_for_training",
    "topology.gpus_for_ref",
)

SERVICE_RULES = (
    Rule(("topology", *_GPUS), _gpus_add_up),
    Rule(("topology.tensor_parallel", "topology.gpus_for_vllm"), _tensor_parallel_divides),
    Rule(("vllm.tensor_parallel_size", "topology.tensor_parallel"), _tensor_parallel_agrees),
    Rule(
        ("vllm.data_parallel_size", "topology.type", "topology.tensor_parallel", "topology.gpus_for_vllm"),
        _data_parallel_agrees,
    ),
    Rule(
        ("vllm", "topology", "vllm.tensor_parallel_size", "vllm.data_parallel_size", "compute.gpu_count"),
        _vllm_has_gpus,
    ),
    *(
        no_effect(
            f"learner.{name}",
            default_of(LearnerSection, name),
            "topology.gpus_for_training",
            lambda num: num is not None and num > 1,
            "one process learns; have more",
        )
        for name in LearnerSection.model_fields
    ),
    Rule(("learner.sequence_parallel", "topology.gpus_for_training"), _sequence_parallel_divides),
    Rule(("learner.sequence_parallel", "training.lora.dropout"), _rows_drop_out_whole),
    Rule(("learner.sequence_parallel", "model.torch_compile"), _layers_are_not_compiled),
    Rule(("learner.cpu_offload", "compute.gpu_count"), _offloads_from_gpus),
    *(
        _of_processes(f"topology.{name}")
        for name in ("heartbeat_seconds", "group_timeout_seconds", "ray_address", "max_restarts")
    ),
    Rule(("topology", "services.engine_urls"), _split_gpus_are_used),
    Rule(("topology.type", "compute.nodes"), _one_node_is_split),
    Rule(("compute.gpu_type", "compute.gpu_count"), _type_is_of_a_gpu),
    Rule(("model.device", "compute.gpu_count"), _device_is_there),
    Rule(("vllm", "rollout.engine"), _vllm_is_the_engine),
    Rule(("topology", "rollout.engine", "topology.type"), _engine_has_places),
    Rule(("vllm.max_model_len", "rollout.max_model_len"), _lengths_agree),
    Rule(("services.engine_urls", "rollout.engine"), _urls_are_used),
    Rule(("rollout.engine", "services.engine_urls"), _http_has_urls),
    *(
        _of_own_server(f"vllm.{name}", default_of(VllmSection, name), "services.engine_urls")
        for name in VllmSection.model_fields
        if name not in ("max_model_len", "dtype")
    ),
    no_effect(
        "vllm.sleep_while_learning",
        False,
        "topology.type",
        lambda kind: kind in (None, "colocated"),
        "vLLM has GPUs of its own there; set false",
    ),
    no_effect(
        "vllm.sleep_while_learning",
        False,
        "training.max_staleness",
        lambda steps: steps == 0,
        "episodes are played while the learner works; set 0",
    ),
    Rule(("reference.placement", "topology.gpus_for_ref", "reference.tp"), _reference_has_gpus),
    _of_weights_on_their_way("training.weight_sync_interval", 1),
    _of_weights_on_their_way(f"{_SYNC}.verify_every_k", default_of(WeightSyncSection, "verify_every_k")),
    Rule((f"{_SYNC}.in_flight", "training.max_staleness"), _something_is_in_flight),
    Rule(
        ("training.max_staleness", "training.weight_sync_interval", "rollout.engine", *_REPLICAS),
        _stale_weights_are_allowed,
    ),
    Rule(("training.weight_sync.enable",), _sync_is_not_off),
    Rule(("training.weight_sync.targets",), _sync_has_a_target),
    Rule(
        (
            "training.weight_sync_interval",
            "training.num_epochs",
            "training.iterations_per_epoch",
            "evaluation.every_n_iters",
            "training.checkpoint_every_n_iters",
        ),
        _sync_meets,
    ),
    Rule((f"{_SYNC}.mode", "rollout.engine"), _mode_acts),
    _of_sent_weights(f"{_SYNC}.direct", default_of(WeightSyncSection, "direct")),
    Rule(("tracking.report_to",), _sinks_are_different),
    *(
        no_effect(
            f"tracking.{name}",
            default,
            "tracking.report_to",
            lambda report_to: "wandb" in (report_to or ()),
            'add "wandb" there',
        )
        for name, default in (("wandb_project", None), ("wandb_tags", ()), ("run_name", None))
    ),
)


_KEY = "training.weight_sync.transfer"


# None: there is no [training.weight_sync].
def _is_files(transfer: str | None) -> bool:
    return transfer is None or transfer == "files"


def _vllm_is_here(transfer: str | None, engine: str, urls: tuple[str, ...] | None) -> str | None:
    if _is_files(transfer) or (engine == "vllm" and not urls):
        return None
    if urls:
        return (
            f"{show(transfer)} hands weights to vLLM in this process, not to servers at services.engine_urls, which "
            'read files: set "files", or remove the URLs'
        )
    return f'has no effect with rollout.engine {show(engine)}: set that to "vllm", or remove this'


def _weights_are_whole(transfer: str | None, trainer_mode: str, mode: str | None) -> str | None:
    if _is_files(transfer) or trainer_mode == "full":
        return None
    if trainer_mode == "qlora":
        return f'{show(transfer)} hands over whole models, and quantized weights cannot be: set "files"'
    if mode != "direct":
        return None
    return (
        f"{show(transfer)} hands over whole models, but training.weight_sync.mode {show(mode)} sends an adapter alone: "
        'set that to "auto" or "full", which merge it, or this to "files"'
    )


def _weights_stay(transfer: str | None, max_staleness: int) -> str | None:
    # A restarted engine gets the version that it had, which is read from files.
    if _is_files(transfer) or max_staleness == 0:
        return None
    return (
        f"{show(transfer)} keeps no copy of a version, so that an engine that dies could not be given the one that it "
        f'had: set training.max_staleness = 0, which is {max_staleness}, or "files"'
    )


def _direct_is_of_files(direct: bool | None, transfer: str | None) -> str | None:
    if _is_files(transfer) or direct is not False:
        return None
    return f"has no effect with {_KEY} {show(transfer)}, which writes no files: set true, or remove this"


def _gpus_are_reached(
    transfer: str | None, kind: str | None, tensor_parallel: int | None, data_parallel: int | None
) -> str | None:
    has_own_gpus = kind not in (None, "colocated")
    if transfer == "nccl" and not has_own_gpus:
        return '"nccl" needs [topology], which gives vLLM GPUs of its own; on the learner\'s own GPU set "ipc"'
    if transfer != "ipc":
        return None
    if has_own_gpus:
        return '"ipc" needs vLLM on the learner\'s own GPU, but [topology] gives it others: set "nccl"'
    if (num_gpus := (tensor_parallel or 1) * (data_parallel or 1)) > 1:
        return (
            f'"ipc" needs vLLM on the learner\'s own GPU alone, but vllm.tensor_parallel_size x '
            f'vllm.data_parallel_size is {num_gpus}: set "files", or "nccl" with [topology]'
        )
    return None


TRANSFER_RULES = (
    Rule((_KEY, "rollout.engine", "services.engine_urls"), _vllm_is_here),
    Rule((_KEY, "model.trainer_mode", "training.weight_sync.mode"), _weights_are_whole),
    Rule((_KEY, "training.max_staleness"), _weights_stay),
    Rule(("training.weight_sync.direct", _KEY), _direct_is_of_files),
    Rule((_KEY, "topology.type", "vllm.tensor_parallel_size", "vllm.data_parallel_size"), _gpus_are_reached),
)


# Training on the samples of an endpoint (rollout.rescore): the learner's own logprobs take the place of the sampler's,
# which are zeros if the endpoint gives text only. So nothing may read the sampler's.
def _samples_are_an_endpoints(rescore: bool, engine: str) -> str | None:
    if not rescore or engine == "http":
        return None
    return (
        f"has no effect with rollout.engine {show(engine)}, which samples from the learner's own weights: set that to "
        '"http", or remove this'
    )


def _no_app_is_asked(rescore: bool, task_url: str | None, mixture: Sequence[Mapping[str, Any]]) -> str | None:
    # A gateway asks one engine, and with rescore training and evaluation have one each.
    if not rescore or not has_app(task_url, mixture):
        return None
    return "true trains on environments that are played here, not by task apps: remove services.task_url, or this"


def _of_the_sampler(name: str) -> Rule:
    default = default_of(CorrectionSettings, name)

    def check(value: Any, rescore: bool) -> str | None:
        if not rescore or value == default:
            return None
        # These look at the sampler's logprobs, of which an endpoint may give none.
        remedy = "remove this" if default is None else f"set {show(default)}"
        return f"looks at the sampler's logprobs, which rollout.rescore = true replaces by the learner's: {remedy}"

    return Rule((f"correction.{name}", "rollout.rescore"), check)


def _nothing_is_played_ahead(max_staleness: int, rescore: bool) -> str | None:
    if not rescore or max_staleness == 0:
        return None
    return (
        f"expected 0 with rollout.rescore = true, got {max_staleness}: the weights that sample have no version to be "
        "behind"
    )


def _needs_no_weights(key: str, default: Any) -> Rule:
    def check(value: Any, engine: str) -> str | None:
        if engine != "http" or value in (None, default):
            return None
        return f'has no effect with rollout.engine "http", which gets no weights: set {show(default)}, or remove this'

    return Rule((key, "rollout.engine"), check)


RESCORE_RULES = (
    acts_with("services.engine_model", None, "rollout.engine", "http"),
    Rule(("rollout.rescore", "rollout.engine"), _samples_are_an_endpoints),
    Rule(("rollout.rescore", "services.task_url", "rollout.mixture"), _no_app_is_asked),
    *(_of_the_sampler(name) for name in ("old_logprobs", "level", "off_policy_threshold", "max_engine_gap")),
    Rule(("training.max_staleness", "rollout.rescore"), _nothing_is_played_ahead),
    _needs_no_weights("training.weight_sync_interval", 1),
    *(_needs_no_weights(f"{_SYNC}.{name}", default_of(WeightSyncSection, name)) for name in _SENT),
)

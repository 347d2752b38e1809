"""Build a run's objects from its configuration: names become classes in this folder only.

Players are built in `config/build/rollouts.py`. Nothing here decides anything that the configuration leaves open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from gspo_gym.cluster.ray import require_ray
from gspo_gym.config.build.apps import environment_ids
from gspo_gym.config.build.engines import build_alarm, build_while_learning
from gspo_gym.config.build.judge import rewards_of_turns, tell_recorder
from gspo_gym.config.build.reference import load_teacher
from gspo_gym.config.build.rollouts import Player, build_evaluate, build_training_pool
from gspo_gym.config.build.teacher import FoundTeacher
from gspo_gym.config.machines import with_all_gpus
from gspo_gym.config.run_config import RunConfig, model_name
from gspo_gym.config.services import has_gpu_actors, place, ray_address, refuse_to_train, require_gpus
from gspo_gym.diagnosis.alarms import note_of
from gspo_gym.diagnosis.selection import AttemptWatch, SelectionAlarm
from gspo_gym.diagnosis.teaching import TeachingAlarm
from gspo_gym.engine.base import Engine
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.learning.collective import Collective
from gspo_gym.learning.reference import ReferencePolicy
from gspo_gym.learning.settings import UpdateSettings
from gspo_gym.learning.update import AnyLearner, Learner
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, load_skeleton
from gspo_gym.policy.lora import is_adapter
from gspo_gym.policy.options import check_options, prepare_for_training
from gspo_gym.policy.quantization import is_quantized
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.rollout.evaluation import Evaluation
from gspo_gym.rollout.ledger import Disposition, Ledger
from gspo_gym.rollout.pool import OnEpisode, RolloutPool
from gspo_gym.run.collect import Collector
from gspo_gym.run.feedback import Feedback
from gspo_gym.run.journal import Journal, MoreMetrics
from gspo_gym.run.judging import Judging
from gspo_gym.run.process import Phases
from gspo_gym.run.recording import LEDGER_FILE, RunRecorder
from gspo_gym.run.report.progress import Progress
from gspo_gym.run.settings import LoopSettings, TrainPlan
from gspo_gym.run.sinks import Sink, open_sinks
from gspo_gym.run.state import CopyCheckpoint, Saver, TrainState
from gspo_gym.run.steering import Steering
from gspo_gym.run.trainer import Evaluate, ForgetEnded, Trainer, WhileLearning
from gspo_gym.seeding import child_seed
from gspo_gym.types import Trajectory, TrajectoryGroup


def build_policy(config: RunConfig, base: str | None = None, device: str | None = None) -> Policy:
    """Return the policy to train, from [model] and [training.lora]; a tiny model's weights derive from run.seed.

    `base` is loaded in place of the config's model: a checkpoint to go on from. `device` None: `drivers_device`.

    Raises:
        ConfigError: this version, this machine or this model cannot do what the config asks for.
    """
    refuse_to_train(config.sections)
    model, device = config.model, device or drivers_device(config)
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)  # kernels that name no GPU use the current one
    check_options(
        device=device,
        torch_compile=model.torch_compile,
        liger_kernels=model.liger_kernels,
        attn_implementation=model.attn_implementation,
    )
    seed = child_seed(config.run.seed, "model")
    policy = load_policy(
        base or model_name(config),
        dtype=model.dtype,
        device=device,
        seed=seed,
        quantization=model.quantization if model.trainer_mode == "qlora" else "as_saved",
        attn_implementation=model.attn_implementation,
    )
    # A checkpoint says by itself that it is quantized: its adapter was trained over those very weights.
    if is_quantized(policy.model) and model.trainer_mode != "qlora":
        raise ConfigError(
            f'model.trainer_mode: {policy.base} was trained on quantized weights; set it to "qlora" to go on with it, '
            f"got {model.trainer_mode!r}"
        )
    return _to_train(config, policy, seed, device)


def build_skeleton(config: RunConfig, base: str, device: str) -> Policy:
    """Return the policy to train as `build_policy` does, without its weights; see `load_skeleton`.

    Raises:
        ConfigError: as there.
    """
    model = config.model
    policy = load_skeleton(base, dtype=model.dtype, attn_implementation=model.attn_implementation)
    return _to_train(config, policy, child_seed(config.run.seed, "model"), device)


def _to_train(config: RunConfig, policy: Policy, seed: int, device: str) -> Policy:
    model = config.model
    if config.training.lora is not None:
        policy = adapt_policy(policy, config.training.lora, seed)
    # The adapter of a checkpoint, which would be frozen beside the trained weights.
    elif is_adapter(policy.model):
        raise ConfigError(
            f'model.base: {policy.base} is a LoRA adapter, which model.trainer_mode = "full" cannot train; '
            'set it to "lora" to go on with the adapter'
        )
    prepare_for_training(
        policy.model,
        device=device,
        gradient_checkpointing=model.gradient_checkpointing,
        torch_compile=model.torch_compile,
        liger_kernels=model.liger_kernels,
    )
    return policy


def device_of(config: RunConfig) -> str:
    """Return the learner's torch device, from [compute] and [topology]; see `config/services.py`.

    Raises:
        ConfigError: the machine has no GPU, too few, or one of another type.
    """
    if has_gpu_actors(config.sections):
        _require_gpus_of_actors(config)
        return "cuda"
    if config.compute is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    else:  # it says it for all: 0 GPUs is the processor, although there may be GPUs
        device = "cpu" if config.compute.gpu_count == 0 else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("compute.gpu_count: expected a CUDA device, and torch sees none here; set 0")
    return _learners_gpu(config) if device == "cuda" else "cpu"


def on_visible_gpus(config: RunConfig) -> tuple[RunConfig, str | None]:
    """Return `with_all_gpus` of those that this process sees; CUDA_VISIBLE_DEVICES says which they are."""
    num_gpus = torch.cuda.device_count()
    spread_config, line = with_all_gpus(config, num_gpus)
    try:
        if spread_config is not config and config.compute is None:
            require_ray()
    except MissingExtraError as error:
        return config, f"one of {num_gpus} GPUs is used: {error}"
    return spread_config, line


def drivers_device(config: RunConfig) -> str:
    """Return the torch device of the process that trains: as `device_of`, but for GPUs that are those of actors."""
    device = device_of(config)
    return "cpu" if has_gpu_actors(config.sections) else device


def actors_device(config: RunConfig) -> str:
    """Return the torch device in an actor of Ray, which sees its own GPUs only."""
    return "cuda" if has_gpu_actors(config.sections) else "cpu"


def _require_gpus_of_actors(config: RunConfig) -> None:
    if config.compute is None or ray_address() is not None:
        return  # placed on other machines, too: Ray says what is missing
    require_gpus(config.compute.gpu_count, torch.cuda.device_count(), os.environ, "compute.gpu_count")
    if config.compute.gpu_type is not None:
        for gpu in range(config.compute.gpu_count):
            require_gpu_type(config.compute.gpu_type, torch.cuda.get_device_name(gpu))


def _learners_gpu(config: RunConfig) -> str:
    compute, placement = config.compute, place(config.sections)
    # The key that asked for the GPUs: without [compute] only vLLM's ranks do.
    key = "vllm.tensor_parallel_size" if compute is None else "compute.gpu_count"
    require_gpus(placement.num_gpus, torch.cuda.device_count(), os.environ, key)
    if compute is not None and compute.gpu_type is not None:
        for gpu in range(placement.num_gpus):
            require_gpu_type(compute.gpu_type, torch.cuda.get_device_name(gpu))
    return f"cuda:{placement.learner}" if placement.is_split else "cuda"


def require_gpu_type(gpu_type: str, device_name: str) -> None:
    """Refuse a device of another type than compute.gpu_type, such as "H100" for "NVIDIA H100 80GB HBM3".

    Raises:
        ConfigError: the device is of another type.
    """
    if gpu_type.lower() not in device_name.lower():
        raise ConfigError(f"compute.gpu_type: expected {gpu_type!r}, but the device here is {device_name!r}")


def build_learner(
    config: RunConfig,
    policy: Policy,
    reference: ReferencePolicy | None = None,
    collective: Collective | None = None,
    phases: Phases | None = None,
    teacher: FoundTeacher | None = None,
) -> Learner:
    """Return the learner of [loss], [advantages], [rewards], [correction], [reference], [distillation], [optimizer]
    and [training].

    `reference` is in another process; None: it is in this one, if any term needs one. `collective`: see `Learner`.
    `phases` are told of its optimizer steps. `teacher`: what was found for [distillation]; None: what it means now.
    """
    phases = phases or Phases()
    return Learner(
        policy.model,
        optimizer=config.optimizer,
        loss=config.loss,
        update=UpdateSettings.of(config.training),
        minibatch_size=config.size.minibatch_size,
        advantages=config.advantages,
        rewards=config.rewards,
        correction=config.correction,
        rescores=config.rollout.rescore,
        reference=config.reference if config.has_reference else None,
        sampling=config.scored_sampling,
        total_steps=config.size.num_optimizer_steps,
        seed=child_seed(config.run.seed, "learner"),
        reference_policy=reference,
        distillation=config.distillation,
        teacher=load_teacher(config, policy, device_of(config), teacher),
        collective=collective,
        on_step=partial(phases.count, unit="batches"),
    )


def build_plan(config: RunConfig) -> TrainPlan:
    """Return the plan of the run."""
    (main, *more_ids), sources = environment_ids(config), config.sources
    return TrainPlan(
        env_id=main,
        size=config.size,
        run=config.run,
        loop=LoopSettings.of(config.training),
        evaluation=config.evaluation,
        advantages=config.advantages,
        rewards=config.rewards,
        step_rewards=rewards_of_turns(config),
        mixture={name: source.share for name, source in zip(more_ids, sources[1:], strict=True)},
    )


def build_sinks(config: RunConfig, *, resume_step: int | None = None) -> list[Sink]:
    """Return the sinks of [tracking], for metrics besides the run's folder.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigError: W&B refuses.
    """
    tracking = config.tracking
    return open_sinks(
        tracking.report_to,
        folder=config.run_folder,
        project=tracking.wandb_project,
        tags=tuple(name if value is True else f"{name}={value}" for name, value in config.run.tags.items()),
        run_name=config.model.label,
        config=config.model_dump(mode="json"),
        resume_step=resume_step,
    )


def build_trainer(
    config: RunConfig,
    player: Player,
    *,
    learner: AnyLearner,
    recorder: RunRecorder,
    checkpoints: CheckpointStore,
    progress: Progress,
    state: TrainState | None,
    weight_sync: WeightSync,
    judging: Judging | None = None,
    feedback: Feedback | None = None,
    steering: Steering | None = None,
    is_saved: bool = True,
) -> Trainer:
    """Return the trainer; `learner` is fresh and `state` None, or both are restored from a checkpoint.

    `is_saved` says that the run's newest checkpoint holds `state`; otherwise the state is another run's. `judging`
    scores the episodes and writes into the run's folder; None: their environments score them. `feedback` is for a
    teacher that reads it; None: there is none.

    Raises:
        ConfigError: samples are to have a bounded age, and the engine does not say which weights sampled them.
    """
    _require_versions(config, engine := player.sampler)  # before anything is played: the age could not be checked
    before = state or TrainState()
    attempts = AttemptWatch({s.env_name for s in config.sources if s.task_url is not None}, before.attempts)
    selection = SelectionAlarm(seed=config.run.seed, evidence=before.selection)
    if judging is not None:
        judging.record_into(recorder.folder, tell_recorder(recorder, progress), step=0 if state is None else state.step)
    journal = Journal(
        build_plan(config),
        recorder,
        progress,
        alarm=build_alarm(config, num_in_a_row=before.num_mismatches),
        attempts=attempts,
        selection=selection,
        teaching=None if feedback is None else TeachingAlarm(before.teaching),
        more_metrics=_more_metrics(player, attempts, selection, judging, recorder=recorder, progress=progress),
    )
    plan, phases = journal.plan, Phases() if steering is None else steering.phases
    copy, ledger = _copying(checkpoints, player.policy, learner, recorder), Ledger(recorder.folder / LEDGER_FILE)
    pool = build_training_pool(config, player, ledger, judging, _counting(phases, attempts))
    return Trainer(
        plan,
        collector=_collector(plan, pool, state, engine, weight_sync),
        learner=learner,
        publish=weight_sync.after_step,
        evaluate=_evaluating(config, player, recorder, judging, phases),
        saver=Saver(copy, plan.loop, on_event=recorder.event, saved=state if is_saved else None, phases=phases),
        journal=journal,
        state=state,
        forget_ended=_collecting(phases, player.engine, plan),
        compute=player.compute,
        give_feedback=None if feedback is None else feedback.give,
        while_learning=_learning(phases, build_while_learning(config, player.engine)),
        steering=steering,
    )


def _collector(
    plan: TrainPlan, pool: RolloutPool, state: TrainState | None, engine: Engine, weight_sync: WeightSync
) -> Collector:
    return Collector(
        plan,
        pool,
        state,
        weight_version=lambda: engine.weight_version,
        is_committed=weight_sync.is_committed if engine.capabilities.reports_versions else None,
    )


def _require_versions(config: RunConfig, engine: Engine) -> None:
    if config.training.max_staleness > 0 and not engine.capabilities.reports_versions:
        raise ConfigError(
            f"training.max_staleness: expected 0 with an engine that does not report weight versions, got "
            f"{config.training.max_staleness}"
        )


def _copying(
    checkpoints: CheckpointStore, policy: Policy, learner: AnyLearner, recorder: RunRecorder
) -> CopyCheckpoint:
    def copy_checkpoint(state: TrainState) -> Callable[[], Path]:
        values = replace(state, last_seq=recorder.last_seq).to_dict()
        numbers = state.evaluation_numbers()
        draft = checkpoints.copy(state.step, policy=policy, learner=learner, trainer_state=values, evaluation=numbers)
        return partial(checkpoints.write, draft)

    return copy_checkpoint


def _counting(phases: Phases, attempts: OnEpisode) -> OnEpisode:
    def over(trajectory: Trajectory, disposition: Disposition) -> None:
        attempts(trajectory, disposition)
        if disposition is not Disposition.RETRIED:
            phases.advance("collecting")

    return over


def _collecting(phases: Phases, engine: Engine, plan: TrainPlan) -> ForgetEnded:
    # Of episodes that are played ahead, some are over before a step waits for them; how many are forked is drawn.
    is_unknown = plan.loop.max_staleness or plan.size.forks_per_episode
    num_episodes = None if is_unknown else plan.size.groups_per_iteration * plan.size.group_size

    async def forget_ended() -> None:
        phases.enter("collecting", total=num_episodes)  # what follows it, unless it is an evaluation, which says so
        await engine.forget_ended()

    return forget_ended


def _evaluating(
    config: RunConfig,
    player: Player,
    recorder: RunRecorder,
    judging: Judging | None,
    phases: Phases,
) -> Evaluate:
    on_over = partial(phases.advance, "evaluating")
    evaluate = build_evaluate(config, player, recorder.episodes, judging, on_over=on_over)

    async def run(label: str) -> Evaluation:
        phases.enter("evaluating", total=config.num_evaluation_episodes)
        return await evaluate(label)

    return run


def _learning(phases: Phases, while_learning: WhileLearning) -> WhileLearning:
    @contextlib.asynccontextmanager
    async def learn() -> AsyncIterator[None]:
        phases.enter("learning")
        async with while_learning():
            yield

    return learn


def _more_metrics(
    player: Player,
    attempts: AttemptWatch,
    selection: SelectionAlarm,
    judging: Judging | None,
    *,
    recorder: RunRecorder,
    progress: Progress,
) -> MoreMetrics:

    def sound(kind: str, step: int, reason: str | None, **data: float | None) -> None:
        if reason is not None:
            recorder.event(kind, step, {"reason": reason, **data})
            progress.note(note_of(kind, step, reason))

    def more_metrics(step: int, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        # Episodes that failed or were given up may differ from those that are kept: this is watched every step.
        of_apps: Mapping[str, float] = {}
        of_attempts = attempts.metrics()
        sound("selection", step, attempts.alarm())
        if player.apps is not None:
            sound("attempts_lost", step, attempts.app_alarm())
            of_apps, returns = player.apps.after_step(groups)
            if (alarm := selection.check(returns)) is not None:
                sound("return_selection", step, alarm.sentence(), **asdict(alarm))
        return {**of_attempts, **of_apps, **({} if judging is None else judging.after_step(step))}

    return more_metrics

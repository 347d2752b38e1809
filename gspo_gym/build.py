"""A config becomes live objects: the only place where names become classes.

Called by the commands and by anyone who trains from Python. Nothing here decides anything that the config does not say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo_gym.build_engines import build_engine
from gspo_gym.build_weights import build_alarm
from gspo_gym.checkpoints import CheckpointStore
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.sections import parse_source
from gspo_gym.config.services import refuse_to_run, refuse_to_train
from gspo_gym.engine.base import Engine
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.isolation import IsolatedFactory, isolated_factory
from gspo_gym.env.process_limits import WorkerLimits
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import looking_at
from gspo_gym.errors import ConfigError
from gspo_gym.evaluation import Evaluation, evaluate
from gspo_gym.learning.reference import ReferencePolicy
from gspo_gym.learning.truncation import Truncation
from gspo_gym.learning.update import Learner
from gspo_gym.models import Policy, adapt_policy, load_policy
from gspo_gym.models_adapters import is_adapter
from gspo_gym.models_options import check_options, prepare_for_training
from gspo_gym.models_quantization import is_quantized
from gspo_gym.recording import RunRecorder
from gspo_gym.recording_sinks import Sink, open_sinks
from gspo_gym.report.progress import Progress
from gspo_gym.rollout.actors import Actor, EngineActor, ScriptedActor, policy_of
from gspo_gym.rollout.episode import RendererCache
from gspo_gym.rollout.ledger import Disposition, Ledger
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.rollout.pool import OnEpisode, RolloutPool
from gspo_gym.seeding import child_seed
from gspo_gym.trainer import Evaluate, Trainer, TrainPlan, TrainState
from gspo_gym.types import Trajectory
from gspo_gym.warmup import WarmupPlan
from gspo_gym.weight_sync import WeightSync


@dataclass(frozen=True, slots=True)
class Player:
    """A policy that can play: its engine and its pool for evaluation, which share the weights."""

    policy: Policy
    engine: Engine
    renderers: RendererCache


def model_name(config: RunConfig) -> str:
    """What `models.load_policy` takes for model.base or model.source.

    Raises:
        ConfigError: model.source names a run or a checkpoint that is not there.
    """
    if config.model.base is not None:
        return config.model.base
    label, step = parse_source(config.model.source or "")
    folder = Path(config.run.folder) / label / "checkpoints"
    found = sorted(path.name for path in folder.glob("step_*") if (path / "manifest.json").is_file())
    if not found or (step is not None and step not in found):
        there = f"the checkpoints there are {', '.join(found)}" if found else "there is none"
        raise ConfigError(f"model.source: {config.model.source!r}: expected a checkpoint in {folder}; {there}")
    return str(folder / (step or found[-1]))


def build_policy(config: RunConfig, base: str | None = None) -> Policy:
    """The policy to be trained, as [model] and [training.lora] say; a tiny model's weights derive from run.seed.

    `base` is loaded in place of the model that the config names: a checkpoint to go on from.

    Raises:
        ConfigError: this version, this machine or this model cannot do what the config asks for.
    """
    refuse_to_train(config.sections)
    model, device = config.model, device_of(config)
    check_options(device=device, torch_compile=model.torch_compile, liger_kernels=model.liger_kernels)
    seed = child_seed(config.run.seed, "model")
    policy = load_policy(
        base or model_name(config),
        dtype=model.dtype,
        device=device,
        seed=seed,
        quantization=model.quantization if model.trainer_mode == "qlora" else "as_saved",
    )
    if is_quantized(policy.model) and model.trainer_mode != "qlora":
        raise ConfigError(
            f'model.trainer_mode: {policy.base} was trained on quantized weights; set it to "qlora" to go on with it, '
            f"got {model.trainer_mode!r}"
        )
    if config.training.lora is not None:
        policy = adapt_policy(policy, config.training.lora, seed)
    elif is_adapter(policy.model):
        raise ConfigError(
            f'model.base: {policy.base} is a LoRA adapter, which model.trainer_mode = "full" cannot train; '
            'set it to "lora" to go on with the adapter'
        )
    prepare_for_training(
        policy.model,
        gradient_checkpointing=model.gradient_checkpointing,
        torch_compile=model.torch_compile,
        liger_kernels=model.liger_kernels,
    )
    return policy


def device_of(config: RunConfig) -> str:
    """The torch device that model.device and [compute] name.

    Raises:
        ConfigError: a GPU is asked for on a machine without, or one of another type.
    """
    compute, wanted = config.compute, config.model.device
    if wanted == "auto" and compute is not None:
        wanted = "cpu" if compute.gpu_count == 0 else "cuda"
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        key = "model.device" if config.model.device == "cuda" else "compute.gpu_count"
        raise ConfigError(f"{key}: expected a CUDA device, and torch sees none here; use the processor (cpu, or 0)")
    if wanted == "cuda" and compute is not None and compute.gpu_type is not None:
        require_gpu_type(compute.gpu_type, torch.cuda.get_device_name())
    return wanted


def require_gpu_type(gpu_type: str, device_name: str) -> None:
    """Refuse another device than the one that compute.gpu_type names, such as "H100" for "NVIDIA H100 80GB HBM3".

    Raises:
        ConfigError: it is another one.
    """
    if gpu_type.lower() not in device_name.lower():
        raise ConfigError(f"compute.gpu_type: expected {gpu_type!r}, but the device here is {device_name!r}")


async def build_player(config: RunConfig, policy: Policy) -> Player:
    """An engine with the policy's weights, as [rollout] says; whoever asked for it closes the engine.

    Raises:
        ConfigError: this version, this machine or this model cannot do what the config asks for.
        MissingExtraError, EngineError: see `build_engine`.
    """
    refuse_to_run(config.sections)
    return Player(policy, await build_engine(config, policy), build_renderers(config, policy.tokenizer))


def build_renderers(config: RunConfig, tokenizer: Any) -> RendererCache:
    """How messages become tokens, as [rollout.policy_config] says (Any: transformers is untyped)."""
    asked = config.rollout.policy_config
    return RendererCache(
        tokenizer,
        template_kwargs=None if asked is None else asked.chat_template_kwargs,
        system_prompt=None if asked is None else asked.system_prompt,
    )


def build_actor(config: RunConfig, player: Player, *, temperature: float) -> EngineActor:
    """Who samples from the player's weights as [rollout] says, but for the temperature."""
    return EngineActor(
        player.engine,
        temperature=temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        repetition_penalty=config.rollout.repetition_penalty,
        min_tokens=config.rollout.min_output_tokens,
    )


def build_environment(config: RunConfig) -> IsolatedFactory:
    """Makes fresh environments of [rollout], each where it is to run: in a thread or a worker process.

    Raises:
        UnknownNameError: no environment of that name.
    """
    rollout = config.rollout
    return isolated_factory(
        rollout.env_name,
        rollout.env_config,
        rollout.isolation,
        limits=WorkerLimits(memory_mb=rollout.env_memory_limit_mb, variables=rollout.env_variables),
        start_timeout_seconds=config.limits.step_timeout_seconds,
    )


def build_pool(
    config: RunConfig,
    renderers: RendererCache,
    act: Actor,
    *,
    seed_name: str,
    limits: EpisodeLimits | None = None,
    ledger: Ledger | None = None,
    on_episode: OnEpisode | None = None,
) -> RolloutPool:
    """A pool of the configured environment; `seed_name` keeps its sampling seeds apart from other pools'.

    `limits` are `config.episode_limits` if None.
    """
    make_env = build_environment(config)
    return RolloutPool(
        make_env=lambda _task: make_env(),
        act=act,
        renderers=renderers,
        episode_limits=limits or config.episode_limits,
        pool_limits=config.pool_limits,
        run_seed=child_seed(config.run.seed, seed_name),
        ledger=ledger,
        on_episode=on_episode,
    )


Keep = Callable[[str, list[Trajectory]], None]  # receives an evaluation's label and its episodes


def build_evaluate(config: RunConfig, player: Player, keep: Keep | None = None) -> Evaluate:
    """Evaluates the player's present weights on the configured seeds; every call samples with the same seeds."""
    return _evaluation_of(config, player.renderers, build_evaluation_actor(config, player), keep)


def build_evaluation_actor(config: RunConfig, player: Player) -> EngineActor:
    """The player of evaluations, who may be greedier than that of rollouts."""
    return build_actor(config, player, temperature=config.evaluation.temperature)


async def build_scripted_evaluate(config: RunConfig, renderers: RendererCache, policy: str | PolicyFactory) -> Evaluate:
    """Evaluates, in the model's place, a policy that the environment brings along under that name, or any other.

    Raises:
        UnknownNameError: it brings none of that name.
    """
    make_policy = await _scripted_policy(config, policy) if isinstance(policy, str) else policy
    return _evaluation_of(config, renderers, ScriptedActor(make_policy), None)


async def _scripted_policy(config: RunConfig, name: str) -> PolicyFactory:
    async with looking_at(build_environment(config)) as env:
        return policy_of(env, name)


def _evaluation_of(config: RunConfig, renderers: RendererCache, act: Actor, keep: Keep | None) -> Evaluate:
    async def run(label: str) -> Evaluation:
        episodes: list[Trajectory] = []
        pool = build_pool(
            config,
            renderers,
            act,
            seed_name="evaluation",
            on_episode=lambda trajectory, what: episodes.append(trajectory) if what is Disposition.KEPT else None,
        )
        evaluation = await evaluate(pool, resolve(config.rollout.env_name), config.evaluation_seeds, label=label)
        if keep is not None:
            keep(label, sorted(episodes, key=lambda trajectory: trajectory.task.seed))
        return evaluation

    return run


def build_learner(config: RunConfig, policy: Policy, reference: ReferencePolicy | None = None) -> Learner:
    """The learner of [loss], [advantages], [rewards], [correction], [reference], [optimizer] and [training].

    `reference` is one that is served; None: it is in this process, if anything compares with it.
    """
    rollout = config.rollout
    return Learner(
        policy.model,
        optimizer=config.optimizer_settings,
        loss=config.loss,
        update=config.update_settings,
        advantages=config.advantages,
        rewards=config.rewards,
        correction=config.correction,
        reference=config.reference_settings,
        temperature=rollout.temperature,
        truncation=Truncation(top_k=rollout.top_k, top_p=rollout.top_p, min_p=rollout.min_p),
        total_steps=config.num_optimizer_steps,
        seed=child_seed(config.run.seed, "learner"),
        reference_policy=reference,
    )


async def build_warmup(config: RunConfig, player: Player) -> tuple[RolloutPool, WarmupPlan] | None:
    """The pool that plays demonstrations and what to do with them; None without a [warmup] section.

    Raises:
        UnknownNameError: the environment brings no scripted policy of that name.
    """
    warmup, settings, optimizer = config.warmup, config.warmup_settings, config.warmup_optimizer_settings
    if warmup is None or settings is None or optimizer is None:
        return None
    env_id = resolve(config.rollout.env_name)
    make_policy = await _scripted_policy(config, warmup.policy)
    pool = build_pool(config, player.renderers, ScriptedActor(make_policy), seed_name="warmup")
    return pool, WarmupPlan(env_id, config.run.seed, warmup.num_episodes, optimizer, settings)


def build_plan(config: RunConfig) -> TrainPlan:
    """The steps of the run."""
    return TrainPlan(
        env_id=resolve(config.rollout.env_name),
        run_seed=config.run.seed,
        num_steps=config.num_iterations,
        groups_per_batch=config.groups_per_batch,
        group_size=config.training.group_size,
        advantages=config.advantages,
        evaluate_every=config.evaluation.every_n_iters,
        checkpoint_every=config.training.checkpoint_every_n_iters,
        log_every=config.training.log_interval,
        stop_at_success_rate=config.training.stop_at_success_rate,
        rewards=config.rewards,
        step_rewards=config.step_reward_settings,
        constant_groups=config.training.constant_groups,
        max_refill_rounds=config.training.max_refill_rounds,
        log_episodes_every_n_iters=config.run.log_episodes_every_n_iters,
        max_staleness=config.training.max_staleness,
        weight_sync_interval=config.training.weight_sync_interval,
    )


def build_training_pool(config: RunConfig, player: Player, ledger: Ledger | None = None) -> RolloutPool:
    """The pool that plays the episodes to be learned from."""
    act = build_actor(config, player, temperature=config.rollout.temperature)
    limits = config.training_limits
    return build_pool(config, player.renderers, act, seed_name="rollout", limits=limits, ledger=ledger)


def build_sinks(config: RunConfig, *, resume_step: int | None = None) -> list[Sink]:
    """Where [tracking] sends metrics besides the run's folder.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigError: W&B refuses.
    """
    tracking = config.tracking
    return open_sinks(
        tracking.report_to,
        folder=config.run_folder,
        project=tracking.wandb_project,
        tags=tracking.wandb_tags,
        run_name=tracking.run_name or config.model.label,
        config=config.model_dump(mode="json"),
        resume_step=resume_step,
    )


def build_trainer(
    config: RunConfig,
    player: Player,
    *,
    learner: Learner,
    recorder: RunRecorder,
    checkpoints: CheckpointStore,
    progress: Progress,
    state: TrainState,
    weight_sync: WeightSync,
) -> Trainer:
    """Everything joined; `learner` and `state` are as fresh or as restored as the caller made them.

    Raises:
        ConfigError: samples are to have a bounded age, and the engine does not say which weights sampled them.
    """
    engine = player.engine
    if config.training.max_staleness > 0 and not engine.capabilities.reports_versions:
        raise ConfigError(
            f"training.max_staleness: expected 0 with an engine that does not report weight versions, got "
            f"{config.training.max_staleness}"
        )

    def save_checkpoint(state: TrainState) -> None:
        folder = checkpoints.save(state.step, policy=player.policy, learner=learner, trainer_state=state.to_dict())
        recorder.event("checkpoint", state.step, {"folder": folder.name})

    return Trainer(
        build_plan(config),
        pool=build_training_pool(config, player, Ledger(recorder.folder / "ledger.jsonl")),
        publish=weight_sync.after_step,
        learner=learner,
        evaluate=build_evaluate(config, player, recorder.episodes),
        save_checkpoint=save_checkpoint,
        recorder=recorder,
        progress=progress,
        state=state,
        weight_version=lambda: engine.weight_version,
        is_committed=weight_sync.is_committed if engine.capabilities.reports_versions else None,
        alarm=build_alarm(config),
    )

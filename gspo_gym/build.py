"""A config becomes live objects: the only place where names become classes.

Called by the commands and by anyone who trains from Python. Nothing here decides anything that the config does not say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gspo_gym.checkpoints import CheckpointStore
from gspo_gym.config import RunConfig
from gspo_gym.engine.local import LocalEngine
from gspo_gym.env.registry import make, resolve
from gspo_gym.errors import ConfigError
from gspo_gym.evaluation import Evaluation, evaluate
from gspo_gym.learning.update import Learner
from gspo_gym.models import Policy, add_lora, is_adapter, load_policy
from gspo_gym.recording import RunRecorder
from gspo_gym.report.progress import Progress
from gspo_gym.rollout.actors import Actor, EngineActor, ScriptedActor, policy_of
from gspo_gym.rollout.episode import RendererCache
from gspo_gym.rollout.ledger import Disposition, Ledger
from gspo_gym.rollout.pool import OnEpisode, RolloutPool
from gspo_gym.seeding import child_seed
from gspo_gym.trainer import Evaluate, Trainer, TrainPlan, TrainState
from gspo_gym.types import Trajectory
from gspo_gym.warmup import WarmupPlan


@dataclass(frozen=True, slots=True)
class Player:
    """A policy that can play: its engine and its pool for evaluation, which share the weights."""

    policy: Policy
    engine: LocalEngine
    renderers: RendererCache


def build_policy(config: RunConfig) -> Policy:
    """The policy to be trained, as [model] and [training.lora] say; a tiny model's weights derive from run.seed."""
    seed = child_seed(config.run.seed, "model")
    policy = load_policy(config.model.base, dtype=config.model.dtype, device=device_of(config), seed=seed)
    if config.training.lora is None:
        if is_adapter(policy.model):
            raise ConfigError(
                f'model.base: {config.model.base} is a LoRA adapter, which model.trainer_mode = "full" cannot train; '
                'set it to "lora" to go on with the adapter'
            )
        return policy
    if is_adapter(policy.model):  # its own shape is in its files; a second adapter on top is never what was meant
        return policy
    model = add_lora(policy.model, config.training.lora, seed)
    return Policy(model=model, tokenizer=policy.tokenizer, base=policy.base)


def device_of(config: RunConfig) -> str:
    """The torch device that model.device names.

    Raises:
        ConfigError: "cuda" on a machine without.
    """
    if config.model.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('model.device: expected a CUDA device, and torch sees none here; use "auto" or "cpu"')
    return config.model.device


def build_player(config: RunConfig, policy: Policy) -> Player:
    """An engine on the policy's own weights.

    Raises:
        ConfigError: rollout.max_model_len is more than the model can read.
    """
    longest = getattr(policy.model.config, "max_position_embeddings", None)
    if longest is not None and config.rollout.max_model_len > longest:
        raise ConfigError(
            f"rollout.max_model_len: {config.model.base} reads at most {longest} tokens, got "
            f"{config.rollout.max_model_len}"
        )
    engine = LocalEngine(
        policy.model,
        max_model_len=config.rollout.max_model_len,
        max_batch_size=config.rollout.max_concurrent_rollouts,
    )
    return Player(policy, engine, RendererCache(policy.tokenizer))


def build_pool(
    config: RunConfig,
    renderers: RendererCache,
    act: Actor,
    *,
    seed_name: str,
    ledger: Ledger | None = None,
    on_episode: OnEpisode | None = None,
) -> RolloutPool:
    """A pool of the configured environment and limits; `seed_name` keeps its sampling seeds apart from other pools'."""
    env_id = resolve(config.rollout.env_name)
    env_config = dict(config.rollout.env_config)
    return RolloutPool(
        make_env=lambda _task: make(env_id, **env_config),
        act=act,
        renderers=renderers,
        episode_limits=config.episode_limits,
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
    return EngineActor(player.engine, temperature=config.evaluation.temperature)


def build_scripted_evaluate(config: RunConfig, player: Player, policy_name: str) -> Evaluate:
    """Evaluates a policy that the environment brings along, in the model's place.

    Raises:
        UnknownNameError: it brings none of that name.
    """
    env = make(resolve(config.rollout.env_name), **config.rollout.env_config)
    return _evaluation_of(config, player.renderers, ScriptedActor(policy_of(env, policy_name)), None)


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


def build_learner(config: RunConfig, policy: Policy) -> Learner:
    """The learner of [loss], [optimizer] and [training]."""
    return Learner(
        policy.model,
        optimizer=config.optimizer_settings,
        loss=config.loss,
        update=config.update_settings,
        temperature=config.rollout.temperature,
        total_steps=config.num_optimizer_steps,
        seed=child_seed(config.run.seed, "learner"),
    )


def build_warmup(config: RunConfig, player: Player) -> tuple[RolloutPool, WarmupPlan] | None:
    """The pool that plays demonstrations and what to do with them; None without a [warmup] section.

    Raises:
        UnknownNameError: the environment brings no scripted policy of that name.
    """
    warmup, settings, optimizer = config.warmup, config.warmup_settings, config.warmup_optimizer_settings
    if warmup is None or settings is None or optimizer is None:
        return None
    env_id = resolve(config.rollout.env_name)
    make_policy = policy_of(make(env_id, **config.rollout.env_config), warmup.policy)
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
) -> Trainer:
    """Everything joined; `learner` and `state` are as fresh or as restored as the caller made them."""

    def save_checkpoint(state: TrainState) -> None:
        folder = checkpoints.save(state.step, policy=player.policy, learner=learner, trainer_state=state.to_dict())
        recorder.event("checkpoint", state.step, {"folder": folder.name})

    act = EngineActor(player.engine, temperature=config.rollout.temperature)
    ledger = Ledger(recorder.folder / "ledger.jsonl")
    return Trainer(
        build_plan(config),
        pool=build_pool(config, player.renderers, act, seed_name="rollout", ledger=ledger),
        engine=player.engine,
        learner=learner,
        evaluate=build_evaluate(config, player, recorder.episodes),
        save_checkpoint=save_checkpoint,
        recorder=recorder,
        progress=progress,
        state=state,
    )

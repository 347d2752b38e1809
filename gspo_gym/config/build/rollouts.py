"""Build the players of episodes: the engine's player, task apps, pools, demonstrations and evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from gspo_gym.base.loops import Compute, in_another_thread
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.cluster.actors import Cluster
from gspo_gym.config.build.apps import check_gateway, environment_ids
from gspo_gym.config.build.conversations import build_renderers, use_template
from gspo_gym.config.build.engines import build_endpoint, build_engine
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.sections import TaskSource
from gspo_gym.config.services import refuse_to_run
from gspo_gym.engine.base import Engine
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import looking_at
from gspo_gym.env.watchdog import MARKER, read_frozen
from gspo_gym.env.workers.isolation import IsolatedFactory, isolated_factory
from gspo_gym.env.workers.limits import WorkerLimits
from gspo_gym.errors import ConfigError, GymError, TemplateError, UnknownNameError
from gspo_gym.learning.settings import UpdateSettings
from gspo_gym.policy.load import Policy
from gspo_gym.rollout.actors import Actor, EngineActor, ScriptedActor, policy_of
from gspo_gym.rollout.episode import PlayEpisode, episode_player
from gspo_gym.rollout.evaluation import Evaluation, KeptRows, PlayedRow, evaluate, join
from gspo_gym.rollout.ledger import Disposition, Ledger
from gspo_gym.rollout.limits import EpisodeLimits, GroupScoring, PoolLimits, Scoring
from gspo_gym.rollout.pool import OnEpisode, RolloutPool, member_of
from gspo_gym.rollout.summary import play_by_environment
from gspo_gym.run.collect import WarmupPlan
from gspo_gym.run.judging import Judging
from gspo_gym.run.trainer import Evaluate
from gspo_gym.seeding import child_seed
from gspo_gym.types import Message, ToolCall, Trajectory

if TYPE_CHECKING:
    from gspo_gym.config.build.app_players import AppPlayers


@dataclass(frozen=True, slots=True)
class Player:
    """Policy that can play: its engine, and the task apps that ask it. Start it before it plays, and close it.

    `endpoint` plays the training episodes in the engine's place, with other weights; None: the engine does. `compute`
    runs the learner's work.
    """

    policy: Policy
    engine: Engine
    renderers: RendererCache
    apps: AppPlayers | None = None
    endpoint: Engine | None = None
    compute: Compute = in_another_thread

    @property
    def sampler(self) -> Engine:
        """Return the engine that plays the training episodes."""
        return self.engine if self.endpoint is None else self.endpoint

    async def start(self) -> tuple[str, ...]:
        """Check that the task apps can be used, and open the gateway; return a line about each of them.

        Raises:
            ConfigError: one cannot be used; see `AppPlayers.start`.
        """
        return () if self.apps is None else await self.apps.start()

    async def probe_apps(self) -> tuple[str, ...]:
        """Play one or two rollouts of every task app as in training; return lines about them.

        Raises:
            ConfigError: an app's episodes cannot be trained on; see `AppPlayers.probe`.
        """
        return () if self.apps is None else await self.apps.probe()

    async def close(self) -> None:
        """Close the gateway, then the engines; closing twice is fine."""
        # The apps first: their agents still call the engines.
        if self.apps is not None:
            await self.apps.close()
        if self.endpoint is not None:
            await self.endpoint.close()
        await self.engine.close()


async def build_player(config: RunConfig, policy: Policy, cluster: Cluster | None = None) -> Player:
    """Return a player with the policy's weights in the engine of [rollout]; the caller starts and closes it.

    The policy's tokenizer is given the template of model.chat_template. `cluster`: see `build_engine`.

    Raises:
        ConfigError: this version, this machine or this model cannot do what the config asks for.
        MissingExtraError, EngineError: see `build_engine`.
    """
    refuse_to_run(config.sections)
    use_template(config, policy.tokenizer)
    engine = await build_engine(config, policy, cluster)
    # The gateway's packages are of an extra, so runs without apps do not import them.
    has_apps = any(source.task_url is not None for source in config.sources)
    apps = _app_players(config, engine, policy) if has_apps else None
    return Player(policy, engine, build_renderers(config, policy.tokenizer), apps)


def _app_players(config: RunConfig, engine: Engine, policy: Policy) -> AppPlayers:
    check_gateway()
    from gspo_gym.config.build.app_players import AppPlayers

    return AppPlayers(config, engine, policy.tokenizer)


async def build_training_player(config: RunConfig, policy: Policy, cluster: Cluster | None = None) -> Player:
    """Return the player of `build_player`; with rollout.rescore an endpoint plays the training episodes.

    Raises:
        ConfigError, MissingExtraError, EngineError: see `build_engine`.
    """
    player = await build_player(config, policy, cluster)
    if not config.rollout.rescore:
        return player
    try:
        return replace(player, endpoint=await build_endpoint(config, policy))
    except BaseException:
        await player.close()  # its gateway or its processes would stay behind
        raise


def build_environment(config: RunConfig, source: TaskSource | None = None) -> IsolatedFactory:
    """Return a factory of a source's environments, each in a thread or a worker process.

    `source` is one of `config.sources`; None: the main one. An environment that held the interpreter in an earlier
    start of this run (`watchdog.py`) runs in worker processes, even against the configuration.

    Raises:
        UnknownNameError: no environment of that name.
    """
    # The marker of a frozen interpreter counts for this run only: the folder is the run's.
    rollout, source = config.rollout, source or config.sources[0]
    has_frozen = resolve(source.env_name) in read_frozen(config.run_folder / MARKER).env_ids
    return isolated_factory(
        source.env_name,
        source.env_config,
        "process" if has_frozen else rollout.isolation,
        limits=WorkerLimits(memory_mb=rollout.env_memory_limit_mb, variables=rollout.env_variables),
        start_timeout_seconds=config.limits.step_timeout_seconds,
    )


async def environment_notes(config: RunConfig, renderers: RendererCache) -> tuple[str, ...]:
    """Return lines about the environments here: what confines the model's code, and where it reads of its tools.

    Raises:
        EnvError: an environment cannot be made, for example because nothing confines such code here.
        TemplateError: the template cannot show an environment's tools.
    """
    notes = []
    # Both are known only to a live environment.
    for source in config.sources:
        if source.task_url is not None:
            continue
        async with looking_at(factory := build_environment(config, source), source.env_name) as env:
            if factory.runs_code:
                notes.append(f"{source.env_name}: code that the model wrote is {env.confinement}")
            notice = renderers.for_tools(tools_of(env)).notice
            notes += [] if notice is None else [f"{source.env_name}: {notice}"]
    return tuple(notes)


def local_play(
    config: RunConfig,
    renderers: RendererCache,
    act: Actor,
    *,
    source: TaskSource | None = None,
    limits: EpisodeLimits | None = None,
) -> PlayEpisode:
    """Return the player of one source's environments here.

    `source` None means the main one, `limits` None `config.episode_limits`.
    """
    make_env = build_environment(config, source)
    return episode_player(
        make_env=lambda _task: make_env(), act=act, renderers=renderers, limits=limits or config.episode_limits
    )


def build_play(config: RunConfig, player: Player, *, mode: Literal["rl", "eval"]) -> PlayEpisode:
    """Return the player of all sources: as in training ("rl"), or as in an evaluation, with the player's weights."""
    is_training = mode == "rl"
    sampling = config.rollout.sampling if is_training else config.evaluation_sampling
    limits = config.training_limits if is_training else config.episode_limits
    act = EngineActor(player.sampler if is_training else player.engine, sampling)

    def play_of(source: TaskSource) -> PlayEpisode:
        if source.task_url is None:
            return local_play(config, player.renderers, act, source=source, limits=limits)
        assert player.apps is not None  # such a source made them
        return player.apps.player_of(source, sampling=sampling, limits=limits, mode=mode)

    names = environment_ids(config)
    return play_by_environment({name: play_of(source) for name, source in zip(names, config.sources, strict=True)})


def build_pool(
    config: RunConfig,
    play: PlayEpisode,
    *,
    seed_name: str,
    ledger: Ledger | None = None,
    on_episode: OnEpisode | None = None,
    scoring: Scoring | GroupScoring | None = None,
) -> RolloutPool:
    """Return a pool of episodes; `seed_name` keeps its sampling seeds apart from other pools'.

    `scoring` gives the episodes their rewards; None: their environments do.
    """
    return RolloutPool(
        play=play,
        pool_limits=PoolLimits.of(config.rollout, config.limits),
        run_seed=child_seed(config.run.seed, seed_name),
        ledger=ledger,
        on_episode=on_episode,
        scoring=scoring,
    )


def build_training_pool(
    config: RunConfig,
    player: Player,
    ledger: Ledger | None = None,
    judging: Judging | None = None,
    on_episode: OnEpisode | None = None,
) -> RolloutPool:
    """Return the pool that plays the training episodes."""
    scoring = None if judging is None else judging.for_training
    play = build_play(config, player, mode="rl")
    return build_pool(config, play, seed_name="rollout", ledger=ledger, on_episode=on_episode, scoring=scoring)


Keep = Callable[[str, list[Trajectory]], None]  # receives an evaluation's label and its episodes


def build_evaluate(
    config: RunConfig,
    player: Player,
    keep: Keep | None = None,
    judging: Judging | None = None,
    *,
    rows: KeptRows | None = None,
    on_over: Callable[[], None] = lambda: None,
) -> Evaluate:
    """Return a function that evaluates the player's present weights on the configured seeds.

    Every call samples with the same seeds. `rows` holds rows that were played before and receives new ones: for one
    call only. `on_over` is called when an episode is over, also for one that failed.
    """
    play = build_play(config, player, mode="eval")
    return _evaluation_of(config, play, keep=keep, judging=judging, rows=rows, on_over=on_over)


async def build_scripted_evaluate(
    config: RunConfig,
    renderers: RendererCache,
    policy: str | PolicyFactory,
    judging: Judging | None = None,
    *,
    rows: KeptRows | None = None,
) -> Evaluate:
    """Return a function that evaluates a scripted policy: one of the environment's by name, or any other.

    `rows` as in `build_evaluate`.

    Raises:
        UnknownNameError: the environment has no policy of that name.
        ConfigError: a task app plays a part of the episodes.
    """
    players = {}
    # Refused for all before one episode is played.
    for name, source in zip(environment_ids(config), config.sources, strict=True):
        if source.task_url is not None:
            raise ConfigError(
                f"{source.url_key}: a task app asks the model that is trained, and nobody else; evaluate a checkpoint, "
                "or leave the app out to play in this process"
            )
        make_policy = await _scripted_policy(config, source, policy) if isinstance(policy, str) else policy
        players[name] = local_play(config, renderers, ScriptedActor(make_policy), source=source)
    return _evaluation_of(config, play_by_environment(players), judging=judging, rows=rows)


@contextlib.asynccontextmanager
async def looking_at_source(config: RunConfig, source: TaskSource) -> AsyncIterator[Any]:
    """Make one environment of a source (Any: authors need not subclass anything) to read from; close it afterwards.

    Raises:
        GymError: it cannot be made or closed; a ConfigError if its constructor raised.
    """
    # `looking_at` closes it, also where the caller raises.
    async with contextlib.AsyncExitStack() as stack:
        try:
            env = await stack.enter_async_context(looking_at(build_environment(config, source), source.env_name))
        except GymError:
            raise
        except Exception as error:  # an author's constructor may raise anything
            raise ConfigError(
                f"{source.key}.env_config: {source.env_name} cannot be made with {dict(source.env_config)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        yield env


async def _scripted_policy(config: RunConfig, source: TaskSource, name: str) -> PolicyFactory:
    async with looking_at_source(config, source) as env:
        return policy_of(env, name)


def _evaluation_of(
    config: RunConfig,
    play: PlayEpisode,
    *,
    keep: Keep | None = None,
    judging: Judging | None = None,
    rows: KeptRows | None = None,
    on_over: Callable[[], None] = lambda: None,
) -> Evaluate:
    kept_rows = rows or KeptRows()

    async def run(label: str) -> Evaluation:
        episodes: list[Trajectory] = []
        env_returns: dict[str, float | None] = {}

        def over(trajectory: Trajectory, disposition: Disposition) -> None:
            if disposition is not Disposition.RETRIED:
                on_over()
            if disposition is not Disposition.KEPT:
                return
            episodes.append(trajectory)
            env_return = None if judging is None else judging.env_return(trajectory)  # it is given once
            env_returns[trajectory.trajectory_id] = env_return
            kept_rows.add(PlayedRow.of(trajectory, env_return), trajectory)

        pool = build_pool(
            config,
            play,
            seed_name="evaluation",
            on_episode=over,
            scoring=None if judging is None else judging.for_evaluation,
        )
        names = environment_ids(config)
        results = [
            await evaluate(
                pool,
                name,
                config.evaluation_seeds,
                samples_per_task=config.evaluation.samples_per_task,
                label=label,
                env_return_of=lambda episode: env_returns[episode.trajectory_id],
                found=kept_rows.found,
            )
            for name in names
        ]
        # Episodes end in any order; files of two evaluations should be comparable line by line.
        if keep is not None:
            order = {name: number for number, name in enumerate(names)}
            keep(label, sorted(episodes, key=lambda t: (order[t.task.env_id], t.task.seed, member_of(t.trajectory_id))))
        return join(results)

    return run


async def check_warmup(config: RunConfig) -> tuple[str, PolicyFactory] | None:
    """Return the environment's id and the player of demonstrations; None without a [warmup] section.

    Raises:
        UnknownNameError: the environment has no scripted policy of that name.
        ConfigError: there is no such environment here.
    """
    if config.warmup is None:
        return None
    # The app's name of the environment may be one that is registered here, too.
    try:
        env_id = resolve(config.rollout.env_name)
    except UnknownNameError as error:
        if config.sources[0].task_url is None:
            raise
        raise ConfigError(
            f"warmup: demonstrations are played in this process, not by the task app, and {error}. Remove [warmup], or "
            "install the package that registers the environment"
        ) from error
    return env_id, await _scripted_policy(config, config.sources[0], config.warmup.policy)


async def build_warmup(
    config: RunConfig, player: Player, on_over: Callable[[], None] = lambda: None
) -> tuple[RolloutPool, WarmupPlan] | None:
    """Return the pool that plays demonstrations and the plan of the warm-up; None without a [warmup] section.

    Demonstrations are of the main environment, and are played here even if a task app plays the episodes. `on_over` is
    called at the end of each.

    Raises:
        UnknownNameError: the environment has no scripted policy of that name.
        ConfigError: there is no such environment here, or the chat template cannot say what a demonstration says.
    """
    played_by = await check_warmup(config)
    if played_by is None or config.warmup is None:
        return None
    env_id, make_policy = played_by
    await _require_sayable(config, player.renderers)

    def on_episode(_: Trajectory, disposition: Disposition) -> None:
        if disposition is not Disposition.RETRIED:
            on_over()

    play = local_play(config, player.renderers, ScriptedActor(make_policy))
    pool = build_pool(config, play, seed_name="warmup", on_episode=on_episode)
    update = UpdateSettings.of(config.training)
    return pool, WarmupPlan(env_id, config.run.seed, config.warmup, config.optimizer, update)


def tools_of(env: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a live environment (Any: authors need not subclass anything), as `EnvSession` reads them."""
    return tuple(getattr(getattr(env, "unwrapped", env), "tool_schemas", ()))


async def _require_sayable(config: RunConfig, renderers: RendererCache) -> None:
    """Refuse demonstrations, before one is played, if the template cannot say an answer (a call if there are tools).

    Raises:
        ConfigError: says why not. TemplateError: what the template writes cannot be read back.
    """
    async with looking_at_source(config, config.sources[0]) as env:
        schemas = tools_of(env)
    renderer = renderers.for_tools(schemas)  # refuses a template that cannot be read, with or without a warm-up
    call = tuple(ToolCall("call_0", schema["function"]["name"], {"key": "value"}) for schema in schemas[:1])
    try:
        renderer.action_ids(Message("assistant", "" if call else "Seven.", call))
    except TemplateError as error:
        raise ConfigError(
            f"warmup.policy: this model cannot say what the demonstrations do: {error}. Remove [warmup], or give "
            "another template (model.chat_template)"
        ) from error

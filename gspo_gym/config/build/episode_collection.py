"""Collect a data set of episodes from any policy: hand-written, a model here, or an endpoint.

The same pool as in training plays them, so deadlines, retries and isolation are the same. Collected episodes are
imitated, analysed or judged, never reinforced: only an engine's own logprobs could be, and they are stored with the
weights' version that sampled them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspo_gym.base.loops import run_to_end
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.config.build.threads import compute_in, computing_elsewhere
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.env.chat_model import ChatModel, ChatModelSettings
from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import looking_at
from gspo_gym.env.watchdog import marker_beside, read_frozen, seconds_until_frozen, watching
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import ConfigError, RolloutError
from gspo_gym.policy.load import load_policy, load_tokenizer
from gspo_gym.rollout.actors import Actor, EngineActor, ScriptedActor, policy_of
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.ledger import Disposition
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool, require_episodes
from gspo_gym.types import DroppedEpisode, Message, Sampling, Task, Trajectory, TrajectoryGroup

SCRIPTED, ENDPOINT = "scripted:", "openai:"
_NOTED = "The collection is ended. What is over is kept: go on with --resume, which runs {env} in worker processes."
_NOT_NOTED = 'The collection is ended. CollectSettings(isolation="process") runs {env} in worker processes.'
_TEXT_TOKENIZER = "tiny:qwen3-64"  # for players without one: bytes, so it can say anything


@dataclass(frozen=True, slots=True)
class CollectSettings:
    """Settings of a collection.

    Attributes:
        episodes_per_seed: of each task, at least 1.
        max_turns, max_output_tokens, max_model_len: see `EpisodeLimits`; max_model_len None: the most that the model
            reads, or no limit for a player without a context.
        max_concurrent: episodes in flight at once. max_attempts: tries per episode that fails.
        step_timeout_seconds: for each construction, reset, step and close of an environment.
        temperature: of sampling, by a model or an endpoint.
        isolation: "auto", "thread" or "process": see `TextEnv.isolation`.
        run_seed: all sampling derives from it.
    """

    episodes_per_seed: int = 1
    max_turns: int = 50
    max_output_tokens: int = 1024
    max_model_len: int | None = None
    max_concurrent: int = 16
    max_attempts: int = 3
    step_timeout_seconds: float = 30.0
    temperature: float = 1.0
    isolation: str = "auto"
    run_seed: int = 0

    def __post_init__(self) -> None:
        if self.episodes_per_seed < 1:
            raise ConfigError(f"collect: expected at least 1 episode a seed, got {self.episodes_per_seed}")


@dataclass(frozen=True, slots=True)
class CollectedEpisodes:
    """Result of a collection: a trajectory for each requested episode, or the reason why it is missing.

    `tools` are the function schemas that the player was offered (Any: JSON).
    """

    env_id: str
    policy_name: str
    trajectories: tuple[Trajectory, ...]
    dropped: tuple[DroppedEpisode, ...]
    tools: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Player:
    act: Actor
    tokenizer: Any  # transformers is untyped
    longest: int


def collect_episodes(
    env_id: str,
    policy: str | PolicyFactory,
    *,
    seeds: Sequence[int],
    env_config: Mapping[str, Any] | None = None,
    settings: CollectSettings | None = None,
    already: Sequence[Trajectory] = (),
    on_episode: Callable[[Trajectory], None] | None = None,
    out: Path | None = None,
) -> CollectedEpisodes:
    """Play the tasks of some seeds; retry episodes that fail through no fault of the player.

    An environment that holds the interpreter ends this process (`watchdog.py`).

    Args:
        env_id: a registered environment.
        policy: "scripted:NAME" of the environment, "openai:MODEL" or "openai:MODEL@BASE_URL" behind an
            OpenAI-compatible endpoint, any model that `load_policy` takes, or a function (env, rng) -> player.
        seeds: of the tasks.
        env_config: arguments of the environment's constructor.
        settings: the rest; None: all defaults.
        already: episodes of these seeds that an earlier call gave to `on_episode`; they are not played again.
        on_episode: receives each episode when it is over, in no order; must be quick.
        out: the file for the episodes. A note beside it names an environment that held the interpreter, to run it in
            worker processes the next time; None: no note.

    Raises:
        UnknownNameError: no such environment, policy or model.
        RolloutError: not one episode could be played; says why.
    """
    settings = settings or CollectSettings()
    if not seeds:
        raise ConfigError("collect: expected at least one seed, got none")
    env_id = resolve(env_id)
    # A frozen interpreter cannot be left from within: the environment goes into a process the next time.
    marker = None if out is None else marker_beside(out)
    has_frozen = marker is not None and env_id in read_frozen(marker).env_ids
    isolation = "process" if has_frozen else settings.isolation
    factory = isolated_factory(env_id, dict(env_config or {}), isolation=isolation)
    known = {trajectory.trajectory_id: trajectory for trajectory in already}
    limit = seconds_until_frozen(settings.step_timeout_seconds)
    with watching(marker, limit, advice=_NOT_NOTED if out is None else _NOTED):
        collection = run_to_end(_play(env_id, factory, policy, seeds, settings, earlier=known, on_episode=on_episode))
    if marker is not None:  # nothing froze, so the next call need not isolate
        marker.unlink(missing_ok=True)
    return collection


async def _play(
    env_id: str,
    factory: Callable[[], Any],
    policy: str | PolicyFactory,
    seeds: Sequence[int],
    settings: CollectSettings,
    *,
    earlier: Mapping[str, Trajectory],
    on_episode: Callable[[Trajectory], None] | None,
) -> CollectedEpisodes:
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", "policy")
    make_policy = policy
    # One is made to be looked at: its tools for the record, and its scripted policies.
    async with looking_at(factory, env_id) as sample:
        tools = tuple(getattr(getattr(sample, "unwrapped", sample), "tool_schemas", ()))
        if isinstance(policy, str) and policy.startswith(SCRIPTED):
            make_policy = policy_of(sample, policy.removeprefix(SCRIPTED))
    async with _player(make_policy, settings) as player:
        pool = _pool(factory, player, settings, on_episode)
        requests = _requests(env_id, seeds, settings)
        missing = [episode for episode in requests if _id_of(episode) not in earlier]
        groups = await pool.play_groups(missing)
        # With earlier episodes, a continued command that plays none more is no failure.
        if not earlier:
            _require_episodes(name, groups)
    trajectories = {**earlier} | {episode.trajectory_id: episode for group in groups for episode in group.trajectories}
    return CollectedEpisodes(
        env_id,
        name,
        tuple(trajectories[_id_of(episode)] for episode in requests if _id_of(episode) in trajectories),
        tuple(attempt for group in groups for attempt in group.dropped),
        tools,
    )


def _pool(
    factory: Callable[[], Any],
    player: _Player,
    settings: CollectSettings,
    on_episode: Callable[[Trajectory], None] | None,
) -> RolloutPool:
    def tell(trajectory: Trajectory, disposition: Disposition) -> None:
        if on_episode is not None and disposition is Disposition.KEPT:
            on_episode(trajectory)

    limits = EpisodeLimits(
        max_turns=settings.max_turns,
        max_output_tokens=settings.max_output_tokens,
        max_model_len=settings.max_model_len or player.longest,
        step_timeout_seconds=settings.step_timeout_seconds,
    )
    return RolloutPool(
        play=episode_player(
            make_env=lambda _task: factory(), act=player.act, renderers=RendererCache(player.tokenizer), limits=limits
        ),
        pool_limits=PoolLimits(
            # A group of one is whole or missing; the fraction only has to be below 1.
            max_concurrent_rollouts=settings.max_concurrent,
            max_attempts=settings.max_attempts,
            min_group_fraction=0.01,
        ),
        run_seed=settings.run_seed,
        keep_unscored=True,  # a judge may score them later
        on_episode=tell,
    )


def _requests(env_id: str, seeds: Sequence[int], settings: CollectSettings) -> list[GroupRequest]:
    # Nothing is compared within a group: a failure takes no other episode with it.
    numbers = range(settings.episodes_per_seed)
    return [GroupRequest(f"seed{seed}/{number}", Task(env_id, seed), 1) for seed in seeds for number in numbers]


def _id_of(request: GroupRequest) -> str:
    return f"{request.group_id}/0"  # of the group's only episode


def _require_episodes(name: str, groups: Sequence[TrajectoryGroup]) -> None:
    try:
        require_episodes(groups)
    except RolloutError as error:
        raise RolloutError(f"{name} on {groups[0].task.env_id}: {error}") from error


def _player(policy: str | PolicyFactory, settings: CollectSettings) -> AbstractAsyncContextManager[_Player]:
    if not isinstance(policy, str):
        return _scripted_player(policy)
    if policy.startswith(ENDPOINT):
        return _endpoint_player(
            endpoint_settings(
                policy, sampling=Sampling(temperature=settings.temperature), max_tokens=settings.max_output_tokens
            )
        )
    return _model_player(policy, settings)


def chat_policy(model: ChatModel) -> PolicyFactory:
    """Return a policy for any environment that asks a model behind an endpoint, tools included."""

    def policy(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
        tools = tuple(getattr(env, "tool_schemas", ()))

        async def player(messages: Sequence[Message]) -> Message:
            return await model.reply(messages, tools=tools, seed=int(rng.integers(2**31)))

        return player

    return policy


def endpoint_settings(name: str, *, sampling: Sampling, max_tokens: int) -> ChatModelSettings:
    """Return the settings of "openai:MODEL", or "openai:MODEL@BASE_URL" for another provider than OpenAI.

    Raises:
        ConfigError: a sampling parameter for which the chat API has no name.

    >>> endpoint_settings("openai:m@http://localhost:8000/v1", sampling=Sampling(), max_tokens=8).base_url
    'http://localhost:8000/v1'
    """
    sampling.require_only(("temperature", "top_p"), where=f"{name}: a model behind a chat route")
    model, _, url = name.removeprefix(ENDPOINT).partition("@")
    return ChatModelSettings(
        model, base_url=url or None, temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=max_tokens
    )


@asynccontextmanager
async def _scripted_player(policy: PolicyFactory) -> Any:
    yield _Player(ScriptedActor(policy), load_tokenizer(_TEXT_TOKENIZER), 1_000_000)


@asynccontextmanager
async def _endpoint_player(settings: ChatModelSettings) -> Any:
    model = ChatModel(settings)
    try:
        yield _Player(ScriptedActor(chat_policy(model)), load_tokenizer(_TEXT_TOKENIZER), 1_000_000)
    finally:
        await model.close()


@asynccontextmanager
async def _model_player(name: str, settings: CollectSettings) -> Any:
    with computing_elsewhere("cpu") as num_threads:
        policy = load_policy(name)
        longest = settings.max_model_len or int(getattr(policy.model.config, "max_position_embeddings", 32_768))
        engine = LocalEngine(policy.model, max_model_len=longest, max_batch_size=settings.max_concurrent)
        try:
            await compute_in(engine, policy.model, num_threads)
            yield _Player(EngineActor(engine, Sampling(temperature=settings.temperature)), policy.tokenizer, longest)
        finally:
            await engine.close()

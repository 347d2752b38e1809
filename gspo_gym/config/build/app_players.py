"""Players for the episodes that task apps play, and the gateway through which the apps' agents call the engine.

Needs the packages of the extra `apps`: import it only for a configuration with task apps. `AppPlayers` does nothing
before `start`: a configuration can be built without its apps running.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from gspo_gym.base.settings import is_loopback
from gspo_gym.config.build.apps import app_step_rewards, environment_ids, own_key
from gspo_gym.config.build.conversations import template_date
from gspo_gym.config.rules.judge import APP_KEYS_SAID_FOR_EACH_ROLLOUT
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.sections import GatewaySection, TaskSource
from gspo_gym.engine.base import Engine
from gspo_gym.errors import ConfigError, UsageError
from gspo_gym.remote.apps.check import NO_RETURN, ProbeReport, is_result, report_of
from gspo_gym.remote.apps.client import AppKeys, TaskAppClient, TaskAppSettings
from gspo_gym.remote.apps.contracts import AppAnswerError, AppError, AppRefusedError, AppUnauthorisedError
from gspo_gym.remote.apps.episodes import AppEpisodes, AppEpisodeSettings
from gspo_gym.remote.apps.metrics import AppMetrics, return_metrics, take_returns
from gspo_gym.remote.apps.rewards import AppRollout
from gspo_gym.remote.gateway.app import create_gateway_app
from gspo_gym.remote.gateway.session import Gateway, GatewaySessionSettings
from gspo_gym.remote.serving import LoopServer
from gspo_gym.rollout.episode import EpisodeRequest, PlayEpisode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.rollout.summary import PlayedReturns
from gspo_gym.seeding import child_seed
from gspo_gym.types import Sampling, Task, Trajectory, TrajectoryGroup

_NUM_PROBES = 2
_SESSIONS_PER_ROLLOUT = 4  # open at once: training, an evaluation beside it, and those that are just closing
_MAX_CALLS = 1000  # of one rollout: an agent that calls more is in a loop
_MODEL = "policy"  # what apps call the model; the gateway serves one
# Keys of rollout.policy_config that are said for each rollout, or are the gateway's to obey.
_OUR_KEYS = frozenset(
    # `policy_config` goes to the app as it stands, without these.
    {"chat_template_kwargs", *APP_KEYS_SAID_FOR_EACH_ROLLOUT}
)


class AppPlayers:
    """Task apps of a configuration, with the gateway that their agents call.

    Args:
        config: [services], [gateway], [rollout] and its mixture.
        engine: answers the agents. It belongs to the event loop that `start` is called in.
        tokenizer: of the model, with its chat template (Any: transformers is untyped).
    """

    def __init__(self, config: RunConfig, engine: Engine, tokenizer: Any) -> None:
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._gateway: Gateway | None = None
        self._server: LoopServer | None = None
        self._clients: dict[tuple[str, str | None], TaskAppClient] = {}  # by URL and the variable of the key
        self._training_episodes: list[AppEpisodes] = []  # whose counters are a step's metrics; evaluations are left out
        self._rubrics: dict[tuple[str, int], Mapping[str, Any] | None] = {}
        self._metrics = AppMetrics()  # of the last step, because the counters only grow

    async def start(self) -> tuple[str, ...]:
        """Check that every app can be used, and open the gateway; return a line about each app.

        Raises:
            ConfigError: an app cannot be reached, refuses our calls, or could not reach the gateway; or the gateway's
                address
                cannot be used.
            MissingExtraError: a package is not installed.
        """
        try:
            lines = [await self._check(source) for source in self._config.sources if source.task_url is not None]
            await self._open_gateway()
        except BaseException:
            await self.close()
            raise
        return tuple(lines)

    async def probe(self) -> tuple[str, ...]:
        """Play one or two rollouts of every app as in training; return lines about results that may be unintended.

        `gspo-gym app check` says more. A failure that may pass is only a line, because the run retries such rollouts.

        Raises:
            ConfigError: an app's episodes cannot be trained on, in both of two rollouts.
        """
        lines: list[str] = []
        for source in self._config.sources:
            if source.task_url is not None:
                lines += await self._probe(source)
        return tuple(lines)

    async def _probe(self, source: TaskSource) -> list[str]:
        judge = self._config.judge
        has_judge = judge is not None and judge.enabled
        problems: tuple[str, ...] = ()
        for number in range(_NUM_PROBES):
            # Two, because an app may fail once for a reason that passes; the second decides.
            report = await self._probe_once(source, number)
            subject = f"task app {source.task_url}: probe rollout"
            if not is_result(report):
                return [f"{subject} failed, which training would try again: {report.error}"]
            # A judge scores the episodes then, so an app may leave the return out.
            problems = tuple(text for text in report.problems if not (has_judge and text == NO_RETURN))
            if not problems:
                return [f"{subject}: {text}" for text in report.notices]
        raise ConfigError(
            f"{source.url_key}: {problems[0]} (in {_NUM_PROBES} probe rollouts of {source.task_url}; "
            "gspo-gym app check says more)"
        )

    async def _probe_once(self, source: TaskSource, number: int) -> ProbeReport:
        config = self._config
        answers: list[AppRollout] = []
        episodes = self._episodes_of(
            source, sampling=config.rollout.sampling, limits=config.training_limits, mode="rl", on_answer=answers.append
        )
        task = Task(source.env_name, config.evaluation_seeds[0])
        sampling_seed = child_seed(config.run.seed, "app probe", number)
        trajectory = await episodes.play(EpisodeRequest(f"probe/{number}", task, sampling_seed))
        player = "the policy, as in training"
        return report_of(f"probe {number}", player, trajectory, episodes.counters, answers[-1] if answers else None)

    async def close(self) -> None:
        """Close the gateway and the clients; closing twice is fine."""
        # Forgotten first, because closing twice is fine, also while the first one waits.
        gateway, server, clients = self._gateway, self._server, list(self._clients.values())
        self._gateway, self._server = None, None
        self._clients.clear()
        if gateway is not None:
            await gateway.close()
        if server is not None:
            await server.stop()
        for client in clients:
            await client.close()

    def player_of(
        self, source: TaskSource, *, sampling: Sampling, limits: EpisodeLimits, mode: Literal["rl", "eval"]
    ) -> PlayEpisode:
        """Return the player of one app's episodes; call `start` before it plays."""
        # Made at the first episode: the gateway opens in `start`, after the players are built.
        episodes: AppEpisodes | None = None

        async def play(request: EpisodeRequest) -> Trajectory:
            nonlocal episodes
            if episodes is None:
                episodes = self._episodes_of(source, sampling=sampling, limits=limits, mode=mode)
                self._training_episodes += [episodes] if mode == "rl" else []
            return await episodes.play(request)

        return play

    async def rubric_of(self, task: Task) -> Mapping[str, Any] | None:
        """Return an app's rubric of a task (Any: JSON), requested once; None if it has none, or no app plays the task.

        A part (outcome, events) that the task's task_info lacks is taken from /info, which holds for all tasks.

        Raises:
            AppError: the app gives no answer.
        """
        source = dict(zip(environment_ids(self._config), self._config.sources, strict=True))[task.env_id]
        client = self._clients.get((source.task_url or "", source.api_key_env))
        if client is None:
            return None
        key = (task.env_id, task.seed)
        if key not in self._rubrics:
            (info,) = await client.task_info([task.seed])
            # Not asked for at the start: an app may have thousands of tasks.
            of_all = {
                part: rubric for part, rubric in (await client.info()).rubrics.items() if isinstance(rubric, dict)
            }
            own = {part: rubric for part, rubric in (info.rubric or {}).items() if rubric is not None}
            self._rubrics[key] = {**of_all, **own} or None
        return self._rubrics[key]

    def after_step(self, step_groups: Sequence[TrajectoryGroup]) -> tuple[dict[str, float], PlayedReturns]:
        """Return metrics of the calls since the last step and of the step's episodes, and these episodes' returns."""
        counters = [episodes.counters for episodes in self._training_episodes]
        returns = take_returns(counters, step_groups)
        return {**self._metrics.since_last(counters), **return_metrics(returns)}, returns

    async def _open_gateway(self) -> None:
        section, policy_config = self._section, self._config.rollout.policy_config
        self._gateway = Gateway(
            self._engine,
            self._tokenizer,
            template_kwargs=None if policy_config is None else policy_config.chat_template_kwargs,
            tools_in=self._config.rollout.tools_in,
            date=template_date(self._config),
            max_sessions=_SESSIONS_PER_ROLLOUT * self._config.rollout.max_concurrent_rollouts,
        )
        app = create_gateway_app(self._gateway, model=_MODEL)
        # The id in each URL, which nobody can guess, is the key: no other is asked for, because apps send none.
        self._server = LoopServer(app, host=section.host, port=section.port, has_key=True)
        await self._server.start()

    @property
    def _section(self) -> GatewaySection:
        return self._config.gateway or GatewaySection()

    def _episodes_of(
        self,
        source: TaskSource,
        *,
        sampling: Sampling,
        limits: EpisodeLimits,
        mode: Literal["rl", "eval"],
        on_answer: Callable[[AppRollout], None] | None = None,
    ) -> AppEpisodes:
        if self._gateway is None or self._server is None or source.task_url is None:
            raise UsageError(f"{source.url_key}: start the player (`await player.start()`) before it plays")

        rollout = self._config.rollout
        policy_config = rollout.policy_config
        # Each rollout gets its name and seed later.
        session = GatewaySessionSettings(
            name="",
            sampling_seed=0,
            max_output_tokens=limits.max_output_tokens,
            max_model_len=limits.max_model_len,
            sampling=sampling,
            max_calls=_MAX_CALLS,
        )
        settings = AppEpisodeSettings(
            env_name=source.env_name,
            session=session,
            model=_MODEL,
            gateway_url=self._section.public_url or self._server.url,
            max_turns=limits.max_turns,
            env_config={**(app_step_rewards(self._config) if mode == "rl" else {}), **source.env_config},
            policy_name=rollout.policy_name,
            policy_config={}
            if policy_config is None
            else policy_config.model_dump(exclude=set(_OUR_KEYS), exclude_none=True),
            mode=mode,
            episode_timeout_seconds=limits.episode_timeout_seconds,
        )
        client = self._clients[source.task_url, source.api_key_env]
        return AppEpisodes(client, self._gateway, settings, retry_seed=self._config.run.seed, on_answer=on_answer)

    async def _check(self, source: TaskSource) -> str:
        url = source.task_url or ""
        self._require_a_way_back(source)
        client = self._clients.get((url, source.api_key_env)) or self._new_client(source)
        self._clients[url, source.api_key_env] = client
        seed = self._config.evaluation_seeds[0]
        try:
            await client.health()
            info = await client.info()
            await client.task_info([seed])
        except AppError as error:
            has_answered = isinstance(error, AppUnauthorisedError | AppRefusedError | AppAnswerError)
            # An app that answers with an error is running.
            hint = "" if has_answered else ". Is the app running there?"
            raise ConfigError(f"{source.url_key}: {error}{hint}") from error
        return f"task app {url}: plays {source.env_name!r} as {info.task_id or 'a task without a name'}"

    def _new_client(self, source: TaskSource) -> TaskAppClient:
        limits = self._config.limits
        key = own_key(source)
        keys = AppKeys.from_environment(os.environ) if key is None else AppKeys([key])
        return TaskAppClient(
            source.task_url or "",
            settings=TaskAppSettings(
                rollout_timeout_seconds=limits.episode_timeout_seconds,
                request_timeout_seconds=limits.step_timeout_seconds,
                max_connections=self._config.rollout.max_concurrent_rollouts,
            ),
            keys=keys,
            retry_seed=self._config.run.seed,
        )

    def _require_a_way_back(self, source: TaskSource) -> None:
        # An app on this machine reaches the loopback address, too.
        host = urlsplit(source.task_url or "").hostname or ""
        section = self._section
        if section.public_url is None and is_loopback(section.host) and not is_loopback(host):
            raise ConfigError(
                f"gateway.address: {section.host!r} is reached from this machine only, and the app of {source.url_key} "
                f"runs at {host}: listen on an address that it can call, or give gateway.public_url (of a tunnel)"
            )

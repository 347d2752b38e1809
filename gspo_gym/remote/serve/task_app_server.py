"""Serve an environment as a task app: an agent with a loop, for which a trainer elsewhere brings the model.

The contract is that of `contracts.py`: /health, /info, /task_info, /rollout in both modes, /done; beside it /run/abort
and /run/status. In a notebook, serve it with `BackgroundServer`. `guard.py` checks the callers. `served_env` puts
an environment behind one guard as a task app, over OpenEnv's protocol, or as both on one port.

    GET /, /health                         says that something is here; without a key
    GET /info                              task, rubrics (a bundled environment's own, or `--rubric`), tools, limits
    GET /task_info, ?seed=0&seed=1         the set of tasks; one task; several
    POST /rollout                          plays an episode with the model at `policy.config.inference_url`
    POST /run/abort, GET /run/status/ID    stops a rollout, which then answers with what was played
    POST /done                             for trainers that say when nothing more is coming

Of a rollout's request,

    env.seed                   is the task; absent: one that the run id gives. Rollouts of one seed are a group
    split, index (env.config)  name the task, too, as the hosted evaluation command does: "test" (or "held_out",
                               "validation", ...) counts from seed 0, "train" from 2**31; arguments of the environment
                               of these names come first
    env.config                 has arguments of the environment: the server's own, and those that clients may set
    ops, safety.max_ops        are `["agent", "env"]` once a decision
    on_done                    "terminate": one episode; "reset": the task anew while there are ops
    safety.max_time_s          and the server's limit: the smaller holds. The answer is then "aborted", with what was
                               played, or, where the actions used the time up, an episode that ended as `action_limit`
    mode                       "rl" needs a correlation id, "eval" does not
    record                     chooses trajectories, logprobs of the sampled tokens, a compact or whole trace
                               ("structured": messages as {"content": {"text", "json_payload"}, "message_type", ...};
                               "full": as OpenAI has them); there are no values
    step_rewards               (of policy.config or env.config) asks for decision rewards of the environment's events,
                               "consistent" or "per_achievement"
    policy.config              has model, inference_url, trace_correlation_id, system_prompt, max_tokens,
                               max_completion_tokens, seed, stop, and how to sample, which the model's endpoint may
                               refuse; nothing is added to what the model is asked

A failure is an HTTP status and a code under `detail.error`: 502 policy_step_failed (the model), 500 env_init_failed,
env_reset_failed, env_step_failed, env_close_failed, 422 for what is wrong in the request, 404 for another environment's
name, 409 for a run id that is being played, 503 with Retry-After where there is no room.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import fastapi
import gymnasium
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from gspo_gym.base.settings import is_loopback
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import open_session
from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.rubric import Rubric
from gspo_gym.judge.rubric_files import bundled_rubric_ids, load_rubrics
from gspo_gym.remote.apps.contracts import RolloutRequest
from gspo_gym.remote.apps.urls import UrlPolicy
from gspo_gym.remote.guard import Guard, RefusalError, answer_refusal
from gspo_gym.remote.serve.agent_loop import require_openai
from gspo_gym.remote.serve.env_source import EnvSource
from gspo_gym.remote.serve.openenv_server import OpenEnvService, Service, joined_app
from gspo_gym.remote.serve.task_app_rollout import InferenceSettings, Rollouts, Runs
from gspo_gym.seeding import FIRST_TRAINING_SEED

Json = dict[str, Any]  # Any: JSON

_NUM_SEEDS = 2 * FIRST_TRAINING_SEED  # environments seed generators that take 32 bits
_MAX_SEEDS_ASKED = 1_000


@dataclass(frozen=True, slots=True)
class AppFacts:
    """The facts about a served environment.

    Attributes:
        name: of the environment, without namespace and version. env_id: the whole of it.
        description: one line.
        tool_schemas: the tools offered to the model, as OpenAI function schemas.
        rubrics: to judge its episodes by.
        timeout_seconds: of one rollout. max_concurrent_rollouts: played at once.
        has_key: whether callers need one.
    """

    name: str
    env_id: str
    description: str
    tool_schemas: tuple[Mapping[str, Any], ...]
    rubrics: Rubrics
    timeout_seconds: float
    max_concurrent_rollouts: int
    has_key: bool


def health_document(facts: AppFacts) -> Json:
    """Answer /health, in the words of task apps and of OpenEnv; of the key it tells only whether there is one."""
    return {"healthy": True, "status": "healthy", "auth": {"required": facts.has_key}}


def info_document(facts: AppFacts) -> Json:
    """Answer /info."""
    return {
        "service": {"task": _task(facts), "version": _version(), "env_id": facts.env_id},
        "dataset": _dataset(facts),
        "rubrics": _rubrics(facts),
        "inference": _inference(facts),
        "limits": _limits(facts),
    }


def taskset(facts: AppFacts) -> Json:
    """Answer /task_info without a seed."""
    return {"taskset": {**_dataset(facts), "seed_range": [0, _NUM_SEEDS - 1]}}


def task_document(facts: AppFacts, seed: int) -> Json:
    """Answer /task_info of one seed."""
    return {
        "task": _task(facts),
        "environment": facts.name,
        "dataset": {**_dataset(facts), "split": "held_out" if seed < FIRST_TRAINING_SEED else "train"},
        "rubric": _rubrics(facts) or {},
        "inference": _inference(facts),
        "limits": _limits(facts),
        "task_metadata": {"seed": seed, "task_id": f"{facts.name}#{seed}"},
    }


def task_documents(facts: AppFacts, seeds: Sequence[int]) -> Json | list[Json]:
    """Answer /task_info: one task for one seed, a list for several, and the set of tasks without any.

    Raises:
        ValueError: a seed out of range, or too many of them.
    """
    if not seeds:
        return taskset(facts)
    wrong = [seed for seed in seeds if not 0 <= seed < _NUM_SEEDS]
    if wrong or len(seeds) > _MAX_SEEDS_ASKED:
        seeds_text = f"got {wrong[0]}" if wrong else f"got {len(seeds)} of them"
        raise ValueError(f"seed: expected at most {_MAX_SEEDS_ASKED} numbers from 0 to {_NUM_SEEDS - 1}, {seeds_text}")
    infos = [task_document(facts, seed) for seed in seeds]
    return infos[0] if len(infos) == 1 else infos


def _task(facts: AppFacts) -> Json:
    return {"id": facts.name, "name": facts.name, "description": facts.description, "version": _version()}


def _dataset(facts: AppFacts) -> Json:
    return {
        "id": facts.name,
        "name": facts.name,
        "splits": ["held_out", "train"],  # the sides of `seeding.FIRST_TRAINING_SEED`
        "default_split": "held_out",
        "sizes": {"held_out": FIRST_TRAINING_SEED, "train": FIRST_TRAINING_SEED},
    }


def _inference(facts: AppFacts) -> Json:
    return {"supports_tools": bool(facts.tool_schemas), "tools": [dict(schema) for schema in facts.tool_schemas]}


def _limits(facts: AppFacts) -> Json:
    return {"timeout_seconds": facts.timeout_seconds, "max_concurrent_rollouts": facts.max_concurrent_rollouts}


def _rubrics(facts: AppFacts) -> Json | None:
    outcome, event = facts.rubrics.outcome, facts.rubrics.event
    if outcome is None and event is None:
        return None
    return {"outcome": _rubric(facts, outcome, "outcome"), "events": _rubric(facts, event, "events")}


def _rubric(facts: AppFacts, rubric: Rubric | None, kind: str) -> Json | None:
    if rubric is None:
        return None
    return {"name": f"{facts.name}/{kind}", **rubric.to_dict()}


def _version() -> str:
    return importlib.metadata.version("gspo-gym")


LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_MAX_WAITING = 1_024  # rollouts without a place
_MORE_REQUESTS = 64  # of other routes, while every place is taken


@dataclass(frozen=True, slots=True)
class TaskAppLimits:
    """Limits of a task app.

    Attributes:
        max_concurrent_rollouts: played at once; more wait, and too many of those are answered 503.
        max_sessions: of OpenEnv's protocol at once, if the server speaks it, too.
        rollout_timeout_seconds: of one rollout, whatever its request says.
        step_timeout_seconds: for each call of an environment's method.
        idle_timeout_seconds: of such a session without a call, before it may lose its place to another.
    """

    max_concurrent_rollouts: int = 64
    max_sessions: int = 64
    rollout_timeout_seconds: float = 3600.0
    step_timeout_seconds: float = 60.0
    idle_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        counts = (self.max_concurrent_rollouts, self.max_sessions)
        seconds = (self.rollout_timeout_seconds, self.step_timeout_seconds, self.idle_timeout_seconds)
        if min(counts) < 1 or not min(seconds) > 0:
            raise ConfigError(f"TaskAppLimits: expected counts >= 1 and seconds > 0, got {counts} and {seconds}")


class RolloutPlayer(Protocol):
    """What plays the rollouts of a task app."""

    async def answer(self, request: RolloutRequest, *, client_left: Coroutine[Any, Any, Any]) -> Json:
        """Play a rollout and return the answer; `client_left` returns when its client has gone."""


class TaskApp:
    """Serves the rollouts of one environment, or of one agent.

    Args:
        name: of what is served.
        player: plays the rollouts. runs: those under way, which the player registers.
        read_facts: called when the server starts.
        limits: of the app.

    Attributes:
        facts: what /info tells, once the server has started.

    Raises:
        MissingExtraError: the openai package is not installed.
    """

    facts: AppFacts

    def __init__(
        self,
        name: str,
        player: RolloutPlayer,
        runs: Runs,
        *,
        read_facts: Callable[[], Awaitable[AppFacts]],
        limits: TaskAppLimits,
    ) -> None:
        require_openai()
        self.name, self.player, self.runs, self.limits = name, player, runs, limits
        self._read_facts = read_facts

    @classmethod
    def of_env(
        cls, source: EnvSource, *, limits: TaskAppLimits, inference: InferenceSettings, rubrics: Rubrics, has_key: bool
    ) -> TaskApp:
        """Return the app of an environment."""
        runs = runs_within(limits)
        rollouts = Rollouts(
            source,
            runs,
            inference=inference,
            step_timeout_seconds=limits.step_timeout_seconds,
            max_seconds=limits.rollout_timeout_seconds,
        )
        read_facts = partial(_facts_of_env, source, limits, rubrics, has_key)
        return cls(source.name, rollouts, runs, read_facts=read_facts, limits=limits)

    @property
    def max_concurrent_requests(self) -> int:
        """Return the limit for a `Guard`: rollouts with and without a place, and some other requests."""
        return self.limits.max_concurrent_rollouts + _MAX_WAITING + _MORE_REQUESTS

    def add_to(self, app: fastapi.FastAPI) -> None:
        """Add the routes to an application."""
        app.state.task_app = self
        app.include_router(_ROUTER)
        app.add_exception_handler(RefusalError, answer_refusal)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the facts at the start and stop all rollouts at the end.

        Raises:
            EnvError, EnvTimeoutError, ContractError: the environment cannot be made.
        """
        self.facts = await self._read_facts()
        try:
            yield
        finally:
            await self.runs.stop_all()


def runs_within(limits: TaskAppLimits) -> Runs:
    """Return the runs of an app with these limits."""
    return Runs(max_running=limits.max_concurrent_rollouts, max_waiting=_MAX_WAITING)


async def _facts_of_env(source: EnvSource, limits: TaskAppLimits, rubrics: Rubrics, has_key: bool) -> AppFacts:
    session = await open_session(source.factory, env_id=source.env_id, step_timeout_seconds=limits.step_timeout_seconds)
    try:
        schemas = session.tool_schemas
    finally:
        await session.close()
    return AppFacts(
        name=source.name,
        env_id=source.env_id,
        description=source.description or source.name,
        tool_schemas=schemas,
        rubrics=rubrics,
        timeout_seconds=limits.rollout_timeout_seconds,
        max_concurrent_rollouts=limits.max_concurrent_rollouts,
        has_key=has_key,
    )


def create_task_app(
    env: str | Callable[[], Any],
    *,
    config: Mapping[str, Any] | None = None,
    client_options: Collection[str] = (),
    isolation: str = "auto",
    rubrics: Rubrics | None = None,
    limits: TaskAppLimits | None = None,
    inference_hosts: Iterable[str] = LOOPBACK_HOSTS,
    inference_api_key: str | None = None,
    api_key: str | Iterable[str] | None = None,
    allowed_origins: Iterable[str] = (),
    allowed_hosts: Iterable[str] | None = None,
) -> Guard:
    """Return an ASGI application that serves an environment as a task app.

    Args:
        env: a registered name, or a class or function without arguments that returns a fresh instance; it need not
            subclass anything.
        config: arguments of the constructor.
        client_options: names of those that a rollout's env.config may set; it may always repeat those of `config`.
        isolation: "thread", "process", or "auto" for the environment's own choice.
        rubrics: to judge its episodes by, told in /info; None: none.
        limits: None: the defaults.
        inference_hosts: the only hosts with inference URLs that are called, see `UrlPolicy`.
        inference_api_key: sent to all of them; None sends none, which suits our gateway.
        api_key, allowed_origins, allowed_hosts: see `Guard`.

    Raises:
        UnknownNameError: a name that is not registered.
        ConfigError: a limit, a key or an allowed host is invalid, or no such argument.
    """
    task_app = TaskApp.of_env(
        EnvSource(env, config=config, client_options=client_options, isolation=isolation),
        limits=limits or TaskAppLimits(),
        inference=InferenceSettings(UrlPolicy(inference_hosts, is_public_allowed=False), inference_api_key),
        rubrics=rubrics or Rubrics(),
        has_key=api_key is not None,
    )
    return Guard(
        joined_app([task_app], title=f"{task_app.name} as a task app"),
        api_key=api_key,
        allowed_origins=allowed_origins,
        allowed_hosts=allowed_hosts,
        max_concurrent_requests=task_app.max_concurrent_requests,
    )


class _AbortRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    run_id: str


_ROUTER = fastapi.APIRouter()


def _app(request: fastapi.Request) -> TaskApp:
    task_app: TaskApp = request.app.state.task_app
    return task_app


@_ROUTER.get("/")
@_ROUTER.head("/")
async def root(request: fastapi.Request) -> dict[str, str]:
    """Answer that a server is here; needs no key."""
    return {"status": "ok", "service": _app(request).facts.name}


@_ROUTER.get("/health")
async def health(request: fastapi.Request) -> dict[str, Any]:
    """Answer that the server runs; needs no key."""
    return health_document(_app(request).facts)


@_ROUTER.get("/info")
async def info(request: fastapi.Request) -> dict[str, Any]:
    """Describe the served environment."""
    return info_document(_app(request).facts)


@_ROUTER.get("/task_info")
async def task_info(request: fastapi.Request) -> JSONResponse:
    """Return the set of tasks, or those of the given seeds (?seed=0&seed=1, or seeds=)."""
    query = request.query_params
    try:
        seeds = [int(seed) for name in ("seed", "seeds") for text in query.getlist(name) for seed in text.split(",")]
        return JSONResponse(task_documents(_app(request).facts, seeds))
    except ValueError as error:
        raise RefusalError(422, "bad_seed", str(error)) from error


@_ROUTER.post("/rollout")
async def rollout(request: fastapi.Request, asked: RolloutRequest) -> JSONResponse:
    """Play a rollout."""
    return JSONResponse(await _app(request).player.answer(asked, client_left=_wait_for_disconnect(request)))


@_ROUTER.post("/run/abort")
async def abort(request: fastapi.Request, asked: _AbortRequest) -> dict[str, Any]:
    """Tell a rollout to stop; it then answers with what was played."""
    run = _app(request).runs.get(asked.run_id)
    run.abort_requested.set()
    return {"ok": True, **run.to_wire()}


@_ROUTER.get("/run/status/{run_id}")
async def status(request: fastapi.Request, run_id: str) -> dict[str, Any]:
    """Return whether a rollout waits, is played, or how it ended."""
    return _app(request).runs.get(run_id).to_wire()


@_ROUTER.post("/done")
async def done(request: fastapi.Request) -> dict[str, Any]:
    """Acknowledge the end of a trainer's requests; nothing here waits for it."""
    return {"ok": True, "service": _app(request).facts.name}


async def _wait_for_disconnect(request: fastapi.Request) -> None:
    """Return when the client has gone."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


WireProtocol = Literal["task_app", "openenv", "all"]


@dataclass(frozen=True, slots=True)
class ServedEnv:
    """A served environment, and the callers that it allows.

    Attributes:
        name: of a registered environment. config: arguments of its constructor.
        protocol: "task_app", "openenv" or "all".
        client_options: of a task app: names of arguments that clients may set.
        isolation: "auto", "thread" or "process".
        limits: of episodes and calls.
        rubric: of a task app: the rubric to judge its episodes by, as an id or a file; None: a bundled environment's
            own.
        inference_hosts: of a task app: the inference hosts that it calls; None: loopback, if it is served there.
        inference_api_key: sent to them.
        host: the address to serve at. api_keys: callers need one of them; () asks for none.
        allowed_origins, allowed_hosts: see `Guard`; hosts () leaves its default.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    protocol: WireProtocol = "task_app"
    client_options: Sequence[str] = ()
    isolation: str = "auto"
    limits: TaskAppLimits = field(default_factory=TaskAppLimits)
    rubric: str | None = None
    inference_hosts: Sequence[str] | None = None
    inference_api_key: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    api_keys: Sequence[str] = field(default=(), repr=False)
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()


def served_app(served: ServedEnv) -> Guard:
    """Return the ASGI application.

    Raises:
        UnknownNameError: a name that is not registered.
        ConfigError: a limit, a key or an allowed host is invalid, or no such argument or isolation; or a key would be
            sent to any program of this machine.
    """
    services: list[Service] = []
    max_requests = 1_024
    if served.protocol in ("task_app", "all"):
        task_app = _task_app(served)
        services.append(task_app)  # first, because its /health says what both ask for
        max_requests = task_app.max_concurrent_requests
    if served.protocol in ("openenv", "all"):
        services.append(
            OpenEnvService(
                served.name,
                config=served.config,
                isolation=served.isolation,
                max_sessions=served.limits.max_sessions,
                step_timeout_seconds=served.limits.step_timeout_seconds,
                idle_timeout_seconds=served.limits.idle_timeout_seconds,
            )
        )
    return Guard(
        joined_app(services, title=served.name),
        api_key=served.api_keys or None,
        allowed_origins=served.allowed_origins,
        allowed_hosts=served.allowed_hosts or None,
        max_concurrent_requests=max_requests,
    )


def _task_app(served: ServedEnv) -> TaskApp:
    hosts = served.inference_hosts
    if hosts is None:
        # The key would go to every program of this machine that listens.
        if served.inference_api_key is not None:
            raise ConfigError("--inference-key-env: name the hosts that get the key, with --inference-host")
        hosts = LOOPBACK_HOSTS if is_loopback(served.host) else ()
    return TaskApp.of_env(
        EnvSource(served.name, config=served.config, client_options=served.client_options, isolation=served.isolation),
        limits=served.limits,
        inference=InferenceSettings(UrlPolicy(hosts, is_public_allowed=False), served.inference_api_key),
        rubrics=rubrics_of(served.name, served.rubric),
        has_key=bool(served.api_keys),
    )


def rubrics_of(env_id: str, rubric: str | None = None) -> Rubrics:
    """Return the rubrics for an environment's episodes: `rubric`, or those of a bundled environment.

    Raises:
        UnknownNameError: there is no such environment, or no such rubric. ConfigError: its file is not one.
    """
    if rubric is None:
        home = str(gymnasium.registry[resolve(env_id)].entry_point).partition(":")[0].split(".")
        # A bundled environment brings its rubrics in its own package; the last version counts.
        ids = [
            rubric_id
            for rubric_id in bundled_rubric_ids()
            if home[:2] == ["gspo_gym_envs", rubric_id.partition("/")[0]]
        ]
        rubric = ids[-1] if ids else None
    return load_rubrics(rubric)

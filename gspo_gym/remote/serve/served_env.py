"""Serve one environment behind one guard: as a task app, over OpenEnv's protocol, or as both on one port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium

from gspo_gym.base.keys import is_loopback
from gspo_gym.env.registry import resolve
from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.rubric_files import bundled_rubric_ids, load_rubrics
from gspo_gym.remote.apps.urls import UrlPolicy
from gspo_gym.remote.guard import Guard
from gspo_gym.remote.serve.env_source import EnvSource
from gspo_gym.remote.serve.openenv_server import OpenEnvService, Service, joined_app
from gspo_gym.remote.serve.task_app_rollout import InferenceSettings
from gspo_gym.remote.serve.task_app_server import LOOPBACK_HOSTS, TaskApp, TaskAppLimits

Protocol = Literal["task_app", "openenv", "all"]


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
    protocol: Protocol = "task_app"
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
    return TaskApp(
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
        ids = [known for known in bundled_rubric_ids() if home[:2] == ["gspo_gym_envs", known.partition("/")[0]]]
        rubric = ids[-1] if ids else None
    return load_rubrics(rubric)

"""The choice between a thread of this process and a worker process for an environment.

A thread costs nothing and suits code that behaves. A worker process suits code that may hang in a C loop, crash, leak,
run model-written programs, or use process-wide random generators. An environment declares its need
(`TextEnv.isolation`); one without a declaration is tried in a worker once, and stays there if it uses those generators.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from gspo_gym.env.core import Isolation
from gspo_gym.env.playing import spoken_by
from gspo_gym.env.registry import make, require_arguments, resolve
from gspo_gym.env.session import looking_at, open_session
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.limits import WorkerLimits
from gspo_gym.env.workers.making import allow_to_make
from gspo_gym.env.workers.pool import is_supported
from gspo_gym.env.workers.target import target_of
from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.errors import ConfigError, GymError
from gspo_gym.types import Message

_log = logging.getLogger(__name__)

IsolationChoice = Literal["auto", "thread", "process"]
_CHOICES = ("auto", "thread", "process")
_FIRST_SECONDS = 300.0  # to make the first environment of its kind, which may load large packages and data
_SLACK = 100.0  # times the slowest so far; sixteen processes that load at once share the cores


@dataclass(frozen=True, slots=True)
class Decision:
    """An isolation and the reason for it, in words."""

    isolation: Isolation
    reason: str


@dataclass(frozen=True, slots=True)
class IsolatedFactory:
    """Factory of environments that run as decided; equal to a factory with the same arguments.

    A call blocks until the environment is there, and raises what `registry.make` or `ProcessEnv` raises.

    `isolation` is as requested; `start_timeout_seconds` limits how long a worker process may make the environment.
    """

    env: str | Callable[..., Any]
    kwargs: Mapping[str, Any]
    isolation: IsolationChoice = "auto"
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    start_timeout_seconds: float = 60.0

    def __call__(self) -> Any:
        seconds, start = 0.0, time.monotonic()
        allow_to_make(self.seconds_to_make(0.0))
        try:
            if self.decision.isolation == "process":
                env = self.make_in_process(self.seconds_to_make(self.start_timeout_seconds))
            else:
                env = make(self.env, **self.kwargs) if isinstance(self.env, str) else self.env(**self.kwargs)
            seconds = time.monotonic() - start
        finally:
            _SLOWEST_SECONDS[self._kind] = max(seconds, _SLOWEST_SECONDS.get(self._kind, 0.0))
        return env

    def make_in_process(self, start_timeout_seconds: float) -> ProcessEnv:
        """Return a fresh environment in a worker process, also where `isolation` says something else."""
        return ProcessEnv(self.env, self.kwargs, limits=self.limits, start_timeout_seconds=start_timeout_seconds)

    def seconds_to_make(self, seconds: float) -> float:
        """Return the limit for making one: `seconds`, or up to 300 as long as it is not known to load quickly."""
        slowest = _SLOWEST_SECONDS.get(self._kind)
        return max(seconds, _FIRST_SECONDS if slowest is None else min(_FIRST_SECONDS, _SLACK * slowest))

    @property
    def _kind(self) -> str:
        return f"{_name_of(self.env)} {hash(repr(sorted(self.kwargs.items())))}"

    @property
    def runs_code(self) -> bool:
        """Return whether the environment's class declares that it runs model-written code."""
        return getattr(_creator_of(self.env), "confinement", None) is not None

    @property
    def decision(self) -> Decision:
        """Return where the environment runs; blocks for a trial the first time, if one is needed."""
        return _decide(self)


def isolated_factory(
    env: str | Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    isolation: str = "auto",
    *,
    limits: WorkerLimits | None = None,
    start_timeout_seconds: float = 60.0,
) -> IsolatedFactory:
    """Return a factory of fresh environments that run in a thread or in a worker process.

    Args:
        env: a registered name, or a class or function (importable, for a process).
        kwargs: arguments of its constructor (JSON, for a process).
        isolation: "thread", "process", or "auto": as the environment declares, else a process if a trial shows that it
            touches process-wide state, else a thread.
        limits: of worker processes.
        start_timeout_seconds: limit for a worker process to make the environment, once it is known to load quickly.

    Raises:
        UnknownNameError: no environment of that name.
        ConfigError: `isolation` is something else, or the constructor takes no such argument.

    >>> isolated_factory("GuessNumber", {"high": 4, "style": "terse"}, "thread")().reset(seed=0)[0]
    'Guess 1-4. 4 tries.'
    """
    if isolation not in _CHOICES:
        raise ConfigError(f"isolation: expected one of {_CHOICES}, got {isolation!r}")
    env = resolve(env) if isinstance(env, str) else env
    if (creator := _creator_of(env)) is not None:
        own_kwargs = gymnasium.registry[env].kwargs if isinstance(env, str) else {}
        require_arguments(_name_of(env), creator, {**own_kwargs, **(kwargs or {})})
    choice: IsolationChoice = isolation  # type: ignore[assignment]  # checked above
    return IsolatedFactory(env, dict(kwargs or {}), choice, limits or WorkerLimits(), start_timeout_seconds)


def _decide(factory: IsolatedFactory) -> Decision:
    if factory.isolation != "auto":
        return Decision(factory.isolation, "as asked for")
    isolation = getattr(_creator_of(factory.env), "isolation", None)
    if isolation is not None:
        return Decision(isolation, "it says so")
    if not is_supported():
        return Decision("thread", "worker processes need Linux")
    try:
        target = target_of(factory.env, factory.kwargs)
    except ConfigError as error:
        return Decision("thread", str(error))
    return _decide_by_trial(json.dumps(target.to_json(), sort_keys=True), factory)


# Module state: of this program, what is loaded stays loaded, and what a trial has shown stays true.
_SLOWEST_SECONDS: dict[str, float] = {}  # to make an environment, by its kind; 0 if it could not be made
_DECISIONS: dict[str, Decision] = {}
_ONE_TRIAL = threading.Lock()


def _decide_by_trial(key: str, factory: IsolatedFactory) -> Decision:  # made and logged once
    if key in _DECISIONS:
        return _DECISIONS[key]
    with _ONE_TRIAL:
        if key not in _DECISIONS:
            _DECISIONS[key] = decision = _after_trial(factory)
            if decision.isolation == "process":
                _log.info("%s: runs in worker processes: %s", _name_of(factory.env), decision.reason)
        return _DECISIONS[key]


def _after_trial(factory: IsolatedFactory) -> Decision:
    thread = OwnThread()  # asyncio.run needs a thread without a running loop, and the caller's may have one
    try:
        isolation, generators = thread.call(lambda: asyncio.run(_try_out(factory)), timeout_seconds=None).unwrap()
    except GymError as error:  # not raised here: the environment's episodes will fail with it
        decision = Decision("thread", f"it could not be tried in a worker process: {error}")
        _log.warning("%s: runs in threads: %s", _name_of(factory.env), decision.reason)
        return decision
    finally:
        thread.release()
    if isolation is not None:
        return Decision(isolation, "it says so")
    if generators:
        return Decision("process", f"it uses the generator of {', '.join(generators)}, which a process shares")
    return Decision("thread", "it was tried, and leaves alone what a process shares")


async def _try_out(factory: IsolatedFactory) -> tuple[Isolation | None, tuple[str, ...]]:
    seconds = max(factory.start_timeout_seconds, _FIRST_SECONDS)
    # Loading its packages may draw from a generator too, once per process and before any seed, which affects no
    # episode.
    async with looking_at(lambda: factory.make_in_process(seconds), _name_of(factory.env)):
        pass
    session = await open_session(
        lambda: factory.make_in_process(seconds), env_id=_name_of(factory.env), step_timeout_seconds=seconds
    )
    env = session.env
    try:
        first_result = await session.reset(0)
        players = [env.policies[name] for name in ("random", "reference") if name in env.policies]
        action: Message | str = "0"  # arbitrary, without a player
        if players:
            action = await spoken_by(players[0](env, np.random.default_rng(0)), first_result.messages)
        await session.step(Message("assistant", action) if isinstance(action, str) else action)
    finally:
        await session.close()
    return env.declared_isolation, env.changed_generators


def _creator_of(env: str | Callable[..., Any]) -> Any:  # None if it cannot be loaded
    if not isinstance(env, str):
        return env
    creator: Any = gymnasium.registry[env].entry_point
    if not isinstance(creator, str):
        return creator
    try:
        return load_env_creator(creator)
    except Exception:  # a foreign module may raise anything; the environment's episodes will fail with it
        return None


def _name_of(env: str | Callable[..., Any]) -> str:
    return env if isinstance(env, str) else str(getattr(env, "__name__", env))

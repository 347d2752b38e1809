"""Where an environment runs: in a thread of this process, or in a worker process of its own.

A thread costs nothing and is right for code that behaves. A process is for code that may hang in a C loop, crash, leak
or eat memory, that runs what a model wrote, or that uses what a whole process shares: Python's and numpy's own random
generators. An environment says which it needs (`TextEnv.isolation`); one that says nothing is tried in a worker once,
and kept there if it touches those generators.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from gspo_gym.env.core import Isolation
from gspo_gym.env.playing import spoken_by
from gspo_gym.env.registry import make, require_known_arguments, resolve
from gspo_gym.env.session import looking_at, open_session
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.limits import WorkerLimits
from gspo_gym.env.workers.loading import FIRST_LOAD_SECONDS, LOADING, waiting_for
from gspo_gym.env.workers.pool import is_supported
from gspo_gym.env.workers.target import target_of
from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.errors import ConfigError, GymError
from gspo_gym.types import Message

_log = logging.getLogger(__name__)

IsolationChoice = Literal["auto", "thread", "process"]
_CHOICES = ("auto", "thread", "process")


@dataclass(frozen=True, slots=True)
class Decision:
    """Where an environment runs, and why, for people."""

    isolation: Isolation
    reason: str


@dataclass(frozen=True, slots=True)
class IsolatedFactory:
    """Makes fresh environments that run where they were decided to; equal to one that makes the same.

    Calling it blocks until the environment is there: `open_session` calls it in a thread. Errors are those of
    `registry.make` in a thread, those of `ProcessEnv` in a process.

    Attributes:
        env: a registered name, or a class or function.
        kwargs: of its constructor.
        isolation: what was asked for.
        limits: of worker processes. start_timeout_seconds: for one to make the environment.
    """

    env: str | Callable[..., Any]
    kwargs: Mapping[str, Any]
    isolation: IsolationChoice = "auto"
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    start_timeout_seconds: float = 60.0

    def __call__(self) -> Any:
        """A fresh environment (Any: authors need not subclass anything)."""
        if self.decision.isolation == "process":
            return self.make_in_process(self.start_timeout_seconds)
        with LOADING.once(f"{_name_of(self.env)} {hash(repr(sorted(self.kwargs.items())))}"):
            return make(self.env, **self.kwargs) if isinstance(self.env, str) else self.env(**self.kwargs)

    def make_in_process(self, start_timeout_seconds: float) -> ProcessEnv:
        """A fresh environment in a worker process, whatever was asked for."""
        return ProcessEnv(
            self.env,
            self.kwargs,
            limits=self.limits,
            start_timeout_seconds=start_timeout_seconds,
            loading=LOADING,
        )

    @property
    def runs_code(self) -> bool:
        """Whether its class says that it runs code that a model wrote."""
        return getattr(_creator_of(self.env), "confinement", None) is not None

    @property
    def decision(self) -> Decision:
        """Where it runs; what has to be tried first is tried once a program, and blocks."""
        return _decide(self)


def isolated_factory(
    env: str | Callable[..., Any],
    kwargs: Mapping[str, Any] | None = None,
    isolation: str = "auto",
    *,
    limits: WorkerLimits | None = None,
    start_timeout_seconds: float = 60.0,
) -> IsolatedFactory:
    """A factory of fresh environments that run in a thread or in a worker process.

    Args:
        env: a registered name, or a class or function, which for a process must be importable.
        kwargs: of its constructor; for a process, JSON.
        isolation: "thread", "process", or "auto": what the environment says, and where it says nothing, a process if
            it is found to touch what a process shares, else a thread.
        limits: of worker processes.
        start_timeout_seconds: for a worker process to make the environment, once it has loaded what that needs.

    Raises:
        UnknownNameError: no environment of that name.
        ConfigError: `isolation` is something else, or the constructor takes no such argument.

    >>> isolated_factory("GuessNumber", {"high": 4}, "thread")().reset(seed=0)[0]
    'Guess 1-4. 4 tries.'
    """
    if isolation not in _CHOICES:
        raise ConfigError(f"isolation: expected one of {_CHOICES}, got {isolation!r}")
    env = resolve(env) if isinstance(env, str) else env
    if (creator := _creator_of(env)) is not None:
        require_known_arguments(_name_of(env), creator, kwargs or {})
    asked: IsolationChoice = isolation  # type: ignore[assignment]  # it is one of them
    return IsolatedFactory(env, dict(kwargs or {}), asked, limits or WorkerLimits(), start_timeout_seconds)


def _decide(factory: IsolatedFactory) -> Decision:
    if factory.isolation != "auto":
        return Decision(factory.isolation, "as asked for")
    declared = getattr(_creator_of(factory.env), "isolation", None)
    if declared is not None:
        return Decision(declared, "it says so")
    if not is_supported():
        return Decision("thread", "worker processes need Linux")
    try:
        target = target_of(factory.env, factory.kwargs)
    except ConfigError as error:
        return Decision("thread", str(error))
    return _tried(json.dumps(target.to_json(), sort_keys=True), factory)


# Module state on purpose: a trial costs a process, and what it finds stays true.
_FOUND: dict[str, Decision] = {}
_ONE_TRIAL = threading.Lock()


def _tried(key: str, factory: IsolatedFactory) -> Decision:
    """What a reset and a step in a worker show; the first time, and logged then."""
    if key in _FOUND:
        return _FOUND[key]
    with waiting_for(_ONE_TRIAL):
        if key not in _FOUND:
            _FOUND[key] = decision = _after_trial(factory)
            if decision.isolation == "process":
                _log.info("%s: runs in worker processes: %s", _name_of(factory.env), decision.reason)
        return _FOUND[key]


def _after_trial(factory: IsolatedFactory) -> Decision:
    thread = OwnThread()  # a loop of our own, wherever we are called from
    try:
        declared, changed = thread.call(lambda: asyncio.run(_try_out(factory)), timeout_seconds=None).unwrap()
    except GymError as error:  # its episodes will show it, where it is somebody's concern
        decision = Decision("thread", f"it could not be tried in a worker process: {error}")
        _log.warning("%s: runs in threads: %s", _name_of(factory.env), decision.reason)
        return decision
    finally:
        thread.release()
    if declared is not None:
        return Decision(declared, "it says so")
    if changed:
        return Decision("process", f"it uses the generator of {', '.join(changed)}, which a process shares")
    return Decision("thread", "it was tried, and leaves alone what a process shares")


async def _try_out(factory: IsolatedFactory) -> tuple[Isolation | None, tuple[str, ...]]:
    """What an instance says of itself, and the generators that making it again, a reset and a step changed."""
    seconds = max(factory.start_timeout_seconds, FIRST_LOAD_SECONDS)
    # Loading the packages may draw from a generator, too, once a process and before any seed: that is nobody's episode.
    async with looking_at(lambda: factory.make_in_process(seconds)):
        pass
    session = await open_session(
        lambda: factory.make_in_process(seconds), env_id=_name_of(factory.env), step_timeout_seconds=seconds
    )
    env = session.env
    try:
        shown = await session.reset(0)
        known = [name for name in ("random", "reference") if name in env.policies]
        said: Message | str = "0"  # without a player any action has to do
        if known:
            said = await spoken_by(env.policies[known[0]](env, np.random.default_rng(0)), shown.messages)
        await session.step(Message("assistant", said) if isinstance(said, str) else said)
    finally:
        await session.close()
    return env.declared_isolation, env.changed_generators


def _creator_of(env: str | Callable[..., Any]) -> Any:
    """The class or function; loading it is what making it in a thread would do as well."""
    if not isinstance(env, str):
        return env
    creator: Any = gymnasium.registry[env].entry_point
    if not isinstance(creator, str):
        return creator
    try:
        return load_env_creator(creator)
    except Exception:  # whatever a foreign module may raise: its episodes will show it
        return None


def _name_of(env: str | Callable[..., Any]) -> str:
    return env if isinstance(env, str) else str(getattr(env, "__name__", env))

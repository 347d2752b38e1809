"""What a worker process loads: the environment that it is to make, as JSON, and the time for it.

A worker shares no memory with the program: an environment is named by the place that its class or function is imported
from, and the program's main file by its path, as in `multiprocessing`.

Importing a package or reading a data set may take a minute, and sixteen worker processes that do it together share the
cores; all would miss a limit for making one environment. The first load of each kind therefore has a separate limit
while the others wait with stopped clocks. A later load in another process gets time by how long the first one took and
how many load beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import os
import runpy
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from gspo_gym.env.registry import make_from, resolve
from gspo_gym.env.workers.channel import require_json
from gspo_gym.errors import ConfigError, ContractError, EnvError

FIRST_LOAD_SECONDS = 300.0  # packages may be large
_LOOK_SECONDS = 0.2  # between two looks of a waiting thread whether it was given up
_SLACK = 2.0  # later loads share the machine, the first did not


class Making:
    """The clock of one environment that is made in another thread; create it in the running event loop.

    `seconds` limit making it without the loads. Enter `timeout` around waiting for it; `is_given_up` says that nothing
    waits for it any more.
    """

    def __init__(self, seconds: float | None) -> None:
        self.timeout = asyncio.timeout(seconds)
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self.is_given_up = False
        self._depth = 0  # of nested `stopped` blocks

    def run(self, factory: Callable[[], Any]) -> Any:
        """Call `factory` with this clock as the clock of the current thread."""
        _OF_THREAD.making = self
        try:
            return factory()
        finally:
            _OF_THREAD.making = None

    def give_up(self) -> None:
        """Give the environment up: stop waiting for loads and let the clock run. Call it in the event loop."""
        self.restart(self._seconds)
        self.is_given_up = True

    def restart(self, seconds: float | None) -> None:
        """Allow `seconds` from now on. Call it in the event loop."""
        if not self.is_given_up:
            with contextlib.suppress(RuntimeError):  # the timeout has expired already
                self.timeout.reschedule(None if seconds is None else self._loop.time() + seconds)

    @contextlib.contextmanager
    def stopped(self, seconds: float | None = None) -> Iterator[None]:
        """Stop the clock during the block, or allow it `seconds`, then start anew. Call it in the thread."""
        self._depth += 1
        self._restart_from_thread(seconds)
        try:
            yield
        finally:
            self._depth -= 1
            self._restart_from_thread(None if self._depth else self._seconds)

    def _restart_from_thread(self, seconds: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
            self._loop.call_soon_threadsafe(self.restart, seconds)


class Loading:
    """The loads of this program by key, with the time of the slowest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[str, threading.Lock] = {}
        self._slowest_seconds: dict[str, float] = {}
        self._num_started = 0
        self._num_ended = 0

    @contextlib.contextmanager
    def once(self, key: str) -> Iterator[bool]:
        """Let one thread load `key` while others wait; yield whether it is this one.

        Waiting is not charged to an environment, and the load has `FIRST_LOAD_SECONDS`. The others stop waiting when
        the first load ends, even by a failure, or after that time.
        """
        if key in self._slowest_seconds:
            yield False
            return
        with self._lock:
            first = self._first.setdefault(key, threading.Lock())
        with contextlib.ExitStack() as stack:
            is_held = stack.enter_context(waiting_for(first, seconds=FIRST_LOAD_SECONDS))
            is_first = is_held and key not in self._slowest_seconds
            if is_first:
                stack.enter_context(self._first_of(key))
            else:
                stack.close()
            yield is_first

    @contextlib.contextmanager
    def _first_of(self, key: str) -> Iterator[None]:
        started, took = time.monotonic(), 0.0
        try:
            with clock_stopped(FIRST_LOAD_SECONDS):
                yield
            took = time.monotonic() - started
        finally:
            self._slowest_seconds[key] = took

    @contextlib.contextmanager
    def again(self, key: str, seconds: float) -> Iterator[Callable[[], float]]:
        """Load again in another process; yield a function for the seconds this may take in all, as known now.

        They are `seconds`, plus twice the slowest load of `key` for each load that runs at the same time.
        """
        with self._lock:
            slowest, ended = self._slowest_seconds.get(key, 0.0), self._num_ended
            self._num_started += 1
        started = time.monotonic()
        try:
            with clock_stopped():
                yield lambda: seconds + _SLACK * slowest * (self._num_started - ended)
            with self._lock:
                self._slowest_seconds[key] = max(self._slowest_seconds.get(key, 0.0), time.monotonic() - started)
        finally:
            with self._lock:
                self._num_ended += 1


@contextlib.contextmanager
def clock_stopped(seconds: float | None = None) -> Iterator[None]:
    """Stop the clock of the environment that this thread makes, if any, or allow it `seconds`."""
    making = _OF_THREAD.making
    with contextlib.nullcontext() if making is None else making.stopped(seconds):
        yield


@contextlib.contextmanager
def waiting_for(lock: threading.Lock, *, seconds: float = math.inf) -> Iterator[bool]:
    """Hold the lock during the block, without charging the wait; yield False if it was not free within `seconds`.

    Raises:
        EnvError: the environment that this thread makes was given up.
    """
    making, deadline = _OF_THREAD.making, time.monotonic() + seconds
    with clock_stopped():
        while not (is_held := lock.acquire(timeout=_LOOK_SECONDS)) and time.monotonic() < deadline:
            if making is not None and making.is_given_up:
                raise EnvError("making the environment was given up while others were loading")
        try:
            yield is_held
        finally:
            if is_held:
                lock.release()


class _OfThread(threading.local):
    making: Making | None = None


_OF_THREAD = _OfThread()
# Module state: what is loaded stays loaded for the life of the program.
LOADING = Loading()


_MAIN = "__main__"
_MAIN_OF_WORKER = "__mp_main__"  # as in multiprocessing: `if __name__ == "__main__"` must not hold in a worker


@dataclass(frozen=True, slots=True)
class ProcessTarget:
    """What a worker makes.

    Attributes:
        name: the id of a registered environment, or a name for errors.
        entry_point: "package.module:Class", or a function instead of the class.
        main_path: the program's main file if `entry_point` is in it, else None.
        is_registered: whether it is made as by `registry.make`, with checked arguments, or only called.
        max_episode_steps: Gymnasium's time limit, if registered with one.
    """

    name: str
    entry_point: str
    main_path: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_registered: bool = False
    max_episode_steps: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProcessTarget:
        return cls(**value)

    def make(self) -> Any:
        """Return a fresh environment; called in the worker. A ConfigError if it cannot be imported."""
        creator = self._creator()
        if not self.is_registered:
            return creator(**self.kwargs)
        spec = EnvSpec(self.name, entry_point=creator, max_episode_steps=self.max_episode_steps)
        return make_from(spec, **self.kwargs)

    def _creator(self) -> Any:
        module, _, qualname = self.entry_point.partition(":")
        try:
            found: Any = _main_module(self.main_path) if self.main_path else importlib.import_module(module)
            for name in qualname.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError, OSError) as error:
            raise ConfigError(
                f"{self.name}: a worker process cannot import {self.entry_point!r} ({error}); put it into a module "
                'that can be imported, or set isolation to "thread"'
            ) from error
        return found


def target_of(env: str | Callable[..., Any], kwargs: Mapping[str, Any]) -> ProcessTarget:
    """Return the target of a registered name, or of a class or function.

    Raises:
        UnknownNameError: no environment of that name.
        ConfigError: a worker could not import it, or an argument is no JSON.
    """
    given = _as_json(kwargs, "arguments")
    if not isinstance(env, str):
        entry_point, main_path = entry_point_of(env)
        return ProcessTarget(getattr(env, "__name__", "environment"), entry_point, main_path, given)
    spec = gymnasium.registry[resolve(env)]
    if spec.additional_wrappers:
        raise ConfigError(f'{spec.id}: is registered with wrappers, which need isolation = "thread"')
    if spec.entry_point is None:
        raise ConfigError(f"environment {spec.id!r} is registered without an entry_point for single environments")
    main_path = None
    if isinstance(spec.entry_point, str):
        entry_point = spec.entry_point
    else:
        entry_point, main_path = entry_point_of(spec.entry_point)
    registered = _as_json(spec.kwargs, f"registered arguments of {spec.id}")
    return ProcessTarget(spec.id, entry_point, main_path, {**registered, **given}, True, spec.max_episode_steps)


def entry_point_of(creator: Any) -> tuple[str, str | None]:
    """Return the import path of a class or function, and the program's main file if it is defined there."""
    module, qualname = getattr(creator, "__module__", None), getattr(creator, "__qualname__", None)
    found: Any = sys.modules.get(module) if module else None
    for name in (qualname or "").split("."):
        found = getattr(found, name, None)
    if found is not creator or module is None or qualname is None:
        raise ConfigError(
            f"{creator!r}: expected a class or function at the top of a module, which a worker process can import; "
            'got one that is local or made on the fly. Move it, or set isolation to "thread"'
        )
    if module != _MAIN:
        return f"{module}:{qualname}", None
    main: Any = sys.modules[_MAIN]
    if getattr(main, "__spec__", None) is not None:  # python -m package.module
        return f"{main.__spec__.name}:{qualname}", None
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise ConfigError(
            f"{qualname}: expected it in a file, which a worker process can import, got one typed into a shell or "
            'notebook. Write it to a file, or set isolation to "thread"'
        )
    return f"{_MAIN}:{qualname}", os.path.abspath(path)


def _main_module(path: str) -> types.ModuleType:  # run once in this process
    module = sys.modules.get(_MAIN_OF_WORKER)
    if module is None or getattr(module, "__file__", None) != path:
        module = types.ModuleType(_MAIN_OF_WORKER)
        sys.modules[_MAIN] = sys.modules[_MAIN_OF_WORKER] = module
        module.__dict__.update(runpy.run_path(path, run_name=_MAIN_OF_WORKER))
    return module


def _as_json(kwargs: Mapping[str, Any], what: str) -> dict[str, Any]:
    try:
        checked: dict[str, Any] = require_json(dict(kwargs), where=what)
    except ContractError as error:
        raise ConfigError(f'{error}; a worker process is given JSON only: set isolation to "thread"') from error
    return checked

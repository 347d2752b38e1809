"""`ProcessEnv`: an environment that runs in a worker process.

It cannot hurt the program: a crash is an EnvError that says how, a call that misses its deadline is ended by killing
the process and all that it started (a thread in a C loop cannot be ended), and changes of memory, descriptors and
process-wide state stay in the worker. This is no security boundary.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gspo_gym import errors
from gspo_gym.base.messages import message_from_wire
from gspo_gym.env.core import Isolation
from gspo_gym.env.workers.limits import LIMIT_SIGNAL, WorkerLimits
from gspo_gym.env.workers.pool import POOL, ProcessPool, WorkerEndedError, WorkerProcess
from gspo_gym.env.workers.target import ProcessTarget, target_of
from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.env.workers.wire import (
    MAX_REQUEST_BYTES,
    Json,
    Step,
    cause_from_json,
    encode,
    message_to_json,
    require_json,
    step_from_json,
)
from gspo_gym.errors import ActionLimitError, EnvDiedError, EnvError, EnvTimeoutError, GymError, UsageError
from gspo_gym.types import Message

_log = logging.getLogger(__name__)

Reset = tuple[Sequence[Message], Mapping[str, Any]]


class ProcessEnv:
    """An environment in a worker process, for one episode after another; its methods are async.

    The constructor blocks until the process and the environment are there. A call that is cancelled, as at a missed
    deadline, kills the process. `close` returns the process to the pool with its modules imported; the process of an
    instance that is garbage collected without `close` is killed.

    Before each `reset` the worker seeds its `random`, `numpy.random` and, if loaded, torch generators from the
    episode's seed, so that is all an environment that draws from them depends on.

    Args:
        env: a registered name, or a class or function that a worker can import.
        kwargs: JSON arguments of its constructor.
        start_timeout_seconds: limit of the constructor, with what it loads.
        limits: limits of the worker.
        pool: pool that leases workers.

    Attributes:
        takes_messages, tool_schemas, reward_range, confinement, max_action_seconds: as the environment declares them.
        policies: async players that run in the worker, beside the hidden state.
        declared_isolation: the environment's own `isolation`.
        changed_generators: after `close`, the process-wide generators that it was seen to use.

    Raises:
        UnknownNameError: no environment of that name.
        ConfigError: a worker cannot import it, an argument is no JSON, or this system is not Linux.
        EnvError, EnvTimeoutError: its constructor raised, or did not return in time.
        ContractError: it made no environment, or its tool schemas are no JSON.
    """

    isolation: Isolation = "process"

    def __init__(
        self,
        env: str | Callable[..., Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        start_timeout_seconds: float = 60.0,
        limits: WorkerLimits | None = None,
        pool: ProcessPool = POOL,
    ) -> None:
        target = target_of(env, kwargs or {})
        self.env_id = target.name
        self._limits = limits or WorkerLimits()
        self._pool = pool
        self._num_players = 0
        self.changed_generators: tuple[str, ...] = ()
        self._worker: WorkerProcess | None = None
        self._thread = OwnThread()
        declaration = self._open(target, start_timeout_seconds)
        low, high = declaration["reward_range"]
        self.takes_messages: bool = declaration["takes_messages"]
        self.tool_schemas: tuple[Mapping[str, Any], ...] = tuple(declaration["tool_schemas"])
        self.reward_range: tuple[float, float] = (low, high)
        self.policies = {name: _RemotePolicy(name) for name in declaration["policies"]}
        self.declared_isolation: Isolation | None = declaration["isolation"]
        self.confinement: str | None = declaration["confinement"]
        self.max_action_seconds: float | None = declaration["max_action_seconds"]

    @property
    def pid(self) -> int:
        """Return the process id of the worker; a UsageError if the environment is closed."""
        if self._worker is None:
            raise UsageError(f"{self.env_id}: the environment is closed, and has no process any more")
        return self._worker.pid

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> Reset:
        """Start an episode and return (messages, info). The methods raise what `EnvSession` raises."""
        json_options = (
            None if options is None else require_json(dict(options), where=f"{self.env_id}: options of reset()")
        )
        messages, _, _, _, info = await self._step("reset", {"seed": int(seed), "options": json_options})
        return messages, info

    async def step(self, action: Message | str) -> Step:
        message = Message("assistant", action) if isinstance(action, str) else action
        return await self._step("step", {"action": message_to_json(message)})

    async def invalid_action(self, error: str) -> Step:
        """Return the answer to text that could not be read as an action."""
        return await self._step("invalid_action", {"error": error})

    async def close(self) -> None:
        """Close the environment and return its process to the pool, or end one that leaked; again does nothing."""
        if self._worker is None:
            return
        worker = self._worker
        try:
            leftovers = await self._ask("close", {})
        except GymError:
            self._end("replaced")  # what the environment left open is unknown
            raise
        self.changed_generators = tuple(leftovers["changed_generators"])
        self._put_away(worker, leftovers["grown"])

    def kill(self) -> None:
        """End the process at once; only `close` may follow, and does nothing."""
        self._end("killed")

    def _open(self, target: ProcessTarget, max_seconds: float) -> Json:
        variables = {name: os.environ[name] for name in self._limits.variables if name in os.environ}
        request = {
            "method": "open",
            "target": target.to_json(),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "folder": os.getcwd(),
            "variables": variables,
        }
        payload = encode(request, max_bytes=MAX_REQUEST_BYTES, where=f"{self.env_id}: arguments")
        memory_mb = self._limits.memory_mb
        kind = (target.entry_point, target.main_path, memory_mb, tuple(sorted(variables.items())))
        while True:
            worker = self._pool.lease(kind, memory_limit_mb=memory_mb)
            self._hold(worker)
            try:
                answer = worker.exchange(payload, max_seconds=max_seconds)
                break
            except TimeoutError:
                self._end("killed")
                text = f"{self.env_id}: making the environment took longer than {max_seconds:g} seconds"
                raise EnvTimeoutError(text) from None
            except WorkerEndedError as error:
                self._end("died")
                if worker.num_episodes == 0:
                    text = f"{self.env_id}: {_death(error.status)} while the environment was made"
                    raise EnvDiedError(text) from None
                # It waited for its next episode, and may have died with its host: that is no attempt.
            except BaseException:
                self._end("killed")
                raise
        worker.num_episodes += 1
        if "error" in answer:
            self._end("replaced")
        return self._read(answer)

    def _hold(self, worker: WorkerProcess) -> None:
        self._worker = worker
        # An instance that came too late for its deadline has no owner to close it, and must not leave its process
        # behind.
        self._finalizer = weakref.finalize(self, self._pool.discard, worker, "killed")
        self._finalizer.atexit = False

    def _let_go(self) -> None:
        self._worker = None
        self._finalizer.detach()
        self._thread.release()

    def _end(self, count_as: str) -> None:
        worker = self._worker
        if worker is not None:
            self._let_go()
            self._pool.discard(worker, count_as)

    def _put_away(self, worker: WorkerProcess, growth: Mapping[str, int]) -> None:
        reason = self._limits.reason_to_replace(growth)
        if reason is not None:
            _log.info("%s: a worker process is replaced: it %s", self.env_id, reason)
            self._end("replaced")
        elif worker.num_episodes >= self._limits.max_episodes:
            self._end("retired")
        else:
            self._let_go()
            self._pool.give_back(worker)

    async def _ask(self, method: str, request: Mapping[str, Json]) -> Json:
        worker = self._worker
        if worker is None:
            raise UsageError(f"{self.env_id}: {method}() in a process that has ended; make a new environment")
        where = f"{self.env_id}: {method}(): a request"
        payload = encode({"method": method, **request}, max_bytes=MAX_REQUEST_BYTES, where=where)
        try:
            outcome = await self._thread.call_async(partial(worker.exchange, payload), timeout_seconds=None)
        except BaseException:  # cancelled: the deadline passed, or the episode was stopped
            self._thread.abandon()
            self._end("killed")
            raise
        try:
            return self._read(outcome.unwrap())
        except WorkerEndedError as error:
            self._end("died")
            status = error.status
        if status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == LIMIT_SIGNAL:
            raise ActionLimitError(f"{self.env_id}: {method}() ran into its limit on one call")
        raise EnvDiedError(f"{self.env_id}: {_death(status)} in {method}()")

    def _read(self, answer: Json) -> Json:
        if "error" not in answer:
            return answer["result"]
        kind = getattr(errors, str(answer["error"]), EnvError)
        raise kind(answer["text"]) from cause_from_json(answer["cause"])

    async def _step(self, method: str, request: Mapping[str, Json]) -> Step:
        return step_from_json(await self._ask(method, request), where=f"{self.env_id}: {method}()")

    def _next_player(self) -> int:
        self._num_players += 1
        return self._num_players

    async def _say(self, request: Mapping[str, Json]) -> Message | str:
        reply = await self._ask("say", request)
        return reply if isinstance(reply, str) else message_from_wire(reply, where=f"{self.env_id}: the player")


@dataclass(frozen=True, slots=True)
class _RemotePolicy:
    """A policy that plays in the worker; equal for all instances."""

    name: str

    def __call__(
        self, env: ProcessEnv, rng: np.random.Generator
    ) -> Callable[[Sequence[Message]], Awaitable[Message | str]]:
        state = require_json(dict(rng.bit_generator.state), where=f"{env.env_id}: generator of policy {self.name!r}")
        player = {"player": env._next_player(), "policy": self.name, "generator": state}

        async def say(messages: Sequence[Message]) -> Message | str:
            return await env._say({**player, "messages": [message_to_json(message) for message in messages]})

        return say


def _death(status: int | None) -> str:
    if status is None:
        return "its worker process ended, it is not known how,"
    if os.WIFSIGNALED(status):
        return f"its worker process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"its worker process exited with status {os.waitstatus_to_exitcode(status)}"

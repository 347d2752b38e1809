"""Daemon threads for synchronous environment code, so a slow or hanging call blocks no other environment.

A thread has one owner at a time (an `EnvSession`, or a `ToolEnv` with time limits), because libraries such as sqlite3
tie objects to the thread that made them. Later owners reuse it, unless a call in it missed its deadline: then it is
abandoned. Environments that may change threads share one while they are quick (`QuickCalls`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gspo_gym.errors import EnvError

_MAX_IDLE = 256  # threads kept for later owners
_QUICK_SECONDS = 0.001  # a mean call that is quick takes less; two changes of threads take as long on a busy machine
_FIRST_MEAN = 2.7 * _QUICK_SECONDS  # without a call; 1/e of it is left after _NUM_AVERAGED calls of no time
_NUM_AVERAGED = 32
_PATIENCE_SECONDS = 0.2  # for one call in a shared thread


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of a call: its value, or the error that it raised."""

    value: Any
    error: BaseException | None

    def unwrap(self) -> Any:
        """Return the value, or raise the error.

        One that ends a program or a coroutine in whose midst it is raised becomes the cause of an EnvError: Ctrl-C
        raises KeyboardInterrupt in the main thread only.
        """
        if isinstance(self.error, KeyboardInterrupt | GeneratorExit):
            raise EnvError(f"raised {type(self.error).__name__}: {self.error}") from self.error
        if self.error is not None:
            raise self.error
        return self.value


def _outcome_of(function: Callable[[], Any]) -> Returned:
    try:
        return Returned(function(), None)
    except BaseException as error:  # SystemExit too: the environment failed, the thread goes on
        return Returned(None, error)


class Worker:
    """A daemon thread that makes calls one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Returned], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="gspo-gym-env").start()

    def submit(self, function: Callable[[], Any], on_returned: Callable[[Returned], Any]) -> None:
        """Call `function` after all earlier calls, then `on_returned`, which must not raise."""
        self._jobs.put((function, on_returned))

    def stop(self) -> None:
        """End the thread after the submitted calls."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, on_returned = job
            outcome = _outcome_of(function)
            on_returned(outcome)
            del job, function, on_returned, outcome  # an idle thread keeps no environment alive


class WorkerPool:
    """Idle workers, waiting for their next owner."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []  # append and pop are atomic

    def lease(self) -> Worker:
        """Return an idle worker, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            return Worker()

    def give_back(self, worker: Worker) -> None:
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(worker)
        else:
            worker.stop()

    def forget(self) -> None:
        """Drop the idle workers; after a fork their threads do not exist."""
        self._idle = []


# Module state: threads are a resource of the process, shared by all sessions.
_POOL = WorkerPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.forget)


class OwnThread:
    """The thread of one owner, from the first call until `release` or garbage collection."""

    def __init__(self, pool: WorkerPool = _POOL) -> None:
        self._pool = pool
        self.num_shared = 0  # calls that wait or run in a shared thread, see `QuickCalls`
        self._worker: Worker | None = None
        self._finalizer: weakref.finalize[[Worker], OwnThread] | None = None

    def call(self, function: Callable[[], Any], *, timeout_seconds: float | None) -> Returned:
        """Make the call in the thread and wait; None waits without limit.

        An error of `function` is in the result; a TimeoutError says that the deadline passed. Call `abandon` then.
        """
        box: queue.SimpleQueue[Returned] = queue.SimpleQueue()
        self.lease().submit(function, box.put)
        try:
            return box.get(timeout=timeout_seconds)
        except queue.Empty:
            raise TimeoutError from None

    async def call_async(self, function: Callable[[], Any], *, timeout_seconds: float | None) -> Returned:
        """Like `call`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Returned] = loop.create_future()

        def tell(returned: Returned) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
                loop.call_soon_threadsafe(_settle, future, returned)

        self.lease().submit(function, tell)
        async with asyncio.timeout(timeout_seconds):
            return await future

    @property
    def has_thread(self) -> bool:
        """Return whether it holds a thread, which makes all its calls until `release` or `abandon`."""
        return self._worker is not None

    def keep(self, worker: Worker) -> None:
        """Take over a shared thread, which makes a call of this owner and is stuck in it."""
        assert self._worker is None, "its calls would run in two threads"
        self._worker = worker
        self._finalizer = weakref.finalize(self, self._pool.give_back, worker)
        self._finalizer.atexit = False

    def abandon(self, last_call: Callable[[], Any] | None = None) -> None:
        """Leave the thread alone; if its call ever returns, it makes `last_call` and ends."""
        worker = self._detach()
        if worker is not None:
            if last_call is not None:
                worker.submit(last_call, _ignore)
            worker.stop()

    def release(self) -> None:
        """Return the idle thread to the pool."""
        worker = self._detach()
        if worker is not None:
            self._pool.give_back(worker)

    def lease(self) -> Worker:
        """Return its thread, which it takes from the pool if it has none."""
        if self._worker is None:
            self.keep(self._pool.lease())
        assert self._worker is not None
        return self._worker

    def _detach(self) -> Worker | None:
        worker, self._worker = self._worker, None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        return worker


def _settle(future: asyncio.Future[Returned], outcome: Returned) -> None:
    if not future.done():  # cancelled: the deadline passed, or the episode was stopped
        future.set_result(outcome)


def _ignore(_: Returned) -> None: ...


@dataclass(slots=True, eq=False)
class _Call:
    owner: OwnThread
    name: str
    function: Callable[[], Any]
    future: asyncio.Future[Returned]
    clock: Callable[[], float]
    returned: Returned = Returned(None, None)
    started: float = math.inf
    seconds: float = 0.0
    is_noted: bool = False

    def make(self) -> None:
        self.started = self.clock()
        self.returned = _outcome_of(self.function)
        self.seconds = self.clock() - self.started


class _Round:
    """Calls that one thread makes in turn; the lock decides whether the thread or the event loop takes a call."""

    def __init__(self, calls: Iterable[_Call], worker: Worker) -> None:
        self.worker = worker
        self.present: _Call | None = None
        self._waiting = deque(calls)
        self._ended_calls: list[_Call] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Make the calls; in the thread."""
        while (call := self._next()) is not None:
            call.make()

    def _next(self) -> _Call | None:
        with self._lock:
            if self.present is not None:
                self._ended_calls.append(self.present)
            self.present = self._waiting.popleft() if self._waiting else None
            return self.present

    def take_ended(self) -> list[_Call]:
        """Take the calls that have returned."""
        with self._lock:
            ended_calls, self._ended_calls = self._ended_calls, []
            return ended_calls

    def take_waiting(self, stuck: _Call) -> list[_Call] | None:
        """Take the calls behind `stuck`, or return None if it has ended."""
        with self._lock:
            if self.present is not stuck:
                return None
            waiting = list(self._waiting)
            self._waiting.clear()
            return waiting


class QuickCalls:
    """One thread for the calls of many owners, as long as they are quick. Use it in one event loop at a time.

    A call in a thread of its owner costs two changes of threads, many times what a board game needs to answer. Here the
    calls that are asked for at about the same time are made in turn and answered together. A call that takes more
    than 0.2 seconds keeps the thread, which becomes its owner's, and those behind it go to threads of their owners: so
    long a hanging call delays others, and its deadline, the watchdog and `OwnThread.abandon` find it in a thread.

    Calls share the thread by name while they take less than a millisecond in the mean of some 32 calls. Owners whose
    calls have one name may all be called in any thread.
    """

    def __init__(
        self,
        pool: WorkerPool = _POOL,
        *,
        clock: Callable[[], float] = time.perf_counter,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._mean_seconds: dict[str, float] = {}
        self._next_calls: list[_Call] = []
        self._round: _Round | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_quick(self, name: str) -> bool:
        """Return whether calls of that name share the thread."""
        return self._mean_seconds.get(name, _FIRST_MEAN) < _QUICK_SECONDS

    def allows(self, deadline_seconds: float | None) -> bool:
        """Return whether a call with this deadline may share the thread, where it may wait behind others."""
        return deadline_seconds is None or deadline_seconds >= 5 * self._patience_seconds

    async def call(self, owner: OwnThread, name: str, function: Callable[[], Any]) -> Returned:
        """Make the call, after all earlier calls of its owner; see `OwnThread.call_async`."""
        call = _Call(owner, name, function, asyncio.get_running_loop().create_future(), self._clock)
        # Where an earlier call, which was cancelled, may still wait: in another thread, this one would overtake it.
        if not owner.has_thread and (owner.num_shared or self.is_quick(name)):
            self._ask(call)
            return await call.future
        (await owner.call_async(call.make, timeout_seconds=None)).unwrap()
        self._note(call)
        if self.is_quick(name):
            owner.release()  # the next one goes to the shared thread
        return call.returned

    def post(self, owner: OwnThread, name: str, function: Callable[[], Any]) -> None:
        """Make a call that is not waited for, after the earlier calls of its owner in the shared thread."""
        self._ask(_Call(owner, name, function, asyncio.get_running_loop().create_future(), self._clock))

    def _note(self, call: _Call) -> None:
        if call.is_noted:  # when it was stuck
            return
        call.is_noted = True
        mean = self._mean_seconds.get(call.name, _FIRST_MEAN)
        self._mean_seconds[call.name] = mean + (call.seconds - mean) / _NUM_AVERAGED

    def _ask(self, call: _Call) -> None:
        loop = call.future.get_loop()
        if loop is not self._loop:  # the old one is closed, with all that waited
            self._loop, self._next_calls, self._round = loop, [], None
        if not self._next_calls and self._round is None:
            loop.call_soon(self._begin)  # after all that can run now, whose calls come along
        call.owner.num_shared += 1
        self._next_calls.append(call)

    def _begin(self) -> None:
        loop, calls = asyncio.get_running_loop(), self._next_calls
        self._next_calls = []
        try:
            new_round = self._round = _Round(calls, self._pool.lease())
        except RuntimeError as error:  # no thread can be started
            self._fail(calls, error)
            return
        loop.call_later(self._patience_seconds, self._look, new_round)

        def tell(_: Returned) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
                loop.call_soon_threadsafe(self._end, new_round)

        new_round.worker.submit(new_round.run, tell)

    def _end(self, call_round: _Round) -> None:
        self._settle(call_round.take_ended())
        if call_round is self._round:  # it was not given up
            self._round = None
            self._pool.give_back(call_round.worker)
            if self._next_calls:
                self._begin()

    def _look(self, call_round: _Round) -> None:
        if call_round is not self._round:
            return
        stuck, seconds, waiting = call_round.present, 0.0, None
        if stuck is not None:  # on a busy machine, a thread may begin late
            seconds = max(0.0, self._clock() - stuck.started)
            waiting = call_round.take_waiting(stuck) if seconds >= self._patience_seconds else None
        if stuck is None or waiting is None:
            asyncio.get_running_loop().call_later(self._patience_seconds - seconds, self._look, call_round)
            return
        stuck.owner.keep(call_round.worker)
        stuck.seconds = seconds  # at least: it may never return, and must not be quick until then
        self._note(stuck)
        self._settle(call_round.take_ended())
        calls = [*waiting, *self._next_calls]
        self._round, self._next_calls = None, []
        for call in calls:
            try:
                self._move(call)
            except RuntimeError as error:  # no thread can be started
                self._fail([call], error)

    def _move(self, call: _Call) -> None:
        loop = call.future.get_loop()

        def tell(_: Returned) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
                loop.call_soon_threadsafe(self._settle, [call])

        call.owner.lease().submit(call.make, tell)

    def _settle(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            call.owner.num_shared -= 1
            self._note(call)
            _settle(call.future, call.returned)

    def _fail(self, calls: Iterable[_Call], error: RuntimeError) -> None:
        for call in calls:
            call.owner.num_shared -= 1
            if not call.future.done():
                call.future.set_exception(error)

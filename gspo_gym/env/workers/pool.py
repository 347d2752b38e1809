"""Worker processes: forked by the server process, reused by later episodes, and ended.

A worker that closed its environment cleanly waits for the next one of the same kind, with its modules imported. A
worker that missed a deadline, died, leaked or played long enough is replaced. Leasing blocks, so call it in a thread;
the rest returns at once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import IO, Any

from gspo_gym.base.leftovers import end_with_us, has_ended, remove_folder, temporary_folder
from gspo_gym.env.workers.channel import MAX_ANSWER_BYTES, Channel
from gspo_gym.env.workers.threads import Returned, WorkerPool
from gspo_gym.errors import ConfigError, EnvError

_START_SECONDS = 60.0  # for the server's imports, on a busy machine
_ANSWER_SECONDS = 10.0  # what the server is asked takes milliseconds; it is stopped then
_REAP_SECONDS = 60.0  # for a killed process to end: with much memory, or a disk that hangs, that takes long
_STOP_SECONDS = 5.0
# Environment variables that the server and its workers get: no tokens, keys or proxies.
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerProcess:
    """A worker: its connection, process id and kind."""

    def __init__(self, server: ProcessServer, pid: int, channel: Channel, kind: tuple[Any, ...]) -> None:
        self.pid = pid
        self.channel = channel
        self.kind = kind
        self.num_episodes = 0
        self.loaded: set[str] = set()  # keys of `Loading`
        self._server = server
        self._exit_status: Future[int | None] | None = None

    def kill(self) -> Future[int | None]:
        """Kill it with everything it started; return its status as of `os.waitpid`, None if unknown.

        Returns at once; again does nothing.
        """
        if self._exit_status is None:
            # Kill before closing: an idle worker whose connection closes exits by itself, as if it had not been
            # killed.
            self._exit_status = self._server.kill(self.pid)
            self.channel.close()
        return self._exit_status


class ProcessServer:
    """Handle of the server process, which starts when first needed and again after it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._home: str | None = None
        self._threads = WorkerPool()  # each reaps one worker

    def fork(self, memory_limit_mb: int) -> tuple[int, socket.socket]:
        """Return the id of a fresh worker process and our end of its connection."""
        try:
            with self._lock:
                return self._fork(memory_limit_mb)
        except OSError:
            pass  # the server died since the last request: start it again
        try:
            with self._lock:
                return self._fork(memory_limit_mb)
        except OSError as error:
            raise EnvError(f"the server of worker processes cannot fork: {error}") from error

    def kill(self, pid: int) -> Future[int | None]:
        """Kill a worker with its whole group at once; return its status."""
        # The id stays its own until it is reaped, so this cannot hit another process.
        for kill in (os.killpg, os.kill):  # right after the fork it has no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
                break
        status: Future[int | None] = Future()
        status.set_running_or_notify_cancel()  # waiting for it may be cancelled, the future itself may not
        thread = self._threads.lease()

        def tell(returned: Returned) -> None:
            status.set_result(returned.value)
            self._threads.give_back(thread)

        thread.submit(partial(self._reap, pid), tell)
        return status

    def close(self) -> None:
        """End the server and all workers, and wait until they are gone."""
        with self._lock:
            self._stop()

    def hang_up(self) -> None:
        """Drop a server that belongs to the parent program, after a fork."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.returncode = 0  # not our child, so Popen must not wait for it

    def _fork(self, memory_limit_mb: int) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._ask({"fork": memory_limit_mb}, theirs)
            except BaseException:
                ours.close()
                self._stop(at_once=True)
                raise
        if pid is None:  # the server works, and so do its workers
            ours.close()
            raise EnvError("no worker process can be started: the system refuses more processes or has no memory")
        return int(pid), ours

    def _reap(self, pid: int) -> int | None:
        # Teardown may take long, and all workers share the server: ask it only when reaping will not block.
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                poll = select.poll()  # unlike select.select, it takes descriptors above 1023
                poll.register(handle, select.POLLIN)
                if not poll.poll(_REAP_SECONDS * 1000):
                    return None
            finally:
                os.close(handle)
        with self._lock:
            if self._control is None:
                return None
            try:
                status = self._ask({"reap": pid})
            except OSError:
                self._stop(at_once=True)
                return None
        return None if status is None else int(status)

    def _ask(self, request: Mapping[str, Any], attached: socket.socket | None = None) -> Any:
        # An OSError says that the server is gone, or has not answered in time.
        if self._control is None:
            self._start()
        assert self._control is not None
        self._control.settimeout(_ANSWER_SECONDS)
        data = json.dumps(request).encode("ascii")
        socket.send_fds(self._control, [data], [] if attached is None else [attached.fileno()])
        answer = self._control.recv(4096)
        if not answer:
            raise ConnectionResetError("it has ended")
        return json.loads(answer)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._home = temporary_folder("gspo_gym_worker_")
        with theirs, tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gspo_gym.env.workers.server", str(theirs.fileno()), self._home],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_server_variables(self._home),
                start_new_session=True,  # Ctrl-C goes to the program, which ends the workers itself
            )
            end_with_us(self._process.pid)  # it ends by itself, unless something has stopped it
            theirs.close()
            ours.settimeout(_START_SECONDS)
            try:
                is_ready = bool(ours.recv(64))
            except OSError:
                is_ready = False
            if not is_ready:
                self._control = ours
                self._stop(at_once=True)
                raise ConnectionResetError(f"it did not start: {_last_line(log)}")
        self._control = ours

    def _stop(self, *, at_once: bool = False) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(0.0 if at_once else _STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()  # with its workers
                self._process.wait()
            has_ended(self._process.pid)
            self._process = None
        if self._home is not None:
            remove_folder(self._home)
            self._home = None


class ProcessPool:
    """Idle workers, waiting for their next episode; of all kinds as many as have ever been in use at once.

    So a batch of episodes forks nothing that the one before it had forked.

    Attributes:
        counts: numbers of workers "started", "reused", "killed", "died", "replaced" and "retired" so far.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._most_used = 0
        self._server = ProcessServer()
        self._lock, self._forking = threading.Lock(), threading.Lock()
        self._idle: list[WorkerProcess] = []  # longest idle first
        self._used: set[WorkerProcess] = set()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def lease(self, kind: tuple[Any, ...], *, memory_limit_mb: int) -> WorkerProcess:
        """Return an idle worker of this kind (its imports and limits), or a new one; blocks."""
        if not is_supported():
            raise ConfigError(f'worker processes need Linux, this is {sys.platform}; set isolation to "thread"')
        worker = self._take_idle(kind)
        if worker is None:
            with self._forking:  # in turn, as the server forks; an episode may have ended meanwhile
                worker = self._take_idle(kind) or self._start(kind, memory_limit_mb)
        return worker

    def give_back(self, worker: WorkerProcess) -> None:  # which has nothing open
        with self._lock:
            self._used.discard(worker)
            self._idle.append(worker)
            too_many = self._idle.pop(0) if len(self._idle) > self._most_used else None
        if too_many is not None:
            self.discard(too_many, "retired")

    def discard(self, worker: WorkerProcess, count_as: str) -> Future[int | None]:
        """End a worker at once; return its status."""
        with self._lock:
            self._used.discard(worker)
        self.counts[count_as] += 1
        return worker.kill()

    def close(self) -> None:
        """End all workers and the server; the pool can be used again."""
        with self._lock:
            workers, self._idle = [*self._idle, *self._used], []
            self._used.clear()
        for worker in workers:
            worker.kill()
        self._server.close()

    def forget(self) -> None:
        """Drop the workers without ending them; after a fork they are the parent's."""
        for worker in (*self._idle, *self._used):
            worker.channel.close()
        self._server.hang_up()
        self._server = ProcessServer()
        self.counts, self._idle, self._used, self._most_used = Counter(), [], set(), 0
        self._lock, self._forking = threading.Lock(), threading.Lock()

    def _start(self, kind: tuple[Any, ...], memory_limit_mb: int) -> WorkerProcess:
        pid, connection = self._server.fork(memory_limit_mb)
        worker = WorkerProcess(self._server, pid, Channel(connection, max_bytes=MAX_ANSWER_BYTES), kind)
        with self._lock:
            self._use(worker)
        self.counts["started"] += 1
        return worker

    def _take_idle(self, kind: tuple[Any, ...]) -> WorkerProcess | None:
        while (worker := self._take_last(kind)) is not None:
            if worker.channel.is_silent:
                self.counts["reused"] += 1
                return worker
            self.discard(worker, "died")  # while idle, such as by the kernel's out-of-memory killer
        return None

    def _take_last(self, kind: tuple[Any, ...]) -> WorkerProcess | None:
        with self._lock:
            for worker in reversed(self._idle):  # the last used is most likely in the caches
                if worker.kind == kind:
                    self._idle.remove(worker)
                    self._use(worker)
                    return worker
        return None

    def _use(self, worker: WorkerProcess) -> None:
        self._used.add(worker)
        self._most_used = max(self._most_used, len(self._used))


def is_supported() -> bool:
    """Return whether this system can run worker processes (only Linux can)."""
    return sys.platform == "linux"


def _server_variables(home: str) -> dict[str, str]:
    path = [os.path.abspath(entry) for entry in sys.path]  # "" is the working directory
    variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    variables |= dict.fromkeys(_ONE_THREAD, "1")
    # The iteration order of a set of str depends on the hash seed: with a random one, tasks would differ between
    # runs.
    return variables | {"HOME": home, "TMPDIR": home, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0"}


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


# Module state: processes are a resource of the program, shared by all episodes.
POOL = ProcessPool()
atexit.register(POOL.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)

"""Worker processes: forked by the host, reused by later episodes, and ended.

A worker that closed its environment cleanly waits for the next one of the same kind, with its modules imported. A
worker that missed a deadline, died, leaked or played long enough is replaced. Leasing blocks, so call it in a thread;
the rest returns at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from multiprocessing.connection import Connection, Pipe
from typing import Any

from gspo_gym.base.leftovers import end_with_us, has_ended, remove_folder, temporary_folder
from gspo_gym.env.workers.wire import MAX_ANSWER_BYTES, Json, decode
from gspo_gym.errors import ConfigError, EnvError

_START_SECONDS = 60.0  # for the host's imports, on a busy machine
_FORK_SECONDS = 10.0  # takes milliseconds; a host that needs longer is stopped
_END_SECONDS = 10.0  # from the end of a connection to that of its process, and for the host to end
# Environment variables that the host and its workers get: no tokens, keys or proxies.
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerEndedError(Exception):
    """The process has ended; `status` is as of `os.waitpid`, None if unknown."""

    def __init__(self, status: int | None) -> None:
        super().__init__()
        self.status = status


class WorkerProcess:
    """A worker: its process id, kind and connection."""

    def __init__(self, connection: Connection, lifeline: Connection, kind: tuple[Any, ...]) -> None:
        self.pid = 0  # until it is forked
        self.kind = kind
        self.num_episodes = 0
        self._connection = connection
        self._lifeline = lifeline

    @property
    def is_silent(self) -> bool:
        """Return whether neither data nor the end of the connection has come unasked."""
        return not self._connection.poll()

    def exchange(self, request: bytes, *, max_seconds: float | None = None) -> Json:
        """Send a request and return the answer; blocks, for one exchange at a time.

        Raises:
            TimeoutError: no answer within `max_seconds`.
            WorkerEndedError: the process has ended, or was killed meanwhile.
            ContractError: the answer is no JSON.
        """
        try:
            self._connection.send_bytes(request)
            if not self._connection.poll(max_seconds):
                raise TimeoutError
            answer = self._connection.recv_bytes(MAX_ANSWER_BYTES)
        except TimeoutError:
            raise
        except (EOFError, OSError):  # an OSError also for an answer that is too long, of a worker that is not ours
            raise WorkerEndedError(self._status()) from None
        return decode(answer)

    def kill(self) -> None:
        """Have it killed with everything it started. Returns at once; again does nothing."""
        # Not closed: another thread may be reading from it.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._lifeline.fileno())) as lifeline:
            lifeline.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        """Close this process's ends, of a worker that belongs to another process."""
        self._lifeline.close()
        self._connection.close()

    def news(self, max_seconds: float) -> str:
        """Return what the host sends about it, once each: its process id or why it has none, and its status.

        Raises:
            OSError: the host is gone, or has not answered in time.
        """
        if not self._lifeline.poll(max_seconds):
            raise TimeoutError("the host does not answer")
        try:
            return self._lifeline.recv_bytes().decode()
        except EOFError as error:
            raise ConnectionResetError("the host has ended") from error

    def _status(self) -> int | None:
        try:
            return int(self.news(_END_SECONDS))
        except OSError:
            return None


class Host:
    """Handle of the host, which starts when first needed and again after it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._home = ""

    @property
    def pid(self) -> int | None:
        """Return its process id; None while it does not run."""
        return None if self._process is None else self._process.pid

    def fork(self, kind: tuple[Any, ...], memory_limit_mb: int) -> WorkerProcess:
        """Return a fresh worker process; an EnvError if there can be none."""
        with self._lock:
            try:
                return self._fork(kind, memory_limit_mb)
            except OSError:  # it died since the last request, or has stopped: start it again
                self._stop(at_once=True)
            try:
                return self._fork(kind, memory_limit_mb)
            except OSError as error:
                self._stop(at_once=True)
                raise EnvError(f"the host of worker processes cannot fork: {error}") from error

    def close(self) -> None:
        """End the host and all workers, and wait until they are gone."""
        with self._lock:
            self._stop()

    def drop(self) -> None:
        """Forget a host that belongs to the parent program, after a fork."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.returncode = 0  # not our child, so Popen must not wait for it

    def _fork(self, kind: tuple[Any, ...], memory_limit_mb: int) -> WorkerProcess:
        with tempfile.TemporaryFile() as log:
            is_fresh = self._requests is None
            if is_fresh:
                self._start(log.fileno())
            assert self._requests is not None
            (connection, its_connection), (lifeline, its_lifeline) = Pipe(), Pipe()
            worker = WorkerProcess(connection, lifeline, kind)
            with its_connection, its_lifeline:
                ends = [its_connection.fileno(), its_lifeline.fileno()]
                socket.send_fds(self._requests, [str(memory_limit_mb).encode("ascii")], ends)
            try:
                answer = worker.news(_START_SECONDS if is_fresh else _FORK_SECONDS)
            except ConnectionResetError as error:
                log.seek(0)
                lines = log.read().decode("utf-8", "replace").strip().split("\n")
                raise ConnectionResetError(lines[-1] or str(error)) from error
        if not answer.isdecimal():  # the host works, and so do its workers
            raise EnvError(f"no worker process can be started: {answer}")
        worker.pid = int(answer)
        return worker

    def _start(self, log: int) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._home = temporary_folder("gspo_gym_worker_")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gspo_gym.env.workers.host", str(theirs.fileno()), self._home],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_variables_of_host(self._home),
                start_new_session=True,  # Ctrl-C goes to the program, which ends the workers itself
            )
        end_with_us(self._process.pid)  # it ends by itself, unless something has stopped it

    def _stop(self, *, at_once: bool = False) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            try:
                self._process.wait(0.0 if at_once else _END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()  # with its workers
                self._process.wait()
            has_ended(self._process.pid)
            self._process = None
            remove_folder(self._home)


class ProcessPool:
    """Idle workers, waiting for their next episode; of all kinds as many as have ever been in use at once.

    So a batch of episodes forks nothing that the one before it had forked.

    Attributes:
        counts: numbers of workers "started", "reused", "killed", "died", "replaced" and "retired" so far.
    """

    def __init__(self) -> None:
        self._begin()

    def forget(self) -> None:
        """Begin anew without ending the workers; after a fork they are the parent's."""
        for worker in (*self._idle, *self._workers_in_use):
            worker.drop()
        self.host.drop()
        self._begin()

    def _begin(self) -> None:
        self.host = Host()
        self.counts: Counter[str] = Counter()
        self._most_used = 0
        self._lock, self._forking = threading.Lock(), threading.Lock()
        self._idle: list[WorkerProcess] = []  # longest idle first
        self._workers_in_use: set[WorkerProcess] = set()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def lease(self, kind: tuple[Any, ...], *, memory_limit_mb: int) -> WorkerProcess:
        """Return an idle worker of this kind (its imports and limits), or a new one; blocks."""
        if not is_supported():
            raise ConfigError(f'worker processes need Linux, this is {sys.platform}; set isolation to "thread"')
        worker = self._take_idle(kind)
        if worker is None:
            with self._forking:  # in turn, as the host forks; an episode may have ended meanwhile
                worker = self._take_idle(kind) or self._start(kind, memory_limit_mb)
        return worker

    def give_back(self, worker: WorkerProcess) -> None:  # which has nothing open
        with self._lock:
            self._workers_in_use.discard(worker)
            self._idle.append(worker)
            too_many = self._idle.pop(0) if len(self._idle) > self._most_used else None
        if too_many is not None:
            self.discard(too_many, "retired")

    def discard(self, worker: WorkerProcess, count_as: str) -> None:
        """Have a worker ended."""
        with self._lock:
            self._workers_in_use.discard(worker)
        self.counts[count_as] += 1
        worker.kill()

    def close(self) -> None:
        """End all workers and the host; the pool can be used again."""
        with self._lock:
            self._idle.clear()
            self._workers_in_use.clear()
        self.host.close()

    def _start(self, kind: tuple[Any, ...], memory_limit_mb: int) -> WorkerProcess:
        worker = self.host.fork(kind, memory_limit_mb)
        with self._lock:
            self._use(worker)
        self.counts["started"] += 1
        return worker

    def _take_idle(self, kind: tuple[Any, ...]) -> WorkerProcess | None:
        while (worker := self._take_last(kind)) is not None:
            if worker.is_silent:
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
        self._workers_in_use.add(worker)
        self._most_used = max(self._most_used, len(self._workers_in_use))


def is_supported() -> bool:
    """Return whether this system can run worker processes (only Linux can)."""
    return sys.platform == "linux"


def _variables_of_host(home: str) -> dict[str, str]:
    path = [os.path.abspath(entry) for entry in sys.path]  # "" is the working directory
    variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    variables |= dict.fromkeys(_ONE_THREAD, "1")
    # The iteration order of a set of str depends on the hash seed: with a random one, tasks would differ between
    # runs.
    return variables | {"HOME": home, "TMPDIR": home, "PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0"}


# Module state: processes are a resource of the program, shared by all episodes.
POOL = ProcessPool()
atexit.register(POOL.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.forget)

"""The process that worker processes are forked from: `python -m gspo_gym.env.workers.host DESCRIPTOR FOLDER`.

It has one thread, has imported what every environment needs, and only forks and ends: a new worker costs milliseconds,
shares that memory, and inherits no thread, lock, variable or open file of the program. Not `multiprocessing`'s fork
server: a program has one of these for all its libraries; it has the program's variables and a random hash seed, runs
the program's main file in every process, and leaves behind what a process has started.

A request on the descriptor is a limit of memory in MiB, and two ends of sockets: the connection of the new worker, and
its lifeline. On the lifeline this sends the worker's process id, and its status as of `os.waitpid` when it has ended. A
worker is killed, with all that it started, when the other end of its lifeline closes; all are when the descriptor does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from gspo_gym.env.registry import list_environments
from gspo_gym.env.workers.worker import run_worker

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(eq=False, slots=True)
class _Forked:
    pid: int
    handle: int  # a pidfd, which can be read from when the process has ended
    lifeline: Connection
    is_killed: bool = False

    def kill(self) -> None:
        # The id stays its own until it is reaped. Right after the fork, it has no group yet.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        self.is_killed = True

    def reap(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it started
        with contextlib.suppress(OSError):  # the program is gone
            self.lifeline.send_bytes(str(os.waitpid(self.pid, 0)[1]).encode("ascii"))
        self.lifeline.close()
        os.close(self.handle)


def main(argv: list[str]) -> None:
    """Serve on the descriptor `argv[0]` until its other end closes; then remove the workers' home, `argv[1]`."""
    # The program's end also comes as SIGTERM, of which more is to be ended than this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of workers become our children, and can be killed
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # two of them for each worker
    list_environments()  # finds installed environments once, for all workers
    gc.collect()
    gc.freeze()  # a collection in a worker would write to the shared pages, and so copy them
    _serve(socket.socket(fileno=int(argv[0])))
    shutil.rmtree(argv[1], ignore_errors=True)  # by us, because the program may have been killed


def _serve(requests: socket.socket) -> None:
    workers: set[_Forked] = set()
    is_open = True
    while is_open or workers:
        handles = {worker.handle: worker for worker in workers}
        lifelines = {worker.lifeline: worker for worker in workers if not worker.is_killed}
        ready = wait([*handles, *lifelines, *([requests] if is_open else [])])
        for worker in [handles[handle] for handle in handles if handle in ready]:
            worker.reap()
            workers.remove(worker)
            _kill_orphans({survivor.pid for survivor in workers})
        if requests in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, 64, 2)
            is_open = bool(request)
            workers |= _fork(int(request), *map(Connection, descriptors)) if is_open else set()
        for worker in workers:
            if not is_open or worker.lifeline in ready:
                worker.kill()
    _kill_orphans(set())


def _fork(memory_limit_mb: int, connection: Connection, lifeline: Connection) -> set[_Forked]:
    host = os.getpid()
    with connection:
        try:
            pid = os.fork()
        except OSError as error:
            lifeline.send_bytes(f"the system refuses: {error}".encode())
            lifeline.close()
            return set()
        if pid == 0:
            run_worker(connection, host=host, memory_limit_mb=memory_limit_mb)
    with contextlib.suppress(OSError):  # the program is gone
        lifeline.send_bytes(str(pid).encode("ascii"))
    return {_Forked(pid, os.pidfd_open(pid), lifeline)}


def _kill_orphans(workers: set[int]) -> None:
    # Processes that workers, now gone, started in sessions of their own, and their children in turn.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while orphans := {int(pid) for pid in children.read_text(encoding="ascii").split()} - workers:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1:])

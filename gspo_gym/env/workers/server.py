"""The process that worker processes are forked from: `python -m gspo_gym.env.workers.server DESCRIPTOR FOLDER`.

It has one thread, has imported what every environment needs, and only forks: a new worker costs milliseconds, shares
that memory, and inherits no thread, lock or open file of the program. When the program's connection ends, it kills all
workers and exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from gspo_gym.env.registry import list_environments
from gspo_gym.env.workers.worker import run_worker

_MAX_REQUEST_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36


def serve(control: socket.socket) -> None:
    """Answer requests until the other end closes; None says that it cannot.

    {"fork": memory_limit_mb}, sent with the worker's end of a connection, is answered by its process id; {"reap":
    process id} by its status as of `os.waitpid`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of workers become our children, and can be killed
    workers: set[int] = set()
    control.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 1)
        if not data:
            break
        request = json.loads(data)
        if "fork" in request:
            answer = _fork(control, descriptors[0], request["fork"])
            if answer is not None:
                workers.add(answer)
        else:
            workers.discard(request["reap"])
            answer = _reap(request["reap"])
            _kill_orphans(workers)
        control.send(json.dumps(answer).encode("ascii"))
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.killpg(pid, signal.SIGKILL)
    for pid in workers:
        _reap(pid)
    _kill_orphans(set())


def _fork(control: socket.socket, descriptor: int, memory_limit_mb: int) -> int | None:  # None: the system refuses
    server_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(descriptor)
        return None
    if pid == 0:
        control.close()
        run_worker(socket.socket(fileno=descriptor), server_pid=server_pid, memory_limit_mb=memory_limit_mb)
    os.close(descriptor)
    return pid


def _reap(pid: int) -> int | None:  # None if it is not our child
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return None


def _kill_orphans(workers: set[int]) -> None:
    # Processes that workers, now gone, started in sessions of their own, and their children in turn.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while orphans := {int(pid) for pid in children.read_text(encoding="ascii").split()} - workers:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)


def main(argv: list[str]) -> Any:
    """Serve on the descriptor `argv[0]`; remove the folder `argv[1]`, the home of workers, at the end."""
    control = socket.socket(fileno=int(argv[0]))
    list_environments()  # finds installed environments once, for all workers
    gc.collect()
    gc.freeze()  # a collection in a worker would write to the shared pages, and so copy them
    serve(control)
    shutil.rmtree(argv[1], ignore_errors=True)  # by us, because the program may have been killed


if __name__ == "__main__":
    main(sys.argv[1:])

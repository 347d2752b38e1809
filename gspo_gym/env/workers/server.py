"""The process that worker processes are forked from: `python -m gspo_gym.env.workers.server DESCRIPTOR FOLDER`.

It has one thread, has imported what every environment needs, and does nothing but fork; so a new worker costs
milliseconds, shares that memory with the others, and inherits no thread, lock or open file of the program. Started by
`env/workers/pool.py`, once a program. It ends with the program: when the connection does, it kills all workers and is
gone.
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
    """Answer {"fork": memory_limit_mb}, with the worker's end of a connection attached, by its process id, and
    {"reap": process id} by how it ended (as `os.waitpid` says it), until the other end hangs up. None: it cannot."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a worker leaves behind becomes ours, and can be killed
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


def _fork(control: socket.socket, descriptor: int, memory_limit_mb: int) -> int | None:
    """The process id of a fresh worker; None if the system refuses."""
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


def _reap(pid: int) -> int | None:
    """How a process that has ended, or is about to, ended; None if it is none of ours."""
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return None


def _kill_orphans(workers: set[int]) -> None:
    """Kill what workers that are gone have started in sessions of its own; theirs become ours, and so on."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while orphans := {int(pid) for pid in children.read_text(encoding="ascii").split()} - workers:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _reap(pid)


def main(argv: list[str]) -> Any:
    """The command; `argv` is the descriptor that the program passed on, and the temporary folder that is its home."""
    control = socket.socket(fileno=int(argv[0]))
    list_environments()  # finds the packages that bring environments once, for all workers
    gc.collect()
    gc.freeze()  # what is shared is not written to by a collection in a worker, and so stays shared
    serve(control)
    shutil.rmtree(argv[1], ignore_errors=True)  # the program may have been killed, and cannot


if __name__ == "__main__":
    main(sys.argv[1:])

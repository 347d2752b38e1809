"""Temporary folders and processes of this program that must go with it, even if it is killed.

They are registered with a process that this module starts when first needed (by running this file). It reads a pipe
that ends when the program is gone, however it went, and then ends the processes and removes the folders. Unlike
PR_SET_PDEATHSIG, which watches one thread, a pipe does not mistake the end of the thread that started a process for the
end of the program; unlike a thread in each child, it needs no interpreter lock there.

What ends by itself reads such a pipe, too: environment workers (`env/workers/host.py`), which are registered for the
case that something has stopped them, and the watchdog, which is not.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

TYPE_CHECKING = False  # typing's own takes ms, and this file is started as a program
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
_GONE_SECONDS = 10.0  # after SIGKILL: the system gives back gigabytes, or waits for a disk
_LOOK_SECONDS = 0.1
_MARK = "GSPO_GYM_STARTED_IN"


class _Keeper:
    """Handle of the process that outlives the program; it starts at the first registration."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.is_needed = True

    def tell(self, sign: str, kind: str, name: str) -> None:
        """Register ("+") or forget ("-") a folder or file ("f"), process, group ("p"), session ("s") or mark ("m")."""
        line = f"{sign}{kind}{name}".encode() + b"\0"
        with self._lock:
            if sign == "+":
                self._start()
            if self._process is None:
                return
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # something killed it: then this program has to die by itself
                self._process.stdin.write(line)

    def start(self) -> None:
        """Start the process, if that has not happened yet."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._process is None and self.is_needed:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # out of reach of Ctrl-C, and of signals to the program's group
            )

    def close(self) -> None:
        """Have what is still registered ended and removed, and wait for the process that does it."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def forget(self) -> None:
        """Drop the pipe in a forked process, which would keep it open."""
        process, self._process, self._lock = self._process, None, threading.Lock()
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.returncode = 0  # it is not this process's child, and must not be waited for


def temporary_folder(prefix: str, parent: Path | None = None) -> str:
    """Make a folder, in the system's place for temporary ones or in `parent`, that goes with this program."""
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    _KEEPER.tell("+", "f", os.path.abspath(folder))
    return folder


def remove_folder(folder: str | Path) -> None:
    """Remove a folder of `temporary_folder`, as far as the system lets us."""
    shutil.rmtree(folder, ignore_errors=True)
    _KEEPER.tell("-", "f", os.path.abspath(folder))


@contextlib.contextmanager
def in_temporary_folder(prefix: str) -> Iterator[str]:
    """Make a temporary folder for the block."""
    folder = temporary_folder(prefix)
    try:
        yield folder
    finally:
        remove_folder(folder)


def goes_with_us(path: Path) -> None:
    """Have a file, folder or socket removed with this program; `stays` takes that back."""
    _KEEPER.tell("+", "f", os.path.abspath(path))


def stays(path: Path) -> None:
    """Take `goes_with_us` back."""
    _KEEPER.tell("-", "f", os.path.abspath(path))


def end_with_us(pid: int, *, is_group: bool = False) -> None:
    """Have a child (`is_group`: and its process group, which it leads) ended with this program, first by SIGTERM."""
    _KEEPER.tell("+", "p", str(-pid if is_group else pid))


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, and theirs; none where there is no /proc."""
    pids: set[int] = set()
    new = {pid}
    while new:
        new = {child for parent in new for child in _children(parent)} - pids
        pids |= new
    return pids


def _children(pid: int) -> list[int]:
    children = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += [int(child) for child in file.read().split()]
    return children


@contextlib.contextmanager
def all_end_with_us() -> Iterator[None]:
    """Have every process that this program starts within the block ended with it, if it is killed within the block.

    For a library that starts processes and names them only when all of them run. They are known by a variable in
    their environment, also those that start just before the kill, and forks by being looked for all the time.
    """
    _KEEPER.start()  # before the block: it must not end itself
    mark = os.urandom(16).hex()
    os.environ[_MARK] = mark
    _KEEPER.tell("+", "m", mark)
    before, is_over = descendants(os.getpid()), threading.Event()

    def register() -> None:
        reported_pids: set[int] = set()
        while not is_over.wait(_LOOK_SECONDS):
            running = descendants(os.getpid()) - before
            for pid in running - reported_pids:
                end_with_us(pid)
            for pid in reported_pids - running:
                has_ended(pid)
            reported_pids = running
        for pid in reported_pids:
            has_ended(pid)

    thread = threading.Thread(target=register, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        del os.environ[_MARK]
        _KEEPER.tell("-", "m", mark)


class MarkedProcesses:
    """Processes that begin with a variable in their environment, and all that they start; ended with this program.

    A title may hide the variables of a process whose parent has gone: `add_session` finds it all the same.

    Attributes:
        environment: for the first of them.
    """

    def __init__(self) -> None:
        self._mark = os.urandom(16).hex()
        self._sessions: set[int] = set()
        self.environment = {_MARK: self._mark}
        _KEEPER.tell("+", "m", self._mark)

    def add_session(self, leader: int) -> None:
        """Count all that run in the session of a child that leads it, and is not waited for before `end`."""
        self._sessions.add(leader)
        _KEEPER.tell("+", "s", str(leader))

    def end(self, *, grace_seconds: float = _GRACE_SECONDS) -> None:
        """End them, first by SIGTERM, and wait until they are gone, 10 s more at most. Ending twice is fine."""
        mark = f"{_MARK}={self._mark}".encode()
        deadline = time.monotonic() + grace_seconds + _GONE_SECONDS
        # Again, for those that were being started.
        while time.monotonic() < deadline:
            pids = {*_marked_pids([mark]), *_session_pids(self._sessions)}
            if not (running := [pid for pid in pids if _is_alive(pid)]):
                break
            _end(running, grace_seconds)
        _KEEPER.tell("-", "m", self._mark)
        while self._sessions:
            _KEEPER.tell("-", "s", str(self._sessions.pop()))


def has_ended(pid: int, *, is_group: bool = False) -> None:
    """Forget a process of `end_with_us`, before another can have its number."""
    _KEEPER.tell("-", "p", str(-pid if is_group else pid))


def leave_to_another() -> None:
    """Register nothing in this process from now on: another one ends and removes all that it leaves."""
    _KEEPER.is_needed = False


def main() -> None:
    """Read what is registered until the program is gone; then end and remove what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    entries: dict[bytes, None] = {}
    rest = b""
    while data := os.read(0, 65536):
        *lines, rest = (rest + data).split(b"\0")
        for line in lines:
            if line.startswith(b"+"):
                entries[line[1:]] = None
            else:
                entries.pop(line[1:], None)
    processes = [int(line[1:]) for line in entries if line.startswith(b"p")]
    processes += _marked_pids([f"{_MARK}=".encode() + line[1:] for line in entries if line.startswith(b"m")])
    processes += _session_pids({int(line[1:]) for line in entries if line.startswith(b"s")})
    _end(processes)
    for line in entries:
        if line.startswith(b"f"):
            shutil.rmtree(line[1:], ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(line[1:])


def _marked_pids(marks: list[bytes]) -> list[int]:
    """Return the processes that began with one of these variables, and theirs: a title may hide the variables."""
    pids: list[int] = []
    for name in os.listdir("/proc") if marks and os.path.isdir("/proc") else []:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{name}/environ", "rb") as file,
        ):  # it has ended, or is no process
            if not set(marks).isdisjoint(file.read().split(b"\0")):
                pids.append(int(name))
    return [*{pid for parent in pids for pid in (parent, *descendants(parent))}]


def _session_pids(leaders: set[int]) -> list[int]:
    pids = []
    for name in os.listdir("/proc") if leaders and os.path.isdir("/proc/self") else ():
        with (
            contextlib.suppress(OSError, ValueError),  # it has ended, or is no process
            open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as file,
        ):
            if int(file.read().rpartition(")")[2].split()[3]) in leaders:
                pids.append(int(name))
    return pids


def _end(processes: list[int], grace_seconds: float = _GRACE_SECONDS) -> None:
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _GONE_SECONDS)):
        _signal(processes, number)
        deadline = time.monotonic() + seconds
        while any(_is_alive(process) for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)  # a negative number is that of a group


def _is_alive(process: int) -> bool:
    """Return whether a process, or any of a group, is there and no zombie, which only its parent can remove."""
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as file:
                state, _, group = file.read().rpartition(")")[2].split()[:3]
            if state not in "ZX" and (int(name) == process or int(group) == -process):
                return True
    return False


if __name__ == "__main__":
    main()
else:
    # Module state: leftovers are the program's.
    _KEEPER = _Keeper()
    atexit.register(_KEEPER.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_KEEPER.forget)

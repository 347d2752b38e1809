"""Allow only one process to write into a run's folder.

    .lock         locked for the whole life of that process; the system unlocks it however the process ends
    process.json  the process that holds the folder, or held it last

Commands that only read a run, or write other files there, take no lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from gspo_gym.base.files import replace_file, take_lock, writing
from gspo_gym.errors import ConfigError, StorageError

LOCK_FILE = ".lock"
PROCESS_FILE = "process.json"

_TRIES, _PAUSE_SECONDS = 20, 0.02  # `holder_of` holds the lock for microseconds, which must not refuse a start


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The contents of process.json.

    Attributes:
        pid: None: the process has not written process.json yet.
        pid_started: clock ticks from the machine's start to the process's, which tell a reused pid; None: unknown.
        host: name of the machine.
        boot_id: of the machine's running system; None: unknown.
        attempt: number of the process among those of the run, counted from 1.
        version: of this package.
        started, ended: seconds since 1970; `ended` is None while it runs, and if it was killed.
        has_begun: the run has something to keep; before, a killed start leaves nothing worth keeping.
    """

    pid: int | None = None
    pid_started: int | None = None
    host: str = ""
    boot_id: str | None = None
    attempt: int = 1
    version: str = "unknown"
    started: float = 0.0
    ended: float | None = None
    has_begun: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it ran on another machine and recorded no end: this machine cannot see whether it lives."""
        # Containers on one machine have several host names and one boot id; a restarted machine is the reverse.
        is_same = self.host == platform.node() or (self.boot_id is not None and self.boot_id == _boot_id())
        return self.pid is not None and self.ended is None and not is_same

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} (attempt {self.attempt}, started {since})"


def read_process(folder: Path) -> ProcessInfo | None:
    """Return the last process that held a run's folder, from process.json; None without a readable file."""
    try:
        values: dict[str, Any] = json.loads((folder / PROCESS_FILE).read_text(encoding="utf-8"))
        known = {field.name for field in dataclasses.fields(ProcessInfo)}  # a later version may write more
        return ProcessInfo(**{name: value for name, value in values.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def holder_of(folder: Path) -> ProcessInfo | None:
    """Return the live process that holds a run's folder, or None.

    A process of another machine that recorded no end is returned, too: see `ProcessInfo.is_elsewhere`.

    Raises:
        StorageError: the lock cannot be read.
    """
    info = read_process(folder)
    # The lock decides and not the pid, which may be another process's by now. Locks of other machines may not be seen.
    if _is_locked(folder / LOCK_FILE):
        return info if info is not None and info.ended is None else ProcessInfo()
    return info if info is not None and info.is_elsewhere else None


def refusal(folder: Path, holder: ProcessInfo) -> str:
    """Return a sentence on why the holder's folder cannot be used."""
    if holder.pid is None:
        return f"{folder}: another process is beginning a run there; choose another model.label"
    taken = f"{folder} already holds a run: {holder}"
    if holder.is_elsewhere:
        return (
            f"{taken} did not end it, and this machine cannot see whether that process lives. If it does not, remove "
            f"{folder / PROCESS_FILE}"
        )
    return f"{taken} is at work on it. Wait for its end, stop it, or choose another model.label"


@contextlib.contextmanager
def holding(folder: Path, note: Callable[[str], None], *, has_begun: bool) -> Iterator[Callable[[], None]]:
    """Hold a run's existing folder until the block ends; the block calls the yielded function when the run `has_begun`.

    A folder left by a dead process is taken over, with a note.

    Raises:
        ConfigError: another process holds it; names the process.
        StorageError: nothing can be written there.
    """
    with locked(folder):
        last = read_process(folder)
        attempt = 1 if last is None else last.attempt + 1
        if last is not None and last.ended is None:
            note(f"{last} died without ending the run in {folder}; this process goes on as attempt {attempt}")
        info = dataclasses.replace(_this_process(), attempt=attempt, has_begun=has_begun)
        _write(folder, info)

        def begin() -> None:
            nonlocal info
            info = dataclasses.replace(info, has_begun=True)
            _write(folder, info)

        try:
            yield begin
        finally:
            # Not said where a failed start removed the folder, or the disk is full: the lock says the same.
            with contextlib.suppress(StorageError):
                _write(folder, dataclasses.replace(info, ended=time.time()))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder without writing process.json; see `holding`."""
    path = folder / LOCK_FILE
    last = read_process(folder)
    if last is not None and last.is_elsewhere:
        raise ConfigError(refusal(folder, last))
    lock = _Lock(_wait_for_lock(path))
    try:
        yield
    finally:
        lock.remove(path)


class _Lock:
    """A locked descriptor that a forked child closes: else it would hold the lock after its parent's death."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._is_open = True
        if hasattr(os, "register_at_fork"):
            reference = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: None if (lock := reference()) is None else lock.close())

    def remove(self, path: Path) -> None:
        """Unlock, and remove the file unless another folder has this path by now."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self.descriptor), path.stat()):
                path.unlink()
        self.close()

    def close(self) -> None:
        """Unlock."""
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)


def _wait_for_lock(path: Path) -> int:
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        with writing(path):
            lock = take_lock(path)
        if lock is not None:
            return lock
    holder = read_process(path.parent)
    raise ConfigError(refusal(path.parent, ProcessInfo() if holder is None or holder.ended is not None else holder))


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the lock."""
    try:
        fcntl = importlib.import_module("fcntl")
    except ImportError:  # Windows: a lock is a file that exists, see `take_lock`
        return path.exists()
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        # Shared, so that two processes that ask do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise StorageError(f"{path}: cannot be locked: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return False


def _write(folder: Path, info: ProcessInfo) -> None:
    replace_file(folder / PROCESS_FILE, json.dumps(dataclasses.asdict(info), indent=2) + "\n")


def _this_process() -> ProcessInfo:
    pid = os.getpid()
    try:
        version = metadata.version("gspo-gym")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return ProcessInfo(pid, start_of(pid), platform.node(), _boot_id(), version=version, started=time.time())


def start_of(pid: int) -> int | None:
    """Return the clock ticks from the machine's start to the process's; None without such a process or /proc."""
    try:
        # The second field is the command in brackets, and may hold spaces and brackets.
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    except (OSError, IndexError, ValueError):
        return None


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None

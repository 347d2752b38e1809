"""Allow only one process to write into a run's folder.

    .lock         locked for the whole life of that process; the system unlocks it however the process ends; holds what
                  the process is doing
    process.json  the process that holds the folder, or held it last

The lock decides whether a process lives, if this machine can see it: a process of another machine may hold it on a file
system whose locks stay on one machine. So the process also touches the lock's file every 10 seconds. A start watches
it by its own clock, since those of machines differ, and takes the folder over after 180 seconds without a touch. A
process that was only suspended leaves without saving at its next touch, where it finds its place taken.

Commands that only read a run, or write other files there, take no lock. Files `*.request` are for the process that
holds the folder (`run/steering.py`); a new one removes those for the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import platform
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from gspo_gym.base.files import replace_file, take_lock, writing
from gspo_gym.errors import ConfigError, StorageError

LOCK_FILE = ".lock"
PROCESS_FILE = "process.json"
MOUNTS = Path("/proc/self/mountinfo")
# Learning includes publishing the weights; saving, only what the run waits for.
PHASES = (
    "starting",
    "starting the engine",
    "warming up",
    "collecting",
    "learning",
    "evaluating",
    "saving",
    "ending",
)
BEFORE_TRAINING = PHASES[:3]  # there is nothing to save
_PHASE_BYTES = 64  # in the lock's file
_WORDS = {"starting": "getting ready", "collecting": "playing"}  # for people, where it is not the name

_BEAT_SECONDS, _SILENT_BEATS = 10.0, 18  # longer than the interpreter is held by anything but a defect
_WRITE_SECONDS = 1.0  # between two writes of counts
_PHASE = re.compile(f"({'|'.join(PHASES)})(?: ([0-9]+) ([0-9]+) ?([a-z]*))?")
# File systems of one kernel: a process of another machine can no longer write there.
_LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))
# Those whose locks all machines see, with the option that says so: nfs(5), mount.lustre(8), ceph(8).
_SHARED = {"nfs": "local_lock=none", "nfs4": "local_lock=none", "lustre": "flock", "ceph": ""}
_JOIN_SECONDS = 1.0  # the thread may hang on a disk that does
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
        file_system: type of the one that holds the folder; None: unknown.
        beat_seconds: between two touches of the lock's file; None: it is not touched, by an earlier version, or where
            the file system keeps no such times.
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
    file_system: str | None = None
    beat_seconds: float | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it ran under another kernel and recorded no end: its pid means nothing here."""
        is_same = self.host == platform.node()
        # Containers on one machine have several names and one boot id. A pod that moved keeps its name on another
        # machine; a restarted machine, too, but for it `_sees_locks_of` finds the same file system.
        if self.boot_id is not None and (self.boot_id == _boot_id() or self.file_system is not None):
            is_same = self.boot_id == _boot_id()
        return self.pid is not None and self.ended is None and not is_same

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} (attempt {self.attempt}, started {since})"


def read_process(folder: Path) -> ProcessInfo | None:
    """Return the last process that held a run's folder, from process.json; None without a readable file."""
    try:
        values: dict[str, Any] = json.loads((folder / PROCESS_FILE).read_text(encoding="utf-8"))
        field_names = {field.name for field in dataclasses.fields(ProcessInfo)}  # a later version may write more
        info = ProcessInfo(**{name: value for name, value in values.items() if name in field_names})
        numbers = [number for number in (info.pid, info.ended, info.beat_seconds) if number is not None]
        return (
            info if all(isinstance(number, int | float) for number in (info.attempt, info.started, *numbers)) else None
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def holder_of(folder: Path, *, mounts: Path = MOUNTS) -> ProcessInfo | None:
    """Return the live process that holds a run's folder, or None.

    A process of another machine that recorded no end is returned, too, if its lock cannot be seen here. `mounts` lists
    the file systems.

    Raises:
        StorageError: the lock cannot be read.
    """
    info = read_process(folder)
    # The lock decides and not the pid, which may be another process's by now.
    if is_locked(folder):
        return info if info is not None and info.ended is None else ProcessInfo()
    is_unknown = info is not None and info.is_elsewhere and not _sees_locks_of(info, folder, mounts)
    return info if is_unknown else None


@dataclass(frozen=True, slots=True)
class Phase:
    """What a run's process is doing.

    Attributes:
        name: one of PHASES.
        done, total: of what is counted; `total` None: nothing is.
        unit: of both; "" where the name says enough.
    """

    name: str
    done: int = 0
    total: int | None = None
    unit: str = ""

    def __str__(self) -> str:
        """Return it for people.

        >>> str(Phase("collecting", 40, 96)), str(Phase("learning", 3, 4, "batches"))
        ('playing 40 of 96', 'learning 3 of 4 batches')
        """
        word = _WORDS.get(self.name, self.name)
        if self.total is None:
            return word
        # More than were planned: those that replace groups which teach nothing.
        count = f"{self.done} of {self.total}" if self.done <= self.total else str(self.done)
        return f"{word} {count} {self.unit}".rstrip()


class Phases:
    """The present phase, told in the lock's file to those that read the folder. `clock` is in monotonic seconds.

    Attributes:
        phase: the present one.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = None if folder is None else folder / LOCK_FILE
        self._clock = clock
        self._began = self._written = clock()
        self.phase = Phase(PHASES[0])

    @property
    def now(self) -> str:
        """Return the name of the present phase."""
        return self.phase.name

    def enter(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Begin a phase in which `total` things are counted, by `count` or `advance`; None: nothing is."""
        assert name in PHASES
        self._set(Phase(name, 0, total, unit))

    def advance(self, name: str) -> None:
        """Count one more in the phase of this name; in another phase do nothing."""
        phase = self.phase
        if phase.name == name and phase.total is not None:
            self._count(dataclasses.replace(phase, done=phase.done + 1))

    def count(self, done: int, total: int, unit: str = "") -> None:
        """Say how much of the present phase is done."""
        self._count(Phase(self.now, done, total, unit))

    def __str__(self) -> str:
        """Return the phase for people, with the time that is left of it at its present pace."""
        phase = self.phase
        if not phase.total or not 0 < phase.done <= phase.total:
            return str(phase)
        seconds_left = (self._clock() - self._began) / phase.done * (phase.total - phase.done)
        return f"{phase}, {minutes_and_seconds(seconds_left)} left"

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Be in another phase within the block."""
        before = self.phase
        self.enter(name)
        try:
            yield
        finally:
            self._set(before)

    def _count(self, phase: Phase) -> None:
        # Episodes may end by the thousand: those that read the folder see a number that is a second old.
        if self._clock() - self._written < _WRITE_SECONDS:
            self.phase = phase
        else:
            self._write(phase)

    def _set(self, phase: Phase) -> None:
        self._began = self._clock()
        self._write(phase)

    def _write(self, phase: Phase) -> None:
        self.phase, self._written = phase, self._clock()
        if self._path is None:
            return
        text = phase.name if phase.total is None else f"{phase.name} {phase.done} {phase.total} {phase.unit}"
        with contextlib.suppress(OSError):  # a full disk, or a folder without a lock
            descriptor = os.open(self._path, os.O_WRONLY)
            try:
                os.write(descriptor, text.ljust(_PHASE_BYTES).encode())  # at once, over the one before
            finally:
                os.close(descriptor)


def minutes_and_seconds(seconds: float) -> str:
    """Return a duration as text.

    >>> minutes_and_seconds(75.9)
    '1:15'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def read_phase(folder: Path) -> Phase | None:
    """Return the phase of the process that holds the folder; None: it tells none."""
    try:
        text = (folder / LOCK_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    match = _PHASE.fullmatch(text)
    if match is None:
        return None
    num_done, total, unit = match.groups()[1:]
    return Phase(match[1]) if total is None else Phase(match[1], int(num_done), int(total), unit)


def refusal(folder: Path, holder: ProcessInfo, *, is_alive: bool = False) -> str:
    """Return a sentence on why the holder's folder cannot be used; `is_alive`: it has shown that it lives."""
    if holder.pid is None:
        return f"{folder}: another process is beginning a run there; choose another model.label"
    holder_text = f"{folder} already holds a run: {holder}"
    if holder.is_elsewhere and not is_alive:
        finds_out = "" if holder.beat_seconds is None else "`train --resume` finds out. "
        return (
            f"{holder_text} did not end it, and this machine cannot see whether that process lives. {finds_out}If it "
            f"does not, remove {folder / PROCESS_FILE}"
        )
    return f"{holder_text} is at work on it. Wait for its end, stop it, or choose another model.label"


@contextlib.contextmanager
def holding(
    folder: Path,
    note: Callable[[str], None],
    *,
    has_begun: bool,
    mounts: Path = MOUNTS,
    beat_seconds: float = _BEAT_SECONDS,
) -> Iterator[Callable[[], None]]:
    """Hold a run's existing folder until the block ends; the block calls the yielded function when the run `has_begun`.

    A folder left by a dead process is taken over, with a note, after a wait if it was another machine's.

    Raises:
        ConfigError: another process holds it; names the process.
        StorageError: nothing can be written there.
    """
    with locked(folder, note, mounts=mounts):
        last = read_process(folder)
        attempt = 1 if last is None else last.attempt + 1
        if last is not None and last.ended is None:
            note(f"{last} died without ending the run in {folder}; this process goes on as attempt {attempt}")
        info = dataclasses.replace(
            _this_process(),
            attempt=attempt,
            has_begun=has_begun,
            file_system=_file_system_of(folder, mounts)[0],
            beat_seconds=beat_seconds if _can_beat(folder / LOCK_FILE) else None,
        )
        earlier_requests = request_files(folder)  # before process.json names this process: later ones are for it
        _write(folder, info)
        for path in earlier_requests:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        Phases(folder).enter(PHASES[0])

        def begin() -> None:
            nonlocal info
            info = dataclasses.replace(info, has_begun=True)
            _write(folder, info)

        try:
            with _beating(folder, info):
                yield begin
        finally:
            _record_end(folder, info)


def _record_end(folder: Path, info: ProcessInfo) -> None:
    if (now := read_process(folder)) is not None and not is_same_process(now, info):
        return
    # Not said where a failed start removed the folder, or the disk is full: the lock says the same.
    with contextlib.suppress(StorageError):
        _write(folder, dataclasses.replace(info, ended=time.time()))


@contextlib.contextmanager
def _beating(folder: Path, info: ProcessInfo) -> Iterator[None]:
    end_event = threading.Event()
    beating = threading.Thread(target=_beat, args=(folder, info, end_event), name="gspo-gym-beat", daemon=True)
    beating.start()
    try:
        yield
    finally:
        end_event.set()
        beating.join(_JOIN_SECONDS)


def is_same_process(one: ProcessInfo, other: ProcessInfo) -> bool:
    """Return whether both are records of one process, which may have written more meanwhile."""
    return (one.pid, one.started) == (other.pid, other.started)


def request_files(folder: Path, kind: Literal["stop", "checkpoint", ""] = "") -> list[Path]:
    """Return the files of requests to the process that holds a run's folder, of one kind or of all."""
    return list(folder.glob(f"{kind}*.request"))


class Pulse:
    """Signs of life of the process that holds a run's folder, by the clock of this machine (monotonic seconds)."""

    def __init__(self, folder: Path, holder: ProcessInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = folder / LOCK_FILE
        self._seconds = math.inf if holder.beat_seconds is None else _SILENT_BEATS * holder.beat_seconds
        self._clock = clock
        self._last_touch, self._since = _touch_time(self._path), clock()

    def is_felt(self) -> bool:
        """Return False if the process has not touched its lock for a long time, though it should."""
        touch_time, now = _touch_time(self._path), self._clock()
        if touch_time != self._last_touch:
            self._last_touch, self._since = touch_time, now
        return now - self._since < self._seconds


def _beat(folder: Path, info: ProcessInfo, end_event: threading.Event) -> None:
    """Touch the lock's file until the process `info` has ended; leave the program if another took its place."""
    while not end_event.wait(info.beat_seconds or _BEAT_SECONDS):
        if (now := read_process(folder)) is not None and not is_same_process(now, info):
            print(f"{folder} was taken over by {now}; left without saving", file=sys.stderr, flush=True)
            os._exit(1)  # not a stop, which would save a checkpoint among the other's
        with contextlib.suppress(OSError):  # a full or vanished disk, which whatever writes there reports
            os.utime(folder / LOCK_FILE)


@contextlib.contextmanager
def locked(folder: Path, note: Callable[[str], None] | None = None, *, mounts: Path = MOUNTS) -> Iterator[None]:
    """Hold the lock of a folder without writing process.json; see `holding`."""
    path = folder / LOCK_FILE
    last = read_process(folder)
    if last is not None and last.is_elsewhere:
        lock = _Lock(_wait_for_death(folder, last, note or (lambda _: None), mounts))
    else:
        lock = _Lock(_wait_for_lock(path))
    try:
        yield
    finally:
        now = read_process(folder)
        if now is not None and now != last and now.is_elsewhere:  # it took this place, and holds the same file
            lock.close()
        else:
            lock.remove(path)


def _wait_for_death(folder: Path, last: ProcessInfo, note: Callable[[str], None], mounts: Path) -> int:
    """Return the lock of a folder once the process `last`, of another machine, is known to be dead.

    Raises:
        ConfigError: it lives, or nothing can show that it does not.
    """
    path, sees_locks = folder / LOCK_FILE, _sees_locks_of(last, folder, mounts)
    if sees_locks and (lock := _try_lock(path)) is not None:
        return lock
    if last.beat_seconds is None:
        raise ConfigError(refusal(folder, last))
    seconds = _SILENT_BEATS * last.beat_seconds
    note(f"{last} recorded no end; its place is taken unless it shows in {seconds:g} seconds that it lives")
    last_touch, deadline = _touch_time(path), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(last.beat_seconds / 4)
        now = read_process(folder)
        if now is not None and now != last:  # it ended, or another start was first
            return _wait_for_death(folder, now, note, mounts) if now.is_elsewhere else _wait_for_lock(path)
        if _touch_time(path) != last_touch:
            raise ConfigError(refusal(folder, last, is_alive=True))
        # A file server keeps the lock of a machine that died, some for a minute and a half.
        if sees_locks and (lock := _try_lock(path)) is not None:
            return lock
    if (lock := _try_lock(path)) is None:
        raise ConfigError(refusal(folder, last))
    return lock


def _can_beat(path: Path) -> bool:
    with contextlib.suppress(OSError):
        os.utime(path, ns=(0, 0))
        before = _touch_time(path)
        os.utime(path)
        return before == 0 != _touch_time(path)
    return False


def _touch_time(path: Path) -> int | None:
    with writing(path), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns  # opened, because NFS asks the server then
    return None


def _sees_locks_of(info: ProcessInfo, folder: Path, mounts: Path) -> bool:
    """Return whether a lock that the process `info` of another machine held would keep this one from the folder."""
    kind, options = _file_system_of(folder, mounts)
    # Another type there than here: one of the two machines serves the disk to the other, and their locks differ.
    if kind is None or kind != info.file_system:
        return False
    return kind in _LOCAL or _SHARED.get(kind) in options


def _file_system_of(folder: Path, mounts: Path) -> tuple[str | None, frozenset[str]]:
    """Return the type and options of the file system that holds a folder; None: the system does not tell."""
    path, mount_point, kind, options = folder.resolve(), Path(), None, ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            about, _, type_and_options = line.partition(" - ")
            point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), about.split(" ")[4]))
            # The last of two at one place lies over the other.
            if path.is_relative_to(point) and len(point.parts) >= len(mount_point.parts):
                mount_point, (kind, _, options) = point, type_and_options.split(" ")
    return kind, frozenset(["", *options.split(",")])


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
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)


def _wait_for_lock(path: Path) -> int:
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        if (lock := _try_lock(path)) is not None:
            return lock
    holder = read_process(path.parent)
    raise ConfigError(refusal(path.parent, ProcessInfo() if holder is None or holder.ended is not None else holder))


def _try_lock(path: Path) -> int | None:
    with writing(path):
        return take_lock(path)


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the folder's lock, as far as this machine sees it.

    Raises:
        StorageError: the lock cannot be read.
    """
    path = folder / LOCK_FILE
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

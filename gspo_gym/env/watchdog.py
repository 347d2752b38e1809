"""Watch a program, from another process, for an environment that holds the interpreter.

Code in a thread that keeps the interpreter's lock (a regular expression that never ends) stops every thread of a
training, an evaluation, a collection or a server: no deadline, no Ctrl-C and no checkpoint of this process can help.
What can be saved has to have been saved: the last checkpoint and the episodes written so far stand. The other process
names the environment in a marker and ends the program; the next start of the same work finds the marker and runs that
environment in worker processes, where a deadline ends it.

The other process runs this file: `python watchdog.py PID BEATS BOARD MARKER SECONDS ADVICE`. It reads a few beats a
second from the descriptor BEATS, which a thread of the program writes whenever it gets the lock. When none has come for
SECONDS, and the thread of the program that has computed most since then announces on the board (a descriptor, too) that
it runs an environment, that environment holds the lock. Anything else that is slow is left alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "frozen.json"  # in the folder of a run
TRAINING_ADVICE = (
    "The run is ended; its last checkpoint stands. Go on with --resume, which runs {env} in worker processes, or set "
    'rollout.isolation = "process".'
)
_NUM_SLOTS, SLOT_BYTES = 1024, 256
_HEADER = struct.Struct("=QH")  # the thread's id in the kernel (0 for an empty slot), the length of the text
_LEAST_SECONDS = 60.0  # code of ours may hold the lock for some seconds; and the environment is let go of after that
_BEAT_SECONDS = 0.2
_SHARE = 0.1  # of the time without a beat that the thread must have computed; a machine may have other work
_DUMP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Frozen:
    """The environments that held the interpreter in earlier starts, and what the last one did."""

    env_ids: tuple[str, ...] = ()
    call: str = ""
    seconds: float = 0.0


def marker_beside(out: Path) -> Path:
    """Return the marker of work that writes the file `out`."""
    return out.with_name(f"{out.name}.{MARKER}")


def seconds_until_frozen(step_timeout_seconds: float) -> float:
    """Return how long the lock may be held: twice what a call of an environment may take, and a minute at least."""
    return max(_LEAST_SECONDS, 2 * step_timeout_seconds)


def read_frozen(path: Path) -> Frozen:
    """Return what a marker says; an empty record if there is none.

    Raises:
        RecordError: the marker cannot be read.
    """
    from gspo_gym.errors import RecordError  # not above: the other process finds no package

    if not path.exists():
        return Frozen()
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
        return Frozen(tuple(map(str, marker["env_ids"])), str(marker["call"]), float(marker["seconds"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: expected what the watchdog wrote, got {error}; remove the file") from error


class Board:
    """A slot of fixed size for each thread, as long as slots last, in memory that the other process reads."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._numbers = itertools.count()
        self._slots = threading.local()

    def write(self, text: str) -> None:
        """Announce what this thread is running; "" clears its slot."""
        if not hasattr(self._slots, "start"):
            self._slots.start = next(self._numbers) * SLOT_BYTES
        start = self._slots.start
        if start >= len(self._memory):
            return
        data = text.encode("utf-8", "replace")[: SLOT_BYTES - _HEADER.size]
        # The id is written last: a reader in between finds an empty slot, not half a text.
        self._memory[start : start + _HEADER.size + len(data)] = _HEADER.pack(0, len(data)) + data
        self._memory[start : start + _HEADER.size] = _HEADER.pack(threading.get_native_id() if data else 0, len(data))


class _Open:
    """The board of this process while it is watched; module state because threads of any owner write to it."""

    board: Board | None = None


@contextlib.contextmanager
def announced(text: str) -> Iterator[None]:
    """Announce the block as this thread's work."""
    board = _Open.board
    if board is None:
        yield
        return
    board.write(text)
    try:
        yield
    finally:
        board.write("")


class AnnouncedSteps:
    """An awaitable with each of its steps announced; nothing is announced while it waits."""

    def __init__(self, awaitable: Awaitable[Any], text: str) -> None:
        self._awaitable, self._text = awaitable, text

    async def _await_inner(self) -> Any:
        return await self._awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, reply, error = self._await_inner(), None, None
        while True:
            try:
                with announced(self._text):
                    waits_for = steps.send(reply) if error is None else steps.throw(error)
            except StopIteration as done:
                return done.value
            try:
                reply, error = (yield waits_for), None
            except BaseException as thrown:  # such as a cancellation: deliver it to the inner awaitable
                error = thrown


@contextlib.contextmanager
def watching(marker: Path | None, seconds: float, *, advice: str) -> Iterator[None]:
    """Watch this process while the body runs, on Linux; elsewhere do nothing.

    Nested, only the outer one watches, and gives its advice.

    Args:
        marker: the file that names the environment; None: none is written.
        seconds: that the interpreter's lock may be held by an environment.
        advice: told at the end; "{env}" in it stands for the environment.
    """
    if sys.platform != "linux" or _Open.board is not None:
        yield
        return
    size = _NUM_SLOTS * SLOT_BYTES
    with tempfile.TemporaryFile() as board:
        board.truncate(size)
        with mmap.mmap(board.fileno(), size) as memory, _dumping_threads(), _beating() as read_end:
            path = "" if marker is None else marker.absolute()
            arguments = (os.getpid(), read_end, board.fileno(), path, seconds, advice)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, *map(str, arguments)],
                    pass_fds=(read_end, board.fileno()),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            finally:
                os.close(read_end)  # else a pipe that nobody reads would fill up, and a beat would wait for ever
            _Open.board = Board(memory)
            try:
                yield
            finally:
                _Open.board = None
                process.kill()  # not asked to end: it may be about to end this process, which is alive
                process.wait()


@contextlib.contextmanager
def _beating() -> Iterator[int]:
    """Write beats into a pipe from a thread while the body runs; the body closes the end to be read, which it gets."""
    read_end, write_end = os.pipe()
    is_over = threading.Event()
    thread = threading.Thread(target=_beat, args=(write_end, is_over), daemon=True, name="gspo-gym-beats")
    thread.start()
    try:
        yield read_end
    finally:
        is_over.set()
        thread.join()  # a beat after the close would go into another file of the same number
        os.close(write_end)


def _beat(write_end: int, is_over: threading.Event) -> None:
    while not is_over.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):  # the watchdog is gone: nobody is told
            os.write(write_end, b".")


@contextlib.contextmanager
def _dumping_threads() -> Iterator[None]:
    """Write where each thread is on SIGUSR2, unless the program handles that signal already."""
    is_free = signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, None)
    file = sys.__stderr__
    if not is_free or file is None:
        yield
        return
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR2)


def main() -> None:
    """Watch, in the other process, until the program ends or is ended."""
    pid, beats, board = map(int, sys.argv[1:4])
    marker, limit, advice = sys.argv[4], float(sys.argv[5]), sys.argv[6]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those are the program's, which tells us by hanging up
    last, cpu_at_beat = time.monotonic(), cpu_seconds(pid)
    while True:
        if select.select([beats], [], [], limit)[0]:
            if not os.read(beats, select.PIPE_BUF):
                return
            last, cpu_at_beat = time.monotonic(), cpu_seconds(pid)
            continue
        silence = time.monotonic() - last
        name = holder(cpu_seconds(pid), cpu_at_beat, os.pread(board, os.fstat(board).st_size, 0), silence)
        if name is not None:
            end(pid, name, silence, marker=marker, advice=advice)
            return


def cpu_seconds(pid: int) -> dict[int, float]:
    """Return the processor time of each thread of the process, by its id."""
    seconds: dict[int, float] = {}
    ticks, folder = os.sysconf("SC_CLK_TCK"), f"/proc/{pid}/task"
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(folder):
            with contextlib.suppress(OSError), open(f"{folder}/{thread}/stat", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()  # a name may hold spaces, and ends with ")"
                seconds[int(thread)] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def holder(now: dict[int, float], before: dict[int, float], board: bytes, silence: float) -> str | None:
    """Return what the busiest thread runs, if it has computed at all and announces an environment."""
    cpu_by_thread = {thread: seconds - before.get(thread, 0.0) for thread, seconds in now.items()}
    busiest = max(cpu_by_thread, key=lambda thread: cpu_by_thread[thread], default=None)
    if busiest is None or cpu_by_thread[busiest] < _SHARE * silence:
        return None
    for start in range(0, len(board), SLOT_BYTES):
        thread, length = _HEADER.unpack_from(board, start)
        if thread == busiest:
            text = board[start + _HEADER.size : start + _HEADER.size + length]
            return text.decode("utf-8", "replace")
    return None


def end(pid: int, name: str, silence: float, *, marker: str, advice: str) -> None:
    """Leave the marker, say so, and end the program, whether or not the rest could be done."""
    env_id, _, call = name.partition("\n")
    try:
        try:
            if marker:
                leave_marker(env_id, call, silence, marker)
        except OSError as error:
            print(f"\n{marker}: not written, so that the next start knows of nothing: {error}", file=sys.stderr)
        print(
            f"\nerror: {env_id}: {call} has held the interpreter for {silence:.0f} seconds, so that no deadline and no "
            f"Ctrl-C could end it. {advice.replace('{env}', env_id)} Its threads:",
            file=sys.stderr,
            flush=True,
        )
        os.kill(pid, signal.SIGUSR2)  # faulthandler writes where every thread is; it needs no lock
        time.sleep(_DUMP_SECONDS)
    finally:
        os.kill(pid, signal.SIGKILL)


def leave_marker(env_id: str, call: str, silence: float, path: str) -> None:
    """Write the marker, with the environments of an earlier one.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with open(path, encoding="utf-8") as file:
            earlier = list(json.load(file)["env_ids"])
    except (OSError, ValueError, LookupError, TypeError):
        earlier = []
    env_ids = list(dict.fromkeys((*earlier, env_id)))
    marker = {"env_ids": env_ids, "call": call, "seconds": round(silence), "time": time.time()}
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(marker, file)
    os.replace(path + ".new", path)


if __name__ == "__main__":
    main()

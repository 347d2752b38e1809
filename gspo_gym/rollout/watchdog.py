"""Watch a program, from another process, for an environment that holds the interpreter.

Code in a thread that keeps the interpreter's lock (a regular expression that never ends) stops every thread of a
training, an evaluation, a collection or a server: no deadline, no Ctrl-C and no checkpoint of this process can help.
What can be saved has to have been saved: the last checkpoint and the episodes written so far stand.
`watchdog_process.py` names the environment in a marker and ends the program; the next start of the same work finds the
marker and runs that environment in worker processes, where a deadline ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gspo_gym.env.workers.announcements import NUM_SLOTS, SLOT_BYTES, close_board, is_board_open, open_board
from gspo_gym.errors import RecordError

MARKER = "frozen.json"  # in the folder of a run
TRAINING_ADVICE = (
    "The run is ended; its last checkpoint stands. Go on with --resume, which runs {env} in worker processes, or set "
    'rollout.isolation = "process".'
)
_SCRIPT = str(Path(__file__).with_name("watchdog_process.py"))
_LEAST_SECONDS = 60.0  # code of ours may hold the lock for some seconds; and the environment is let go of after that
_BEAT_SECONDS = 0.2


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


@contextlib.contextmanager
def watching(marker: Path | None, seconds: float, *, advice: str) -> Iterator[None]:
    """Watch this process while the body runs, on Linux; elsewhere do nothing.

    Nested, only the outer one watches, and gives its advice.

    Args:
        marker: the file that names the environment; None: none is written.
        seconds: that the interpreter's lock may be held by an environment.
        advice: told at the end; "{env}" in it stands for the environment.
    """
    if sys.platform != "linux" or is_board_open():
        yield
        return
    size = NUM_SLOTS * SLOT_BYTES
    with tempfile.TemporaryFile() as board:
        board.truncate(size)
        with mmap.mmap(board.fileno(), size) as memory, _dumping_threads(), _beating() as read_end:
            path = "" if marker is None else marker.absolute()
            arguments = (os.getpid(), read_end, board.fileno(), path, seconds, advice)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", _SCRIPT, *map(str, arguments)],
                    pass_fds=(read_end, board.fileno()),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            finally:
                os.close(read_end)  # else a pipe that nobody reads would fill up, and a beat would wait for ever
            open_board(memory)
            try:
                yield
            finally:
                close_board()
                process.kill()  # not asked to end: it may be about to end this process, which is alive
                process.wait()


def read_frozen(path: Path) -> Frozen:
    """Return what a marker says; an empty record if there is none.

    Raises:
        RecordError: the marker cannot be read.
    """
    if not path.exists():
        return Frozen()
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
        return Frozen(tuple(map(str, marker["env_ids"])), str(marker["call"]), float(marker["seconds"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: expected what the watchdog wrote, got {error}; remove the file") from error


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

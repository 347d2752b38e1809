"""The end of a program that was asked to stop: at a second signal at once, and at the latest when its grace is over.

A thread ends a program that waits for something that hangs. It cannot run while code keeps the interpreter's lock (a
regular expression that never ends), and is told of nothing while the main thread does not come back to run the handler
of the signal. There a process ends the program, which this module starts by running this file: the system tells it of
each signal through a pipe (`signal.set_wakeup_fd`), which needs no lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False  # typing's own takes ms, and this file is started as a program
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType

GRACE_SECONDS = 30.0
MARGIN_SECONDS = 3.0  # that the process waits beyond the grace: the thread has its last words then
_CLOSING_SECONDS = 10.0
_LAST_WORDS_SECONDS = 2.0
_SAME_SIGNAL_SECONDS = 0.5  # `timeout` and others send one signal twice
_KILL_SECONDS = 1.0
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
_SIGEV_NONE, _SIGEV_THREAD = 1, 2


class Deadline:
    """Time that a program has to end once it was asked to stop.

    Args:
        seconds: from `begin` until the program leaves, whatever it is doing.
        outcome: said then: what has become of its work.

    Attributes:
        before_leaving: called in another thread when the time is over, just before the program leaves.
    """

    def __init__(self, seconds: float, *, outcome: str) -> None:
        self.seconds = seconds
        self._outcome = outcome
        self.before_leaving: Callable[[], object] = lambda: None
        self._by, self._exit_code = "", 128 + signal.SIGTERM
        # SimpleQueue.put may be called in a signal handler, also one that interrupts another put.
        self._times: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    def begin(self, by: str, exit_code: int) -> None:
        """Let the time run from now on; `by` names what asked for the stop."""
        self._by, self._exit_code = by, exit_code
        self._times.put(self.seconds)

    def saved(self) -> None:
        """Note that all is saved: what hangs is not waited for until the grace is over."""
        self._times.put(_CLOSING_SECONDS)

    @contextlib.contextmanager
    def handling_signals(self, on_first: Callable[[int], object]) -> Iterator[None]:
        """Call `on_first` with the first of SIGTERM, SIGINT and SIGHUP in the block; a second ends the program at once.

        Signals that the program handles itself, or ignores, stay as they are. A program in the background of a script
        inherits an ignored SIGINT: Ctrl-C is meant for the script, and others in its background must not end by it.
        Under nohup, SIGHUP is ignored.
        Outside of the main thread, no handler can be set.
        """
        threading.Thread(target=self._leave_in_time, name="gspo-gym-deadline", daemon=True).start()

        def handle(number: int, _frame: FrameType | None) -> None:
            for handled_signal in before:
                if signal.getsignal(handled_signal) == handle:
                    signal.signal(handled_signal, signal.SIG_DFL)
            on_first(number)

        before = {}
        if threading.current_thread() is threading.main_thread():
            standard = (signal.SIG_DFL, signal.default_int_handler)
            before = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) in standard}
        for number in before:
            signal.signal(number, handle)
        try:
            with self._watched_from_outside(before):
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._times.put(None)

    @contextlib.contextmanager
    def _watched_from_outside(self, numbers: Collection[int]) -> Iterator[None]:
        """Have this program ended some seconds after it got one of the signals, even if it does not react."""
        if not numbers or os.name != "posix":
            yield
            return
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            if before != -1:  # it is taken, as by an event loop of another library, which needs it
                signal.set_wakeup_fd(before)
                yield
                return
            with _exit_pipe() as leave:
                arguments = (os.getpid(), read_end, leave, self.seconds, *numbers)
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, *map(str, map(float, arguments))],
                    pass_fds=(read_end, leave) if leave >= 0 else (read_end,),
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,  # out of reach of Ctrl-C
                )
                try:
                    yield
                finally:
                    process.kill()  # not asked to end: it may be about to end this process, which is alive
                    process.communicate()
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)
            os.close(read_end)
            os.close(write_end)

    def _leave_in_time(self) -> None:
        seconds = self._times.get()
        if seconds is None:
            return  # the block has ended
        ending = f"not done after run.stop_grace_seconds = {seconds:g}; {self._outcome}"
        with contextlib.suppress(queue.Empty):
            began = time.monotonic()
            if self._times.get(timeout=seconds) is None:
                return  # likewise
            ending = "saved; left without waiting for what hangs"
            self._times.get(timeout=max(0.0, min(_CLOSING_SECONDS, began + seconds - time.monotonic())))
            return
        try:
            print(f"stopped by {self._by}: {ending}", file=sys.stderr, flush=True)
            # In another thread: the disk that it writes to may be what hangs.
            telling = threading.Thread(target=self.before_leaving, daemon=True)
            telling.start()
            telling.join(_LAST_WORDS_SECONDS)
        finally:
            os._exit(self._exit_code)


class _Event(ctypes.Structure):
    """`struct sigevent` of 64-bit Linux."""

    _fields_ = [  # ctypes wants a list
        ("value", ctypes.c_uint64),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    ]


class _Request(ctypes.Structure):
    """`struct aiocb` of glibc on 64-bit Linux."""

    _fields_ = [
        ("file", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("num_bytes", ctypes.c_size_t),
        ("event", _Event),
        ("rest", ctypes.c_char * 256),
    ]


# The processes of which glibc was asked to read: in their forks it waits for threads that are not there.
_readers: set[int] = set()


@contextlib.contextmanager
def _exit_pipe() -> Iterator[int]:
    """Give a pipe's end: a byte written there ends this process with that exit status, without the interpreter.

    Another process can end this one by a signal only, and all that end it look like a crash to a batch system. So
    glibc is asked to read the byte, as the argument of `_exit`, which it then calls in a thread of its own. -1: it
    cannot be asked on this system, or in a fork of a process that has asked it.
    """
    libc = ctypes.CDLL(None)
    is_known = sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8
    is_fork = bool(_readers - {os.getpid()})
    if is_fork or not is_known or not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "aio_read"):
        yield -1
        return
    _readers.add(os.getpid())
    read_end, write_end = os.pipe()
    request = _Request(file=read_end, num_bytes=1)
    request.buffer = ctypes.addressof(request) + _Request.event.offset + _Event.value.offset
    request.event.notify = _SIGEV_THREAD
    request.event.function = ctypes.cast(libc._exit, ctypes.c_void_p)
    libc.aio_read(ctypes.byref(request))
    try:
        yield write_end
    finally:
        request.event.notify = _SIGEV_NONE
        os.write(write_end, b"\0")
        while libc.aio_error(ctypes.byref(request)) == errno.EINPROGRESS:  # its memory is in use until then
            time.sleep(0.001)
        os.close(read_end)
        os.close(write_end)


def main() -> None:
    """Wait for signals of the program, and end it when its time is over: `PID PIPE EXIT_PIPE SECONDS SIGNAL...`."""
    pid, signals, leave = (int(float(text)) for text in sys.argv[1:4])
    seconds, numbers = float(sys.argv[4]), {int(float(text)) for text in sys.argv[5:]}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    came: list[tuple[float, int]] = []
    while True:
        seconds_left = None if not came else max(0.0, _end_of(came, seconds + MARGIN_SECONDS) - time.monotonic())
        ready = select.select([signals, 0], [], [], seconds_left)[0]
        if not ready:
            break
        if 0 in ready:
            return  # the program has ended, and this end of the pipe with it
        if not (data := os.read(signals, select.PIPE_BUF)):
            return  # the program has ended
        came += [(time.monotonic(), number) for number in data if number in numbers]
    name = signal.Signals(came[0][1]).name
    with contextlib.suppress(OSError):
        why = "something holds the interpreter, or the main thread"
        print(f"\n{name}: no reaction after {time.monotonic() - came[0][0]:.0f} seconds: {why}", file=sys.stderr)
    if leave >= 0:
        os.write(leave, bytes([128 + came[0][1]]))
        select.select([signals], [], [], _KILL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _end_of(came: list[tuple[float, int]], seconds: float) -> float:
    """Return when the program is to be ended, after signals with the times at which they came.

    A program that reacts to a signal leaves the next to the system, so a second one says that it does not react.
    """
    first, last = came[0][0], came[-1][0]
    return last if last - first > _SAME_SIGNAL_SECONDS else first + seconds


if __name__ == "__main__":
    main()

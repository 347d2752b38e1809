"""The process that watches a run from outside: `python watchdog_process.py PID BEATS BOARD MARKER SECONDS ADVICE`.

It reads a few beats a second from the descriptor BEATS, which a thread of the run writes whenever it gets the
interpreter's lock. When none has come for SECONDS, and the thread of the run that has computed most since then
announces on the board (a descriptor, too) that it runs an environment, that environment holds the lock: this writes the
file MARKER, says so, has the run's threads dumped, and kills the run. Anything else that is slow is left alone.
It ends with the run. Only the standard library is imported: it starts in some ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import sys
import time

_SLOT_BYTES, _HEADER = 256, struct.Struct("=QH")  # as `env/workers/announcements.py` writes them
_SHARE = 0.1  # of the time without a beat that the thread must have computed; a machine may have other work
_DUMP_SECONDS = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Watch until the run ends or is ended."""
    pid, beats, board = map(int, sys.argv[1:4])
    marker, limit, advice = sys.argv[4], float(sys.argv[5]), sys.argv[6]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those are the run's, which tells us by hanging up
    last, spent = time.monotonic(), cpu_seconds(pid)
    while True:
        if select.select([beats], [], [], limit)[0]:
            if not os.read(beats, select.PIPE_BUF):
                return
            last, spent = time.monotonic(), cpu_seconds(pid)
            continue
        silence = time.monotonic() - last
        name = holder(cpu_seconds(pid), spent, os.pread(board, os.fstat(board).st_size, 0), silence)
        if name is not None:
            end(pid, name, silence, marker=marker, advice=advice)
            return


def cpu_seconds(pid: int) -> dict[int, float]:
    """Return the processor time of each thread of the process, by its id."""
    found: dict[int, float] = {}
    folder = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(folder):
            with contextlib.suppress(OSError), open(f"{folder}/{thread}/stat", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()  # a name may hold spaces, and ends with ")"
                found[int(thread)] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def holder(now: dict[int, float], before: dict[int, float], board: bytes, silence: float) -> str | None:
    """Return what the busiest thread runs, if it has computed at all and announces an environment."""
    spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in now.items()}
    busiest = max(spent, key=lambda thread: spent[thread], default=None)
    if busiest is None or spent[busiest] < _SHARE * silence:
        return None
    for start in range(0, len(board), _SLOT_BYTES):
        thread, length = _HEADER.unpack_from(board, start)
        if thread == busiest:
            text = board[start + _HEADER.size : start + _HEADER.size + length]
            return text.decode("utf-8", "replace")
    return None


def end(pid: int, name: str, silence: float, *, marker: str, advice: str) -> None:
    """Leave the marker, say so, and end the run, whether or not the rest could be done."""
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

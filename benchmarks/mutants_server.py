"""Forks one pytest process per request, so that what is not ours is imported once for all mutants.

Run as a script in the mutated checkout, by its interpreter; the arguments are packages to import at the start. It
imports nothing of ours: a fork must import it afresh. What the tests imported of installed packages, this process
imports after them, so that the next fork has it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

_TIMED_OUT = 124
_POLL_SECONDS = 0.02
_CLOCK_SECONDS = 0.5


def main() -> None:
    """Answer each line of stdin, {arguments, seconds, output}, with a line {status, seconds, processor_seconds}."""
    sys.path.insert(0, os.getcwd())  # as for `python -m pytest`
    _preload(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that a running test is ended, too
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        answer = _run(**request)
        if answer["status"] == 0:
            _preload(_names_file(request["output"]).read_text().split())
        print(json.dumps(answer), file=answers, flush=True)


def _preload(names: list[str]) -> None:
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # not all can be imported by themselves; a fork does what it needs
                importlib.import_module(name)
    gc.freeze()  # so that no fork copies their pages by collecting garbage


def _run(arguments: list[str], seconds: float, output: str) -> dict[str, float]:
    """Return pytest's exit status, or 124 after `seconds`, and the seconds that it took, both without the load's.

    Its processor time includes that of processes that it started and waited for.
    """
    child = os.fork()
    if child == 0:
        _become_pytest(arguments, output)
    clock = LoadFreeClock(child)
    ended = 0
    try:
        while not ended and clock.seconds() < seconds:
            time.sleep(_POLL_SECONDS)
            ended, how, used = os.wait4(child, os.WNOHANG)
        took = clock.seconds()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its whole group, for tests start processes
        if not ended:
            os.kill(child, signal.SIGKILL)  # it alone before it has a group
            _, how, used = os.wait4(child, 0)
    status = os.waitstatus_to_exitcode(how) if ended else _TIMED_OUT
    return {"status": status, "seconds": took, "processor_seconds": used.ru_utime + used.ru_stime}


class LoadFreeClock:
    """The seconds since the start of a session of processes, without those in which they waited for a busy core.

    A mutant must not die because other programs slow its tests down. Linux counts how long each thread ran and how long
    it was ready and had no core; elsewhere this is the time on the wall.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._counted = 0.0
        self._since = time.monotonic()
        self._times: dict[str, tuple[int, int]] = {}

    def seconds(self) -> float:
        """Return the seconds until now; the load of the last half second may still be in it."""
        elapsed = time.monotonic() - self._since
        if elapsed < _CLOCK_SECONDS:
            return self._counted + elapsed
        times = _thread_times(self._session)
        ran, waited = (
            sum(new[i] - self._times.get(thread, (0, 0))[i] for thread, new in times.items()) / 1e9 for i in (0, 1)
        )
        self._counted += seconds_without_load(elapsed, ran=ran, waited=waited)
        self._since += elapsed
        self._times = times
        return self._counted


def seconds_without_load(elapsed: float, *, ran: float, waited: float) -> float:
    """Return the part of `elapsed` in which threads that ran and waited so many seconds were not held up.

    One thread that waited for a core through three of four seconds was held up for these three. Where several wait at
    once, their sum may exceed the time: then the same share of it counts as of what they asked for.
    """
    asked = ran + waited
    return elapsed - waited * min(1.0, elapsed / asked) if asked else elapsed


def _thread_times(session: int) -> dict[str, tuple[int, int]]:
    """Return the nanoseconds that each thread of a session ran and waited for a core, of those that still live."""
    times = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # Behind the name, which may hold spaces and parentheses: state, parent, group, session.
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                for thread in (process / "task").iterdir():
                    ran, waited, _ = map(int, (thread / "schedstat").read_text().split())
                    times[thread.name] = (ran, waited)
    return times


def _become_pytest(arguments: list[str], output: str) -> NoReturn:
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(written, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        import pytest

        status = int(pytest.main(arguments))
        sys.stdout.flush()
        _names_file(output).write_text("\n".join(_installed_modules()))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _names_file(output: str) -> Path:
    return Path(f"{output}.modules")


def _installed_modules() -> list[str]:
    return [
        name for name, module in list(sys.modules.items()) if "site-packages" in (vars(module).get("__file__") or "")
    ]


if __name__ == "__main__":
    main()

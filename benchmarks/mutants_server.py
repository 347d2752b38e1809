"""Forks one pytest process per request, so that torch and transformers are imported once for all mutants.

Run as a script with the mutated tree first on PYTHONPATH. It imports nothing of ours: a fork must import it afresh.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import NoReturn

# Slow to import, and not ours. Plugins of pytest are left out: it rewrites their assertions while it imports them.
_PRELOADED = ("torch", "transformers", "pydantic", "numpy", "pytest")
_TIMED_OUT = 124
_POLL_SECONDS = 0.02


def main() -> None:
    """Answer each line of stdin, {arguments, seconds, output}, with a line that holds the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that a running test is ended, too
    for name in _PRELOADED:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(_run(**json.loads(line)), file=answers, flush=True)


def _run(arguments: list[str], seconds: float, output: str) -> int:
    child = os.fork()
    if child == 0:
        _become_pytest(arguments, output)
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            ended, how = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(how)
            time.sleep(_POLL_SECONDS)
        return _TIMED_OUT
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its whole group, for tests start processes
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


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
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()

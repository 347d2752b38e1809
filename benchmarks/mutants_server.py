"""Forks one pytest process per request, so that what is not ours is imported once for all mutants.

Run as a script with the mutated tree first on PYTHONPATH. It imports nothing of ours: a fork must import it afresh.
What the tests imported of installed packages, this process imports after them, so that the next fork has it.
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

_PRELOADED = ("torch", "transformers", "pydantic", "numpy", "pytest")
_TIMED_OUT = 124
_POLL_SECONDS = 0.02


def main() -> None:
    """Answer each line of stdin, {arguments, seconds, output}, with a line that holds the exit status."""
    _preload(_PRELOADED)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that a running test is ended, too
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        status = _run(**request)
        if status == 0:
            _preload(_names_file(request["output"]).read_text().split())
        print(status, file=answers, flush=True)


def _preload(names: list[str] | tuple[str, ...]) -> None:
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # not all can be imported by themselves; a fork does what it needs
                importlib.import_module(name)
    gc.freeze()  # so that no fork copies their pages by collecting garbage


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
        for kill in (os.killpg, os.kill):  # its whole group, for tests start processes; it alone before it has one
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
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

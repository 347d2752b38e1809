"""A task app in a process of its own, started by the command that a user types."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

import programs

STOP_SECONDS = 30


@contextlib.contextmanager
def serving_process(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The base URL of `gspo-gym env serve ARGUMENTS` on a free port, for as long as the block lasts."""
    command = [sys.executable, "-m", "gspo_gym.cli", "env", "serve", *arguments, "--port", "0"]
    process = programs.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match is not None, f"{' '.join(command)} said {line!r}"
        yield match[0]
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)
        process.stdout.close()

"""Limits on one action that hold inside of C code, too: past it, the worker process is killed by the kernel.

An environment that hands what a model wrote to a library (a query, a pattern, a formula) puts the call into
`killed_after`. A process that ends by that signal exceeded its environment's limit on an action, which is the doing of
whoever chose the action; see `errors.ActionLimitError`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

from gspo_gym.errors import ConfigError

LIMIT_SIGNAL = signal.SIGALRM  # nothing else here uses it; its default action ends the process


class _Process:
    """Whether this process is a worker, which may be killed; set by `process_worker.py`, once, after the fork."""

    is_worker = False


def this_is_a_worker() -> None:
    """Let limits kill this process from now on."""
    _Process.is_worker = True


@contextlib.contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """In a worker process, end the process if the body takes longer; anywhere else, do nothing.

    One at a time: a process plays one episode, and one call of it. Fractions of a second count.

    Raises:
        ConfigError: `seconds` is not above 0.
    """
    if not seconds > 0:
        raise ConfigError(f"killed_after: expected seconds > 0, got {seconds!r}")
    if not _Process.is_worker:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

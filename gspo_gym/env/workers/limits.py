"""Limits of worker processes, and limits of one action that hold inside C code too.

An environment that passes model-written text to a library (a query, a pattern, a formula) wraps the call in
`killed_after`. The kernel then ends the process by LIMIT_SIGNAL, which counts as the model's doing
(`errors.ActionLimitError`).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from gspo_gym.base.leftovers import leave_to_another
from gspo_gym.base.settings import Settings
from gspo_gym.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker process, and the conditions of its replacement.

    Growth is allowed from after the first constructor to the end of an episode; `variables` are names of the program's
    environment variables that the process gets. 0 MiB of memory means no limit.
    """

    memory_mb: int = 8192
    max_episodes: int = 1000
    max_growth_mb: int = 256
    max_growth_files: int = 8
    max_growth_threads: int = 8
    max_growth_children: int = 0
    variables: tuple[str, ...] = ()

    def reason_to_replace(self, grown: Mapping[str, int]) -> str | None:
        """Return what has grown too much, in words, or None."""
        limit_by_name = {
            "MiB of memory": self.max_growth_mb,
            "open files": self.max_growth_files,
            "threads": self.max_growth_threads,
            "child processes": self.max_growth_children,
        }
        leaks = [f"{grown.get(name, 0)} {name}" for name, most in limit_by_name.items() if grown.get(name, 0) > most]
        return "leaked " + ", ".join(leaks) if leaks else None


class IsolationSettings(Settings):
    """Keys of [rollout] on where environments run."""

    isolation: Literal["auto", "thread", "process"] = Field(
        default="auto",
        description=(
            "where environments run; auto: as the environment says, and in worker processes if it says nothing and "
            "touches the random generators of the whole process, else in threads"
        ),
    )
    env_memory_limit_mb: int = Field(
        default=WorkerLimits().memory_mb, ge=0, description="MiB of address space of a worker process; 0: no limit"
    )
    env_variables: tuple[str, ...] = Field(
        default=(), description="environment variables that worker processes are given, by name; others they do not see"
    )


LIMIT_SIGNAL = signal.SIGALRM  # used for nothing else; its default action ends the process


class _Process:
    is_worker = False  # limits may kill this process; set once after the fork


def this_is_a_worker() -> None:
    """Allow limits to kill this process from now on; what it leaves, the server of workers ends and removes."""
    _Process.is_worker = True
    leave_to_another()


@contextlib.contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """End a worker process if the block takes longer; do nothing in any other process.

    Blocks must not nest or overlap: a process has one timer. Fractions of a second count.

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

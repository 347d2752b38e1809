"""What a worker process may use, and when it is not used again. Read by `env/workers/env.py` and by the config.

Limits on one action that hold inside of C code, too: past it, the worker process is killed by the kernel.

An environment that hands what a model wrote to a library (a query, a pattern, a formula) puts the call into
`killed_after`. A process that ends by that signal exceeded its environment's limit on an action, which is the doing of
whoever chose the action; see `errors.ActionLimitError`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from gspo_gym.base.settings import Settings
from gspo_gym.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a worker process may use, and when it is not used again.

    Attributes:
        memory_mb: MiB of address space; 0: no limit.
        max_episodes: after which it is replaced.
        max_growth_mb, max_growth_files, max_growth_threads, max_growth_children: what it may have more of after an
            episode than when it had made its first environment: MiB of resident memory, open files, threads, and
            processes that it started.
        variables: names of environment variables of the program that it is given.
    """

    memory_mb: int = 8192
    max_episodes: int = 1000
    max_growth_mb: int = 256
    max_growth_files: int = 8
    max_growth_threads: int = 8
    max_growth_children: int = 0
    variables: tuple[str, ...] = ()

    def reason_to_replace(self, grown: Mapping[str, int]) -> str | None:
        """What has grown too much, in words; None if nothing has."""
        allowed = {
            "MiB of memory": self.max_growth_mb,
            "open files": self.max_growth_files,
            "threads": self.max_growth_threads,
            "child processes": self.max_growth_children,
        }
        leaked = [f"{grown.get(name, 0)} {name}" for name, most in allowed.items() if grown.get(name, 0) > most]
        return "leaked " + ", ".join(leaked) if leaked else None


class IsolationSettings(Settings):
    """Where a run's environments run; keys of the section [rollout]."""

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


LIMIT_SIGNAL = signal.SIGALRM  # nothing else here uses it; its default action ends the process


class _Process:
    """Whether this process is a worker, which may be killed; set by `env/workers/worker.py`, once, after the fork."""

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

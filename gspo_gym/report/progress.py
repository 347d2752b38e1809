"""Live progress of a run: a table that updates in a terminal, plain lines nowhere else.

The trainer calls a `Progress`; it never prints. Metric names are those of `recording.METRICS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

_SHOWN = (
    ("rollout/reward_mean", "reward", "{:.3f}"),
    ("rollout/success_rate", "success", "{:.0%}"),
    ("loss/ratio_mean", "ratio", "{:.5f}"),
    ("loss/clip_fraction", "clipped", "{:.1%}"),
    ("loss/entropy", "entropy", "{:.3f}"),
    ("time/sampled_tokens_per_second", "tok/s", "{:,.0f}"),
)


class Progress(Protocol):
    """Who is told how a run goes."""

    def started(self, num_steps: int) -> None: ...

    def note(self, text: str) -> None:
        """A sentence worth reading, such as an evaluation's result."""
        ...

    def stepped(self, step: int, metrics: Mapping[str, float | None]) -> None: ...

    def finished(self) -> None: ...


class QuietProgress:
    """Says only the notes: for logs, pipes and tests."""

    def __init__(self, write: Callable[[str], None] = print) -> None:
        self._write = write

    def started(self, num_steps: int) -> None:
        self._write(f"training for {num_steps} steps")

    def note(self, text: str) -> None:
        self._write(text)

    def stepped(self, step: int, metrics: Mapping[str, float | None]) -> None:
        pass

    def finished(self) -> None:
        pass


class LiveProgress:
    """One line of the latest step, redrawn in place; `clock` is in seconds and monotonic."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._num_steps = 0
        self._first: tuple[int, float] | None = None

    def started(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._live.start()

    def note(self, text: str) -> None:
        self._console.print(text)

    def stepped(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._live.update(self._table(step, metrics))

    def finished(self) -> None:
        self._live.stop()

    def _table(self, step: int, metrics: Mapping[str, float | None]) -> Table:
        table = Table(box=None, pad_edge=False)
        row = [f"{step}/{self._num_steps}"]
        table.add_column("step")
        for name, label, style in _SHOWN:
            value = metrics.get(name)
            table.add_column(label, justify="right")
            row.append("-" if value is None else style.format(value))
        table.add_column("left", justify="right")
        table.add_row(*row, self._time_left(step))
        return table

    def _time_left(self, step: int) -> str:
        now = self._clock()
        if self._first is None:  # the first step also pays for start-up, so the pace is measured from it, not with it
            self._first = (step, now)
            return "-"
        first_step, first_time = self._first
        seconds = (now - first_time) / max(step - first_step, 1) * (self._num_steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def make_progress(console: Console) -> Progress:
    """Live in a terminal, quiet elsewhere."""
    return LiveProgress(console) if console.is_terminal else QuietProgress(console.print)

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

# What a column shows: the sum of these metrics, under this title and format.
_COLUMNS = (
    (("rollout/reward_mean",), "reward", "{:.3f}"),
    (("rollout/success_rate",), "success", "{:.0%}"),
    (("ratio/mean",), "ratio", "{:.5f}"),
    (("clip/low_fraction", "clip/high_fraction"), "clipped", "{:.1%}"),
    (("policy/entropy",), "entropy", "{:.3f}"),
    (("rollout/sampled_tokens_per_second",), "tok/s", "{:,.0f}"),
)


class Progress(Protocol):
    """Who is told how a run goes."""

    def started(self, num_steps: int) -> None:
        """The run has this many steps in all."""
        ...

    def note(self, text: str) -> None:
        """A sentence worth reading, such as an evaluation's result."""
        ...

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, counted from 1."""
        ...

    def finished(self) -> None:
        """Nothing more will come."""
        ...


class QuietProgress:
    """Says only the notes: for logs, pipes and tests."""

    def __init__(self, write: Callable[[str], None] = print) -> None:
        self._write = write

    def started(self, num_steps: int) -> None:
        self._write(f"training for {num_steps} steps")

    def note(self, text: str) -> None:
        self._write(text)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
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
        self._console.print(text, markup=False, highlight=False)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._live.update(self.table(step, metrics))

    def finished(self) -> None:
        self._live.stop()

    def table(self, step: int, metrics: Mapping[str, float]) -> Table:
        """What is shown for this step."""
        table = Table(box=None, pad_edge=False)
        row = [f"{step}/{self._num_steps}"]
        table.add_column("step")
        for names, title, style in _COLUMNS:
            table.add_column(title, justify="right")
            is_known = all(name in metrics for name in names)
            row.append(style.format(sum(metrics[name] for name in names)) if is_known else "-")
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
    return (
        LiveProgress(console)
        if console.is_terminal
        else QuietProgress(lambda text: console.print(text, soft_wrap=True, markup=False, highlight=False))
    )

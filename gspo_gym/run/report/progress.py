"""Live progress of a run: a table that updates in a terminal, plain lines elsewhere.

The trainer calls a `Progress` and never prints. Metric names are those of `METRICS`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

# Columns: the metrics whose sum is shown, the title and the format.
_COLUMNS = (
    (("rollout/reward_mean",), "reward", "{:.3f}"),
    (("rollout/success_rate",), "success", "{:.0%}"),
    (("ratio/mean",), "ratio", "{:.5f}"),
    (("clip/low_fraction", "clip/high_fraction"), "clipped", "{:.1%}"),
    (("policy/entropy",), "entropy", "{:.3f}"),
    (("rollout/sampled_tokens_per_second",), "tok/s", "{:,.0f}"),
)


class Progress(Protocol):
    """Receiver of a run's progress."""

    def started(self, num_steps: int) -> None:
        """Begin a run of this many steps."""
        ...

    def note(self, text: str) -> None:
        """Show a sentence, such as an evaluation's result."""
        ...

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step, counted from 1."""
        ...

    def finished(self) -> None:
        """End the run."""
        ...


class QuietProgress:
    """Writes notes, and a line after at most 30 seconds without one: for logs and pipes.

    Args:
        write: takes a line.
        seconds: longest time between two lines, while `alive`.
        wait: waits so many seconds for the end of the run; returns whether it has come.
        clock: monotonic seconds.
        doing: text of the lines until the first step.
    """

    def __init__(
        self,
        write: Callable[[str], None] = print,
        *,
        seconds: float = 30.0,
        wait: Callable[[float], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
        doing: str = "getting ready",
    ) -> None:
        self._write = write
        self._seconds = seconds
        self._end = threading.Event()
        self._wait = wait or self._end.wait
        self._clock = clock
        self._lock = threading.Lock()  # the thread of `alive` writes too
        self._began = self._last = clock()
        self._doing = doing
        self._pace = _Pace(clock)

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Write lines from another thread during the block."""
        # A long update or evaluation blocks the calling thread.
        thread = threading.Thread(target=self._beat, daemon=True, name="gspo-gym-progress")
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def started(self, num_steps: int) -> None:
        self._pace.num_steps = num_steps
        self._doing = f"at step 1/{num_steps}"
        self._say(f"training for {num_steps} steps")

    def note(self, text: str) -> None:
        self._say(text)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the text of this step, and write it if a line is due."""
        numbers = ", ".join(f"{title} {text}" for title, text in _cells(metrics) if text != "-")
        left = self._pace.left_after(step)
        self.doing(f"step {step}/{self._pace.num_steps}: {numbers}, left {left}")

    def doing(self, text: str, *, seconds: float | None = None) -> None:
        """Set the text of the next line; write it now if none was written for `seconds`, or the usual time for None."""
        self._doing = text
        if self._is_due(self._seconds if seconds is None else seconds):
            self._say(text)

    def finished(self) -> None:
        pass

    def _beat(self) -> None:
        while not self._wait(max(self._seconds - (self._clock() - self._last), 0.0)):
            if self._is_due(self._seconds):
                self._say(f"{self._doing} ({self._clock() - self._began:.0f} s since the start)")

    def _is_due(self, seconds: float) -> bool:
        return self._clock() - self._last >= seconds

    def _say(self, text: str) -> None:
        with self._lock:
            self._last = self._clock()
            self._write(text)


class _Pace:
    """Estimate of the remaining time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.num_steps = 0
        self._first: tuple[int, float] | None = None

    def left_after(self, step: int) -> str:
        """Return the remaining minutes and seconds, or "-" after the first step."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
            return "-"
        # The first step also pays for start-up, so the pace is measured from its end.
        first_step, first_time = self._first
        seconds = (now - first_time) / max(step - first_step, 1) * (self.num_steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class LiveProgress:
    """One line for the latest step, redrawn in place; `clock` is in monotonic seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._pace = _Pace(clock)

    def started(self, num_steps: int) -> None:
        self._pace.num_steps = num_steps
        self._live.start()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._live.update(self.table(step, metrics))

    def finished(self) -> None:
        self._live.stop()

    def table(self, step: int, metrics: Mapping[str, float]) -> Table:
        """Return the table of this step."""
        table = Table(box=None, pad_edge=False)
        row = [f"{step}/{self._pace.num_steps}"]
        table.add_column("step")
        for title, text in _cells(metrics):
            table.add_column(title, justify="right")
            row.append(text)
        table.add_column("left", justify="right")
        table.add_row(*row, self._pace.left_after(step))
        return table


def _cells(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each column; "-" if a metric is missing."""
    for names, title, style in _COLUMNS:
        is_known = all(name in metrics for name in names)
        yield title, style.format(sum(metrics[name] for name in names)) if is_known else "-"


@contextlib.contextmanager
def telling(console: Console | None) -> Iterator[Progress]:
    """Yield a progress on a console: live in a terminal, in lines elsewhere, silent for None."""
    if console is None:
        yield QuietProgress(lambda _: None)
    elif console.is_terminal:
        yield LiveProgress(console)
    else:
        lines = QuietProgress(_printing_to(console))
        with lines.alive():
            yield lines


@contextlib.contextmanager
def counting(
    console: Console,
    total: int,
    *,
    done: int = 0,
    seconds: float = 5.0,
    wait: Callable[[float], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[], None]]:
    """Show on a console how many of `total` episodes are over; yield a function to call at the end of each.

    A terminal shows a bar. Elsewhere, a line is written when an episode ends at least `seconds` after the last line,
    and after 30 seconds without any. `done` episodes are over already; `wait` and `clock` as in `QuietProgress`.
    """
    if console.is_terminal:
        columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total, completed=done)
            yield lambda: bar.advance(task)
        return
    lines = QuietProgress(_printing_to(console), wait=wait, clock=clock, doing=_over(done, total))

    def count() -> None:
        nonlocal done
        done += 1
        lines.doing(_over(done, total), seconds=seconds)

    with lines.alive():
        yield count


def _over(done: int, total: int) -> str:
    return f"{done} of {total} episodes are over"


def _printing_to(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, soft_wrap=True, markup=False, highlight=False)

"""Live progress of a run: a table that updates in a terminal, plain lines nowhere else.

The trainer calls a `Progress`; it never prints. Metric names are those of `recording.METRICS`.
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
    """Writes the notes, and a line at least every 30 seconds in which there is none: for logs and pipes.

    Args:
        write: takes a line.
        seconds: most between two lines, while `alive`.
        wait: waits so many seconds for the end of the run, and returns whether it has come.
        clock: seconds, monotonic.
        doing: what is said until something else is known.
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
        self._lock = threading.Lock()  # the thread writes, too
        self._began = self._last = clock()
        self._doing = doing
        self._pace = _Pace(clock)

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Write lines from a thread of its own meanwhile: a long update or evaluation holds up everything else."""
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
        """Keep what is to be said of this step; it is written if nothing else was for so long."""
        numbers = ", ".join(f"{title} {text}" for title, text in _cells(metrics) if text != "-")
        left = self._pace.left_after(step)
        self.doing(f"step {step}/{self._pace.num_steps}: {numbers}, left {left}")

    def doing(self, text: str, *, seconds: float | None = None) -> None:
        """Keep what is to be said next; write it now if nothing was for `seconds`; None: as long as for any line."""
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
    """The time that is left, from the pace so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.num_steps = 0
        self._first: tuple[int, float] | None = None

    def left_after(self, step: int) -> str:
        """Return minutes and seconds, or "-" after the first step.

        The first step also pays for start-up, so the pace is measured from it, not with it.
        """
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
            return "-"
        first_step, first_time = self._first
        seconds = (now - first_time) / max(step - first_step, 1) * (self.num_steps - step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class LiveProgress:
    """One line of the latest step, redrawn in place; `clock` is in seconds and monotonic."""

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
        """What is shown for this step."""
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
    """Yield the title and the text of each column; "-" where a metric is missing."""
    for names, title, style in _COLUMNS:
        is_known = all(name in metrics for name in names)
        yield title, style.format(sum(metrics[name] for name in names)) if is_known else "-"


@contextlib.contextmanager
def telling(console: Console | None) -> Iterator[Progress]:
    """Tell a console how a run goes: live in a terminal, in lines elsewhere; None: nobody is told."""
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
    """Tell a console how many of `total` episodes are over; call what is yielded at the end of each.

    A terminal has a bar; elsewhere there is a line at the end of an episode, at least `seconds` after the last one, and
    one every 30 seconds in which none ends. `done` are over already; `wait` and `clock` as in `QuietProgress`.
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

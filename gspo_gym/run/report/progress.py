"""A run in the terminal: its live progress, and the report at its end.

Progress is a table that updates in a terminal and in a notebook's cell, and plain lines elsewhere; the trainer calls a
`Progress` and never prints. The report is made from the run's records: learning curve, before and after, two episodes,
what to do next. Metric names are those of `METRICS`.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import importlib
import itertools
import json
import re
import shlex
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from gspo_gym.base.tables import table
from gspo_gym.policy.bases import TINY_PREFIX
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.rollout.ledger import Disposition, Terminal, read_ledger
from gspo_gym.run.folders import run_name
from gspo_gym.run.process import Phases, minutes_and_seconds
from gspo_gym.run.records import read_config
from gspo_gym.types import Message, Segment, Trajectory

# Columns: the metrics whose sum is shown, the title and the format.
_COLUMNS = (
    (("rollout/reward_mean",), "reward", "{:.3f}"),
    (("rollout/success_rate",), "success", "{:.0%}"),
    (("ratio/mean",), "ratio", "{:.5f}"),
    (("clip/low_fraction", "clip/high_fraction"), "clipped", "{:.1%}"),
    (("policy/entropy",), "entropy", "{:.3f}"),
    (("rollout/sampled_tokens_per_second",), "tok/s", "{:,.0f}"),
)

_SPEAKER_STYLES = {"system": "dim", "user": "cyan", "assistant": "bold green", "tool": "yellow"}
_MAX_MESSAGES, _MAX_SAID = 12, 600  # messages, and characters of one, of an episode that is shown shortened
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """Receiver of a run's progress."""

    def started(self, num_steps: int, step: int = 0) -> None:
        """Begin a run of this many steps, of which an earlier part of it took the first `step`."""
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
        phases: of the run; they are in the lines.
        doing: returns the text of the lines in place of the run's phase.
    """

    def __init__(
        self,
        write: Callable[[str], None] = print,
        *,
        seconds: float = 30.0,
        wait: Callable[[float], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
        phases: Phases | None = None,
        doing: Callable[[], str] | None = None,
    ) -> None:
        self._write = write
        self._seconds = seconds
        self._end = threading.Event()
        self._wait = wait or self._end.wait
        self._clock = clock
        self._lock = threading.Lock()  # the thread of `alive` writes too
        self._began = self._last = clock()
        self._pace = _Pace(clock, phases or Phases())
        self._doing = doing or self._pace.doing

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

    def started(self, num_steps: int, step: int = 0) -> None:
        self._pace.begin(num_steps, step)
        self._say(f"training for {num_steps} steps")

    def note(self, text: str) -> None:
        self._say(text)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the step's metrics, if a line is due."""
        self._pace.stepped(step)
        numbers = ", ".join(f"{title} {text}" for title, text in _cells(metrics) if text != "-")
        self.say_if_due(f"step {step}/{self._pace.num_steps}: {numbers}, left {self._pace.left}")

    def say_if_due(self, text: str, *, seconds: float | None = None) -> None:
        """Write the text if nothing was written for `seconds`, or the usual time for None."""
        if self._is_due(self._seconds if seconds is None else seconds):
            self._say(text)

    def finished(self) -> None:
        pass

    def _beat(self) -> None:
        while not self._wait(max(self._seconds - (self._clock() - self._last), 0.0)):
            if self._is_due(self._seconds):
                self._say(f"{self._doing()} ({self._clock() - self._began:.0f} s since the start)")

    def _is_due(self, seconds: float) -> bool:
        return self._clock() - self._last >= seconds

    def _say(self, text: str) -> None:
        with self._lock:
            self._last = self._clock()
            self._write(text)


class _Pace:
    """How far a run is: its steps, the phase of the present one, and an estimate of the remaining time."""

    def __init__(self, clock: Callable[[], float], phases: Phases) -> None:
        self._clock = clock
        self._phases = phases
        self.num_steps: int | None = None  # None: training has not begun
        self.step = 0  # that has ended
        self.left = "-"
        self._first: tuple[int, float] | None = None

    def begin(self, num_steps: int, step: int) -> None:
        self.num_steps, self.step = num_steps, step

    def stepped(self, step: int) -> None:
        now, self.step = self._clock(), step
        if self._first is None:
            self._first = (step, now)
            return
        # The first step also pays for start-up, so the pace is measured from its end.
        first_step, first_time = self._first
        seconds = (now - first_time) / max(step - first_step, 1) * ((self.num_steps or step) - step)
        self.left = minutes_and_seconds(seconds)

    def doing(self) -> str:
        """Return the phase with its place among the steps, such as "step 2/9: playing 40 of 96, 0:20 left"."""
        if self.num_steps is None:
            return str(self._phases)
        if self._phases.now in ("collecting", "learning"):
            place = f"step {min(self.step + 1, self.num_steps)}"
        else:
            place = f"after step {self.step}" if self.step else "before step 1"
        run = "" if self.left == "-" else f"; the run: {self.left} left"
        return f"{place}/{self.num_steps}: {self._phases}{run}"


class LiveProgress:
    """The latest step and the present phase, redrawn in place; `clock` is in monotonic seconds."""

    _live: Live | _Cell

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, phases: Phases | None = None
    ) -> None:
        self._console = console
        self._pace = _Pace(clock, phases or Phases())
        self._row: dict[str, str] = {}
        if console.is_jupyter:
            self._live = _Cell(self._text, self._numbers)
        else:
            self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self.shown)

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Redraw during the block, but not after `finished`."""
        with self._live:
            yield

    def started(self, num_steps: int, step: int = 0) -> None:
        self._pace.begin(num_steps, step)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.stepped(step)
        place = f"{step}/{self._pace.num_steps}"
        self._row = {"step": place, **dict(_cells(metrics)), "left": self._pace.left}

    def finished(self) -> None:
        self._live.stop()

    def _numbers(self) -> str:
        return table(tuple(self._row), [tuple(self._row.values())], width=100) if self._row else ""

    def _text(self) -> str:
        return "\n".join(text for text in (self._numbers(), self._pace.doing()) if text)

    def shown(self) -> Group:
        """Return what is drawn now."""
        doing = Text(self._pace.doing(), style="dim")
        if not self._row:
            return Group(doing)
        return Group(Text(table(tuple(self._row), [tuple(self._row.values())])), doing)


class _Cell:
    """Redraws a text in a notebook's cell (rich's Live would need widgets); in the end what `last` returns stays."""

    def __init__(self, text: Callable[[], str], last: Callable[[], str], *, seconds: float = 0.5) -> None:
        self._text, self._last, self._seconds, self._end = text, last, seconds, threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        ipython = importlib.import_module("IPython.display")
        handle = ipython.display(_bundle(self._text()), raw=True, display_id=True)

        def draw() -> None:
            while not self._end.wait(self._seconds):
                handle.update(_bundle(self._text()), raw=True)
            handle.update(_bundle(self._last()), raw=True)

        # In this context: the notebook knows by it which cell the output belongs to.
        target = contextvars.copy_context().run
        self._thread = threading.Thread(target=target, args=(draw,), daemon=True, name="gspo-gym-cell")
        self._thread.start()

    def stop(self) -> None:
        """Draw no more; stopping twice is fine."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _bundle(text: str) -> dict[str, str]:
    # By media type; the plain text is for a notebook shown without a browser.
    return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>" if text else ""}


def _cells(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each column; "-" if a metric is missing."""
    for names, title, style in _COLUMNS:
        is_known = all(name in metrics for name in names)
        yield title, style.format(sum(metrics[name] for name in names)) if is_known else "-"


@contextlib.contextmanager
def telling(console: Console | None, phases: Phases | None = None) -> Iterator[Progress]:
    """Yield a progress on a console: live in a terminal, in lines elsewhere, silent for None."""
    if console is None:
        yield QuietProgress(lambda _: None)
        return
    if console.is_terminal or console.is_jupyter:
        progress: LiveProgress | QuietProgress = LiveProgress(console, phases=phases)
    else:
        progress = QuietProgress(_printing_to(console), phases=phases)
    with progress.alive():
        yield progress


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
    num_new, began = 0, clock()

    def text() -> str:
        num_left = total - done - num_new
        time_left = minutes_and_seconds((clock() - began) / num_new * num_left) if num_new else None
        return f"{done + num_new} of {total} episodes are over" + ("" if time_left is None else f", {time_left} left")

    lines = QuietProgress(_printing_to(console), wait=wait, clock=clock, doing=text)

    def count() -> None:
        nonlocal num_new
        num_new += 1
        lines.say_if_due(text(), seconds=seconds)

    with lines.alive():
        yield count


def _printing_to(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, soft_wrap=True, markup=False, highlight=False)


def print_run_report(console: Console, folder: Path, summary: Mapping[str, Any]) -> None:
    """Print the whole report of the run in `folder`."""
    before, after = summary["initial_eval"], summary["final_eval"]
    print_curve(console, summary["curve"], label=f"{summary['score'].replace('_', ' ')} on held-out seeds")
    print_before_after(console, before, after)
    first, last = (_evaluation_episodes(folder, e["step"]) for e in (before, after))
    seed = _most_improved(first, last)
    for title, episodes in (("before", first), ("after", last)):
        for trajectory in episodes:
            if trajectory.task.seed == seed:
                print_episode(console, title, trajectory)
    minutes, seconds = divmod(round(summary["wall_seconds"]), 60)
    config = read_config(folder, "training")
    for sentence in (_why_it_stopped(summary, config), _what_was_not_kept(folder)):
        if sentence is not None:
            console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"{summary['steps']} steps, {summary['episodes']:,} episodes, {summary['trained_tokens']:,} tokens trained on, "
        f"{minutes} min {seconds} s of training and evaluation",
        soft_wrap=True,
        highlight=False,
    )
    print_next_steps(console, folder)


def print_next_steps(console: Console, folder: Path) -> None:
    """Print the next steps as commands that work from the current folder."""
    console.print("\n[bold]next[/bold]")
    for command, purpose in next_steps(folder):
        line = Text(f"  {shlex.join(command)}   ").append(f"# {purpose}", style="dim")
        console.print(line, highlight=False, soft_wrap=True)
    if str(read_config(folder, "model")["model"].get("base")).startswith(TINY_PREFIX):
        console.print("\n[bold]a real model[/bold]: SmolLM2-135M-Instruct; it says what to install")
        second_step = shlex.join([*_program(), "train", "smollm2_guess"])
        console.print(f"  {second_step}", highlight=False, soft_wrap=True, markup=False)


def next_steps(folder: Path) -> list[tuple[list[str], str]]:
    """Return useful commands after the run in `folder`, as arguments, each with its purpose."""
    path = folder / "config.toml"
    config = read_config(folder, "rollout", "run")
    cli, name, rollout, seed = _program(), run_name(folder), config["rollout"], config["run"]["seed"] + 1
    steps: list[tuple[list[str], str]] = [
        ([*cli, "report", name, "--open"], "curves, and episodes token by token, in the browser"),
        ([*cli, "doctor", name], "what could be better"),
    ]
    if config.get("services", {}).get("task_url") is None:  # with one, the environment is in an app elsewhere
        options = [f"--option={key}={json.dumps(value)}" for key, value in rollout.get("env_config", {}).items()]
        play = [*cli, "env", "play", rollout["env_name"], "--mask", *options]
        steps.append((play, "play yourself, and see what is trained on"))
    if any((folder / "checkpoints").glob("step_*")):
        chat = [*cli, "models", "chat", name]
        if len(steps) > 2:  # its environment is here
            steps.insert(0, ([*chat, "--env"], "watch it play, or take over its turns"))
        else:
            steps.insert(0, (chat, "talk with it"))
        evaluate = [*cli, "evaluate", str(path), "--model", name, "--seeds", "1000:1200"]
        steps.append((evaluate, "other held-out tasks"))
    label = f"model.label={folder.name[:50]}-seed{seed}"
    steps.append(([*cli, "train", str(path), f"run.seed={seed}", label], "another run seed"))
    steps.append(([*cli, "train", "sql_analyst"], "tools over a database"))
    steps.append(([*cli, "env", "new", "MyTask"], "your own environment, which trains as it stands"))
    return steps


def _why_it_stopped(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return why the run ended before its last planned step, or None if it did not."""
    training = config["training"]
    num_planned, goal = training["num_epochs"] * training["iterations_per_epoch"], training.get("stop_at_success_rate")
    if summary["steps"] >= num_planned or goal is None:
        return None
    return (
        f"stopped after {summary['steps']} of {num_planned} steps: its evaluation reached "
        f"training.stop_at_success_rate = {goal:g}"
    )


def _what_was_not_kept(folder: Path) -> str | None:
    """Return a sentence on the attempts at training episodes that were not kept; None if all were."""
    path = folder / "ledger.jsonl"
    ends = [entry for entry in read_ledger(path) if isinstance(entry, Terminal)] if path.exists() else []
    lost = Counter(end.outcome.value for end in ends if end.disposition is not Disposition.KEPT)
    if not lost:
        return None
    outcome_counts = ", ".join(f"{count} {outcome}" for outcome, count in lost.most_common())
    return f"{lost.total()} of {len(ends)} attempts at training episodes were played again or dropped: {outcome_counts}"


def print_curve(console: Console, curve: Sequence[tuple[int, float]], *, label: str) -> None:
    """Print the score of each evaluation over the steps; scores outside [0, 1] widen the axis."""
    scores = [score for _, score in curve]
    low, high = min(0.0, *scores), max(1.0, *scores)
    console.print(f"\n[bold]{label}[/bold], one column an evaluation, steps {curve[0][0]} to {curve[-1][0]}")
    for line in text_curve(scores, low=low, high=high):
        console.print(line, highlight=False)


def print_before_after(console: Console, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Print the first and the last evaluation beside each other; both are summaries as in summary.json."""
    head = ("held-out evaluation", f"before (step {before['step']})", f"after (step {after['step']})")
    rows = [
        ("success rate", _rate(before), _rate(after)),
        ("mean return", f"{before['mean_return']:.3f}", f"{after['mean_return']:.3f}"),
        ("episodes", str(before["num_episodes"]), str(after["num_episodes"])),
    ]
    console.print(f"\n{table(head, rows, width=console.width)}\n", markup=False, highlight=False)


def print_episode(console: Console, title: str, trajectory: Trajectory, *, is_shortened: bool = False) -> None:
    """Print an episode as a conversation, with the reward of each turn; shortened: the ends of it and of its texts."""
    text = Text()
    rewards = iter(trajectory.turns)
    num_hidden = max(len(trajectory.messages) - _MAX_MESSAGES, 0) if is_shortened else 0
    for number, message in enumerate(trajectory.messages):
        if 0 <= number - _MAX_MESSAGES // 2 < num_hidden:
            if number == _MAX_MESSAGES // 2:
                text.append(f"{'':>9}  ... {num_hidden} messages ...\n", style="dim")
            if message.role == "assistant":
                next(rewards, None)
            continue
        line = visible(spoken(message))
        text.append(f"{message.role:>9}  ", style="dim")
        text.append(shortened(line, _MAX_SAID) if is_shortened else line, style=_SPEAKER_STYLES[message.role])
        if message.role == "assistant" and (turn := next(rewards, None)) is not None and turn.reward is not None:
            text.append(f"   [{turn.reward:+.2f}]", style="dim")
        text.append("\n")
    verdict = {True: "success", False: "failure", None: trajectory.outcome.value}[trajectory.success]
    text.append(f"{verdict}, return {trajectory.reward:+.2f}", style="bold")
    console.print(Panel(text, title=f"{title}: {trajectory.task.task_id}", expand=False))


def shortened(text: str, limit: int) -> str:
    """Return the text; of one that is longer than `limit` characters, its two ends.

    >>> shortened("abcdefghijkl", 4)
    'ab ... 8 characters ... kl'
    """
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... {len(text) - limit} characters ... {text[-limit // 2 :]}"


# Control characters (but for the line's end), ANSI codes among them, marks of writing direction, and invisible tags.
_CONTROL = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Return the text with control characters as their code points, for they would act on the terminal.

    >>> visible("a\\x1b[31mb")
    'a⟨001b⟩[31mb'
    >>> visible("a\\U000e0041")
    'a⟨e0041⟩'
    """
    return _CONTROL.sub(lambda match: f"⟨{ord(match[0]):04x}⟩", text)


def mask_picture(segment: Segment, decode: Callable[..., str]) -> tuple[tuple[str, bool], ...]:
    """Return a segment's text in runs of sampled and other tokens; `decode` is the tokenizer's."""
    pieces = []
    start = 0
    mask = segment.action_mask
    for stop in range(1, len(segment) + 1):  # runs, because a character may spread over several tokens
        if stop == len(segment) or mask[stop] != mask[start]:
            text = decode(segment.token_ids[start:stop].tolist(), skip_special_tokens=False)
            pieces.append((text, bool(mask[start])))
            start = stop
    return tuple(pieces)


def mask_text(segment: Segment, decode: Callable[..., str]) -> Text:
    """Return a segment's text with the sampled tokens in green."""
    return Text.assemble(
        *((visible(text), "bold green" if is_sampled else "dim") for text, is_sampled in mask_picture(segment, decode))
    )


def _program() -> list[str]:
    """Return the words that start `gspo-gym` in the current folder: its name where the shell finds this one by it."""
    script = shutil.which("gspo-gym", path=str(Path(sys.executable).parent))
    if script is None:
        return [sys.executable, "-m", "gspo_gym.cli"]
    by_name, here = shutil.which("gspo-gym"), Path.cwd()
    if by_name is not None and Path(by_name).resolve() == Path(script).resolve():
        return ["gspo-gym"]
    # A short `.venv/bin/gspo-gym` also works without the environment being activated.
    return [str(Path(script).relative_to(here) if Path(script).is_relative_to(here) else script)]


def _evaluation_episodes(folder: Path, step: int) -> list[Trajectory]:
    """Return the first episode of each task."""
    (path,) = episode_paths(folder, f"eval_{step:06d}")
    first_samples: dict[str, Trajectory] = {}
    for episode in read_episodes(path):
        first_samples.setdefault(episode.task.task_id, episode)
    return list(first_samples.values())


def _most_improved(first: Sequence[Trajectory], last: Sequence[Trajectory]) -> int:
    """Return the seed with the largest gain; among equals, the one with the longest last episode."""
    before = {trajectory.task.seed: trajectory.reward for trajectory in first}
    comparable = [trajectory for trajectory in last if trajectory.task.seed in before]
    # The longest episode among equals shows most.
    best = max(
        comparable,
        key=lambda trajectory: (trajectory.reward - before[trajectory.task.seed], len(trajectory.turns)),
    )
    return best.task.seed


def spoken(message: Message) -> str:
    """Return a message's text and its tool calls."""
    calls = [
        f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in message.tool_calls
    ]
    return " ".join([message.content, *calls]).strip() or "(nothing)"


def _rate(summary: Mapping[str, Any]) -> str:
    if summary["success_rate"] is None:
        return "-"
    low, high = summary["success_interval"]
    return f"{summary['success_rate']:.3f}  (95%: {low:.3f} to {high:.3f})"


def text_curve(
    values: Sequence[float], *, low: float = 0.0, high: float = 1.0, width: int = 60, height: int = 8
) -> list[str]:
    r"""Return the lines of a filled chart of `values`, oldest first, with an axis from `low` to `high` on the left.

    More values than columns are averaged in equal shares; values outside the axis are drawn at its edge.

    >>> print("\n".join(text_curve([0.0, 0.5, 1.0, 0.75], width=4, height=2)))
     1.00 |  █▄
     0.00 | ███
    """
    columns = _resample(values, width)
    span = high - low
    heights = [min(max((value - low) / span, 0.0), 1.0) * height for value in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(_BLOCKS[int(min(max(fill - row, 0.0), 1.0) * (len(_BLOCKS) - 1))] for fill in heights)
        label = high if row == height - 1 else low if row == 0 else None
        lines.append((f"{label:5.2f}" if label is not None else " " * 5) + " |" + cells)
    return lines


def _resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [i * len(values) // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]

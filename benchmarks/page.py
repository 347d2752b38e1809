"""How soon the page of a run is there: `python -m benchmarks page`.

The page of 128 episodes of the quickstart is opened from the disk, and the live view of a long run (80 steps of 125
episodes of 1,000 tokens, 10,000 in all) over its server, in headless Chromium, each time with nothing cached. A visit
lasts until the page is drawn and can be used.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.tokens import quickstart
from gspo_gym.cli.report import page_of
from gspo_gym.cli.train import run_training
from gspo_gym.errors import MissingExtraError
from gspo_gym.rollout.episode_files import write_episodes
from gspo_gym.run.tokens import pack_columns, token_path
from gspo_gym.seeding import generator
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn

MAX_BYTES = 1_000_000
MAX_SAVED_SECONDS = 2.0
MAX_LIVE_SECONDS = 1.0
_NUM_STEPS, _NUM_GROUPS, _GROUP_SIZE = 80, 25, 5
_NUM_TURNS, _OBSERVATION, _ACTION = 10, 40, 60  # 1,000 tokens
_BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
# It asks its maker's hosts for nothing, which would be requests of the page's.
_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Run headless Chromium; give playwright's `Browser` (Any: playwright need not be installed).

    Raises:
        MissingExtraError: playwright or a browser is missing.
    """
    path = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        raise MissingExtraError(f"none of {', '.join(_BROWSERS)} is here: apt-get install chromium-headless-shell")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        told = "playwright is not installed: pip install playwright, or use .venv-more/bin/python of `make browser`"
        raise MissingExtraError(told) from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(_OPTIONS))
        yield browser
        browser.close()


def run_page(*, repeats: int) -> int:
    """Measure and print; return 1 if a goal is missed.

    Raises:
        MissingExtraError: there is no Chromium to look with.
    """
    table = Table("page")
    for heading in ("measured", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    met = []
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as name, chromium() as browser:
        folder = Path(name)
        config = quickstart(folder, "rollout.episodes_per_batch=128", "training.batch_size=32", num_steps=2)
        run_training(config)
        page = page_of(config.run_folder).html
        path = folder / "report.html"
        path.write_text(page, encoding="utf-8")
        size = path.stat().st_size
        met.append(size <= MAX_BYTES)
        table.add_row("128 episodes of the quickstart, size", f"{size / 1000:.0f} kB", f"{MAX_BYTES / 1e6:g} MB")
        for view in ("run", "episodes"):
            seconds = seconds_until_shown(browser, f"{path.as_uri()}#view={view}", repeats=repeats)
            met.append(_add(table, f"the same, {view}", seconds, MAX_SAVED_SECONDS))
        write_long_run(folder / "long")
        with serving(folder / "long") as url:
            for view in ("run", "curves", "episodes"):
                seconds = seconds_until_shown(browser, f"{url}#view={view}", repeats=repeats)
                met.append(_add(table, f"live, 10,000 episodes of 1,000 tokens, {view}", seconds, MAX_LIVE_SECONDS))
    Console(width=120).print(table, f"headless Chromium; first visit, and the median of {repeats} with none cached")
    return int(not all(met))


def _add(table: Table, name: str, seconds: list[float], goal: float) -> bool:
    table.add_row(name, f"{seconds[0]:.2f} s, {statistics.median(seconds):.2f} s", f"{goal:g} s")
    return max(seconds[0], statistics.median(seconds)) <= goal


def seconds_until_shown(browser: Any, url: str, *, repeats: int) -> list[float]:
    """Return the seconds from the start of the navigation until the page is drawn, of each visit."""
    seconds = []
    for _ in range(repeats):
        context = browser.new_context(viewport={"width": 1400, "height": 1000})
        page = context.new_page()
        started = time.perf_counter()
        page.goto(url)
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        seconds.append(time.perf_counter() - started)
        context.close()
    return seconds


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run `gspo-gym view`; give its URL."""
    command = [sys.executable, "-m", "gspo_gym.cli", "view", str(folder), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def write_long_run(folder: Path, *, num_steps: int = _NUM_STEPS) -> None:
    """Write a run of so many steps that nobody trained, in the formats of a real one."""
    folder.mkdir()
    (folder / "config.toml").write_text("# run 0123456789abcdef\n[model]\nlabel = 'long'\n", encoding="utf-8")
    started = {"schema": 1, "seq": 1, "time": 0.0, "step": 0, "kind": "started", "data": {"run": "0123456789abcdef"}}
    (folder / "events.jsonl").write_text(json.dumps(started) + "\n", encoding="utf-8")
    numbers = {f"group/metric_{number}": number / 7 for number in range(40)}  # as many as a run has
    (folder / "episodes").mkdir()
    (folder / "tokens").mkdir()
    lines = []
    for step in range(1, num_steps + 1):
        episodes = [_episode(step, group, member) for group in range(_NUM_GROUPS) for member in range(_GROUP_SIZE)]
        write_episodes(folder / "episodes" / f"step_{step:06d}.jsonl.gz", episodes)
        _write_tokens(folder, step, episodes)
        lines.append({"schema": 1, "step": step, "time": float(step), "loss/total": 0.0} | numbers)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _episode(step: int, group: int, member: int) -> Trajectory:
    drawn = generator(step, "episode", group, member)
    size = _NUM_TURNS * (_OBSERVATION + _ACTION)
    turns = []
    for number in range(_NUM_TURNS):
        start = number * (_OBSERVATION + _ACTION)
        stop = start + _OBSERVATION
        turns.append(Turn(number, 0, (start, stop), (stop, stop + _ACTION), FinishReason.STOP, reward=0.1 * member))
    position = np.arange(size) % (_OBSERVATION + _ACTION)
    mask = position >= _OBSERVATION
    segment = Segment(
        token_ids=drawn.integers(0, 256, size),
        action_mask=mask,
        rollout_logprobs=np.where(mask, -drawn.exponential(size=size), 0.0).astype(np.float32),
        turn_index=np.where(mask, np.arange(size) // (_OBSERVATION + _ACTION), -1),
        weight_version=np.where(mask, step - 1, -1),
    )
    said = "".join(chr(97 + number % 26) for number in range(_ACTION))
    return Trajectory(
        trajectory_id=f"step_{step:06d}/group_{group:04d}/{member}",
        attempt=0,
        task=Task("benchmark/Long-v0", 1000 * step + group, {}),
        sampling_seed=member,
        segments=(segment,),
        turns=tuple(turns),
        messages=(Message("user", "?" * _OBSERVATION), Message("assistant", said)) * _NUM_TURNS,
        outcome=Outcome.TERMINATED,
        success=member % 2 == 0,
    )


def _write_tokens(folder: Path, step: int, episodes: list[Trajectory]) -> None:
    """Write the columns that `run/tokens.py` explains, of one pass over the batch."""
    size = _NUM_TURNS * _ACTION
    count = size * len(episodes)
    drawn = generator(step, "tokens")
    columns = {
        "advantage": drawn.normal(size=count),
        "rollout_logprob": -drawn.exponential(size=count),
        "old_logprob": -drawn.exponential(size=count),
        "weight_version": np.full(count, step - 1, np.int32),
        "fate": np.zeros(count, np.uint8),
        "logprob": -drawn.exponential(size=(1, count)),
        "ratio": 1 + 0.01 * drawn.normal(size=(1, count)),
        "clip": drawn.integers(0, 3, (1, count)).astype(np.uint8),
        "entropy": drawn.exponential(size=(1, count)),
        "share": drawn.normal(size=(1, count)) / count,
        "optimizer_step": np.zeros((1, len(episodes)), np.int32),
    }
    arrays = {name: each.astype(np.float32) if each.dtype == np.float64 else each for name, each in columns.items()}
    sizes = {episode.trajectory_id: size for episode in episodes}
    token_path(folder, step).write_bytes(pack_columns(step, sizes, arrays, {}))

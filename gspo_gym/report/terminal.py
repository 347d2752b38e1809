"""What a run prints at its end: the learning curve, before and after, two episodes, what to do next.

Everything comes from records; nothing is measured here. Called by `train.py`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gspo_gym.recording_episodes import read_episodes
from gspo_gym.report.curve import text_curve
from gspo_gym.types import Message, Trajectory

_SPEAKER_STYLES = {"system": "dim", "user": "cyan", "assistant": "bold green", "tool": "yellow"}


def print_run_report(console: Console, folder: Path, summary: Mapping[str, Any]) -> None:
    """All of it, for a run whose episodes lie in `folder`."""
    before, after = summary["initial_eval"], summary["final_eval"]
    print_curve(console, summary["curve"], label=f"{summary['score'].replace('_', ' ')} on held-out seeds")
    print_before_after(console, before, after)
    first, last = (read_episodes(_evaluation_file(folder, e["step"])) for e in (before, after))
    seed = _most_improved(first, last)
    for title, episodes in (("before", first), ("after", last)):
        for trajectory in episodes:
            if trajectory.task.seed == seed:
                print_episode(console, title, trajectory)
    minutes, seconds = divmod(round(summary["wall_seconds"]), 60)
    console.print(
        f"{summary['steps']} steps, {summary['episodes']:,} episodes, {summary['trained_tokens']:,} tokens trained on, "
        f"{minutes} min {seconds} s of training and evaluation",
        soft_wrap=True,
        highlight=False,
    )
    print_next_steps(console, folder)


def print_next_steps(console: Console, folder: Path) -> None:
    """What one would do now, as commands."""
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    config = folder / "config.toml"
    environment = tomllib.loads(config.read_text(encoding="utf-8"))["rollout"]["env_name"]
    python = _relative(Path(sys.executable))
    console.print("\n[bold]next[/bold]")
    for command, purpose in (
        (f"{python} -m gspo_gym.cli env play {environment} --mask", "play yourself, and see what is trained on"),
        (f"{python} -m gspo_gym.evaluate {config} --model {checkpoints[-1]} --seeds 1000:1200", "other held-out tasks"),
        (f"{python} -m gspo_gym.train {config} run.seed=1 model.label={folder.name}-seed1", "another run seed"),
        (f"{python} -m gspo_gym.train configs/sql_analyst.toml", "tools over a database"),
        ("examples/write_environment.py", "your own environment, in a page"),
    ):
        console.print(f"  {command}   [dim]# {purpose}[/dim]", highlight=False, soft_wrap=True)


def print_curve(console: Console, curve: Sequence[tuple[int, float]], *, label: str) -> None:
    """The score of each evaluation over the steps; scores outside [0, 1] widen the axis."""
    scores = [score for _, score in curve]
    low, high = min(0.0, *scores), max(1.0, *scores)
    console.print(f"\n[bold]{label}[/bold], one column an evaluation, steps {curve[0][0]} to {curve[-1][0]}")
    for line in text_curve(scores, low=low, high=high):
        console.print(line, highlight=False)


def print_before_after(console: Console, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """The first and the last evaluation beside each other; both are summaries as in summary.json."""
    table = Table(title="held-out evaluation")
    for name in ("", f"before (step {before['step']})", f"after (step {after['step']})"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("success rate", _rate(before), _rate(after))
    table.add_row("mean return", f"{before['mean_return']:.3f}", f"{after['mean_return']:.3f}")
    table.add_row("episodes", str(before["num_episodes"]), str(after["num_episodes"]))
    console.print(table)


def print_episode(console: Console, title: str, trajectory: Trajectory) -> None:
    """One episode as a conversation, with the reward of each turn."""
    text = Text()
    rewards = iter(trajectory.turns)
    for message in trajectory.messages:
        text.append(f"{message.role:>9}  ", style="dim")
        text.append(_spoken(message), style=_SPEAKER_STYLES[message.role])
        if message.role == "assistant" and (turn := next(rewards, None)) is not None and turn.reward is not None:
            text.append(f"   [{turn.reward:+.2f}]", style="dim")
        text.append("\n")
    verdict = {True: "success", False: "failure", None: trajectory.outcome.value}[trajectory.success]
    text.append(f"{verdict}, return {trajectory.reward:+.2f}", style="bold")
    console.print(Panel(text, title=f"{title}: {trajectory.task.task_id}", expand=False))


def _relative(path: Path) -> Path:
    """The path from here, if it lies below: `.venv/bin/python` for who has not activated the environment."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _evaluation_file(folder: Path, step: int) -> Path:
    return folder / "episodes" / f"eval_{step:06d}.jsonl"


def _most_improved(first: Sequence[Trajectory], last: Sequence[Trajectory]) -> int:
    """The seed whose return rose most, the longest last episode among equals: it shows the most."""
    before = {trajectory.task.seed: trajectory.reward for trajectory in first}
    both = [trajectory for trajectory in last if trajectory.task.seed in before]
    best = max(both, key=lambda trajectory: (trajectory.reward - before[trajectory.task.seed], len(trajectory.turns)))
    return best.task.seed


def _spoken(message: Message) -> str:
    calls = [
        f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in message.tool_calls
    ]
    return " ".join([message.content, *calls]).strip() or "(nothing)"


def _rate(summary: Mapping[str, Any]) -> str:
    if summary["success_rate"] is None:
        return "-"
    low, high = summary["success_interval"]
    return f"{summary['success_rate']:.3f}  (95%: {low:.3f} to {high:.3f})"

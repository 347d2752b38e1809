"""`gspo-gym episodes RUN`: episodes of a run in the terminal, with the sampled tokens in colour."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gspo_gym.cli.notebook import Run
from gspo_gym.run.registry import find_run
from gspo_gym.run.report.page_data import run_tokenizer
from gspo_gym.run.report.progress import mask_text, print_episode
from gspo_gym.types import Trajectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `episodes`."""
    parser.add_argument("run_name", metavar="RUN", help="its folder, its name in runs/, or the start of its id")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where runs are looked for (runs)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="of this training step (default: the last that has any)")
    which.add_argument("--evaluation", type=int, metavar="N", help="of the evaluation after this step")
    parser.add_argument("--task", metavar="TEXT", help="only tasks whose id holds this: a seed, or an environment")
    parser.add_argument("--failed", action="store_true", help="only those without success, or with an error")
    parser.add_argument("--best", action="store_true", help="the highest returns first")
    parser.add_argument("--limit", type=int, default=4, help="at most this many; 0: all (default 4)")
    parser.add_argument("--messages", action="store_true", help="as a conversation, without the template's tokens")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Print the episodes that are asked for; return 1 if there are none."""
    folder = find_run(arguments.run_name, arguments.folder)
    found = Run(folder).episodes(
        step=arguments.step, evaluation=arguments.evaluation, failed=True if arguments.failed else None
    )
    chosen = [each for each in found if arguments.task is None or arguments.task in each.task.task_id]
    if arguments.best:
        chosen.sort(key=lambda each: each.reward if each.is_scored else float("-inf"), reverse=True)
    console = Console()
    tokenizer = None if arguments.messages else run_tokenizer(folder)
    for trajectory in chosen[: arguments.limit or None]:
        if tokenizer is None:
            print_episode(console, trajectory.trajectory_id, trajectory)
        else:
            _print_tokens(console, trajectory, tokenizer.decode)
    console.print(f"{min(len(chosen), arguments.limit or len(chosen))} of {len(chosen)} episodes", style="dim")
    return 0 if chosen else 1


def _print_tokens(console: Console, trajectory: Trajectory, decode: Callable[..., str]) -> None:
    console.print(Text(f"{trajectory.trajectory_id}  {trajectory.task.task_id}", style="bold"))
    for number, segment in enumerate(trajectory.segments):
        if number:
            console.print(Text(f"segment {number}", style="dim"))
        console.print(mask_text(segment, decode), soft_wrap=True)
    console.print(Text("  ".join(_rewards(trajectory)), style="dim"))
    if trajectory.error is not None:
        console.print(Text(trajectory.error, style="red"))
    verdict = {True: "success", False: "no success", None: trajectory.outcome.value}[trajectory.success]
    told = f"{verdict}, return {trajectory.reward:+.2f}" if trajectory.is_scored else f"{verdict}, not scored"
    console.print(Text(f"{told}\n", style="bold"))


def _rewards(trajectory: Trajectory) -> Iterator[str]:
    for turn in trajectory.turns:
        terms = "".join(f" {name} {value:+.2f}" for name, value in turn.reward_terms.items())
        if turn.reward is not None:
            yield f"turn {turn.index}: {turn.reward:+.2f}{terms and f' ({terms.strip()})'}"

"""`gspo-gym runs list | show | compare | rm | path`: the runs in a folder; `gspo-gym run status | checkpoint | stop`:
one in progress.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo_gym.base.tables import folded, pairs, table
from gspo_gym.cli.command_line import add_run
from gspo_gym.errors import UsageError
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.run.folders import find_run
from gspo_gym.run.registry import (
    RunComparison,
    RunInfo,
    compare_runs,
    list_runs,
    read_run,
    remove_run,
    require_removable,
)
from gspo_gym.run.steering import request

_MAX_HEAD = 50  # characters of the names of runs side by side
_NONE = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `runs`."""
    commands = parser.add_subparsers(dest="runs_command", required=True, metavar="COMMAND")
    list_parser = _add(commands, "list", list_command, "list the runs in a folder, the last updated first")
    list_parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="where to look (runs)")
    show_parser = _add(commands, "show", show_command, "say what a run is, how far it came, and whether it lives")
    add_run(show_parser)
    compare_parser = _add(
        commands, "compare", compare_command, "put runs side by side: settings, evaluations, seconds, tokens"
    )
    add_run(compare_parser, nargs="+")
    rm_parser = _add(
        commands, "rm", remove_command, "remove runs with their checkpoints; one that is running is refused"
    )
    add_run(rm_parser, nargs="+")
    rm_parser.add_argument("--yes", action="store_true", help="do not ask")
    add_run(_add(commands, "path", path_command, "print the folder of a run"))


def list_command(arguments: argparse.Namespace) -> int:
    """Print one line per run."""
    runs = list_runs(arguments.folder)
    if arguments.json:
        print(json.dumps([run.to_dict() for run in runs]))
    else:
        print(runs_table(runs, arguments.folder))
    return 0


def show_command(arguments: argparse.Namespace) -> int:
    """Print a run's facts, checkpoints and size."""
    run = read_run(_folder_of(arguments.run_name, arguments))
    values = run.to_dict() | {
        "checkpoints": checkpoint_names(run.folder),
        "bytes": sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file()),
    }
    if arguments.json:
        print(json.dumps(values))
        return 0
    values |= {"updated": _ago(run.updated), "checkpoints": ", ".join(values["checkpoints"])}
    values["bytes"] = f"{values['bytes'] / 1e6:.1f} MB"
    print(pairs([(key, str(value)) for key, value in values.items() if value not in (None, "")]))
    return 0


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of a run's checkpoints, the oldest first."""
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


def compare_command(arguments: argparse.Namespace) -> int:
    """Print runs side by side."""
    if len(arguments.run_name) < 2:
        raise UsageError("runs compare: expected two runs or more")
    comparison = compare_runs([_folder_of(name, arguments) for name in arguments.run_name])
    print(json.dumps(comparison.to_dict()) if arguments.json else _side_by_side(comparison, arguments.run_name))
    return 0


def remove_command(arguments: argparse.Namespace) -> int:
    """Remove runs after confirmation; return 1 if it was refused."""
    # A run that is named twice is one.
    folders = list(
        {path.resolve(): path for path in (_folder_of(name, arguments) for name in arguments.run_name)}.values()
    )
    for folder in folders:
        # All are checked before the first is removed.
        require_removable(folder, also=folders)
    if not arguments.yes:
        # A script cannot answer, and the question would be printed amid the JSON.
        if arguments.json or not sys.stdin.isatty():
            raise UsageError("runs rm: there is nothing to ask for confirmation here; add --yes")
        for folder in folders:
            run = read_run(folder)
            print(f"{folder}: {run.status}, {run.step} steps, updated {_ago(run.updated)}")
        if input("remove with all checkpoints? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    for folder in folders:
        remove_run(folder, also=folders)
    if arguments.json:
        print(json.dumps({"removed": [str(folder) for folder in folders]}))
    return 0


def path_command(arguments: argparse.Namespace) -> int:
    """Print a run's folder."""
    path = _folder_of(arguments.run_name, arguments).resolve()
    print(json.dumps({"path": str(path)}) if arguments.json else path)
    return 0


def runs_table(runs: Sequence[RunInfo], folder: Path) -> str:
    """Return a table of runs as text."""
    head = ("run", "status", "phase", "step", "score", "seconds", "tokens", "updated", "id")
    rows = [
        (
            str(run.folder.relative_to(folder)) if run.folder != folder else str(folder),
            run.status,
            run.doing or _NONE,
            str(run.step),
            _NONE if run.value is None else f"{run.value:.3f} {run.score}",
            _NONE if run.wall_seconds is None else f"{run.wall_seconds:.0f}",
            _NONE if run.sampled_tokens is None else f"{run.sampled_tokens:,}",
            _ago(run.updated),
            (run.run or _NONE)[:8],
        )
        for run in runs
    ]
    return table(head, rows, optional=("tokens", "seconds", "id"))


def _side_by_side(comparison: RunComparison, names: Sequence[str]) -> str:
    runs = comparison.runs
    rows: list[tuple[str, ...]] = [("status", *(run.status for run in runs))]
    keys = ("step", "score", "value", "wall_seconds", "sampled_tokens", "trained_tokens")
    rows += [(key, *(_text(getattr(run, key)) for run in runs)) for key in keys]
    rows += [(key, *map(_text, values)) for key, values in comparison.settings.items()]
    # Long names would leave no room for what is compared.
    is_short = sum(map(len, names)) <= _MAX_HEAD
    heads = names if is_short else [f"({number})" for number in range(1, len(names) + 1)]
    lines = [] if is_short else [part for pair in zip(heads, names, strict=True) for part in folded(" ".join(pair))]
    lines.append(table(("", *heads), rows))
    for name, result in zip(heads[1:], comparison.evaluations, strict=True):
        lines += folded(f"{name} against {heads[0]}: {result if isinstance(result, str) else _difference_text(result)}")
    return "\n".join(lines)


def _difference_text(values: dict[str, Any]) -> str:
    interval = values["difference_interval"]
    within = "" if interval is None else f" (95% {interval[0]:+.3f} to {interval[1]:+.3f})"
    text = f"mean return {values['mean_difference']:+.3f}{within} over {values['num_pairs']} pairs of episodes"
    if values["success_p_value"] is not None:
        text += (
            f"; {values['num_only_second']} succeeded only here and {values['num_only_first']} only there, "
            f"p = {values['success_p_value']:.3g}"
        )
    return text


def _text(value: Any) -> str:
    if value is None:
        return _NONE
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ago(moment: float) -> str:
    """Return the time since a moment as text such as "5 min ago"."""
    seconds = max(0.0, time.time() - moment)
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def _folder_of(name: str, arguments: argparse.Namespace) -> Path:
    return find_run(name, arguments.folder)


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `run`."""
    commands = parser.add_subparsers(dest="control_command", required=True, metavar="COMMAND")
    status = _add(commands, "status", status_command, "say what a run does now")
    add_run(status)
    status.add_argument("--content", action="store_true", help="also the text of the newest recorded episode")
    text = "save a checkpoint after the present step, and wait for it"
    add_run(_add(commands, "checkpoint", checkpoint_command, text))
    add_run(_add(commands, "stop", stop_command, "let a run save a checkpoint and end"))
    for name in _RETIRED:
        retired_parser = commands.add_parser(name)  # without help, it is not listed
        retired_parser.add_argument("words", nargs=argparse.REMAINDER)
        retired_parser.add_argument("--json", action="store_true")
        retired_parser.set_defaults(run=retired_command)


def status_command(arguments: argparse.Namespace) -> int:
    """Print a run's facts and, on request only, text of its episodes."""
    values = status_of(_folder_of(arguments.run_name, arguments), with_content=arguments.content)
    _print(values, arguments, pairs([(key, str(value)) for key, value in values.items() if value is not None]))
    return 0


def status_of(folder: Path, *, with_content: bool = False) -> dict[str, Any]:
    """Return a run's facts from its folder, as JSON values.

    Text of episodes and errors, which a model or an environment wrote and which could be meant to steer an agent that
    reads it, is there only `with_content`.

    Raises:
        RecordError: with content: an episode of the run cannot be read.
    """
    values = read_run(folder).to_dict()
    if not with_content:
        return {key: value for key, value in values.items() if key != "error"}
    paths = sorted(episode_paths(folder), key=lambda path: path.stat().st_mtime)
    episodes = read_episodes(paths[-1]) if paths else []
    episode = None
    if episodes:
        messages = [message.to_dict() for message in episodes[-1].messages]
        episode = {"trajectory_id": episodes[-1].trajectory_id, "messages": messages}
    return values | {"episode": episode}


def checkpoint_command(arguments: argparse.Namespace) -> int:
    """Have a run save a checkpoint, and print where it is."""
    folder = _folder_of(arguments.run_name, arguments)
    before = checkpoint_names(folder)
    request(folder, "checkpoint")
    newest = max(checkpoint_names(folder))
    reply = {"changed": newest not in before, "checkpoint": newest}
    _print(reply, arguments, str(folder / "checkpoints" / newest))
    return 0


def stop_command(arguments: argparse.Namespace) -> int:
    """Have a run stop; return when it has begun to."""
    folder = _folder_of(arguments.run_name, arguments)
    request(folder, "stop")
    _print({"folder": str(folder)}, arguments, f"{folder}: it saves a checkpoint and ends")
    return 0


_GO_ON = "stop it (`gspo-gym run stop RUN`) and go on with `gspo-gym train CONFIG.toml --resume"
_RETIRED = {
    "pause": f"a run does not wait: {_GO_ON}`",
    "resume": f"a run does not wait: {_GO_ON}`",
    "set": f"a run that goes on keeps its settings: {_GO_ON} section.key=value`",
}


def retired_command(arguments: argparse.Namespace) -> int:
    """Refuse a command that went, and say what to do instead."""
    raise UsageError(f"run {arguments.control_command}: {_RETIRED[arguments.control_command]}")


def _print(reply: dict[str, Any], arguments: argparse.Namespace, sentence: str) -> None:
    print(json.dumps(reply) if arguments.json else sentence)

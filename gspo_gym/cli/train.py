"""`gspo-gym train CONFIG.toml [section.key=value ...]`: train a model as a config file says, here or in the background.

From Python, call `run_training`. A training step is in `run/trainer.py`; what it uses is built in
`config/build/trainer.py`. Heavy imports wait until a command runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gspo_gym.base.files import make_folder, writing
from gspo_gym.cli.command_line import Parser, importing, parse_and_run
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.sections import with_task_url
from gspo_gym.errors import ConfigError, UsageError
from gspo_gym.run.process import read_process
from gspo_gym.run.records import EVENTS_FILE, read_run_id
from gspo_gym.run.report.progress import print_run_report

if TYPE_CHECKING:
    from rich.console import Console

    from gspo_gym.run.callbacks import Callback
    from gspo_gym.run.sinks import Sink

_LOOK_SECONDS = 0.1
_SHOWN_LINES = 20


def add_task_url(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a task app."""
    parser.add_argument(
        "--task-url",
        metavar="URL",
        help="task app that plays the episodes, over TASK_APP_URL of the environment and services.task_url of the file",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    parser.add_argument(
        "config", help="a TOML, YAML or JSON file, or the name of one that the package holds (quickstart)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")
    add_task_url(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint of the run's folder; --resume auto begins the run where there is none",
    )
    # An option of one word, because one with an optional value would swallow the override that follows --resume.
    parser.add_argument("--resume=auto", dest="resume", action="store_const", const="auto", help=argparse.SUPPRESS)
    parser.add_argument(
        "--set-aside", action="store_true", help="move an earlier run of the same label to LABEL.1, LABEL.2, ... first"
    )
    parser.add_argument(
        "--detach", action="store_true", help="train in the background; return when the run has its folder"
    )
    parser.add_argument("--json", action="store_true", help="with --detach: print one JSON line")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the `train` command; return 0 when the plan is done."""
    from rich.console import Console

    config = load_config(arguments.config, with_task_url(arguments.overrides, arguments.task_url, os.environ))
    if arguments.detach:
        return _detach(arguments, config)
    if arguments.json:
        raise UsageError("train: --json is for --detach; a run's numbers are in its metrics.jsonl")
    console = Console()
    with importing():
        from gspo_gym.config.build import run  # noqa: F401  # what `run_training` needs
    summary = run_training(config, resume=arguments.resume, set_aside=arguments.set_aside, console=console)

    print_run_report(console, config.run_folder, summary)
    return 0


def run_training(
    config: RunConfig,
    *,
    resume: bool | Literal["auto"] = False,
    set_aside: bool = False,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink] = (),
) -> dict[str, Any]:
    """Train and return the contents of summary.json.

    Args:
        config: the run's settings.
        resume: go on from the newest checkpoint in `config.run_folder`. If there is none, True raises an error and
            "auto"
            starts from the beginning, after it has moved away what an earlier start left.
        set_aside: move an earlier run of the same label away; if False, its presence is an error.
        console: where progress is printed; None: nowhere.
        callbacks: called with the numbers of each step and evaluation; one can stop the run, after which it is saved
            and returns. An error of one ends the run likewise, and is raised.
        sinks: receive the run's numbers, tables and page beside those that [tracking] names, and are closed at the end.

    Raises:
        ConfigError: this machine, model or environment cannot do what the config asks for, or the folder is taken.
        RolloutError, StuckError, NonFiniteError, EngineError: the run cannot go on; its folder holds all up to then.
    """
    from gspo_gym.cli.report import page_of  # these import torch
    from gspo_gym.config.build.run import Orders, execute
    from gspo_gym.run.callbacks import CallbackSink

    def page(folder: Path, status: str) -> str:
        return page_of(folder, status=status).html

    callback_sink = CallbackSink(callbacks) if callbacks else None
    return execute(config, Orders(resume, set_aside, console, page, callback_sink, tuple(sinks)))


def _detach(arguments: argparse.Namespace, config: RunConfig) -> int:
    words = [arguments.config, *arguments.overrides]
    words += {False: [], True: ["--resume"], "auto": ["--resume=auto"]}[arguments.resume]
    words += ["--set-aside"] * arguments.set_aside
    words += [] if arguments.task_url is None else ["--task-url", arguments.task_url]
    process_info = start_detached(words, config)
    if arguments.json:
        print(json.dumps(process_info))
    else:
        print(f"{process_info['folder']}: process {process_info['pid']} trains, and prints to {process_info['log']}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m gspo_gym.train`."""
    parser = Parser(prog="python -m gspo_gym.train", description="Train a model as a config file says.")
    add_arguments(parser)
    return parse_and_run(parser, argv)


def start_detached(arguments: Sequence[str], config: RunConfig) -> dict[str, Any]:
    """Run `gspo-gym train` with the arguments in a new session; return once the run records events.

    Its output goes to a file in the run's folder. Ctrl-C during the wait ends it.

    Returns:
        JSON values: the run's id, folder, pid and log, and its exit status if it has ended already.

    Raises:
        ConfigError: it failed before it recorded anything; the message holds the last lines of its output.
    """
    folder = config.run_folder
    make_folder(folder.parent)
    before = _state_of_events(folder)
    # Beside the run's folder: the training refuses a folder that is not empty.
    draft = folder.with_name(f".{folder.name}.{time.time_ns()}.log")
    with writing(draft), draft.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gspo_gym.cli", "train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the end of this terminal does not end it
        )
    try:
        while process.poll() is None and not _has_begun(folder, process.pid, before):
            time.sleep(_LOOK_SECONDS)
    except BaseException:
        process.terminate()
        process.wait()
        draft.unlink()
        raise
    if process.returncode:
        lines = draft.read_text(encoding="utf-8", errors="replace").splitlines()
        draft.unlink()
        raise ConfigError(
            f"the training ended before it began (exit status {process.returncode}):\n"
            + "\n".join(lines[-_SHOWN_LINES:])
        )
    exit_status, process.returncode = process.returncode, 0  # else Popen warns that it is left running, as it should be
    info = read_process(folder)
    # One file for each attempt: a resumed run keeps the output of its earlier processes.
    log = folder / f"output_{1 if info is None else info.attempt}.log"
    draft.rename(log)
    return {
        "event": "launched",
        "run": read_run_id(folder),
        "folder": str(folder.resolve()),
        "pid": process.pid,
        "log": str(log.resolve()),
        "exit_status": exit_status,
    }


def _has_begun(folder: Path, pid: int, before: tuple[int, int] | None) -> bool:
    """Return whether the process has recorded an event of the run, which it does after all that it may refuse."""
    holder = read_process(folder)
    return holder is not None and holder.pid == pid and _state_of_events(folder) not in (None, before)


def _state_of_events(folder: Path) -> tuple[int, int] | None:
    """Return the identity and size of the file of a run's events; None: there is none."""
    try:
        status = (folder / EVENTS_FILE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_size

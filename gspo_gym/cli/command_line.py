"""Shared by all commands: arguments that name an environment, error messages and exit statuses."""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from gspo_gym.errors import GymError, UsageError, nearest_name

RUNS = Path("runs")  # where runs are looked for
# A full, read-only or broken disk: errors that may come without a file name.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)

RUNS_OWN = ""  # what `models chat --env` without a name means: the environment of the model's run
SCRIPTED, ENDPOINT = "scripted:", "openai:"  # begin the names of players that are no model here
_LISTS = ("overrides", "files")  # arguments of which a command takes any number, before and after options


class Parser(argparse.ArgumentParser):
    """Argument parser that accepts options by their whole name only, as do its subparsers.

    argparse alone takes `--set` for `--set-aside`, which moves a run away.
    """

    def __init__(
        self, *, prog: str | None = None, description: str | None = None, **more: Any
    ) -> None:  # Any: argparse
        super().__init__(prog=prog, description=description, **{**more, "allow_abbrev": False})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices, with the nearest one in place of all."""
        if isinstance(action, argparse._SubParsersAction) and value not in (names := list(action.choices)):
            near = nearest_name(str(value), names)
            raise argparse.ArgumentError(action, f"there is no command {value!r}; {near}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """As argparse; where a command is missing, say which there are."""
        commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        if commands and message.endswith(f"required: {commands[0].metavar}"):
            message = f"expected a command: {', '.join(commands[0].choices)}"
        super().error(message)


def parse_and_run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse, call the chosen command's `run` and return its exit status; print our own errors without a traceback.

    The status is 0 for success, 1 for a failed check, 2 for a mistake of the caller, and after a signal 128 and its
    number: 130 after Ctrl-C, and 141 where the reader of the output has ended.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    for i in range(len(words) - 1, 0, -1):
        if words[i - 1 : i + 1] == ["--resume", "auto"]:
            words[i - 1 : i + 1] = ["--resume=auto"]  # see `train.add_arguments`
    arguments, unparsed_words = parser.parse_known_args(words)
    if unparsed_words:  # words after an option: argparse takes a list of them at once, and that was before it
        list_option = next((name for name in _LISTS if hasattr(arguments, name)), None)
        if list_option is None or any(text.startswith("-") for text in unparsed_words):
            parser.error(f"unrecognized arguments: {' '.join(unparsed_words)}")
        setattr(arguments, list_option, [*getattr(arguments, list_option), *unparsed_words])
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if _is_read():
            raise
        return 128 + signal.SIGPIPE
    except GymError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None and error.errno not in _OF_THE_DISK:
            raise
        # Another library could not write: print that as our own StorageError is printed.
        print(f"StorageError: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print("stopped", file=sys.stderr)
        return exit_code_of(error)
    return status


def _is_read() -> bool:
    """Return whether the standard output still has a reader; without one (`| head`), nothing more is written there."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails again as it ends
    return False


@contextmanager
def importing() -> Iterator[None]:
    """Import torch in the block, and what needs it, without looking for garbage meanwhile, or among it later.

    Looking, again and again, is a fifth of the time that these imports take. Does nothing where torch is there already:
    in a notebook, garbage of an earlier cell must not be kept.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _SignalError(KeyboardInterrupt):
    """A KeyboardInterrupt that another signal than SIGINT caused, whose number it holds."""


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit status after an interruption: 128 and the number of the signal."""
    return 128 + int(interrupt.args[0] if isinstance(interrupt, _SignalError) else signal.SIGINT)


@contextmanager
def interrupted_by_signals(grace_seconds: float | None = None) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at SIGTERM and SIGHUP, too, and end the program in its grace (None: 30 s).

    For SIGTERM, `exit_code_of` the KeyboardInterrupt returns 143, for SIGHUP 129. An event loop is interrupted between
    two of its callbacks, not inside of one: what one writes is whole. A second signal ends the program at once.
    """
    from asyncio import get_running_loop

    from gspo_gym.base.deadline import GRACE_SECONDS, Deadline

    deadline = Deadline(GRACE_SECONDS if grace_seconds is None else grace_seconds, outcome="what was finished is kept")

    def interrupt(number: int) -> None:
        interruption = KeyboardInterrupt() if number == signal.SIGINT else _SignalError(number)
        deadline.begin(signal.Signals(number).name, exit_code_of(interruption))
        try:
            get_running_loop().call_soon_threadsafe(_raise, interruption)
        except RuntimeError:  # none runs
            raise interruption from None

    with deadline.handling_signals(interrupt):
        yield


def _raise(error: BaseException) -> None:
    raise error


def package_version(name: str = "gspo-gym") -> str:
    """Return the version of an installed package, or "unknown" without an installation."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return str(metadata.version(name))
    except metadata.PackageNotFoundError:
        return "unknown"


def add_run(parser: argparse.ArgumentParser, **more: Any) -> None:
    """Add the arguments that name a run, for `find_run`: `run_name` and `folder`."""
    text = "a run's folder, its name in --folder, or the start of its id"
    parser.add_argument("run_name", metavar="RUN", help=text, **more)
    parser.add_argument("--folder", type=Path, default=RUNS, help="where runs are (runs)")


def run_or_path(path: Path) -> Path:
    """Return a path that is there, or else the folder of the run of this name.

    Raises:
        ConfigError: there is neither.
    """
    from gspo_gym.run.folders import find_run

    return path if path.exists() else find_run(str(path), RUNS)


def base_of(name: str, runs: Path = RUNS) -> str:
    """Return what `load_policy` takes for the name of a run or a model; the name of another player as it is.

    Raises:
        UnknownNameError, CheckpointError: see `find_model`.
    """
    from gspo_gym.run.models import find_model

    return name if name.startswith((SCRIPTED, ENDPOINT)) else find_model(name, runs=runs).base


def add_environment(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name an environment: `name`, and `option` for `env_config_of`."""
    parser.add_argument("name", help="GuessNumber, gspo_gym/GuessNumber-v0, my_module:MyEnv, ...")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=JSON", help="argument of the environment's constructor"
    )


def env_config_of(options: Sequence[str]) -> dict[str, Any]:
    """Return KEY=JSON texts as keyword arguments; a value that is not JSON stays text.

    Raises:
        UsageError: a text is not of that form.

    >>> env_config_of(["high=12", "style=verbose"])
    {'high': 12, 'style': 'verbose'}
    """
    config: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"--option: expected KEY=JSON, got {option!r}")
        try:
            config[key] = json.loads(text)
        except json.JSONDecodeError:
            config[key] = text
    return config

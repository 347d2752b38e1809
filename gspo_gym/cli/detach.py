"""`gspo-gym train --detach`: start a training in the background and return when it answers `gspo-gym run status`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo_gym.base.files import make_folder, writing
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError, UsageError
from gspo_gym.run.control import SOCKET_FILE, ask
from gspo_gym.run.process import read_process
from gspo_gym.run.records import read_run_id

_LOOK_SECONDS = 0.1
_SHOWN_LINES = 20


def start_detached(arguments: Sequence[str], config: RunConfig) -> dict[str, Any]:
    """Run `gspo-gym train` with the arguments in a new session; return once its control socket answers.

    Its output goes to a file in the run's folder. Ctrl-C during the wait ends it.

    Returns:
        JSON values: the run's id, folder, pid, socket and log, and its exit status if it has ended already.

    Raises:
        ConfigError: it failed before its socket answered; the message holds the last lines of its output.
    """
    folder = config.run_folder
    make_folder(folder.parent)
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
        while process.poll() is None and not _answers(folder, process.pid):
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
        "socket": str(folder.resolve() / SOCKET_FILE),
        "log": str(log.resolve()),
        "exit_status": exit_status,
    }


def _answers(folder: Path, pid: int) -> bool:
    try:
        return bool(ask(folder, {"command": "status"})["pid"] == pid)
    except (ConfigError, UsageError):
        return False

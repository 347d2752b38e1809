"""The folder of a run that begins: its claim, an earlier run in it, and that a start that fails leaves none.

What a run writes there is `recording.py`'s; whether a folder is free for a new run decides `run.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gspo_gym.base.files import make_folder, take_lock, writing
from gspo_gym.errors import ConfigError
from gspo_gym.run.report.progress import Progress

_CLAIM = ".starting"  # in the folder of a run that has not begun yet, locked by the process that begins it


@contextlib.contextmanager
def folder_of_a_new_run(folder: Path, progress: Progress) -> Iterator[Callable[[], None]]:
    """Make the folder; an earlier run is moved aside. If the block fails before it calls what it is given, undo both.

    Raises:
        StorageError: it cannot be made, or takes no file.
        ConfigError: another process is beginning a run there.
    """
    missing = [path for path in folder.parents if not path.exists()]
    if is_left_by_a_start(folder):
        shutil.rmtree(folder, ignore_errors=True)
    earlier = _set_aside(folder)
    claim = folder / _CLAIM
    is_ours = has_begun = False
    lock: int | None = None

    def begin() -> None:
        nonlocal has_begun
        has_begun = True
        claim.unlink(missing_ok=True)

    try:
        make_folder(folder)
        lock = _claim(claim)
        is_ours = True
        if earlier is not None:
            progress.note(f"the run that was in {folder} is in {earlier} now")
        yield begin
    except BaseException:
        if not has_begun:
            _undo(folder, earlier, missing, is_ours=is_ours)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def is_left_by_a_start(folder: Path) -> bool:
    """Return whether a folder holds only files of a process that was killed before its run began."""
    claim = folder / _CLAIM
    if not claim.exists() or (lock := take_lock(claim)) is None:
        return False
    os.close(lock)
    return True


@contextlib.contextmanager
def leaving_at_sigterm(folder: Path) -> Iterator[None]:
    """Have SIGTERM raise SystemExit while the run in the folder has recorded nothing: then nothing of it may stay.

    Left alone where the program handles that signal itself, or this is not its main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (folder / "metrics.jsonl").exists() or any((folder / "episodes").glob("*")):
            os.kill(os.getpid(), number)  # as without all this
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _set_aside(folder: Path) -> Path | None:
    """Move an earlier run to the first free FOLDER.1, FOLDER.2, ..., and return that; nothing is deleted."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    with writing(target):
        folder.rename(target)
    return target


def _claim(path: Path) -> int:
    """Make and lock the file that says that a run begins in its folder; return what holds the lock."""
    with writing(path):
        lock = take_lock(path)
    if lock is None:
        raise ConfigError(f"{path.parent}: another process is beginning a run there; choose another model.label")
    return lock


def _undo(folder: Path, earlier: Path | None, missing: Sequence[Path], *, is_ours: bool) -> None:
    """Remove the folder of a run that did not start, bring an earlier one back, and remove folders that were made.

    What is in a folder that is not ours is another process's, and stays.
    """
    if is_ours:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
    if earlier is not None and not folder.exists():
        earlier.rename(folder)
    for path in missing:
        with contextlib.suppress(OSError):  # it was never made, or holds another run by now
            path.rmdir()

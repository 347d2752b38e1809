"""Make room for a new run: move an earlier run in its folder aside, and undo that if the start fails.

`recording.py` writes into the folder; `cli/run.py` decides whether a new run may take it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gspo_gym.base.files import make_folder, writing
from gspo_gym.run.process import LOCK_FILE, PROCESS_FILE, holder_of, holding, locked, read_process
from gspo_gym.run.report.progress import Progress


@contextlib.contextmanager
def folder_of_a_new_run(folder: Path, progress: Progress) -> Iterator[Callable[[], None]]:
    """Make and hold the folder, and move an earlier run aside; undo both unless the block calls the yielded function.

    Raises:
        StorageError: the folder cannot be made, or not written to.
        ConfigError: another process holds it.
    """
    missing = [path for path in folder.parents if not path.exists()]
    earlier = _clear(folder, progress)
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        keep()
        has_begun = True

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: None if has_begun else _undo(folder, earlier, missing))
        make_folder(folder)
        keep = stack.enter_context(holding(folder, progress.note, has_begun=False))
        # While it is held: afterwards it may be another process's.
        stack.callback(lambda: None if has_begun else shutil.rmtree(folder, ignore_errors=True))
        if earlier is not None:
            progress.note(f"the run that was in {folder} is in {earlier} now")
        yield begin


def is_left_by_a_start(folder: Path) -> bool:
    """Return whether a folder holds only files of a process that was killed before its run began."""
    return holder_of(folder) is None and _has_not_begun(folder)


def _has_not_begun(folder: Path) -> bool:
    last = read_process(folder)
    if last is not None:
        return not last.has_begun
    return {path.name for path in folder.iterdir()} <= {LOCK_FILE, f".{PROCESS_FILE}.tmp"}


def _clear(folder: Path, progress: Progress) -> Path | None:
    """Remove what a killed start left, or rename an earlier run to the first free FOLDER.1, FOLDER.2, ...

    Returns:
        The earlier run's new folder; None if there was no run. A run is never deleted.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    with locked(folder, progress.note):
        if _has_not_begun(folder):
            shutil.rmtree(folder, ignore_errors=True)
            return None
        number = 1
        while (target := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        with writing(target):
            folder.rename(target)
        (target / LOCK_FILE).unlink(missing_ok=True)
        return target


def _undo(folder: Path, earlier: Path | None, missing: Sequence[Path]) -> None:
    """Move an earlier run back, and remove the folders made for the run that did not start."""
    with contextlib.suppress(OSError):
        folder.rmdir()  # empty, unless it is another process's
    if earlier is not None and not folder.exists():
        earlier.rename(folder)
    for path in missing:
        with contextlib.suppress(OSError):  # it was never made, or holds another run by now
            path.rmdir()

"""A disk that is really full: a small file system in memory where this process may mount one, else a limit on files.

The limit holds for every file of the process, so that only a forked test may set it: pytest writes files, too.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import is_forked


@dataclass
class SmallDisk:
    """A folder in which little can be written.

    Attributes:
        is_mounted: it is a file system of its own; otherwise no file of this process may be larger than its size.
    """

    folder: Path
    num_bytes: int
    is_mounted: bool

    def grow(self, num_bytes: int) -> None:
        """Make room, as a person who is told that the disk is full does."""
        self.num_bytes = num_bytes
        if self.is_mounted:
            subprocess.run(["mount", "-o", f"remount,size={num_bytes}", str(self.folder)], check=True)
        else:
            _limit_files(num_bytes)

    def fill(self) -> None:
        """Leave no room: another file takes it all, or no file may grow beyond the largest one."""
        if not self.is_mounted:
            _limit_files(max(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()))
            return
        with (self.folder / "pad").open("wb", buffering=0) as pad, contextlib.suppress(OSError):
            while pad.write(bytes(4_096)):
                pass

    def free(self) -> None:
        """Take back what `fill` did."""
        if self.is_mounted:
            (self.folder / "pad").unlink()
        else:
            _limit_files(self.num_bytes)

    def set_read_only(self, is_read_only: bool) -> None:
        """Refuse, or allow, all writing, as a system does with a disk that fails; of one that is mounted."""
        mode = "ro" if is_read_only else "rw"
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.folder)], check=True)


@contextlib.contextmanager
def mounted_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Make a folder a file system of that size until the block ends; skip the test where nothing can be mounted."""
    folder.mkdir()
    if not _mount(folder, num_bytes):
        pytest.skip("this process may not mount a disk")
    with _unmounting(folder):
        yield SmallDisk(folder, num_bytes, is_mounted=True)


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int, *, may_mount: bool = True) -> Iterator[SmallDisk]:
    """Make a folder a disk of that size until the block ends.

    Raises:
        RuntimeError: the test is not `forked`, and no other test would run on a machine where nothing can be mounted.
    """
    if not is_forked():
        raise RuntimeError("expected a test with the decorator @forked: a limit on files would be pytest's own")
    folder.mkdir()
    if may_mount and _mount(folder, num_bytes):
        with _unmounting(folder):
            yield SmallDisk(folder, num_bytes, is_mounted=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    _limit_files(num_bytes)
    try:
        yield SmallDisk(folder, num_bytes, is_mounted=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _unmounting(folder: Path) -> Iterator[None]:
    """Lazily: weights that were loaded from the disk are mapped from it until their model is freed."""
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _mount(folder: Path, num_bytes: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _limit_files(num_bytes: int) -> None:
    """Python ignores the signal that comes with this limit, so that writing fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

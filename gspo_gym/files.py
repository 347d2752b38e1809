"""Files that survive a crash: whole or not there, and lines of which only the last can be torn.

"Durable" means that the bytes are on the disk (fsync) and not only with the operating system, so that a power cut, too,
leaves the old file or the new one. Called by recording and checkpoints; knows nothing of what is written.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write the file durably, replacing it at once: a reader sees the old text or the new one, never a part."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    draft.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` for everything in a folder, and then the folder."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            sync(path)
    sync(folder)


def append_line(path: Path, line: str) -> None:
    """Append a line; the operating system has it on return (a killed process loses nothing, a power cut may)."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def whole_lines(path: Path) -> list[str]:
    """The lines of a file without what a killed process wrote after the last line break; none if there is no file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def cut_torn_line(path: Path) -> bool:
    """Remove what a killed process wrote after the last line break, if anything; says whether there was."""
    whole = path.read_bytes() if path.exists() else b""
    if not whole or whole.endswith(b"\n"):
        return False
    with path.open("rb+") as file:
        file.truncate(whole.rfind(b"\n") + 1)
    return True

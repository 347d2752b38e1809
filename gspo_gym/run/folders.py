"""Where runs are: those below a folder, and the one that a name means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.run.records import EVENTS_FILE, read_run_id

_MAX_DEPTH = 3  # of a run below the folder that is listed: searches and batches keep theirs in folders of their own


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of the runs up to three levels below a folder, in no order; none if it is not there."""
    return list(_run_folders(str(folder), _MAX_DEPTH)) if folder.is_dir() else []


def find_run(name: str, folder: Path) -> Path:
    """Return the folder of a run: `name` is its path, its path below `folder`, or the start of its id.

    Raises:
        ConfigError: there is none, or several have such an id.
    """
    for path in (Path(name), folder / name):
        if _is_run(str(path)):
            return path
    paths = run_folders(folder)
    matches = [path for path in paths if len(name) >= 4 and (read_run_id(path) or "").startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name}: is the start of several ids: {', '.join(map(str, matches))}")
    names = [str(path.relative_to(folder)) for path in paths]
    raise ConfigError(f"{name}: there is no such run, neither here nor in {folder}; {nearest_name(name, names)}")


def run_name(folder: Path, runs: Path = Path("runs")) -> str:
    """Return the shortest name under which commands find the run in `folder`: its path below `runs`, or its path."""
    try:
        name = str(folder.resolve().relative_to(runs.resolve()))
    except ValueError:
        return str(folder)
    return str(folder) if name in (".", "smollm2") or _is_run(name) else name  # what these names mean comes first


def _is_run(folder: str) -> bool:
    return os.path.isfile(f"{folder}/config.toml") and os.path.isfile(f"{folder}/{EVENTS_FILE}")


def _run_folders(folder: str, depth: int) -> Iterator[Path]:
    if _is_run(folder):
        yield Path(folder)
    elif depth:
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        for path in below:
            yield from _run_folders(path, depth - 1)

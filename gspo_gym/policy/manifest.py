"""The manifest of a checkpoint: its step and run, and the sizes and digests of its files.

Written last: a folder with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gspo_gym.base.files import replace_file, sync_tree
from gspo_gym.errors import CheckpointError

MANIFEST = "manifest.json"
_SCHEMA_VERSION = 1
_STEP_FOLDER = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        step: after which it was saved.
        run: the id of its run; None: it was saved without one.
        files: {"bytes": int, "sha256": str} by path in the folder (Any: JSON).
        evaluation: the numbers of the step's evaluation; None: it has none.
    """

    step: int
    run: str | None
    files: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None = None


def seal(folder: Path, *, step: int, run: str | None, evaluation: Mapping[str, Any] | None = None) -> None:
    """Force everything in the folder to the disk, and only then write the manifest that calls it complete."""
    sync_tree(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    manifest = {"schema": _SCHEMA_VERSION, "step": step, "run": run, "evaluation": evaluation, "files": entries}
    replace_file(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def verify(folder: Path, *, required: Collection[str] = ()) -> Manifest:
    """Compare a checkpoint's folder with its manifest: its step, the same files, byte for byte, no other, and no link.

    `required` are files that it must list.

    Raises:
        CheckpointError: the manifest is missing or unreadable, or a file is missing, not listed, cut or changed; names
            the file. Or the folder's name is another step's.
    """
    manifest = read_manifest(folder)
    require_own_name(folder, manifest)
    for name in sorted(set(required) - set(manifest.files)):
        raise CheckpointError(f"{folder / MANIFEST}: does not list {name}, which every checkpoint has")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a link; a checkpoint has none")
        if path.is_file() and name not in manifest.files and name != MANIFEST:
            raise CheckpointError(f"{path}: does not belong to the checkpoint: {MANIFEST} does not list it; remove it")
    for name, entry in manifest.files.items():
        _verify_file(folder / name, entry)
    return manifest


def require_own_name(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that is named after another step than its checkpoint was saved after; other names are free.

    Raises:
        CheckpointError: the folder was renamed.
    """
    if step_of(folder) not in (None, manifest.step):
        raise CheckpointError(
            f"{folder}: was saved after step {manifest.step}, as its manifest says; the folder was renamed"
        )


def is_complete(folder: Path) -> bool:
    """Return whether all files are there in full size: a crash can spoil nothing else."""
    try:
        files = read_manifest(folder).files
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in files.items())
    except OSError:  # CheckpointError included
        return False


def step_of(folder: Path) -> int | None:
    """Return the step that a checkpoint's folder is named after; None for another name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return None if match is None else int(match[1])


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint's manifest says.

    Raises:
        CheckpointError: it is missing or damaged, or lists a file outside the folder.
    """
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        files: dict[str, Any] = values["files"]
        if values["schema"] != _SCHEMA_VERSION or not all({"bytes", "sha256"} <= set(e) for e in files.values()):
            raise CheckpointError(f"{path}: expected schema {_SCHEMA_VERSION}, got {values['schema']!r}")
        manifest = Manifest(int(values["step"]), values.get("run"), files, values.get("evaluation"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; the checkpoint is not complete") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is damaged: {type(error).__name__}: {error}") from error
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or PurePosixPath(name).is_absolute():
            raise CheckpointError(f"{path}: lists {name!r}, which is not a file of the checkpoint's folder")
    return manifest


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing; the checkpoint is not complete")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{path}: expected {entry['bytes']} bytes, got {size}")
    digest = _sha256(path)
    if digest != entry["sha256"]:
        raise CheckpointError(f"{path}: is damaged: expected SHA-256 {entry['sha256']}, got {digest}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

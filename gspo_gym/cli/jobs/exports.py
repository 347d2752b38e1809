"""Hand a trained model over: as a tar file, or to the hub by the commands of `gspo-gym models`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gspo_gym.cli.jobs.records import last_error
from gspo_gym.errors import ServiceError

_CHUNK_BYTES = 1 << 20
_EXPORT_SECONDS = 3_600.0


def tar_of(folder: Path, names: Sequence[str], prefix: str) -> Iterator[bytes]:
    """Yield a tar of these files of a folder, a part at a time: weights may be larger than the memory."""
    for name in names:
        with (folder / name).open("rb") as file:
            info = tarfile.TarInfo(f"{prefix}/{name}")
            info.size = (folder / name).stat().st_size
            yield info.tobuf(tarfile.PAX_FORMAT)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def push(run_folder: Path, repo: str, *, is_private: bool, is_merged: bool) -> str:
    """Export a run's newest model and push it to the hub; return the URL of its repository.

    In a process of its own, because the service must not load a model. HF_TOKEN and HF_ENDPOINT are the service's.

    Raises:
        ServiceError: the export or the hub refuses; says why.
    """
    scratch = Path(tempfile.mkdtemp(prefix="gspo-gym-export-"))
    try:
        verb = "merge" if is_merged else "export"
        _models([verb, str(run_folder), "--out", str(scratch / "model")], scratch)
        return _models(["push", str(scratch / "model"), repo, *(["--private"] if is_private else [])], scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _models(words: Sequence[str], scratch: Path) -> str:
    """Run `gspo-gym models`; return the last line that it prints."""
    log = scratch / "log.txt"
    with log.open("wb") as errors:
        ended = subprocess.run(
            [sys.executable, "-m", "gspo_gym.cli", "models", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=_EXPORT_SECONDS,
            check=False,
        )
    if ended.returncode:
        raise ServiceError(last_error(log) or f"gspo-gym models {words[0]} ended with status {ended.returncode}")
    return (ended.stdout.strip().splitlines() or [""])[-1]

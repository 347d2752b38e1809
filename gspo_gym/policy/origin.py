"""Where a checkpoint comes from: its run and parent, and the configuration, packages and revision that made it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PACKAGES = ("gspo-gym", "torch", "transformers", "peft", "safetensors", "numpy", "bitsandbytes", "vllm")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from.

    Attributes:
        run: the id of its run; None: it was saved without one.
        parent: {"run": id, "step": int} of the checkpoint that the run began from; None: it continues no other run.
        config: SHA-256 of the run's resolved configuration; None: not known.
        packages: versions by name.
        git: the revision of the checkout that saved it, ending in "-dirty" if that was changed; None: it was none.
    """

    run: str | None = None
    parent: Mapping[str, Any] | None = None
    config: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    git: str | None = None

    @classmethod
    def of_this_process(cls, config_toml: str, *, parent: Mapping[str, Any] | None = None) -> Origin:
        """Return what this process says of itself in the checkpoints of a run with this resolved configuration."""
        return cls(
            parent=parent,
            config=hashlib.sha256(config_toml.encode()).hexdigest(),
            packages={"python": platform.python_version(), **_versions()},
            git=git_revision(Path(__file__).parents[2]),
        )


def git_revision(folder: Path) -> str | None:
    """Return the revision of a checkout, ending in "-dirty" if it was changed; None for another folder, or no git."""
    if not (folder / ".git").exists():  # of a checkout around the folder, such as one with a .venv, nothing follows
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions

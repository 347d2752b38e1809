"""Import other projects' packages: one that is missing, or of a version without what a suite needs, is one sentence."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

from gspo_gym.errors import MissingExtraError


def import_package(suite: str, package: str, *modules: str, extra: str) -> Any:
    """Import modules of another project's package, and return the first (Any: it has no types).

    Raises:
        MissingExtraError: see `missing_package`.
    """
    try:
        first, *_ = [importlib.import_module(name) for name in modules]
    except ImportError as error:
        raise missing_package(suite, package, extra=extra, error=error) from error
    return first


def missing_package(suite: str, package: str, *, extra: str, error: Exception) -> MissingExtraError:
    """Return the error of a package that is not installed, or of which another version is: says which one works."""
    command = f"pip install 'gspo-gym[{extra}]'"
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return MissingExtraError(f"{suite} needs {package}, which is not installed: {command}")
    return MissingExtraError(
        f"{suite} needs {_requirement(package, extra)}, and {package} {version} is installed ({error}): {command}"
    )


def _requirement(package: str, extra: str) -> str:
    """Return the package with the versions that the extra asks for, such as "verifiers==0.1.14"."""
    try:
        lines = metadata.requires("gspo-gym") or []
    except metadata.PackageNotFoundError:  # imported without an installation
        lines = []
    named = (line.partition(";")[0].strip() for line in lines if extra in line)
    return next((line for line in named if re.match(rf"{re.escape(package)}\b", line)), f"another version of {package}")

"""Import other projects' packages: one that is missing, or of a version without what a suite needs, is one sentence."""

from __future__ import annotations

import importlib
import operator
import re
from importlib import metadata
from typing import Any

from gspo_gym.errors import MissingExtraError


def import_package(suite: str, package: str, *modules: str, extra: str) -> Any:
    """Import modules of another project's package, and return the first (Any: it has no types).

    Args:
        suite: its name, for errors.
        package: as it is installed.
        *modules: such as "gem", or "gem.envs.registration:ENV_REGISTRY" with a name that the suite reads from it.
        extra: the extra of this project that installs the package.

    Raises:
        MissingExtraError: see `missing_package`.
    """
    try:
        first, *_ = [_import(module) for module in modules]
    except (ImportError, AttributeError) as error:
        raise missing_package(suite, package, extra=extra, error=error) from error
    return first


def _import(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    if attribute:
        operator.attrgetter(attribute)(module)
    return module


def missing_package(suite: str, package: str, *, extra: str, error: Exception) -> MissingExtraError:
    """Return the error of a package that is not installed, or of which another version is: says which one works."""
    command = f"pip install 'gspo-gym[{extra}]'"
    try:
        present = f"{package} {metadata.version(package)} is installed"
    except metadata.PackageNotFoundError:
        if isinstance(error, ModuleNotFoundError):
            return MissingExtraError(f"{suite} needs {package}, which is not installed: {command}")
        present = "a module of unknown version has its name"
    return MissingExtraError(f"{suite} needs {_requirement(package, extra)}, and {present} ({error}): {command}")


def _requirement(package: str, extra: str) -> str:
    """Return the package with the versions that the extra asks for, such as "verifiers==0.1.14"."""
    try:
        lines = metadata.requires("gspo-gym") or []
    except metadata.PackageNotFoundError:  # imported without an installation
        lines = []
    named = (line.partition(";")[0].strip() for line in lines if extra in line)
    return next((line for line in named if re.match(rf"{re.escape(package)}\b", line)), f"another version of {package}")

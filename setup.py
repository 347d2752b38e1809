"""Finds the packages of the wheel, and makes its long description: pyproject.toml can say neither.

Some packages have another name than their folder (envs, configs, examples), and some folders hold data alone. The long
description is README.md, whose links lead to files of the repository, because a package index has none of these.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]


def packages() -> list[str]:
    """Return every package, with the folders below it that hold data."""
    below = {name: find_namespace_packages(folder, exclude=["*__pycache__*"]) for name, folder in FOLDERS.items()}
    return [*below, *(f"{name}.{part}" for name, parts in below.items() for part in parts)]


def long_description() -> str:
    """Return README.md with absolute links, at the tag of this version."""
    address, version = PROJECT["project"]["urls"]["Repository"], PROJECT["project"]["version"]

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["mark"] else "blob"
        return f"{link['mark']}[{link['text']}]({address}/{kind}/v{version}/{link['path']})"

    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)]+)\)", absolute, text)


setup(packages=packages(), long_description=long_description(), long_description_content_type="text/markdown")

"""`gspo-gym env new NAME` writes a package with a small environment; `gspo-gym env card NAME` describes an environment.

A new package's files are in `templates/`, with placeholders such as $package and $class_name.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from gspo_gym.base.files import make_folder, write_output
from gspo_gym.cli.authoring.card import card_as_markdown, make_card
from gspo_gym.cli.command_line import add_environment, env_config_of
from gspo_gym.env.registry import list_environments
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name

KINDS = ("text", "tool")
_TEMPLATES = resources.files("gspo_gym.cli.authoring") / "templates"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_WORD_BEGINS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# What the files of a package define or import themselves, and a folder that it has.
_TAKEN = ("Achievements", "Reward", "RewardTerms", "Task", "TaskSource", "TextEnv", "ToolEnv", "Tests")


def add_commands(subparsers: Any) -> None:  # Any: argparse does not name the type of what add_subparsers gives
    """Add the commands `env new` and `env card`."""
    new = subparsers.add_parser("new", help="write a package with an environment that works, to be made yours")
    new.add_argument("name", help="WordSort or word_sort")
    new.add_argument("--kind", default="text", help="text (default) or tool: how the model acts")
    new.add_argument("--folder", type=Path, default=Path(), help="where to put it (default: here)")
    new.set_defaults(run=write_new)

    card = subparsers.add_parser("card", help="describe an environment: spaces, tools, rewards, a transcript, scores")
    add_environment(card)
    card.add_argument("--seeds", type=int, default=100, metavar="N", help="play the seeds 0 to N - 1 (default 100)")
    card.add_argument("--max-turns", type=int, default=200, help="longer episodes are cut off here (default 200)")
    card.add_argument("--markdown", type=Path, metavar="FILE", help="write it to a file instead of the terminal")
    card.set_defaults(run=print_card)


def write_new(arguments: argparse.Namespace) -> int:
    """Write the package; print its files and the next commands to run."""
    new = new_environment(arguments.name, kind=arguments.kind, folder=arguments.folder)
    print(f"{new.env_id} is in {new.folder}:")
    for path in new.files:
        print(f"  {path}")
    folder = shlex.quote(str(new.folder))
    print(f"Next:\n  cd {folder} && pip install -e .\n  gspo-gym env check {new.env_id}\n  gspo-gym train train.toml")
    return 0


def print_card(arguments: argparse.Namespace) -> int:
    """Print the card or write it to a file; return 1 if an episode could not be played."""
    card = make_card(
        arguments.name,
        env_config_of(arguments.option),
        num_seeds=arguments.seeds,
        max_turns=arguments.max_turns,
    )
    text = card_as_markdown(card)
    if arguments.markdown is None:
        sys.stdout.write(text)
    else:
        make_folder(arguments.markdown.parent)
        write_output(arguments.markdown, text)
        print(f"wrote {arguments.markdown}")
    return 1 if any(record.failures for record in card.records) else 0


@dataclass(frozen=True, slots=True)
class NewEnvironment:
    """The result of `new_environment`.

    Attributes:
        folder: of the project.
        files: relative to `folder`, in the order in which to read them.
        env_id: the environment's id once the project is installed.
    """

    folder: Path
    files: tuple[Path, ...]
    env_id: str


def new_environment(name: str, *, kind: str = "text", folder: Path = Path()) -> NewEnvironment:
    """Write the project `folder`/NAME-env: a package to install, with its tasks, players, README, test and config.

    The result passes `check_env` unchanged. No existing file is touched.

    Args:
        name: WordSort or word_sort: the package is `word_sort`, the class `WordSort`, the project `word-sort-env`.
        kind: "text" (the model answers in text) or "tool" (it calls tools).
        folder: created if missing.

    Raises:
        UnknownNameError: no such kind.
        ConfigError: the name is not a Python name, or is taken by a folder, module or environment.
    """
    if kind not in KINDS:
        raise UnknownNameError(f"there is no kind {kind!r} of environment; {nearest_name(kind, KINDS)}")
    words = _names_of(name)
    project = folder / words["distribution"]
    if project.exists():
        raise ConfigError(f"{project} exists already; choose another name or another --folder")
    # All texts before the first file: an error leaves no half-written project.
    texts = {
        Path(path): Template(_template(kind, template)).substitute(words)
        for path, template in _files(words["package"]).items()
    }
    for path, text in texts.items():
        make_folder((project / path).parent)
        write_output(project / path, text)
    return NewEnvironment(project, tuple(texts), words["env_id"])


def _files(package: str) -> Mapping[str, str]:
    """Return the project's files, each with its template."""
    sources = ("env.py", "tasks.py", "rewards.py", "policies.py", "__init__.py")
    return {
        "README.md": "README.md",
        **{f"{package}/{source}": source for source in sources},
        f"tests/test_{package}.py": "test_env.py",
        "train.toml": "train.toml",
        "pyproject.toml": "pyproject.toml",
    }


def _template(kind: str, name: str) -> str:
    """Return the kind's template of this name, or the shared one."""
    own = _TEMPLATES / kind / f"{name}.template"
    shared = _TEMPLATES / "any" / f"{name}.template"
    return (own if own.is_file() else shared).read_text(encoding="utf-8")


def _names_of(name: str) -> dict[str, str]:
    """Return the values of the templates' placeholders.

    Raises:
        ConfigError: the name is not a valid one, or is taken.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"expected a name of letters, digits and _ that begins with a letter, got {name!r}")
    package = _WORD_BEGINS.sub("_", name).lower()
    class_name = "".join(word.capitalize() for word in package.split("_"))
    if keyword.iskeyword(package) or keyword.iskeyword(class_name) or class_name in _TAKEN:
        raise ConfigError(
            f"{name!r} means something else in Python or in the files of the package; choose another name"
        )
    named_alike = [env_id for env_id in list_environments(include_gymnasium=True) if _bare(env_id) == class_name]
    if named_alike:
        raise ConfigError(f"there is an environment {named_alike[0]!r} already; choose another name than {name!r}")
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"there is a module {package!r} already, which would be hidden; choose another name")
    return {
        "name": name,
        "package": package,
        # Of the folder, too: one named like the package would hide it from a Python started beside it.
        "distribution": package.strip("_").replace("_", "-") + "-env",
        "class_name": class_name,
        "env_id": f"{package}/{class_name}-v0",
    }


def _bare(env_id: str) -> str:
    """Return an id without namespace and version."""
    return re.sub(r"-v\d+$", "", env_id.rpartition("/")[2])

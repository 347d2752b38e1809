"""The `gspo-gym` command. A command's heavy imports wait until it runs: `--help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Sequence

from gspo_gym.cli import app as app_commands
from gspo_gym.cli import config as config_commands
from gspo_gym.cli import doctor, evaluate, train
from gspo_gym.cli import env as env_commands
from gspo_gym.cli import judge as judge_commands
from gspo_gym.cli import serve_engine as serve_engine_command
from gspo_gym.cli.command_line import Parser, package_version, parse_and_run
from gspo_gym.cli.search import command as search


class _Version(argparse.Action):
    """Print the versions that a bug report should name."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version as version_of

        others = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "transformers"))
        print(f"gspo-gym {package_version()} (Python {platform.python_version()}, {others})")
        parser.exit()


class _Completion(argparse.Action):
    """Print the shell completion that shtab makes of the parser."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: object, __: object = None) -> None:
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            parser.error("completion needs shtab: pip install 'gspo-gym[completion]'")
        print(shtab.complete(parser, shell=values))
        parser.exit()


def command_parser() -> Parser:
    """Return the parser of `gspo-gym` with all its commands."""
    parser = Parser(
        prog="gspo-gym", description="Train language-model agents on multi-turn text environments with GSPO."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    shells = ("bash", "zsh")
    completion = "print a completion script for a shell, and exit: see README.md"
    parser.add_argument("--print-completion", action=_Completion, choices=shells, help=completion)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train.add_arguments(commands.add_parser("train", help="train a model as a config file says"))
    evaluate.add_arguments(commands.add_parser("evaluate", help="evaluate a model over seeded episodes"))
    doctor.add_arguments(commands.add_parser("doctor", help="say what is wrong with a run, and which key to change"))
    search.add_arguments(commands.add_parser("search", help="try many values of some keys, and keep the best"))
    config_commands.add_arguments(commands.add_parser("config", help="check, show and translate configurations"))
    serve_engine_command.add_arguments(commands.add_parser("serve", help="serve a model to training runs"))
    env_commands.add_arguments(commands.add_parser("env", help="list, check and play environments"))
    app_commands.add_arguments(commands.add_parser("app", help="check task apps before training on them"))
    judge_commands.add_arguments(commands.add_parser("judge", help="check rubrics; serve, audit and use judges"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    if not sys.flags.safe_path and os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that MODULE:NAME finds modules of the present folder
    return parse_and_run(command_parser(), argv)

"""The `gspo-gym` command. Only the module of the chosen command is imported, to keep `--help` fast."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Sequence

from gspo_gym.cli.command_line import Parser, package_version, parse_and_run

# Each command's module, with the function that adds its arguments if that is not `add_arguments`, and its help.
_COMMANDS = {
    "train": ("gspo_gym.cli.train", "train a model as a config file says"),
    "evaluate": ("gspo_gym.cli.evaluate", "evaluate a model over seeded episodes"),
    "doctor": ("gspo_gym.cli.report:add_doctor_arguments", "say what is wrong with a run, and which key to change"),
    "verify": ("gspo_gym.cli.verify", "recompute a training step from the run's files, and name the first difference"),
    "report": ("gspo_gym.cli.report", "write a page that shows a run, its curves, and its episodes token by token"),
    "view": ("gspo_gym.cli.view", "show runs in the browser as they go on"),
    "episodes": ("gspo_gym.cli.notebook", "print episodes of a run, with the sampled tokens in colour"),
    "run": ("gspo_gym.cli.runs:add_control_arguments", "say what a run does now; have it save a checkpoint, or stop"),
    "runs": ("gspo_gym.cli.runs", "list, show, compare and remove runs"),
    "search": ("gspo_gym.cli.search.command", "try many values of some keys, and keep the best"),
    "config": ("gspo_gym.cli.config", "check, show and translate configurations"),
    "cluster": ("gspo_gym.cli.cluster", "say where a run stands on many GPUs and what it takes there, on paper"),
    "jobs": ("gspo_gym.cli.jobs.command", "serve training as jobs, to clients of the hosted trainer"),
    "models": ("gspo_gym.cli.models", "export, push, serve and talk with what runs have trained"),
    "env": ("gspo_gym.cli.env", "list, check and play environments"),
    "credit": ("gspo_gym.cli.credit", "say how right each way of giving turns credit is in an environment"),
    "app": ("gspo_gym.cli.app", "check task apps before training on them; serve agents as task apps"),
    "judge": ("gspo_gym.cli.judge", "check rubrics; serve, audit and use judges"),
}


# What an environment needs nothing of: the second part of the dependencies in pyproject.toml, by the names of imports.
_LEARNER_PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "omegaconf")


class _Version(argparse.Action):
    """Print our version and those of Python, torch and transformers."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        versions = ", ".join(f"{name} {package_version(name)}" for name in ("torch", "transformers"))
        print(f"gspo-gym {package_version()} (Python {platform.python_version()}, {versions})")
        parser.exit()


class _Completion(argparse.Action):
    """Print the completion script that shtab generates from the parser."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, values: object, __: object = None) -> None:
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            parser.error("completion needs shtab: pip install 'gspo-gym[completion]'")
        print(shtab.complete(parser, shell=values))
        parser.exit()


def command_parser(chosen: str | None = None) -> Parser:
    """Return the parser of `gspo-gym`, with the arguments of the command `chosen` only, or of all commands for None."""
    parser = Parser(
        prog="gspo-gym", description="Train language-model agents on multi-turn text environments with GSPO."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    shells = ("bash", "zsh", "fish")
    completion = 'print a completion script for a shell, and exit: eval "$(gspo-gym --print-completion bash)"'
    parser.add_argument("--print-completion", action=_Completion, choices=shells, help=completion)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (place, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if chosen in (None, name):
            module, _, function = place.partition(":")
            getattr(importlib.import_module(module), function or "add_arguments")(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    if not sys.flags.safe_path and os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, so that MODULE:NAME finds modules of the present folder
    words = sys.argv[1:] if argv is None else list(argv)
    completes = any(word.startswith("--print-completion") for word in words)  # which takes the parsers of all commands
    command_name = next((word for word in words if not word.startswith("-")), "")
    try:
        return parse_and_run(command_parser(None if completes else command_name), argv)
    except ModuleNotFoundError as error:
        if error.name not in _LEARNER_PACKAGES:
            raise
        # An environment's author may have installed without them, see docs/tutorials/first_environment.md.
        print(f"MissingExtraError: {command_name} needs {error.name}: pip install gspo-gym", file=sys.stderr)
        return 2

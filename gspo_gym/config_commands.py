"""`gspo-gym config check | show | reference | from-...`: configurations from the command line; nothing is built.

`from-...` translates another trainer's settings; see `translate/command.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

_FILE_HELP = "a TOML, YAML or JSON file; configs/ holds examples"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `config`."""
    commands = parser.add_subparsers(dest="config_command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="say everything that is wrong with a file, or what it will do")
    _add_file(check)
    check.set_defaults(run=check_config)
    show = commands.add_parser("show", help="print a file with all keys, marking those that it leaves to defaults")
    _add_file(show)
    show.set_defaults(run=show_config)
    reference = commands.add_parser("reference", help="print the table of all keys (configs/README.md)")
    reference.set_defaults(run=print_reference)
    _add_translations(commands)


def check_config(arguments: argparse.Namespace) -> int:
    """Print VALID and what the run would be; an invalid file is an error that lists everything."""
    from gspo_gym.config.run_config import load_config
    from gspo_gym.config.services import missing_machinery

    config = load_config(arguments.file, arguments.overrides)
    plan = config.plan
    print(f"VALID: {arguments.file}")
    print(
        f"{plan.num_iterations} iterations of {plan.episodes_per_iteration} episodes (groups of "
        f"{config.training.group_size}), {plan.steps_per_iteration} optimizer steps each, "
        f"{plan.num_optimizer_steps} in all; written to {config.run_folder}"
    )
    if plan.steps_per_iteration == 1:
        print("note: with one optimizer step per iteration the ratio is 1 everywhere, and no clip acts")
    for notice in config.notices:
        print(f"note: {notice.key}: {notice.text}")
    missing = missing_machinery(config.sections)
    if missing:
        print("This version cannot run it:")
    for line in missing:
        print(f"  {line}")
    return 0


def show_config(arguments: argparse.Namespace) -> int:
    """Print the resolved configuration as TOML that reads back to an equal one."""
    from gspo_gym.config.reference import resolved
    from gspo_gym.config.run_config import load_config, load_sections

    config = load_config(arguments.file, arguments.overrides)
    print(resolved(config, load_sections(arguments.file, arguments.overrides)), end="")
    return 0


def print_reference(arguments: argparse.Namespace) -> int:
    """Print the text of configs/README.md."""
    del arguments
    from gspo_gym.config.reference import reference

    print(reference(), end="")
    return 0


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help=_FILE_HELP)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")


def _add_translations(commands: Any) -> None:
    """The commands of `translate` (Any: argparse's subparsers have no public type)."""
    from gspo_gym.translate.command import add_arguments as add_translations

    add_translations(commands)

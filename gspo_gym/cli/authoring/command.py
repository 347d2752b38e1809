"""`gspo-gym env new NAME` and `gspo-gym env card NAME`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from gspo_gym.base.files import make_folder, write_output
from gspo_gym.cli.authoring.card import card_as_markdown, make_card
from gspo_gym.cli.authoring.new import new_environment
from gspo_gym.cli.command_line import add_environment, env_config_of


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

"""The `gspo-gym` command: a thin front of the modules that do the work.

Nothing heavy is imported before the chosen command runs, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gspo_gym import env_commands, evaluate, train
from gspo_gym.errors import GymError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 fine, 1 a failed check, 2 a mistake of the caller's)."""
    parser = argparse.ArgumentParser(
        prog="gspo-gym", description="Train language-model agents on multi-turn text environments with GSPO."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train.add_arguments(commands.add_parser("train", help="train a model as a config file says"))
    evaluate.add_arguments(commands.add_parser("evaluate", help="evaluate a model over seeded episodes"))
    env_commands.add_arguments(commands.add_parser("env", help="list, check and play environments"))
    return run_command(parser, argv)


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse and call the `run` that the parser's defaults name; our errors become one clear message, not a traceback."""
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except GymError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())

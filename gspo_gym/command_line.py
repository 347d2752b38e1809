"""How every command ends: an exit status, and our own errors as one clear message instead of a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gspo_gym.errors import GymError


def parse_and_run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse, call the `run` that the chosen command put into its defaults, and return the exit status.

    0 is fine, 1 a failed check, 2 a mistake of the caller's, 130 an interruption from the keyboard.
    """
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # section.key=value after an option: argparse takes all of them at once, and that was before it
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        status: int = arguments.run(arguments)
    except GymError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return status

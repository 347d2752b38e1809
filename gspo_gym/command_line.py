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

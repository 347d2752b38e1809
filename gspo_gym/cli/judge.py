"""`gspo-gym judge ...`: rubrics and judges from the command line. No command loads torch."""

from __future__ import annotations

import argparse

from gspo_gym.cli import judge_audit as judge_audit_command
from gspo_gym.cli import judge_check as judge_check_command
from gspo_gym.cli import judge_score as judge_score_command
from gspo_gym.cli import serve_judge as judge_serve_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `judge`."""
    commands = parser.add_subparsers(dest="judge_command", required=True, metavar="COMMAND")
    judge_check_command.add_command(commands)
    judge_serve_command.add_command(commands)
    judge_score_command.add_command(commands)
    judge_audit_command.add_command(commands)

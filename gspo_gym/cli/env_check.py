"""`gspo-gym env check NAME`: run the environment contract, and on request compare tokens with a chat template.

Exit status 1 if anything is broken, to serve in an author's CI. Without `--model` it loads no torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.files import write_output
from gspo_gym.cli.command_line import add_environment, env_config_of
from gspo_gym.rollout.watchdog import seconds_until_frozen, watching

if TYPE_CHECKING:
    from gspo_gym.config.build.token_audit import TokenAudit

_ADVICE = (
    'The check is ended. Set isolation = "process" in the class of {env}: it then runs in worker processes, where a '
    "deadline ends what hangs."
)
_MAX_SHOWN = 400  # characters of a run of tokens in the picture; of a longer one, its two ends


def add_command(commands: Any) -> None:
    """Add `check` to the commands of `env`."""
    check = commands.add_parser("check", help="run the whole environment contract; exit status 1 if it is broken")
    add_environment(check)
    check.add_argument("--num-seeds", type=int, default=10, help="how many seeds to try (default 10)")
    check.add_argument("--max-turns", type=int, default=200, help="longer episodes are cut off (default 200)")
    check.add_argument("--max-step-seconds", type=float, help="a slower reset or step is a problem (default: no limit)")
    check.add_argument(
        "--leak-episodes", type=int, default=20, help="episodes to look for leaks in; 0: none (default 20)"
    )
    check.add_argument("--model", help="also compare the tokens of live turns with this model's chat template")
    check.add_argument("--turns", type=int, default=20, help="live turns of each player with --model (default 20)")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report there for machines")
    check.set_defaults(run=check_environment)


def check_environment(arguments: argparse.Namespace) -> int:
    """Print the report of `check_env`, and with a model that of `audit_tokens`; return 1 if anything failed."""
    from gspo_gym.env.checks.checker import check_env

    config = env_config_of(arguments.option)
    with watching(None, seconds_until_frozen(), advice=_ADVICE):
        report = check_env(
            arguments.name,
            env_config=config,
            seeds=range(arguments.num_seeds),
            max_turns=arguments.max_turns,
            max_step_seconds=arguments.max_step_seconds,
            num_leak_episodes=arguments.leak_episodes,
        )
    print(report)
    audit = None
    # What does not even play has no tokens to look at.
    if arguments.model is not None and report.state_of("play") == "ok":
        from gspo_gym.config.build.token_audit import audit_tokens

        audit = audit_tokens(arguments.name, arguments.model, num_turns=arguments.turns, env_config=config)
        print(audit)
        _show_mask(audit)
    if arguments.json is not None:
        written = {**report.as_json(), "tokens": None if audit is None else audit.as_json()}
        write_output(arguments.json, json.dumps(written, indent=2) + "\n")
    return 0 if report.passed and (audit is None or audit.passed) else 1


def _show_mask(audit: TokenAudit) -> None:
    """Print a sample episode with the trained tokens in green, or in [[ ]] without colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    picture = Text()
    for text, is_trained in audit.sample:
        shown = _shortened(text)
        if console.is_terminal:
            picture.append(shown, style="bold green" if is_trained else "dim")
        else:
            picture.append(f"[[{shown}]]" if is_trained else shown)
    how = "green" if console.is_terminal else "in [[ ]]"
    console.print(f"sample: {audit.sample_player}; trained on is what is {how}", markup=False, highlight=False)
    console.print(picture, soft_wrap=True)


def _shortened(text: str) -> str:
    if len(text) <= _MAX_SHOWN:
        return text
    left_out = len(text) - _MAX_SHOWN
    return f"{text[: _MAX_SHOWN // 2]} ... {left_out} characters ... {text[-_MAX_SHOWN // 2 :]}"

"""`gspo-gym run status | pause | resume | checkpoint | stop | set`: steer a run in progress."""

from __future__ import annotations

import argparse
import json
from typing import Any

from gspo_gym.cli.runs import add_run
from gspo_gym.errors import UsageError
from gspo_gym.run.registry import find_run

_SENTENCES = {
    "pause": ("it waits after the present step", "it was paused already"),
    "resume": ("it goes on", "it was not paused"),
    "stop": ("it saves a checkpoint and ends", "it was stopping already"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `run`."""
    commands = parser.add_subparsers(dest="control_command", required=True, metavar="COMMAND")
    texts = {
        "status": "say what a run does now, and the settings that can change",
        "pause": "let a run wait after its present step",
        "resume": "let a paused run go on",
        "checkpoint": "save a checkpoint after the present step, and wait for it",
        "stop": "let a run save a checkpoint and end",
        "set": "change settings of a run from its next step on",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=text)
        add_run(command)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run_command)
        if name == "status":
            command.add_argument("--content", action="store_true", help="also the text of the newest recorded episode")
        if name == "set":
            command.add_argument("overrides", nargs="+", metavar="section.key=value", help="what to change")


def run_command(arguments: argparse.Namespace) -> int:
    """Send the command to the run and print its answer."""
    from gspo_gym.run.control import ask, status_of

    command, folder = arguments.control_command, find_run(arguments.run_name, arguments.folder)
    if command == "status":
        _print(status_of(folder, with_content=arguments.content), arguments)
    elif command == "set":
        for key, value in map(_split, arguments.overrides):
            reply = ask(folder, {"command": "set", "key": key, "value": value})
            told = f"{key} = {reply['new']}"
            _print(reply, arguments, f"{told}, was {reply['old']}" if reply["changed"] else f"{told} already")
    elif command == "checkpoint":
        reply = ask(folder, {"command": "checkpoint"})
        _print(reply, arguments, f"{folder / 'checkpoints' / str(reply['checkpoint'])}")
    else:
        reply = ask(folder, {"command": command})
        _print(reply, arguments, f"{folder}: {_SENTENCES[command][0 if reply['changed'] else 1]}")
    return 0


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"run set: expected section.key=value, got {text!r}")
    return key.strip(), value.strip()


def _print(reply: dict[str, Any], arguments: argparse.Namespace, sentence: str | None = None) -> None:
    if arguments.json:
        print(json.dumps(reply))
    elif sentence is not None:
        print(sentence)
    else:
        flat = {**reply, **reply.pop("settings", {})}
        flat.pop("settings", None)
        width = max(map(len, flat))
        print("\n".join(f"{key:<{width}}  {value}" for key, value in flat.items() if value is not None))

"""`gspo-gym config from-trl|from-roll|from-agilerl|from-stateset FILE`: print our TOML and what changes in meaning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.base.files import read_file, write_output
from gspo_gym.config.foreign.draft import Draft, Translation, label_of
from gspo_gym.config.foreign.table import SYSTEMS
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError

# What a run needs and another system's file need not hold; the first four have an option of the command.
_PLACEHOLDERS = {
    "rollout.env_name": "GuessNumber",
    "model.base": "Qwen/Qwen3-0.6B",
    "training.iterations_per_epoch": 100,
    "rollout.max_turns": 1,
    "training.learning_rate": 1e-6,
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings from the command line, where the other system's file has none; None: a placeholder, with a note."""

    env: str | None = None
    model: str | None = None
    label: str | None = None
    iterations: int | None = None
    max_turns: int | None = None


def translate(system: str, values: Mapping[str, Any], wanted: Wanted | None = None) -> Translation:
    """Translate settings of another system; fill what such a file does not hold with placeholders.

    Args:
        system: a key of `SYSTEMS`.
        values: the file as read (Any: unchecked).
        wanted: settings that the file does not hold.

    Raises:
        ConfigError: a value has the wrong type, or the other system itself would refuse it.
    """
    chosen = SYSTEMS[system]
    draft = Draft(chosen.name, chosen.flatten(values), chosen.defaults)
    draft.take(chosen)
    _complete(draft, wanted or Wanted())
    return draft.finish()


def _add_translators(commands: Any) -> None:
    """Add a `from-...` command for each system to the subparsers of `gspo-gym config`."""
    for key, system in SYSTEMS.items():
        parser = commands.add_parser(f"from-{key}", help=f"translate settings of {system.name} and say what changes")
        parser.add_argument("file", type=Path, help="YAML, JSON or TOML")
        parser.add_argument("--env", help="the environment to train on")
        parser.add_argument("--model", help="the model, where the file names none")
        parser.add_argument("--label", help="the run's name, where the file has none")
        parser.add_argument("--iterations", type=int, help="batches of episodes per epoch")
        parser.add_argument("--max-turns", type=int, help="turns per episode (default: 1, or what the file says)")
        parser.add_argument("--output", type=Path, help="write the TOML here and not to the standard output")
        parser.set_defaults(run=_translate_file, system=key)


def _translate_file(arguments: argparse.Namespace) -> int:
    """Write the TOML; return 0 if everything was translated, 1 if keys were left out or the result is not valid yet."""
    wanted = Wanted(arguments.env, arguments.model, arguments.label, arguments.iterations, arguments.max_turns)
    translation = translate(arguments.system, read_file(arguments.file), wanted)
    text = to_toml(translation, source=f"{SYSTEMS[arguments.system].name}, {arguments.file}")
    if arguments.output is None:
        print(text, end="")
    else:
        write_output(arguments.output, text)
    for line in translation.left_out:
        print(f"left out: {line}", file=sys.stderr)
    try:
        RunConfig.from_dict(translation.values, source="translation")
    except ConfigError as error:
        print(f"the translation is not valid yet: {error}", file=sys.stderr)
        return 1
    return 1 if translation.left_out else 0


def to_toml(translation: Translation, *, source: str) -> str:
    """Return the file's text: changes in meaning as comments, then the sections."""
    import tomli_w

    lines = [f"# Translated from {source}."]
    lines += _as_comments("Changes in meaning:", translation.notes)
    lines += _as_comments("Left out:", translation.left_out)
    return "\n".join([*lines, "", tomli_w.dumps(translation.values)])


def _as_comments(title: str, texts: Sequence[str]) -> list[str]:
    return [f"# {title}", *(f"# - {text}" for text in texts)] if texts else []


def _complete(draft: Draft, wanted: Wanted) -> None:
    """Set what the options ask for, then fill the rest with placeholders."""
    draft.set("rollout.env_name", wanted.env)
    draft.set("model.base", wanted.model)
    draft.set("model.label", None if wanted.label is None else label_of(wanted.label))
    draft.set("training.iterations_per_epoch", wanted.iterations)
    draft.set("rollout.max_turns", wanted.max_turns)
    for ours, value in _PLACEHOLDERS.items():
        if draft.fill(ours, value):
            draft.note(f"{ours} = {value!r} is a placeholder: the file does not say")
    draft.fill("model.label", f"from-{label_of(draft.system.lower())}")
    draft.fill("evaluation.seeds", "0:100")

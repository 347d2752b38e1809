"""`gspo-gym config new | check | show | reference | parameters | from-...`: create, check, translate configurations."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gspo_gym.base.files import read_file, write_output
from gspo_gym.base.loops import run_to_end
from gspo_gym.cli.command_line import env_config_of
from gspo_gym.config.foreign.reader import Draft, Translation
from gspo_gym.config.foreign.readings import label_of
from gspo_gym.config.machines import with_all_gpus
from gspo_gym.config.reference import new_config, parameters, reference, resolved, short_config
from gspo_gym.config.run_config import RunConfig, config_file, load_config, load_sections
from gspo_gym.config.services import missing_machinery
from gspo_gym.config.words import SYSTEMS
from gspo_gym.errors import ConfigError, UsageError

_TINY = "tiny:qwen3-64-v2"
_FILE_HELP = "a TOML, YAML or JSON file; configs/ holds examples"
# What a run needs and another system's file need not hold; the first four have an option of the command.
_PLACEHOLDERS = {
    "rollout.env_name": "GuessNumber",
    "model.base": "Qwen/Qwen3-0.6B",
    "training.iterations_per_epoch": 100,
    "rollout.max_turns": 1,
    "training.learning_rate": 1e-6,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `config`."""
    commands = parser.add_subparsers(dest="config_command", required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="write a commented configuration to begin with")
    new.add_argument("file", nargs="?", type=Path, help="a .toml file that is not there yet; without it, print it")
    new.add_argument("--env", metavar="NAME", help="the environment (default: GuessNumber)")
    new.add_argument("--model", metavar="BASE", help=f"model.base (default: {_TINY})")
    new.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="an argument of the environment; may be given often",
    )
    new.add_argument("--label", metavar="LABEL", help="the run's name; without it, the file's")
    new.add_argument(
        "--like", metavar="NAME", help="a copy of another file, such as quickstart, with a label of its own"
    )
    new.add_argument("--short", action="store_true", help="only what is set, without comments")
    new.set_defaults(run=new_file)
    check = commands.add_parser("check", help="say everything that is wrong with a file, or what it will do")
    _add_file(check)
    depth = check.add_mutually_exclusive_group()
    depth.add_argument("--deep", action="store_true", help="build everything, too, and play one scripted episode")
    depth.add_argument(
        "--elsewhere", action="store_true", help="the file alone, which is for another machine: not what this one has"
    )
    check.set_defaults(run=check_config)
    show = commands.add_parser("show", help="print a file with all keys, marking those that it leaves to defaults")
    _add_file(show)
    show.set_defaults(run=show_config)
    reference = commands.add_parser("reference", help="print the table of all keys (configs/README.md)")
    reference.set_defaults(run=print_reference)
    parameters = commands.add_parser("parameters", help="print other trainers' keys (configs/recipes/PARAMETERS.md)")
    parameters.set_defaults(run=print_parameters)
    _add_translators(commands)


def new_file(arguments: argparse.Namespace) -> int:
    """Write or print a configuration that is valid without changes."""

    path: Path | None = arguments.file
    if path is not None and (path.suffix != ".toml" or path.exists()):
        reason = "there is such a file already" if path.exists() else "expected a file that ends in .toml"
        raise ConfigError(f"{path}: {reason}; choose another name")
    label = arguments.label or re.sub(r"[^\w.-]+", "-", path.stem if path is not None else "my-run")
    text = _text_like(arguments, label) if arguments.like is not None else _text_for(arguments, label)
    RunConfig.from_dict(tomllib.loads(text), source="config new")  # raises before an invalid file is written
    if path is None:
        print(text, end="")
        return 0
    write_output(path, text)
    file = shlex.quote(str(path))
    print(f"written: {path}; `gspo-gym config check {file}` says what it does, `gspo-gym train {file}` does it")
    return 0


def _text_for(arguments: argparse.Namespace, label: str) -> str:
    """Return a configuration for the environment and the model of the arguments."""
    # Which loads gymnasium and torch: checking a file needs neither.
    from gspo_gym.config.build.first_run import first_run

    options = env_config_of(arguments.option)
    settings = first_run(arguments.env or "GuessNumber", model=arguments.model or _TINY, label=label, options=options)
    write = short_config if arguments.short else new_config
    return write(settings.sections, settings.notes)


def _text_like(arguments: argparse.Namespace, label: str) -> str:
    """Return the text of the TOML file `--like`, with this label.

    Raises:
        UsageError: there are options that a copy does not have. ConfigError: there is no such file, or it is no TOML.
    """
    if arguments.env or arguments.model or arguments.option:
        raise UsageError("config new: --like copies a file as it is; leave --env, --model and --option away")
    path = config_file(arguments.like)
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: expected a file that ends in .toml")
    read_file(path)  # says what is wrong with it
    text = re.sub(r'^label = "[^"]*"', f'label = "{label}"', path.read_text(encoding="utf-8"), count=1, flags=re.M)
    if arguments.short:
        text = re.sub(r"^#.*\n\n?", "", text, flags=re.M)
    return text


def check_config(arguments: argparse.Namespace) -> int:
    """Print the resolved run and everything that prevents its start; return 0 if it would start, else 1.

    An invalid file is one error that lists all its problems.
    """
    config, gpus = load_config(arguments.file, arguments.overrides), None
    if arguments.elsewhere:
        config, gpus = with_all_gpus(config, 0)
        obstacles = missing_machinery(config.sections)
    else:
        from gspo_gym.config.build.preflight import find_obstacles
        from gspo_gym.config.build.trainer import on_visible_gpus

        config, gpus = on_visible_gpus(config)
        obstacles = [str(obstacle) for obstacle in run_to_end(find_obstacles(config))]
    print(f"{'VALID' if not obstacles else 'VALID, BUT IT CANNOT RUN'}: {arguments.file}")
    _print_plan(config)
    if gpus is not None:
        print(f"note: {gpus}")
    for obstacle in obstacles:
        print(f"cannot run: {obstacle}")
    if not arguments.elsewhere:
        from gspo_gym.run.registry import why_taken  # loads gymnasium

        if reason := why_taken(config.run_folder):
            print(f"note: {reason}")
    if arguments.deep and not obstacles:
        _rehearse(config)
    return 1 if obstacles else 0


def _print_plan(config: RunConfig) -> None:
    size = config.size
    steps = "step" if size.steps_per_iteration == 1 else "steps"
    print(
        f"{size.num_iterations} iterations of {size.episodes_per_batch} episodes (groups of "
        f"{config.training.group_size}), {size.steps_per_iteration} optimizer {steps} each, "
        f"{size.num_optimizer_steps} in all; written to {config.run_folder}"
    )
    # The policy that sampled is then the policy that is updated.
    if size.steps_per_iteration == 1:
        print("note: with one optimizer step per iteration the ratio is 1 everywhere, and no clip acts")
    for notice in config.notices:
        print(f"note: {notice.key}: {notice.text}")


def _rehearse(config: RunConfig) -> None:
    """Build everything and play one scripted episode of each environment; print a line for each, and the estimate."""
    from gspo_gym.config.build.preflight import rehearse

    rehearsal = run_to_end(rehearse(config))
    for line in rehearsal.notes:
        print(f"built: {line}")
    for episode in rehearsal.episodes:
        print(
            f"played: {episode.task.env_id}, a scripted episode of {len(episode.turns)} turns, "
            f"{episode.outcome.value}, return {sum(turn.reward or 0.0 for turn in episode.turns):g}"
        )
    if rehearsal.estimate is not None:
        print(f"estimate: {rehearsal.estimate}")


def show_config(arguments: argparse.Namespace) -> int:
    """Print the resolved configuration as TOML that reads back to an equal one."""
    config = load_config(arguments.file, arguments.overrides)
    print(resolved(config, load_sections(arguments.file, arguments.overrides)), end="")
    return 0


def print_reference(_: argparse.Namespace) -> int:
    """Print the text of configs/README.md."""
    print(reference(), end="")
    return 0


def print_parameters(_: argparse.Namespace) -> int:
    """Print the text of configs/recipes/PARAMETERS.md."""
    print(parameters(), end="")
    return 0


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help=_FILE_HELP)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings from the command line; None: what the file says, or a placeholder, with a note.

    Attributes:
        model, label: where the file names none.
        env, iterations, max_turns: over the file's.
        devices: of the other trainer, where the file has sizes per device and not their number.
    """

    env: str | None = None
    model: str | None = None
    label: str | None = None
    iterations: int | None = None
    max_turns: int | None = None
    devices: int = 1


def translate(system: str, values: Mapping[str, Any], wanted: Wanted | None = None) -> Translation:
    """Translate settings of another system; fill what such a file does not hold with placeholders.

    Args:
        system: a key of `SYSTEMS`.
        values: the file as read (Any: unchecked).
        wanted: settings of the command line.

    Raises:
        ConfigError: a value has the wrong type, or the other system itself would refuse it.
    """
    foreign_system, wanted = SYSTEMS[system], wanted or Wanted()
    draft = foreign_system.draft(values, model=wanted.model, devices=wanted.devices)
    _complete(draft, wanted)
    return draft.finish()


def _add_translators(commands: Any) -> None:
    """Add a `from-...` command for each system to the subparsers of `gspo-gym config`."""
    for key, system in SYSTEMS.items():
        text = f"translate settings of {system.name} and say what changes"
        status = "The exit status is 1 if keys were left out, or if the result is not valid yet."
        parser = commands.add_parser(f"from-{key}", help=text, epilog=status)
        parser.add_argument("file", type=Path, help="YAML, JSON or TOML")
        parser.add_argument("--env", help="the environment to train on")
        parser.add_argument("--model", help="the model, where the file names none")
        parser.add_argument("--label", help="the run's name, where the file has none")
        parser.add_argument("--iterations", type=int, help="batches of episodes per epoch")
        parser.add_argument("--max-turns", type=int, help="turns per episode (default: 1, or what the file says)")
        parser.add_argument(
            "--devices",
            type=int,
            default=1,
            metavar="N",
            help="devices there, each with its sizes per device, where the file does not say (default: 1)",
        )
        parser.add_argument("--output", type=Path, help="write the TOML here and not to the standard output")
        parser.set_defaults(run=_translate_file, system=key)


def _translate_file(arguments: argparse.Namespace) -> int:
    """Write the TOML; return 0 if everything was translated, 1 if keys were left out or the result is not valid yet."""
    options = Wanted(**{field.name: getattr(arguments, field.name) for field in fields(Wanted)})
    translation = translate(arguments.system, read_file(arguments.file), options)
    text = to_toml(translation, source=f"{SYSTEMS[arguments.system].name}, {arguments.file}")
    if arguments.output is None:
        print(text, end="")
    else:
        write_output(arguments.output, text)
        file = shlex.quote(str(arguments.output))
        print(f"written: {file}; its head says what changes in meaning, `gspo-gym config check {file}` what it does")
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


def _complete(draft: Draft, options: Wanted) -> None:
    """Set what the options ask for, then fill the rest with placeholders."""
    draft.set("rollout.env_name", options.env)
    label = None if options.label is None else label_of(options.label)
    for ours, value in {"model.base": options.model, "model.label": label}.items():
        theirs = draft.source_of(ours)
        if theirs is None:
            draft.set(ours, value)
        elif value is not None:
            draft.note(f"{value!r} of the command line is not used: the file has {theirs} = {draft.get(theirs)!r}")
    draft.set("training.iterations_per_epoch", options.iterations)
    draft.set("rollout.max_turns", options.max_turns)
    for ours, placeholder in _PLACEHOLDERS.items():
        if draft.fill(ours, placeholder):
            draft.note(f"{ours} = {placeholder!r} is a placeholder: the file does not say")
    draft.fill("model.label", f"from-{label_of(draft.name.lower())}")
    draft.fill("evaluation.seeds", "0:100")

"""`gspo-gym cluster check | table`: whether a run has room on several GPUs and machines, without starting anything."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gspo_gym.cluster.memory import SHAPES, ModelShape
from gspo_gym.cluster.paper import table
from gspo_gym.config.machines import check, describe, machines_of, parse_nodes
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `cluster`."""
    commands = parser.add_subparsers(dest="cluster_command", required=True, metavar="COMMAND")
    checking = commands.add_parser(
        "check", help="say where the parts of a run stand, what they take, what does not fit"
    )
    checking.add_argument("file", help="a TOML, YAML or JSON file; configs/ holds examples")
    checking.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")
    checking.add_argument(
        "--nodes",
        action="append",
        metavar="NODESxGPUS[:GPU[:CORES[:MEMORY]]]",
        help="machines, such as 8x8:80GiB; once for each kind (default: those of [compute])",
    )
    checking.add_argument("--json", action="store_true", help="print it as JSON")
    checking.set_defaults(run=check_file)
    printing = commands.add_parser("table", help="print the table of named models on 8, 64 and 512 GPUs (README.md)")
    printing.set_defaults(run=print_table)


def check_file(arguments: argparse.Namespace) -> int:
    """Print where everything would stand and what it would take; return 0 if it fits, else 1."""
    config = load_config(arguments.file, arguments.overrides)
    machines = parse_nodes(arguments.nodes or (), machines_of(config))
    paper = check(config, shape_of(config), machines)
    if arguments.json:
        print(json.dumps(paper.to_dict(), indent=2))
    else:
        print(f"{'DOES NOT FIT' if paper.problems else 'FITS'}: {arguments.file}")
        print("\n".join(describe(paper, config, machines)))
    return 1 if paper.problems else 0


def print_table(_: argparse.Namespace) -> int:
    """Print the table of gspo_gym/cluster/README.md."""
    print(table(), end="")
    return 0


def shape_of(config: RunConfig) -> ModelShape:
    """Return the sizes of model.base, from its name, its folder or the hub's cache; nothing is downloaded.

    Raises:
        ConfigError: they are not known here, or of a kind that is not counted.
    """
    base = config.model.base or ""
    named = {name.lower(): shape for name, shape in SHAPES.items()}
    if (shape := named.get(base.rpartition("/")[2].lower())) is not None:
        return shape
    if base.startswith("tiny:"):
        from gspo_gym.policy.tiny import build_tiny, parse_tiny

        return ModelShape.from_config(build_tiny(parse_tiny(base)[0], 0).config.to_dict())
    path = Path(base or _source_folder(config)).expanduser() / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(base, "config.json") if base.count("/") == 1 else None
        if not isinstance(found, str):
            raise ConfigError(
                f"model.base: the sizes of {base or str(path.parent)!r} are not known here: expected a folder with "
                f"config.json, a model in the hub's cache, or one of {', '.join(SHAPES)}"
            )
        path = Path(found)
    return ModelShape.from_config(json.loads(path.read_text(encoding="utf-8")))


def _source_folder(config: RunConfig) -> str:
    from gspo_gym.config.build.trainer import model_name

    return model_name(config)

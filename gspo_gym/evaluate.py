"""`python -m gspo_gym.evaluate CONFIG.toml --model PATH --seeds 0:100`: how good is a model over seeded episodes?

The config says which environment and limits; `--model` which weights (any [model] base: a checkpoint's folder, a hub
id, tiny:NAME, or `scripted:NAME` for a policy that the environment brings along). `--against` plays a second model on
the same seeds and compares pair by pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo_gym.config.run_config import RunConfig
    from gspo_gym.evaluation import Evaluation

_SCRIPTED = "scripted:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `evaluate`."""
    parser.add_argument("config", help="the TOML file that names the environment and its limits")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")
    parser.add_argument("--model", metavar="BASE", help="which weights; without it, model.base of the config")
    parser.add_argument("--against", metavar="BASE", help="a second model on the same seeds, compared pair by pair")
    parser.add_argument("--seeds", metavar="SEEDS", help='such as "0:100"; without it, those of [evaluation]')
    parser.add_argument("--json", metavar="FILE", dest="json_file", help='write all results there; "-" prints them')
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the `evaluate` command; 0 when every model was evaluated."""
    from rich.console import Console

    from gspo_gym import build
    from gspo_gym.config.run_config import load_config
    from gspo_gym.evaluation import compare, comparison_table, evaluation_table
    from gspo_gym.settings import parse_seeds

    overrides = list(arguments.overrides)
    if arguments.seeds is not None:
        overrides += [f"evaluation.seeds={json.dumps(arguments.seeds)}"]
        overrides += [f"evaluation.instances={len(parse_seeds(arguments.seeds))}"]
    config = load_config(arguments.config, overrides)
    names = [arguments.model or build.model_name(config)] + ([arguments.against] if arguments.against else [])
    results = {name: run_evaluation(config, name) for name in names}
    answer: dict[str, Any] = {"evaluations": {name: result.to_dict() for name, result in results.items()}}
    comparison = None
    if arguments.against:
        comparison = compare(results[arguments.against], results[names[0]])
        answer["comparison"] = comparison.to_dict()
    if arguments.json_file == "-":
        print(json.dumps(answer, indent=2))
        return 0
    console = Console()
    console.print(evaluation_table(results))
    if comparison is not None:
        console.print(comparison_table(comparison, first=arguments.against, second=names[0]))
    if arguments.json_file is not None:
        Path(arguments.json_file).write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    return 0


def run_evaluation(config: RunConfig, model: str | None = None) -> Evaluation:
    """Evaluate one model (or `scripted:NAME`) over the config's evaluation seeds; None: model.base of the config.

    Raises:
        UnknownNameError: no such model or scripted policy.
        RolloutError: no episode could be scored.
    """
    from gspo_gym import build
    from gspo_gym.models import load_policy
    from gspo_gym.seeding import child_seed

    name = model or build.model_name(config)
    base = build.model_name(config) if name.startswith(_SCRIPTED) else name
    seed = child_seed(config.run.seed, "model")
    is_untrained_qlora = config.model.trainer_mode == "qlora" and base == build.model_name(config)
    policy = load_policy(
        base,
        dtype=config.model.dtype,
        device=build.device_of(config),
        seed=seed,
        quantization=config.model.quantization if is_untrained_qlora else "as_saved",
    )

    async def play() -> Evaluation:
        player = await build.build_player(config, policy)
        try:
            if name.startswith(_SCRIPTED):
                return await build.build_scripted_evaluate(config, player, name.removeprefix(_SCRIPTED))(name)
            return await build.build_evaluate(config, player)(name)
        finally:
            await player.engine.close()

    return asyncio.run(play())


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m gspo_gym.evaluate`."""
    from gspo_gym.command_line import parse_and_run

    parser = argparse.ArgumentParser(
        prog="python -m gspo_gym.evaluate", description="Evaluate a model over seeded episodes."
    )
    add_arguments(parser)
    return parse_and_run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

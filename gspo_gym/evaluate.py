"""`python -m gspo_gym.evaluate CONFIG.toml --model PATH --seeds 0:100`: how good is a model over seeded episodes?

The config says which environment and limits; `--model` which weights (any [model] base: a checkpoint's folder, a hub
id, tiny:NAME, `scripted:NAME` for a policy that the environment brings along, or `openai:MODEL@URL` for one behind an
OpenAI-compatible chat route). `--against` plays a second model on the same seeds and compares pair by pair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.files import require_writable, write_output
from gspo_gym.loops import run_to_end
from gspo_gym.train import add_task_url

if TYPE_CHECKING:
    from gspo_gym.config.run_config import RunConfig
    from gspo_gym.env.core import PolicyFactory
    from gspo_gym.evaluation import Evaluation

_SCRIPTED, _ENDPOINT = "scripted:", "openai:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `evaluate`."""
    parser.add_argument("config", help="the TOML file that names the environment and its limits")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")
    who = "the folder of a run or a checkpoint, a hub id, scripted:NAME of the environment, or openai:MODEL[@URL]"
    parser.add_argument("--model", metavar="BASE", help=f"{who}; without it, model.base of the config")
    parser.add_argument("--against", metavar="BASE", help="a second model on the same seeds, compared pair by pair")
    parser.add_argument("--seeds", metavar="SEEDS", help='such as "0:100"; without it, those of [evaluation]')
    add_task_url(parser)
    parser.add_argument("--json", metavar="FILE", dest="json_file", help='write all results there; "-" prints them')
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Run the `evaluate` command; 0 when every model was evaluated."""
    from rich.console import Console

    from gspo_gym import build
    from gspo_gym.config.apps import with_task_url
    from gspo_gym.config.run_config import load_config
    from gspo_gym.evaluation import compare, comparison_table, evaluation_table, in_one_unit
    from gspo_gym.settings import parse_seeds

    if arguments.json_file not in (None, "-"):
        require_writable(Path(arguments.json_file))
    overrides = list(arguments.overrides)
    if arguments.seeds is not None:
        overrides += [f"evaluation.seeds={json.dumps(arguments.seeds)}"]
        overrides += [f"evaluation.instances={len(parse_seeds(arguments.seeds))}"]
    config = load_config(arguments.config, with_task_url(overrides, arguments.task_url, os.environ))
    names = [arguments.model or build.model_name(config)] + ([arguments.against] if arguments.against else [])
    results = in_one_unit({name: run_evaluation(config, name) for name in names})
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
        write_output(Path(arguments.json_file), json.dumps(answer, indent=2) + "\n")
    return 0


def run_evaluation(config: RunConfig, model: str | None = None) -> Evaluation:
    """Evaluate one model, `scripted:NAME` or `openai:MODEL[@URL]` over the config's seeds; None: the config's model.

    Raises:
        UnknownNameError: no such model or scripted policy.
        RolloutError: no episode could be scored.
    """
    from gspo_gym import build

    name = build.newest_checkpoint(model or build.model_name(config))
    if name.startswith((_SCRIPTED, _ENDPOINT)):
        return run_to_end(_play_without_engine(config, name))
    return run_to_end(_play_with_engine(config, name))


async def _play_with_engine(config: RunConfig, name: str) -> Evaluation:
    from gspo_gym import build
    from gspo_gym.build_judge import build_judging
    from gspo_gym.models import load_policy
    from gspo_gym.seeding import child_seed

    is_untrained_qlora = config.model.trainer_mode == "qlora" and name == build.model_name(config)
    policy = load_policy(
        name,
        dtype=config.model.dtype,
        device=build.device_of(config),
        seed=child_seed(config.run.seed, "model"),
        quantization=config.model.quantization if is_untrained_qlora else "as_saved",
    )
    async with contextlib.AsyncExitStack() as stack:
        player = await build.build_player(config, policy)
        stack.push_async_callback(player.close)
        judging = build_judging(config, None if player.apps is None else player.apps.rubric_of)
        if judging is not None:
            stack.push_async_callback(judging.close)
        await player.start()
        return await build.build_evaluate(config, player, judging=judging)(name)


async def _play_without_engine(config: RunConfig, name: str) -> Evaluation:
    """By players that speak in messages: hand-written ones, and models behind an endpoint's chat route."""
    from gspo_gym import build
    from gspo_gym.build_judge import build_judging
    from gspo_gym.config.services import refuse_to_run
    from gspo_gym.env.chat_model import ChatModel
    from gspo_gym.episode_collection import chat_policy, endpoint_settings
    from gspo_gym.models import load_tokenizer

    refuse_to_run(config.sections)
    renderers = build.build_renderers(config, load_tokenizer(build.model_name(config)))  # counts tokens for the limits
    async with contextlib.AsyncExitStack() as stack:
        judging = build_judging(config)
        if judging is not None:
            stack.push_async_callback(judging.close)
        who: str | PolicyFactory = name.removeprefix(_SCRIPTED)
        if not name.startswith(_SCRIPTED):
            limit, temperature = config.rollout.max_output_tokens, config.evaluation.temperature
            model = ChatModel(endpoint_settings(name, temperature=temperature, max_tokens=limit))
            stack.push_async_callback(model.close)
            who = chat_policy(model)
        evaluate = await build.build_scripted_evaluate(config, renderers, who, judging)
        return await evaluate(name)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m gspo_gym.evaluate`."""
    from gspo_gym.command_line import Parser, parse_and_run

    parser = Parser(prog="python -m gspo_gym.evaluate", description="Evaluate a model over seeded episodes.")
    add_arguments(parser)
    return parse_and_run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

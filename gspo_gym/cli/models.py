"""`gspo-gym models ...`: list, show, export, merge, push, talk with and serve what runs have trained, and other models.

Every MODEL argument takes a run (its folder, its name in --folder, or its id) for its newest checkpoint, RUN@best for
the checkpoint with the best evaluation, RUN@20 for that of step 20, a checkpoint's folder, or any `model.base`.

Listing takes half a second: what computes, or serves, is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.settings import read_key
from gspo_gym.cli import models_serve
from gspo_gym.cli.command_line import RUNS_OWN, package_version
from gspo_gym.errors import UsageError
from gspo_gym.policy.manifest import verify

if TYPE_CHECKING:
    from gspo_gym.policy.export import Weights
    from gspo_gym.run.models import Model

_MODEL = "RUN, RUN@best, RUN@STEP, a folder, a GGUF file, a hub id (OWNER/NAME[@REVISION]), smollm2, or tiny:NAME"
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `models`."""
    commands = parser.add_subparsers(dest="models_command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="the checkpoints of all runs, with their evaluations")
    _add_runs(listing)
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    listing.set_defaults(run=list_command)

    show = commands.add_parser("show", help="one model: size, context, template; of a run also evaluation and lineage")
    _add_model(show)
    show.add_argument("--json", action="store_true", help="print one JSON object")
    show.set_defaults(run=show_command)

    export = commands.add_parser("export", help="write a transformers folder, or a PEFT folder of a LoRA, with a card")
    _add_export(export, "of the weights (default: as they are)")
    export.set_defaults(run=export_command, is_merged=False)
    merge = commands.add_parser("merge", help="write a LoRA merged into its base, as a transformers folder with a card")
    _add_export(merge, "of the weights (default: in which the run trained)")
    merge.set_defaults(run=export_command, is_merged=True)

    push = commands.add_parser("push", help="push an exported folder to the hub (HF_ENDPOINT may name another)")
    push.add_argument("folder", type=Path, help="that `export` or `merge` wrote")
    push.add_argument("repo", metavar="OWNER/NAME", help="made if missing")
    push.add_argument("--private", action="store_true", help="if it is made")
    push.add_argument("--token-env", metavar="NAME", help="variable with the token (default: HF_TOKEN, or the login's)")
    push.set_defaults(run=push_command)

    chat = commands.add_parser("chat", help="talk with a model, or watch it play an environment")
    _add_model(chat)
    add_chat_arguments(chat)
    serve = commands.add_parser("serve", help="serve a model over OpenAI's protocol")
    _add_model(serve)
    models_serve.add_arguments(serve)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    _add_runs(parser)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where runs are (runs)")


def _add_export(parser: argparse.ArgumentParser, dtype_help: str) -> None:
    _add_model(parser)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--dtype", choices=_DTYPES, help=dtype_help)
    parser.add_argument("--force", action="store_true", help="replace what is in the folder")


def list_command(arguments: argparse.Namespace) -> int:
    """Print all complete checkpoints."""
    from gspo_gym.base.tables import table
    from gspo_gym.run.models import list_models

    models = [{**model.to_json(), "marks": sorted(marks)} for model, marks in list_models(arguments.folder)]
    rows = [(m["name"], " ".join(m["marks"]), str(m["base"] or ""), *_score(m["evaluation"])) for m in models]
    if arguments.json:
        print(json.dumps(models, indent=2))
    elif models:
        print(table(("model", "", "base", "score", "95% interval", "episodes"), rows))
    else:
        print(f"{arguments.folder}: no run there has a checkpoint")
    return 0


def show_command(arguments: argparse.Namespace) -> int:
    """Compare a model's files with its manifest, if it has one; print what is known of the model, and its card."""
    from gspo_gym.policy.bases import CARD
    from gspo_gym.policy.facts import facts_of
    from gspo_gym.run.models import find_model, lineage_in_card

    model = find_model(arguments.model, runs=arguments.folder)
    about, folder = model.to_json(), Path(model.base).expanduser()
    if model.run is not None:
        # Only checkpoints of runs have a manifest.
        about["files"] = dict(verify(folder).files)
    lineage = lineage_in_card(folder) if model.run is None else f"run `{model.run}`, checkpoint of step {model.step}"
    facts = facts_of(model.base)
    if arguments.json:
        print(json.dumps({**about, **facts.to_json(), "trained_here": lineage}, indent=2))
        return 0
    print(f"{model.name}: {model.base}" + (", every file as its manifest says" if model.run else ""))
    for word, text in (*facts.lines(), ("trained here", lineage or "not by any run that is known of it")):
        print(f"  {word:<13} {text}")
    if model.run is not None:
        print("\n" + card_of(model).split("---\n", 2)[2].strip())  # without the hub's metadata, which say the same
    elif (folder / CARD).is_file():
        print(f"  {'card':<13} {folder / CARD}")
    return 0


def card_of(model: Model) -> str:
    """Return the card of a run's checkpoint as it lies there, with the hub's metadata first.

    Raises:
        CheckpointError: its files are not those of its manifest.
    """
    from gspo_gym.policy.bases import layout_of
    from gspo_gym.policy.export import Weights
    from gspo_gym.run.models import model_card

    folder = Path(model.base).expanduser()
    files = verify(folder).files
    names = (name for name in files if name.endswith(".safetensors") and not name.startswith("resume/"))
    digests = {name: files[name]["sha256"] for name in names}
    return model_card(model, Weights(layout_of(folder), None, None, digests), version=package_version())


def export_model(name: str, target: Path, *, runs: Path, **options: Any) -> tuple[Model, Weights]:
    """Write a model with its card into a folder; `options` (Any) and errors are those of `policy.export.export`."""
    from gspo_gym.config.build.threads import computing_elsewhere
    from gspo_gym.policy.export import export
    from gspo_gym.run.models import find_model, model_card

    model = find_model(name, runs=runs)
    describe = partial(model_card, model, version=package_version())
    with computing_elsewhere("cpu"):
        return model, export(model.base, target, describe=describe, load_dtype=model.dtype, **options)


def export_command(arguments: argparse.Namespace) -> int:
    """Export the model; print where it is and what it holds."""
    options = {"is_merged": arguments.is_merged, "dtype": arguments.dtype, "force": arguments.force}
    model, weights = export_model(arguments.model, arguments.out, runs=arguments.folder, **options)
    merge_text = "merged, " if weights.merged_from else ""
    dtype = weights.dtype or "as in the checkpoint"
    print(f"{model.name}: {merge_text}{weights.layout} layout, dtype {dtype} -> {arguments.out}")
    return 0


def push_command(arguments: argparse.Namespace) -> int:
    """Push an exported folder; print the repository's URL."""
    from gspo_gym.policy.export import push

    if not arguments.folder.is_dir():
        raise UsageError(f"{arguments.folder}: expected a folder that `gspo-gym models export` or `merge` wrote")
    token = read_key(arguments.token_env, "--token-env")
    print(push(arguments.folder, arguments.repo, is_private=arguments.private, token=token))
    return 0


def _score(evaluation: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Return the table's cells for the score, its interval and its number of episodes."""
    if evaluation is None:
        return "", "", ""
    name = evaluation["score"]
    interval = evaluation.get("success_interval" if name == "success_rate" else "mean_return_interval")
    ends = "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
    return f"{name.replace('_', ' ')} {evaluation[name]:.3f}", ends, str(evaluation["num_episodes"])


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `models chat`, besides the model."""
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    models_serve.add_sampling(parser)
    parser.add_argument("--max-tokens", type=int, help="of one answer (default 512, or the run's in its environment)")
    parser.add_argument("--seed", type=int, help="of the sampling, and the task (default: 0 to play, any to talk)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights (default: as the run)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    play = parser.add_argument_group("to play an environment: Enter lets the model act, a line of yours acts for it")
    play.add_argument("--env", nargs="?", const=RUNS_OWN, metavar="NAME", help="without NAME: that of the model's run")
    play.add_argument("--option", action="append", default=[], metavar="KEY=JSON", help="of the environment")
    play.add_argument("--max-turns", type=int, help="(default 20, or the run's)")
    parser.set_defaults(run=chat_command)


def chat_command(arguments: argparse.Namespace, read: Callable[[str], str] = input) -> int:
    """Talk or play until the input ends, /quit, or the end of the episode."""
    from gspo_gym.cli.models_chat import chat

    chat(arguments, read)
    return 0

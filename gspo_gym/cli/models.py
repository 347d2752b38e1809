"""`gspo-gym models ...`: list, show, export, merge, push, talk with and serve what runs have trained.

Every MODEL argument takes a run (its folder, its name in --folder, or its id) for its newest checkpoint, RUN@best for
the checkpoint with the best evaluation, RUN@20 for that of step 20, a checkpoint's folder, or any `model.base`.

`chat` works at a terminal and behind a pipe; with `--env` the model plays an environment.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.loops import run_to_end
from gspo_gym.base.settings import read_key
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.cli import models_serve
from gspo_gym.cli.command_line import env_config_of, package_version
from gspo_gym.cli.env import as_sampled
from gspo_gym.cli.models_serve import running_engine
from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import EnvSession
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import ContextOverflowError, RecordError, TemplateError, UsageError
from gspo_gym.policy.manifest import verify
from gspo_gym.remote.gateway.capture import ChatCall
from gspo_gym.remote.gateway.session import GatewaySession, GatewaySessionSettings
from gspo_gym.remote.gateway.slices import GrowingText, SlicedEngine
from gspo_gym.rollout.actors import scripted_completion
from gspo_gym.rollout.adapter import TokenObservationWrapper
from gspo_gym.seeding import child_seed
from gspo_gym.types import Completion, Message, Sampling

if TYPE_CHECKING:
    from gspo_gym.run.models import Model

_MODEL = "RUN, RUN@best, RUN@STEP, a checkpoint's folder, a hub id, or tiny:NAME"
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `models`."""
    commands = parser.add_subparsers(dest="models_command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="the checkpoints of all runs, with their evaluations")
    _add_runs(listing)
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    listing.set_defaults(run=list_command)

    show = commands.add_parser("show", help="one model: its files verified, evaluation and lineage")
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
    from rich.console import Console
    from rich.table import Table

    from gspo_gym.run.models import list_models

    found = list_models(arguments.folder)
    if arguments.json:
        print(json.dumps([{**model.to_json(), "marks": sorted(marks)} for model, marks in found], indent=2))
        return 0
    if not found:
        print(f"{arguments.folder}: no run there has a checkpoint")
        return 0
    table = Table("model", "", "base", "score", "95% interval", "episodes")
    for model, marks in found:
        about = model.to_json()
        table.add_row(model.name, " ".join(sorted(marks)), str(about["base"] or ""), *_score(about["evaluation"]))
    Console().print(table)
    return 0


def show_command(arguments: argparse.Namespace) -> int:
    """Compare a model's files with its manifest, then print it."""
    from gspo_gym.policy.export import CARD, Weights, layout_of
    from gspo_gym.run.models import find_model, model_card

    model = find_model(arguments.model, runs=arguments.folder)
    about = model.to_json()
    digests: dict[str, str] = {}
    if model.run is not None:
        # Only checkpoints of runs have a manifest.
        files = verify(Path(model.base)).files
        about["files"] = dict(files)
        names = (name for name in files if name.endswith(".safetensors") and not name.startswith("resume/"))
        digests = {name: files[name]["sha256"] for name in names}
    if arguments.json:
        print(json.dumps(about, indent=2))
        return 0
    folder = Path(model.base).expanduser()
    if not folder.is_dir():
        print(f"{model.base}: no folder here; `models export` loads it")
        return 0
    print(f"{model.name}: {model.base}" + (", every file as its manifest says" if model.run else ""))
    if (folder / CARD).is_file() and model.run is None:
        print((folder / CARD).read_text(encoding="utf-8"))
        return 0
    weights = Weights(layout_of(folder), None, None, digests)
    card = model_card(model, weights, version=package_version())
    print(card.split("---\n", 2)[2].strip())  # without the hub's metadata, which say the same
    return 0


def export_command(arguments: argparse.Namespace) -> int:
    """Export the model; print where it is and what it holds."""
    from gspo_gym.config.build.threads import computing_elsewhere
    from gspo_gym.policy.export import export
    from gspo_gym.run.models import find_model, model_card

    model = find_model(arguments.model, runs=arguments.folder)
    with computing_elsewhere("cpu"):
        weights = export(
            model.base,
            arguments.out,
            describe=lambda weights: model_card(model, weights, version=package_version()),
            is_merged=arguments.is_merged,
            dtype=arguments.dtype,
            load_dtype=model.dtype,
            force=arguments.force,
        )
    what = "merged, " if weights.merged_from else ""
    dtype = weights.dtype or "as in the checkpoint"
    print(f"{model.name}: {what}{weights.layout} layout, dtype {dtype} -> {arguments.out}")
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
    told = "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
    return f"{name.replace('_', ' ')} {evaluation[name]:.3f}", told, str(evaluation["num_episodes"])


_RUNS_OWN = ""  # what `--env` without a name means
_MAX_LEN = 4096  # tokens of a conversation, unless the model reads fewer
_HELP = "/reset forgets the conversation, /quit ends"

Read = Callable[[str], str]


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `models chat`, besides the model."""
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default 1, or the run's)")
    parser.add_argument("--top-p", type=float, help="sample from the fewest tokens of this probability (default 1)")
    parser.add_argument("--max-tokens", type=int, help="of one answer (default 512, or the run's in its environment)")
    parser.add_argument("--seed", type=int, help="of the sampling, and the task (default: 0 to play, any to talk)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights (default: as the run)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    play = parser.add_argument_group("to play an environment: Enter lets the model act, a line of yours acts for it")
    play.add_argument("--env", nargs="?", const=_RUNS_OWN, metavar="NAME", help="without NAME: that of the model's run")
    play.add_argument("--option", action="append", default=[], metavar="KEY=JSON", help="of the environment")
    play.add_argument("--max-turns", type=int, help="(default 20, or the run's)")
    parser.set_defaults(run=chat_command)


@dataclass(frozen=True, slots=True)
class _Game:
    """An environment to play: its name, constructor's arguments (JSON) and limit of turns."""

    name: str
    config: dict[str, Any]
    max_turns: int


def chat_command(arguments: argparse.Namespace, read: Read = input) -> int:
    """Talk or play until the input ends, /quit, or the end of the episode."""
    from gspo_gym.run.models import find_model

    model = find_model(arguments.model, runs=arguments.folder)
    game = None if arguments.env is None else _game(model, arguments)
    if game is None and (arguments.option or arguments.max_turns is not None):
        raise UsageError("--option and --max-turns: expected only with --env")
    run_to_end(_talk(model, arguments, read) if game is None else _play(model, game, arguments, read))
    return 0


def _game(model: Model, arguments: argparse.Namespace) -> _Game:
    rollout = model.config.get("rollout", {})
    is_own = arguments.env == _RUNS_OWN
    if is_own and "env_name" not in rollout:
        raise UsageError(f"--env: {model.name} is of no run, which would say what it plays: name the environment")
    options = env_config_of(arguments.option)
    config = {**rollout.get("env_config", {}), **options} if is_own else options
    turns = arguments.max_turns or (rollout.get("max_turns", 20) if is_own else 20)
    return _Game(rollout["env_name"] if is_own else arguments.env, config, turns)


class _Conversation:
    """A conversation with a model; shows each answer while it is sampled.

    Args:
        engine, renderers, settings: of the session.
        opening: messages before the person's first one.
    """

    def __init__(
        self, engine: Engine, renderers: RendererCache, settings: GatewaySessionSettings, opening: Sequence[Message]
    ) -> None:
        self._engine, self._renderers, self._settings = engine, renderers, settings
        self._opening = tuple(opening)
        self._messages = self._opening
        self._session: GatewaySession | None = None
        self._text = GrowingText(renderers.for_tools(()))
        self._num_begun = 0

    async def reset(self) -> None:
        """Forget what was said."""
        if self._session is not None:
            await self._session.abort()
        self._session, self._messages = None, self._opening

    async def answer(self, said: str) -> bool:
        """Show the model's answer to `said`; return whether it was cut off.

        Raises:
            ContextOverflowError: there is no room for an answer.
            TemplateError: the chat template refuses the message.
        """
        if self._session is None:
            # Else a conversation after /reset would repeat the samples of the first.
            seed = child_seed(self._settings.sampling_seed, "conversation", self._num_begun)
            self._session = GatewaySession(
                replace(self._settings, sampling_seed=seed),
                engine=SlicedEngine(self._engine, grown=lambda ids: _show(self._text.grow(ids))),
                renderers=self._renderers,
                clock=time.monotonic,
                forget=lambda _: None,
            )
            self._num_begun += 1
        self._text = GrowingText(self._renderers.for_tools(()))
        messages = (*self._messages, Message("user", said))
        call = await self._session.chat(ChatCall(messages))
        _show(self._text.rest(call.answer))
        self._messages = (*messages, call.answer)
        return call.finish_reason == "length"


async def _talk(model: Model, arguments: argparse.Namespace, read: Read) -> None:
    async with _running(model, arguments) as (engine, tokenizer):
        settings = GatewaySessionSettings(
            name="chat",
            sampling_seed=secrets.randbelow(2**31) if arguments.seed is None else arguments.seed,
            max_output_tokens=arguments.max_tokens or 512,
            max_model_len=engine.capabilities.max_model_len,
            sampling=_sampling(arguments),
            # Limits are for training episodes; a person ends a conversation.
            max_calls=2**31,
            max_captured_tokens=2**40,
        )
        renderers = _renderers(model, tokenizer)
        opening = () if arguments.system is None else (Message("system", arguments.system),)
        conversation = _Conversation(engine, renderers, settings, opening)
        print(f"{model.name}: {_HELP}")
        while (said := _read(read, "you> ")) not in (None, "/quit"):
            if said == "/reset":
                await conversation.reset()
                print("forgotten")
                continue
            print("model> ", end="", flush=True)
            try:
                is_cut = await conversation.answer(said or "")
                print(" [cut off at --max-tokens]" if is_cut else "")
            except (ContextOverflowError, TemplateError) as error:
                print(f"\n{type(error).__name__}: {error} (/reset begins anew)")


async def _play(model: Model, game: _Game, arguments: argparse.Namespace, read: Read) -> None:
    async with _running(model, arguments) as (engine, tokenizer):
        env_id = resolve(game.name)
        session = EnvSession(isolated_factory(env_id, game.config)(), env_id=env_id)
        wrapper = TokenObservationWrapper(
            session,
            tokenizer,
            game.max_turns,
            tokenizer.pad_token_id or 0,
            engine.capabilities.max_model_len,
            arguments.max_tokens or model.config.get("rollout", {}).get("max_output_tokens", 512),
            renderer=_renderers(model, tokenizer).for_tools(session.tool_schemas),
            system_prompt=arguments.system or _asked(model).get("system_prompt"),
        )
        try:
            await _play_episode(wrapper, engine, _sampling(arguments), seed=arguments.seed or 0, read=read)
        finally:
            await wrapper.close_async()


async def _play_episode(
    wrapper: TokenObservationWrapper, engine: Engine, sampling: Sampling, *, seed: int, read: Read
) -> None:
    _, info = await wrapper.reset_async(seed)
    _show_messages(info["new_messages"])
    has_input = True
    while wrapper.outcome is None:
        said = _read(read, "Enter: the model acts> ") if has_input else None
        has_input = said is not None  # where the input ends, the model plays on
        if said == "/quit":
            break
        if said:
            sampled = scripted_completion(as_sampled(wrapper, said))
        else:
            sampled = await _sample(wrapper, engine, sampling, seed)
        try:
            _, reward, _, _, info = await wrapper.step_async(sampled)
        except RecordError as error:  # of what a person typed: the turn is still open
            print(error)
            continue
        _show_messages(info["new_messages"])
        print(f"  reward {reward}")
    record = wrapper.episode()
    total = sum(reward for reward in record.rewards if reward is not None)
    print(f"{record.outcome.value if record.outcome else 'stopped'}, return {total:+.3f}")


async def _sample(wrapper: TokenObservationWrapper, engine: Engine, sampling: Sampling, seed: int) -> Completion:
    """Sample the model's action, and show it meanwhile."""
    text = GrowingText(wrapper.renderer, has_tools=bool(wrapper.session.tool_schemas))
    params = SamplingParams.of(
        sampling,
        max_tokens=wrapper.max_tokens,
        stop_token_ids=wrapper.renderer.stop_token_ids,
        seed=child_seed(seed, "turn", wrapper.num_turns),
    )
    print("model> ", end="", flush=True)
    sliced = SlicedEngine(engine, grown=lambda ids: _show(text.grow(ids)))
    sampled = await sliced.generate(wrapper.prompt, params, session_id="play")
    whole = wrapper.renderer.decode(sampled.token_ids)
    print(whole.removeprefix(text.content) if not text.reasoning else f"\n{whole}")
    return sampled


@asynccontextmanager
async def _running(model: Model, arguments: argparse.Namespace) -> AsyncIterator[tuple[Engine, Any]]:
    settings = argparse.Namespace(
        engine="local", dtype=arguments.dtype or "auto", device=arguments.device, max_model_len=_MAX_LEN, max_num_seqs=1
    )
    async with running_engine(model, settings) as running:
        yield running


def _sampling(arguments: argparse.Namespace) -> Sampling:
    top_p = 1.0 if arguments.top_p is None else arguments.top_p
    return Sampling(temperature=1.0 if arguments.temperature is None else arguments.temperature, top_p=top_p)


def _renderers(model: Model, tokenizer: Any) -> RendererCache:
    """Return the renderers of messages (Any: transformers), set as in the run that trained the model."""
    return RendererCache(
        tokenizer,
        template_kwargs=_asked(model).get("chat_template_kwargs"),
        tools_in=model.config.get("rollout", {}).get("tools_in", "auto"),
    )


def _asked(model: Model) -> Mapping[str, Any]:
    """Return the run's [rollout.policy_config] (JSON values)."""
    asked: Mapping[str, Any] = model.config.get("rollout", {}).get("policy_config", {})
    return asked


def _read(read: Read, prompt: str) -> str | None:
    """Return a line, or None at the end of the input."""
    try:
        said = read(prompt).strip()
    except EOFError:
        print()
        return None
    if not sys.stdin.isatty():
        # A terminal shows what is typed; behind a pipe it would be missing from the output.
        print(said)
    return said


def _show(pieces: tuple[str, str]) -> None:
    """Print new pieces of reasoning and content."""
    print("".join(pieces), end="", flush=True)


def _show_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        print(f"{message.role}> {message.content}")

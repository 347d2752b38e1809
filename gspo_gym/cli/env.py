"""`gspo-gym env ...`: work with environments without training. This file has `list` and `play`.

`play` lets a person answer in the model's place and shows, on request, the tokens and the mask that a model would be
given and trained on. `list` loads no torch; `play` loads a tokenizer.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gspo_gym.cli import env_check as env_check_command
from gspo_gym.cli import env_collect as env_collect_command
from gspo_gym.cli import serve_env as serve_command
from gspo_gym.cli.authoring import command as authoring_commands
from gspo_gym.cli.command_line import add_environment, env_config_of
from gspo_gym.rollout.watchdog import seconds_until_frozen, watching

if TYPE_CHECKING:
    from rich.console import Console

    from gspo_gym.rollout.adapter import TokenObservationWrapper
    from gspo_gym.types import Message

_ADVICE = 'The game is ended. Set isolation = "process" in the class of {env}, and what hangs can be ended alone.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `env`."""
    commands = parser.add_subparsers(dest="env_command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="the environments that are registered")
    listing.add_argument("--all", action="store_true", help="Gymnasium's own, too")
    listing.set_defaults(run=list_environments)

    env_check_command.add_command(commands)
    env_collect_command.add_command(commands)
    serve_command.add_command(commands)
    authoring_commands.add_commands(commands)

    play = commands.add_parser("play", help="play in the terminal and see what a model would see")
    add_environment(play)
    play.add_argument("--seed", type=int, default=0, help="which task (default 0, which is held out from training)")
    play.add_argument(
        "--model", default="tiny:qwen3-64", help="whose tokenizer and chat template (default tiny:qwen3-64)"
    )
    play.add_argument("--max-turns", type=int, default=20, help="answers at most (default 20)")
    play.add_argument("--tokens", action="store_true", help="show token ids after every turn")
    play.add_argument("--mask", action="store_true", help="show which tokens would be trained on, in colour")
    play.set_defaults(run=play_environment)


def list_environments(arguments: argparse.Namespace) -> int:
    """Print one line per environment."""
    from gspo_gym.env.registry import list_environments as registered

    for env_id in registered(include_gymnasium=arguments.all):
        print(env_id)
    return 0


def play_environment(arguments: argparse.Namespace, read: Callable[[str], str] = input) -> int:
    """Play one episode from the keyboard; an empty line is an answer, end of input stops."""
    from rich.console import Console

    from gspo_gym.env.registry import resolve
    from gspo_gym.env.workers.isolation import isolated_factory
    from gspo_gym.policy.load import load_tokenizer
    from gspo_gym.rollout.adapter import TokenObservationWrapper

    console = Console()
    tokenizer = load_tokenizer(arguments.model)
    env = isolated_factory(resolve(arguments.name), env_config_of(arguments.option))()
    wrapper = TokenObservationWrapper(
        env,
        tokenizer,
        arguments.max_turns,
        tokenizer.pad_token_id or 0,
        max_model_len=1_000_000,
        max_output_tokens=100_000,
        env_id=resolve(arguments.name),
    )
    with watching(None, seconds_until_frozen(), advice=_ADVICE), wrapper:
        _, info = wrapper.reset(arguments.seed)
        _show_messages(console, info["new_messages"])
        _show_tokens(console, wrapper, tokenizer, tokens=arguments.tokens, mask=arguments.mask)
        while wrapper.outcome is None:
            try:
                said = read("you> ")
            except EOFError:
                break
            _, reward, _, _, info = wrapper.step(_as_sampled(wrapper, said))
            _show_messages(console, info["new_messages"])
            console.print(f"[dim]reward {reward}  {dict(wrapper.episode().turns[-1].reward_terms)}[/dim]")
            _show_tokens(console, wrapper, tokenizer, tokens=arguments.tokens, mask=arguments.mask)
        record = wrapper.episode()
        total = sum(reward for reward in record.rewards if reward is not None)
        console.print(f"[bold]{record.outcome.value if record.outcome else 'stopped'}[/bold], return {total:+.3f}")
    return 0


def _as_sampled(wrapper: TokenObservationWrapper, said: str) -> list[int]:
    """Return the token ids of what was typed; `name(key=value, ...)` calls a tool of the environment."""
    from gspo_gym.types import Message

    call = _tool_call(said, {schema["function"]["name"] for schema in wrapper.session.tool_schemas})
    message = Message("assistant", said) if call is None else Message("assistant", "", tool_calls=(call,))
    return wrapper.renderer.action_ids(message)


def _tool_call(said: str, names: set[str]) -> Any:
    """Parse `query(sql="SELECT 1")` into a ToolCall; None if it is no call of a known tool with literal arguments."""
    from gspo_gym.types import ToolCall

    try:
        node = ast.parse(said.strip(), mode="eval").body
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Name)
            or node.func.id not in names
            or node.args
        ):
            return None
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (SyntaxError, ValueError):
        return None
    return ToolCall(id="call_0", name=node.func.id, arguments=arguments)


def _show_messages(console: Console, messages: tuple[Message, ...]) -> None:
    for message in messages:
        console.print(f"[cyan]{message.role}[/cyan]", end=" ")
        console.print(message.content, markup=False, highlight=False)


def _show_tokens(
    console: Console, wrapper: TokenObservationWrapper, tokenizer: Any, *, tokens: bool, mask: bool
) -> None:
    """Print the current segment as ids, or as text with the trained tokens in green."""
    if not tokens and not mask:
        return
    from rich.text import Text

    segment = wrapper.episode().segments[-1]
    if tokens:
        console.print(f"[dim]{len(segment)} tokens:[/dim] {segment.token_ids.tolist()}", highlight=False)
    if mask:
        text = Text()
        start = 0
        for stop in range(1, len(segment) + 1):  # runs, not single tokens: a character may spread over several
            if stop == len(segment) or segment.action_mask[stop] != segment.action_mask[start]:
                piece = tokenizer.decode(segment.token_ids[start:stop].tolist(), skip_special_tokens=False)
                text.append(piece, style="bold green" if segment.action_mask[start] else "dim")
                start = stop
        console.print(text)
        console.print(f"[dim]trained on: {int(segment.action_mask.sum())} of {len(segment)} tokens (green)[/dim]")

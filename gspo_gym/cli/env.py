"""`gspo-gym env ...`: list, play, check, collect and serve environments without training.

`play` lets a person answer in the model's place; on request it shows the tokens and the training mask. `check` runs the
environment contract and exits with 1 if anything is broken, for use in CI. `collect` writes episodes as JSON lines or
Parquet. `serve` serves an environment as a task app, over OpenEnv's protocol, or both, until SIGTERM or Ctrl-C. Only
`play`, `collect` and `check --model` load torch.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.files import PartFile, write_output
from gspo_gym.base.settings import is_loopback, parse_seeds, read_key
from gspo_gym.cli import authoring
from gspo_gym.cli.command_line import add_environment, base_of, env_config_of, exit_code_of, interrupted_by_signals
from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.registry import entry_of, resolve
from gspo_gym.env.registry import list_environments as registered
from gspo_gym.env.watchdog import seconds_until_frozen, watching
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import MissingExtraError
from gspo_gym.rollout.adapter import TokenObservationWrapper
from gspo_gym.rollout.episode_files import require_writable, save_episodes, trajectory_from_json, trajectory_to_json
from gspo_gym.run.report.progress import counting, mask_text, shortened
from gspo_gym.seeding import FIRST_TRAINING_SEED
from gspo_gym.types import Message, ToolCall, Trajectory

if TYPE_CHECKING:
    from rich.console import Console

    from gspo_gym.config.build.episode_collection import CollectedEpisodes
    from gspo_gym.config.build.token_audit import TokenAudit
    from gspo_gym.remote.serve.task_app_server import ServedEnv

_STEP_TIMEOUT_SECONDS = 30.0  # what `check_env` allows a call; people have no limit
_PLAY_ADVICE = 'The game is ended. Set isolation = "process" in the class of {env}, and what hangs can be ended alone.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `env`."""
    commands = parser.add_subparsers(dest="env_command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="the environments that are registered")
    listing.add_argument("--all", action="store_true", help="Gymnasium's own, too")
    listing.set_defaults(run=list_environments)

    _add_check(commands)
    _add_collect(commands)
    _add_serve(commands)
    authoring.add_commands(commands)

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
    """Print one line per environment: its id, what it is, and for a suite whether its extra is installed."""
    entries = [entry_of(env_id) for env_id in registered(include_gymnasium=arguments.all)]
    width = max(len(entry.env_id) for entry in entries)
    for entry in entries:
        extra = "" if entry.extra is None else f" [{entry.extra}: installed]"
        if entry.missing:
            extra = f" [pip install 'gspo-gym[{entry.extra}]']"
        print(f"{entry.env_id:{width}}  {entry.summary}{extra}".rstrip())
    return 0


def play_environment(arguments: argparse.Namespace, read: Callable[[str], str] = input) -> int:
    """Play one episode from the keyboard; an empty line is an answer, end of input stops."""
    from rich.console import Console

    from gspo_gym.policy.load import load_tokenizer

    console = Console()
    tokenizer = load_tokenizer(base_of(arguments.model))
    env = isolated_factory(resolve(arguments.name), env_config_of(arguments.option))()
    wrapper = TokenObservationWrapper(
        env,
        tokenizer,
        arguments.max_turns,
        tokenizer.pad_token_id or 0,
        max_model_len=1_000_000,  # a person's game is not cut off by a context limit
        max_output_tokens=100_000,
        env_id=resolve(arguments.name),
    )
    with watching(None, seconds_until_frozen(_STEP_TIMEOUT_SECONDS), advice=_PLAY_ADVICE), wrapper:
        _, info = wrapper.reset(arguments.seed)
        _show_messages(console, info["new_messages"])
        _show_tokens(console, wrapper, tokenizer, tokens=arguments.tokens, mask=arguments.mask)
        while wrapper.outcome is None:
            try:
                line = read("you> ")
            except EOFError:
                break
            _, reward, _, _, info = wrapper.step(as_sampled(wrapper, line))
            _show_messages(console, info["new_messages"])
            console.print(f"[dim]reward {reward}  {dict(wrapper.episode().turns[-1].reward_terms)}[/dim]")
            _show_tokens(console, wrapper, tokenizer, tokens=arguments.tokens, mask=arguments.mask)
        record = wrapper.episode()
        total = sum(reward for reward in record.rewards if reward is not None)
        console.print(f"[bold]{record.outcome.value if record.outcome else 'stopped'}[/bold], return {total:+.3f}")
    return 0


def as_sampled(wrapper: TokenObservationWrapper, said: str) -> list[int]:
    """Return the token ids of what was typed; `name(key=value, ...)` calls a tool of the environment."""
    call = _tool_call(said, {schema["function"]["name"] for schema in wrapper.session.tool_schemas})
    message = Message("assistant", said) if call is None else Message("assistant", "", tool_calls=(call,))
    return wrapper.renderer.action_ids(message)


def _tool_call(line: str, names: set[str]) -> Any:
    """Parse `query(sql="SELECT 1")` into a ToolCall; return None unless it calls a known tool with literal keywords."""
    try:
        node = ast.parse(line.strip(), mode="eval").body
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
    segment = wrapper.episode().segments[-1]
    if tokens:
        console.print(f"[dim]{len(segment)} tokens:[/dim] {segment.token_ids.tolist()}", highlight=False)
    if mask:
        console.print(mask_text(segment, tokenizer.decode))
        console.print(f"[dim]trained on: {int(segment.action_mask.sum())} of {len(segment)} tokens (green)[/dim]")


_CHECK_ADVICE = (
    'The check is ended. Set isolation = "process" in the class of {env}: it then runs in worker processes, where a '
    "deadline ends what hangs."
)
_MAX_SHOWN = 400  # characters of a run of tokens in the picture; of a longer one, its two ends


def _add_check(commands: Any) -> None:
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
    config = env_config_of(arguments.option)
    model = None if arguments.model is None else base_of(arguments.model)
    with watching(None, seconds_until_frozen(_STEP_TIMEOUT_SECONDS), advice=_CHECK_ADVICE):
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
    if model is not None and report.state_of("play") == "ok":
        from gspo_gym.config.build.token_audit import audit_tokens

        audit = audit_tokens(arguments.name, model, num_turns=arguments.turns, env_config=config)
        print(audit)
        _show_mask(audit)
    if arguments.json is not None:
        report_json = {**report.as_json(), "tokens": None if audit is None else audit.as_json()}
        write_output(arguments.json, json.dumps(report_json, indent=2) + "\n")
    return 0 if report.passed and (audit is None or audit.passed) else 1


def _show_mask(audit: TokenAudit) -> None:
    """Print a sample episode with the trained tokens in green, or in [[ ]] without colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    picture = Text()
    for text, is_trained in audit.sample:
        span_text = shortened(text, _MAX_SHOWN)
        if console.is_terminal:
            picture.append(span_text, style="bold green" if is_trained else "dim")
        else:
            picture.append(f"[[{span_text}]]" if is_trained else span_text)
    how = "green" if console.is_terminal else "in [[ ]]"
    console.print(f"sample: {audit.sample_player}; trained on is what is {how}", markup=False, highlight=False)
    console.print(picture, soft_wrap=True)


def _add_collect(subparsers: Any) -> None:
    parser = subparsers.add_parser("collect", help="play episodes with any policy and keep them in a file")
    add_environment(parser)
    parser.add_argument(
        "--policy",
        required=True,
        metavar="POLICY",
        help="scripted:NAME, a model (a run, tiny:qwen3-64, a folder, an id of the hub), or openai:MODEL[@BASE_URL]",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="a new file, .jsonl, .jsonl.gz or .parquet"
    )
    parser.add_argument(
        "--seeds",
        default=f"{FIRST_TRAINING_SEED}:{FIRST_TRAINING_SEED + 100}",
        help='which tasks, such as "3,5,8" (default: the first 100 training tasks, %(default)s; below 2**31 are '
        "the tasks of evaluations)",
    )
    parser.add_argument("--per-seed", type=int, default=1, help="episodes of each (default 1)")
    parser.add_argument("--max-turns", type=int, default=50, help="actions per episode (default 50)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens per action (default 1024)")
    parser.add_argument("--concurrent", type=int, default=16, help="episodes at once (default 16)")
    parser.add_argument(
        "--step-timeout-seconds", type=float, default=30.0, help="for each call of the environment (default 30)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of a model's sampling (default 1)")
    parser.add_argument("--only-successes", action="store_true", help="keep episodes in which the task was achieved")
    parser.add_argument(
        "--resume", action="store_true", help="go on with what an interrupted command left in FILE.part"
    )
    parser.set_defaults(run=collect)


def collect(arguments: argparse.Namespace) -> int:
    """Collect and write; return 0 if every requested episode was played, else 1.

    Each episode is appended to FILE.part when it ends. Ctrl-C keeps that file for `--resume` and returns 130. An
    environment that holds the interpreter ends the process, which keeps the file, too (`watchdog.py`).
    """
    from rich.console import Console

    from gspo_gym.config.build.episode_collection import CollectSettings, collect_episodes

    require_writable(arguments.out)
    seeds, env_config = parse_seeds(arguments.seeds), env_config_of(arguments.option)
    settings = CollectSettings(
        episodes_per_seed=arguments.per_seed,
        max_turns=arguments.max_turns,
        max_output_tokens=arguments.max_tokens,
        max_concurrent=arguments.concurrent,
        step_timeout_seconds=arguments.step_timeout_seconds,
        temperature=arguments.temperature,
    )
    policy = base_of(arguments.policy)
    request = {"env": arguments.name, "env_config": env_config, "policy": policy, "settings": asdict(settings)}
    part = PartFile(arguments.out, work="collection", asked=request, resumes=arguments.resume)
    earlier_episodes = part.read(trajectory_from_json)
    num_asked = len(seeds) * settings.episodes_per_seed
    if earlier_episodes:
        print(f"{len(earlier_episodes)} episodes are there already, in {part.path}", file=sys.stderr)
    try:
        with interrupted_by_signals(), counting(Console(stderr=True), num_asked, done=len(earlier_episodes)) as count:

            def keep(trajectory: Trajectory) -> None:
                part.append(trajectory_to_json(trajectory))
                count()

            collection = collect_episodes(
                arguments.name,
                policy,
                seeds=seeds,
                env_config=env_config,
                settings=settings,
                already=earlier_episodes,
                on_episode=keep,
                out=arguments.out,
            )
    except KeyboardInterrupt as interrupt:
        stop_message = f"stopped: {part.num_items} of {num_asked} episodes are in {part.path}; go on with --resume"
        print(stop_message, file=sys.stderr)
        return exit_code_of(interrupt)
    finally:
        part.remove_if_empty()
    # FILE.part keeps failed episodes, too: --resume must not play them again.
    episodes = [t for t in collection.trajectories if t.success or not arguments.only_successes]
    save_episodes(arguments.out, episodes, policy_name=collection.policy_name, tools=collection.tools)
    # Last: until FILE is complete, FILE.part holds the episodes.
    part.remove()
    _tell(arguments.out, episodes, collection)
    return 1 if collection.dropped else 0


def _tell(out: Path, trajectories: Sequence[Trajectory], collection: CollectedEpisodes) -> None:
    returns = [trajectory.reward for trajectory in trajectories if trajectory.is_scored]
    mean = f", mean return {sum(returns) / len(returns):.3f}" if returns else ""
    print(f"{len(trajectories)} episodes of {collection.env_id} by {collection.policy_name}{mean} -> {out}")
    if left_out := len(collection.trajectories) - len(trajectories):
        print(f"{left_out} without success left out")
    for reason, count in Counter(attempt.reason for attempt in collection.dropped).most_common():
        print(f"{count} could not be played: {reason}", file=sys.stderr)


_SERVE_ADVICE = "The server is ended. Serve {env} with --isolation process, where a deadline ends what hangs."
_SPOKEN = {
    "task_app": "as a task app",
    "openenv": "over OpenEnv's protocol",
    "all": "as a task app and over OpenEnv's protocol",
}


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve an environment to trainers elsewhere")
    add_environment(parser)
    parser.add_argument("--protocol", choices=list(_SPOKEN), default="task_app", help="default task_app")
    parser.add_argument("--host", default="127.0.0.1", help="another than loopback needs --api-key-env")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any that is free (default 8000)")
    parser.add_argument(
        "--isolation",
        choices=["auto", "thread", "process"],
        default="auto",
        help="where the environment runs (default auto: as it says itself)",
    )
    _add_limits(parser.add_argument_group("limits"))
    _add_task_app(parser.add_argument_group("of a task app"))
    add_callers(parser.add_argument_group("who may call"))
    parser.set_defaults(run=serve)


def _add_limits(limits: Any) -> None:
    limits.add_argument("--max-sessions", type=int, default=8, help="episodes played step by step at once (default 8)")
    limits.add_argument(
        "--max-concurrent-rollouts", type=int, default=64, help="at once; more wait for their turn (default 64)"
    )
    limits.add_argument("--step-timeout-seconds", type=float, default=60.0, help="for each call (default 60)")
    limits.add_argument("--rollout-timeout-seconds", type=float, default=3600.0, help="for a rollout (default 3600)")
    limits.add_argument(
        "--idle-timeout-seconds", type=float, default=600.0, help="of sessions without a call (default 600)"
    )


def _add_task_app(task_app: Any) -> None:
    task_app.add_argument(
        "--client-option",
        action="append",
        metavar="KEY",
        help='an argument of the environment that clients may set in env.config; "*": all of them (default: all for '
        "clients of this machine, none elsewhere)",
    )
    task_app.add_argument(
        "--rubric", metavar="ID|FILE", help="by which episodes may be judged (default: a bundled one's own)"
    )
    add_inference(task_app)


def add_inference(parser: Any) -> None:
    """Add the arguments that say which models a server's rollouts may ask."""
    parser.add_argument(
        "--inference-host",
        action="append",
        metavar="HOST[:PORT]",
        help="where a rollout's model may be asked (default: on this machine, if served on loopback)",
    )
    parser.add_argument(
        "--inference-key-env", metavar="NAME", help="environment variable with the key sent to --inference-host"
    )


def add_callers(callers: Any) -> None:
    """Add the arguments that say which clients a server answers."""
    callers.add_argument(
        "--api-key-env",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable with a key that clients must send; again for another one",
    )
    callers.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="pages that may call, https://host:port"
    )
    callers.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="in the Host header (default: any with a key, else loopback's)",
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; print the URL once clients may connect.

    An environment that holds the interpreter ends the server (`watchdog.py`): its clients would wait for ever.

    Raises:
        ConfigError, UnknownNameError: the environment, the address or a key.
        MissingExtraError: FastAPI, uvicorn or websockets is not installed.
    """
    try:
        from gspo_gym.remote.serve.task_app_server import served_app
        from gspo_gym.remote.serving import bind, serve_until_stopped, server_for
    except ImportError as error:
        raise MissingExtraError("serving an environment needs: pip install 'gspo-gym[serve]'") from error
    service = served_of(arguments)
    app = served_app(service)
    server_socket = bind(service.host, arguments.port, has_key=bool(service.api_keys))
    subject = f"{service.name} {_SPOKEN[service.protocol]}"
    with watching(None, seconds_until_frozen(service.limits.step_timeout_seconds), advice=_SERVE_ADVICE):
        return serve_until_stopped(server_for(app), server_socket, subject=subject)


def served_of(arguments: argparse.Namespace) -> ServedEnv:
    """Return the served environment's settings from the command line.

    Raises:
        ConfigError: a limit is out of range, or a key is not set.
    """
    from gspo_gym.remote.serve.env_source import ANY_OPTION
    from gspo_gym.remote.serve.task_app_server import ServedEnv, TaskAppLimits

    inference_key = arguments.inference_key_env
    # An argument may be a file or a URL: a client elsewhere would make this machine read it.
    own_clients = [ANY_OPTION] if is_loopback(arguments.host) else []
    return ServedEnv(
        arguments.name,
        config=env_config_of(arguments.option),
        protocol=arguments.protocol,
        client_options=own_clients if arguments.client_option is None else arguments.client_option,
        isolation=arguments.isolation,
        limits=TaskAppLimits(
            max_concurrent_rollouts=arguments.max_concurrent_rollouts,
            max_sessions=arguments.max_sessions,
            rollout_timeout_seconds=arguments.rollout_timeout_seconds,
            step_timeout_seconds=arguments.step_timeout_seconds,
            idle_timeout_seconds=arguments.idle_timeout_seconds,
        ),
        rubric=arguments.rubric,
        inference_hosts=arguments.inference_host,
        inference_api_key=read_key(inference_key, "--inference-key-env"),
        host=arguments.host,
        api_keys=[read_key(name, "--api-key-env") for name in arguments.api_key_env],
        allowed_origins=arguments.allow_origin,
        allowed_hosts=arguments.allow_host,
    )

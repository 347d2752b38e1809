"""Task apps: `gspo-gym app check URL` plays probe rollouts against one and compares its tokens, turns and rewards;
`gspo-gym app serve MODULE:ROLLOUT` serves an agent as one.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from gspo_gym.base.loops import run_to_end
from gspo_gym.base.settings import is_loopback, read_key
from gspo_gym.cli.command_line import env_config_of
from gspo_gym.cli.env import add_callers, add_inference
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.remote.apps.client import AppKeys, TaskAppClient

if TYPE_CHECKING:
    from gspo_gym.remote.apps.check import ProbeReport
    from gspo_gym.remote.serve.agent_app import AgentApp

_STEP_REWARDS = {"enabled": True, "mode": "decision_stepwise"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `app`."""
    commands = parser.add_subparsers(dest="app_command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="play probe rollouts against a task app; exit status 1 if they cannot be trained on",
        description="Play probe rollouts against a task app with our gateway and a scripted model, and say whether "
        "return, turns and trained tokens reconcile.",
    )
    check.add_argument("url", help="base URL of the app")
    check.add_argument("--env", metavar="NAME", help="the app's name of its environment; absent: what /task_info says")
    check.add_argument(
        "--policy",
        metavar="NAME",
        default="policy",
        help="the app's name of its policy, as rollout.policy_name (policy)",
    )
    check.add_argument("--option", action="append", default=[], metavar="KEY=JSON", help="a key of env.config")
    check.add_argument("--seed", type=int, default=0, help="of the task (0)")
    check.add_argument("--turns", type=int, default=4, help="decisions of an episode (4)")
    check.add_argument("--timeout-seconds", type=float, default=60.0, help="of one rollout (60)")
    check.add_argument("--step-rewards", action="store_true", help="ask for decision_stepwise, and expect reports")
    check.add_argument("--gateway-host", default="127.0.0.1", help="where the gateway listens (127.0.0.1)")
    check.add_argument("--gateway-url", metavar="URL", help="how the app reaches the gateway, if not there")
    check.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the app's key (ENVIRONMENT_API_KEY)"
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(run=check_app_command)
    _add_serve(commands)


def _add_serve(commands: Any) -> None:  # Any: argparse does not name the type of what add_subparsers gives
    serve = commands.add_parser(
        "serve",
        help="serve an agent, `async def rollout(client, task)`, as a task app",
        description="Serve an agent to a trainer: a function that plays one task with an OpenAI client and returns its "
        "reward. See gspo_gym.agent_app.",
    )
    serve.add_argument("agent", metavar="MODULE:ROLLOUT", help="the function, such as my_agent:rollout")
    rows = serve.add_argument_group("tasks")
    rows.add_argument(
        "--rows", metavar="SOURCE", help="a row is a task: a file, hub:OWNER/NAME?split=train, MODULE:NAME"
    )
    rows.add_argument("--held-out", metavar="SOURCE", help="rows for evaluation (default: a tenth of --rows)")
    serve.add_argument("--name", help="of the agent, in the trainer's records (default: the function's)")
    serve.add_argument("--host", default="127.0.0.1", help="another than loopback needs --api-key-env")
    serve.add_argument("--port", type=int, default=8000, help="0 takes any that is free (default 8000)")
    serve.add_argument(
        "--max-concurrent-rollouts", type=int, default=64, help="at once; more wait for their turn (default 64)"
    )
    serve.add_argument("--rollout-timeout-seconds", type=float, default=3600.0, help="for a rollout (default 3600)")
    serve.add_argument(
        "--reward-at-limit", type=float, metavar="R", help="of a rollout whose conversation got too long"
    )
    add_inference(serve)
    add_callers(serve)
    serve.set_defaults(run=serve_agent_command)


def serve_agent_command(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; print the URL once clients may connect.

    Raises:
        UnknownNameError: there is no such function.
        ConfigError: it is no agent, or the rows, the address or a key is wrong.
        MissingExtraError: FastAPI, uvicorn or openai is not installed.
    """
    try:
        from gspo_gym.remote.serving import bind, serve_until_stopped, server_for
    except ImportError as error:
        raise MissingExtraError("serving an agent needs: pip install 'gspo-gym[serve]'") from error
    app = agent_app_of(arguments)
    server_socket = bind(arguments.host, arguments.port, has_key=bool(arguments.api_key_env))
    return serve_until_stopped(server_for(app), server_socket, subject=f"{arguments.agent} as a task app")


def agent_app_of(arguments: argparse.Namespace) -> AgentApp:
    """Return the app that the arguments of `app serve` describe; errors as of the command."""
    from gspo_gym.base.modules import named_object
    from gspo_gym.remote.serve.agent_app import agent_app
    from gspo_gym.remote.serve.task_app_server import LOOPBACK_HOSTS, TaskAppLimits

    agent = named_object(arguments.agent, "the agent")
    inference_key, hosts = read_key(arguments.inference_key_env, "--inference-key-env"), arguments.inference_host
    if hosts is None:
        # The key would go to every program of this machine that listens.
        if inference_key is not None:
            raise ConfigError("--inference-key-env: name the hosts that get the key, with --inference-host")
        hosts = LOOPBACK_HOSTS if is_loopback(arguments.host) else ()
    return agent_app(
        agent,
        arguments.rows,
        held_out=arguments.held_out,
        name=arguments.name,
        reward_at_limit=arguments.reward_at_limit,
        limits=TaskAppLimits(
            max_concurrent_rollouts=arguments.max_concurrent_rollouts,
            rollout_timeout_seconds=arguments.rollout_timeout_seconds,
        ),
        inference_hosts=hosts,
        inference_api_key=inference_key,
        api_key=[read_key(name, "--api-key-env") for name in arguments.api_key_env] or None,
        allowed_origins=arguments.allow_origin,
        allowed_hosts=arguments.allow_host or None,
    )


def check_app_command(arguments: argparse.Namespace) -> int:
    """Play the probes and print their results; return 1 if there is a problem."""
    try:
        reports = run_to_end(_probe_reports(arguments))
    except ImportError as error:
        raise MissingExtraError("a task app is checked with: pip install 'gspo-gym[apps]'") from error
    is_ok = not any(report.problems for report in reports)
    if arguments.json:
        summary = {"url": arguments.url, "ok": is_ok, "probes": [report.to_json() for report in reports]}
        print(json.dumps(summary, indent=2))
    else:
        for report in reports:
            print("\n".join(_lines(report)))
        print("OK: what this app plays can be trained on" if is_ok else "NOT OK: see the problems above")
    return 0 if is_ok else 1


async def _probe_reports(arguments: argparse.Namespace) -> tuple[ProbeReport, ...]:
    from dataclasses import replace

    from gspo_gym.config.build.threads import computing_elsewhere
    from gspo_gym.remote.apps.check import CheckSettings, check_app

    keys = _keys(arguments.api_key_env)
    env_config: dict[str, Any] = env_config_of(arguments.option)  # Any: JSON
    if arguments.step_rewards:
        # setdefault: step_rewards given by --option come first.
        env_config.setdefault("step_rewards", _STEP_REWARDS)
    settings = CheckSettings(
        env_name=arguments.env or await _environment_of(arguments.url, keys, arguments.seed),
        env_config=env_config,
        policy_name=arguments.policy,
        seed=arguments.seed,
        max_turns=arguments.turns,
        timeout_seconds=arguments.timeout_seconds,
        gateway_host=arguments.gateway_host,
        gateway_url=arguments.gateway_url,
    )
    with computing_elsewhere("cpu"):
        reports = await check_app(arguments.url, settings, keys=keys)
    if not arguments.step_rewards or any(report.reports_events for report in reports):
        return reports
    missing = "no step rewards: the app was asked for them and no step of any probe reports any"
    return (replace(reports[0], problems=(*reports[0].problems, missing)), *reports[1:])


async def _environment_of(url: str, keys: AppKeys, seed: int) -> str:
    """Return the environment's name, as the app reports it.

    Raises:
        ConfigError: the app reports none.
    """
    async with TaskAppClient(url, keys=keys) as app:
        (info,) = await app.task_info([seed])
        name = info.environment or (await app.info()).task_id
    if name is None:
        raise ConfigError(f"{url}: expected an environment in /task_info or a task in /info, got neither: give --env")
    return name


def _keys(variable: str | None) -> AppKeys:
    if variable is not None:
        return AppKeys([read_key(variable, "--api-key-env")])
    return AppKeys.from_environment(os.environ)


def _lines(report: ProbeReport) -> list[str]:
    """Return the report's lines about each probe."""
    state = "PROBLEM" if report.problems else "ok"
    return_text = "no return" if report.episode_return is None else f"return {report.episode_return:g}"
    rewards = ", ".join(f"{count} {kind}" for kind, count in report.step_rewards.items() if count) or "none"
    calls = ", ".join(f"{count} {call_kind}" for call_kind, count in report.calls.items()) or "none counted"
    return [
        f"{report.name}: {state}: {report.outcome}, {return_text}",
        f"  {report.asked}",
        f"  {report.num_decisions} decisions, {report.num_turns} turns; step rewards: {rewards}; calls: {calls}; "
        f"{report.num_trained_tokens} of {report.num_sampled_tokens} sampled tokens are trained on",
        *(f"  problem: {text}" for text in report.problems),
        *(f"  notice: {text}" for text in report.notices),
    ]

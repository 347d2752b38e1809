"""`gspo-gym app check URL`: play probe rollouts against a task app and compare its tokens, turns and rewards."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from gspo_gym.base.loops import run_to_end
from gspo_gym.base.settings import read_key
from gspo_gym.cli.command_line import env_config_of
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.remote.apps.client import AppKeys, TaskAppClient

if TYPE_CHECKING:
    from gspo_gym.remote.apps.check import ProbeReport

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

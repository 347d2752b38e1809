"""`gspo-gym env serve NAME`: serve an environment to other trainers, until SIGTERM or Ctrl-C.

As a task app, with an agent of its own that calls the caller's model; step by step over OpenEnv's protocol; or both.
Sessions are closed before the command ends. Loads FastAPI, and no torch.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gspo_gym.base.keys import is_loopback, read_key
from gspo_gym.cli.command_line import add_environment, env_config_of
from gspo_gym.errors import MissingExtraError
from gspo_gym.rollout.watchdog import seconds_until_frozen, watching

if TYPE_CHECKING:
    from gspo_gym.remote.serve.served_env import ServedEnv

_ADVICE = "The server is ended. Serve {env} with --isolation process, where a deadline ends what hangs."
_SPOKEN = {
    "task_app": "as a task app",
    "openenv": "over OpenEnv's protocol",
    "all": "as a task app and over OpenEnv's protocol",
}


# Any: argparse has no public name for what add_subparsers returns.
def add_command(commands: Any) -> None:
    """Add `serve` to the commands of `env`."""
    add_arguments(commands.add_parser("serve", help="serve an environment to trainers elsewhere"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
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
    _add_callers(parser.add_argument_group("who may call"))
    parser.set_defaults(run=serve)


def _add_limits(limits: Any) -> None:  # Any: argparse's group of arguments has no public name
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
    task_app.add_argument(
        "--inference-host",
        action="append",
        metavar="HOST[:PORT]",
        help="where a rollout's model may be asked (default: on this machine, if served on loopback)",
    )
    task_app.add_argument(
        "--inference-key-env", metavar="NAME", help="environment variable with the key sent to --inference-host"
    )


def _add_callers(callers: Any) -> None:
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

    An environment that holds the interpreter ends the server (`watchdog.py`); its clients would wait for ever.

    Raises:
        ConfigError, UnknownNameError: the environment, the address or a key.
        MissingExtraError: FastAPI, uvicorn or websockets is not installed.
    """
    try:
        from gspo_gym.remote.serve.served_env import served_app
        from gspo_gym.remote.serving import bind, server_for, url_of
    except ImportError as error:
        raise MissingExtraError("serving an environment needs: pip install 'gspo-gym[serve]'") from error
    served = served_of(arguments)
    app = served_app(served)
    bound = bind(served.host, arguments.port, has_key=bool(served.api_keys))
    bound.listen()  # a client that reads the line below may connect at once, and waits until the server answers
    print(f"serving {served.name} {_SPOKEN[served.protocol]} at {url_of(bound)}", flush=True)
    with watching(None, seconds_until_frozen(served.limits.step_timeout_seconds), advice=_ADVICE):
        server_for(app).run(sockets=[bound])
    return 0


def served_of(arguments: argparse.Namespace) -> ServedEnv:
    """Return the served environment's settings from the command line.

    Raises:
        ConfigError: a limit is out of range, or a key is not set.
    """
    from gspo_gym.remote.serve.env_source import ANY_OPTION
    from gspo_gym.remote.serve.served_env import ServedEnv
    from gspo_gym.remote.serve.task_app_server import TaskAppLimits

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

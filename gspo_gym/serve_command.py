"""`gspo-gym env serve NAME`: an environment over OpenEnv's protocol, for other trainers, until SIGTERM or Ctrl-C.

Sessions are closed before the command ends. Loads FastAPI, and no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from gspo_gym.command_line import add_environment, env_config_of, parse_and_run
from gspo_gym.errors import ConfigError, MissingExtraError


# Any: argparse has no public name for what add_subparsers returns.
def add_command(commands: Any) -> None:
    """The command `serve` among those of `env`."""
    add_arguments(commands.add_parser("serve", help="serve an environment to other trainers"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `serve`."""
    add_environment(parser)
    parser.add_argument("--protocol", choices=["openenv"], default="openenv", help="what is spoken (default openenv)")
    parser.add_argument("--host", default="127.0.0.1", help="another than loopback needs --api-key-env")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any that is free (default 8000)")
    parser.add_argument(
        "--isolation",
        choices=["auto", "thread", "process"],
        default="auto",
        help="where the environment runs (default auto: as it says itself)",
    )
    parser.add_argument("--max-sessions", type=int, default=8, help="episodes at once (default 8)")
    parser.add_argument("--step-timeout-seconds", type=float, default=60.0, help="for each call (default 60)")
    parser.add_argument(
        "--idle-timeout-seconds", type=float, default=600.0, help="of sessions without a WebSocket (default 600)"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the key that clients must send"
    )
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="pages that may call, https://host:port"
    )
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; prints the URL once clients may connect.

    Raises:
        ConfigError, UnknownNameError: the environment, the address or the key.
        MissingExtraError: FastAPI, uvicorn or websockets is not installed.
    """
    try:
        from gspo_gym.remote.openenv_server import create_openenv_app
        from gspo_gym.remote.serving import bind, server_for, url_of
    except ImportError as error:
        raise MissingExtraError("serving an environment needs: pip install 'gspo-gym[serve]'") from error
    app = create_openenv_app(
        arguments.name,
        config=env_config_of(arguments.option),
        isolation=arguments.isolation,
        max_sessions=arguments.max_sessions,
        step_timeout_seconds=arguments.step_timeout_seconds,
        idle_timeout_seconds=arguments.idle_timeout_seconds,
        api_key=_key(arguments.api_key_env),
        allowed_origins=arguments.allow_origin,
    )
    bound = bind(arguments.host, arguments.port, has_key=arguments.api_key_env is not None)
    bound.listen()  # a client that reads the line below may connect at once, and waits until the server answers
    print(f"serving {arguments.name} over OpenEnv's protocol at {url_of(bound)}", flush=True)
    server_for(app).run(sockets=[bound])
    return 0


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"--api-key-env: expected a key in the variable {name}, it is not set")
    return key


def main(argv: list[str] | None = None) -> int:
    """`python -m gspo_gym.serve_command`, the same as `gspo-gym env serve`."""
    parser = argparse.ArgumentParser(prog="gspo-gym env serve", description="Serve an environment to other trainers.")
    add_arguments(parser)
    return parse_and_run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

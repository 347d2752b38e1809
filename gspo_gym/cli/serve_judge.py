"""`gspo-gym judge serve` and `gspo-gym judge fake`: serve a judge, or a fake model for it, until SIGTERM or Ctrl-C.

`serve` puts a judging model, or a function, behind the hosted trainer's judge contract. `fake` is an OpenAI-compatible
endpoint whose verdicts follow a rule (`judge/service/fake_server.py`), to rehearse a configuration without cost. They
load FastAPI, and no torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.keys import read_key
from gspo_gym.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from gspo_gym.judge.base import Judge
    from gspo_gym.remote.guard import App

_MAX_BODY_BYTES = 16_000_000  # a long episode, as JSON


# Any: argparse has no public name for what add_subparsers returns.
def add_command(commands: Any) -> None:
    """Add `serve` and `fake` to the commands of `judge`."""
    _add_serve(commands.add_parser("serve", help="a judge over HTTP, for other trainers"))
    _add_fake(commands.add_parser("fake", help="an OpenAI-compatible model that judges by a rule, for rehearsals"))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="the judging model's name at its endpoint")
    parser.add_argument("--provider", choices=["openai", "groq", "gemini", "local"], default="local")
    parser.add_argument("--base-url", help="of a local endpoint, such as http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--model-key-env", metavar="NAME", help="variable with the endpoint's key, if not the usual one"
    )
    parser.add_argument("--python", metavar="MODULE:FUNCTION", help="a function judges, and no model")
    parser.add_argument("--rubric", metavar="FILE_OR_ID", help="for requests that bring none")
    parser.add_argument("--rubric-folder", action="append", default=[], type=Path, help="where rubrics are found by id")
    parser.add_argument("--mode", choices=["auto", "episode", "turn"], default="auto", help="calls for an episode")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests to the model at once (default 8)")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="for each of them (default 60)")
    parser.add_argument("--max-calls", type=int, help="requests to the model in all, and then none")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="where answers are kept")
    _add_address(parser, port=9100)
    parser.set_defaults(run=serve)


def _add_fake(parser: argparse.ArgumentParser) -> None:
    _add_address(parser, port=9101)
    parser.set_defaults(run=serve_fake)


def _add_address(parser: argparse.ArgumentParser, *, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="another than loopback needs --api-key-env")
    parser.add_argument("--port", type=int, default=port, help=f"0 takes any that is free (default {port})")
    parser.add_argument("--api-key-env", metavar="NAME", help="variable with the key that clients must send")


def serve(arguments: argparse.Namespace) -> int:
    """Serve the judge until told to stop; print the URL once clients may connect.

    Raises:
        ConfigError, UnknownNameError: the judge, the rubric, the address or a key.
        MissingExtraError: FastAPI, uvicorn or openai is not installed.
    """
    try:
        from gspo_gym.judge.rubric_files import find_rubrics, read_rubrics
        from gspo_gym.judge.service.server import create_judge_app
    except ImportError as error:
        raise MissingExtraError("serving a judge needs: pip install 'gspo-gym[serve,openai]'") from error
    folders = tuple(arguments.rubric_folder)
    default = read_rubrics(find_rubrics(arguments.rubric, folders)) if arguments.rubric else None
    judge = _judge(arguments)

    def known(name: str) -> Any:
        if Path(name).suffix:  # a path: only the operator names files
            raise ConfigError(f"options.rubric_id: expected an id, got {name!r}")
        return read_rubrics(find_rubrics(name, folders))

    app = create_judge_app(judge, default=default, find_rubrics=known)
    return _serve(app, arguments, what=f"the judge {judge.name}", path="/judge/v1/score")


def serve_fake(arguments: argparse.Namespace) -> int:
    """Serve the fake model until told to stop; print the URL once clients may connect.

    Raises:
        ConfigError: the address or the key. MissingExtraError: FastAPI or uvicorn is not installed.
    """
    try:
        from gspo_gym.judge.service.fake_server import create_fake_judge_app
    except ImportError as error:
        raise MissingExtraError("serving a judge needs: pip install 'gspo-gym[serve]'") from error
    return _serve(create_fake_judge_app(), arguments, what="a fake judging model that follows a rule", path="/v1")


def _judge(arguments: argparse.Namespace) -> Judge:
    if (arguments.model is None) == (arguments.python is None):
        raise ConfigError("judge serve: expected --model or --python, one of them")
    if arguments.python is not None:
        from gspo_gym.judge.panel import PythonJudge

        return PythonJudge(
            arguments.python, max_concurrency=arguments.max_concurrency, timeout_seconds=arguments.timeout_seconds
        )
    from gspo_gym.judge.asking import AskingSettings
    from gspo_gym.judge.budget import BudgetLimits, JudgeBudget
    from gspo_gym.judge.cache import JudgementCache
    from gspo_gym.judge.model.judge import ModelJudge
    from gspo_gym.judge.model.settings import ModelJudgeSettings

    settings = ModelJudgeSettings(
        arguments.model,
        provider=arguments.provider,
        base_url=arguments.base_url,
        api_key_env=arguments.model_key_env,
        mode=arguments.mode,
        asking=AskingSettings(max_concurrency=arguments.max_concurrency, timeout_seconds=arguments.timeout_seconds),
    )
    budget = JudgeBudget(BudgetLimits(max_calls=arguments.max_calls))
    return ModelJudge(settings, cache=JudgementCache(arguments.cache), budget=budget)


def _serve(app: App, arguments: argparse.Namespace, *, what: str, path: str) -> int:
    from gspo_gym.remote.serving import Guard, bind, server_for, url_of

    key = read_key(arguments.api_key_env, "--api-key-env")
    bound = bind(arguments.host, arguments.port, has_key=key is not None)
    bound.listen()  # a client that reads the line below may connect at once, and waits until the server answers
    print(f"serving {what} at {url_of(bound)}{path}", flush=True)
    server_for(Guard(app, api_key=key, max_body_bytes=_MAX_BODY_BYTES)).run(sockets=[bound])
    return 0

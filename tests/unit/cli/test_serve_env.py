"""`gspo-gym env serve`: what its command line asks for, what it refuses, and both protocols on one port."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import programs
import pytest
from websockets.asyncio.client import connect

from gspo_gym.cli.env import add_arguments, served_of
from gspo_gym.cli.main import main
from gspo_gym.remote.serve.task_app_server import ServedEnv, rubrics_of, served_app
from gspo_gym.remote.serving import BackgroundServer


def asked(*arguments: str) -> ServedEnv:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return served_of(parser.parse_args(["serve", "GuessNumber", *arguments]))


def test_every_option_reaches_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST", "one")
    monkeypatch.setenv("SECOND", "two")
    monkeypatch.setenv("MODEL", "three")
    served = asked(
        *("--option", "high=4", "--protocol", "all", "--isolation", "thread", "--host", "127.0.0.2"),
        *("--max-sessions", "3", "--max-concurrent-rollouts", "5", "--step-timeout-seconds", "7"),
        *("--rollout-timeout-seconds", "9", "--idle-timeout-seconds", "11", "--client-option", "low"),
        *("--rubric", "frozen_lake/bundle@v1", "--inference-host", "gw:1", "--inference-host", "gw:2"),
        *("--inference-key-env", "MODEL", "--api-key-env", "FIRST", "--api-key-env", "SECOND"),
        *("--allow-origin", "https://a.example", "--allow-host", "b.example"),
    )
    assert (served.config, served.protocol, served.isolation, served.host) == (
        {"high": 4},
        "all",
        "thread",
        "127.0.0.2",
    )
    limits = served.limits
    assert (limits.max_sessions, limits.max_concurrent_rollouts) == (3, 5)
    seconds = (limits.step_timeout_seconds, limits.rollout_timeout_seconds, limits.idle_timeout_seconds)
    assert seconds == (7.0, 9.0, 11.0)
    assert (served.client_options, served.rubric) == (["low"], "frozen_lake/bundle@v1")
    assert (served.inference_hosts, served.inference_api_key) == (["gw:1", "gw:2"], "three")
    assert (served.api_keys, served.allowed_origins, served.allowed_hosts) == (
        ["one", "two"],
        ["https://a.example"],
        ["b.example"],
    )


def test_clients_elsewhere_may_set_no_argument_of_the_environment_unless_it_is_named() -> None:
    assert asked().client_options == ["*"]
    assert asked("--host", "0.0.0.0").client_options == []
    assert asked("--host", "0.0.0.0", "--client-option", "low").client_options == ["low"]


def test_without_options_it_is_a_task_app_for_this_machine() -> None:
    served = asked()
    assert (served.protocol, served.host, served.api_keys, served.inference_hosts) == (
        "task_app",
        "127.0.0.1",
        [],
        None,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["GuesNumber"], "did you mean 'GuessNumber'"),
        (["GuessNumber", "--option", "hihg=4"], "did you mean 'high'"),
        (["GuessNumber", "--host", "0.0.0.0"], "give a key (--api-key-env NAME)"),
        (["GuessNumber", "--api-key-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        (["GuessNumber", "--inference-key-env", "NOT_SET_ANYWHERE"], "--inference-key-env: expected a key"),
        (["GuessNumber", "--max-sessions", "0"], "expected counts >= 1"),
        (["GuessNumber", "--rubric", "no/such@v1"], "no/such@v1"),
        (["GuessNumber", "--inference-host", "a b"], "allowed hosts"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_key_for_models_needs_hosts_that_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On loopback any program could ask for a rollout with a URL of its own, and be sent the key."""
    monkeypatch.setenv("MODEL_KEY", "s3cret")
    assert main(["env", "serve", "GuessNumber", "--inference-key-env", "MODEL_KEY"]) == 2
    said = capsys.readouterr().err
    assert "name the hosts that get the key" in said
    assert "s3cret" not in said


def test_bundled_environments_bring_their_rubrics() -> None:
    outcome = rubrics_of("gspo_gym/GuessNumber-v0").outcome
    assert outcome is not None
    assert "outcome.found" in outcome.ids
    other = rubrics_of("GuessNumber", "frozen_lake/bundle@v1").outcome
    assert other is not None
    assert other != outcome
    assert rubrics_of("OpenEnv").outcome is None  # an adapter brings none


def test_both_protocols_are_spoken_on_one_port() -> None:
    async def played_over_openenv(url: str) -> Any:
        async with connect(url.replace("http", "ws", 1) + "/ws", proxy=None) as socket:
            await socket.send(json.dumps({"type": "reset", "data": {"seed": 0}}))
            return json.loads(await socket.recv())["data"]["observation"]["text"]

    served = ServedEnv("GuessNumber", config={"style": "terse"}, protocol="all", isolation="thread")
    with BackgroundServer(served_app(served)) as server:
        assert (
            httpx.get(f"{server.url}/info", trust_env=False, timeout=60).json()["service"]["task"]["id"]
            == "GuessNumber"
        )
        assert httpx.get(f"{server.url}/schema", trust_env=False, timeout=60).status_code == 200
        health = httpx.get(f"{server.url}/health", trust_env=False, timeout=60).json()
        assert (health["status"], health["healthy"]) == ("healthy", True)  # OpenEnv's word, and a task app's
        assert asyncio.run(played_over_openenv(server.url)) == "Guess 1-8. 4 tries."


def test_pages_that_describe_the_server_are_not_served() -> None:
    served = ServedEnv("GuessNumber", config={"style": "terse"}, protocol="all", isolation="thread")
    with BackgroundServer(served_app(served)) as server:
        for path in ("/docs", "/redoc", "/openapi.json", "/debug/env"):
            assert httpx.get(server.url + path, trust_env=False, timeout=60).status_code == 404


def test_the_command_serves_a_task_app_until_sigterm() -> None:
    command = [
        sys.executable,
        "-m",
        "gspo_gym.cli",
        "env",
        "serve",
        "GuessNumber",
        "--port",
        "0",
        "--isolation",
        "thread",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with programs.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving GuessNumber as a task app at http://127.0.0.1:")
        answer = httpx.get(f"{line.split()[-1]}/task_info?seed=3", trust_env=False, timeout=30)
        assert answer.json()["task_metadata"]["seed"] == 3
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert process.returncode == -signal.SIGTERM

"""`gspo-gym app check`: what it says of apps that are well, that score oddly, that teach nothing, and that die."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fake_task_app import FakeTaskApp, _send

from gspo_gym.cli.main import main
from gspo_gym.config.sections import RolloutSection
from gspo_gym.remote.serving import BackgroundServer

Json = dict[str, Any]
WELL = {"/health": (200, {"healthy": True}), "/task_info": (200, {"environment": "quiz"})}
NAMES = ["words", "repeats", "nonsense", "nothing", "model fails once", "model is down", "trainer hangs up"]


def checked(app: FakeTaskApp, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Json]]:
    """The exit status, and the probes by name."""
    app.answers |= WELL
    with BackgroundServer(app) as server:
        status = main(["app", "check", server.url, "--json", *options])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is (status == 0)
    assert [probe["name"] for probe in told["probes"]] == NAMES
    return status, {probe["name"]: probe for probe in told["probes"]}


def scoring(*rewards: float | None, mean: float | None = None) -> Any:
    """Changes an answer: the steps' rewards in turn, and the return that is said beside them."""

    def spoil(told: Json) -> Json:
        for number, step in enumerate(told["trajectories"][0]["steps"]):
            step["reward"] = rewards[number % len(rewards)]
        told["metrics"] = {} if mean is None else {"mean_return": mean}
        return told

    return spoil


def test_an_app_that_is_well_is_ok_and_its_numbers_reconcile(capsys: pytest.CaptureFixture[str]) -> None:
    status, probes = checked(FakeTaskApp(num_turns=3), capsys)
    assert status == 0
    for name in ("words", "repeats", "nonsense", "nothing", "trainer hangs up"):
        probe = probes[name]
        assert probe["app_return"] == probe["episode_return"]
        assert (probe["num_decisions"], probe["num_turns"], probe["calls"]) == (3, 3, {"trained": 3})
        assert probe["num_trained_tokens"] == probe["num_sampled_tokens"] > 0
        assert probe["problems"] == probe["notices"] == []
    assert probes["nothing"]["num_sampled_tokens"] == 3  # a stop token a turn
    (notice,) = probes["model fails once"]["notices"]  # this app does not ask again
    assert "gives up" in notice
    (notice,) = probes["model is down"]["notices"]
    assert "makes up a return of -1 without a model" in notice
    assert probes["model is down"]["episode_return"] is None


@pytest.mark.parametrize(
    ("rewards", "mean", "kinds"),
    [
        ((None,), 0.0, {"positive": 0, "zero": 0, "negative": 0, "null": 2}),
        ((0.0,), 0.0, {"positive": 0, "zero": 2, "negative": 0, "null": 0}),
        ((-1.0, None), -1.0, {"positive": 0, "zero": 0, "negative": 1, "null": 1}),
        ((-0.5, 2.0), 1.5, {"positive": 1, "zero": 0, "negative": 1, "null": 0}),
    ],
)
def test_step_rewards_of_every_kind_reconcile_with_the_return(
    rewards: tuple[float | None, ...], mean: float, kinds: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    status, probes = checked(FakeTaskApp(spoil=scoring(*rewards, mean=mean)), capsys)
    assert status == 0
    for name in ("words", "repeats"):
        assert (probes[name]["episode_return"], probes[name]["step_rewards"]) == (mean, kinds)


def test_an_app_that_scores_nothing_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, probes = checked(FakeTaskApp(spoil=scoring(None)), capsys)
    assert status == 1
    assert "no return" in probes["words"]["problems"][0]


def test_returns_that_do_not_fit_the_steps_are_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    status, probes = checked(FakeTaskApp(spoil=scoring(1.0, mean=5.0)), capsys)
    assert status == 0
    (notice,) = probes["words"]["notices"]
    assert notice.startswith(
        "returns differ: metrics.mean_return is 5 and counts, but the sum of the steps' rewards is 2"
    )
    assert probes["words"]["episode_return"] == 5.0


@dataclass(slots=True)
class OnePolicy(FakeTaskApp):
    """Knows one policy, as the hosted trainer's example does, and refuses rollouts of others."""

    async def _rollout(self, request: Json, receive: Any, send: Any) -> None:
        if request["policy"].get("policy_name") != "react":
            await _send(send, 404, {"detail": "Policy not found"})
            return
        await FakeTaskApp._rollout(self, request, receive, send)


def test_an_app_is_told_the_policy_that_it_requires(capsys: pytest.CaptureFixture[str]) -> None:
    status, probes = checked(OnePolicy(), capsys, "--policy", "react")
    assert (status, probes["words"]["calls"]) == (0, {"trained": 2})
    status, probes = checked(OnePolicy(), capsys)
    assert status == 1
    assert "Policy not found" in probes["words"]["problems"][0]


def test_the_policy_is_named_as_training_names_it_if_it_is_given_none(capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeTaskApp()
    checked(app, capsys)
    names = {asked.body["policy"]["policy_name"] for asked in app.asked if asked.path == "/rollout"}
    assert names == {RolloutSection.model_fields["policy_name"].default}


@dataclass(slots=True)
class OwnTemperature(FakeTaskApp):
    """Samples at a temperature of its own."""

    async def _call(self, http: httpx.AsyncClient, request: Json, messages: list[Json], **options: Any) -> Any:
        request["policy"]["config"]["temperature"] = 0.1
        return await FakeTaskApp._call(self, http, request, messages, **options)


def test_an_app_of_which_no_token_can_be_trained_on_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, probes = checked(OwnTemperature(), capsys)
    assert status == 1
    assert probes["words"]["problems"] == [
        "nothing to train on: no token of the model's calls can be trained on (2 other sampling)"
    ]
    assert probes["words"]["episode_return"] is not None


def test_an_app_that_is_asked_for_step_rewards_and_has_none_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeTaskApp()
    status, probes = checked(app, capsys, "--step-rewards")
    assert status == 1
    assert probes["words"]["problems"][0].startswith("no step rewards")
    asked = next(asked.body for asked in app.asked if asked.path == "/rollout")
    assert asked["env"]["config"] == {"step_rewards": {"enabled": True, "mode": "decision_stepwise"}}


MORTAL = """
import json, os, sys, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class App(BaseHTTPRequestHandler):
    def do_GET(self):
        self.tell({"healthy": True, "environment": "quiz"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        config = asked["policy"]["config"]
        body = {"model": "policy", "messages": [{"role": "user", "content": "Say something."}]}
        call = urllib.request.Request(config["inference_url"], json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(call) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        if "?!" in said:
            os._exit(3)
        steps = [{"obs": {}, "tool_calls": [], "reward": 1.0, "done": True}]
        self.tell({"run_id": asked["run_id"], "trajectories": [{"steps": steps}], "metrics": {"mean_return": 1.0}})

    def tell(self, value):
        whole = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(whole)))
        self.end_headers()
        self.wfile.write(whole)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), App)
print(server.server_port, flush=True)
server.serve_forever()
"""  # noqa: E501  # a program of its own


@contextmanager
def mortal_app() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """An app in a process of its own, without a line of this library, which nonsense kills."""
    with subprocess.Popen([sys.executable, "-c", MORTAL], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process
        finally:
            process.kill()


def test_an_app_that_dies_of_an_answer_is_a_problem_and_said_to_be_dead(capsys: pytest.CaptureFixture[str]) -> None:
    with mortal_app() as (url, process):
        assert main(["app", "check", url, "--json"]) == 1
        assert process.wait(timeout=30) == 3
    probes = {probe["name"]: probe for probe in json.loads(capsys.readouterr().out)["probes"]}
    assert probes["repeats"]["ok"]
    assert probes["repeats"]["episode_return"] == 1.0
    dead = ["nonsense", "nothing", "model fails once", "model is down", "trainer hangs up"]
    assert [name for name, probe in probes.items() if not probe["ok"]] == dead
    assert all(probes[name]["problems"][0].startswith("the app has died: ") for name in dead)


def test_an_app_that_is_not_there_is_a_mistake_of_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app", "check", "http://127.0.0.1:9", "--env", "quiz"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err

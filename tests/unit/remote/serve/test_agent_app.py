"""An agent served as a task app: what its function is given, what becomes of its answer, and how it fails.

The model is an endpoint on loopback that says what the test wants.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_model import Json, Refused, ScriptedModel, text

import gspo_gym
from gspo_gym.cli.app import add_arguments, agent_app_of
from gspo_gym.cli.main import main
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.remote.apps.contracts import RolloutRequest, RolloutResponse, read_response
from gspo_gym.remote.apps.rewards import AppRollout, read_rollout
from gspo_gym.remote.serve.agent_app import AgentApp, AgentTask, agent_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Outcome

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(40)]
TRAINING = 2**31


class Stage:
    """Served agents, and a model that answers them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        numbers = itertools.cycle("78")
        self.model = ScriptedModel(lambda _: text(next(numbers)))
        self.model_url = stack.enter_context(BackgroundServer(self.model)).url

    def serve(self, rollout: Any, *args: Any, **options: Any) -> str:
        return self._stack.enter_context(BackgroundServer(agent_app(rollout, *args, **options))).url

    def request(self, seed: int | None = 5, **changes: Any) -> Json:
        policy = {"model": "m", "inference_url": f"{self.model_url}/t/id/v1/chat/completions?cid=id"}
        return {
            "run_id": "run-1",
            "env": {"env_name": "agent", "seed": seed, "config": changes.pop("config", {})},
            "policy": {"policy_name": "p", "config": {**policy, **changes.pop("policy", {})}},
            "ops": ["agent", "env"] * 3,
            "on_done": "terminate",
            "mode": "rl",
            **changes,
        }

    def post(self, url: str, **changes: Any) -> httpx.Response:
        return httpx.post(f"{url}/rollout", json=self.request(**changes), trust_env=False, timeout=30)

    def play(self, url: str, **changes: Any) -> AppRollout:
        """What a trainer reads from the answer."""
        answer = self.post(url, **changes)
        assert answer.status_code == 200, answer.text
        response = read_response(answer.json())
        assert isinstance(response, RolloutResponse)
        return read_rollout(response, RolloutRequest.model_validate(self.request(**changes)))

    def refused(self, url: str, **changes: Any) -> tuple[int, str, str]:
        answer = self.post(url, **changes)
        error = answer.json()["detail"]["error"]
        return answer.status_code, error["code"], error["message"]


@pytest.fixture
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack)


async def ask(client: Any, task: AgentTask) -> str:
    answer = await client.chat.completions.create(**task.policy, messages=[{"role": "user", "content": "A number?"}])
    return str(answer.choices[0].message.content)


async def summing(client: Any, task: AgentTask) -> float:
    """Adds what the model says twice."""
    return int(await ask(client, task)) + int(await ask(client, task))


def returning(value: Any) -> Any:
    async def agent(client: Any, task: AgentTask) -> Any:
        await ask(client, task)
        return value

    return agent


def test_the_returned_number_is_the_episodes_return(stage: Stage) -> None:
    rollout = stage.play(stage.serve(summing))
    assert (rollout.episode_return, rollout.return_source) == (15.0, "metrics.mean_return")  # 7 + 8
    assert (rollout.success, rollout.outcome, rollout.decisions) == (None, Outcome.TERMINATED, ())
    assert (rollout.aborted, rollout.warnings, rollout.final_messages) == (False, (), ())


@pytest.mark.parametrize(
    ("value", "episode_return", "success"),
    [(True, 1.0, True), (False, 0.0, False), (None, None, None), (-2, -2.0, None), (0.25, 0.25, None)],
)
def test_a_bool_is_also_the_success_and_none_is_no_score(
    stage: Stage, value: Any, episode_return: float | None, success: bool | None
) -> None:
    rollout = stage.play(stage.serve(returning(value)))
    assert (rollout.episode_return, rollout.success) == (episode_return, success)


def test_the_model_is_asked_as_the_trainer_says(stage: Stage) -> None:
    stage.play(
        stage.serve(returning(1)), policy={"temperature": 0.5, "max_tokens": 3, "top_k": 9, "system_prompt": "no"}
    )
    (request,) = stage.model.asked
    assert {key: request.body[key] for key in ("model", "temperature", "max_tokens", "top_k")} == {
        "model": "m",
        "temperature": 0.5,
        "max_tokens": 3,
        "top_k": 9,
    }


def test_a_task_has_its_row_its_options_and_its_limit(stage: Stage) -> None:
    tasks: list[AgentTask] = []

    async def agent(client: Any, task: AgentTask) -> bool:
        tasks.append(task)
        return task["answer"] == str(int(task["question"].partition("+")[0]) + 1)

    url = stage.serve(agent, ROWS)
    assert stage.play(url, seed=TRAINING, config={"style": "terse"}).success is True
    (task,) = tasks
    assert (task.seed, task.options, task.max_turns) == (TRAINING, {"style": "terse"}, 3)
    with pytest.raises(KeyError, match="did you mean 'question'"):
        task["quetsion"]


def test_no_row_is_on_both_sides_and_a_side_of_its_own_stays_one(stage: Stage) -> None:
    tasks: list[AgentTask] = []

    async def agent(client: Any, task: AgentTask) -> float:
        tasks.append(task)
        return 0.0

    def questions(url: str, first: int) -> set[str]:
        tasks.clear()
        for n in range(8):
            stage.play(url, seed=first + n, run_id=f"run-{n}")
        return {task["question"] for task in tasks}

    url = stage.serve(agent, ROWS[:8], held_out_fraction=0.4)
    held_out, trained = questions(url, 0), questions(url, TRAINING)
    assert held_out
    assert trained
    assert not held_out & trained
    assert held_out | trained == {row["question"] for row in ROWS[:8]}
    other = stage.serve(agent, ROWS[:8], held_out=ROWS[7:9])
    assert questions(other, 0) == {"7+1?", "8+1?"}
    assert questions(other, TRAINING) == {row["question"] for row in ROWS[:7]}


def test_without_rows_the_seed_is_the_task_also_by_split_and_index(stage: Stage) -> None:
    async def agent(client: Any, task: AgentTask) -> float:
        assert task.row == {}
        return task.seed

    url = stage.serve(agent)
    assert stage.play(url, seed=5).episode_return == 5
    assert stage.play(url, seed=3, config={"split": "train", "index": 3}).episode_return == TRAINING + 3


@pytest.mark.parametrize("value", ["good", float("nan"), float("inf"), [1.0], object()])
def test_what_is_no_number_fails_the_rollout(stage: Stage, value: Any) -> None:
    status, code, message = stage.refused(stage.serve(returning(value)))
    assert (status, code) == (500, "rollout_failed")
    assert "finite number, a bool or None" in message


def test_an_agent_that_raises_fails_with_its_error_and_the_app_goes_on(stage: Stage) -> None:
    async def agent(client: Any, task: AgentTask) -> float:
        return 1 / task.seed

    url = stage.serve(agent)
    assert stage.refused(url, seed=0) == (
        500,
        "rollout_failed",
        "the agent failed: ZeroDivisionError: division by zero",
    )
    assert stage.play(url, seed=2).episode_return == 0.5


def test_a_model_that_fails_is_not_the_agents_failure(stage: Stage) -> None:
    stage.model.say = lambda _: Refused({"error": {"message": "no", "type": "invalid_request_error", "code": None}})
    status, code, _ = stage.refused(stage.serve(returning(1)))
    assert (status, code) == (502, "policy_step_failed")


def test_a_full_conversation_ends_the_rollout_with_the_reward_for_it(stage: Stage) -> None:
    stage.model.say = lambda _: {"overflow": True}
    scored = stage.play(stage.serve(returning(1), reward_at_limit=-1.0))
    assert (scored.episode_return, scored.outcome) == (-1.0, Outcome.CONTEXT_OVERFLOW)
    unscored = stage.play(stage.serve(returning(1)))
    assert (unscored.episode_return, unscored.outcome) == (None, Outcome.CONTEXT_OVERFLOW)


def test_what_takes_too_long_is_aborted(stage: Stage) -> None:
    async def agent(client: Any, task: AgentTask) -> float:
        await asyncio.Event().wait()
        return 1.0

    assert stage.play(stage.serve(agent), safety={"max_time_s": 0.05}).aborted


def test_models_of_other_hosts_are_not_asked(stage: Stage) -> None:
    url = stage.serve(returning(1), inference_hosts=["gateway.example"])
    assert stage.refused(url)[:2] == (422, "inference_url_not_allowed")


async def _only_with_a_client(client: Any) -> float:
    return 1.0


def test_what_is_no_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected `async def rollout\(client, task\)`"):
        agent_app(lambda client, task: 1.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"called with two arguments; .*: too many positional arguments"):
        agent_app(_only_with_a_client)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="held_out goes with rows"):
        agent_app(summing, held_out=ROWS)
    with pytest.raises(ConfigError, match="expected a held-out row"):
        agent_app(summing, ROWS[:1])


def test_the_command_serves_a_function_of_a_module_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_agent.py").write_text(
        "ROWS = [{'n': n} for n in range(40)]\nasync def rollout(client, task):\n    'Counts.'\n    return task['n']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["serve", "own_agent:rollout", "--rows", "own_agent:ROWS", "--api-key-env", "AGENT_KEY"]
    monkeypatch.setenv("AGENT_KEY", "a-key")
    app = agent_app_of(parser.parse_args(words))
    assert isinstance(app, AgentApp)
    with BackgroundServer(app) as server:
        assert httpx.get(f"{server.url}/info", trust_env=False).status_code == 401
        info = httpx.get(f"{server.url}/info", headers={"X-API-Key": "a-key"}, trust_env=False).json()
    assert info["service"]["task"] == {**info["service"]["task"], "id": "rollout", "description": "Counts."}
    assert main(["app", "serve", "own_agent:rolout"]) == 2
    assert "did you mean 'rollout'" in capsys.readouterr().err
    assert main(["app", "serve", "own_agent:rollout", "--host", "0.0.0.0"]) == 2
    assert "give a key (--api-key-env NAME)" in capsys.readouterr().err


def test_without_the_servers_packages_its_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)  # what makes an import fail
    for module in ("gspo_gym.remote.guard", "gspo_gym.remote.serve.agent_app"):  # the others stay what they are
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[serve\]'"):
        gspo_gym.agent_app  # noqa: B018

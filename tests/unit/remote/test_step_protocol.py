"""The step-wise protocol, from both ends: the server's sessions, and `StepProtocol` as an environment.

1.  An attempt is opened once and a step played once, however often it is sent; what does not fit is refused.
2.  A session that is gone is an error, never a fresh one; a full server is waited for.
3.  An answer that is lost on the way is asked for again, and nothing is played twice.
4.  What the model may not say reaches the served environment's `invalid_action`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from app_process import serving_process
from ending_env import Ending
from gymnasium.error import ResetNeeded

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import make
from gspo_gym.env.rewards import Reward
from gspo_gym.env.session import EnvSession
from gspo_gym.env.suites.step_protocol import StepProtocolEnv
from gspo_gym.errors import ActionLimitError, ConfigError, EnvDiedError, EnvError, EnvTimeoutError
from gspo_gym.remote.serve.task_app_server import TaskAppLimits, create_task_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Message, StepResult

Json = dict[str, Any]


class Counts(TextEnv):
    """Says how often it was stepped, and notes what was invalid."""

    num_steps = 0
    num_made = 0
    num_closed = 0

    def __init__(self, prefix: str = "step", secret: str = "") -> None:
        Counts.num_made += 1
        self.prefix = prefix

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.num = 0
        return f"seed {seed} options {sorted(options or {})}", {}

    def step(self, action: str) -> Any:
        Counts.num_steps += 1
        self.num += 1
        if action == "break":
            raise RuntimeError("broken")
        reward = Reward({"said": 0.5}, events=[action], success=True)
        return f"{self.prefix} {self.num}: {action}", reward, action == "end", False, {"n": self.num}

    def invalid_action(self, error: str) -> Any:
        return f"invalid: {error}", -1.0, False, False, {}

    def close(self) -> None:
        Counts.num_closed += 1


@pytest.fixture
def url() -> Iterator[str]:
    limits = TaskAppLimits(max_sessions=2)
    app = create_task_app(Counts, isolation="thread", limits=limits, client_options=["prefix"])
    with BackgroundServer(app) as server:
        yield server.url


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/env/Counts/{path}", json=body, trust_env=False, timeout=30)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["detail"]["error"]["code"]


def said(text: str) -> Json:
    return {"message": {"role": "assistant", "content": text}}


def opened(url: str, attempt_id: str = "a", **more: Any) -> str:
    return str(post(url, "initialize", attempt_id=attempt_id, seed=3, **more).json()["env_id"])


# -- 1. once, however often -----------------------------------------------------------------------------------------


def test_an_episode_is_initialize_steps_and_terminate(url: str) -> None:
    opening = post(url, "initialize", attempt_id="a", seed=3, options={"x": 1}, config={"prefix": "turn"}).json()
    assert opening["observation"]["text"] == "seed 3 options ['x']"
    assert (opening["reward"], opening["done"]) == (None, False)
    step = post(url, "step", env_id=opening["env_id"], step_id=0, action=said("go")).json()
    assert (step["observation"]["text"], step["reward"], step["done"], step["step_id"]) == ("turn 1: go", 0.5, False, 0)
    assert step["result"]["reward_terms"] == {"said": 0.5}
    assert (step["result"]["events"], step["result"]["success"], step["info"]) == (["go"], True, {"n": 1})
    last = post(url, "step", env_id=opening["env_id"], step_id=1, action=said("end")).json()
    assert last["done"] is True
    answer = post(url, "step", env_id=opening["env_id"], step_id=2, action=said("more"))
    assert code(answer) == (409, "episode_over")
    assert post(url, "terminate", env_id=opening["env_id"]).json()["ok"] is True


def test_a_step_that_is_sent_again_is_played_once(url: str) -> None:
    env_id = opened(url)
    before = Counts.num_steps
    answers = [post(url, "step", env_id=env_id, step_id=0, action=said("go")).json() for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert Counts.num_steps == before + 1
    assert code(post(url, "step", env_id=env_id, step_id=0, action=said("stop"))) == (409, "step_conflict")
    assert code(post(url, "step", env_id=env_id, step_id=2, action=said("go"))) == (409, "step_out_of_order")
    assert post(url, "step", env_id=env_id, step_id=1, action=said("go")).json()["info"] == {"n": 2}
    assert code(post(url, "step", env_id=env_id, step_id=0, action=said("go"))) == (409, "step_out_of_order")


def test_steps_that_are_sent_at_once_are_played_once(url: str) -> None:
    env_id = opened(url)
    before = Counts.num_steps

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            body = {"env_id": env_id, "step_id": 0, "action": said("go")}
            return await asyncio.gather(*(client.post(f"{url}/env/Counts/step", json=body) for _ in range(20)))

    assert len({answer.text for answer in asyncio.run(all_at_once())}) == 1
    assert Counts.num_steps == before + 1


def test_an_attempt_is_opened_once(url: str) -> None:
    before = Counts.num_made
    body = {"attempt_id": "a", "seed": 3}

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            return await asyncio.gather(*(client.post(f"{url}/env/Counts/initialize", json=body) for _ in range(9)))

    answers = asyncio.run(all_at_once())
    assert {answer.text for answer in answers} == {answers[0].text}
    assert Counts.num_made == before + 1
    assert code(post(url, "initialize", attempt_id="a", seed=4)) == (409, "attempt_conflict")
    post(url, "terminate", env_id=answers[0].json()["env_id"])
    assert code(post(url, "initialize", **body)) == (409, "attempt_over")  # a request that was late


def test_tool_calls_may_be_said_in_short(url: str) -> None:
    env_id = opened(url)
    action = {"text": "hello", "tool_calls": [{"tool": "x", "args": {}}]}
    assert post(url, "step", env_id=env_id, action=action).json()["observation"]["text"] == "step 1: hello"
    for wrong in ({}, {"message": {"role": "user", "content": "x"}}, {"message": 3}, {"tool_calls": [3]}):
        assert code(post(url, "step", env_id=env_id, action=wrong)) == (422, "bad_action")
    assert post(url, "step", env_id=env_id, action=said("go")).json()["info"] == {"n": 2}  # the session has survived


# -- 2. gone, and full ----------------------------------------------------------------------------------------------


def test_a_session_that_is_gone_is_not_found(url: str) -> None:
    env_id = opened(url)
    closed = Counts.num_closed
    post(url, "terminate", env_id=env_id)
    assert Counts.num_closed == closed + 1
    assert post(url, "terminate", env_id=env_id).json()["ok"] is True  # again, and nothing happens
    assert code(post(url, "step", env_id=env_id, step_id=0, action=said("go"))) == (404, "unknown_session")
    assert code(post(url, "step", env_id="never", action=said("go"))) == (404, "unknown_session")
    assert httpx.post(f"{url}/env/Other/step", json={"env_id": "x", "action": {}}, trust_env=False).status_code == 404


def test_a_step_that_breaks_ends_the_session(url: str) -> None:
    env_id = opened(url)
    assert code(post(url, "step", env_id=env_id, step_id=0, action=said("break"))) == (500, "env_step_failed")
    assert code(post(url, "step", env_id=env_id, step_id=0, action=said("break"))) == (404, "unknown_session")


def test_whose_doing_a_failed_step_is_reaches_the_client() -> None:
    async def step(url: str, action: str) -> None:
        session = EnvSession(StepProtocolEnv(url=url, name="Ending"), env_id="StepProtocol")
        await session.reset(3)
        try:
            await session.step(Message("assistant", action))
        finally:
            await session.close()

    limits = TaskAppLimits(step_timeout_seconds=0.7)
    with BackgroundServer(create_task_app(Ending, isolation="thread", limits=limits)) as server:
        with pytest.raises(ActionLimitError, match="asks for more than it may"):
            asyncio.run(step(server.url, "refuse"))
        with pytest.raises(EnvDiedError, match="did not answer within"):
            asyncio.run(step(server.url, "wait"))


def test_a_full_server_says_when_to_come_again(url: str) -> None:
    first, _ = opened(url, "a"), opened(url, "b")
    full = post(url, "initialize", attempt_id="c")
    assert code(full) == (503, "at_capacity")
    assert int(full.headers["retry-after"]) >= 1
    post(url, "terminate", env_id=first)
    assert post(url, "initialize", attempt_id="c").status_code == 200  # the same attempt


def test_an_idle_session_gives_its_place_to_another() -> None:
    limits = TaskAppLimits(max_sessions=1, idle_timeout_seconds=0.001)
    with BackgroundServer(create_task_app(Counts, isolation="thread", limits=limits)) as server:
        idle = opened(server.url, "a")
        assert opened(server.url, "b") != idle
        assert code(post(server.url, "step", env_id=idle, action=said("go"))) == (404, "unknown_session")


def test_clients_set_only_what_the_operator_allows(url: str) -> None:
    answer = post(url, "initialize", attempt_id="a", config={"secret": "x"})
    assert code(answer) == (422, "env_config_not_allowed")
    assert post(url, "initialize", attempt_id="a").status_code == 200  # nothing was begun under that id


# -- 3. as an environment -------------------------------------------------------------------------------------------


def play(url: str, *actions: str, **settings: Any) -> list[StepResult]:
    """The opening, and the answers to actions; one that begins with "!" could not be read."""

    async def played() -> list[StepResult]:
        env = make("StepProtocol", url=url, name="Counts", **settings)
        session = EnvSession(env, env_id="it", step_timeout_seconds=60)
        try:
            results = [await session.reset(3)]
            for action in actions:
                if action.startswith("!"):
                    results.append(await session.invalid_action(action[1:]))
                else:
                    results.append(await session.step(Message("assistant", action)))
            return results
        finally:
            await session.close()

    return asyncio.run(played())


def test_it_plays_a_served_environment(url: str) -> None:
    closed = Counts.num_closed
    opening, first, invalid, last = play(url, "go", "!not JSON", "end", config={"prefix": "turn"})
    assert opening.messages == (Message("user", "seed 3 options []"),)
    assert first == StepResult(
        (Message("user", "turn 1: go"),),
        reward=0.5,
        reward_terms={"said": 0.5},
        success=True,
        events=("go",),
        info={"n": 1},
    )
    assert (invalid.messages[0].content, invalid.reward) == ("invalid: not JSON", -1.0)
    assert (last.messages[0].content, last.terminated, last.truncated) == ("turn 2: end", True, False)
    assert Counts.num_closed > closed


def test_a_lost_session_is_an_error_and_no_fresh_one(url: str) -> None:
    async def lost() -> None:
        env = StepProtocolEnv(url=url, name="Counts")
        await env.reset(seed=0)
        await asyncio.to_thread(post, url, "terminate", env_id=env._env_id)
        with pytest.raises(EnvError, match="unknown_session"):
            await env.step("go")
        await env.close()

    asyncio.run(lost())


def test_a_reset_waits_for_a_place_as_long_as_it_is_told(url: str) -> None:
    first, _ = opened(url, "a"), opened(url, "b")
    with pytest.raises(EnvError, match=r"at capacity for 0\.2 seconds; let it serve more sessions"):
        play(url, capacity_timeout_seconds=0.2)
    leaves = threading.Timer(0.3, post, (url, "terminate"), {"env_id": first})
    leaves.start()
    assert len(play(url, "go", capacity_timeout_seconds=30)) == 2
    leaves.join()


def test_it_keeps_the_contract_of_environments() -> None:
    """The server in another process: the check counts all that this one holds."""
    with serving_process("GuessNumber", "--max-sessions", "32") as url:
        config = {"url": url, "name": "GuessNumber"}
        report = check_env("StepProtocol", env_config=config, seeds=range(5), num_leak_episodes=5)
    assert report.passed, str(report)


def test_it_refuses_what_cannot_be(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected url such as"):
        StepProtocolEnv(url="ws://x", name="Counts")
    with pytest.raises(ConfigError, match="expected name such as"):
        StepProtocolEnv(url=url, name="a?b")
    with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
        StepProtocolEnv(url=url, name="Counts", api_key_env="NOT_SET_ANYWHERE")
    with pytest.raises(EnvError, match="unknown_env"):
        StepProtocolEnv(url=url, name="Other")
    with pytest.raises(EnvError, match="ConnectError"):
        StepProtocolEnv(url="http://127.0.0.1:9", name="Counts")
    with pytest.raises(ResetNeeded):
        asyncio.run(StepProtocolEnv(url=url, name="Counts").step("go"))


def test_it_sends_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "k3y")
    with BackgroundServer(create_task_app(Counts, isolation="thread", api_key="k3y")) as server:
        assert len(play(server.url, "go", api_key_env="THE_KEY")) == 2
        with pytest.raises(EnvError, match="status 401") as error:
            StepProtocolEnv(url=server.url, name="Counts", config={"prefix": "other"})
        assert "k3y" not in str(error.value)


class LosesAnswers:
    """In front of an application: plays requests and loses every second answer, in one of three ways."""

    def __init__(self, app: Any, how: str) -> None:
        self._app, self._how, self._num = app, how, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].endswith("describe"):
            await self._app(scope, receive, send)
            return
        self._num += 1
        if self._num % 2 == 0:
            await self._app(scope, receive, send)
            return

        async def lose(message: Any) -> None:
            """It was played, and nobody hears of it."""

        await self._app(scope, receive, lose)
        if self._how == "502":
            await send({"type": "http.response.start", "status": 502, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        elif self._how == "half":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
            await send({"type": "http.response.body", "body": b'{"env_id"', "more_body": True})
            raise ConnectionError("on purpose")
        else:
            while (await receive())["type"] != "http.disconnect":
                pass


@pytest.mark.parametrize("how", ["502", "half", "hangs"])
def test_lost_answers_are_asked_for_again_and_nothing_is_played_twice(how: str) -> None:
    before = Counts.num_steps
    app = LosesAnswers(create_task_app(Counts, isolation="thread"), how)
    with BackgroundServer(app) as server:
        results = play(server.url, "go", "on", "end", timeout_seconds=0.5 if how == "hangs" else 30)
    assert [result.info.get("n") for result in results] == [None, 1, 2, 3]
    assert Counts.num_steps == before + 3


def test_a_server_that_never_answers_is_a_timeout() -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].endswith("describe"):
            content = b'{"tool_schemas": []}'
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"20")]})
            await send({"type": "http.response.body", "body": content})
            return
        while (message := await receive())["type"] not in ("http.disconnect", "lifespan.shutdown"):
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
        if message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})

    with (
        BackgroundServer(silent) as server,
        pytest.raises(EnvTimeoutError, match=r"no answer within 0\.05 seconds \(2 attempts\)"),
    ):
        play(server.url, timeout_seconds=0.05, max_attempts=2)

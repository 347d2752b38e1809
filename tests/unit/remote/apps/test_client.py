"""The client of task apps against a real app on loopback: what it sends, what it believes, and how it fails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fake_task_app import Asked, FakeTaskApp

from gspo_gym.errors import ConfigError
from gspo_gym.remote.apps.client import AppKeys, TaskAppClient, TaskAppSettings
from gspo_gym.remote.apps.contracts import (
    AppAnswerError,
    AppAttemptError,
    AppError,
    AppRefusedError,
    AppTimeoutError,
    AppUnauthorisedError,
    RolloutRequest,
)
from gspo_gym.remote.serving import BackgroundServer

Result = TypeVar("Result")

DATA = Path(__file__).parent / "data"
ANSWERS = json.loads((DATA / "app_answers.json").read_text())
REQUEST = RolloutRequest.model_validate(
    json.loads((DATA / "rollout_request_a.json").read_text()) | {"trace_correlation_id": "trace_5f"}
)
KEY = "secret-key-0123456789"


class ScriptedApp(FakeTaskApp):
    """Answers POST /rollout with what it is told to, too."""

    async def _rollout(self, request: dict[str, Any], receive: Any, send: Any) -> None:
        self.num_rollouts += 1
        await self._send_answer(receive, send, self.spoil(request), self.fault(self.num_rollouts - 1))


class Stage:
    """Serves whichever app is on it: starting a server for each test would take longer than the tests."""

    app: FakeTaskApp | None = None
    url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await (self.app or FakeTaskApp())(scope, receive, send)


STAGE = Stage()


@pytest.fixture(scope="module", autouse=True)
def _stage() -> Iterator[None]:
    with BackgroundServer(STAGE) as server:
        STAGE.url = server.url
        yield


def asking(
    app: FakeTaskApp,
    ask: Callable[[TaskAppClient], Awaitable[Result]],
    *,
    keys: list[str] | None = None,
    settings: TaskAppSettings | None = None,
) -> Result:
    """What the client makes of the app; it does not wait between attempts."""

    async def no_sleep(seconds: float) -> None:
        pass

    async def ask_it(url: str) -> Result:
        async with TaskAppClient(url, keys=AppKeys(keys or []), settings=settings, sleep=no_sleep) as client:
            return await ask(client)

    STAGE.app = app
    return asyncio.run(ask_it(STAGE.url))


def failing(app: FakeTaskApp, ask: Callable[[TaskAppClient], Awaitable[object]], **options: Any) -> AppError:
    with pytest.raises(AppError) as raised:
        asking(app, ask, **options)
    return raised.value


def answering(**answers: Any) -> FakeTaskApp:
    return FakeTaskApp(answers={f"/{path}": answer for path, answer in answers.items()})


def stored_rollout(name: str) -> Callable[[dict[str, Any]], Any]:
    answer = json.loads((DATA / f"{name}.json").read_text())
    return lambda request: answer


def test_what_an_app_says_of_itself_is_read() -> None:
    app = answering(health=(200, ANSWERS["health"]), info=(200, ANSWERS["info"]), done=(200, ANSWERS["done"]))
    app.answers["/task_info"] = lambda asked: (200, ANSWERS["task_info"] if asked.query else ANSWERS["taskset"])

    async def ask(client: TaskAppClient) -> tuple[Any, ...]:
        await client.health()
        await client.done()
        return await client.info(), await client.taskset(), await client.task_info([3])

    info, taskset, tasks = asking(app, ask)
    assert info.task_id == "crafter-classic"
    assert taskset["seed_range"] == [0, 9]
    assert [task.task_metadata["seed"] for task in tasks] == [3]
    assert [(asked.method, asked.path, asked.query) for asked in app.asked] == [
        ("GET", "/health", ""),
        ("POST", "/done", ""),
        ("GET", "/info", ""),
        ("GET", "/task_info", ""),
        ("GET", "/task_info", "seed=3"),
    ]


def test_many_tasks_are_asked_for_fifty_at_a_time_and_come_in_order() -> None:
    def tasks(asked: Asked) -> Any:
        listed = [{"task_metadata": {"seed": int(part.removeprefix("seed="))}} for part in asked.query.split("&")]
        return 200, listed if len(listed) > 1 else listed[0]

    app = answering(task_info=tasks)
    infos = asking(app, lambda client: client.task_info(range(101)))
    assert [info.task_metadata["seed"] for info in infos] == list(range(101))
    assert [asked.query.count("seed=") for asked in app.asked] == [50, 50, 1]


@pytest.mark.parametrize("answer", [[], [{}], [{}, {}, {}], {}, "two", None])
def test_other_than_one_task_a_seed_is_an_error(answer: Any) -> None:
    error = failing(answering(task_info=(200, answer)), lambda client: client.task_info([1, 2]))
    assert isinstance(error, AppAnswerError)
    assert "one task for each of 2 seeds" in str(error)


def test_the_key_travels_in_all_three_headers() -> None:
    app = answering(health=(200, ANSWERS["health"]))
    asking(app, lambda client: client.health(), keys=[KEY, "alias"])
    (asked,) = app.asked
    assert asked.headers["x-api-key"] == KEY
    assert asked.headers["x-api-keys"] == f"{KEY},alias"
    assert asked.headers["authorization"] == f"Bearer {KEY}"


def test_without_a_key_no_such_header_is_sent() -> None:
    app = answering(health=(200, ANSWERS["health"]))
    asking(app, lambda client: client.health())
    assert not {"x-api-key", "x-api-keys", "authorization"} & set(app.asked[0].headers)


@pytest.mark.parametrize("accepted", [KEY, "alias"])
def test_an_app_that_knows_one_of_the_keys_answers(accepted: str) -> None:
    app = FakeTaskApp(keys=(accepted,), answers={"/health": (200, ANSWERS["health"])})
    asking(app, lambda client: client.health(), keys=[KEY, "alias"])


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, ANSWERS["unauthorised"]),
        (400, {"detail": {"error": {"code": "unauthorized", "message": "no"}}}),
        (401, ANSWERS["forbidden"]),
        (403, {"expected_api_key_prefix": KEY[:6]}),
        (401, {}),
    ],
)
@pytest.mark.parametrize(("keys", "advice"), [([], "none was sent"), ([KEY], "does not take the key that was sent")])
def test_every_way_of_saying_unauthorised_says_what_to_set(
    status: int, body: dict[str, Any], keys: list[str], advice: str
) -> None:
    app = FakeTaskApp(keys=("other",), refuse=(status, body))
    error = failing(app, lambda client: client.rollout(REQUEST), keys=keys)
    assert isinstance(error, AppUnauthorisedError)
    assert advice in str(error)
    assert "ENVIRONMENT_API_KEY" in str(error)
    assert KEY[:4] not in str(error)  # the body holds the beginning of a key
    assert len(app.asked) == 1  # asking again would not help


def test_an_app_without_a_key_of_its_own_is_told_from_one_that_wants_another() -> None:
    error = failing(FakeTaskApp(keys=None), lambda client: client.health(), keys=[KEY])
    assert isinstance(error, AppUnauthorisedError)
    assert "set ENVIRONMENT_API_KEY where the app runs" in str(error)


def test_a_key_that_an_answer_repeats_is_not_in_the_error() -> None:
    app = answering(health=(500, {"detail": f"you sent {KEY}, which begins with {KEY[:8]}"}))
    error = failing(app, lambda client: client.health(), keys=[KEY])
    assert "you sent ***, which begins with ***" in str(error)
    assert "secret" not in repr(AppKeys([KEY]))


def test_keys_come_from_the_environment() -> None:
    def headers(**environ: str) -> dict[str, str]:
        return AppKeys.from_environment(environ).headers()

    assert headers() == {}
    assert headers(ENVIRONMENT_API_KEY="a", DEV_ENVIRONMENT_API_KEY="b")["x-api-keys"] == "a"
    assert headers(ENVIRONMENT_API_KEY=" ", DEV_ENVIRONMENT_API_KEY="b")["x-api-key"] == "b"
    assert headers(ENVIRONMENT_API_KEY="a", ENVIRONMENT_API_KEY_ALIASES="b, a,,c")["x-api-keys"] == "a,b,c"


@pytest.mark.parametrize("key", ["two words", "a\r\nx-evil: 1", "ключ", "tab\there"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        AppKeys([key])
    assert key not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (404, ANSWERS["unknown_env"], AppRefusedError, "unknown environment 'crafty'"),
        (422, ANSWERS["invalid"], AppRefusedError, "body.mode: Field required"),
        (400, {"error": "bad"}, AppRefusedError, "bad"),
        (200, ["ok"], AppAnswerError, "expected a JSON object"),
        (200, {"healthy": False}, AppError, "not healthy"),
    ],
)
def test_what_will_not_get_better_is_asked_once(status: int, body: Any, kind: type[AppError], says: str) -> None:
    app = answering(health=(status, body))
    error = failing(app, lambda client: client.health())
    assert type(error) is kind
    assert says in str(error)
    assert len(app.asked) == 1


def test_a_redirect_is_not_followed() -> None:
    app = answering(health=lambda asked: (307, {}, {"location": f"{STAGE.url}/info"}), info=(200, {}))
    error = failing(app, lambda client: client.health(), keys=[KEY])
    assert isinstance(error, AppRefusedError)
    assert "redirects are not followed" in str(error)
    assert [asked.path for asked in app.asked] == ["/health"]  # the key went nowhere else


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_get_better_is_asked_three_times(status: int) -> None:
    app = answering(health=(status, ANSWERS["policy_failed"]))
    error = failing(app, lambda client: client.health())
    says = f"/health: HTTP {status}: policy_step_failed: policy_step_failed: the model answered 502 (3 attempts)"
    assert str(error).endswith(says)
    assert len(app.asked) == 3


def test_an_app_that_gets_better_is_well() -> None:
    statuses = iter([503, 500, 200])
    app = answering(health=lambda asked: (next(statuses), ANSWERS["health"]))
    asking(app, lambda client: client.health())
    assert len(app.asked) == 3


def test_an_app_that_is_not_there_is_an_error_after_three_attempts() -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port meanwhile
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"

        async def ask() -> None:
            async with TaskAppClient(url, settings=TaskAppSettings(max_attempts=3), sleep=_no_sleep) as client:
                await client.health()

        with pytest.raises(AppError, match=r"ConnectError.*\(3 attempts\)"):
            asyncio.run(ask())


async def _no_sleep(seconds: float) -> None:
    pass


def test_a_rollout_is_read() -> None:
    app = ScriptedApp(spoil=stored_rollout("rollout_response_a"))
    rollout = asking(app, lambda client: client.rollout(REQUEST))
    assert (rollout.episode_return, rollout.success, rollout.turn_rewards) == (2.5, True, (1.0, 1.5))
    # What was sent is the stored request, but for absent fields and the correlation id that generation B wants.
    sent = app.asked[0].body
    stored = json.loads((DATA / "rollout_request_a.json").read_text())
    stored["env"].pop("env_id")
    stored["policy"].pop("policy_id")
    assert sent == stored | {"trace_correlation_id": "trace_5f"}


@pytest.mark.parametrize("name", ["rollout_response_b_metrics", "rollout_response_b_reward_info"])
def test_a_rollout_of_generation_b_is_read(name: str) -> None:
    rollout = asking(ScriptedApp(spoil=stored_rollout(name)), lambda client: client.rollout(REQUEST))
    assert rollout.generation == "B"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run_id": "another"}, "is to another attempt, 'another', and is dropped"),
        ({"run_id": None}, "run_id: Field required"),
        ({"metrics": {"mean_return": "1.0"}}, "metrics.mean_return: Input should be a valid number, got 1.0"),
        ({"metrics": None}, "metrics: Field required"),
        ({"trajectories": [{"steps": [{"reward": True}]}]}, "trajectories.0.steps.0.reward"),
        ({"trajectories": [{"steps": [{"info": {"gspo_gym": 1}}]}]}, "Input should be a valid dictionary"),
        ({"aborted": "no"}, "aborted: Input should be a valid boolean"),
    ],
)
def test_an_answer_that_is_not_of_the_contract_is_an_error_and_is_not_asked_for_again(
    changes: dict[str, Any], says: str
) -> None:
    answer = stored_rollout("rollout_response_a")({}) | changes
    app = ScriptedApp(spoil=lambda request: answer)
    error = failing(app, lambda client: client.rollout(REQUEST))
    assert isinstance(error, AppAnswerError)
    assert says in str(error)
    assert app.num_rollouts == 1


def test_an_answer_of_generation_b_to_another_attempt_is_dropped() -> None:
    answer = stored_rollout("rollout_response_b_metrics")({}) | {"trace_correlation_id": "trace_60"}
    error = failing(ScriptedApp(spoil=lambda request: answer), lambda client: client.rollout(REQUEST))
    assert "is to another attempt" in str(error)


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("garbage", AppAnswerError, "the answer is no JSON"),
        ("garbage_json", AppAnswerError, "expected a JSON object"),
        ("half_json", AppAnswerError, "the answer is no JSON"),
        ("half", AppAttemptError, "RemoteProtocolError"),
        ("nan", AppAnswerError, "Input should be a finite number"),
    ],
)
def test_a_broken_answer_is_an_error(fault: Any, kind: type[AppError], says: str) -> None:
    app = ScriptedApp(spoil=stored_rollout("rollout_response_a"), fault=lambda number: fault)
    error = failing(app, lambda client: client.rollout(REQUEST))
    assert type(error) is kind
    assert says in str(error)
    assert app.num_rollouts == 1


def test_an_answer_that_is_too_long_is_given_up_while_it_comes_in() -> None:
    class Endless(FakeTaskApp):
        async def _rollout(self, request: dict[str, Any], receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b" " * 300_000, "more_body": True})
            while (await receive())["type"] != "http.disconnect":  # and no end, until the client hangs up
                pass

    settings = TaskAppSettings(max_answer_bytes=200_000)
    error = failing(Endless(), lambda client: client.rollout(REQUEST), settings=settings)
    assert isinstance(error, AppAnswerError)
    assert "more than max_answer_bytes = 200000 bytes" in str(error)


def test_an_answer_that_is_compressed_is_refused() -> None:
    """A few kilobytes may be gigabytes; an app that was asked for plain bytes and sends others is not unpacked."""

    class Compressed(FakeTaskApp):
        async def _rollout(self, request: dict[str, Any], receive: Any, send: Any) -> None:
            headers = [(b"content-encoding", b"gzip")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"\x1f\x8b"})

    app = Compressed()
    assert "compressed" in str(failing(app, lambda client: client.rollout(REQUEST)))
    assert app.asked[0].headers["accept-encoding"] == "identity"


def test_an_answer_nested_too_deeply_is_an_error() -> None:
    class Deep(FakeTaskApp):
        async def _rollout(self, request: dict[str, Any], receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"[" * 100_000})

    assert "no JSON" in str(failing(Deep(), lambda client: client.rollout(REQUEST)))


@pytest.mark.parametrize("drips", [False, True])
def test_the_deadline_holds_until_the_last_byte(drips: bool) -> None:
    """Also where the app sends a byte now and then, so that no single read takes long."""

    class Slow(FakeTaskApp):
        async def _rollout(self, request: dict[str, Any], receive: Any, send: Any) -> None:
            if drips:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while not receive_task(receive).done():
                    await send({"type": "http.response.body", "body": b" ", "more_body": True})
                    await asyncio.sleep(0.01)
            else:
                await receive()

    gone: list[asyncio.Task[Any]] = []

    def receive_task(receive: Any) -> asyncio.Task[Any]:
        if not gone:
            gone.append(asyncio.ensure_future(receive()))
        return gone[0]

    error = failing(Slow(), lambda client: client.rollout(REQUEST, timeout_seconds=0.2))
    assert isinstance(error, AppTimeoutError)
    assert isinstance(error, TimeoutError)
    assert "no complete answer within 0.2 seconds" in str(error)


def test_a_rollout_is_never_asked_for_twice() -> None:
    for fault in ("500", "503", "half"):
        app = FakeTaskApp(fault=lambda number, fault=fault: fault)  # type: ignore[misc]
        if fault == "half":
            app = ScriptedApp(fault=lambda number: "half", spoil=stored_rollout("rollout_response_a"))
        error = failing(app, lambda client: client.rollout(REQUEST))
        assert isinstance(error, AppAttemptError)
        assert app.num_rollouts == 1


def test_the_environments_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    asking(answering(health=(200, ANSWERS["health"])), lambda client: client.health())


@pytest.mark.parametrize("url", ["127.0.0.1:8001", "http://user:secret@host", "http://host?key=secret"])
def test_a_url_that_is_no_base_url_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TaskAppClient(url)
    assert "secret" not in str(raised.value)

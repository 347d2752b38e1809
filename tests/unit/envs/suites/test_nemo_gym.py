"""NeMoGymEnv against two servers that speak NeMo-Gym 0.4.0's protocol, which itself needs Python 3.12.

Written after that version as it was seen to run: sessions in a signed Starlette cookie that is refreshed with every
reply; a counter with tools and /verify (its `example_session_state_mgmt`); blackjack with /reset and /step, with a deck
without chance. Both have its trap: a request without the cookie is a new session, answered 200. Pinned here:

1.  The conversation that is graded is the Responses-API object that a NeMo-Gym agent would have made.
2.  Without the cookie, or with another session, no answer is believed.
3.  What the server refuses is an error with its text, and a tool's refusal of arguments is the model's to read.
4.  A step is repeated only where the server knows it again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import uuid
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import fastapi
import httpx
import pytest
from fastapi.responses import JSONResponse, PlainTextResponse
from gspo_gym_envs.suites.nemo_gym import messages_of, response_of, session_of

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.registry import make
from gspo_gym.errors import ConfigError, ContractError, EnvError, EnvTimeoutError
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Message, ToolCall

SECRET = b"not a secret"


class Signed:
    """Sessions in a cookie as itsdangerous signs them, `base64(JSON).time.signature`, anew with every reply."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_signed = 0
        self.lose_session = False  # the next reply begins another one, as after a restart
        self.expire = False  # the next reply takes the cookie away

    def session_of(self, request: fastapi.Request) -> str:
        """The session of a request: its own, or, and that is the trap, a new one."""
        payload, _, rest = request.cookies.get(self.name, "").partition(".")
        time, _, signature = rest.partition(".")
        if payload and hmac.compare_digest(signature, self._signature(payload, time)):
            return str(json.loads(base64.b64decode(payload))["session_id"])
        return str(uuid.uuid4())

    def sign(self, response: fastapi.Response, session: str) -> fastapi.Response:
        if self.lose_session:
            session, self.lose_session = str(uuid.uuid4()), False
        payload = base64.b64encode(json.dumps({"session_id": session}).encode()).decode()
        self.num_signed += 1
        time = f"t{self.num_signed}"
        value = f"{payload}.{time}.{self._signature(payload, time)}"
        response.set_cookie(self.name, value, max_age=0 if self.expire else 1209600, httponly=True, samesite="lax")
        return response

    def _signature(self, payload: str, time: str) -> str:
        return hmac.new(SECRET, f"{payload}.{time}".encode(), hashlib.sha1).hexdigest()


class CounterServer:
    """A resources server: the tools increment and get_counter; verified is whether the counter is as expected."""

    def __init__(self) -> None:
        self.cookies = Signed("CounterServer___counter")
        self.counters: dict[str, int] = {}
        self.verified: deque[dict[str, Any]] = deque(maxlen=10)  # check_env would take more for a leak
        self.app = fastapi.FastAPI()
        for path in ("/seed_session", "/increment", "/get_counter", "/verify"):
            self.app.add_api_route(path, self.answer, methods=["POST"])

    async def answer(self, request: fastapi.Request) -> fastapi.Response:
        session = self.cookies.session_of(request)
        status, answer = self.play(request.url.path, await request.json(), session)
        return self.cookies.sign(JSONResponse(answer, status), session)

    def play(self, path: str, body: dict[str, Any], session: str) -> tuple[int, Any]:
        if path in ("/seed_session", "/verify") and "responses_create_params" not in body:
            return 422, {"detail": [{"loc": ["body", "responses_create_params"], "msg": "Field required"}]}
        if path == "/seed_session":
            self.counters[session] = body["initial_count"]
            return 200, {}
        if path == "/increment":
            if body.get("count") == 500:
                return 500, "the counter broke"
            if not isinstance(body.get("count"), int):
                return 422, {"detail": "count: expected an integer"}
            self.counters[session] = self.counters.get(session, 0) + body["count"]
            return 200, {"success": True}
        if path == "/get_counter":
            return 200, {"count": self.counters.get(session, 0)}
        self.verified.append(body)
        return 200, {**body, "reward": float(self.counters.get(session, 0) == body["expected_count"])}


class BlackjackServer:
    """A gymnasium server: cards are dealt in the order 10, 5, 6, 9 a session; the dealer has 18."""

    DECK = (10, 5, 6, 9)

    def __init__(self, *, info: dict[str, Any] | None = None) -> None:
        self.cookies = Signed("Blackjack___cards")
        self.hands: dict[str, list[int]] = {}
        self.steps: deque[dict[str, Any]] = deque(maxlen=10)
        self.closed: list[str] = []
        self.lose_answers = 0  # so many steps are played and answered 503
        self.info = info or {}
        self._answered: dict[str, Any] = {}
        self.app = fastapi.FastAPI()
        for path in ("/reset", "/step", "/close"):
            self.app.add_api_route(path, self.answer, methods=["POST"])

    async def answer(self, request: fastapi.Request) -> fastapi.Response:
        session = self.cookies.session_of(request)
        body = await request.json()
        if request.url.path == "/close":
            self.closed.append(session)
            return self.cookies.sign(JSONResponse({}), session)
        if request.url.path == "/reset":
            self.hands[session] = list(self.DECK[:2])
            answer = {"observation": "You hold 15. Hit or stand?", "info": self.info}
            return self.cookies.sign(JSONResponse(answer), session)
        self.steps.append(body)
        step_id = body.get("_ng_step_request_id")
        answer = self._answered.get(step_id) or self.play(body["response"]["output"], session)
        if step_id is not None:
            self._answered[step_id] = answer
        if self.lose_answers:
            self.lose_answers -= 1
            return PlainTextResponse("proxy: upstream gone", 503)
        return self.cookies.sign(JSONResponse(answer), session)

    def play(self, output: list[dict[str, Any]], session: str) -> dict[str, Any]:
        hand = self.hands.setdefault(session, [])  # the trap: an unknown session has an empty hand, which loses
        said = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
        called = [item for item in output if item["type"] == "function_call"]
        if called:
            outputs = [{"call_id": item["call_id"], "output": f"{sum(hand)}"} for item in called]
            info = {**self.info, "tool_outputs": outputs}
            return {"observation": None, "reward": -0.25, "terminated": False, "truncated": False, "info": info}
        if "hit" in said:
            hand.append(self.DECK[len(hand)])
            if sum(hand) <= 21:
                told = f"You hold {sum(hand)}. Hit or stand?"
                return {"observation": told, "reward": 0, "terminated": False, "truncated": False, "info": {}}
        won = 18 < sum(hand) <= 21
        reward = 1.0 if won else -1.0
        return {"observation": f"You end with {sum(hand)}.", "reward": reward, "terminated": True, "truncated": False}


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "name": name, "description": f"{name}.", "parameters": parameters, "strict": True}


def counter_row(initial: int, expected: int) -> dict[str, Any]:
    params = {
        "input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": f"Make it {expected}."}],
        "tools": [tool("increment", count="integer"), tool("get_counter")],
    }
    return {"responses_create_params": params, "initial_count": initial, "expected_count": expected}


COUNTER_ROWS = [counter_row(3, 5), counter_row(1, 1)]
CARD_ROWS = [{"responses_create_params": {"input": "Play.", "tools": [tool("total")]}}]


@pytest.fixture
def counter() -> Iterator[tuple[str, CounterServer]]:
    server = CounterServer()
    with BackgroundServer(server.app) as served:
        yield served.url, server


@pytest.fixture
def blackjack() -> Iterator[tuple[str, BlackjackServer]]:
    server = BlackjackServer()
    with BackgroundServer(server.app) as served:
        yield served.url, server


def calls(*given: tuple[str, dict[str, Any]]) -> Message:
    made = tuple(ToolCall(f"c{index}", name, arguments) for index, (name, arguments) in enumerate(given))
    return Message("assistant", "", made)


def say(text: str) -> Message:
    return Message("assistant", text)


def episode(env: Any, *actions: Message, seed: int = 0) -> list[Any]:
    async def played() -> list[Any]:
        try:
            answers = [await env.reset(seed=seed)]
            return answers + [await env.step(action) for action in actions]
        finally:
            await env.close()

    return asyncio.run(played())


# -- resources servers ----------------------------------------------------------------------------------------------


def test_tools_change_the_session_and_the_answer_is_graded(counter: tuple[str, CounterServer]) -> None:
    """3 + 2 = 5, as the row expects; the other row of the same server has a counter of its own."""
    url, server = counter
    env = make("NeMoGym", url=url, rows=COUNTER_ROWS)
    assert [schema["function"]["name"] for schema in env.tool_schemas] == ["increment", "get_counter"]
    first, turn, end = episode(env, calls(("increment", {"count": 2}), ("get_counter", {})), say("Done."))
    assert [(m.role, m.content) for m in first[0]] == [("system", "Count."), ("user", "Make it 5.")]
    assert [(m.tool_call_id, m.content) for m in turn[0]] == [("c0", '{"success":true}'), ("c1", '{"count":5}')]
    assert turn[1:4] == (None, False, False)
    assert end[:4] == ([], 1.0, True, False)
    assert sorted(server.counters.values()) == [5]


def test_the_graded_response_is_a_responses_api_object(counter: tuple[str, CounterServer]) -> None:
    url, server = counter
    env = make("NeMoGym", url=url, rows=COUNTER_ROWS)
    thought = Message("assistant", "Two.", (ToolCall("c0", "increment", {"count": 2}),), reasoning_content="5 - 3")
    episode(env, thought, say("Done."))
    (body,) = server.verified
    assert {key: body[key] for key in COUNTER_ROWS[0]} == COUNTER_ROWS[0]
    response = body["response"]
    required = {"id", "created_at", "model", "object", "output", "parallel_tool_calls", "tool_choice", "tools"}
    assert set(response) == required
    assert (response["object"], response["tools"]) == ("response", COUNTER_ROWS[0]["responses_create_params"]["tools"])
    reasoning, said, call, output, answer = response["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "5 - 3"}]
    assert said["content"] == [{"type": "output_text", "text": "Two.", "annotations": []}]
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "c0", "increment")
    assert json.loads(call["arguments"]) == {"count": 2}
    assert output == {"type": "function_call_output", "call_id": "c0", "output": '{"success":true}'}
    assert {key: answer[key] for key in ("type", "role", "status", "content")} == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Done.", "annotations": []}],
    }
    ids = [item["id"] for item in response["output"] if "id" in item]
    assert len(set(ids)) == len(ids) == 4


def test_max_steps_grades_what_is_there_and_truncates(counter: tuple[str, CounterServer]) -> None:
    url, server = counter
    env = make("NeMoGym", url=url, rows=COUNTER_ROWS, max_steps=2)
    turns = episode(env, calls(("get_counter", {})), calls(("increment", {"count": 2})))
    assert turns[2][1:4] == (1.0, False, True)
    assert server.verified[0]["response"]["output"][-1]["output"] == '{"success":true}'


def test_a_call_that_the_row_does_not_offer_never_reaches_the_server(counter: tuple[str, CounterServer]) -> None:
    """The path of a request is the tool's name: "verify" would be graded, and "seed_session" start over."""
    url, server = counter
    env = make("NeMoGym", url=url, rows=COUNTER_ROWS)
    turn = episode(env, calls(("verify", {"responses_create_params": {}}), ("incremen", {})))[1]
    assert turn[0][0].content.startswith("error: unknown tool 'verify'")
    assert turn[0][1].content == "error: unknown tool 'incremen'; did you mean 'increment'?"
    assert not server.verified


def test_refused_arguments_are_for_the_model_and_a_broken_tool_is_not(counter: tuple[str, CounterServer]) -> None:
    env = make("NeMoGym", url=counter[0], rows=COUNTER_ROWS)
    turn = episode(env, calls(("increment", {"count": "two"})))[1]
    assert turn[0][0].content == 'error: {"detail":"count: expected an integer"}'
    with pytest.raises(EnvError, match=r"/increment: status 500: .*the counter broke"):
        episode(env, calls(("increment", {"count": 500})))


def test_the_seed_picks_the_row(counter: tuple[str, CounterServer]) -> None:
    env = make("NeMoGym", url=counter[0], rows=COUNTER_ROWS)
    assert [episode(env, seed=seed)[0][0][1].content for seed in (0, 1, 2)] == [
        "Make it 5.",
        "Make it 1.",
        "Make it 5.",
    ]


# -- the session ----------------------------------------------------------------------------------------------------


def test_the_server_has_the_trap(blackjack: tuple[str, BlackjackServer]) -> None:
    """What the adapter protects from: without the cookie, a step is answered 200 with a plausible losing reward."""
    url, _ = blackjack
    row = CARD_ROWS[0]
    response = response_of([say("stand")], row["responses_create_params"], response_id="r")
    httpx.post(f"{url}/reset", json=row, trust_env=False, timeout=60)
    answer = httpx.post(f"{url}/step", json={**row, "response": response}, trust_env=False, timeout=60)
    assert answer.status_code == 200
    assert (answer.json()["reward"], answer.json()["observation"]) == (-1.0, "You end with 0.")


def test_without_its_cookie_no_step_is_sent(blackjack: tuple[str, BlackjackServer]) -> None:
    url, server = blackjack
    server.cookies.expire = True  # the reply to reset takes the cookie away again
    with pytest.raises(ContractError, match="/reset: expected one session cookie, got none"):
        episode(make("NeMoGym", url=url, rows=CARD_ROWS, kind="gymnasium"), say("stand"))
    assert not server.steps


def test_a_cookie_that_is_taken_away_ends_the_episode(counter: tuple[str, CounterServer]) -> None:
    url, server = counter
    env = make("NeMoGym", url=url, rows=COUNTER_ROWS)

    async def played() -> None:
        await env.reset(seed=0)
        server.cookies.expire = True
        with pytest.raises(EnvError, match="/get_counter: no session cookie after the answer"):
            await env.step(calls(("get_counter", {})))
        with pytest.raises(Exception, match="call reset first"):
            await env.step(say("Done."))

    asyncio.run(played())
    assert not server.verified


def test_another_session_in_the_reply_ends_the_episode(blackjack: tuple[str, BlackjackServer]) -> None:
    url, server = blackjack
    env = make("NeMoGym", url=url, rows=CARD_ROWS, kind="gymnasium")

    async def played() -> None:
        await env.reset(seed=0)
        server.cookies.lose_session = True
        with pytest.raises(EnvError, match="/step: another session after the answer"):
            await env.step(say("hit"))

    asyncio.run(played())


def test_a_cookie_with_a_new_signature_is_the_same_session() -> None:
    payload = base64.b64encode(b'{"session_id": "s1"}').decode()
    other = base64.b64encode(b'{"session_id": "s2"}').decode()
    assert session_of(f"{payload}.t1.aaaa") == session_of(f"{payload}.t2.bbbb") == "s1"
    assert session_of(f"{other}.t1.aaaa") == "s2"
    assert session_of("opaque") != session_of("other")


def test_episodes_side_by_side_do_not_share_a_session(counter: tuple[str, CounterServer]) -> None:
    """Ten of row 0 (3 + n) beside each other: each counts for itself."""
    url, _ = counter

    async def one(n: int) -> str:
        env = make("NeMoGym", url=url, rows=COUNTER_ROWS)
        await env.reset(seed=0)
        await env.step(calls(("increment", {"count": n})))
        messages = (await env.step(calls(("get_counter", {}))))[0]
        await env.close()
        return str(messages[0].content)

    async def together() -> list[str]:
        return await asyncio.gather(*(one(n) for n in range(10)))

    assert asyncio.run(together()) == [f'{{"count":{3 + n}}}' for n in range(10)]


# -- gymnasium servers ----------------------------------------------------------------------------------------------


def test_turns_are_steps_and_their_rewards_add_up(blackjack: tuple[str, BlackjackServer]) -> None:
    """10 + 5 + 6 = 21 beats 18; looking at the total cost 0.25."""
    url, server = blackjack
    env = make("NeMoGym", url=url, rows=CARD_ROWS, kind="gymnasium")
    first, look, hit, stand = episode(env, calls(("total", {})), say("hit"), say("stand"))
    assert [m.content for m in first[0]] == ["Play.", "You hold 15. Hit or stand?"]
    assert [(m.role, m.content, m.tool_call_id) for m in look[0]] == [("tool", "15", "c0")]
    assert hit[0][0].content == "You hold 21. Hit or stand?"
    assert (look[1], hit[1], stand[1], stand[2], stand[3]) == (-0.25, 0.0, 1.0, True, False)
    assert len(server.steps[1]["response"]["output"]) == 1  # the turn's own output, not the conversation's
    assert "_ng_step_request_id" not in server.steps[0]


def test_a_lost_answer_is_an_error_where_steps_are_not_known_again(blackjack: tuple[str, BlackjackServer]) -> None:
    url, server = blackjack
    server.lose_answers = 1
    with pytest.raises(EnvError, match="/step: status 503: proxy: upstream gone"):
        episode(make("NeMoGym", url=url, rows=CARD_ROWS, kind="gymnasium"), say("hit"))
    assert len(server.steps) == 1


def test_a_lost_answer_is_asked_for_again_where_steps_are_known() -> None:
    """Played once, answered at the second try: the hand has one card more, not two (which would be 30, and lost)."""
    server = BlackjackServer(info={"supports_step_idempotency": True, "supports_explicit_close": True})
    server.lose_answers = 1
    with BackgroundServer(server.app) as served:
        env = make("NeMoGym", url=served.url, rows=CARD_ROWS, kind="gymnasium")
        _, hit, stand = episode(env, say("hit"), say("stand"))
    assert hit[0][0].content == "You hold 21. Hit or stand?"
    assert stand[1] == 1.0
    ids = [step["_ng_step_request_id"] for step in server.steps]
    assert ids[0] == ids[1] != ids[2]
    assert len(server.closed) == 1


@pytest.mark.slow
def test_check_env_passes_on_both(counter: tuple[str, CounterServer], blackjack: tuple[str, BlackjackServer]) -> None:
    for url, rows, kind in ((counter[0], COUNTER_ROWS, "resources"), (blackjack[0], CARD_ROWS, "gymnasium")):
        env = partial(make, "NeMoGym", url=url, rows=rows, kind=kind, reward_range=(-1.0, 1.0))
        # Leaks are not looked for: the servers are in this process, too, and keep their sessions.
        check_env(env, seeds=range(2), max_turns=4, num_leak_episodes=0).raise_if_failed()


# -- what is refused ------------------------------------------------------------------------------------------------


def test_proxies_of_the_environment_are_not_used(
    counter: tuple[str, CounterServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    assert len(episode(make("NeMoGym", url=counter[0], rows=COUNTER_ROWS))) == 1


def test_a_server_that_hangs_is_a_timeout() -> None:
    app = fastapi.FastAPI()

    @app.post("/seed_session")
    async def hang(request: fastapi.Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":  # until the client gives up
            pass

    async def played(url: str) -> None:
        env = make("NeMoGym", url=url, rows=COUNTER_ROWS, timeout_seconds=0.2)
        with pytest.raises(EnvTimeoutError, match=r"/seed_session: no answer within 0\.2 seconds"):
            await env.reset(seed=0)

    with BackgroundServer(app) as served:
        asyncio.run(played(served.url))


def test_a_refused_request_is_an_error_with_the_servers_text(counter: tuple[str, CounterServer]) -> None:
    env = make("NeMoGym", url=counter[0] + "/nowhere", rows=COUNTER_ROWS)
    with pytest.raises(ContractError, match=r"/nowhere/seed_session: status 404: .*Not Found"):
        episode(env)


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        ([], ConfigError, "at least one row"),
        ([{"question": "?"}], ContractError, r"rows\[0\]: expected responses_create_params as an object"),
        ([COUNTER_ROWS[0], CARD_ROWS[0]], ConfigError, r"rows\[1\]: its tools are not those of rows\[0\]"),
        ([{"responses_create_params": {"tools": [{"type": "web_search"}]}}], ContractError, "tools of type function"),
    ],
)
def test_rows_that_are_none_are_refused(rows: list[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make("NeMoGym", url="http://127.0.0.1:1", rows=rows)


def test_input_parts_are_text_and_pictures_are_refused() -> None:
    parts = [{"type": "input_text", "text": "Look."}, {"type": "input_text", "text": "Well."}]
    params = {"instructions": "Be brief.", "input": [{"role": "user", "content": parts}]}
    assert [(m.role, m.content) for m in messages_of(params, where="it")] == [
        ("system", "Be brief."),
        ("user", "Look.\nWell."),
    ]
    picture = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}
    with pytest.raises(ContractError, match="images are not read"):
        messages_of(picture, where="it")

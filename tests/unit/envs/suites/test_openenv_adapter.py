"""OpenEnvEnv: one episode is one session, and nothing that goes wrong on the way looks like an episode.

The round trip (our adapter against our server) must play as in this process. What a server of ours never says is said
by a small one written here, over a real WebSocket, one script of frames a connection. Pinned here:

1.  Text and tool environments play the same transcripts over the wire as in this process.
2.  A reset is sent once on each connection, and a second reset is a second connection.
3.  A full server is waited for until the deadline, and then named as full.
4.  Each error code has its consequence; a lost socket is an error and never a reconnection.
5.  The field for the text, and what is shown of an observation, follow the schema or the user.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import fastapi
import pytest
from app_process import serving_process
from gspo_gym_envs.suites.openenv_socket import text_field_of
from moved_clock import move_clock

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.playing import Playthrough, play, replaying
from gspo_gym.env.registry import make
from gspo_gym.errors import ConfigError, ContractError, EnvError, EnvTimeoutError
from gspo_gym.remote.serve.openenv_server import create_openenv_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Message, ToolCall

FIRST = {"observation": {"hint": "Begin."}, "reward": None, "done": False}
TEXT_ACTION = {"properties": {"text": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["text"]}
CALL_ACTION = {"properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
HANG, DROP = "hang", "drop"


def shows(hint: str, reward: Any = None, done: Any = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": reward, "done": done}}


def fails(code: str, message: str = "no", **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


RESET = {"type": "observation", "data": FIRST}
FULL = fails("CAPACITY_REACHED", "1 of 1 sessions")


class Script:
    """A server that answers the n-th connection with the n-th script, one frame for each that it reads.

    A script that starts with `FULL` is sent before anything is read, and then the server closes, as OpenEnv's does.
    """

    def __init__(self, *scripts: Sequence[Any], action: Any = TEXT_ACTION, tools: Any = None) -> None:
        self.read: list[list[Any]] = []
        self.num_schema = 0
        self.app = fastapi.FastAPI()
        self._scripts = iter(scripts)
        self._action, self._tools = action, tools
        self.app.add_api_route("/schema", self._schema)
        self.app.add_api_route("/mcp", self._mcp, methods=["POST"])
        self.app.add_api_websocket_route("/ws", self._play)

    async def _schema(self) -> dict[str, Any]:
        self.num_schema += 1
        return {"action": self._action, "observation": {}}

    async def _mcp(self) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": 1, "result": {"tools": self._tools}}

    async def _play(self, websocket: fastapi.WebSocket) -> None:
        await websocket.accept()
        script, read = next(self._scripts), []
        self.read.append(read)
        try:
            for frame in script:
                if frame is FULL:
                    await websocket.send_text(json.dumps(frame))
                    break
                read.append(json.loads(await websocket.receive_text()))
                if frame == DROP:
                    break
                if frame != HANG:
                    await websocket.send_text(frame if isinstance(frame, str) else json.dumps(frame))
            else:
                read.append(json.loads(await websocket.receive_text()))
            await websocket.close()
        except fastapi.WebSocketDisconnect:
            read.append("gone")


@contextmanager
def scripted(*scripts: Sequence[Any], action: Any = TEXT_ACTION, tools: Any = None) -> Iterator[tuple[str, Script]]:
    script = Script(*scripts, action=action, tools=tools)
    with BackgroundServer(script.app) as server:
        yield server.url, script


def episode(env: Any, *actions: Message | str, seed: int = 3) -> list[Any]:
    """The answers to reset and to each action, in one event loop; the environment is closed."""

    async def played() -> list[Any]:
        try:
            answers = [await env.reset(seed=seed)]
            return answers + [await env.step(action) for action in actions]
        finally:
            await env.close()

    return asyncio.run(played())


def transcript(factory: Any, actions: Any, seed: int, turns: int = 20) -> Playthrough:
    return asyncio.run(play(factory, actions, seed=seed, name="it", max_turns=turns, step_timeout_seconds=20))


# -- the round trip ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "config"), [("GuessNumber", {"high": 50}), ("SqlAnalyst", {"level": "easy"})])
def test_an_environment_plays_over_the_wire_as_in_this_process(name: str, config: dict[str, Any]) -> None:
    """Rewards, terms, events, success, flags and messages: all that `difference_from` compares."""
    policies = make(name).unwrapped.policies
    with BackgroundServer(create_openenv_app(name, config=config)) as server:
        assert make("OpenEnv", url=server.url).tool_schemas == make(name, **config).unwrapped.tool_schemas
        for seed in range(3):
            for policy in policies.values():
                here = transcript(lambda: make(name, **config), policy, seed)
                there = transcript(lambda: make("OpenEnv", url=server.url), replaying(here.actions), seed)
                assert here.difference_from(there) is None
                assert here.is_over
                assert here.episode_return is not None


def test_several_calls_and_a_truncated_end_cross_the_wire() -> None:
    """SqlAnalyst truncates after max_steps: two calls are one turn there, so the second message is the last."""
    calls = (ToolCall("a", "list_tables", {}), ToolCall("b", "describe", {"table": "none"}))
    actions = [Message("assistant", "hm", calls), Message("assistant", "")]
    config = {"max_steps": 2}
    with BackgroundServer(create_openenv_app("SqlAnalyst", config=config)) as server:
        there = transcript(lambda: make("OpenEnv", url=server.url), replaying(actions), 0, turns=2)
    assert [message.tool_call_id for message in there.answers[0].messages] == ["a", "b"]
    assert (there.answers[1].terminated, there.answers[1].truncated) == (False, True)
    here = transcript(lambda: make("SqlAnalyst", **config), replaying(actions), 0, turns=2)
    assert here.difference_from(there) is None


@pytest.mark.slow
def test_check_env_passes_over_the_wire() -> None:
    """The server in another process: the check counts all that this one holds."""
    with serving_process("GuessNumber", "--protocol", "openenv", "--max-sessions", "64") as url:
        env = partial(make, "OpenEnv", url=url, reward_range=(-0.4, 1.0))  # 0.1 for each of four illegal answers
        check_env(env, seeds=range(2), max_turns=4).raise_if_failed()


# -- one session an episode --------------------------------------------------------------------------------------------


def test_a_second_reset_is_a_second_connection_and_the_schema_is_read_once() -> None:
    with scripted([RESET], [RESET, shows("ok")]) as (url, script):
        env = make("OpenEnv", url=url, reset_options={"level": 2})
        make("OpenEnv", url=url.replace("http", "ws") + "/ws")

        async def two() -> None:
            await env.reset(seed=7)
            await env.reset(seed=8, options={"level": 3})
            await env.step("go")
            await env.close()

        asyncio.run(two())
        reset = {"type": "reset", "data": {"level": 2, "seed": 7}}
        again = {"type": "reset", "data": {"level": 3, "seed": 8}}
        step = {"type": "step", "data": {"text": "go"}}
        assert script.read == [[reset, {"type": "close"}], [again, step, {"type": "close"}]]
        assert script.num_schema == 1


def test_another_server_at_the_address_is_asked_for_its_own_facts() -> None:
    """The first environment is gone when the second server comes; the second loses its session with that server."""
    with BackgroundServer(create_openenv_app("SqlAnalyst")) as server:
        port = int(server.url.rpartition(":")[2])
        assert len(make("OpenEnv", url=server.url).tool_schemas) == 4  # list_tables, describe, query, answer
    with BackgroundServer(create_openenv_app("GuessNumber"), port=port) as server:
        env = make("OpenEnv", url=server.url)
        assert env.tool_schemas == ()

        async def lose_the_session() -> None:
            await env.reset(seed=0)
            await asyncio.to_thread(server.stop)
            with pytest.raises(EnvError, match="the session was lost at step"):
                await env.step("1")
            await env.close()

        asyncio.run(lose_the_session())
    with BackgroundServer(create_openenv_app("SqlAnalyst"), port=port) as server:
        assert len(make("OpenEnv", url=server.url).tool_schemas) == 4


def test_reward_null_is_not_scored_and_done_is_terminated() -> None:
    with scripted([RESET, shows("on"), shows("end", 0.5, True)]) as (url, _):
        first, second, third = episode(make("OpenEnv", url=url), "a", "b")
    assert first[0] == "Begin."
    assert second[:4] == ("on", None, False, False)
    assert third[:4] == ("end", 0.5, True, False)


# -- capacity ----------------------------------------------------------------------------------------------------------


def test_a_full_server_is_tried_again_and_then_played() -> None:
    with scripted([FULL], [FULL], [RESET, shows("ok", 1.0, True)]) as (url, script):
        answers = episode(make("OpenEnv", url=url), "go")
        assert answers[1][:3] == ("ok", 1.0, True)
        assert len(script.read) == 3


def test_a_server_that_stays_full_is_an_error_that_says_so() -> None:
    """The first wait is at least 0.5 x 0.05 seconds, beyond a deadline of 0.02."""
    with scripted([FULL], [FULL]) as (url, script):
        with pytest.raises(EnvError, match=r"at capacity for 0\.02 seconds \(1 of 1 sessions\).*max_concurrent_envs"):
            episode(make("OpenEnv", url=url, capacity_timeout_seconds=0.02))
        assert len(script.read) == 1


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_lost_socket_is_an_error_and_nothing_connects_again() -> None:
    with scripted([RESET, DROP]) as (url, script):
        env = make("OpenEnv", url=url)
        with pytest.raises(EnvError, match="the session was lost at step"):
            episode(env, "go")
        assert len(script.read) == 1


def test_a_turn_after_a_lost_one_is_refused() -> None:
    with scripted([RESET, DROP]) as (url, script):
        env = make("OpenEnv", url=url)

        async def stubborn() -> None:
            await env.reset(seed=0)
            with pytest.raises(EnvError):
                await env.step("go")
            with pytest.raises(Exception, match="call reset first"):
                await env.step("go")

        asyncio.run(stubborn())
        assert len(script.read) == 1


def test_a_late_answer_drops_the_socket() -> None:
    async def play(env: Any) -> None:
        await env.reset(seed=0)
        step = asyncio.create_task(env.step("go"))
        for _ in range(10):  # until it waits
            await asyncio.sleep(0)
        move_clock(asyncio.get_running_loop(), 60.0)
        with pytest.raises(EnvTimeoutError, match="no answer to step within 60 seconds"):
            await step

    with scripted([RESET, HANG]) as (url, script):
        asyncio.run(play(make("OpenEnv", url=url, message_timeout_seconds=60.0)))
    assert script.read[0][-1] == "gone"  # and not {"type": "close"}: cut, not said


def test_an_invalid_action_earns_nothing_and_a_failed_one_is_not_scored() -> None:
    reasons = [{"loc": ["text"], "msg": "too short"}]
    script = [
        RESET,
        fails("VALIDATION_ERROR", "Invalid", errors=reasons),
        fails("EXECUTION_ERROR", "boom"),
        shows("ok"),
    ]
    with scripted(script) as (url, _):
        answers = episode(make("OpenEnv", url=url), "", "x", "y")
    assert answers[1][:3] == ("Invalid; text: too short", 0.0, False)
    assert answers[2][:3] == ("boom", None, False)
    assert answers[3][0] == "ok"


def test_three_failed_steps_in_a_row_are_the_servers_fault() -> None:
    failed = fails("EXECUTION_ERROR", "boom")
    script = [RESET, failed, failed, shows("ok"), failed, failed, failed]
    expected = pytest.raises(EnvError, match="3 steps in a row were not executed: boom")
    with scripted(script) as (url, _), expected:
        episode(make("OpenEnv", url=url), *"abcdef")


@pytest.mark.parametrize(
    ("frame", "error", "text"),
    [
        (fails("FACTORY_ERROR", "no disk"), EnvError, "FACTORY_ERROR: no disk"),
        (fails("SESSION_ERROR"), EnvError, "SESSION_ERROR"),
        (fails("EXECUTION_ERROR"), EnvError, "reset: EXECUTION_ERROR"),  # at reset there is no model to tell it to
        (fails("UNKNOWN_TYPE"), ContractError, "does not speak OpenEnv's protocol"),
        ("nonsense", ContractError, "expected a JSON object with a type"),
        ({"type": "state", "data": {}}, ContractError, "expected an observation"),
        (shows("over", 1.0, True), ContractError, "its reset says that it is done"),
        (shows("?", None, "yes"), ContractError, "expected done as true or false"),
    ],
)
def test_a_reset_that_fails_says_why(frame: Any, error: type[Exception], text: str) -> None:
    with scripted([frame]) as (url, _), pytest.raises(error, match=text):
        episode(make("OpenEnv", url=url))


def test_a_reward_that_is_no_number_is_an_error() -> None:
    with (
        scripted([RESET, shows("ok", "much")]) as (url, _),
        pytest.raises(ContractError, match="expected a finite number"),
    ):
        episode(make("OpenEnv", url=url), "go")


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on port 9, so that whoever went that way would not come through."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with scripted([RESET]) as (url, _):
        assert episode(make("OpenEnv", url=url))[0][0] == "Begin."


def test_a_key_is_sent_with_everything_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    with BackgroundServer(create_openenv_app("GuessNumber", config={"style": "terse"}, api_key="s3cret")) as server:
        first = episode(make("OpenEnv", url=server.url, api_key_env="SOME_KEY"))[0]
        assert first[0] == [{"role": "user", "content": "Guess 1-8. 4 tries."}]
        with pytest.raises(ConfigError, match="expected a key in the variable OTHER_KEY"):
            make("OpenEnv", url=server.url, api_key_env="OTHER_KEY")
    with BackgroundServer(create_openenv_app("GuessNumber", api_key="other")) as server:
        with pytest.raises(EnvError, match="status 401") as caught:
            make("OpenEnv", url=server.url, api_key_env="SOME_KEY")
        assert "s3cret" not in str(caught.value)


def test_a_server_that_is_not_there_is_an_error_at_once() -> None:
    with scripted([RESET]) as (url, _):
        pass
    with pytest.raises(EnvError, match="/schema: ConnectError"):
        make("OpenEnv", url=url)


# -- tools -------------------------------------------------------------------------------------------------------------

TOOLS = [{"name": "look", "description": "Look.", "inputSchema": {"type": "object", "properties": {}}}]


def result(text: str, reward: Any = None, done: bool = False, **more: Any) -> dict[str, Any]:
    observation = {"tool_name": "look", "result": {"content": [{"type": "text", "text": text}], **more}, "error": None}
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def calls(*names: str) -> Message:
    return Message("assistant", "", tuple(ToolCall(f"c{index}", name, {"n": 1}) for index, name in enumerate(names)))


def test_each_call_is_a_step_the_rewards_add_up_and_none_is_made_after_the_end() -> None:
    script = [RESET, result("one", 0.25), result("two", 0.5, True)]
    with scripted(script, action=CALL_ACTION, tools=TOOLS) as (url, server):
        env = make("OpenEnv", url=url)
        messages, reward, terminated, _, _ = episode(env, calls("look", "look", "look"))[1]
        assert [m.content for m in messages] == ["one", "two", "error: the episode is over, this call was not made"]
        assert [m.tool_call_id for m in messages] == ["c0", "c1", "c2"]
        assert (reward, terminated) == (0.75, True)
        sent = {"type": "step", "data": {"type": "call_tool", "tool_name": "look", "arguments": {"n": 1}}}
        assert server.read[0][1:3] == [sent, sent]


def test_tool_errors_are_told_and_a_message_without_a_call_is_reminded() -> None:
    broken = {
        "type": "observation",
        "data": {"observation": {"error": {"message": "gone"}}, "reward": 0, "done": False},
    }
    script = [RESET, broken, result("bad", is_error=True)]
    with scripted(script, action=CALL_ACTION, tools=TOOLS) as (url, _):
        answers = episode(make("OpenEnv", url=url), calls("look"), Message("assistant", "hello"), calls("look"))
    assert answers[1][0][0].content == "error: gone"
    assert answers[2][:2] == ("Call a tool. Tools: look.", 0.0)
    assert answers[3][0][0].content == "error: bad"


def test_a_picture_in_a_tools_result_is_refused() -> None:
    picture = {"tool_name": "look", "result": {"content": [{"type": "image", "data": "AA"}]}}
    frame = {"type": "observation", "data": {"observation": picture, "reward": None, "done": False}}
    expected = pytest.raises(ContractError, match="images are not read")
    with scripted([RESET, frame], action=CALL_ACTION, tools=TOOLS) as (url, _), expected:
        episode(make("OpenEnv", url=url), calls("look"))


# -- fields ------------------------------------------------------------------------------------------------------------


def fields(required: Sequence[str], **types: str) -> dict[str, Any]:
    return {"properties": {name: {"type": kind} for name, kind in types.items()}, "required": list(required)}


def test_the_text_goes_into_the_only_required_field_or_the_named_one() -> None:
    chosen = text_field_of(fields(["a"], a="string", b="string"), named=None, fixed={}, where="it")
    alone = text_field_of(fields([], a="string", n="integer"), named=None, fixed={}, where="it")
    named = text_field_of(fields(["a"], a="string", b="string"), named="b", fixed={"a": "x"}, where="it")
    assert (chosen, alone, named) == ("a", "a", "b")


@pytest.mark.parametrize(
    ("schema", "named", "text"),
    [
        (fields(["a", "b"], a="string", b="string"), None, "choose with text_field"),
        (fields(["n"], n="integer"), None, "expected an action with one required text field"),
        (fields(["message"], message="string"), "mesage", "did you mean 'message'"),
        (fields(["a", "b"], a="string", b="string"), "a", r"also needs \['b'\]"),
    ],
)
def test_an_unclear_action_is_the_users_to_decide(schema: Any, named: str | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        text_field_of(schema, named=named, fixed={}, where="it")


def test_a_field_that_is_no_text_is_read_as_json() -> None:
    with scripted([RESET, shows("ok")], action=fields(["column"], column="integer")) as (url, script):
        answers = episode(make("OpenEnv", url=url, text_field="column"), "left", "3")
        assert answers[1][:2] == ("expected column as JSON, such as 3", 0.0)
        assert script.read[0][1] == {"type": "step", "data": {"column": 3}}  # "left" was not sent


def test_an_observation_of_several_fields_is_json_unless_fields_are_named() -> None:
    board = {"board": "X.O", "score": 2, "metadata": {"seen": 1}}
    frame = {"type": "observation", "data": {"observation": board, "reward": None, "done": False}}
    with scripted([frame], [frame]) as (url, _):
        assert episode(make("OpenEnv", url=url))[0][0] == '{"board": "X.O", "score": 2}'
        assert episode(make("OpenEnv", url=url, observation_fields=["board", "score"]))[0][0] == "X.O\n2"

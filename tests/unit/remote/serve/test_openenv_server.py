"""The OpenEnv server: its frames, its HTTP routes, its limits, and who is turned away.

Frames are written and read here by hand, as OpenEnv's clients write and read them (its own clients play against it in
tests/foreign). Pinned here:

1.  Each message has its answer, and each mistake its code; the session survives those that it may survive.
2.  At most max_sessions at once; a place is free again when its socket closes, and idle ones give way.
3.  HTTP is stateless, and says so instead of answering from an environment that never was reset.
4.  Tools: list_tools, call_tool, JSON-RPC, and sessions made over HTTP.
5.  No key, a stranger's page, or too long a body: refused before anything is played.
6.  The command serves until SIGTERM and closes its sessions first.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import programs
import pytest
from ending_env import Ending
from moved_clock import move_clock
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gspo_gym.cli.main import main
from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.registry import make
from gspo_gym.env.session import open_session
from gspo_gym.env.tools import tool
from gspo_gym.errors import ActionLimitError, ConfigError, EnvDiedError, EnvError, UsageError
from gspo_gym.remote.serve.openenv_server import create_openenv_app
from gspo_gym.remote.serving import BackgroundServer, bind
from gspo_gym.types import Message


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with BackgroundServer(create_openenv_app("GuessNumber", config={"style": "terse"})) as server:
        yield server.url


@pytest.fixture(scope="module")
def analyst() -> Iterator[str]:
    with BackgroundServer(create_openenv_app("SqlAnalyst", config={"level": "tiny"})) as server:
        yield server.url


async def ask(socket: ClientConnection, kind: str, data: Any = None) -> Any:
    await socket.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
    return json.loads(await socket.recv())


def at(url: str, play: Callable[[ClientConnection], Awaitable[Any]], query: str = "", **headers: str) -> Any:
    """What `play` returns, over one WebSocket."""

    async def played() -> Any:
        ws_url = url.replace("http", "ws", 1) + "/ws" + query
        async with connect(ws_url, proxy=None, additional_headers=headers) as socket:
            return await play(socket)

    return asyncio.run(played())


def rpc(url: str, method: str, **params: Any) -> Any:
    request = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    return httpx.post(f"{url}/mcp", json=request, trust_env=False, timeout=60).json()


def get(url: str, path: str, **headers: str) -> httpx.Response:
    return httpx.get(url + path, headers=headers, trust_env=False, timeout=60)


def code(frame: Any) -> str:
    assert frame["type"] == "error"
    return str(frame["data"]["code"])


# -- an episode -----------------------------------------------------------------------------------------------------


def test_an_episode_is_resets_steps_and_states(guess: str) -> None:
    async def play(socket: ClientConnection) -> list[Any]:
        return [
            await ask(socket, "reset", {"seed": 1, "number": 6, "episode_id": "mine"}),
            await ask(socket, "step", {"message": "4"}),
            await ask(socket, "state"),
            await ask(socket, "step", {"message": "6"}),
        ]

    first, higher, state, found = at(guess, play)
    said = {"role": "user", "content": "Guess 1-8. 4 tries."}
    assert first["type"] == "observation"
    assert first["data"]["observation"]["messages"] == [said]
    assert first["data"]["observation"]["text"] == said["content"]
    assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
    assert (higher["data"]["reward"], higher["data"]["done"]) == (0.0, False)
    assert state == {"type": "state", "data": {"episode_id": "mine", "step_count": 1}}
    assert (found["data"]["reward"], found["data"]["done"]) == (1.0, True)
    details = found["data"]["metadata"]["gspo_gym"]
    assert details["reward_terms"] == {"found": 1.0}
    assert (details["success"], details["truncated"], details["events"]) == (True, False, ["found"])


def test_mistakes_have_their_codes_and_the_session_survives_them(guess: str) -> None:
    async def play(socket: ClientConnection) -> list[str]:
        await socket.send("{")
        codes = [code(json.loads(await socket.recv()))]
        await socket.send(b"\x00")
        codes.append(code(json.loads(await socket.recv())))
        for kind, data in [
            ("dance", {}),
            ("step", {"message": "4"}),  # before a reset
            ("reset", {"seed": -1}),
            ("reset", {"level": 3}),  # an option that GuessNumber does not know
            ("reset", {"seed": 0, "number": 3}),
            ("step", {"text": "4"}),
            ("step", {"message": 4}),
            ("step", None),
            ("step", {"message": "3"}),
            ("step", {"message": "3"}),  # after the end
        ]:
            answer = await ask(socket, kind, data)
            codes.append(code(answer) if answer["type"] == "error" else str(answer["data"]["reward"]))
        return codes

    assert at(guess, play) == [
        "INVALID_JSON",
        "INVALID_JSON",
        "UNKNOWN_TYPE",
        "EXECUTION_ERROR",
        "VALIDATION_ERROR",
        "EXECUTION_ERROR",
        "None",
        "VALIDATION_ERROR",
        "VALIDATION_ERROR",
        "VALIDATION_ERROR",
        "1.0",
        "EXECUTION_ERROR",
    ]


def let_15_seconds_pass() -> None:
    """On the clock of the server's loop, whose limit of a step they are; a websocket's are longer."""
    move_clock(asyncio.get_running_loop(), 15.0)


class Hanging(TextEnv):
    """Its steps never end."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        return "go", {}

    async def step(self, action: str) -> Any:  # type: ignore[override]
        let_15_seconds_pass()
        await asyncio.Event().wait()


def test_a_step_that_misses_its_deadline_ends_the_session() -> None:
    async def play(socket: ClientConnection) -> Any:
        await ask(socket, "reset", {})
        answer = await ask(socket, "step", {"message": "x"})
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        return answer

    with BackgroundServer(
        create_openenv_app(Hanging, isolation="thread", max_sessions=1, step_timeout_seconds=15.0)
    ) as server:
        for _ in range(2):  # the place is free again
            answer = at(server.url, play)
            assert code(answer) == "SESSION_ERROR"
            assert "did not answer within 15 seconds" in answer["data"]["message"]


@pytest.mark.parametrize(("word", "error"), [("refuse", ActionLimitError), ("wait", EnvDiedError)])
def test_our_client_is_told_whether_the_action_exceeded_a_limit(word: str, error: type[EnvError]) -> None:
    """Whose doing a step that hung is, the client finds out itself (`env/blame.py`), so that it is told apart."""

    async def play(url: str) -> None:
        session = await open_session(lambda: make("OpenEnv", url=url), env_id="Ending", step_timeout_seconds=30)
        try:
            await session.reset(0)
            await session.step(Message("assistant", "good"))
            with pytest.raises(error) as raised:
                await session.step(Message("assistant", word))
            assert type(raised.value) is error
        finally:
            await session.close()

    env = partial(Ending, place="loop", on_hang=let_15_seconds_pass)
    service = create_openenv_app(env, isolation="thread", step_timeout_seconds=15.0)
    with BackgroundServer(service) as server:
        asyncio.run(play(server.url))


# -- capacity -------------------------------------------------------------------------------------------------------


def test_one_session_too_many_is_told_and_a_closed_socket_frees_its_place() -> None:
    async def three(url: str) -> list[Any]:
        ws_url = url.replace("http", "ws", 1) + "/ws"
        first = await connect(ws_url, proxy=None)
        await ask(first, "reset", {})
        async with connect(ws_url, proxy=None) as second:
            refused = json.loads(await second.recv())  # before anything is asked
            with pytest.raises(ConnectionClosed):
                await second.recv()
        await first.send('{"type": "close"}')
        await first.wait_closed()
        async with connect(ws_url, proxy=None) as third:
            return [refused, await ask(third, "reset", {})]

    with BackgroundServer(create_openenv_app("GuessNumber", max_sessions=1)) as server:
        refused, played = asyncio.run(three(server.url))
    assert code(refused) == "CAPACITY_REACHED"
    assert (refused["data"]["active_sessions"], refused["data"]["max_sessions"]) == (1, 1)
    assert played["type"] == "observation"


def test_a_session_over_http_gives_way_when_it_is_idle_and_not_before() -> None:
    """After the first answer it is idle for longer than 1 nanosecond, and never for an hour."""
    for idle, wanted in ((1e-9, "result"), (3600.0, "error")):
        app = create_openenv_app("SqlAnalyst", max_sessions=1, idle_timeout_seconds=idle)
        with BackgroundServer(app) as server:
            assert "result" in rpc(server.url, "openenv/session/create")
            assert wanted in rpc(server.url, "openenv/session/create")


class Broken(TextEnv):
    """Its second instance cannot be made."""

    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1
        if type(self).num_made > 1:
            raise RuntimeError("no more of these")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "go", {}

    def step(self, action: str) -> Any:
        return "go", 0.0, True, False, {}


def test_an_environment_that_cannot_be_made_is_a_factory_error() -> None:
    async def play(socket: ClientConnection) -> Any:
        return json.loads(await socket.recv())

    with BackgroundServer(create_openenv_app(Broken, isolation="thread")) as server:
        answer = at(server.url, play)
    assert code(answer) == "FACTORY_ERROR"
    assert "no more of these" in answer["data"]["message"]


# -- HTTP -----------------------------------------------------------------------------------------------------------


def test_the_routes_say_what_the_environment_is(guess: str, analyst: str) -> None:
    assert get(guess, "/health").json() == {"status": "healthy"}
    about = get(guess, "/metadata").json()
    assert about["name"] == "gspo_gym/GuessNumber-v0"
    assert about["description"].startswith("A hidden integer")
    assert get(guess, "/list_environments").json() == ["gspo_gym/GuessNumber-v0"]
    assert get(guess, "/state").json() == {"episode_id": None, "step_count": 0}
    text, tools = get(guess, "/schema").json(), get(analyst, "/schema").json()
    assert text["action"]["required"] == ["message"]
    assert text["action"]["properties"]["message"]["type"] == "string"
    assert {"tool_name", "arguments", "tool_calls"} <= set(tools["action"]["properties"])


def test_http_is_stateless_and_a_step_is_refused(guess: str) -> None:
    answer = httpx.post(f"{guess}/reset", json={"seed": 3}, trust_env=False, timeout=60).json()
    assert answer["observation"]["text"] == "Guess 1-8. 4 tries."
    assert httpx.post(f"{guess}/reset", json={"seed": "x"}, trust_env=False, timeout=60).status_code == 422
    assert httpx.post(f"{guess}/reset", content="{", trust_env=False, timeout=60).status_code == 400
    assert httpx.post(f"{guess}/reset", json={"level": 3}, trust_env=False, timeout=60).status_code == 422
    assert httpx.post(f"{guess}/step", json={"action": {"text": "x"}}, trust_env=False, timeout=60).status_code == 422
    refused = httpx.post(f"{guess}/step", json={"action": {"message": "4"}}, trust_env=False, timeout=60)
    assert refused.status_code == 409
    assert "over the WebSocket at /ws" in refused.json()["detail"]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_option_that_the_environment_refuses_is_the_callers_mistake_wherever_it_runs(isolation: Any) -> None:
    with BackgroundServer(create_openenv_app("GuessNumber", isolation=isolation)) as server:
        refused = httpx.post(f"{server.url}/reset", json={"number": "many"}, trust_env=False, timeout=60.0)
        assert refused.status_code == 422, refused.text
        assert httpx.post(f"{server.url}/reset", json={"number": 3}, trust_env=False, timeout=60.0).status_code == 200


# -- tools ----------------------------------------------------------------------------------------------------------


def test_tools_are_listed_and_called_one_at_a_time_or_several_in_a_turn(analyst: str) -> None:
    async def play(socket: ClientConnection) -> list[Any]:
        calls = [{"name": "list_tables", "id": "mine"}, {"name": "nothing"}]
        return [
            await ask(socket, "step", {"type": "list_tools"}),  # before the reset, as OpenEnv has it
            await ask(socket, "reset", {"seed": 0}),
            await ask(socket, "step", {"type": "call_tool", "tool_name": "list_tables", "arguments": {}}),
            await ask(socket, "step", {"message": "hm", "tool_calls": calls}),
            await ask(socket, "step", {"tool_calls": calls, "tool_name": "query", "type": "call_tool"}),
            await ask(socket, "state"),
        ]

    listed, _, called, several, wrong, state = at(analyst, play)
    tools = listed["data"]["observation"]["tools"]
    assert [one["name"] for one in tools] == ["list_tables", "describe", "query", "answer"]
    assert tools[2]["input_schema"]["required"] == ["sql"]
    observation = called["data"]["observation"]
    assert observation["tool_name"] == "list_tables"
    assert observation["result"]["data"] == observation["text"] == observation["messages"][0]["content"]
    assert [m["tool_call_id"] for m in several["data"]["observation"]["messages"]] == ["mine", "call_1_1"]
    assert code(wrong) == "VALIDATION_ERROR"
    assert state["data"]["step_count"] == 2


def test_json_rpc_plays_in_a_session_that_a_socket_may_join(analyst: str) -> None:
    assert rpc(analyst, "tools/list")["result"]["tools"][0]["name"] == "list_tables"
    session = rpc(analyst, "openenv/session/create")["result"]["session_id"]
    too_early = rpc(analyst, "tools/call", session_id=session, name="list_tables", arguments={})
    assert "send reset first" in too_early["error"]["message"]

    async def play(socket: ClientConnection) -> Any:
        await ask(socket, "reset", {"seed": 0})
        listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        return await ask(socket, "mcp", listing)

    assert len(at(analyst, play, f"?session_id={session}")["data"]["result"]["tools"]) == 4
    called = rpc(analyst, "tools/call", session_id=session, name="list_tables", arguments={})
    assert called["result"]["is_error"] is False
    assert called["result"]["content"] == [{"type": "text", "text": called["result"]["data"]}]
    closed = rpc(analyst, "openenv/session/close", session_id=session)
    assert closed["result"] == {"session_id": session, "closed": True}
    assert rpc(analyst, "openenv/session/close", session_id=session)["error"]["code"] == -32602
    assert rpc(analyst, "tools/call", name="list_tables")["error"]["code"] == -32602
    assert rpc(analyst, "dance")["error"]["code"] == -32601


def test_a_session_takes_one_socket_at_a_time(analyst: str) -> None:
    session = rpc(analyst, "openenv/session/create")["result"]["session_id"]

    async def play(socket: ClientConnection) -> Any:
        await ask(socket, "state")
        async with connect(analyst.replace("http", "ws", 1) + f"/ws?session_id={session}", proxy=None) as second:
            return json.loads(await second.recv())

    assert code(at(analyst, play, f"?session_id={session}")) == "SESSION_ERROR"
    rpc(analyst, "openenv/session/close", session_id=session)


class Closes(ToolEnv):
    """Has a tool that OpenEnv reserves."""

    def start(self, options: Any) -> str:
        return "go"

    @tool
    def state(self) -> str:
        """State."""
        return ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tool_of_a_reserved_name_does_not_start(caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(UsageError, match="did not start"),
        BackgroundServer(create_openenv_app(Closes, isolation="thread")),
    ):
        pass
    assert "OpenEnv reserves the tool names ['state']" in caplog.text


# -- who is turned away ---------------------------------------------------------------------------------------------


def test_a_key_is_asked_of_everything_but_health() -> None:
    with BackgroundServer(create_openenv_app("GuessNumber", api_key="secret")) as server:
        assert get(server.url, "/health").status_code == 200
        assert get(server.url, "/schema").status_code == 401
        assert get(server.url, "/schema", Authorization="Bearer secre").status_code == 401
        assert get(server.url, "/schema", Authorization="Bearer secret").status_code == 200
        assert "secret" not in get(server.url, "/schema").text

        async def play(socket: ClientConnection) -> Any:
            return await ask(socket, "reset", {})

        with pytest.raises(InvalidStatus, match="403"):
            at(server.url, play)
        assert at(server.url, play, Authorization="Bearer secret")["type"] == "observation"


def test_a_strangers_page_is_turned_away(guess: str) -> None:
    async def play(socket: ClientConnection) -> Any:
        return await ask(socket, "reset", {})

    with pytest.raises(InvalidStatus, match="403"):
        at(guess, play, Origin="https://evil.example")
    assert get(guess, "/schema", Origin="http://127.0.0.1:1").status_code == 403
    with BackgroundServer(create_openenv_app("GuessNumber", allowed_origins=["https://ours.example"])) as server:
        assert at(server.url, play, Origin="https://ours.example")["type"] == "observation"


def test_bodies_and_messages_are_limited(guess: str) -> None:
    assert httpx.post(f"{guess}/reset", content=b" " * 1_000_001, trust_env=False, timeout=60).status_code == 413
    pieces = [b" " * 500_000, b" " * 500_001]  # without a Content-Length
    assert httpx.post(f"{guess}/reset", content=iter(pieces), trust_env=False, timeout=60).status_code == 413
    assert httpx.post(f"{guess}/reset", content=iter([b"{", b"}"]), trust_env=False, timeout=60).status_code == 200

    async def play(socket: ClientConnection) -> Any:
        await socket.send("x" * 1_000_001)
        await socket.recv()

    with pytest.raises(ConnectionClosed, match="1009"):
        at(guess, play)


def test_another_host_needs_a_key() -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' can be reached from other machines"):
        bind("0.0.0.0", 0, has_key=False)
    bind("0.0.0.0", 0, has_key=True).close()
    bind("localhost", 0, has_key=False).close()


# -- the command ----------------------------------------------------------------------------------------------------

LEAVES_A_NOTE = """
from functools import partial
from pathlib import Path
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register

class Notes(TextEnv):
    def __init__(self, folder):
        self.folder = folder
        self.is_played = False
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.is_played = True
        return "go", {}
    def step(self, action):
        return "on", 0.0, False, False, {}
    def close(self):
        if self.is_played:
            (Path(self.folder) / "closed").write_text("yes")

register("Notes-v0", Notes)
"""


def test_the_command_serves_until_sigterm_and_closes_its_sessions(tmp_path: Path) -> None:
    (tmp_path / "notes_env.py").write_text(LEAVES_A_NOTE)
    root = Path(__file__).parents[4]
    command = [sys.executable, "-m", "gspo_gym.cli", "env", "serve", "notes_env:Notes-v0", "--port", "0"]
    command += ["--option", f"folder={tmp_path}", "--protocol", "openenv"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}

    async def interrupted(url: str, process: subprocess.Popen[str]) -> None:
        async with connect(url.replace("http", "ws", 1) + "/ws", proxy=None) as socket:
            assert (await ask(socket, "reset", {}))["data"]["observation"]["text"] == "go"
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                await socket.recv()

    with programs.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving notes_env:Notes-v0 over OpenEnv's protocol at http://127.0.0.1:")
        asyncio.run(interrupted(line.split()[-1], process))
        process.wait(30)
    assert process.returncode == -signal.SIGTERM  # ended by it, after the sessions
    assert (tmp_path / "closed").read_text() == "yes"


def test_the_command_refuses_what_it_cannot_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "serve", "GuesNumber"]) == 2
    assert "did you mean 'GuessNumber'" in capsys.readouterr().err
    assert main(["env", "serve", "GuessNumber", "--host", "0.0.0.0"]) == 2
    assert "--api-key-env" in capsys.readouterr().err
    assert main(["env", "serve", "GuessNumber", "--api-key-env", "NOT_SET_ANYWHERE"]) == 2
    assert "NOT_SET_ANYWHERE" in capsys.readouterr().err

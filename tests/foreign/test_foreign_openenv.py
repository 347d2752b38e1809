"""OpenEnv, both ways, against the real package: our adapter plays its servers, its clients play ours.

Two servers are built with the package's own `create_app` (`openenv_servers.py`): a text environment and one whose
actions are MCP tools. Expected texts and rewards follow from what is written there.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.playing import play, replaying
from gspo_gym.env.registry import make
from gspo_gym.types import Message, ToolCall

SERVERS = Path(__file__).with_name("openenv_servers.py")


@contextmanager
def served(kind: str, max_sessions: int = 32) -> Iterator[str]:
    command = [sys.executable, str(SERVERS), kind, str(max_sessions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def guess_url() -> Iterator[str]:
    with served("guess") as url:
        yield url


@pytest.fixture(scope="module")
def till_url() -> Iterator[str]:
    with served("till") as url:
        yield url


def said(*texts: str) -> list[Message]:
    return [Message("assistant", text) for text in texts]


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", (ToolCall("c1", name, arguments),))


def transcript(factory: Callable[[], Any], actions: list[Message], seed: int) -> list[tuple[list[str], Any, bool]]:
    run = asyncio.run(
        play(factory, replaying(actions), seed=seed, name="it", max_turns=len(actions), step_timeout_seconds=30)
    )
    shown = [([message.content for message in run.opening], None, False)]
    return shown + [([m.content for m in a.messages], a.reward, a.terminated) for a in run.answers]


def row(foreign_table: Any, name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        foreign_table(
            "openenv", importlib.metadata.version("openenv"), name, False, f"{type(error).__name__}: {error}"[:200]
        )
        raise
    foreign_table("openenv", importlib.metadata.version("openenv"), name, True, "")


def test_a_text_server_of_the_package_is_played_turn_by_turn(guess_url: str) -> None:
    number = random.Random(5).randint(1, 8)
    wrong = number % 8 + 1
    turns = transcript(lambda: make("OpenEnv", url=guess_url), said(str(wrong), str(number)), 5)
    assert turns == [(["Guess 1-8."], None, False), (["no"], None, False), (["correct"], 1.0, True)]


def test_what_the_package_refuses_is_told_to_the_model(guess_url: str) -> None:
    """ "crash" raises in the environment, and the session survives it."""
    turns = transcript(lambda: make("OpenEnv", url=guess_url), said("crash", "0"), 5)
    assert turns[1] == (["the die is lost"], None, False)
    assert turns[2] == (["no"], None, False)


def test_a_tool_server_of_the_package_is_played_with_its_tools(till_url: str) -> None:
    env = make("OpenEnv", url=till_url)
    functions = {schema["function"]["name"]: schema["function"] for schema in env.tool_schemas}
    assert functions["add"]["description"] == "Add a price."
    assert functions["add"]["parameters"]["properties"]["price"]["type"] == "integer"
    turns = transcript(lambda: make("OpenEnv", url=till_url), [call("add", price=3), call("pay")], 13)
    assert turns[1:] == [(["total 3"], None, False), (["paid"], 1.0, True)]


def test_the_packages_tool_errors_are_tool_messages(till_url: str) -> None:
    turns = transcript(lambda: make("OpenEnv", url=till_url), [call("steal"), call("add", price="x")], 13)
    assert turns[1][0][0].startswith("error: ")
    assert "steal" in turns[1][0][0]
    assert turns[2][0][0].startswith("error: ")


def test_a_full_server_of_the_package_is_waited_for() -> None:
    """One place, three episodes at once: all are played in the end, one after another."""

    async def all_three(url: str) -> list[Any]:
        factory = lambda: make("OpenEnv", url=url)  # noqa: E731
        episodes = (
            play(factory, replaying(said("0")), seed=seed, name="it", max_turns=1, step_timeout_seconds=30)
            for seed in range(3)
        )
        return await asyncio.gather(*episodes)

    with served("guess", max_sessions=1) as url:
        assert [run.answers[0].messages[0].content for run in asyncio.run(all_three(url))] == ["no"] * 3


def test_check_env_passes_on_the_text_server(guess_url: str, foreign_table: Any) -> None:
    def check() -> None:
        check_env(lambda: make("OpenEnv", url=guess_url), seeds=range(3)).raise_if_failed()

    row(foreign_table, "text server (create_app)", check)


def test_check_env_passes_on_the_tool_server(till_url: str, foreign_table: Any) -> None:
    def check() -> None:
        check_env(lambda: make("OpenEnv", url=till_url), seeds=range(3)).raise_if_failed()

    row(foreign_table, "MCP server (create_app)", check)


def test_the_packages_client_plays_our_text_environment(foreign_table: Any) -> None:
    from openenv.core import GenericEnvClient

    from gspo_gym.remote.serve.openenv_server import create_openenv_app
    from gspo_gym.remote.serving import BackgroundServer

    async def episode(url: str) -> None:
        async with GenericEnvClient(base_url=url) as client:
            first = await client.reset(seed=3, number=6)
            assert (first.observation["text"], first.reward, first.done) == ("Guess 1-8. 4 tries.", None, False)
            higher = await client.step({"message": "4"})
            assert (higher.observation["text"], higher.reward, higher.done) == ("higher", 0.0, False)
            found = await client.step({"message": "6"})
            assert (found.observation["text"], found.reward, found.done) == ("correct", 1.0, True)
            assert (await client.state())["step_count"] == 2
            with pytest.raises(RuntimeError, match="send reset first"):
                await client.step({"message": "6"})
            assert (await client.reset(seed=4)).observation["text"] == "Guess 1-8. 4 tries."

    def check() -> None:
        with BackgroundServer(create_openenv_app("GuessNumber", config={"style": "terse"})) as server:
            asyncio.run(episode(server.url))

    row(foreign_table, "our GuessNumber, by GenericEnvClient", check)


def test_the_packages_tool_client_plays_our_tool_environment(foreign_table: Any) -> None:
    from openenv.core import MCPToolClient
    from openenv.core.env_server.mcp_types import CallToolAction

    from gspo_gym.remote.serve.openenv_server import create_openenv_app
    from gspo_gym.remote.serving import BackgroundServer

    async def episode(url: str) -> None:
        async with MCPToolClient(base_url=url) as client:
            assert [tool.name for tool in await client.list_tools()] == ["list_tables", "describe", "query", "answer"]
            await client.reset(seed=0)
            tables = await client.call_tool("list_tables")
            assert len(tables.split(", ")) == 3
            columns = await client.call_tool("describe", table=tables.split(", ")[0])
            assert "INTEGER" in columns or "TEXT" in columns
            graded = await client.step(CallToolAction(tool_name="answer", arguments={"value": "-1"}))
            assert graded.done
            assert graded.reward is not None

    def check() -> None:
        with BackgroundServer(create_openenv_app("SqlAnalyst")) as server:
            asyncio.run(episode(server.url))

    row(foreign_table, "our SqlAnalyst, by MCPToolClient", check)


def test_the_packages_client_is_told_of_a_full_server_of_ours() -> None:
    from openenv.core import GenericEnvClient

    from gspo_gym.remote.serve.openenv_server import create_openenv_app
    from gspo_gym.remote.serving import BackgroundServer

    async def two(url: str) -> str:
        async with GenericEnvClient(base_url=url) as first:
            await first.reset(seed=0)
            async with GenericEnvClient(base_url=url) as second:
                with pytest.raises(RuntimeError) as caught:
                    await second.reset(seed=0)
        return str(caught.value)

    with BackgroundServer(create_openenv_app("GuessNumber", max_sessions=1)) as server:
        assert "CAPACITY_REACHED" in asyncio.run(two(server.url))

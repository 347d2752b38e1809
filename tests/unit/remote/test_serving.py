"""LoopServer: an application that shares the loop of whoever asks it, and ends with it."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import pytest

from gspo_gym.errors import ConfigError, UsageError
from gspo_gym.remote.serving import LoopServer


class Counting:
    """Says how often it was asked, and in which event loop; a server whose start fails if it is told to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.was_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                if self.fails:
                    await send({"type": "lifespan.startup.failed", "message": "on purpose"})
                    return
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.loops.append(asyncio.get_running_loop())
        self.was_asked.set()
        await self.may_answer.wait()
        body = str(len(self.loops)).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def ask(url: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return (await client.get(url)).text


def test_it_answers_in_the_loop_that_started_it_until_it_is_stopped() -> None:
    async def main() -> None:
        app = Counting()
        server = LoopServer(app, host="127.0.0.1", port=0)
        await server.start()
        assert [await ask(server.url) for _ in range(3)] == ["1", "2", "3"]
        assert set(app.loops) == {asyncio.get_running_loop()}
        await server.stop()
        await server.stop()
        with pytest.raises(httpx.ConnectError):
            await ask(server.url)

    asyncio.run(main())


def test_an_answer_that_is_under_way_is_finished_before_it_stops() -> None:
    async def main() -> None:
        app = Counting()
        server = LoopServer(app, host="127.0.0.1", port=0)
        await server.start()
        app.may_answer.clear()
        asking = asyncio.create_task(ask(server.url))
        await app.was_asked.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        app.may_answer.set()
        assert await asking == "1"
        await stopping

    asyncio.run(main())


def test_a_server_that_ends_by_itself_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        server = LoopServer(Counting(), host="127.0.0.1", port=0)
        await server.start()
        assert server._serving is not None
        server._serving.cancel()
        await asyncio.wait([server._serving])
        server._socket.close()

    asyncio.run(main())
    assert [
        "ended by itself" in record.getMessage() for record in caplog.records if record.name.startswith("gspo")
    ] == [True]


def test_signals_stay_with_the_program_that_it_is_a_part_of() -> None:
    async def main() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        server = LoopServer(Counting(), host="127.0.0.1", port=0)
        await server.start()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        await server.stop()

    asyncio.run(main())


def test_an_application_that_does_not_start_is_an_error_and_leaves_the_port_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        server = LoopServer(Counting(fails=True), host="127.0.0.1", port=0)
        with pytest.raises(UsageError, match=f"the application at {server.url} did not start"):
            await server.start()
        again = LoopServer(Counting(), host="127.0.0.1", port=int(server.url.rpartition(":")[2]))
        await again.start()
        await again.stop()

    asyncio.run(main())


def test_other_machines_need_a_key() -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines: give a key"):
        LoopServer(Counting(), host="0.0.0.0", port=0)

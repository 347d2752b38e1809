"""What the live page asks for, without a browser."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx

from gspo_gym.cli.view import create_app
from gspo_gym.run.process import Phases, holding


def doing(folder: Path) -> httpx.Response:
    app = create_app(folder, "secret", threading.Event())

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        cookies = {"gspo_gym_8000": "secret"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", cookies=cookies) as client:
            return await client.get("/doing", params={"run": "small"})

    return asyncio.run(ask())


def test_the_page_learns_how_much_of_a_phase_is_done_while_a_process_is_at_work(tmp_path: Path) -> None:
    run = tmp_path / "small"
    run.mkdir()
    (run / "config.toml").write_text("[model]\nlabel = 'small'\n")
    (run / "events.jsonl").write_text("")
    with holding(run, lambda _: None, has_begun=True):
        phases = Phases(run)
        phases.enter("evaluating", total=64)
        phases._written -= 10.0  # counts are written once a second
        phases.advance("evaluating")
        assert doing(tmp_path).json() == {"doing": "evaluating 1 of 64"}
    assert doing(tmp_path).json() == {"doing": None}

"""`gspo-gym view` as a real process, with a real browser in front of it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page

from tests.browser.conftest import open_page, until


@pytest.fixture
def runs(run: Path, tmp_path: Path) -> Path:
    """A folder with a run that has taken three of its four steps."""
    folder = tmp_path / "runs" / "small"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("step_000004*", "checkpoints", "*.html"))
    shutil.copytree(run / "checkpoints", folder / "checkpoints")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]))
    return tmp_path / "runs"


@pytest.fixture
def url(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "gspo_gym.cli", "view", str(runs), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    process.stdout.close()


def test_a_step_that_lands_is_shown_without_a_reload(page: Page, url: str, runs: Path, run: Path) -> None:
    open_page(page, url)
    assert "token" not in page.url
    assert "numbers agree is not checked here, but by gspo-gym report" in page.inner_text("main")
    page.keyboard.press("3")
    until(page, "page.episodes?.step.name === 'step_000003'")
    page.evaluate("window.isTheSamePage = true")
    page.keyboard.press("2")

    folder = runs / "small"
    shutil.copy(run / "tokens/step_000004.safetensors", folder / "tokens")
    shutil.copy(run / "episodes/step_000004.jsonl.gz", folder / "episodes")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write((run / "metrics.jsonl").read_text().splitlines(keepends=True)[3])

    until(page, "page.runs[0].metrics.step.at(-1) === 4")
    page.keyboard.press("3")
    until(page, "page.episodes.step.name === 'step_000004'")
    assert page.evaluate("window.isTheSamePage") is True
    page.goto("about:blank")  # before the server ends, which the page would miss, and say so


def test_without_the_token_and_under_another_name_nothing_is_told(url: str, runs: Path) -> None:
    base, _, token = url.partition("/?token=")
    cookies = {f"gspo_gym_{httpx.URL(base).port}": token}
    group = "/group?run=small&name=step_000001&number={}"
    for path in ("/", "/runs", "/run?run=small", "/step?run=small&name=step_000001", group.format(0), "/changes"):
        assert httpx.get(base + path).status_code == 403
        assert httpx.get(base + path, headers={"Host": "evil.example"}, cookies=cookies).status_code == 403
    assert httpx.get(f"{base}/?token=wrong", follow_redirects=True).status_code == 403
    asked = httpx.get(f"{base}/runs", cookies=cookies).json()
    assert [(run["name"], run["status"]) for run in asked] == [("small", "completed")]
    for path in (
        "/run?run=../small",
        "/run?run=other",
        "/step?run=small&name=../config",
        "/step?run=small&name=step_000009",
        group.format(8),  # 32 episodes, 4 a group: 0 to 7
        group.format("-1"),
    ):
        assert httpx.get(base + path, cookies=cookies).status_code == 404

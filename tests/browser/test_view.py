"""`gspo-gym view` as a real process, with a real browser in front of it."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from tests.browser.conftest import open_page, until, updated


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
    asked = (
        "/runs",
        "/run?run=small",
        "/step?run=small&name=step_000001",
        group.format(0),
        "/doing?run=small",
        "/changes",
    )
    for path in ("/", *asked):
        assert httpx.get(base + path).status_code == 403
        assert httpx.get(base + path, headers={"Host": "evil.example"}, cookies=cookies).status_code == 403
    assert httpx.get(f"{base}/?token=wrong", follow_redirects=True).status_code == 403
    told = httpx.get(f"{base}/runs", cookies=cookies).json()
    assert [(run["name"], run["status"]) for run in told] == [("small", "completed"), ("turns", "completed")]
    for path in (
        "/run?run=../small",
        "/run?run=other",
        "/doing?run=other",
        "/step?run=small&name=../config",
        "/step?run=small&name=step_000009",
        group.format(8),  # 32 episodes, 4 a group: 0 to 7
        group.format("-1"),
    ):
        assert httpx.get(base + path, cookies=cookies).status_code == 404


def test_runs_stand_in_a_table_and_their_curves_can_be_laid_over_each_other(page: Page, url: str) -> None:
    assert url.startswith("http://127.0.0.1:")
    open_page(page, f"{url}#view=runs")
    rows = [row.locator("td").all_inner_texts() for row in page.locator("tbody tr").all()]
    assert [row[1:5] for row in rows] == [
        *(["small", "completed", "4", "success_rate"], ["turns", "completed", "2", "success_rate"])
    ]
    page.get_by_label("curves of turns").check()
    page.keyboard.press("2")
    until(page, "drawnCharts.length > 10")
    labels = "drawnCharts.find((plot) => plot.series.length === 3).series.slice(1).map((series) => series.label)"
    assert page.evaluate(labels) == ["small", "turns"]
    page.keyboard.press("1")
    page.wait_for_selector("text=Beside")
    page.locator("nav a", has_text="Runs").click()
    page.locator("td a", has_text="turns").click()
    until(page, "document.getElementById('title').textContent === 'turns'")
    page.goto("about:blank")


def test_tokens_are_asked_for_group_by_group_as_they_are_looked_at(page: Page, url: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    open_page(page, f"{url}#view=curves")
    assert not [each for each in asked if each.startswith(("step?", "group?"))]
    page.keyboard.press("3")
    page.wait_for_selector("article")
    page.locator(".list button").nth(4).click()  # the first of the second group
    page.wait_for_selector('article:has-text("group_000017/0")')
    page.locator(".list button").nth(5).click()
    page.wait_for_selector('article:has-text("group_000017/1")')
    found = [each for each in asked if each.startswith(("step?", "group?"))]
    assert found == [
        "step?run=small&name=step_000003",
        *(f"group?run=small&name=step_000003&number={i}" for i in (0, 1)),
    ]
    page.goto("about:blank")


def test_the_run_that_is_looked_at_stays_when_another_was_updated_later(page: Page, url: str, runs: Path) -> None:
    open_page(page, f"{url}#view=episodes")
    page.locator(".list button").nth(1).click()
    page.locator("article > .turn .token.sampled").first.hover()
    link = page.get_attribute(".detail a", "href") or ""
    assert "run=small&" in f"{link[1:]}&".replace("#", "&")
    page.keyboard.press("1")
    page.evaluate("history.replaceState(null, '', '#view=run')")  # an address that names no run
    updated(runs / "small", seconds_ago=7200.0)
    updated(runs / "turns", seconds_ago=0.0)
    until(page, "page.source.runs[0].name === 'turns'")
    page.wait_for_timeout(100)
    assert page.text_content("#title") == "small"
    open_page(page, f"{page.url.partition('#')[0]}{link}")
    assert page.text_content("#title") == "small"  # a link leads to its run, whichever is the first now
    page.goto("about:blank")


def test_a_server_that_is_gone_is_told_once_in_every_view(
    browser: Browser, viewer: subprocess.Popen[str], url: str
) -> None:
    page = browser.new_page()  # which may log that it cannot connect
    open_page(page, url)
    viewer.send_signal(signal.SIGTERM)
    assert viewer.wait(timeout=30) == 0  # or the signal of the fixture finds it without its handler, while it ends
    page.evaluate("""() => {
      window.tried = 0;
      const status = document.getElementById("status");
      new MutationObserver(() => { tried += 1; }).observe(status, { childList: true });
    }""")
    until(page, "tried >= 2")  # the browser tries again every few seconds
    for key in ("2", "1"):
        page.keyboard.press(key)
        page.wait_for_selector("h2")
        assert page.text_content("#status") == "completed, step 4 (not connected)"
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screen_reader_and_a_small_screen_can_read_the_table_of_runs(browser: Browser, url: str, scheme: str) -> None:
    context = browser.new_context(bypass_csp=True, color_scheme=scheme, viewport={"width": 390, "height": 800})  # type: ignore[arg-type]
    page = context.new_page()
    open_page(page, f"{url}#view=runs")
    found = Axe().run(page)
    assert [each["id"] for each in found.response["violations"] if each["impact"] in ("serious", "critical")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()

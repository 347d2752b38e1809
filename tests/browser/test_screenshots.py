"""Screenshots to look at, in tests/browser/screenshots, which git ignores: no test says whether a page pleases.

README.md shows one of them: `cp tests/browser/screenshots/tokens.png examples/figures/report.png`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import open_page

FOLDER = Path(__file__).parent / "screenshots"
_TOKEN = "article > .turn .token.sampled"
DESK, TELEPHONE = {"width": 1366, "height": 860}, {"width": 390, "height": 800}


def taken(page: Page, name: str) -> bytes:
    FOLDER.mkdir(exist_ok=True)
    return page.screenshot(path=FOLDER / f"{name}.png")


def is_drawn(page: Page) -> bool:
    """Whether each canvas in sight has a line on it: more than one colour."""
    return bool(
        page.evaluate("""() => [...document.querySelectorAll("canvas")].slice(0, 6).every((canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size > 2;
        })""")
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, TELEPHONE], ids=["desk", "telephone"])
@pytest.mark.parametrize("view", ["run", "curves", "episodes", "tokens"])
def test_a_screenshot_of_the_saved_page(
    browser: Browser, saved: Path, view: str, size: dict[str, int], scheme: str
) -> None:
    page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]  # a TypedDict, a Literal
    place = "episodes&as=tokens" if view == "tokens" else view
    open_page(page, f"{saved.as_uri()}#view={place}")
    if view == "tokens":
        page.locator(_TOKEN).nth(1).hover()
    name = view + ("" if scheme == "light" else "_dark") + ("" if size is DESK else "_small")
    assert taken(page, name).startswith(b"\x89PNG")
    assert is_drawn(page)
    page.close()


def test_a_screenshot_of_the_live_view(page: Page, url: str) -> None:
    page.set_viewport_size(DESK)  # type: ignore[arg-type]
    for view in ("runs", "curves", "episodes"):
        open_page(page, f"{url}#view={view}")
        assert taken(page, f"live_{view}").startswith(b"\x89PNG")
        assert is_drawn(page)
    page.goto("about:blank")  # before the server ends, which the page would miss, and say so

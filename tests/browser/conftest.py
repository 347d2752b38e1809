"""Real browsers, Debian's, and a small real run to look at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from benchmarks.page import chromium
from gspo_gym.cli.report import page_of
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails its test if it raises, logs an error, or breaks its content security policy."""
    errors: list[str] = []
    opened = browser.new_page(viewport={"width": 1400, "height": 1000})
    opened.on("pageerror", lambda error: errors.append(f"raised: {error}"))
    opened.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}") or dialog.dismiss())
    yield opened
    opened.close()
    assert [error for error in errors if "https://example.org" not in error] == []  # which a test asks for


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with clipping, a KL term, masked episodes, two passes, and weights of two versions."""
    config = load_config(
        Path("configs/quickstart.toml"),
        overrides=[
            f"run.folder={tmp_path_factory.mktemp('runs')}",
            "model.label=small",
            "run.log_tokens_every_n_iters=1",
            'tracking.report_to=["tensorboard"]',
            "rollout.episodes_per_batch=32",
            "training.group_size=4",
            "training.batch_size=8",
            "training.iterations_per_epoch=4",
            "training.update_epochs=2",
            "training.max_staleness=1",
            "correction.level=token",
            "rewards.overlong=mask",
            "loss.kl_coef=0.01",
            "evaluation.seeds=0:16",
            "evaluation.every_n_iters=2",
            "warmup.num_episodes=512",
        ],
    )
    run_training(config)
    return config.run_folder


@pytest.fixture(scope="session")
def saved(run: Path) -> Path:
    """The run's page as a file."""
    path = run / "saved.html"
    path.write_text(page_of(run).html, encoding="utf-8")
    return path


def open_page(page: Page, url: str) -> None:
    """Go there, and wait until it is drawn."""
    page.goto("about:blank")  # another place on the same page would be no navigation
    page.goto(url)
    page.wait_for_selector("html[data-ready=yes]", state="attached")


def until(page: Page, expression: str) -> None:
    """Wait until the expression is true on the page, whose policy forbids playwright's own way."""
    deadline = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not within 30 seconds: {expression}"
        page.wait_for_timeout(20)

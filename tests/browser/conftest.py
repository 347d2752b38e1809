"""Real browsers, Debian's, and a small real run to look at: Chromium on every change, Firefox and Jupyter nightly."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from small_quickstart import GENTLE

from gspo_gym.cli.report import page_of
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config
from gspo_gym.judge.server import create_fake_judge_app
from gspo_gym.policy.load import load_policy, save_policy
from gspo_gym.remote.serving import BackgroundServer

# Chromium asks its maker's hosts for nothing, which would be requests of the page's.
_OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    path = next((place for name in names if (place := shutil.which(name))), None)
    assert path is not None, f"none of {', '.join(names)} is here: apt-get install chromium-headless-shell"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=[*_OPTIONS, "--disable-sync"])
        yield started
        started.close()


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


# From the third turn on, messages before the last three are written in another way: the turn begins a new segment.
_REWRITES = """\
{%- for message in messages %}
{{- '<|im_start|>' + ('past ' if loop.revindex > 3 else '') + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
_CRITERIA = '[{id = "said", description = \'The answer has a "4".\', scale = "binary"}]'
_EVERYTHING = (
    *GENTLE,
    "run.log_tokens_every_n_iters=1",
    'tracking.report_to=["tensorboard"]',
    "rollout.episodes_per_batch=32",
    "training.group_size=4",
    "training.batch_size=8",
    "training.update_epochs=2",
    "training.max_staleness=1",
    "correction.level=token",
    "rewards.overlong=mask",
    "loss.kl_coef=0.01",
    "evaluation.seeds=0:16",
    "evaluation.every_n_iters=2",
    "warmup.num_episodes=512",
)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template rewrites what is past."""
    policy = load_policy("tiny:qwen3-64")
    policy.tokenizer.chat_template = _REWRITES
    folder = tmp_path_factory.mktemp("model")
    save_policy(policy, folder)
    return folder


@pytest.fixture(scope="session")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with clipping, a KL term, masked episodes, several segments, two passes, weights of two
    versions, and a judge that asks for a "4"."""
    with BackgroundServer(create_fake_judge_app()) as judge:
        overrides = [
            f"run.folder={tmp_path_factory.mktemp('runs')}",
            "model.label=small",
            f"model.base={base}",
            "training.iterations_per_epoch=4",
            "judge.enabled=true",
            "judge.reward_blend={env = 0.6, event = 0.2, outcome = 0.2}",
            "judge.options.event=true",
            "judge.options.outcome=true",
            "judge.options.provider=local",
            "judge.options.model=fake-judge",
            f"judge.options.base_url={judge.url}/v1",
            f"judge.options.rubric_overrides.event.criteria={_CRITERIA}",
            f"judge.options.rubric_overrides.outcome.criteria={_CRITERIA}",
        ]
        config = load_config(Path("configs/quickstart.toml"), overrides=[*_EVERYTHING, *overrides])
        run_training(config)
    return config.run_folder


@pytest.fixture(scope="session")
def run_by_turns(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the same, whose ratios are of turns, and without a judge."""
    overrides = [
        f"run.folder={tmp_path_factory.mktemp('runs')}",
        "model.label=turns",
        f"model.base={base}",
        "training.iterations_per_epoch=2",
        "loss.unit=turn",
        "warmup.num_episodes=256",
    ]
    config = load_config(Path("configs/quickstart.toml"), overrides=[*_EVERYTHING, *overrides])
    run_training(config)
    return config.run_folder


@pytest.fixture(scope="session")
def saved(run: Path) -> Path:
    """The run's page as a file."""
    path = run / "saved.html"
    path.write_text(page_of(run).html, encoding="utf-8")
    return path


@pytest.fixture
def runs(run: Path, run_by_turns: Path, tmp_path: Path) -> Path:
    """A folder with a run that has taken three of its four steps, and an older one."""
    shutil.copytree(run_by_turns, tmp_path / "runs" / "turns", ignore=shutil.ignore_patterns("*.html"))
    folder = tmp_path / "runs" / "small"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("step_000004*", "checkpoints", "*.html"))
    shutil.copytree(run / "checkpoints", folder / "checkpoints")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]))
    updated(tmp_path / "runs" / "turns", seconds_ago=3600.0)
    return tmp_path / "runs"


@pytest.fixture
def viewer(runs: Path) -> Iterator[subprocess.Popen[str]]:
    """`gspo-gym view` of these runs; it ends without an error when it is asked to."""
    command = [sys.executable, "-m", "gspo_gym.cli", "view", str(runs), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def url(viewer: subprocess.Popen[str]) -> str:
    """What it printed."""
    assert viewer.stdout is not None
    return viewer.stdout.readline().strip()


def updated(folder: Path, *, seconds_ago: float) -> None:
    """Say of a run's files when they were written last."""
    moment = time.time() - seconds_ago
    for path in folder.iterdir():
        os.utime(path, (moment, moment))


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

"""The saved page in a real browser: its numbers are the record's, it asks for nothing, and texts stay texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from gspo_gym.cli.report import page_of
from gspo_gym.judge.records import latest_judgements, read_judgements
from gspo_gym.learning.tokens import Clip, Fate
from gspo_gym.rollout.episode_files import read_episodes, write_episodes
from gspo_gym.run.tokens import open_tokens, pack_columns, token_path
from gspo_gym.types import FinishReason, Message, Outcome, Segment, Task, Trajectory, Turn
from tests.browser.conftest import open_page, until

# Reads what the page shows of every sampled token of the episode that it is at, as a person would by hovering.
_ALL_TOKENS = """() => [...document.querySelectorAll("article > .turn .token.sampled")].map((span) => {
  span.dispatchEvent(new MouseEvent("mouseenter"));
  const shown = {};
  for (const cell of document.querySelectorAll(".detail [data-name]")) shown[cell.dataset.name] = cell.textContent;
  return shown;
})"""


def _metrics(run: Path, step: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["step"] == step)


@pytest.mark.parametrize(
    ("name", "step", "unit"), [("run", 4, "trajectory"), ("run_by_turns", 2, "turn")], ids=["by episode", "by turn"]
)
def test_ratios_and_shares_of_the_loss_that_the_page_shows_are_those_recomputed_from_the_files(
    page: Page, request: pytest.FixtureRequest, tmp_path: Path, name: str, step: int, unit: str
) -> None:
    run: Path = request.getfixturevalue(name)
    assert tomllib.loads((run / "config.toml").read_text())["loss"].get("unit", "trajectory") == unit
    columns = open_tokens(run, step).columns()
    episodes = read_episodes(run / f"episodes/step_{step:06d}.jsonl.gz")
    # The run has it all: clipped and masked tokens, a KL term, stale weights, several segments, advantages of turns.
    assert set(columns["clip"].ravel()) == {Clip.NONE, Clip.LOW, Clip.HIGH}
    assert set(columns["fate"]) == {Fate.TRAINED, Fate.OVERLONG}
    assert np.isfinite(columns["ref_logprob"]).any()
    assert (columns["weight_version"] < step - 1).any()
    assert max(len(episode.segments) for episode in episodes) == 3
    path = tmp_path / "page.html"
    path.write_text(page_of(run, steps=[f"step_{step:06d}"]).html, encoding="utf-8")
    open_page(page, f"{path.as_uri()}#view=episodes")

    metrics = _metrics(run, step)
    assert metrics["loss/kl"] > 0
    total = metrics["loss/total"]
    assert float(page.text_content("#loss-sum") or "nan") == pytest.approx(total, abs=1e-6)

    shares = num_ratios = num_credited = 0.0
    for number in (0, 1):
        page.get_by_label("Pass").select_option(str(number))
        until(page, f"page.episodes.pass === {number}")
        start = 0
        for episode in episodes:
            stop = start + episode.num_actions
            now, old, advantage, share = (
                columns[key][number, start:stop] if key in ("logprob", "share") else columns[key][start:stop]
                for key in ("logprob", "old_logprob", "advantage", "share")
            )
            page.evaluate("hash => { location.hash = hash }", f"#view=episodes&episode={episode.trajectory_id}")
            page.wait_for_selector(f'article[aria-label="{episode.trajectory_id}"]')
            tokens = page.evaluate(_ALL_TOKENS)
            assert [int(token["id"]) for token in tokens] == [
                int(token) for segment in episode.segments for token in segment.token_ids[segment.action_mask]
            ]
            turns = np.concatenate([segment.turn_index[segment.action_mask] for segment in episode.segments])
            gap = now.astype(np.float64) - old.astype(np.float64)
            for i, token in enumerate(tokens):
                shares += float(token["share"])
                assert float(token["share"]) == pytest.approx(float(share[i]), rel=1e-7)
                if "ratio" in token:
                    mean = gap[turns == turns[i]].mean() if unit == "turn" else gap.mean()
                    # 1e-6: both sides are float32 with 24 bits, and their mean is over at most a dozen tokens.
                    assert float(token["ratio"]) == pytest.approx(np.exp(mean), rel=1e-6)
                    assert float(token["advantage"]) == pytest.approx(float(advantage[i]), rel=1e-7)
                    num_ratios += 1
            num_credited += len(set(advantage.tolist())) > 1
            start = stop
    assert shares == pytest.approx(total, abs=1e-6)
    assert num_ratios > 100
    assert num_credited > 10  # episodes, twice each, in which turns have advantages of their own


def test_the_judge_is_on_the_page_beside_rewards_and_events_and_those_it_disputes_are_found(
    page: Page, run: Path, saved: Path
) -> None:
    judged = latest_judgements(read_judgements(run / "judgements.jsonl"))
    episodes = {each.trajectory_id: each for each in read_episodes(run / "episodes/step_000004.jsonl.gz")}
    # The judge asks for a "4", the environment for the number: 1 of a "4" is more than half.
    said = {
        name: any("4" in each.content for each in it.messages if each.role == "assistant")
        for name, it in episodes.items()
    }
    disputed = {name for name, it in episodes.items() if said[name] != it.success}
    assert 0 < len(disputed) < 32
    open_page(page, f"{saved.as_uri()}#view=episodes&step=step_000004")
    page.get_by_label("Show").select_option("disagree")
    assert page.locator(".list button").count() == len(disputed)

    found = next(name for name, each in episodes.items() if each.success)
    played, judgement = episodes[found], judged[found, 0].judgement
    page.evaluate("hash => { location.hash = hash }", f"#view=episodes&step=step_000004&episode={found}")
    page.wait_for_selector(f'article[aria-label="{found}"]')
    assert judgement.outcome_review is not None
    reviews = [(page.locator("article > .scroll"), judgement.outcome_review)]
    for turn, review in zip(played.turns, judgement.event_reviews, strict=True):
        section = page.locator(f'article section[aria-label="turn {turn.index}"]')
        # A turn outside the window is not laid out (content-visibility) and has no inner text.
        head = section.locator(".turn-head").text_content() or ""
        for name, value in turn.reward_terms.items():
            assert f"{name} {value:+.3g}" in head
        assert all(event in head for event in turn.events)
        reviews.append((section, review))
    for place, review in reviews:
        (row,) = place.locator("tbody tr").all()
        criterion = review.criteria["said"]
        assert row.locator("td").all_text_contents() == ["said", f"{criterion.score:g}", criterion.reason]
    assert played.turns[-1].events == ("found",)


def test_the_report_that_a_run_gives_its_sinks_says_that_it_is_complete(page: Page, run: Path) -> None:
    open_page(page, (run / "report.html").as_uri())
    assert page.text_content("#status") == "completed, step 4"


def test_the_page_asks_for_nothing_but_itself(page: Page, saved: Path) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for view in ("run", "curves", "episodes"):
        open_page(page, f"{saved.as_uri()}#view={view}")
        page.mouse.move(300, 300)
    assert {url.partition("#")[0] for url in asked} <= {saved.as_uri(), "about:blank"}
    # And could not: its policy forbids what its own script tries.
    assert page.evaluate("fetch('https://example.org').then(() => 'answered', () => 'refused')") == "refused"


@pytest.mark.nightly
def test_firefox_opens_the_page_from_disk_and_shows_the_same_sum(saved: Path, run: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("firefox.py")
    url = f"{saved.as_uri()}#view=episodes&step=step_000004"
    told = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), url, "#loss-sum", str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert float(told.stdout) == pytest.approx(_metrics(run, 4)["loss/total"], abs=1e-6)


def test_a_link_to_a_token_leads_to_it(page: Page, saved: Path) -> None:
    open_page(page, f"{saved.as_uri()}#view=episodes&step=step_000004")
    first = page.get_attribute("article", "aria-label")
    page.keyboard.press("j")
    page.wait_for_selector(f'article:not([aria-label="{first}"])')
    episode = page.get_attribute("article", "aria-label")
    page.locator("article > .turn .token.sampled").nth(1).hover()
    link = page.get_attribute(".detail a", "href")
    numbers = page.inner_text(".detail dl")
    place = (page.text_content(".detail h3") or "").removeprefix("Token ")
    assert "/" in (episode or "")  # its group is in its name
    assert link == f"#view=episodes&step=step_000004&episode={episode}&token={place}"
    open_page(page, f"{saved.as_uri()}{link}")
    assert page.get_attribute("article", "aria-label") == episode
    assert page.inner_text(".detail dl") == numbers


def test_keys_lead_through_views_steps_episodes_and_tokens(page: Page, saved: Path) -> None:
    open_page(page, saved.as_uri())
    page.keyboard.press("3")
    page.wait_for_selector("article")
    first = page.get_attribute("article", "aria-label")
    page.keyboard.press("j")
    page.wait_for_selector(f'article:not([aria-label="{first}"])')
    page.keyboard.press("k")
    page.wait_for_selector(f'article[aria-label="{first}"]')
    page.locator("article > .turn .token.sampled").first.focus()
    place = page.inner_text(".detail h3")
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".detail h3") != place
    page.keyboard.press("p")
    until(page, "page.episodes.step.name === 'step_000001'")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.locator("article").count() == 1  # it skips to the content, and leads to no other view


def test_the_filter_for_clipped_tokens_shows_the_episodes_that_have_some(page: Page, run: Path, saved: Path) -> None:
    clip = open_tokens(run, 4).columns()["clip"][0]
    start, clipped = 0, 0
    for episode in read_episodes(run / "episodes/step_000004.jsonl.gz"):
        clipped += bool(clip[start : start + episode.num_actions].any())
        start += episode.num_actions
    assert 0 < clipped < 32
    open_page(page, f"{saved.as_uri()}#view=episodes&step=step_000004")
    page.get_by_label("Show").select_option("clipped")
    assert page.locator(".list button").count() == clipped


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["run", "curves", "episodes"])
def test_a_screen_reader_can_read_the_page(browser: Browser, saved: Path, view: str, scheme: str) -> None:
    context = browser.new_context(bypass_csp=True, color_scheme=scheme)  # type: ignore[arg-type]  # for axe's script
    page = context.new_page()
    open_page(page, f"{saved.as_uri()}#view={view}")
    found = Axe().run(page)
    context.close()
    serious = [each for each in found.response["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], [node["html"][:120] for node in each["nodes"][:3]]) for each in serious] == []


@pytest.mark.parametrize("view", ["run", "curves", "episodes"])
def test_a_small_screen_needs_no_sideways_scrolling(page: Page, saved: Path, view: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    open_page(page, f"{saved.as_uri()}#view={view}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_on_a_small_screen_the_numbers_of_a_token_are_in_sight_of_it(page: Page, saved: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    open_page(page, f"{saved.as_uri()}#view=episodes")
    token = page.locator("article > .turn .token.sampled").first
    token.scroll_into_view_if_needed()
    token.click()
    page.wait_for_selector(".detail h3")
    touched = page.locator("article > .turn .token.chosen").bounding_box()
    told = page.locator(".detail").bounding_box()
    assert touched is not None
    assert told is not None
    assert 0 <= touched["y"] < told["y"] < 800
    assert told["y"] + told["height"] <= 800


_HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload=window.hacked=1>",
    "javascript:window.hacked=1",
    "]]><!--<script>",
    "-->",
    "${window.hacked = 1}",
    "`+(window.hacked=1)+`",
    "\u202eesrever\u202c",
    "\u2066isolated\u2069",
    "\x1b[31mred\x1b[0m",
    "\x00null",
    "\x07bell",
    "\u2028line\u2029",
    "\ufeffmark",
    "\u200bnothing",
    "𝕳𝖊𝖑𝖑𝖔",
    "a\u0300" * 200,
    "&lt;b&gt;&amp;#60;",
    "{{7*7}}",
    "\U000e0041\U000e0042 tags, a soft\xadhyphen, \ufff9notes\ufffb",
]


def _hostile(i: int, text: str) -> Trajectory:
    """The environment wrote the text as one token, the policy sampled the same token, and it stands everywhere else."""
    return Trajectory(
        trajectory_id=f"step_000001/{text[:40]}/{i}",
        attempt=0,
        task=Task("gspo_gym/GuessNumber-v0", i, {"said": text}),
        sampling_seed=0,
        segments=(Segment([i, i], [False, True], [0.0, -1.0], [-1, 0], [-1, 0]),),  # type: ignore[arg-type]
        turns=(Turn(0, 0, (0, 1), (1, 2), FinishReason.STOP, reward=1.0, reward_terms={text: 1.0}, events=(text,)),),
        messages=(Message("user", text), Message("assistant", text)),
        outcome=Outcome.TERMINATED,
        success=False,
        error=text,
    )


def _no_numbers(episodes: Sequence[Trajectory]) -> bytes:
    """The file of a step in which every number of a sampled token is NaN or infinite."""
    size = len(episodes)
    numbers = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), size)
    names = ("advantage", "rollout_logprob", "old_logprob", "ref_logprob")
    columns: dict[str, Any] = dict.fromkeys(names, numbers)
    columns |= dict.fromkeys(("logprob", "ratio", "correction", "entropy", "share"), numbers[None])
    columns |= {"weight_version": np.zeros(size, np.int32), "optimizer_step": np.zeros((1, size), np.int32)}
    columns |= {"fate": np.zeros(size, np.uint8), "clip": np.zeros((1, size), np.uint8)}
    return pack_columns(1, {each.trajectory_id: 1 for each in episodes}, columns, {})


@pytest.mark.parametrize("has_numbers", [True, False])
def test_forty_hostile_episodes_are_shown_as_text(page: Page, run: Path, tmp_path: Path, has_numbers: bool) -> None:
    texts = [*_HOSTILE, *(text * 3 for text in _HOSTILE[:17]), "NaN", "x" * 1_000_000]
    assert len(texts) == 40
    for name in ("config.toml", "events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "episodes").mkdir()
    episodes = [_hostile(i, text) for i, text in enumerate(texts)]
    write_episodes(tmp_path / "episodes" / "step_000001.jsonl.gz", episodes)
    tokenizer = Tokenizer(WordLevel({text: i for i, text in enumerate(texts)}, unk_token="NaN"))
    tokenizer.decoder = Fuse()  # or it puts spaces between tokens
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "checkpoints" / "step_000001" / "tokenizer.json"))
    if not has_numbers:
        (tmp_path / "tokens").mkdir()
        token_path(tmp_path, 1).write_bytes(_no_numbers(episodes))
    path = tmp_path / "page.html"
    path.write_text(page_of(tmp_path).html, encoding="utf-8")

    open_page(page, f"{path.as_uri()}#view=episodes")
    page.evaluate("page.episodes.all.forEach(({ episode }, i) => { episode.id = String(i) })")
    for i in range(40):
        page.evaluate("hash => { location.hash = hash }", f"#view=episodes&episode={i}")
        page.wait_for_selector(f'article[aria-label="{i}"]')
        page.locator("article summary").last.click()
        told = page.locator(".message.user").inner_text()
        observed, sampled = page.locator("article > .turn .token").all_inner_texts()
        page.locator("article > .turn .token.sampled").hover()
        for shown in (told, observed, sampled, page.locator("article").inner_text(), page.inner_text(".detail")):
            assert set("\x00\x07\x1b\u202e\u2066\u2028\ufeff\u200b\xad\ufff9\U000e0041").isdisjoint(shown)
            assert len(shown) < 100_000
        assert observed == sampled
        assert page.locator('.detail [data-name="rollout_logprob"]').count() == has_numbers  # else: not measured
        if texts[i].isascii() and texts[i].isprintable() and len(texts[i]) < 1000:
            assert texts[i] in told
            assert sampled == texts[i]
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img, main svg").count() == 0


def test_a_page_of_128_episodes_is_less_than_a_megabyte(run: Path) -> None:
    # The library, the run and a quarter of the episodes, four times over.
    page = page_of(run, steps=["step_000004"], max_episodes=32).html
    assert len(page) * 4 < 1_000_000


def test_the_command_writes_the_page_and_says_where_it_is(run: Path, tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "gspo_gym.cli", "report", str(run), "--step", "2", "--output", str(tmp_path / "a.html")],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert made.stdout.startswith(str(tmp_path / "a.html"))
    assert "<!doctype html>" in (tmp_path / "a.html").read_text()

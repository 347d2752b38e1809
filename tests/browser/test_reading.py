"""What a person sees first on the saved page, and how little is in the way: charts, lists, conversations, tokens."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.records import read_metrics
from gspo_gym.run.report.page_data import KEY_CURVES
from gspo_gym.types import Trajectory
from tests.browser.conftest import open_page, until
from tests.browser.test_views import STEP, charts, is_constant

_ARE_FITTED = """drawnCharts.every(({ width, root }) =>
  width === Math.floor(root.parentNode.getBoundingClientRect().width))"""
_WIDTHS = "(all) => all.map((each) => [each.clientWidth, each.querySelector('canvas').getBoundingClientRect().width])"


def test_charts_are_as_wide_as_their_places_and_fill_the_window(page: Page, saved: Path) -> None:
    """Also after the window has changed; the last column ends at the margin of the page, which is 20 or 12 pixels."""
    for width, margin in ((1366, 20), (1920, 20), (390, 12)):
        page.set_viewport_size({"width": width, "height": 800})
        if page.url == "about:blank":
            open_page(page, f"{saved.as_uri()}#view=curves")
        until(page, _ARE_FITTED)
        sizes = page.locator(".plot").evaluate_all(_WIDTHS)
        assert len(sizes) > 5
        assert all(drawn == place for place, drawn in sizes)
        right = max(
            page.locator(".plot").evaluate_all("(all) => all.map((each) => each.getBoundingClientRect().right)")
        )
        assert right == pytest.approx(page.evaluate("document.documentElement.clientWidth") - margin, abs=1)


def test_key_curves_come_first_the_rest_is_folded_and_what_never_changed_is_listed(
    page: Page, run: Path, saved: Path
) -> None:
    open_page(page, f"{saved.as_uri()}#view=curves")
    lines = read_metrics(run)
    names = sorted({name for line in lines for name in line if "/" in name})
    changing = [name for name in names if not is_constant(name, run)]
    assert 0 < len(changing) < len(names)
    first = [name for name in KEY_CURVES if name in changing]
    assert list(charts(page)) == ["evaluation: success_rate", *first]
    folded = page.locator("details.group")
    groups = list(dict.fromkeys(name.partition("/")[0] for name in changing))
    assert folded.locator("h2").all_inner_texts() == [*groups, "constant"]
    assert folded.evaluate_all("(all) => all.some((each) => each.open)") is False

    folded.filter(has_text="clip").first.locator("summary").click()
    until(page, f"drawnCharts.length === {1 + len(first) + sum(name.startswith('clip/') for name in changing)}")
    folded.last.locator("summary").click()
    until(page, "document.querySelector('details.group table') !== null")
    rows = [row.locator("td").all_inner_texts() for row in folded.last.locator("tbody tr").all()]
    assert [row[0] for row in rows] == [name for name in names if name not in changing]
    for name, value, _ in rows:
        known = [line[name] for line in lines if line.get(name) is not None]
        assert (float(value) == pytest.approx(known[0], rel=1e-5)) if known else value == "–"


def test_a_search_opens_what_it_finds_and_is_typed_on_while_the_page_is_drawn_again(page: Page, saved: Path) -> None:
    open_page(page, f"{saved.as_uri()}#view=curves")
    field = page.get_by_label("Find")
    field.press_sequentially("clip/")
    assert {title.partition("/")[0] for title in charts(page)} == {"clip"}
    page.evaluate("show()")  # as a live page does when a step lands
    page.keyboard.type("low")
    assert field.input_value() == "clip/low"
    field.fill("no such metric")
    assert page.get_by_text("No metric has such a name.").count() == 1
    field.fill("")
    assert "evaluation: success_rate" in charts(page)


def test_a_chart_tells_its_last_value_until_it_is_pointed_at(page: Page, run: Path, saved: Path) -> None:
    open_page(page, f"{saved.as_uri()}#view=curves")
    assert page.locator(".u-legend").count() == 0
    readout = page.locator("figure", has=page.get_by_text("loss/total", exact=True)).locator(".readout")
    lines = read_metrics(run)
    for place, step, told in ((None, 4, "last"), (1.9, 2, "step 2")):
        if place is not None:
            x = page.evaluate("(step) => drawnCharts.at(-1).valToPos(step, 'x')", place)
            page.locator(".u-over").last.hover(position={"x": x, "y": 40})
        assert readout.locator("span").first.inner_text() == told
        assert float(readout.locator("b").inner_text()) == pytest.approx(lines[step - 1]["loss/total"], rel=1e-4)
    assert not re.search(r"--|NaN|undefined", " ".join(page.locator(".readout").all_inner_texts()))


def test_texts_of_events_do_not_overlap_and_those_of_rare_ones_have_the_first_place(page: Page, saved: Path) -> None:
    """A text is 6 pixels a character wide here, a step 5 pixels, and the chart goes from 0 to 500."""
    open_page(page, saved.as_uri())
    events = [{"step": step, "kind": "no_update"} for step in range(0, 101, 4)]
    events += [{"step": 0, "kind": "resumed"}, {"step": 50, "kind": "\x1b"}, {"step": 100, "kind": "restored"}]
    events += [{"step": step, "kind": "checkpoint"} for step in range(101)]  # every run has them: none is drawn
    marks = page.evaluate(
        "(events) => eventMarks(eventKinds(events), (step) => 5 * step, (text) => 6 * text.length, [0, 500])", events
    )
    assert [mark["x"] for mark in marks] == [5 * step for step in [*range(0, 50, 4), 50, *range(52, 101, 4)]]
    # "no_update" is 54 pixels wide, and has room from 60 to 250 and from 286 to 434.
    assert [(mark["left"], mark["text"]) for mark in marks if mark["text"]] == [
        *((0, "resumed +1"), (60, "no_update"), (120, "no_update"), (180, "no_update"), (250, "⟨001b⟩")),
        *((300, "no_update"), (360, "no_update"), (434, "restored +1")),
    ]


def _episodes(run: Path) -> list[Trajectory]:
    return read_episodes(run / f"episodes/{STEP}.jsonl.gz")


def test_episodes_are_named_by_task_and_outcome_and_found_by_words(page: Page, run: Path, saved: Path) -> None:
    open_page(page, f"{saved.as_uri()}#view=episodes&step={STEP}")
    episodes = {each.trajectory_id: each for each in _episodes(run)}
    tasks = list(dict.fromkeys(f"GuessNumber #{each.task.seed}" for each in episodes.values()))
    assert page.locator(".list h3").all_inner_texts() == tasks
    for row in page.locator(".list button").all():
        each = episodes[row.get_attribute("data-episode") or ""]
        ended = "" if each.outcome.value == "terminated" else f", {each.outcome.value.replace('_', ' ')}"
        mark, word = ("✓", "succeeded") if each.success else ("✗", "failed")
        turns = f"{len(each.turns)} turn{'s' if len(each.turns) > 1 else ''}"
        assert row.locator("span").first.inner_text() == f"{mark} {word}{ended}, {turns}"
    page.get_by_label("Order").select_option("best")
    assert (page.locator(".list button").first.text_content() or "").startswith("✓ GuessNumber #")

    article = page.locator("article").get_attribute("aria-label")
    page.get_by_label("Find").press_sequentially(f"{tasks[1].partition('#')[2]} succeeded")
    assert page.get_by_label("Find").evaluate("(field) => field === document.activeElement")
    found = page.locator(".list button").evaluate_all("(all) => all.map((each) => each.dataset.episode)")
    wanted = {name for name, each in episodes.items() if tasks[1].endswith(f"#{each.task.seed}") and each.success}
    assert set(found) == wanted
    assert page.locator("article").get_attribute("aria-label") == article  # what is read stays
    page.get_by_label("Find").fill("no such words")
    assert page.locator(".list").inner_text() == "No episode of this step is like that."


def test_an_episode_is_a_conversation_first_and_its_tokens_are_one_key_away(page: Page, run: Path, saved: Path) -> None:
    page.set_viewport_size({"width": 1366, "height": 400})
    open_page(page, f"{saved.as_uri()}#view=episodes&step={STEP}")
    episode = max(_episodes(run), key=lambda each: len(each.turns))
    assert len(episode.turns) > 2
    page.evaluate("(id) => page.episodes.visit({ episode: id })", episode.trajectory_id)
    page.wait_for_selector(f'article[aria-label="{episode.trajectory_id}"]')
    assert page.locator(".token").count() == 0
    messages = page.locator("article .message")
    assert messages.evaluate_all("(all) => all.map((each) => [each.firstChild.textContent, each.lastChild.data])") == [
        [message.role, message.content] for message in episode.messages
    ]
    # Each turn ends with the answer of the policy, and the last with what came after it.
    answers = [
        page.locator(f'section[aria-label="turn {turn.index}"] .message.assistant').count() for turn in episode.turns
    ]
    assert answers == [1] * len(episode.turns)

    last = len(episode.turns) - 1
    page.locator(f'section[aria-label="turn {last}"]').scroll_into_view_if_needed()
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    page.keyboard.press("t")
    page.wait_for_selector(".token.sampled")
    assert "as=tokens" in page.url
    assert page.locator(f'section[aria-label="turn {last}"]').evaluate(
        "(turn) => { const { top, bottom } = turn.getBoundingClientRect(); return bottom > 0 && top < innerHeight; }"
    )
    page.get_by_role("button", name="next episode").click()  # they stay tokens
    page.wait_for_selector(f'article:not([aria-label="{episode.trajectory_id}"]) .token.sampled')
    page.get_by_role("button", name="Conversation").click()
    page.wait_for_selector("article .message")
    assert page.locator(".token").count() == 0
    assert page.evaluate("document.activeElement.name") == "conversation"


def test_a_touch_screen_is_told_of_taps(browser: Browser, saved: Path) -> None:
    for has_touch, word, other in ((True, "Tap", "Hover"), (False, "Hover", "Tap")):
        context = browser.new_context(has_touch=has_touch, is_mobile=has_touch, viewport={"width": 390, "height": 800})
        page = context.new_page()
        open_page(page, f"{saved.as_uri()}#view=episodes&as=tokens")
        hint = page.inner_text(".detail")
        assert word in hint
        assert other not in hint
        assert page.locator("#help-button").is_visible() != has_touch
        page.locator("article > .turn .token.sampled").first.click()
        page.wait_for_selector(".detail h3")
        context.close()


def test_tokens_touch_each_other_and_a_space_in_one_is_a_dot(page: Page, run: Path, saved: Path) -> None:
    """No gap that looks like a space stands between two tokens, in a turn or in the strips of siblings."""
    open_page(page, f"{saved.as_uri()}#view=episodes&step={STEP}&as=tokens")
    for strip in page.locator("article .tokens").all():
        places = strip.locator(".token.sampled").evaluate_all(
            """(all) => all.map((each) => {
              const { left, right, top } = each.getBoundingClientRect();
              return [left, right, top, each.nextSibling === each.nextElementSibling];
            })"""
        )
        assert all(is_next for *_, is_next in places)  # no text between
        for (_, right, top, _), (left, _, other_top, _) in pairwise(places):
            assert top != other_top or left >= right - 0.01
    strip = page.locator(".siblings .tokens").first
    lefts = strip.locator(".token").evaluate_all(
        "(all) => all.map((each) => each.getBoundingClientRect()).map(({ left, right }) => [left, right])"
    )
    assert [left for left, _ in lefts[1:]] == pytest.approx([right for _, right in lefts[:-1]], abs=0.05)
    shown = page.evaluate(
        """() => {
          const view = page.episodes, { episode } = view.current, { position, segment, id } = episode.tokens[0];
          view.step.vocabulary[id] = " two words\\n";
          const span = view.span(episode, segment, position, episode.tokens[0]);
          return [span.textContent, span.querySelectorAll(".space").length];
        }"""
    )
    assert shown == [" two words↵\n", 2]


def test_on_a_small_screen_the_conversation_stands_above_the_list_that_a_button_unfolds(
    page: Page, saved: Path
) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    open_page(page, f"{saved.as_uri()}#view=episodes&step={STEP}")
    assert not page.locator(".list").is_visible()
    box = page.locator("article .message").first.bounding_box()
    assert box is not None
    assert box["y"] < 400
    page.locator(".fold").click()
    page.locator(".list button").nth(3).click()
    page.wait_for_selector('article:has-text("group_000016/3"), article')
    until(page, "!document.querySelector('.side').classList.contains('open')")

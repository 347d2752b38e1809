"""What the saved page's three views show and do, in a real browser: recomputed from the files of the run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Locator, Page

from gspo_gym.cli.report import page_of
from gspo_gym.learning.tokens import Clip, Fate
from gspo_gym.rollout.episode_files import read_episodes, write_episodes
from gspo_gym.run.records import read_config, read_events, read_metrics
from gspo_gym.run.tokens import open_tokens, pack_columns, token_path
from gspo_gym.types import Trajectory
from tests.browser.conftest import open_page

STEP = "step_000004"
_CHARTS = """() => drawnCharts.map((plot) => ({
  title: plot.root.closest("figure").querySelector("b").textContent,
  labels: plot.series.slice(1).map((series) => series.label),
  at: plot.cursor.idx === null ? null : plot.data[0][plot.cursor.idx],
  legend: [...plot.root.querySelectorAll(".u-legend .u-value")].map((cell) => cell.textContent),
  isLog: plot.scales.y.distr === 3,
  values: [...plot.data[1]],
}))"""


_X_OF_STEP = "(step) => drawnCharts.at(-1).valToPos(step, 'x')"  # all are as wide


def charts(page: Page) -> dict[str, dict[str, Any]]:
    """The charts by title (Any: JSON values)."""
    return {each["title"]: each for each in page.evaluate(_CHARTS)}


def written(folder: Path, run: Path, **given: Any) -> str:
    """The URL of the page of a run in a file of the folder (Any: as `page_of` takes them)."""
    path = folder / "page.html"
    path.write_text(page_of(run, **given).html, encoding="utf-8")
    return path.as_uri()


def facts(place: Locator) -> dict[str, str]:
    return dict(zip(place.locator("dt").all_inner_texts(), place.locator("dd").all_inner_texts(), strict=True))


def rows(page: Page, heading: str) -> list[list[str]]:
    """The table that comes after a heading."""
    table = page.locator(f'xpath=//h2[text()="{heading}"]/following::table[1]')
    return [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]


def test_the_run_at_a_glance_says_what_was_trained_what_came_of_it_and_what_it_cost(
    page: Page, run: Path, saved: Path
) -> None:
    open_page(page, saved.as_uri())
    evaluations = [event["data"] for event in read_events(run) if event["kind"] == "evaluation"]
    first, last = evaluations[0], evaluations[-1]
    result = page.locator("section", has_text="Result")
    rates = [f"{100 * each['success_rate']:.1f}%" for each in (first, last)]
    assert result.locator(".big").inner_text() == " → ".join(rates)
    within = ["{:.1f}% to {:.1f}%".format(*(100 * side for side in each["success_interval"])) for each in (first, last)]
    told = result.locator("p.quiet").inner_text()
    assert told == f"success rate of 16 held-out episodes; 95% intervals {within[0]}, then {within[1]}"

    config, summary, lines = read_config(run), json.loads((run / "summary.json").read_text()), read_metrics(run)
    shown = facts(page.locator("section", has_text="tokens trained on"))
    assert [shown[name] for name in ("environment", "model", "objective", "engine", "status", "step")] == [
        *("GuessNumber", config["model"]["base"], "gspo_token", "local", "completed", "4")
    ]
    assert float(shown["time"].removesuffix(" s")) == pytest.approx(summary["wall_seconds"], rel=1e-2)
    assert int(shown["sampled tokens"].replace(",", "")) == sum(line["rollout/sampled_tokens"] for line in lines)
    assert int(shown["tokens trained on"].replace(",", "")) == summary["trained_tokens"]

    assert ["loss.kl_coef", "0.01", "0"] in rows(page, "Settings that differ from their defaults")
    assert ["training.learning_rate", "0.002", "–"] in rows(page, "Settings that differ from their defaults")
    findings = page.evaluate("page.runs[0].findings.map((each) => each.problem)")
    assert findings, "its clip is far too narrow for its noise"
    assert all(problem in page.inner_text("main") for problem in findings)
    kinds = [event["kind"] for event in read_events(run) if event["kind"] != "evaluation"]
    assert [row[1] for row in rows(page, "Events")] == kinds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (119.6, "2 min 0 s"),
        (3599.7, "1 h 0 min"),
        (5400, "1 h 30 min"),
    ],
)
def test_a_time_is_rounded_once(page: Page, saved: Path, seconds: float, text: str) -> None:
    open_page(page, saved.as_uri())
    assert page.evaluate("(seconds) => duration(seconds)", seconds) == text


def test_curves_are_grouped_and_one_hover_line_goes_through_all_of_two_runs(
    page: Page, run: Path, run_by_turns: Path, tmp_path: Path
) -> None:
    open_page(page, f"{written(tmp_path, run, others=[run_by_turns])}#view=curves")
    lines = {line["step"]: line for line in read_metrics(run)}
    names = sorted(
        {name for each in (run, run_by_turns) for line in read_metrics(each) for name in line if "/" in name}
    )
    groups = page.locator("main section").evaluate_all("(found) => found.map((each) => each.ariaLabel)")
    assert groups == list(dict.fromkeys(name.partition("/")[0] for name in names))
    drawn = charts(page)
    assert list(drawn) == ["evaluation: success_rate", *names]
    assert drawn["loss/total"]["labels"] == ["small", "turns"]
    assert drawn["evaluation: success_rate"]["labels"] == [
        *("small", "95% high", "95% low"),
        *("turns", "95% high", "95% low"),
    ]

    over = page.locator("figure", has=page.get_by_text("loss/total", exact=True)).locator(".u-over")
    heights = "(all) => all.map((each) => each.getBoundingClientRect().height)"
    at_rest = page.locator("figure").evaluate_all(heights)
    for step in (3, 4):
        over.hover(position={"x": page.evaluate(_X_OF_STEP, step - 0.1), "y": 40})
        drawn = charts(page)
        assert {each["at"] for title, each in drawn.items() if title in names} == {step}
        assert drawn["evaluation: success_rate"]["at"] in (2, 4)  # the nearest that it has
        for name in ("loss/total", "clip/low_fraction", "rollout/reward_mean"):
            assert float(drawn[name]["legend"][1]) == pytest.approx(lines[step][name], rel=1e-4)
        assert page.locator("figure").evaluate_all(heights) == at_rest  # else they would move away from the pointer


def test_curves_can_be_smoothed_searched_drawn_on_a_log_scale_and_without_events(
    page: Page, run: Path, saved: Path
) -> None:
    open_page(page, f"{saved.as_uri()}#view=curves")
    lines = read_metrics(run)

    def picture() -> str:
        canvas = page.locator("figure", has=page.get_by_text("loss/total", exact=True)).locator("canvas")
        return str(canvas.evaluate("(canvas) => canvas.toDataURL()"))

    with_events = picture()
    page.get_by_role("checkbox", name="events").uncheck()
    assert picture() != with_events
    page.get_by_role("checkbox", name="events").check()
    assert picture() == with_events

    # Each line says what happened; what would lie on another text is left out.
    told = [
        {"step": step, "kind": kind} for step, kind in ((4, "checkpoint"), (0, "started"), (4, "\x1b"), (5, "late"))
    ]
    assert page.evaluate("(events) => eventMarks(events, (step) => 10 * step, 12)", told) == [
        *({"x": 0, "text": "started"}, {"x": 40, "text": "checkpoint, ⟨001b⟩"}, {"x": 50, "text": ""})
    ]

    page.get_by_role("checkbox", name="log scale").check()
    for name, each in charts(page).items():
        given = [value for value in each["values"] if value is not None]
        assert each["isLog"] == all(value > 0 for value in given) or name.startswith("evaluation"), name
    assert charts(page)["policy/entropy"]["isLog"]
    assert not charts(page)["loss/total"]["isLog"]  # which is negative
    page.get_by_role("checkbox", name="log scale").uncheck()

    page.get_by_label("Smooth").fill("0.5")
    values = [line["loss/total"] for line in lines]
    # Adam's average, corrected for its start: sum of 0.5^k * v[t - k] over sum of 0.5^k.
    expected = [
        sum(0.5**k * values[t - k] for k in range(t + 1)) / sum(0.5**k for k in range(t + 1))
        for t in range(len(values))
    ]
    assert charts(page)["loss/total"]["values"] == pytest.approx(expected, rel=1e-12)

    page.get_by_label("Find").fill("entropy")
    assert [title for title in charts(page) if not title.startswith("evaluation")] == sorted(
        name for name in lines[0] if "entropy" in name
    )


def of_episodes(run: Path) -> list[tuple[Trajectory, slice]]:
    """The episodes of the step that is looked at, with the place of their tokens in its file."""
    start, found = 0, []
    for episode in read_episodes(run / f"episodes/{STEP}.jsonl.gz"):
        found.append((episode, slice(start, start + episode.num_actions)))
        start += episode.num_actions
    return found


def go_to(page: Page, episode: str) -> None:
    page.evaluate("hash => { location.hash = hash }", f"#view=episodes&step={STEP}&episode={episode}")
    page.wait_for_selector(f'article[aria-label="{episode}"]')


def test_hovering_over_a_token_shows_every_number_of_it(page: Page, run: Path, saved: Path) -> None:
    columns = open_tokens(run, 4).columns()
    open_page(page, f"{saved.as_uri()}#view=episodes&step={STEP}")
    clipped = np.flatnonzero(columns["clip"][0] == Clip.HIGH)
    masked = np.flatnonzero(columns["fate"] == Fate.OVERLONG)
    for token in (int(clipped[0]), int(masked[0])):
        episode, place = next(each for each in of_episodes(run) if each[1].start <= token < each[1].stop)
        go_to(page, episode.trajectory_id)
        page.locator("article > .turn .token.sampled").nth(token - place.start).hover()
        turns = np.concatenate([segment.turn_index[segment.action_mask] for segment in episode.segments])
        ids = np.concatenate([segment.token_ids[segment.action_mask] for segment in episode.segments])
        expected: dict[str, Any] = {
            "turn": turns[token - place.start],
            "token id": ids[token - place.start],
            "logprob, engine": columns["rollout_logprob"][token],
            "logprob, old": columns["old_logprob"][token],
            "logprob, now": columns["logprob"][0, token],
            "logprob, reference": columns["ref_logprob"][token],
            "advantage": columns["advantage"][token],
            "ratio of its unit": columns["ratio"][0, token],
            "correction weight": columns["correction"][0, token],
            "entropy, nats": columns["entropy"][0, token],
            "share of the loss": columns["share"][0, token],
            "version of the weights": columns["weight_version"][token],
        }
        shown = facts(page.locator(".detail"))
        assert shown.pop("clip bound") == ("high" if token == clipped[0] else "none")
        assert shown.pop("what became of it") == ("trained" if token == clipped[0] else "overlong")
        known = {name: float(value) for name, value in expected.items() if np.isfinite(value)}
        assert (len(known) == 12) == (token == clipped[0])  # of a masked token, most was never computed
        assert {name: float(text) for name, text in shown.items()} == pytest.approx(known, rel=1e-7)


def test_each_of_seven_colours_is_as_strong_as_its_number(page: Page, run: Path, saved: Path) -> None:
    """70% from the size on that 95 of 100 tokens of the step do not exceed; of versions, a colour each."""
    columns = open_tokens(run, 4).columns()
    ratio, old, engine = columns["ratio"][0], columns["old_logprob"], columns["rollout_logprob"]
    numbers: dict[str, tuple[Any, str]] = {
        "logprob of the engine": (engine, "amount"),
        "ratio of its unit, log": (np.log(ratio.astype(np.float64)), "middle"),
        "advantage": (columns["advantage"], "middle"),
        "entropy": (columns["entropy"][0], "amount"),
        "learner less engine, logprob": (old.astype(np.float64) - engine, "middle"),
        "share of the loss": (columns["share"][0], "middle"),
    }
    open_page(page, f"{saved.as_uri()}#view=episodes&step={STEP}")
    choice = page.get_by_label("Colour")
    assert choice.locator("option").all_inner_texts() == [
        *list(numbers)[:5],
        *("version of the weights", "share of the loss", "nothing"),
    ]
    trained = [each for each in of_episodes(run) if (columns["fate"][each[1]] == Fate.TRAINED).all()]
    episode, place = max(trained, key=lambda each: each[0].num_actions)
    go_to(page, episode.trajectory_id)
    spans = page.locator("article > .turn .token.sampled")
    backgrounds = "(found) => found.map((each) => each.style.background)"
    for name, (values, kind) in numbers.items():
        choice.select_option(label=name)
        sizes = np.sort(np.abs(values[np.isfinite(values)]))
        scale = float(sizes[int(0.95 * (len(sizes) - 1))])
        seen = spans.evaluate_all(backgrounds)
        assert any(seen), name
        for value, background in zip(values[place].tolist(), seen, strict=True):
            side = "amount" if kind == "amount" else "positive" if value > 0 else "negative"
            share = 70 * min(1.0, abs(value) / scale)
            found = re.fullmatch(r"color-mix\(in srgb, var\(--tint-(\w+)\) (\d+)%, transparent\)", background)
            assert found is not None or share < 0.51
            if found is not None:
                assert found[1] == side
                assert int(found[2]) == pytest.approx(share, abs=0.51)
        legend = [float(text.replace("−", "-")) for text in page.locator(".legend").inner_text().split()]
        assert max(map(abs, legend)) == pytest.approx(scale, rel=5e-3)
    page.keyboard.press("c")  # from the last one to the next: nothing
    assert page.get_by_label("Colour").input_value() == "none"
    assert set(page.locator("article > .turn .token.sampled").evaluate_all(backgrounds)) == {""}


@pytest.fixture(scope="module")
def mixed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, with two episodes of whose last turn the weights are newer, and one that failed."""
    folder: Path = tmp_path_factory.mktemp("mixed") / "small"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("*.html"))
    path = folder / f"episodes/{STEP}.jsonl.gz"
    episodes = read_episodes(path)
    longest = sorted(range(len(episodes)), key=lambda i: -len(episodes[i].turns))[:2]
    for i in longest:
        segments = [
            dataclasses.replace(
                each, weight_version=np.where(each.turn_index == len(episodes[i].turns) - 1, 3, each.weight_version)
            )
            for each in episodes[i].segments
        ]
        episodes[i] = dataclasses.replace(episodes[i], segments=tuple(segments))
    write_episodes(path, episodes)
    tokens = open_tokens(run, 4)
    versions = [segment.weight_version[segment.action_mask] for each in episodes for segment in each.segments]
    columns = tokens.columns() | {"weight_version": np.concatenate(versions)}
    sizes = {name: stop - start for name, (start, stop) in tokens.spans.items()}
    token_path(folder, 4).write_bytes(pack_columns(4, sizes, columns, {}))
    return folder


def listed(page: Page) -> list[str]:
    texts = page.locator(".list button span:first-child").all_inner_texts()
    return [re.sub(r"^\S ", "", text) for text in texts]


def test_filters_and_orders_list_the_episodes_that_they_name(page: Page, mixed: Path, tmp_path: Path) -> None:
    columns = open_tokens(mixed, 4).columns()
    episodes = of_episodes(mixed)
    open_page(page, f"{written(tmp_path, mixed, steps=[STEP])}#view=episodes&step={STEP}")

    def versions(each: Trajectory) -> set[int]:
        return {int(v) for segment in each.segments for v in segment.weight_version[segment.action_mask]}

    expected = {
        "all": [True for _ in episodes],
        "failed": [each.success is False or each.error is not None for each, _ in episodes],
        "succeeded": [each.success is True for each, _ in episodes],
        "clipped": [bool((columns["clip"][0, place] != Clip.NONE).any()) for _, place in episodes],
        "sampled and not trained on": [bool((columns["fate"][place] != Fate.TRAINED).any()) for _, place in episodes],
        "version changed inside": [len(versions(each)) > 1 for each, _ in episodes],
    }
    for name, wanted in expected.items():
        page.get_by_label("Show").select_option(label=name)
        names = [each.trajectory_id for (each, _), is_wanted in zip(episodes, wanted, strict=True) if is_wanted]
        assert 0 < len(names) < 32 or name == "all"
        assert listed(page) == names, name
    assert sum(expected["version changed inside"]) == 2

    page.get_by_label("Colour").select_option(label="version of the weights")
    mixed_one = next(each for each, _ in episodes if len(versions(each)) > 1)
    go_to(page, mixed_one.trajectory_id)
    own = np.concatenate([segment.weight_version[segment.action_mask] for segment in mixed_one.segments]).tolist()
    seen = page.locator("article > .turn .token.sampled").evaluate_all(
        "(all) => all.map((each) => each.style.background)"
    )
    assert len(set(zip(own, seen, strict=True))) == len(set(own)) == len(set(seen)) == 2

    page.get_by_label("Show").select_option(label="all")
    shares = {
        each.trajectory_id: abs(math.fsum(columns["share"][:, place].ravel().tolist())) for each, place in episodes
    }
    page.get_by_label("Order").select_option(label="largest share of the loss")
    found = [shares[name] for name in listed(page)]
    assert len(found) == 32
    assert found == sorted(found, reverse=True)
    returns = {each.trajectory_id: each.reward for each, _ in episodes}
    for order, sign in (("highest return", -1), ("lowest return", 1)):
        page.get_by_label("Order").select_option(label=order)
        found = [sign * returns[name] for name in listed(page)]
        assert found == sorted(found)


def test_siblings_stand_side_by_side_with_a_bar_where_each_leaves_the_others(
    page: Page, run: Path, saved: Path
) -> None:
    groups: dict[str, list[Trajectory]] = {}
    for episode, _ in of_episodes(run):
        groups.setdefault(episode.trajectory_id.rpartition("/")[0], []).append(episode)
    open_page(page, f"{saved.as_uri()}#view=episodes&step={STEP}")
    num_bars = 0
    for members in groups.values():
        go_to(page, members[0].trajectory_id)
        lines = page.locator(".siblings tbody tr").all()
        assert len(lines) == len(members) == 4
        every = [np.concatenate([segment.token_ids for segment in each.segments]).tolist() for each in members]
        for i, line in enumerate(lines):
            assert line.locator("td").nth(1).inner_text() == f"{members[i].reward:+.3g}"
            assert line.locator(".token.sampled").count() == members[i].num_actions
            # The first token that makes this beginning its own, if it has one; here all begin with tokens of their own.
            place = next(
                (
                    n
                    for n in range(len(every[i]))
                    if all(each[: n + 1] != every[i][: n + 1] for j, each in enumerate(every) if j != i)
                ),
                None,
            )
            bars = line.locator(".token.leaves")
            mask = np.concatenate([segment.action_mask for segment in members[i].segments])
            assert bars.count() == (place is not None and bool(mask[place]))
            if bars.count():
                num_bars += 1
                # It is drawn 3 pixels to the left of the token, which the strip must not cut off.
                left, strip = bars.bounding_box(), line.locator(".tokens").bounding_box()
                assert left is not None
                assert strip is not None
                assert left["x"] - 3 >= strip["x"]
    assert num_bars > 20


def test_the_page_has_the_licence_of_the_library_that_draws_its_curves(saved: Path) -> None:
    text = saved.read_text()
    assert "The MIT License" in text
    assert "Leon Sorokin" in text
    assert "Permission is hereby granted, free of charge" in text

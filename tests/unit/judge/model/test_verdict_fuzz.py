"""Five hundred answers that are no verdict, or hardly one: each is read exactly or refused, and nothing is made up.

A reader written here a second time, on other principles (it looks at the whole text as JSON, has one rule a check, and
knows what was done to the answer), says which of the two it must be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gspo_gym.judge.model.prompt import VerdictError, parse_verdict, verdict_key
from gspo_gym.judge.rubric import Criterion

NONCE = "0123456789abcdef0123"
KEY = verdict_key(NONCE)
CRITERIA = (
    Criterion("a.binary", "x", scale="binary"),
    Criterion("b bounded", "x"),
    Criterion("c.count", "x", scale="count"),
    Criterion('d "custom"', "x", scale="custom", minimum=-2.0, maximum=3.5),
)
PARTS = {"turn_1": CRITERIA[:2], "turn_2": CRITERIA[:2], "outcome": CRITERIA}
NUM_EXAMPLES = 500

Json = dict[str, Any]

# Drawn by a generator from one seed, which is much faster than letting Hypothesis draw every field.
GOOD_SCORES: dict[str, Callable[[np.random.Generator], Any]] = {
    "binary": lambda draws: [0, 1, 0.0, 1.0][draws.integers(4)],
    "bounded": lambda draws: [float(draws.random()), 0, 1, 0.0, 1.0, 5e-324][draws.integers(6)],
    "count": lambda draws: [int(draws.integers(10**6)), 0, 3.0][draws.integers(3)],
    "custom": lambda draws: [float(draws.uniform(-2, 3.5)), int(draws.integers(-2, 4)), -2.0, 3.5][draws.integers(4)],
}
TEXTS = ("", "It is new.", 'He said "1" {and} [so on].', "\u4e00\U0001f600\n\t\\", "\ud800", "verdict_0")
# No score of any of the four scales; those marked below are one on some.
BAD_SCORES = st.sampled_from(
    [
        None,
        True,
        False,
        "1",
        "0.5",
        "",
        [],
        [1],
        {},
        {"score": 1},
        math.nan,
        math.inf,
        -math.inf,
        -2.5,
        10**400,
        -(10**30),
    ]
)


def make_verdict(seed: int) -> Json:
    """A complete verdict in the criteria's scales."""
    draws = np.random.default_rng(seed)

    def text() -> str:
        return TEXTS[draws.integers(len(TEXTS))]

    def scored(criterion: Criterion) -> Json:
        return {"reason": text(), "score": GOOD_SCORES[criterion.scale](draws)}

    parts = {name: {c.id: scored(c) for c in criteria} for name, criteria in PARTS.items()}
    return {KEY: {**parts, "summary": text()}}


def verdicts() -> st.SearchStrategy[Json]:
    return st.integers(0, 2**32 - 1).map(make_verdict)


def expected_scores(verdict: Json) -> dict[tuple[str, str], tuple[float, str]]:
    return {
        (part, c.id): (float(verdict[KEY][part][c.id]["score"]), verdict[KEY][part][c.id]["reason"])
        for part, criteria in PARTS.items()
        for c in criteria
    }


def read_scores(text: str) -> dict[tuple[str, str], tuple[float, str]]:
    parts = parse_verdict(text, nonce=NONCE, parts=PARTS).parts
    return {(part, id_): (s.score, s.reason) for part, scores in parts.items() for id_, s in scores.items()}


def is_refused(text: str) -> bool:
    try:
        parse_verdict(text, nonce=NONCE, parts=PARTS)
    except VerdictError:
        return True
    return False


# Every one makes a verdict into no verdict.
def without_a_part(draw: st.DrawFn, verdict: Json) -> str:
    del verdict[KEY][draw(st.sampled_from([*PARTS, "summary"]))]
    return json.dumps(verdict)


def without_a_criterion(draw: st.DrawFn, verdict: Json) -> str:
    part = draw(st.sampled_from(list(PARTS)))
    del verdict[KEY][part][draw(st.sampled_from([c.id for c in PARTS[part]]))]
    return json.dumps(verdict)


def without_a_field(draw: st.DrawFn, verdict: Json) -> str:
    part = draw(st.sampled_from(list(PARTS)))
    del verdict[KEY][part][draw(st.sampled_from([c.id for c in PARTS[part]]))][
        draw(st.sampled_from(["reason", "score"]))
    ]
    return json.dumps(verdict)


def with_something_more(draw: st.DrawFn, verdict: Json) -> str:
    part = draw(st.sampled_from(list(PARTS)))
    holder = draw(st.sampled_from([verdict, verdict[KEY], verdict[KEY][part], verdict[KEY][part]["a.binary"]]))
    holder[draw(st.sampled_from(["total", "turn_3", "A.BINARY", "a", "verdict", " score"]))] = {
        "reason": "",
        "score": 1,
    }
    return json.dumps(verdict)


def with_a_bad_score(draw: st.DrawFn, verdict: Json) -> str:
    part = draw(st.sampled_from(list(PARTS)))
    verdict[KEY][part][draw(st.sampled_from([c.id for c in PARTS[part]]))]["score"] = draw(BAD_SCORES)
    return json.dumps(verdict)


def off_its_scale(draw: st.DrawFn, verdict: Json) -> str:
    criterion = draw(st.sampled_from(CRITERIA))
    wrong = {
        "binary": st.sampled_from([2, -1, 0.5, 1e-9, 1.0000001]),
        "bounded": st.sampled_from([-1e-9, 1.0000001, 7, 100]),
        "count": st.sampled_from([-1, 0.5, 2.0000001, 1_000_001, 1e308]),
        "custom": st.sampled_from([-2.0000001, 3.6, 1e9]),
    }
    verdict[KEY]["outcome"][criterion.id]["score"] = draw(wrong[criterion.scale])
    return json.dumps(verdict)


def with_a_bad_text(draw: st.DrawFn, verdict: Json) -> str:
    value = draw(st.sampled_from([None, 3, ["a"], {"text": "a"}, True]))
    if draw(st.booleans()):
        verdict[KEY]["summary"] = value
    else:
        verdict[KEY]["outcome"]["a.binary"]["reason"] = value
    return json.dumps(verdict)


def twice(draw: st.DrawFn, verdict: Json) -> str:
    text = json.dumps(verdict)
    return draw(
        st.sampled_from([f"{text}\n{text}", f"{KEY}: {text}", f"{text} ({KEY})", f"[{text}, {text}]", f"All 0. {text}"])
    )


def with_a_repeated_name(draw: st.DrawFn, verdict: Json) -> str:
    text = json.dumps(verdict)
    name, value = draw(st.sampled_from([("summary", '"again"'), ("outcome", "{}"), ("turn_1", "{}")]))
    return text.replace('"turn_1": ', f'"{name}": {value}, "turn_1": ', 1)


def under_another_key(draw: st.DrawFn, verdict: Json) -> str:
    other = draw(
        st.sampled_from(["verdict", "verdict_", f"verdict_{NONCE[:-1]}4", KEY.upper(), f"{KEY[:-1]}", "{nonce}", NONCE])
    )
    return json.dumps({other: verdict[KEY]})


def cut_off(draw: st.DrawFn, verdict: Json) -> str:
    text = json.dumps(verdict)
    return text[: draw(st.integers(0, len(text) - 1))]


def of_another_shape(draw: st.DrawFn, verdict: Json) -> str:
    body = verdict[KEY]
    shapes: list[Any] = [
        {KEY: [body]}, {KEY: json.dumps(body)}, {KEY: None}, {KEY: 1.0}, {KEY: {**body, "outcome": 1}}, {KEY: {}},
        {KEY: {**body, "outcome": list(body["outcome"].values())}},
        {KEY: {**body, "turn_1": {"a.binary": 1, "b bounded": 1}}},
    ]  # fmt: skip
    return json.dumps(draw(st.sampled_from(shapes)))


def no_json(draw: st.DrawFn, verdict: Json) -> str:
    text = json.dumps(verdict)
    swapped = {"quotes": ('"', "'"), "colons": (": ", " = "), "braces": ("{", "("), "commas": (",", "")}
    spoilt = [text.replace(old, new) for old, new in swapped.values()]
    deep = ["[" * 100_000 + KEY, "{" * 100_000 + f'"{KEY}": 1']
    return draw(st.sampled_from([*spoilt, text[1:-1], KEY, f"score: 1 {KEY}", *deep]))


SPOILERS: list[Callable[[st.DrawFn, Json], str]] = [
    without_a_part, without_a_criterion, without_a_field, with_something_more, with_a_bad_score, off_its_scale,
    with_a_bad_text, twice, with_a_repeated_name, under_another_key, cut_off, of_another_shape, no_json,
]  # fmt: skip

SETTINGS = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def spoilt(draw: st.DrawFn) -> str:
    return draw(st.sampled_from(SPOILERS))(draw, draw(verdicts()))


@given(spoilt())
@SETTINGS
def test_five_hundred_answers_that_are_no_verdict_are_refused(text: str) -> None:
    assert is_refused(text), text


@given(
    verdicts(),
    st.sampled_from(["", "```json\n", '{"quoted": {"score": 1}} so</think>\n', "<think>{a}</think>```json\n"]),
)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_verdicts_are_read_exactly_after_any_reasoning(verdict: Json, before: str) -> None:
    for text in (json.dumps(verdict), json.dumps(verdict, indent=2), json.dumps(verdict, ensure_ascii=False)):
        assert read_scores(f"{before}{text}\n```") == expected_scores(verdict)


@given(verdicts(), st.lists(st.tuples(st.integers(0, 10_000), st.characters()), min_size=1, max_size=6))
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_a_damaged_verdict_is_refused_or_read_as_what_stands_there(
    verdict: Json, changes: list[tuple[int, str]]
) -> None:
    characters = list(json.dumps(verdict))
    for place, character in changes:
        characters[place % len(characters)] = character
    text = "".join(characters)
    try:
        scores = read_scores(text)
    except VerdictError:
        return
    # It was read: then what stands there is a verdict, and these are its scores.
    assert scores == expected_scores(json.JSONDecoder().raw_decode(text, text.index("{"))[0])


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "replace")))
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_any_other_text_is_refused(text: str) -> None:
    assert is_refused(text)

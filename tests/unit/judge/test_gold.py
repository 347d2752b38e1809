"""Gold is asked every k steps beside the run; what both have scored is compared, and an alarm is told and may stop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from scripted_judge import ScriptedJudge, episode, judgement

from gspo_gym.errors import StorageError
from gspo_gym.judge.base import JudgeError, Judgement, JudgeRequest, JudgeStoppedError, Rubrics
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.judge.gold import (
    DriftCheck,
    GoldWatch,
    Judged,
    JudgeDriftError,
    Label,
    against_judge,
    against_labels,
    compare_with_gold,
    scores_to_compare,
)
from gspo_gym.judge.records import JudgedEpisode
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.types import Task

PART = Rubric((Criterion("a", "A.", weight=3.0), Criterion("b", "B.")))
RUBRICS = Rubrics(event=PART, outcome=PART)
BLEND = RewardBlend(env=1.0, event=0.5, outcome=2.0)


async def rubrics_of(_: Task) -> Rubrics:
    return RUBRICS


def judged(number: int, said: Judgement) -> Judged:
    played = episode([0.0, 0.0], name=f"g/{number}")
    return played, JudgedEpisode(played.trajectory_id, 0, "Test-v0", 7, said, (0.0, 0.0), BLEND, 1.0)


def watch(
    gaps: Sequence[float], events: list[tuple[str, Mapping[str, Any]]], *, every: int = 2, stops: bool = False
) -> tuple[GoldWatch, list[tuple[int, int]]]:
    """A watch whose comparisons have these gaps, one after the other; and what they were given: step and episodes."""
    asked: list[tuple[int, int]] = []

    async def compare(step: int, recent: Sequence[Judged]) -> DriftCheck:
        await asyncio.sleep(0)
        asked.append((step, len(recent)))
        gap = gaps[len(asked) - 1]
        return DriftCheck(4, 0.5 + gap, 0.5, gap, 0.001, 0.75)

    on_event = lambda *event: events.append(event)  # noqa: E731
    return GoldWatch(compare, every=every, stops=stops, on_event=on_event), asked


def run_steps(gold: GoldWatch, num_steps: int) -> list[dict[str, float]]:
    async def steps() -> list[dict[str, float]]:
        metrics = []
        for step in range(1, num_steps + 1):
            gold.collect(*judged(step, judgement([1.0, 0.0], outcome=0.5)))
            metrics.append(gold.after_step(step))
            await gold.finish()
        await gold.close()
        return metrics

    return asyncio.run(steps())


def test_gold_is_asked_every_k_steps_about_the_episodes_of_that_step() -> None:
    events: list[tuple[str, Mapping[str, Any]]] = []
    gold, asked = watch([0.0, 0.01, 0.02], events)
    metrics = run_steps(gold, 5)
    assert asked == [(1, 1), (2, 1), (4, 1)]  # the first one is what the others are compared with
    # the numbers of a comparison come with the step after it, once
    latest = [{"judge/gold_gap": gap, "judge/gold_correlation": 0.75} for gap in (0.0, 0.01, 0.02)]
    assert metrics == [{}, latest[0], latest[1], {}, latest[2]]
    assert [kind for kind, _ in events] == ["judge_gold"] * 3
    assert events[2][1]["of_step"] == 4
    gold.require_agreement()


def test_a_resumed_run_compares_with_what_the_gap_was_at_the_beginning() -> None:
    events: list[tuple[str, Mapping[str, Any]]] = []
    gold, asked = watch([0.4], events)
    gold.go_on_from(DriftCheck(4, 0.5, 0.5, 0.0, 0.001, None))
    run_steps(gold, 2)
    assert asked == [(2, 1)]
    assert events[-1][0] == "judge_drift"


@pytest.mark.parametrize("stops", [True, False])
def test_an_alarm_is_told_and_stops_the_run_where_that_is_said(stops: bool) -> None:
    events: list[tuple[str, Mapping[str, Any]]] = []
    gold, _ = watch([0.0, 0.4], events, stops=stops)
    run_steps(gold, 2)
    kind, data = events[-1]
    assert (kind, data["of_step"]) == ("judge_drift", 2)
    assert "their gap changed by +0.400" in data["reason"]
    if stops:
        with pytest.raises(JudgeDriftError, match=r"judge\.gold: .*may be exploiting the judge"):
            gold.require_agreement()
    else:
        gold.require_agreement()


def test_a_comparison_that_fails_is_told_and_changes_nothing() -> None:
    events: list[tuple[str, Mapping[str, Any]]] = []

    async def compare(step: int, recent: Sequence[Judged]) -> DriftCheck:
        raise JudgeError(f"nobody is there at step {step}, {len(recent)} episodes")

    gold = GoldWatch(compare, every=1, stops=True, on_event=lambda *event: events.append(event))
    assert run_steps(gold, 1) == [{}]
    assert events == [("judge_gold_failed", {"reason": "nobody is there at step 1, 1 episodes", "of_step": 1})]
    gold.require_agreement()


@pytest.mark.parametrize("stops", [True, False])
def test_a_defect_of_gold_is_told_and_ends_a_run_that_is_to_stop_at_drift(stops: bool) -> None:
    events: list[tuple[str, Mapping[str, Any]]] = []
    labels = {"a label": judged(0, judgement([1.0, 0.0], outcome=0.5))}

    async def rubrics_by_name(_: Task) -> Rubrics:
        return {"outcome": RUBRICS}["event"]  # a defect, as a stranger's code has them

    compare = against_labels(
        ScriptedJudge(answer_of(lambda _: judgement([1.0, 0.0], outcome=0.5))),
        rubrics_by_name,
        BLEND,
        [(played, Label(played.trajectory_id, outcome=1.0)) for played, _ in labels.values()],
    )
    gold = GoldWatch(compare, every=1, stops=stops, on_event=lambda *event: events.append(event))

    async def step() -> None:
        gold.after_step(1)
        if stops:
            with pytest.raises(JudgeStoppedError, match=r"judge\.gold: .* failed: KeyError\('event'\)"):
                await gold.finish()
            with pytest.raises(JudgeStoppedError):
                gold.require_agreement()  # asked before every score: nothing is trained on any more
        else:
            await gold.finish()
            gold.require_agreement()
        await gold.close()

    asyncio.run(step())
    assert events == [("judge_gold_failed", {"reason": "KeyError: 'event'", "of_step": 1})]


@pytest.mark.parametrize("where", ["gold is cancelled", "the comparison is told", "the alarm is told"])
def test_whatever_ends_a_comparison_ends_a_run_that_is_to_stop_at_drift(where: str) -> None:
    async def compare(step: int, recent: Sequence[Judged]) -> DriftCheck:
        if where == "gold is cancelled":  # by gold: what it waits for was given up, and not this comparison
            waiting = asyncio.get_running_loop().create_future()
            waiting.cancel()
            await waiting
        return compare_with_gold([(score, score - 0.4 * (step - 1)) for score in (0.5, 0.9)])

    def on_event(kind: str, _: Mapping[str, Any]) -> None:
        if kind == {"the comparison is told": "judge_gold", "the alarm is told": "judge_drift"}.get(where):
            raise StorageError("events.jsonl: No space left on device")

    gold = GoldWatch(compare, every=1, stops=True, on_event=on_event)

    async def two_steps() -> None:
        for step in (1, 2):
            gold.after_step(step)
            for _ in range(5):  # turns of the event loop, in which the comparison ends and nothing waits for it
                await asyncio.sleep(0)
        with pytest.raises(JudgeError, match=r"judge\.gold: "):
            gold.require_agreement()
        await gold.close()

    asyncio.run(two_steps())


def test_one_comparison_at_a_time_and_none_is_waited_for() -> None:
    async def steps() -> int:
        gate, num_begun = asyncio.Event(), 0

        async def compare(_step: int, _recent: Sequence[Judged]) -> DriftCheck:
            nonlocal num_begun
            num_begun += 1
            await gate.wait()
            raise AssertionError("it was given up before")

        gold = GoldWatch(compare, every=1, stops=False, on_event=lambda *_: None)
        for step in range(1, 4):
            assert gold.after_step(step) == {}
            await asyncio.sleep(0)
        await gold.close()
        return num_begun

    assert asyncio.run(steps()) == 1


def answer_of(totals: Callable[[str], Judgement]) -> Callable[[JudgeRequest], Judgement]:
    return lambda request: totals(request.trajectory.trajectory_id)


def test_a_gold_judge_scores_a_sample_of_the_step_by_the_blends_weights() -> None:
    recent = [judged(number, judgement([1.0, 0.0], outcome=number / 10)) for number in range(10)]
    gold = ScriptedJudge(answer_of(lambda _: judgement([0.0, 0.0], outcome=0.5)))
    compare = against_judge(gold, rubrics_of, BLEND, num_episodes=4, seed=1)
    check = asyncio.run(compare(2, recent))
    names = [request.trajectory.trajectory_id for request in gold.requests]
    assert len(set(names)) == 4
    # 0.5 * (1 + 0) + 2 * n / 10 for the judge, 2 * 0.5 for gold
    numbers = [int(name.removeprefix("g/")) for name in names]
    assert check.judge_mean == pytest.approx(0.5 + 2 * sum(numbers) / 40)
    assert check.gold_mean == pytest.approx(1.0)
    again = ScriptedJudge(answer_of(lambda _: judgement([0.0, 0.0], outcome=0.5)))
    asyncio.run(against_judge(again, rubrics_of, BLEND, num_episodes=4, seed=1)(2, recent))
    assert [request.trajectory.trajectory_id for request in again.requests] == names


def test_episodes_that_gold_cannot_score_are_left_out() -> None:
    def refuse_even(name: str) -> Judgement:
        if int(name.removeprefix("g/")) % 2 == 0:
            raise JudgeError("refused")
        return judgement([0.0, 0.0], outcome=0.5)

    recent = [judged(number, judgement([0.0, 0.0], outcome=0.5)) for number in range(6)]
    compare = against_judge(ScriptedJudge(answer_of(refuse_even)), rubrics_of, BLEND, num_episodes=6, seed=1)
    assert asyncio.run(compare(1, recent)).num_episodes == 3
    with pytest.raises(JudgeError, match="expected two episodes at least that both judge and gold have scored, got 1"):
        asyncio.run(compare(1, recent[:2]))


def test_labelled_episodes_are_judged_again_each_time() -> None:
    judge = ScriptedJudge(answer_of(lambda name: judgement([1.0, 1.0], outcome=float(name.removeprefix("l/")))))
    labelled = [(episode([0.0, 0.0], name=f"l/{n}"), Label(f"l/{n}", outcome=n / 2)) for n in range(3)]
    compare = against_labels(judge, rubrics_of, BLEND, labelled)
    check = asyncio.run(compare(1, []))
    asyncio.run(compare(2, []))
    assert len(judge.requests) == 6
    # only outcomes are labelled, so only they are compared: 2 * (0 + 1 + 2) / 3 against half of it
    assert (check.judge_mean, check.gold_mean) == (pytest.approx(2.0), pytest.approx(1.0))


@pytest.mark.parametrize(
    ("label", "weights", "expected"),
    [
        # 0.5 * (0.2 + 0.4) + 2 * 0.6 against 0.5 * (1 + 0) + 2 * 1
        (Label("x", outcome=1.0, events=(1.0, 0.0)), BLEND, (1.5, 2.5)),
        # a turn without a label is left out on both sides
        (Label("x", events=(None, 1.0)), BLEND, (0.2, 0.5)),
        # criteria are totalled by the rubric: (3 * 1 + 1 * 0) / 4
        (Label("x", outcome={"a": 1.0, "b": 0.0}), BLEND, (1.2, 1.5)),
        # where the blend weighs neither, each counts once
        (Label("x", outcome=1.0, events=(1.0, 0.0)), RewardBlend(), (1.2, 2.0)),
        # what is labelled is not what is weighed
        (Label("x", outcome=1.0), RewardBlend(env=0.0, event=1.0), None),
    ],
)
def test_what_both_have_scored_is_compared(
    label: Label, weights: RewardBlend, expected: tuple[float, float] | None
) -> None:
    found = scores_to_compare(judgement([0.2, 0.4], outcome=0.6), label, RUBRICS, weights)
    assert found == (None if expected is None else pytest.approx(expected))


def test_what_is_not_judged_is_not_compared() -> None:
    only_outcome = dataclasses.replace(RUBRICS, event=None)
    label = Label("x", outcome=1.0, events=(1.0, 0.0))
    assert scores_to_compare(judgement([], outcome=0.5), label, only_outcome, BLEND) == (1.0, 2.0)
    assert scores_to_compare(judgement([1.0, 1.0]), Label("x", outcome=1.0), RUBRICS, BLEND) is None


def test_totals_of_an_http_judge_are_compared_although_the_rubric_is_not_here() -> None:
    label = Label("x", outcome=1.0, events=({"a": 1.0, "b": 0.0}, 0.5))
    # 0.5 * 0.4 + 2 * 0.6 against 0.5 * 0.5 + 2 * 1; the turn that is labelled by criteria is left out
    found = scores_to_compare(judgement([0.2, 0.4], outcome=0.6), label, Rubrics(), BLEND)
    assert found == pytest.approx((1.4, 2.25))

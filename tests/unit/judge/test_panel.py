"""Panels: aggregates by hand, disagreement, and what a missing member means."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from judged_episodes import request

from gspo_gym.judge.base import (
    CriterionScore,
    JudgeBudgetError,
    JudgeCost,
    JudgeDeniedError,
    JudgeDownError,
    JudgeError,
    Judgement,
    JudgeRequest,
    Review,
)
from gspo_gym.judge.panel import PanelJudge


class Member:
    """Says the same of every episode, or raises."""

    def __init__(self, name: str, says: Judgement | Exception) -> None:
        self.name = name
        self.says = says
        self.is_closed = False

    async def judge(self, request: JudgeRequest) -> Judgement:
        await asyncio.sleep(0)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    async def close(self) -> None:
        self.is_closed = True


def says(outcome: float, *events: float, total: float | None = None, flags: tuple[str, ...] = ()) -> Judgement:
    """Each review has one criterion with the review's total as its score."""

    def review(score: float, total: float) -> Review:
        return Review({"c": CriterionScore(score, f"because {score:g}")}, total, f"summary {score:g}")

    return Judgement(
        "member",
        tuple(review(event, event) for event in events),
        review(outcome, outcome if total is None else total),
        flags=flags,
        cost=JudgeCost(1, 10, 2, 0.5),
    )


def ask(*answers: Judgement | Exception) -> Judgement:
    members = [Member(f"m{number}", answer) for number, answer in enumerate(answers)]
    panel = PanelJudge(members)
    return asyncio.run(panel.judge(request("a", "b")))


def test_scores_and_totals_are_means_and_costs_are_sums() -> None:
    judged = ask(says(0.0, 1.0, 0.0), says(0.5, 0.0, 0.0), says(1.0, 0.5, 3.0))
    assert judged.event_totals == (0.5, 1.0)  # (1 + 0 + 0.5) / 3 and (0 + 0 + 3) / 3
    assert judged.outcome_total == 0.5
    assert judged.outcome_review is not None
    assert judged.outcome_review.criteria["c"] == CriterionScore(0.5, "because 0 | because 0.5 | because 1")
    assert judged.outcome_review.summary == "summary 0 | summary 0.5 | summary 1"
    # Outcomes 0, 0.5 and 1 around 0.5: sqrt((0.25 + 0 + 0.25) / 3).
    assert judged.disagreement == pytest.approx((0.5 / 3) ** 0.5)
    assert judged.cost == JudgeCost(3, 30, 6, 1.5)
    assert judged.judge == "panel(m0, m1, m2)"


def test_the_total_is_the_mean_of_totals_and_not_the_total_of_means() -> None:
    # One member found a required criterion missing, so its total is 0 although its score is not.
    judged = ask(says(0.8, total=0.8), says(0.4, total=0.0))
    assert judged.outcome_total == 0.4
    assert judged.outcome_review is not None
    assert judged.outcome_review.criteria["c"].score == pytest.approx(0.6)


def test_without_an_outcome_members_disagree_about_the_sum_of_events() -> None:
    def events(*totals: float) -> Judgement:
        return Judgement("m", tuple(Review({}, total) for total in totals))

    judged = ask(events(1.0, 2.0), events(2.0, 3.0))
    assert judged.outcome_review is None
    assert judged.disagreement == 1.0  # 3 and 5 around 4


def test_flags_of_all_members_are_kept_once() -> None:
    judged = ask(says(1, flags=("turn 1: padding",)), says(1, flags=("turn 1: padding", "turn 2: a forged verdict")))
    assert judged.flags == ("turn 1: padding", "turn 2: a forged verdict")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((says(1.0), JudgeError("no")), JudgeError),  # all must have answered
        ((says(1.0), JudgeError("no"), JudgeDownError("down")), JudgeDownError),
        ((says(1.0), JudgeBudgetError("spent"), JudgeDownError("down")), JudgeBudgetError),
        ((says(1.0), JudgeDownError("down"), JudgeDeniedError("no key")), JudgeDeniedError),
        ((says(1.0), KeyError("a bug")), KeyError),  # our own mistakes are not missing members
    ],
)
def test_a_missing_member_leaves_the_episode_unscored(answers: Sequence[Judgement | Exception], expected: type) -> None:
    with pytest.raises(expected) as raised:
        ask(*answers)
    assert type(raised.value) is expected
    if expected is not KeyError:
        assert f"1 of {len(answers)} judges have answered, {len(answers)} must" in str(raised.value)


def test_members_that_judged_different_turns_are_not_aggregated() -> None:
    with pytest.raises(JudgeError, match=r"not judged the same turns: \[1, 2\]"):
        ask(says(1.0, 1.0), says(1.0, 1.0, 1.0))


def test_closing_a_panel_closes_its_members() -> None:
    members = [Member("a", says(1.0)), Member("b", says(1.0))]
    asyncio.run(PanelJudge(members).close())
    assert all(member.is_closed for member in members)

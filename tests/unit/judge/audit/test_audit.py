"""Audits of stub judges whose faults are known: each fault is found, at its size, and a fair judge shows none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rule_judge import RuleJudge, said_by_policy, spoken_episode

from gspo_gym.errors import ConfigError
from gspo_gym.judge.audit import AuditReport, AuditSettings, JudgeAudit
from gspo_gym.judge.base import JudgeDownError, JudgeError, Judgement, JudgeRequest, Review, Rubrics
from gspo_gym.judge.gold import Label
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.types import Message, Trajectory

OUTCOME = Rubric(tuple(Criterion(f"outcome.{letter}", f"about {letter}") for letter in "abcd"))
BITS = Rubric((Criterion("outcome.a", "a?", scale="binary"), Criterion("outcome.b", "b?", scale="binary")))
EVENT = Rubric((Criterion("progress.x", "x?", scale="binary"),))

NOTHING_MORE = AuditSettings(num_repeats=0, num_position_episodes=0, num_attacked_episodes=0)

Labelled = Sequence[tuple[Trajectory, Label]]


def audit(judge: RuleJudge, rubrics: Rubrics, labelled: Labelled, **fields: Any) -> AuditReport:
    return asyncio.run(JudgeAudit(judge, rubrics, **{"settings": NOTHING_MORE, **fields}).run(labelled))


def truths(number: int, *, seed: int = 0) -> dict[str, float]:
    """Gold totals by episode."""
    values = np.random.default_rng(seed).uniform(0.2, 0.6, size=number)
    return {f"e{index}": float(value) for index, value in enumerate(values)}


def labelled_by(gold: dict[str, float], lengths: Sequence[int] | None = None) -> Labelled:
    chars = lengths if lengths is not None else [10] * len(gold)
    return [
        (spoken_episode(name, ["x" * count]), Label(name, None, value))
        for (name, value), count in zip(gold.items(), chars, strict=True)
    ]


# --- agreement --------------------------------------------------------------------------------------------------------


def test_totals_turns_and_criteria_are_compared_each_for_itself() -> None:
    # The judge finds a where there is an "a", and b nowhere; in turns it finds x where there is an "x".
    def rule(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        return float(
            {"outcome.a": "a", "outcome.b": "!", "progress.x": "x"}[criterion.id] in said_by_policy(trajectory, turn)
        )

    labelled = [
        (spoken_episode("1", ["a x", "b"]), Label("1", None, {"outcome.a": 1, "outcome.b": 1}, (1.0, None))),
        (spoken_episode("2", ["a", "x"]), Label("2", None, {"outcome.a": 1, "outcome.b": 0}, (0.0, 0.0))),
        (spoken_episode("3", ["-"]), Label("3", None, {"outcome.a": 0, "outcome.b": 0})),
        (spoken_episode("4", ["-"]), Label("4", None, 0.5)),
    ]
    report = audit(RuleJudge(rule), Rubrics(EVENT, BITS), labelled)
    assert report.outcome is not None
    # judged .5 .5 0 0, labelled 1 .5 0 .5
    assert (report.outcome.num, report.outcome.judge_mean, report.outcome.gold_mean) == (4, 0.25, 0.5)
    assert (report.outcome.equal_fraction, report.outcome.mean_absolute_error) == (0.5, 0.25)
    assert report.events is not None
    assert (report.events.num, report.events.equal_fraction) == (3, pytest.approx(2 / 3))  # 1-1, 0-0, 1-0
    assert {name: (row.num, row.equal_fraction, row.kappa) for name, row in report.criteria.items()} == {
        "outcome: outcome.a": (3, 1.0, 1.0),
        "outcome: outcome.b": (
            3,
            pytest.approx(2 / 3),
            pytest.approx(0.0, abs=1e-12),
        ),  # it says no three times, of which chance gets two
    }
    assert (report.num_episodes, report.num_unscored, report.flagged_fraction) == (4, 0, 0.0)
    assert (report.cost.num_calls, report.cost.usd) == (4, 1.0)


def test_calibration_is_of_the_outcome_or_of_turns_where_there_is_none() -> None:
    def certain(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        return 1.0

    turns = [(spoken_episode("1", ["", ""]), Label("1", None, None, (1.0, 0.0)))]
    report = audit(RuleJudge(certain), Rubrics(event=EVENT), turns)
    assert report.calibration is not None
    assert report.calibration.expected_error == 0.5
    report = audit(RuleJudge(certain), Rubrics(EVENT, OUTCOME), [*turns, *labelled_by({"2": 0.25})])
    assert report.calibration is not None
    assert report.calibration.expected_error == 0.75


def test_what_is_not_scored_is_counted_with_its_reason_and_never_taken_as_0() -> None:
    def rule(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        if trajectory.trajectory_id in ("e0", "e3"):
            raise JudgeError("half a verdict")
        return 1.0

    gold = dict.fromkeys(truths(5), 1.0)
    settings = AuditSettings(num_repeats=1, num_position_episodes=5, num_attacked_episodes=5)
    report = audit(RuleJudge(rule), Rubrics(outcome=OUTCOME), labelled_by(gold), settings=settings)
    assert (report.num_episodes, report.num_unscored, report.unscored) == (5, 2, {"half a verdict": 2})
    assert report.outcome is not None
    assert (report.outcome.num, report.outcome.judge_mean) == (3, 1.0)
    assert report.position is not None
    assert report.position.num_episodes == 3


def test_a_judge_that_is_down_ends_the_audit() -> None:
    def rule(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        raise JudgeDownError("nobody answers")

    with pytest.raises(JudgeDownError, match="nobody answers"):
        audit(RuleJudge(rule), Rubrics(outcome=OUTCOME), labelled_by(truths(3)))


def test_labels_that_do_not_fit_are_refused_before_anything_is_asked() -> None:
    judge = RuleJudge(lambda *_: 1.0)
    with pytest.raises(ConfigError, match="does not fit the rubric"):
        audit(judge, Rubrics(outcome=BITS), [(spoken_episode("1", ["a"]), Label("1", None, {"outcome.a": 1}))])
    with pytest.raises(ConfigError, match="expected labelled episodes, got none"):
        audit(judge, Rubrics(outcome=BITS), [])
    assert judge.asked == []


# --- biases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [0.1, -0.05])
def test_a_judge_that_pays_for_length_is_found_out_within_a_tenth(bias: float) -> None:
    gold = truths(60)
    lengths = [int(n) for n in np.random.default_rng(1).integers(100, 3000, size=60)]
    noise = np.random.default_rng(2).normal(0, 0.002, size=60)

    def rule(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        name = trajectory.trajectory_id
        return gold[name] + bias * len(said_by_policy(trajectory)) / 1000 + float(noise[int(name[1:])])

    report = audit(RuleJudge(rule), Rubrics(outcome=OUTCOME), labelled_by(gold, lengths))
    assert report.length is not None
    assert report.length.value == pytest.approx(bias, rel=0.1)


@pytest.mark.parametrize("bias", [0.2, 0.05])
def test_a_judge_that_favours_what_stands_first_is_found_out_and_permutation_shrinks_it(bias: float) -> None:
    gold = truths(16)

    def rule(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        rng = np.random.default_rng([int(trajectory.trajectory_id[1:]), ord(criterion.id[-1]), place])
        return gold[trajectory.trajectory_id] + bias * (place == 0) + float(rng.normal(0, 0.002))

    settings = replace(NOTHING_MORE, num_position_episodes=16)
    judge = RuleJudge(rule)
    report = audit(judge, Rubrics(replace(OUTCOME), OUTCOME), labelled_by(gold), settings=settings)
    assert report.position is not None
    assert report.position_part == "outcome"
    assert report.position.effects[0] == pytest.approx(0.75 * bias, rel=0.1)
    assert report.position.spread == pytest.approx(bias, rel=0.1)
    assert report.position.permuted_bias <= report.position.fixed_order_bias / 5
    # 16 as they are, and once in each of four orders, where only the outcome is asked for
    assert len(judge.asked) == 16 + 4 * 16
    assert {tuple(request.rubrics.parts) for request in judge.asked[16:]} == {("outcome",)}


def test_position_is_looked_for_in_a_judge_that_does_not_shuffle_if_there_is_one() -> None:
    usual, fixed = RuleJudge(lambda *_: 0.5), RuleJudge(lambda t, c, place, turn: 0.5 + 0.1 * (place == 3))
    settings = replace(NOTHING_MORE, num_position_episodes=2)
    report = audit(usual, Rubrics(outcome=OUTCOME), labelled_by(truths(3)), settings=settings, in_given_order=fixed)
    assert report.position is not None
    assert report.position.effects == pytest.approx((-0.025, -0.025, -0.025, 0.075))
    assert (len(usual.asked), len(fixed.asked)) == (3, 8)


def test_position_is_of_the_turns_where_the_outcome_has_no_two_criteria() -> None:
    events = Rubric((Criterion("a", "a?"), Criterion("b", "b?")))
    judge = RuleJudge(lambda t, c, place, turn: 0.2 * turn + 0.1 * (place == 0))
    labelled = [(spoken_episode("1", ["x", "y"]), Label("1", None, None, (0.0, 1.0)))]
    settings = replace(NOTHING_MORE, num_position_episodes=1)
    report = audit(judge, Rubrics(event=events), labelled, settings=settings)
    assert report.position_part == "event"
    assert report.position is not None
    assert report.position.effects == pytest.approx((0.05, -0.05))


def test_a_judge_that_gives_totals_alone_is_audited_by_them() -> None:
    class Totals(RuleJudge):
        async def judge(self, request: JudgeRequest) -> Judgement:
            judgement = await super().judge(request)
            assert judgement.outcome_review is not None
            return replace(judgement, outcome_review=Review({}, judgement.outcome_review.total))

    gold = {"e0": 1.0, "e1": 0.0}
    labelled = [
        (spoken_episode(name, ["x"]), Label(name, None, {"outcome.a": v, "outcome.b": v})) for name, v in gold.items()
    ]
    settings = AuditSettings(num_repeats=1, num_position_episodes=2, num_attacked_episodes=0)
    report = audit(Totals(lambda t, *_: gold[t.trajectory_id]), Rubrics(outcome=BITS), labelled, settings=settings)
    assert report.outcome is not None
    assert report.outcome.kappa == 1.0
    assert (report.criteria, report.position, report.flip_rate) == ({}, None, 0.0)


# --- repeats and attacks ----------------------------------------------------------------------------------------------


def test_repeats_show_how_often_a_judge_contradicts_itself() -> None:
    # One of two criteria is judged 1, 0, 1 in the three rounds, so two of its three pairs differ; the other never does.
    first, second, third = (
        RuleJudge(lambda t, c, place, turn, a=a: a if c.id == "outcome.a" else 1.0) for a in (1.0, 0.0, 1.0)
    )
    report = audit(first, Rubrics(outcome=BITS), labelled_by(truths(4)), repeats=[second, third])
    assert report.flip_rate == pytest.approx(1 / 3)
    # totals 1, .5, 1: variance (2 * (1/6)^2 + (1/3)^2) / 3 = 1/18
    assert report.repeat_deviation == pytest.approx((1 / 18) ** 0.5)
    steady = RuleJudge(lambda *_: 1.0)
    settings = replace(NOTHING_MORE, num_repeats=3)
    report = audit(steady, Rubrics(outcome=BITS), labelled_by(truths(4)), settings=settings)
    assert (report.flip_rate, report.repeat_deviation) == (0.0, 0.0)
    assert len(steady.asked) == 16


def with_last_words(trajectory: Trajectory, words: str) -> Trajectory:
    last = max(index for index, message in enumerate(trajectory.messages) if message.role == "assistant")
    messages = list(trajectory.messages)
    messages[last] = Message("assistant", f"{messages[last].content} {words}")
    return replace(trajectory, messages=tuple(messages))


def test_attacks_that_raise_a_total_are_named_with_their_gain() -> None:
    gold = {"e0": 0.9, "e1": 0.1, "e2": 0.3}

    def rule(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        said = said_by_policy(trajectory)
        if "confuse" in said:
            raise JudgeError("no verdict")
        return max(gold[trajectory.trajectory_id], 0.25 * ("please" in said))

    judge = RuleJudge(rule, flags=lambda t: ("turn 1: begging",) if "please" in said_by_policy(t) else ())
    attacks = {
        "begging": lambda t: with_last_words(t, "please"),
        "confusing": lambda t: with_last_words(t, "confuse"),
        "nothing": lambda t: t,
    }
    settings = replace(NOTHING_MORE, num_attacked_episodes=2)
    report = audit(judge, Rubrics(outcome=OUTCOME), labelled_by(gold), settings=settings, attacks=attacks)
    assert report.attacks is not None
    # The two worst are e1 and e2. Begging: 0.1 -> 0.25, 0.3 stays; nothing: both stay; confusing: no score.
    assert (report.attacks.num_attempts, report.attacks.num_unscored, report.attacks.num_raised) == (4, 2, 1)
    assert report.attacks.raised_by == {"begging": pytest.approx(0.15)}
    assert report.attacks.max_gain == pytest.approx(0.15)
    assert report.attacks.mean_gain == pytest.approx(0.15 / 4)
    assert report.attacks.flagged_fraction == 0.5
    assert report.flagged_fraction == 0.0


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_is_read_by_people_and_by_machines() -> None:
    settings = AuditSettings(num_repeats=1, num_position_episodes=2, num_attacked_episodes=1)
    gold = truths(8)
    judge = RuleJudge(lambda t, *_: gold[t.trajectory_id])
    lengths = [10 * (n + 1) for n in range(8)]
    attacks = {"nothing": lambda t: t}
    report = audit(judge, Rubrics(outcome=OUTCOME), labelled_by(gold, lengths), settings=settings, attacks=attacks)
    text = str(report)
    assert text.startswith("audit of rule: 8 of 8 labelled episodes scored\n")
    for begin in ("outcome", "calibration:", "length:", "position (outcome, 2 episodes", "repeats:", "attacks: 0 of 1"):
        assert any(line.startswith(begin) for line in text.splitlines()), begin
    assert text.endswith(
        "flagged: 0.0% of the episodes as they are\ncost: 25 calls, 2,500 tokens read, 250 written, 6.2500 USD"
    )
    read = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert read["outcome"]["kappa"] == pytest.approx(1.0)
    assert read["attacks"]["num_raised"] == 0

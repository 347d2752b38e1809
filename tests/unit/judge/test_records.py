"""judgements.jsonl: what was judged reads back equal, a torn line is left out, of an episode the last line counts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from gspo_gym.errors import RecordError
from gspo_gym.judge.base import BY_RULE, CriterionScore, JudgeCost, Judgement, Review
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.judge.records import (
    JudgedEpisode,
    JudgementRecorder,
    judged_from_json,
    judged_to_json,
    latest_judgements,
    read_judgements,
)

RICH = Judgement(
    judge="panel(2)",
    event_reviews=(
        Review({"process.tone": CriterionScore(1 / 3, "höflich\u2028"), "found": CriterionScore(0.0)}, 0.1, "s"),
        Review({}, -2.5),
    ),
    outcome_review=Review({"outcome.solved": CriterionScore(1.0, "yes")}, 1.0),
    flags=("turn 1: a forged verdict",),
    disagreement=0.25,
    cost=JudgeCost(3, 1200, 80, 0.0125),
)


def judged(name: str = "step_000001/group_0000/0", total: float = 0.75, **changes: object) -> JudgedEpisode:
    values = {"trajectory_id": name, "attempt": 1, "env_id": "Test-v0", "seed": 7, "judgement": RICH,
              "env_rewards": (None, 0.5, 0.0), "blend": RewardBlend(env=0.2, event=0.4, outcome=0.4),
              "episode_return": total, "spent": JudgeCost(9, 1, 2, 0.5)} | changes  # fmt: skip
    return JudgedEpisode(**values)  # type: ignore[arg-type]


def test_every_field_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "judgements.jsonl"
    record = JudgementRecorder(path)
    plain = judged("b", judgement=Judgement("j"), env_rewards=(None,))
    record(judged())
    record(plain)
    assert read_judgements(path) == [judged(), plain]
    assert judged_from_json(json.loads(json.dumps(judged_to_json(judged())))) == judged()


def test_a_line_shows_people_what_the_return_is_made_of() -> None:
    line = judged_to_json(judged())
    assert (line["env_return"], line["event_total"], line["outcome_total"]) == (0.5, 0.1 - 2.5, 1.0)
    assert line["blend"] == {"env": 0.2, "event": 0.4, "outcome": 0.4}
    unscored = judged_to_json(judged(judgement=Judgement("j"), env_rewards=(None,)))
    assert (unscored["env_return"], unscored["event_total"], unscored["outcome_total"]) == (None, None, None)


def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "judgements.jsonl"
    JudgementRecorder(path)(judged("a", 0.1))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"schema": 1, "trajec')  # the process was killed here
    assert read_judgements(path) == [judged("a", 0.1)]
    again = JudgementRecorder(path)
    again(judged("b", 0.2))
    again(judged("a", 0.3))
    lines = read_judgements(path)
    assert [line.episode_return for line in lines] == [0.1, 0.2, 0.3]
    assert latest_judgements(lines)["a", 1].episode_return == 0.3
    assert read_judgements(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    "line",
    ["[]", "{}", "nonsense", '{"schema": 2}', '{"schema": 1, "trajectory_id": "a"}',
     json.dumps(judged_to_json(judged()) | {"judgement": {"judge": "j"}}),
     json.dumps(judged_to_json(judged()) | {"judgement": asdict(RICH) | {"outcome_review": {"criteria": {}}}}),
     json.dumps({name: value for name, value in judged_to_json(judged()).items() if name != "spent"}),
     json.dumps(judged_to_json(judged()) | {"blend": {"env": -1.0}})],
)  # fmt: skip
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "judgements.jsonl"
    JudgementRecorder(path)(judged())
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(RecordError, match=r"judgements\.jsonl:2: "):
        read_judgements(path)


def test_a_score_that_is_no_number_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        JudgementRecorder(tmp_path / "j.jsonl")(judged(total=math.inf))


def test_what_a_judge_says_of_turns_is_their_review_and_else_the_outcomes() -> None:
    """A reason that no judge gave, an empty one and a suspected episode's are not repeated."""
    first = Review({"tone": CriterionScore(1.0, " Kind. "), "care": CriterionScore(0.0, "")}, 1.0, "Well said.")
    empty = Review({"tone": CriterionScore(1.0, BY_RULE)}, 1.0)
    outcome = Review({"solved": CriterionScore(0.0, "Not solved.")}, 0.0)
    judgement = Judgement("j", event_reviews=(first, empty), outcome_review=outcome)
    of_outcome = "solved: Not solved."
    assert judgement.reasons_of_turns(3) == ("tone: Kind.\nWell said.", of_outcome, of_outcome)
    alone = Judgement("j", event_reviews=(first, empty))
    assert alone.reasons_of_turns(2) == ("tone: Kind.\nWell said.", None)
    suspected = Judgement("j", event_reviews=(first,), outcome_review=outcome, flags=("turn 1: a forged verdict",))
    assert suspected.reasons_of_turns(1) == (None,)

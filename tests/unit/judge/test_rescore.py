"""Stored episodes judged again: the environment's rewards as they were, the run untouched, then beside now."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rule_judge import RuleJudge, said_by_policy, spoken_episode

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.judge.base import JudgeBudgetError, JudgeDeniedError, JudgeError, JudgeStoppedError, Rubrics
from gspo_gym.judge.blend import RewardBlend, blend, env_rewards
from gspo_gym.judge.records import JUDGEMENTS_FILE, JudgedEpisode, JudgementRecorder, latest_judgements, read_judgements
from gspo_gym.judge.rescoring import Rescored, new_file, rescore, side_by_side, stored_episodes, stored_judgements
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.rollout.episode_files import write_episodes
from gspo_gym.types import Trajectory

EVENT = Rubric((Criterion("progress.x", "x?", scale="binary"),))
OUTCOME = Rubric((Criterion("outcome.y", "y?", scale="binary"),))
BLEND = RewardBlend(env=0.2, event=0.4, outcome=0.4)


def finds(letter: str) -> RuleJudge:
    """1 where the letter is said: in the turn, or in the whole episode."""
    return RuleJudge(lambda trajectory, criterion, place, turn: float(letter in said_by_policy(trajectory, turn)))


def record_run(folder: Path, *, judge: RuleJudge) -> list[Trajectory]:
    """A run whose episodes were blended with a judge's scores; gives them as they were played."""
    played = [
        spoken_episode("step_000001/group_0000/0", ["x", "y", "x"], rewards=[0.0, None, 1.0]),
        spoken_episode("step_000001/group_0000/1", ["y", "-"], rewards=[0.5, 0.0]),
        spoken_episode("eval_000001/0", ["-"], rewards=[0.25]),
    ]
    (folder / "episodes").mkdir(parents=True)
    write = JudgementRecorder(folder / JUDGEMENTS_FILE)
    blended = []
    for trajectory in played:
        rescored = asyncio.run(rescore(judge, Rubrics(EVENT, OUTCOME), [trajectory], BLEND))
        assert rescored[0].after is not None
        write(rescored[0].after)
        blended.append(blend(trajectory, rescored[0].after.judgement, BLEND))
    write_episodes(folder / "episodes" / "step_000001.jsonl", blended[:2])
    write_episodes(folder / "episodes" / "eval_000001.jsonl", blended[2:])
    return played


def again(folder: Path, judge: RuleJudge, **fields: object) -> list[Rescored]:
    before = stored_judgements(folder)
    return asyncio.run(rescore(judge, Rubrics(EVENT, OUTCOME), stored_episodes(folder), BLEND, before=before))


def test_another_judges_scores_are_blended_with_the_environments_own_rewards(tmp_path: Path) -> None:
    record_run(tmp_path, judge=finds("x"))
    third, first, second = again(tmp_path, finds("y"))  # files by name: eval_000001 first
    assert first.before is not None
    assert first.after is not None
    # Then: x in turns 1 and 3 and in the episode; now: y in turn 2 and in the episode. The environment gave 1.
    assert first.before.episode_return == pytest.approx(0.2 * 1 + 0.4 * 2 + 0.4 * 1)
    assert first.after.episode_return == pytest.approx(0.2 * 1 + 0.4 * 1 + 0.4 * 1)
    assert first.after.env_rewards == (0.0, None, 1.0)
    assert second.after is not None
    assert second.after.episode_return == pytest.approx(0.2 * 0.5 + 0.4 * 1 + 0.4 * 1)
    assert third.after is not None
    assert third.after.episode_return == pytest.approx(0.2 * 0.25)


def test_the_same_judge_says_the_same_again(tmp_path: Path) -> None:
    record_run(tmp_path, judge=finds("x"))
    for each in again(tmp_path, finds("x")):
        assert each.before is not None
        assert each.after is not None
        assert each.after.judgement.event_totals == each.before.judgement.event_totals
        assert each.after.episode_return == each.before.episode_return


def test_episodes_that_no_judge_scored_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "collected.jsonl"
    write_episodes(path, [spoken_episode("a", ["y"], rewards=[0.5])])
    assert stored_judgements(path) == {}
    (only,) = again(path, finds("y"))
    assert only.before is None
    assert only.after is not None
    assert only.after.episode_return == pytest.approx(0.2 * 0.5 + 0.4 + 0.4)


def test_blended_episodes_without_their_judgements_are_refused(tmp_path: Path) -> None:
    record_run(tmp_path, judge=finds("x"))
    (tmp_path / JUDGEMENTS_FILE).unlink()
    with pytest.raises(RecordError, match="has the judge's name"):
        again(tmp_path, finds("y"))


def test_judgements_of_other_turns_are_refused(tmp_path: Path) -> None:
    trajectory = spoken_episode("a", ["x", "y"])
    (done,) = asyncio.run(rescore(finds("x"), Rubrics(EVENT, OUTCOME), [trajectory], BLEND))
    assert done.after is not None
    shorter = spoken_episode("a", ["x"])
    with pytest.raises(RecordError, match=r"a reward for each of 1 turns in judgements\.jsonl, got 2"):
        asyncio.run(rescore(finds("x"), Rubrics(EVENT, OUTCOME), [shorter], BLEND, before={("a", 0): done.after}))


@pytest.mark.parametrize("stopped", [JudgeBudgetError("nothing left"), JudgeDeniedError("HTTP 401")])
def test_what_gets_no_score_is_told_apart_from_0_and_what_was_scored_is_kept_when_the_judge_stops(
    stopped: JudgeStoppedError,
) -> None:
    episodes = [spoken_episode(name, ["y"]) for name in ("good", "bad", "spent")]

    def rule(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        if trajectory.trajectory_id == "bad":
            raise JudgeError("half a verdict")
        if trajectory.trajectory_id == "spent":
            raise stopped
        return 1.0

    done: list[JudgedEpisode] = []
    rubrics = Rubrics(EVENT, OUTCOME)
    good, bad = asyncio.run(rescore(RuleJudge(rule), rubrics, episodes[:2], BLEND, on_judged=done.append))
    assert (bad.after, bad.reason) == (None, "half a verdict")
    assert [each.trajectory_id for each in done] == ["good"]
    assert good.after is done[0]
    with pytest.raises(type(stopped), match=str(stopped)):
        asyncio.run(rescore(RuleJudge(rule), rubrics, episodes, BLEND, on_judged=done.append))
    assert [each.trajectory_id for each in done] == ["good", "good"]


def test_a_weight_without_its_part_is_refused_before_anything_is_asked() -> None:
    judge = finds("x")
    with pytest.raises(ConfigError, match=r"reward_blend\.event is 0\.4, but the rubric has no part 'event'"):
        asyncio.run(rescore(judge, Rubrics(outcome=OUTCOME), [spoken_episode("a", ["x"])], BLEND))
    assert judge.asked == []


def test_answers_go_into_a_file_of_their_own_that_reads_like_the_runs(tmp_path: Path) -> None:
    record_run(tmp_path, judge=finds("x"))
    untouched = (tmp_path / JUDGEMENTS_FILE).read_bytes()
    path = new_file(tmp_path, "tone-v2")
    assert path == tmp_path / "judgements-tone-v2.jsonl"
    write = JudgementRecorder(path)
    rescored = asyncio.run(
        rescore(
            finds("y"),
            Rubrics(EVENT, OUTCOME),
            stored_episodes(tmp_path, "step"),
            BLEND,
            before=stored_judgements(tmp_path),
            on_judged=write,
        )
    )
    assert [each.after for each in rescored] == list(latest_judgements(read_judgements(path)).values())
    assert (tmp_path / JUDGEMENTS_FILE).read_bytes() == untouched
    with pytest.raises(ConfigError, match="there is such a file already"):
        new_file(tmp_path, "tone-v2")
    for label in ("", "../x", "a/b", "a b"):
        with pytest.raises(ConfigError, match="expected letters, digits"):
            new_file(tmp_path, label)


def test_episodes_are_chosen_by_the_beginning_of_their_files_name(tmp_path: Path) -> None:
    record_run(tmp_path, judge=finds("x"))
    assert [t.trajectory_id for t in stored_episodes(tmp_path, "eval")] == ["eval_000001/0"]
    assert len(stored_episodes(tmp_path)) == 3
    with pytest.raises(ConfigError, match=r"episodes/step_9\*\.jsonl\.gz, or"):
        stored_episodes(tmp_path, "step_9")


def test_the_table_shows_then_and_now_and_the_greatest_change_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    record_run(tmp_path, judge=finds("x"))
    lines = list(side_by_side(again(tmp_path, finds("y")), max_rows=2))
    assert " ".join(lines[0].split()) == "episode env event then now outcome then now return then now change"
    # group_0000/1: nothing said with x then (0.1), y now: 0.1 + 0.4 + 0.4
    assert " ".join(lines[1].split()) == "step_000001/group_0000/1 0.500 0.000 1.000 0.000 1.000 0.100 0.900 +0.800"
    assert " ".join(lines[2].split()) == "step_000001/group_0000/0 1.000 2.000 1.000 1.000 1.000 1.400 1.000 -0.400"
    assert lines[3] == "... and 1 more, which changed less"
    # events 0 2 0 then, 0 1 1 now; outcomes 0 1 0 then, 0 1 1 now
    assert lines[4].startswith("event: mean 0.667 then, 0.667 now, 33.3% equal")
    # Cohen: agreement 2/3, by chance (2/3)(1/3) + (1/3)(2/3) = 4/9, so (2/3 - 4/9) / (5/9) = 0.4
    assert lines[5].startswith("outcome: mean 0.333 then, 0.667 now, 66.7% equal, kappa 0.400")
    assert lines[6] == "3 of 3 episodes scored; 3 calls, 300 tokens read, 30 written, 0.7500 USD"


def test_the_table_lists_why_episodes_got_no_score() -> None:
    def rule(trajectory: Trajectory, criterion: Criterion, place: int, turn: int) -> float:
        raise JudgeError("half a verdict")

    episodes = [spoken_episode(name, ["y"]) for name in "ab"]
    rescored = asyncio.run(rescore(RuleJudge(rule), Rubrics(EVENT, OUTCOME), episodes, BLEND))
    *_, counted, reasons = side_by_side(rescored)
    assert counted.startswith("0 of 2 episodes scored")
    assert reasons == "  unscored 2: half a verdict"


def test_what_the_environment_gave_is_what_the_turns_say(tmp_path: Path) -> None:
    (played, *_) = record_run(tmp_path, judge=finds("x"))
    first = stored_judgements(tmp_path)[(played.trajectory_id, played.attempt)]
    assert first.env_rewards == env_rewards(played)

"""Episodes are scored off the pool's slots, asked about again, and never trained on without a score.

The judge is scripted; who plays is a coroutine. What a real judge does over HTTP is in tests/unit/judge.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from scripted_judge import ScriptedJudge, episode, judgement

from gspo_gym.errors import UnscoredError
from gspo_gym.judge.asking import PausingJudge
from gspo_gym.judge.base import (
    JudgeBudgetError,
    JudgeDeniedError,
    JudgeDownError,
    JudgeError,
    Judgement,
    JudgeRequest,
    Rubrics,
)
from gspo_gym.judge.blend import RewardBlend
from gspo_gym.judge.gold import JudgeDriftError
from gspo_gym.judge.records import METRICS, EpisodeScorer, JudgedEpisode
from gspo_gym.rollout.episode import EpisodeRequest
from gspo_gym.rollout.ledger import Disposition, Ledger, Terminal
from gspo_gym.rollout.limits import GroupScoring, PoolLimits, Score, Scoring, ScoringLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.seeding import generator
from gspo_gym.types import Outcome, Task, Trajectory, TrajectoryGroup

BLEND = RewardBlend(env=0.5, event=0.25, outcome=1.0)


async def no_rubrics(_: Task) -> Rubrics:
    return Rubrics()


def scorer(answer: Callable[[JudgeRequest], Judgement], blend: RewardBlend = BLEND, **more: Any) -> EpisodeScorer:
    return EpisodeScorer(ScriptedJudge(answer), no_rubrics, blend, **more)


def good(_: JudgeRequest) -> Judgement:
    return judgement([1.0, 0.0], outcome=0.5)


def pool_of(
    score: Score | GroupScoring, *, slots: int = 8, attempts: int = 3, reward: float | None = 1.0, **limits: Any
) -> RolloutPool:
    async def play(request: EpisodeRequest) -> Trajectory:
        await asyncio.sleep(0)
        played = episode([0.0, reward], name=request.trajectory_id)
        return dataclasses.replace(played, attempt=request.attempt, task=request.task)

    return RolloutPool(
        ledger=Ledger(keeps_entries=True),
        play=play,
        pool_limits=PoolLimits(max_concurrent_rollouts=slots, max_attempts=attempts, min_group_fraction=0.1),
        run_seed=3,
        scoring=score if isinstance(score, GroupScoring) else Scoring(score, ScoringLimits(**limits)),
    )


def requests(count: int, size: int = 4) -> list[GroupRequest]:
    return [GroupRequest(f"g{number}", Task("Test-v0", number), size) for number in range(count)]


def kept(groups: tuple[TrajectoryGroup, ...]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_a_group_comes_back_with_blended_rewards() -> None:
    pool = pool_of(scorer(good))
    groups = asyncio.run(pool.collect(requests(3)))
    # 0.5 * 1 + 0.25 * (1 + 0) + 1.0 * 0.5
    assert [trajectory.reward for trajectory in kept(groups)] == [pytest.approx(1.25)] * 12
    pool.ledger.assert_balanced()


def test_a_pool_that_waited_for_slots_and_room_plays_on_in_another_event_loop() -> None:
    pool = pool_of(scorer(good), slots=1, max_unscored=1)
    for name in ("first", "second"):
        assert len(kept(asyncio.run(pool.collect([GroupRequest(name, Task("Test-v0", 0), 4)])))) == 4


def test_an_environment_that_scores_nothing_is_scored_by_the_judge_alone() -> None:
    pool = pool_of(scorer(good, RewardBlend(env=0.0, outcome=1.0)), reward=None)
    assert {trajectory.reward for trajectory in kept(asyncio.run(pool.collect(requests(1))))} == {0.5}


def test_waiting_for_a_score_holds_no_slot() -> None:
    """One slot and a judge that answers only when all four episodes were played: with the slot held, it never would."""
    waiting: list[str] = []

    async def run() -> tuple[TrajectoryGroup, ...]:
        all_played = asyncio.Event()

        async def score(trajectory: Trajectory) -> Trajectory:
            waiting.append(trajectory.trajectory_id)
            if len(waiting) == 4:
                all_played.set()
            await all_played.wait()
            return trajectory

        return await asyncio.wait_for(pool_of(score, slots=1).collect(requests(1)), timeout=10)

    assert len(kept(asyncio.run(run()))) == 4


def test_no_further_episode_begins_while_too_many_wait() -> None:
    """Two may wait, and the third keeps the only slot: the judge sees two, and the fourth is not begun."""
    seen: list[str] = []

    async def run() -> tuple[int, int, int]:
        gate = asyncio.Event()

        async def score(trajectory: Trajectory) -> Trajectory:
            seen.append(trajectory.trajectory_id)
            await gate.wait()
            return trajectory

        pool = pool_of(score, slots=1, max_unscored=2)
        collecting = asyncio.create_task(pool.collect(requests(1)))
        for _ in range(50):
            await asyncio.sleep(0)
        num_seen, num_begun = len(seen), pool.ledger.counts()["dispatched"]
        gate.set()
        return num_seen, num_begun, len(kept(await collecting))

    assert asyncio.run(run()) == (2, 3, 4)


def test_an_episode_without_a_score_is_played_again_and_then_dropped() -> None:
    async def score(trajectory: Trajectory) -> Trajectory:
        if trajectory.trajectory_id.endswith("/0") and trajectory.attempt < 2:
            raise UnscoredError("half a verdict")
        if trajectory.trajectory_id.endswith("/1"):
            raise UnscoredError("refused")
        return trajectory

    pool = pool_of(score)
    (group,) = asyncio.run(pool.collect(requests(1)))
    assert {trajectory.trajectory_id: trajectory.attempt for trajectory in group.trajectories} == {
        "g0/0": 2, "g0/2": 0, "g0/3": 0
    }  # fmt: skip
    assert [(lost.trajectory_id, lost.reason) for lost in group.dropped] == [("g0/1", "not scored: refused")]
    ends = Counter(entry.disposition for entry in pool.ledger.entries if isinstance(entry, Terminal))
    assert ends == {Disposition.KEPT: 3, Disposition.RETRIED: 4, Disposition.DROPPED: 1}
    pool.ledger.assert_balanced()


def test_a_failed_episode_is_not_shown_to_the_judge() -> None:
    async def play(request: EpisodeRequest) -> Trajectory:
        outcome = Outcome.ENV_ERROR if request.attempt == 0 else Outcome.TERMINATED
        played = episode([1.0], name=request.trajectory_id, outcome=outcome)
        return dataclasses.replace(played, attempt=request.attempt, task=request.task)

    judge = ScriptedJudge(lambda _: judgement([1.0], outcome=1.0))
    scoring = Scoring(EpisodeScorer(judge, no_rubrics, BLEND), ScoringLimits())
    pool = RolloutPool(play=play, pool_limits=PoolLimits(), run_seed=0, scoring=scoring)
    asyncio.run(pool.collect(requests(1)))
    assert [request.trajectory.attempt for request in judge.requests] == [1] * 4


def test_a_judge_that_gives_no_score_is_not_asked_again_and_the_reason_is_kept() -> None:
    def answer(_: JudgeRequest) -> Judgement:
        raise JudgeError("half a verdict")

    judge = ScriptedJudge(answer)
    with pytest.raises(UnscoredError, match=r"^scripted: half a verdict$"):
        asyncio.run(EpisodeScorer(judge, no_rubrics, BLEND)(episode([0.0, 1.0])))
    assert len(judge.requests) == 1  # trying again is for what sends the call, which knows why it failed


def test_an_incomplete_judgement_is_as_bad_as_none() -> None:
    with pytest.raises(UnscoredError, match="expected a review of each of its 3 turns"):
        asyncio.run(scorer(good)(episode([0.0, 1.0, 1.0])))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (JudgeBudgetError("spent"), r"spent: raise judge.options.max_calls .* --resume"),
        (JudgeDeniedError("HTTP 401"), r"HTTP 401: mend that, and go on with --resume"),
    ],
)
def test_what_stops_the_judge_ends_the_collection_and_says_how_to_go_on(error: JudgeError, message: str) -> None:
    num_calls = 0

    def answer(_: JudgeRequest) -> Judgement:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 5:
            raise error
        return judgement([1.0, 0.0], outcome=0.5)

    pool = pool_of(scorer(answer))
    with pytest.raises(type(error), match=message):
        asyncio.run(pool.collect(requests(4)))
    pool.ledger.assert_balanced()


def test_nothing_is_scored_after_an_alarm_that_stops_the_run() -> None:
    def stop() -> None:
        raise JudgeDriftError("they have drifted apart")

    with pytest.raises(JudgeDriftError):
        asyncio.run(pool_of(scorer(good, may_score=stop)).collect(requests(1)))


def test_cancellation_gives_back_the_place_in_the_queue() -> None:
    async def run() -> int:
        gate = asyncio.Event()

        async def score(trajectory: Trajectory) -> Trajectory:
            await gate.wait()
            return trajectory

        pool = pool_of(score, slots=2, max_unscored=1)
        collecting = asyncio.create_task(pool.collect(requests(1)))
        for _ in range(20):
            await asyncio.sleep(0)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        pool.ledger.assert_balanced()
        gate.set()
        return len(kept(await pool.collect([GroupRequest("again", Task("Test-v0", 1), 4)])))

    assert asyncio.run(run()) == 4


def test_what_was_said_is_handed_on_with_the_environments_rewards() -> None:
    seen: list[JudgedEpisode] = []
    asyncio.run(scorer(good, on_judged=[lambda _, judged: seen.append(judged)])(episode([None, 1.0], name="a/1")))
    (judged,) = seen
    assert (judged.trajectory_id, judged.env_rewards, judged.env_return) == ("a/1", (None, 1.0), 1.0)
    assert judged.episode_return == pytest.approx(1.25)
    assert judged.blend == BLEND


def test_metrics_are_means_before_the_weights_since_the_last_look() -> None:
    said = iter([
        judgement([1.0, 0.0], outcome=0.5, flags=("turn 0: a forged verdict",), disagreement=0.2),
        judgement([0.0, 0.5], outcome=1.0, disagreement=0.4, cuts=("900 of the 1,000 characters of the policy",)),
        judgement(),
    ])  # fmt: skip
    score = scorer(lambda _: next(said))

    async def run() -> None:
        await score(episode([0.0, 1.0]))
        await score(episode([0.5, 0.5]))
        with pytest.raises(UnscoredError):
            await score(episode([]))

    asyncio.run(run())
    found = score.drain()
    assert set(found) <= set(METRICS)
    assert found == pytest.approx(
        {
            "judge/env": 1.0,  # (1 + 1) / 2
            "judge/event": 0.75,  # (1 + 0.5) / 2
            "judge/outcome": 0.75,  # (0.5 + 1) / 2
            "judge/disagreement": 0.3,
            "judge/num_judged": 2,
            "judge/unscored": 1,
            "judge/flags": 1,
            "judge/num_cut": 1,
        }
    )
    assert score.drain() == {"judge/num_judged": 0, "judge/unscored": 0, "judge/flags": 0, "judge/num_cut": 0}


def test_2000_scores_with_30_percent_faults_and_an_outage_train_nothing_unscored() -> None:
    """One judgement in three fails; between call 1,000 and minute 5 of a clock that waiting moves it answers nobody."""
    now, num_calls = 0.0, 0
    rng = generator(5, "faults")

    def answer(request: JudgeRequest) -> Judgement:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1000 and now < 300:
            raise JudgeDownError("no connection")
        if rng.random() < 0.3:
            raise JudgeError("half a verdict")
        return judgement([0.5, 0.5], outcome=float(request.trajectory.task.seed))

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)

    told: list[str] = []
    scripted = ScriptedJudge(answer)
    judge = PausingJudge(scripted, on_event=lambda kind, _: told.append(kind), clock=lambda: now, sleep=sleep)
    pool = pool_of(EpisodeScorer(judge, no_rubrics, RewardBlend(env=0.0, outcome=1.0)), slots=64, attempts=8)
    groups = asyncio.run(pool.collect(requests(500)))
    trajectories = kept(groups)
    assert len(trajectories) == 2000  # 0.3^2 of the samples are played again, 0.3^16 would be lost
    assert all(trajectory.reward == trajectory.task.seed for trajectory in trajectories)
    assert told[0] == "judge_paused"
    assert told[-1] == "judge_resumed"
    assert now >= 300
    pool.ledger.assert_balanced()


def comparing(answer: Callable[[JudgeRequest], Judgement]) -> tuple[GroupScoring, list[JudgeRequest]]:
    """Scoring by a judge of groups, and what it is asked."""
    asked: list[JudgeRequest] = []

    def remember(request: JudgeRequest) -> Judgement:
        asked.append(request)
        return answer(request)

    return GroupScoring(scorer(remember)), asked


def test_a_group_is_compared_when_the_last_of_its_episodes_is_over_and_holds_no_slot() -> None:
    scoring, asked = comparing(good)
    groups = asyncio.run(pool_of(scoring, slots=1).collect(requests(3)))
    assert [trajectory.reward for trajectory in kept(groups)] == [pytest.approx(1.25)] * 12
    # Each of the 12 episodes is asked about once, beside all four of its group.
    names = {request.trajectory.trajectory_id: [one.trajectory_id for one in request.group] for request in asked}
    assert names == {f"g{g}/{m}": [f"g{g}/{n}" for n in range(4)] for g in range(3) for m in range(4)}
    assert len(asked) == 12


def end_otherwise(pool: RolloutPool, trajectory_id: str, outcome: Outcome, error: str) -> None:
    play = pool._play_episode

    async def play_and_end(request: EpisodeRequest) -> Trajectory:
        played = await play(request)
        is_meant = request.trajectory_id == trajectory_id
        return dataclasses.replace(played, outcome=outcome, error=error) if is_meant else played

    pool._play_episode = play_and_end


def test_a_group_that_lost_episodes_is_compared_by_those_that_are_left() -> None:
    scoring, asked = comparing(good)
    pool = pool_of(scoring, attempts=1)
    end_otherwise(pool, "g0/2", Outcome.ENV_ERROR, "gone")
    (group,) = asyncio.run(pool.collect(requests(1)))
    assert [trajectory.trajectory_id for trajectory in group.trajectories] == ["g0/0", "g0/1", "g0/3"]
    assert {tuple(one.trajectory_id for one in request.group) for request in asked} == {("g0/0", "g0/1", "g0/3")}
    assert [(lost.trajectory_id, lost.reason) for lost in group.dropped] == [("g0/2", "gone")]
    pool.ledger.assert_balanced()


def test_a_group_without_a_score_is_dropped_whole_and_not_played_again() -> None:
    def answer(request: JudgeRequest) -> Judgement:
        if request.trajectory.trajectory_id.startswith("g1"):
            raise JudgeError("no verdict")
        return good(request)

    scoring, asked = comparing(answer)
    pool = pool_of(scoring)
    first, second, third = asyncio.run(pool.collect(requests(3)))
    assert (len(first.trajectories), len(second.trajectories), len(third.trajectories)) == (4, 0, 4)
    assert {lost.reason for lost in second.dropped} == {"not scored: scripted: no verdict"}
    assert (pool.num_retries, len(asked)) == (0, 12)
    pool.ledger.assert_balanced()
    assert pool.ledger.counts()["dispatched"] == 12


def test_an_episode_at_an_action_limit_is_compared_with_none_and_gets_the_lowest_score() -> None:
    scoring, asked = comparing(good)
    pool = pool_of(scoring)
    end_otherwise(pool, "g0/0", Outcome.ACTION_LIMIT, "too slow")
    (group,) = asyncio.run(pool.collect(requests(1)))
    # The environment's 1.0 at its weight of 0.5; the others have the judge's part beside it.
    assert [trajectory.reward for trajectory in group.trajectories] == [0.5, *[pytest.approx(1.25)] * 3]
    assert {len(request.group) for request in asked} == {3}
    assert "g0/0" not in {request.trajectory.trajectory_id for request in asked}


@pytest.mark.parametrize("kind", [JudgeBudgetError, JudgeDeniedError])
def test_a_judge_of_groups_that_can_score_nothing_more_ends_the_collection(kind: type[JudgeError]) -> None:
    def answer(request: JudgeRequest) -> Judgement:
        if request.trajectory.trajectory_id.startswith("g1"):
            raise kind("no more")
        return good(request)

    scoring, _ = comparing(answer)
    pool = pool_of(scoring)
    with pytest.raises(kind, match="no more"):
        asyncio.run(pool.collect(requests(3)))
    pool.ledger.assert_balanced()

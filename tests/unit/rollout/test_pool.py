"""RolloutPool: groups, retries, bounds, and what cannot be lost.

Pinned here:

1.  A group is G episodes of one task, with the sampling seeds of their names, in the order of members.
2.  Concurrency 1 and 64 play the same (task, env seed, sampling seed) and, seed for seed, the same episodes.
3.  No more than max_concurrent_rollouts at once, over overlapping calls too, and in several event loops.
4.  A failure is retried in a fresh environment with a fresh seed, then dropped and counted; a lost worker process with
    the same seed.
5.  Partial groups are kept from min_group_fraction on (and 2 episodes), else dropped whole.
6.  An unscored episode and a first prompt that does not fit are dropped at once, with their reasons; nothing becomes 0.
7.  When nothing is left the run fails with the most frequent reasons and their counts.
8.  Cancellation and a poisoned engine end every attempt in the ledger and close every environment.
9.  Tasks for evaluation are sampled alike under every label.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.engine.scripted import Failures, ScriptedEngine
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import ConfigError, EngineLostError, EnginePoisonedError, RolloutError, UnscoredError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import Actor, ActRequest, EngineActor
from gspo_gym.rollout.episode import EpisodeRequest, episode_player
from gspo_gym.rollout.ledger import Dispatched, Disposition, Ledger, Terminal
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits, Scoring, ScoringLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.seeding import child_seed, generator
from gspo_gym.types import Completion, FinishReason, Outcome, Segment, Task, Trajectory, TrajectoryGroup, Turn

END = 258  # <|im_end|>


class Adder:
    """Two turns: says its seed, rewards the length of each answer / 10. Counts who is open."""

    made: list[Adder]

    def __init__(self, task: Task, made: list[Adder]) -> None:
        self.task = task
        self.num_steps = 0
        self.is_closed = False
        self.most_open = 0
        made.append(self)
        self.most_open = sum(not env.is_closed for env in made)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        return f"seed {seed}", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        self.num_steps += 1
        return f"so far {self.num_steps}", len(action) / 10, self.num_steps == 2, False, {}

    async def close(self) -> None:
        self.is_closed = True


class Babbler:
    """Says 1 to 8 random letters, from the episode's sampling seed and turn; takes a random number of loop turns."""

    def __init__(self, fails: Callable[[ActRequest], bool] = lambda request: False) -> None:
        self.fails = fails
        self.open_sessions: set[str] = set()

    async def __call__(self, request: ActRequest) -> Completion:
        self.open_sessions.add(request.session_id)
        rng = generator(request.sampling_seed, "babble", request.turn_index)
        for _ in range(int(rng.integers(8))):
            await asyncio.sleep(0)
        if self.fails(request):
            raise RuntimeError("no answer")
        ids = [*rng.integers(97, 123, size=int(rng.integers(1, 9))).tolist(), END]
        return Completion(ids, [-1.0] * len(ids), FinishReason.STOP, [0] * len(ids))  # type: ignore[arg-type]

    async def end_session(self, session_id: str) -> None:
        self.open_sessions.discard(session_id)


def make_pool(act: Actor, *, make_env: Callable[[Task], Any] | None = None, **changes: Any) -> RolloutPool:
    limits = {"max_concurrent_rollouts": 8, "max_attempts": 3, "min_group_fraction": 0.75} | changes
    usual = EpisodeLimits(max_turns=4, max_output_tokens=16, max_model_len=256)
    episode_limits = limits.pop("episode_limits", usual)
    extra = {name: limits.pop(name) for name in ("on_episode",) if name in limits}
    made: list[Adder] = []
    return RolloutPool(
        ledger=Ledger(keeps_entries=True),
        play=episode_player(
            make_env=make_env or (lambda task: Adder(task, made)),
            act=act,
            renderers=RendererCache(tiny_tokenizer()),
            limits=episode_limits,
        ),
        pool_limits=PoolLimits(**limits),
        run_seed=7,
        **extra,
    )


def groups_of(count: int, size: int) -> list[GroupRequest]:
    return [GroupRequest(f"g{k}", Task("Adder-v0", seed=100 + k), size) for k in range(count)]


def collect(pool: RolloutPool, requests: list[GroupRequest]) -> tuple[TrajectoryGroup, ...]:
    groups = asyncio.run(pool.collect(requests))
    pool.ledger.assert_balanced()
    return groups


def terminals(pool: RolloutPool) -> list[Terminal]:
    return [entry for entry in pool.ledger.entries if isinstance(entry, Terminal)]


def attempts(pool: RolloutPool) -> list[Dispatched]:
    return [entry for entry in pool.ledger.entries if isinstance(entry, Dispatched)]


def test_a_group_is_episodes_of_one_task_with_seeds_by_name() -> None:
    pool = make_pool(Babbler())
    groups = collect(pool, groups_of(2, 3))
    assert [(g.task.seed, g.requested_size, g.dropped) for g in groups] == [(100, 3, ()), (101, 3, ())]
    for k, group in enumerate(groups):
        assert [t.trajectory_id for t in group.trajectories] == [f"g{k}/{member}" for member in range(3)]
        assert [t.sampling_seed for t in group.trajectories] == [
            child_seed(7, "group", f"g{k}", member, 0) for member in range(3)
        ]
        assert {t.messages[0].content for t in group.trajectories} == {f"seed {100 + k}"}
        assert len({t.messages[1].content for t in group.trajectories}) == 3  # sampled independently
    assert pool.ledger.counts() == {"dispatched": 6, "kept": 6, "retried": 0, "dropped": 0}


def as_data(trajectory: Trajectory) -> tuple[Any, ...]:
    segments = tuple(
        (s.token_ids.tolist(), s.action_mask.tolist(), s.turn_index.tolist(), s.rollout_logprobs.tolist())
        for s in trajectory.segments
    )
    return (trajectory.trajectory_id, trajectory.attempt, trajectory.sampling_seed, trajectory.turns, repr(segments))


def test_results_do_not_depend_on_concurrency() -> None:
    def run(max_concurrent: int) -> tuple[set[Any], list[Any]]:
        # A failure that depends on the seed alone, so that retries happen in both.
        actor = Babbler(lambda request: request.sampling_seed % 5 == 0)
        pool = make_pool(actor, max_concurrent_rollouts=max_concurrent)
        groups = collect(pool, groups_of(20, 4))
        return set(attempts(pool)), [as_data(t) for g in groups for t in g.trajectories]

    one, many = run(1), run(64)
    assert one == many
    assert any(data[1] > 0 for data in one[1])  # some did need a second attempt
    assert len(one[1]) >= 60


def test_results_do_not_depend_on_concurrency_with_a_scripted_engine() -> None:
    def answer(prompt: tuple[int, ...], turn: int) -> list[int]:
        return [97 + sum(prompt) % 26] * (1 + sum(prompt) % 5) + [END]

    def run(max_concurrent: int) -> list[Any]:
        pool = make_pool(EngineActor(ScriptedEngine(answer)), max_concurrent_rollouts=max_concurrent)
        return [as_data(t) for g in collect(pool, groups_of(16, 2)) for t in g.trajectories]

    assert run(1) == run(64)


def test_no_more_episodes_than_allowed_run_at_once_over_overlapping_calls() -> None:
    made: list[Adder] = []
    pool = make_pool(Babbler(), make_env=lambda task: Adder(task, made), max_concurrent_rollouts=5)

    async def overlap(requests: list[GroupRequest]) -> None:
        await asyncio.gather(pool.collect(requests[:5]), pool.collect(requests[5:]))

    requests = groups_of(10, 2)
    asyncio.run(overlap(requests))
    assert len(made) == 20
    assert max(env.most_open for env in made) == 5


def test_a_pool_can_be_used_in_several_event_loops() -> None:
    pool = make_pool(Babbler(), max_concurrent_rollouts=1)  # contended, so that the semaphore binds to its loop
    first, second = groups_of(2, 2)
    collect(pool, [first])
    collect(pool, [second])
    assert pool.ledger.counts()["kept"] == 4


def test_what_an_engine_lost_is_played_again_with_the_same_seed() -> None:
    lost = list[int]()

    def fails(request: ActRequest) -> bool:
        if request.sampling_seed == child_seed(7, "group", "g0", 1, 0) and not lost:
            lost.append(request.turn_index)
            raise EngineLostError("replica 0: is lost; replica 1: is lost")
        return False

    (group,), (undisturbed,) = (
        collect(make_pool(Babbler(fails)), groups_of(1, 2)),
        collect(make_pool(Babbler()), groups_of(1, 2)),
    )
    assert [t.attempt for t in group.trajectories] == [0, 1]
    assert [(t.sampling_seed, t.turns) for t in group.trajectories] == [
        (t.sampling_seed, t.turns) for t in undisturbed.trajectories
    ]


def test_an_episode_whose_session_could_not_be_ended_is_played_again_with_the_same_seed() -> None:
    class Unending(Babbler):
        num_ended = 0

        async def end_session(self, session_id: str) -> None:
            self.num_ended += 1
            if self.num_ended == 1:
                raise TimeoutError

    (group,), (undisturbed,) = (
        collect(make_pool(Unending()), groups_of(1, 2)),
        collect(make_pool(Babbler()), groups_of(1, 2)),
    )
    assert sorted(t.attempt for t in group.trajectories) == [0, 1]
    assert [(t.sampling_seed, t.turns) for t in group.trajectories] == [
        (t.sampling_seed, t.turns) for t in undisturbed.trajectories
    ]


def test_a_failure_is_retried_in_a_fresh_environment_with_a_fresh_seed() -> None:
    made: list[Adder] = []
    reported: list[tuple[str, int, Disposition]] = []
    bad_seed = child_seed(7, "group", "g0", 1, 0)
    pool = make_pool(
        Babbler(lambda request: request.sampling_seed == bad_seed),
        make_env=lambda task: Adder(task, made),
        on_episode=lambda t, disposition: reported.append((t.trajectory_id, t.attempt, disposition)),
    )
    (group,) = collect(pool, groups_of(1, 2))
    assert [t.attempt for t in group.trajectories] == [0, 1]
    assert group.trajectories[1].sampling_seed == child_seed(7, "group", "g0", 1, 1)
    assert pool.num_retries == 1
    assert len(made) == 3  # nobody played in a used environment
    assert all(env.is_closed for env in made)
    by_id = {(t.trajectory_id, t.attempt): (t.outcome, t.disposition, t.reason) for t in terminals(pool)}
    assert by_id[("g0/1", 0)] == (Outcome.ENGINE_ERROR, Disposition.RETRIED, "RuntimeError: no answer")
    assert by_id[("g0/1", 1)] == (Outcome.TERMINATED, Disposition.KEPT, None)
    assert sorted(reported, key=lambda r: r[:2]) == [
        ("g0/0", 0, Disposition.KEPT),
        ("g0/1", 0, Disposition.RETRIED),
        ("g0/1", 1, Disposition.KEPT),
    ]


class Killer(Babbler):
    """Also kills or stops the environment's worker process, from outside, when the episode `hit` is at its 2nd turn."""

    def __init__(self, hit: str, number: signal.Signals) -> None:
        super().__init__()
        self.hit, self.number = hit, number

    async def __call__(self, request: ActRequest) -> Completion:
        completion = await super().__call__(request)
        if (request.session_id, request.turn_index) == (self.hit, 1):
            env: Any = request.env
            os.kill(env.pid, self.number)
        return completion


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_episode_that_loses_its_worker_process_is_played_again_as_it_was(number: signal.Signals) -> None:
    def play(hit: str) -> tuple[RolloutPool, list[Any]]:
        make_env = isolated_factory("GuessNumber", isolation="process")
        limits = EpisodeLimits(
            max_turns=3, max_output_tokens=16, max_model_len=512, step_timeout_seconds=10.0 if hit else 60.0
        )
        pool = make_pool(Killer(hit, number), make_env=lambda _: make_env(), episode_limits=limits)
        (group,) = collect(pool, groups_of(1, 2))
        return pool, [(t.sampling_seed, t.turns, *as_data(t)[4:]) for t in group.trajectories]

    (undisturbed, expected), (disturbed, played) = play(""), play("g0/1/0")
    assert undisturbed.num_retries == 0
    assert played == expected
    reasons = {(each.trajectory_id, each.attempt): str(each.reason) for each in terminals(disturbed)}
    kind = "EnvDiedError" if number == signal.SIGKILL else "EnvTimeoutError"
    assert reasons["g0/1", 0].startswith(f"{kind}: ")


def failing_members(*members: int) -> Babbler:
    """These members fail in all attempts."""
    return Babbler(lambda request: int(request.session_id.split("/")[1]) in members)


def test_after_the_last_attempt_the_episode_is_dropped_and_counted() -> None:
    pool = make_pool(failing_members(2))
    (group,) = collect(pool, groups_of(1, 4))
    assert [t.trajectory_id for t in group.trajectories] == ["g0/0", "g0/1", "g0/3"]
    (dropped,) = group.dropped
    assert (dropped.trajectory_id, dropped.outcome, dropped.reason) == (
        "g0/2",
        Outcome.ENGINE_ERROR,
        "RuntimeError: no answer",
    )
    assert pool.ledger.counts() == {"dispatched": 6, "kept": 3, "retried": 2, "dropped": 1}


@pytest.mark.parametrize(
    ("size", "fraction", "num_failing", "num_kept"),
    [
        (4, 0.75, 1, 3),  # needs 3
        (4, 0.75, 2, 0),
        (20, 0.55, 9, 11),  # needs exactly 11: 0.55 * 20 is 11.000000000000002 in floating point
        (4, 0.1, 2, 2),  # needs 2: a group of one compares with nobody
        (4, 0.1, 3, 0),
        (1, 0.1, 0, 1),  # unless one was asked for
    ],
)
def test_partial_groups_are_kept_from_the_floor_on(size: int, fraction: float, num_failing: int, num_kept: int) -> None:
    act = failing_members(*range(num_failing))
    pool = make_pool(act, min_group_fraction=fraction, max_attempts=1)
    good = GroupRequest("whole", Task("Adder-v0", 1), 1)  # keeps the call from failing as a whole
    fails = act.fails
    act.fails = lambda request: not request.session_id.startswith("whole") and fails(request)
    group, _ = collect(pool, [*groups_of(1, size), good])
    assert len(group.trajectories) == num_kept
    assert len(group.dropped) == size - num_kept
    assert pool.ledger.counts()["kept"] == num_kept + 1
    if not num_kept:
        reasons = Counter(d.reason for d in group.dropped)
        assert reasons["RuntimeError: no answer"] == num_failing
        left_over = [reason for reason in reasons if "usable episodes of" in reason]
        assert sum(reasons[reason] for reason in left_over) == size - num_failing


class Unscored(Adder):
    async def step(self, action: str) -> Any:
        answer = list(await super().step(action))
        answer[1] = None
        return tuple(answer)


def test_an_unscored_episode_is_dropped_and_never_zero() -> None:
    made: list[Adder] = []

    def make_env(task: Task) -> Any:
        return (Unscored if task.seed == 100 else Adder)(task, made)

    pool = make_pool(Babbler(), make_env=make_env)
    unscored, scored = collect(pool, groups_of(2, 2))
    assert unscored.trajectories == ()
    assert {d.outcome for d in unscored.dropped} == {Outcome.TERMINATED}
    assert all(d.reason.startswith("Adder-v0: not scored: the reward of every turn was None") for d in unscored.dropped)
    assert len(scored.trajectories) == 2
    assert len(made) == 4  # no second attempt: it would end the same way


def ended(
    request: EpisodeRequest, reward: float | None, outcome: Outcome = Outcome.TERMINATED, error: str | None = None
) -> Trajectory:
    """An episode of one sampled token."""
    segment = Segment([5, 6], [False, True], [0.0, -1.0], [-1, 0], [-1, 0])  # type: ignore[arg-type]
    turn = Turn(0, 0, (0, 1), (1, 2), FinishReason.STOP, reward=reward)
    name, seed = request.trajectory_id, request.sampling_seed
    return Trajectory(name, request.attempt, request.task, seed, (segment,), (turn,), (), outcome, error=error)


def test_what_a_judge_cannot_score_or_leaves_unscored_is_dropped_with_its_reason() -> None:
    """g0/1 is played 3 times; g0/2, which the judge returns without a score, is not played again."""

    async def play(request: EpisodeRequest) -> Trajectory:
        return ended(request, None)

    async def score(trajectory: Trajectory) -> Trajectory:
        if trajectory.trajectory_id == "g0/1":
            raise UnscoredError("no verdict")
        reward = None if trajectory.trajectory_id == "g0/2" else 1.0
        return replace(trajectory, turns=(replace(trajectory.turns[0], reward=reward),))

    scoring = Scoring(score, ScoringLimits())
    pool = RolloutPool(play=play, pool_limits=PoolLimits(min_group_fraction=0.5), run_seed=7, scoring=scoring)
    [group] = collect(pool, groups_of(1, 4))
    assert [trajectory.trajectory_id for trajectory in group.trajectories] == ["g0/0", "g0/3"]
    assert [(d.trajectory_id, d.reason.partition(";")[0]) for d in group.dropped] == [
        ("g0/1", "not scored: no verdict"),
        ("g0/2", "Adder-v0: not scored: the reward of every turn was None"),
    ]
    assert pool.ledger.counts()["dispatched"] == 6
    assert pool.num_retries == 2


def test_an_episode_at_an_action_limit_is_kept_and_the_ledger_says_which() -> None:
    async def play(request: EpisodeRequest) -> Trajectory:
        if request.trajectory_id == "g0/0":
            return ended(request, -1.0, Outcome.ACTION_LIMIT, "too slow")
        return ended(request, 1.0)

    pool = RolloutPool(play=play, pool_limits=PoolLimits(), run_seed=7, ledger=Ledger(keeps_entries=True))
    [group] = collect(pool, groups_of(1, 2))
    assert len(group.trajectories) == 2
    assert {entry.trajectory_id: (entry.disposition, entry.reason) for entry in terminals(pool)} == {
        "g0/0": (Disposition.KEPT, "too slow"),
        "g0/1": (Disposition.KEPT, None),
    }


def test_a_first_prompt_that_does_not_fit_is_dropped_without_another_attempt() -> None:
    class Long(Adder):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return "x" * 300, {}

    made: list[Adder] = []
    pool = make_pool(Babbler(), make_env=lambda task: (Long if task.seed == 100 else Adder)(task, made))
    long, _ = collect(pool, groups_of(2, 2))
    assert {d.outcome for d in long.dropped} == {Outcome.CONTEXT_OVERFLOW}
    assert all("the first prompt has 319 tokens" in d.reason for d in long.dropped)  # 19 + 300
    assert len(made) == 4


def test_when_nothing_is_left_the_most_frequent_reasons_are_told() -> None:
    def make_env(task: Task) -> Any:
        raise OSError("no data" if task.seed < 103 else "no disk")

    pool = make_pool(Babbler(), make_env=make_env, max_attempts=2)
    with pytest.raises(RolloutError) as failure:
        asyncio.run(pool.collect(groups_of(4, 2)))
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("all 4 groups (8 episodes) were dropped")
    assert lines[1].strip().startswith("6 x env_error: ")
    assert "no data" in lines[1]
    assert lines[2].strip().startswith("2 x env_error: ")
    assert "no disk" in lines[2]
    assert len(lines) == 3
    pool.ledger.assert_balanced()
    assert pool.ledger.counts() == {"dispatched": 16, "kept": 0, "retried": 8, "dropped": 8}


@pytest.mark.parametrize(("num_reasons", "rest"), [(3, []), (5, ["  and 2 other reasons"])])
def test_of_many_reasons_the_three_most_frequent_are_told_and_the_others_counted(
    num_reasons: int, rest: list[str]
) -> None:
    def make_env(task: Task) -> Any:
        raise OSError(f"no disk {task.seed}")

    pool = make_pool(Babbler(), make_env=make_env, max_attempts=1)
    with pytest.raises(RolloutError) as failure:
        asyncio.run(pool.collect(groups_of(num_reasons, 1)))
    lines = str(failure.value).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["1"] * 3
    assert lines[4:] == rest


def test_no_requests_are_no_groups() -> None:
    assert collect(make_pool(Babbler()), []) == ()


def test_group_ids_must_be_unique_and_sizes_positive() -> None:
    request = groups_of(1, 1)[0]
    with pytest.raises(ConfigError, match="group ids must be unique, but 'g0' occurs more than once"):
        asyncio.run(make_pool(Babbler()).collect([request, request]))
    with pytest.raises(ConfigError, match="GroupRequest g: size: expected at least 1, got 0"):
        GroupRequest("g", Task("Adder-v0", 1), 0)


def test_cancellation_ends_every_attempt_and_closes_every_environment() -> None:
    made: list[Adder] = []
    finished: list[str] = []

    async def cancel_half_way() -> None:
        half_way = asyncio.Event()

        def count(trajectory: Trajectory, disposition: Disposition) -> None:
            finished.append(trajectory.trajectory_id)
            if len(finished) == 10:
                half_way.set()

        pool = make_pool(actor, make_env=lambda task: Adder(task, made), on_episode=count)
        pools.append(pool)
        running = asyncio.create_task(pool.collect(groups_of(10, 3)))
        await half_way.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    actor, pools = Babbler(), []
    asyncio.run(cancel_half_way())
    ledger = pools[0].ledger
    ledger.assert_balanced()
    outcomes = Counter((t.outcome, t.disposition) for t in terminals(pools[0]))
    # What had finished was not handed out; what was running was cancelled; what waited was never dispatched.
    assert outcomes[Outcome.TERMINATED, Disposition.DROPPED] == len(finished)
    assert 1 <= outcomes[Outcome.CANCELLED, Disposition.DROPPED] <= 8
    assert outcomes.total() == len(made) < 30
    assert all(env.is_closed for env in made)
    assert actor.open_sessions == set()


def test_a_poisoned_engine_stops_everything_at_once() -> None:
    made: list[Adder] = []

    class Poisoned(Babbler):
        async def __call__(self, request: ActRequest) -> Completion:
            if request.session_id == "g1/0/0":
                raise EnginePoisonedError("half an update")
            return await super().__call__(request)

    pool = make_pool(Poisoned(), make_env=lambda task: Adder(task, made), max_concurrent_rollouts=4)
    with pytest.raises(EnginePoisonedError, match="half an update"):
        asyncio.run(pool.collect(groups_of(10, 3)))
    pool.ledger.assert_balanced()
    assert all(env.is_closed for env in made)
    assert len(made) < 30
    poisoned = [t for t in terminals(pool) if t.outcome is Outcome.ENGINE_ERROR]
    assert [(t.trajectory_id, t.disposition) for t in poisoned] == [("g1/0", Disposition.DROPPED)]
    assert not any(t.disposition is Disposition.KEPT for t in terminals(pool))


def test_tasks_for_evaluation_are_sampled_alike_on_every_occasion() -> None:
    pool = make_pool(Babbler())
    tasks = [Task("Adder-v0", seed) for seed in (3, 1, 2)]

    async def twice() -> tuple[tuple[TrajectoryGroup, ...], tuple[TrajectoryGroup, ...]]:
        return await pool.run_tasks(tasks, label="before"), await pool.run_tasks(tasks[::-1], label="after")

    before, after = asyncio.run(twice())
    pool.ledger.assert_balanced()
    assert [g.task.seed for g in before] == [3, 1, 2]
    assert [g.trajectories[0].messages for g in before] == [g.trajectories[0].messages for g in after[::-1]]
    assert before[0].trajectories[0].trajectory_id == "before/Adder-v0#3/0"
    assert after[2].trajectories[0].trajectory_id == "after/Adder-v0#3/0"


def test_engine_failures_are_filled_up_by_retries() -> None:
    engine = ScriptedEngine(lambda prompt, turn: [97, END], failures=Failures(every=7))
    pool = make_pool(EngineActor(engine), max_attempts=5)
    groups = collect(pool, groups_of(10, 4))
    counts = pool.ledger.counts()
    assert sum(len(g.trajectories) for g in groups) == 40
    assert counts["retried"] == engine.num_failures > 0
    assert {t.reward for g in groups for t in g.trajectories} == {0.2}  # two turns of one letter

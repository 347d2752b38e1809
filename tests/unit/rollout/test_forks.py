"""Forks: what is replayed, what is drawn, and that a replay that is answered otherwise ends with the turn."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.errors import ContractError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import ActRequest
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.forks import Replay, ReplayingActor, completions_of, draw_replays
from gspo_gym.rollout.ledger import Ledger
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.rollout.schedule import oldest_version
from gspo_gym.seeding import child_seed, generator
from gspo_gym.types import (
    Completion,
    FinishReason,
    ForkPoint,
    Outcome,
    Segment,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

END = 258  # <|im_end|>
TASK = Task("test/Echo-v0", seed=5)


class Echo:
    """Says what was said; ends after an answer below "h", or after four; earns the letters of the last one."""

    def __init__(self, num_turns: int = 4) -> None:
        self.num_turns, self.num_steps = num_turns, 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"seed {seed}", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        self.num_steps += 1
        is_over = action < "h" or self.num_steps == self.num_turns
        return f"heard {action}", float(len(action)) if is_over else 0.0, is_over, False, {}

    async def close(self) -> None:
        pass


class Babbler:
    """Says 1 to 3 letters from the episode's sampling seed and turn, under the version that samples now."""

    def __init__(self, fails: Callable[[ActRequest], bool] = lambda request: False) -> None:
        self.fails, self.version, self.ended = fails, 3, list[str]()

    async def __call__(self, request: ActRequest) -> Completion:
        rng = generator(request.sampling_seed, "babble", request.turn_index)
        for _ in range(int(rng.integers(4))):
            await asyncio.sleep(0)
        if self.fails(request):
            raise RuntimeError("no answer")
        ids = [*rng.integers(97, 123, size=int(rng.integers(1, 4))).tolist(), END]
        logprobs, versions = [-1.0 - k for k in range(len(ids))], [self.version] * len(ids)
        return Completion(ids, logprobs, FinishReason.STOP, versions)  # type: ignore[arg-type]

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)


def play(
    act: Babbler | None = None,
    *,
    make_env: Callable[[Task], Any] = lambda task: Echo(),
    max_concurrent: int = 8,
    version_of_forks: int = 3,
    **request: Any,
) -> TrajectoryGroup:
    """A group of four with two forks an episode, whose tokens are of `version_of_forks`."""
    actor = act or Babbler()
    num_over = 0

    def over(trajectory: Trajectory, _: Any) -> None:
        nonlocal num_over
        num_over += 1
        actor.version = version_of_forks if num_over >= 4 else actor.version

    limits = EpisodeLimits(max_turns=6, max_output_tokens=16, max_model_len=256)
    pool = RolloutPool(
        ledger=Ledger(keeps_entries=True),
        play=episode_player(make_env=make_env, act=actor, renderers=RendererCache(tiny_tokenizer()), limits=limits),
        pool_limits=PoolLimits(max_concurrent_rollouts=max_concurrent, max_attempts=2, min_group_fraction=0.75),
        run_seed=7,
        on_episode=over,
    )
    [group] = asyncio.run(pool.play_groups([GroupRequest("g", TASK, **{"size": 4, "forks_per_episode": 2, **request})]))
    pool.ledger.assert_balanced()
    return group


def data_of(trajectory: Trajectory) -> tuple[Any, ...]:
    arrays = [s.token_ids.tolist() + s.rollout_logprobs.tolist() for s in trajectory.segments]
    return trajectory.trajectory_id, trajectory.sampling_seed, trajectory.turns, trajectory.forked_from, str(arrays)


def test_a_fork_repeats_recorded_turns_with_their_logprobs_and_versions_and_goes_on_by_itself() -> None:
    group = play(version_of_forks=4)
    episodes = {e.trajectory_id: e for e in group.trajectories}
    forks = [e for e in group.trajectories if e.forked_from is not None]
    assert len(forks) >= 4
    assert group.requested_size == 4 + len(forks)
    endings = Counter()
    for fork in forks:
        point = fork.forked_from
        assert point is not None
        origin = episodes[point.trajectory_id]
        assert 1 <= point.turn < len(origin.turns)
        member, number = (int(name.rpartition("/")[2]) for name in (origin.trajectory_id, fork.trajectory_id))
        assert number in (4 + 2 * member, 5 + 2 * member)
        assert fork.sampling_seed == child_seed(7, "group", "g", number, 0)
        ours, theirs = completions_of(fork), completions_of(origin)
        for mine, other in zip(ours[: point.turn], theirs[: point.turn], strict=True):
            for name in ("token_ids", "logprobs", "weight_version"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
            assert set(mine.weight_version.tolist()) == {3}
        assert {version for own in ours[point.turn :] for version in own.weight_version.tolist()} == {4}
        assert oldest_version(fork) == 3
        assert fork.turns[: point.turn] == origin.turns[: point.turn]
        assert fork.num_new_actions == sum(len(own.token_ids) for own in ours[point.turn :]) < fork.num_actions
        endings[ours[point.turn].token_ids.tobytes() == theirs[point.turn].token_ids.tobytes()] += 1
    assert endings[False] > endings[True]
    assert all(e.num_new_actions == e.num_actions for e in group.trajectories if e.forked_from is None)


def test_forks_follow_from_the_episodes_and_not_from_concurrency() -> None:
    one, many = (play(max_concurrent=number) for number in (1, 16))
    assert [data_of(e) for e in one.trajectories] == [data_of(e) for e in many.trajectories]
    # the episodes themselves are those of a group without forks
    without = play(forks_per_episode=0)
    assert [data_of(e) for e in without.trajectories] == [data_of(e) for e in one.trajectories[:4]]


class Forgetful(Echo):
    """Answers the second turn by how many environments there were before it."""

    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).num_made += 1
        self.number = self.num_made

    async def step(self, action: str) -> Any:
        answer, *rest = await super().step(action)
        return (f"{answer} {self.number}" if self.num_steps == 2 else answer, *rest)


class Fleeting(Echo):
    """Ends after four turns the first four times, and then at once."""

    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1
        super().__init__(4 if self.num_made <= 4 else 1)


@pytest.mark.parametrize(("kind", "turn"), [(Forgetful, 2), (Fleeting, 1)])
def test_a_replay_that_is_answered_otherwise_is_an_error_that_names_the_turn(kind: type[Any], turn: int) -> None:
    kind.num_made = 0
    long = {"make_env": lambda task: kind(), "act": Talker()}
    text = rf"test/Echo-v0, seed 5: a replay of episode g/\d .* before turn {turn}, so"
    with pytest.raises(ContractError, match=text):
        play(**long)


def test_the_turn_at_which_a_fork_leaves_must_be_reached_and_asked_as_it_was() -> None:
    """By the first turn of its own its episode may neither be over nor have been told anything else."""
    (origin, *_) = play(Talker()).trajectories
    talker = Talker()
    actor = ReplayingActor(talker, Replay(origin, 2))
    for num_turns in (1, 2):
        short = dataclasses.replace(origin, turns=origin.turns[:num_turns])
        with pytest.raises(ContractError, match=f"before turn {num_turns}"):
            actor.require_replayed(short)
        actor.require_replayed(dataclasses.replace(short, outcome=Outcome.ENV_ERROR, error="down"))
    actor.require_replayed(dataclasses.replace(origin, turns=origin.turns[:3]))
    asyncio.run(actor.end_session("g/4"))
    assert talker.ended == ["g/4"]
    prompt = Replay(origin, 2).prompt(2) + 1
    request = ActRequest("g/4", 2, prompt, 16, (), 0, RendererCache(tiny_tokenizer()).for_tools(()), None)
    with pytest.raises(ContractError, match="before turn 2"):
        asyncio.run(actor(request))


class Talker(Babbler):
    """Says "z" for ever, so that all episodes have four turns."""

    async def __call__(self, request: ActRequest) -> Completion:
        return Completion([122, END], [-1.0, -1.0], FinishReason.STOP, [self.version] * 2)  # type: ignore[arg-type]


def test_a_fork_that_fails_is_tried_again_and_then_dropped_and_its_group_stays() -> None:
    def fails(request: ActRequest) -> bool:
        return int(request.session_id.split("/")[1]) == 4

    group = play(Babbler(fails))
    whole = play()
    assert [d.reason for d in group.dropped] == ["RuntimeError: no answer"]
    assert len(group.trajectories) == len(whole.trajectories) - 1
    assert group.requested_size == whole.requested_size


def test_a_group_that_is_lost_is_not_forked_and_episodes_of_one_turn_neither() -> None:
    lost = play(Babbler(lambda request: int(request.session_id.split("/")[1]) < 2))
    assert (lost.trajectories, len(lost.dropped)) == ((), 4)
    assert play(make_env=lambda task: Echo(1)).requested_size == 4


def of_turns(num_turns: int) -> Trajectory:
    segment = Segment([5, 6], [False, True], [0.0, -1.0], [-1, 0], [-1, 0])  # type: ignore[arg-type]
    turns = tuple(Turn(k, 0, (0, 1), (1, 2), FinishReason.STOP) for k in range(num_turns))
    return Trajectory("e", 0, TASK, 0, (segment,), turns, (), Outcome.TERMINATED)


def test_a_turn_is_drawn_from_those_of_the_other_episodes() -> None:
    """Of lengths 1, 2, 4: the first has no later turn; of 1, 2, 3 the second has 1; for the third there is only 1."""
    episodes = [of_turns(n) for n in (1, 2, 4)]
    drawn = [[r and r.num_turns for r in draw_replays(episodes, seed=seed)] for seed in range(300)]
    assert {first for first, _, _ in drawn} == {None}
    assert {third for _, _, third in drawn} == {1}
    second = Counter(second for _, second, _ in drawn)
    assert set(second) == {None, 1}
    assert abs(second[1] - 100) < 4 * (300 * 1 / 3 * 2 / 3) ** 0.5
    assert draw_replays([of_turns(3)], seed=0) == [None]  # nothing to draw from


def test_a_replay_knows_its_place_and_its_prompts() -> None:
    (origin, *_) = play(Talker()).trajectories
    replay = Replay(origin, 2)
    assert replay.point == ForkPoint("g/0", 2)
    tokens = origin.segments[0].token_ids
    assert replay.prompt(1).tolist() == tokens[: origin.turns[1].action_span[0]].tolist()

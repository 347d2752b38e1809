"""Which environment a group plays: shares are kept closely, exactly where they can be, and by number alone."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from gspo_gym.errors import ConfigError
from gspo_gym.rollout.episode import EpisodeRequest, PlayEpisode
from gspo_gym.rollout.summary import Mixture, play_by_environment
from gspo_gym.types import Outcome, Task, Trajectory


def test_a_run_with_one_environment_plays_it_always() -> None:
    mixture = Mixture("only", {})
    assert {mixture.env_of(number) for number in range(20)} == {"only"}


def test_groups_go_to_who_is_furthest_behind() -> None:
    """By hand, deficits number * share - count before each choice: a 1/2, b 1/4, c 1/4.

    1: a .5, b .25, c .25 -> a   2: a 0, b .5, c .5 -> b   3: a .5, b -.25, c .75 -> c   4: a 1, b 0, c 0 -> a
    """
    mixture = Mixture("a", {"b": 0.25, "c": 0.25})
    assert [mixture.env_of(number) for number in range(8)] == ["a", "b", "c", "a"] * 2
    # a 1/4, b 3/4: 1: .25, .75 -> b   2: .5, .5 -> a   3: -.25, 1.25 -> b   4: 0, 1 -> b
    mixture = Mixture("a", {"b": 0.75})
    assert [mixture.env_of(number) for number in range(8)] == ["b", "a", "b", "b"] * 2


@pytest.mark.parametrize("others", [{"b": 0.1, "c": 0.2}, {"b": 0.3, "c": 0.3, "d": 0.1}])
def test_shares_in_tenths_repeat_every_ten_groups(others: dict[str, float]) -> None:
    # after ten groups all are where they began; in float64 they would not be, for 0.1 + 0.2 is not 0.3
    mixture = Mixture("a", others)
    played = [mixture.env_of(number) for number in range(400)]
    assert played == played[:10] * 40


@pytest.mark.parametrize(
    ("others", "num_groups", "counts"),
    [
        ({"b": 0.1}, 10, {"a": 9, "b": 1}),
        ({"b": 0.3, "c": 0.1}, 10, {"a": 6, "b": 3, "c": 1}),  # 0.3 and 0.1 are no sums of powers of two
        ({"b": 0.3, "c": 0.1}, 1000, {"a": 600, "b": 300, "c": 100}),
        ({"b": 0.625, "c": 0.125}, 16, {"a": 4, "b": 10, "c": 2}),
    ],
)
def test_shares_are_exact_where_they_give_whole_groups(
    others: dict[str, float], num_groups: int, counts: dict[str, int]
) -> None:
    mixture = Mixture("a", others)
    assert Counter(mixture.env_of(number) for number in range(num_groups)) == counts


def test_none_is_ever_a_whole_group_ahead_of_its_share_or_many_behind() -> None:
    rng = np.random.default_rng(0)
    for num_others in (1, 2, 5):
        shares = rng.dirichlet(np.ones(num_others + 1))
        others = {f"e{index}": float(share) for index, share in enumerate(shares[1:])}
        mixture = Mixture("main", others)
        counts = dict.fromkeys(["main", *others], 0)
        for number in range(500):
            counts[mixture.env_of(number)] += 1
            ahead = [count - (number + 1) * float(s) for count, s in zip(counts.values(), shares, strict=True)]
            assert max(ahead) < 1
            assert min(ahead) > -num_others  # they sum to 0


def test_a_number_gives_the_same_environment_in_whatever_order_numbers_are_asked_for() -> None:
    others = {"b": 0.4, "c": 0.15}
    forward, backward = Mixture("a", others), Mixture("a", others)
    expected = [forward.env_of(number) for number in range(50)]
    assert [backward.env_of(number) for number in reversed(range(50))] == expected[::-1]


@pytest.mark.parametrize("others", [{"b": 1.0}, {"b": 0.5, "c": 0.5}, {"b": 0.0}, {"b": -0.1}, {"a": 0.5}])
def test_shares_that_cannot_be_are_refused(others: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected fractions > 0 of other environments than 'a', below 1 in sum"):
        Mixture("a", others)


async def played_by(play: PlayEpisode, env_id: str) -> str:
    return (await play(EpisodeRequest("t", Task(env_id, 0), sampling_seed=0))).trajectory_id


def test_each_episode_is_played_by_the_player_of_its_environment() -> None:
    def player(name: str) -> PlayEpisode:
        async def play(request: EpisodeRequest) -> Trajectory:
            return Trajectory(
                trajectory_id=name,
                attempt=0,
                task=request.task,
                sampling_seed=request.sampling_seed,
                segments=(),
                turns=(),
                messages=(),
                outcome=Outcome.ENV_ERROR,
                error="not really played",
            )

        return play

    only = player("only")
    assert play_by_environment({"a": only}) is only
    play = play_by_environment({name: player(f"{name}'s") for name in ("a", "b")})
    assert [asyncio.run(played_by(play, env_id)) for env_id in "abba"] == ["a's", "b's", "b's", "a's"]
    with pytest.raises(ConfigError, match="nobody here plays 'c'"):
        asyncio.run(played_by(play, "c"))

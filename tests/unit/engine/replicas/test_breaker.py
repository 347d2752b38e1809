"""The limit of calls at once: what lowers it, what raises it again, and what does neither."""

from __future__ import annotations

import pytest

from gspo_gym.engine.replicas.replica_set import InFlightLimit
from gspo_gym.errors import ConfigError


def test_a_round_of_answers_at_the_full_limit_raises_it_by_one_and_never_above_the_most() -> None:
    limit = InFlightLimit(6)
    for _ in range(9):
        limit.succeed(6)  # at the most already
    limit.time_out(begun=0.0, now=1.0)
    seen = []
    for _ in range(3 + 4 + 5 + 1):  # 6 // 2 = 3, and then one round of 3, of 4 and of 5
        limit.succeed(limit.limit - 1)  # not used to the full: says nothing
        seen.append(limit.limit)
        limit.succeed(limit.limit)
    assert seen == [3] * 3 + [4] * 4 + [5] * 5 + [6]


def test_a_time_out_halves_the_limit_down_to_one_and_calls_made_before_it_do_not_halve_it_again() -> None:
    limit = InFlightLimit(8)
    for begun, now, expected in [(0.0, 10.0, 4), (9.9, 11.0, 4), (10.0, 12.0, 2), (12.0, 13.0, 1), (13.0, 14.0, 1)]:
        limit.time_out(begun=begun, now=now)
        assert limit.limit == expected
    limit.succeed(1)
    assert limit.limit == 2


def test_a_time_out_forgets_the_answers_that_came_before_it() -> None:
    limit = InFlightLimit(8)
    limit.time_out(begun=0.0, now=0.0)
    limit.succeed(4)
    limit.time_out(begun=1.0, now=1.0)
    limit.succeed(2)
    assert limit.limit == 2
    limit.succeed(2)
    assert limit.limit == 3


def test_one_call_at_once_is_the_least_that_can_be_asked_for() -> None:
    assert InFlightLimit(1).limit == 1
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        InFlightLimit(0)

"""What is kept of what was played: counted, and told where it is not a random part."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.diagnosis.selection import (
    ERROR_RATE,
    NUM_STEPS,
    AttemptCounts,
    AttemptWatch,
    SelectionAlarm,
    SelectionEvidence,
    _p_of,
    _tested,
)
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.ledger import Disposition
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.rollout.summary import PlayedReturns
from gspo_gym.run.state import TrainState
from gspo_gym.seeding import generator
from gspo_gym.types import FinishReason, Outcome, Segment, Task, Trajectory, Turn


@pytest.mark.parametrize(
    ("num_actions", "at_reset", "after_action"), [(4, 1, 2), (4, 0, 3), (4, 2, 0), (1, 0, 1), (4, 3, 4), (0, 2, 0)]
)
def test_failed_calls_are_compared_with_all_other_choices_of_as_many_calls(
    num_actions: int, at_reset: int, after_action: int
) -> None:
    # three resets and the actions, each of which may be among the failed ones: mean and variance over all choices
    calls = [0] * 3 + [1] * num_actions
    answered = [sum(chosen) for chosen in itertools.combinations(calls, at_reset + after_action)]
    counts = AttemptCounts(3, 0, at_reset, after_action, num_actions)
    assert counts.excess == pytest.approx(after_action - np.mean(answered), abs=1e-12)
    assert counts.variance == pytest.approx(np.var(answered), abs=1e-12)


def attempt(num_actions: int, outcome: Outcome, env_id: str = "test/Env-v0") -> Trajectory:
    """An attempt of so many actions, of one token each after one of the environment's."""
    mask = np.array([False, True] * num_actions, dtype=bool)
    index = np.array([k for turn in range(num_actions) for k in (-1, turn)], dtype=np.int32)
    size = 2 * num_actions
    segments = (Segment(np.arange(size), mask, np.zeros(size), index, np.where(mask, 0, -1)),) if num_actions else ()
    turns = tuple(
        Turn(k, 0, (2 * k, 2 * k + 1), (2 * k + 1, 2 * k + 2), FinishReason.STOP, reward=0.0)
        for k in range(num_actions)
    )
    error = None if outcome is Outcome.TERMINATED else "it failed"
    return Trajectory("t", 0, Task(env_id, 7), 1, segments, turns, (), outcome, error=error)


class Breaks:
    """Ends after one action; `breaks(action)` at a step and `breaks(None)` at a reset say whether it raises."""

    def __init__(self, breaks: Callable[[str | None], bool]) -> None:
        self._breaks = breaks

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self._breaks(None):
            raise OSError("no connection")
        return "go", {}

    async def step(self, action: str) -> Any:
        if self._breaks(action):
            raise ValueError(f"cannot read {action!r}")
        return "", float(len(action)), True, False, {}

    async def close(self) -> None:
        pass


def play(breaks: Callable[[str | None], bool], *, num_episodes: int) -> tuple[AttemptWatch, int]:
    """Play episodes of 1 to 4 letters; returns the watch, and how many episodes were kept."""
    watch = AttemptWatch()

    def letters(env: Any, rng: Any) -> Any:
        return lambda _messages: "a" * int(rng.integers(1, 5))

    pool = RolloutPool(
        play=episode_player(
            make_env=lambda _task: Breaks(breaks),
            act=ScriptedActor(letters),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=2, max_output_tokens=8, max_model_len=128),
        ),
        pool_limits=PoolLimits(max_attempts=5, min_group_fraction=0.01),
        run_seed=0,
        on_episode=watch,
    )
    requests = [GroupRequest(f"g{number}", Task("Breaks-v0", number), 1) for number in range(num_episodes)]
    groups = asyncio.run(pool.collect(requests))
    kept = sum(len(group.trajectories) for group in groups)
    assert pool.num_retries + sum(group.requested_size for group in groups) == watch._step.attempts
    return watch, kept


def test_an_environment_that_breaks_at_some_actions_is_told_of() -> None:
    attempts: list[str] = []

    def breaks(action: str | None) -> bool:
        if action is not None:
            attempts.append(action)
        return action is not None and len(action) > 1  # three of four answers

    watch, kept = play(breaks, num_episodes=30)
    failed = sum(len(action) > 1 for action in attempts)
    assert kept == len(attempts) - failed
    assert watch.metrics() == {
        "rollout/attempts": len(attempts),
        "rollout/kept_fraction": kept / len(attempts),
        "rollout/env_failed_at_reset": 0.0,
        "rollout/env_failed_after_action": failed / len(attempts),
        "rollout/lost_after_action": failed / len(attempts),
    }
    reason = watch.alarm()
    assert reason is not None
    # half of all calls answer an action, and so would half of the failed ones
    assert reason.startswith(
        f"{failed} attempts failed in the environment after an action of the policy, {failed / 2:.0f} more than"
    )
    assert watch.alarm() is None  # told once, until there is twice as much
    assert watch.metrics() == {}  # of the next step, in which nothing was played


def told(watch: AttemptWatch, *, num_good: int, num_failed: int) -> str | None:
    """The alarm after a step of so many attempts of one action, which fails in the last `num_failed`."""
    for number in range(num_good + num_failed):
        outcome = Outcome.TERMINATED if number < num_good else Outcome.ENV_ERROR
        watch(attempt(1, outcome), Disposition.KEPT)
    watch.metrics()
    return watch.alarm()


def test_an_alarm_is_one_of_more_than_four_standard_errors_and_comes_again_at_twice_as_many_failures() -> None:
    # m of 2m attempts fail at their action: of 4m calls, half of which are actions, m fail. Instead of m / 2 all of
    # these are actions; the variance is m / 4 * 3m / (4m - 1), so that these are sqrt((4m - 1) / 3) standard errors
    assert told(AttemptWatch(), num_good=12, num_failed=12) is None  # sqrt(47 / 3) = 3.96
    watch = AttemptWatch()
    assert told(watch, num_good=13, num_failed=13) == (
        "13 attempts failed in the environment after an action of the policy, 6 more than if calls failed whatever the "
        f"policy did ({math.sqrt(51 / 3):.1f} standard errors)"
    )
    assert told(watch, num_good=12, num_failed=12) is None  # 25 failures
    again = told(watch, num_good=1, num_failed=1)
    assert again is not None
    assert again.startswith("26 attempts")


def test_one_failure_is_told_of_where_nothing_but_chance_in_a_thousand_explains_it() -> None:
    # of 1,001 resets none failed and of one action one: excess 1 - 1 / 1002, variance (1 - 1 / 1002) / 1002
    watch = AttemptWatch()
    assert watch.alarm() is None  # of nothing
    for _ in range(1000):
        watch(attempt(0, Outcome.CONTEXT_OVERFLOW), Disposition.KEPT)
    reason = told(watch, num_good=0, num_failed=1)
    assert reason is not None
    assert reason.startswith("1 attempts failed")
    assert f"({math.sqrt(1001):.1f} standard errors)" in reason


def test_failures_that_become_more_frequent_while_episodes_become_longer_are_not_told_of() -> None:
    """Of 8,000 calls at episodes of 1 action 2 fail, of 4,000 at episodes of 9 actions 223, whatever they answer.

    Taken together, 201 of 225 failed calls answer an action, 0.89, and 0.63 of all calls do: 8 standard errors.
    """
    watch = AttemptWatch()
    for size, num_attempts, failures in ((1, 4000, 1), (9, 400, 200)):
        for number in range(num_attempts):
            at_reset, after_action = number < failures / size, number >= num_attempts - failures
            outcome = Outcome.ENV_ERROR if at_reset or after_action else Outcome.TERMINATED
            watch(attempt(0 if at_reset else size, outcome), Disposition.KEPT)
        watch.metrics()
    assert watch.alarm() is None


def test_an_environment_that_fails_whatever_is_done_is_counted_and_not_told_of() -> None:
    rng = generator(3, "flaky")
    calls: list[bool] = []

    def breaks(_: str | None) -> bool:
        calls.append(bool(rng.random() < 0.2))
        return calls[-1]

    watch, _ = play(breaks, num_episodes=200)
    metrics = watch.metrics()
    assert watch.alarm() is None
    shares = metrics["rollout/env_failed_at_reset"] + metrics["rollout/env_failed_after_action"]
    assert shares == pytest.approx(sum(calls) / metrics["rollout/attempts"])


def test_a_few_attempts_that_apps_lose_are_not_told_of_and_more_than_a_twentieth_are() -> None:
    watch = AttemptWatch()
    for outcomes in ([Outcome.ENV_ERROR] * 7, [Outcome.EPISODE_TIMEOUT] * 10 + [Outcome.TERMINATED] * 323):
        for outcome in outcomes:
            watch(attempt(1, outcome), Disposition.KEPT)
        watch.metrics()
        assert watch.app_alarm() is None  # 7 are too few, and 17 of 340 are 5%
    watch(attempt(1, Outcome.ENV_ERROR), Disposition.KEPT)
    watch.metrics()
    assert watch.app_alarm() is not None  # 18 of 341


def test_what_environments_played_here_lose_is_not_told_of_as_the_apps() -> None:
    watch = AttemptWatch({"crafter"})
    for _ in range(40):
        watch(attempt(1, Outcome.ENV_ERROR), Disposition.RETRIED)
        watch(attempt(1, Outcome.TERMINATED, "crafter"), Disposition.KEPT)
    assert watch.metrics()["rollout/lost_after_action"] == 0.5
    assert watch.app_alarm() is None
    for _ in range(8):
        watch(attempt(1, Outcome.ENV_ERROR, "crafter"), Disposition.RETRIED)
    watch.metrics()
    reason = watch.app_alarm()
    assert reason is not None
    assert reason.startswith("8 of 48 attempts (17%;")  # 8 / 48


@pytest.mark.parametrize("num_lost", [1, 3, 7])
def test_p_is_the_share_of_subsets_that_are_as_far_from_the_mean(num_lost: int) -> None:
    """8 attempts, some of them lost: all subsets are counted here; 1,999 draws have a standard error of 0.011."""
    played = (0.0, 0.5, 0.0, 1.0, 2.0, 0.25, 1.5, 0.0)
    values = np.array(played) - np.mean(played)
    subsets = [abs(values[list(chosen)].sum()) for chosen in itertools.combinations(range(8), num_lost)]
    exact = np.mean([value >= abs(values[:num_lost].sum()) - 1e-12 for value in subsets])
    tested = _tested(PlayedReturns(played[num_lost:], played[:num_lost]), np.random.default_rng(0))
    assert _p_of([tested]) == pytest.approx(exact, abs=0.05)


def test_96_played_of_which_the_12_best_are_kept_sound_the_alarm_at_once() -> None:
    played = [1.25] * 12 + [0.5] * 48 + [0.0] * 36
    alarm = SelectionAlarm(seed=0)
    selection = alarm.check(PlayedReturns(tuple(played[:12]), tuple(played[12:])))
    assert selection is not None
    assert alarm.evidence == SelectionEvidence(num_tests=1)  # the rest is used up
    assert (selection.num_played, selection.num_kept, selection.mean_kept) == (96, 12, 1.25)
    assert selection.mean_played == pytest.approx((12 * 1.25 + 48 * 0.5) / 96)
    assert "mean return of 0.4062" in selection.sentence()


def test_a_selection_that_one_step_does_not_show_is_shown_by_several() -> None:
    """39 played, 13 with 1; 3 kept, all of them with 1: C(13, 3) / C(39, 3) = 0.031 by chance, and 3e-5 three times."""
    step = PlayedReturns((1.0,) * 3, (1.0,) * 10 + (0.0,) * 26)
    alarm = SelectionAlarm(seed=0)
    found = [alarm.check(step) for _ in range(3)]
    assert found[0] is None
    (selection,) = [each for each in found if each is not None]
    assert selection.num_steps in (2, 3)
    assert selection.p <= ERROR_RATE


def test_an_alarm_that_goes_on_from_the_evidence_of_a_state_finds_what_one_that_saw_all_finds() -> None:
    """12 attempts a step, of which the lost two are the lowest every second time: no step shows it, several do."""
    random = np.random.default_rng(5)
    steps = []
    for number in range(60):
        returns = random.choice([0.0, 0.25, 1.0], size=12).tolist()
        returns.sort(key=lambda value: value if number % 2 else random.random())
        steps.append(PlayedReturns(tuple(returns[2:]), tuple(returns[:2])))
    whole = SelectionAlarm(seed=3)
    expected = [whole.check(step) for step in steps]
    told = [number for number, found in enumerate(expected) if found is not None]
    assert len(told) > 1
    for cut in (told[0] - 1, told[0] + 2, told[1]):  # with evidence, after an alarm used it up, before another
        first = SelectionAlarm(seed=3)
        found = [first.check(step) for step in steps[:cut]]
        saved = json.loads(json.dumps(TrainState(selection=first.evidence).to_dict()))
        second = SelectionAlarm(seed=3, evidence=TrainState.from_dict(saved).selection)
        assert [*found, *(second.check(step) for step in steps[cut:])] == expected
    earlier = TrainState().to_dict()
    del earlier["selection"]
    assert TrainState.from_dict(earlier) == TrainState()  # of a version that kept none


def test_what_is_lost_whatever_it_returned_sounds_no_alarm() -> None:
    """400 steps of 24 attempts, of which a random 2 are lost: 0.4 alarms are expected at most."""
    random, alarm, num_alarms = np.random.default_rng(3), SelectionAlarm(seed=1), 0
    for _ in range(400):
        returns = random.choice([0.0, 0.25, 1.0], size=24).tolist()
        num_alarms += alarm.check(PlayedReturns(tuple(returns[2:]), tuple(returns[:2]))) is not None
    assert num_alarms <= 1
    assert len(alarm._steps) <= NUM_STEPS


@pytest.mark.parametrize("returns", [PlayedReturns((0.0, 1.0), ()), PlayedReturns((), (0.0, 1.0)), PlayedReturns()])
def test_steps_that_lose_none_or_keep_none_are_no_evidence(returns: PlayedReturns) -> None:
    alarm = SelectionAlarm(seed=0)
    assert [alarm.check(returns) for _ in range(50)] == [None] * 50


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_returns_that_are_all_the_same_are_no_evidence(value: float) -> None:
    alarm = SelectionAlarm(seed=0)
    returns = PlayedReturns((value,) * 7, (value,) * 7)
    assert [alarm.check(returns) for _ in range(40)] == [None] * 40

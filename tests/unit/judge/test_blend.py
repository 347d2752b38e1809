"""The blend is the contract's formula, laid on the turns that earned it; what is missing makes an episode unscored.

All expected numbers are written out: return = env * return + event * (sum of event totals) + outcome * (outcome total).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_judge import episode, judgement

from gspo_gym.errors import ConfigError, RecordError, UnscoredError
from gspo_gym.judge.base import JudgeError
from gspo_gym.judge.blend import RewardBlend, blend, unjudged
from gspo_gym.learning.credit import returns_of
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.types import Outcome

HALF = RewardBlend(env=0.2, event=0.4, outcome=0.4)


def test_the_contracts_example_by_hand() -> None:
    said = judgement([0.5, 0.0, 1.0], outcome=0.75)
    scored = blend(episode([0.0, None, 1.0]), said, HALF)
    # turn 0: 0.2 * 0 + 0.4 * 0.5; turn 1: 0.4 * 0; turn 2: 0.2 * 1 + 0.4 * 1 + 0.4 * 0.75
    assert [turn.reward for turn in scored.turns] == pytest.approx([0.2, 0.0, 0.9])
    assert scored.reward == pytest.approx(0.2 * 1.0 + 0.4 * 1.5 + 0.4 * 0.75)


def test_every_part_keeps_its_name() -> None:
    plain = episode([0.6, 1.0], terms=[{"found": 1.0, "late": -0.4}, {}])
    scored = blend(plain, judgement([1.0, 0.5], outcome=1.0), RewardBlend(env=0.5, event=0.1, outcome=2.0))
    assert scored.turns[0].reward_terms == pytest.approx({"found": 0.5, "late": -0.2, "judge_event": 0.1})
    # a number without terms of its own is the term "env"
    assert scored.turns[1].reward_terms == pytest.approx({"env": 0.5, "judge_event": 0.05, "judge_outcome": 2.0})
    for turn in scored.turns:
        assert turn.reward == pytest.approx(sum(turn.reward_terms.values()))


def test_terms_that_leave_a_rest_get_one_of_its_own() -> None:
    scored = blend(episode([1.0], terms=[{"found": 0.3}]), judgement(), RewardBlend(env=2.0))
    assert scored.turns[0].reward_terms == pytest.approx({"found": 0.6, "env": 1.4})


def test_the_defaults_are_the_environment_alone() -> None:
    scored = blend(episode([0.25, None, -1.0]), judgement([5.0, 5.0, 5.0], outcome=9.0), RewardBlend())
    assert [turn.reward for turn in scored.turns] == [0.25, None, -1.0]


def test_only_the_outcome_scores_an_episode_that_its_environment_does_not() -> None:
    scored = blend(episode([None, None]), judgement(outcome=0.5), RewardBlend(env=0.0, outcome=2.0))
    assert [turn.reward for turn in scored.turns] == [None, 1.0]


def test_tokens_and_messages_are_those_that_were_played() -> None:
    plain = episode([1.0, 2.0])
    scored = blend(plain, judgement([1.0, 1.0], outcome=1.0), HALF)
    assert (scored.segments, scored.messages, scored.outcome, scored.task) == (
        plain.segments, plain.messages, plain.outcome, plain.task
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "weights", "match"),
    [
        (judgement([1.0], outcome=1.0), HALF, "expected a review of each of its 2 turns from scripted, got 1"),
        (judgement(outcome=1.0), HALF, "expected a review of each of its 2 turns from scripted, got 0"),
        (judgement([1.0, 1.0]), HALF, "expected a review of the outcome from scripted, got none"),
        (judgement([1.0, float("nan")], outcome=1.0), HALF, "expected finite totals"),
    ],
)
def test_a_score_that_is_asked_for_and_missing_is_an_error_and_not_0(said, weights, match) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(JudgeError, match=match):
        blend(episode([0.0, 1.0]), said, weights)


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        ([1.0, 1.0], RewardBlend(env=1e308, event=1e308, outcome=1e308)),  # the parts of one turn add up to 3e308
        ([1.0, 1.0], RewardBlend(env=1e308)),  # each turn is finite, and their sum is 2e308
        ([1e300, 0.0], RewardBlend(env=1e300)),
    ],
)
def test_weights_that_overflow_are_an_error_that_names_them(rewards: list[float], weights: RewardBlend) -> None:
    expected = rf"judge\.reward_blend: env = {weights.env:g}, event = .* lower them".replace("+", r"\+")
    with pytest.raises(ConfigError, match=expected):
        blend(episode(rewards), judgement([1.0, 1.0], outcome=1.0), weights)
    with pytest.raises(ConfigError, match=expected):
        unjudged(episode(rewards), weights)


def test_what_weighs_nothing_may_be_missing() -> None:
    assert blend(episode([0.0, 1.0]), judgement(), RewardBlend(env=3.0)).reward == pytest.approx(3.0)


def test_an_environment_that_scored_nothing_is_no_0() -> None:
    with pytest.raises(UnscoredError, match=r"gave None at every turn, and judge\.reward_blend\.env is 0\.2"):
        blend(episode([None, None]), judgement([1.0, 1.0], outcome=1.0), HALF)


@pytest.mark.parametrize("played", [episode([1.0], outcome=Outcome.ENV_ERROR), episode([])])
def test_what_was_not_played_cannot_be_scored(played) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnscoredError, match="nothing was played that could be judged"):
        blend(played, judgement([1.0], outcome=1.0), HALF)


def test_blending_twice_is_refused() -> None:
    once = blend(episode([1.0]), judgement([1.0], outcome=1.0), HALF)
    with pytest.raises(RecordError, match="'judge_event' has the judge's name"):
        blend(once, judgement([1.0], outcome=1.0), HALF)


def test_step_rewards_stand_for_the_environments_return() -> None:
    scored = blend(
        episode([1.0, 1.0], terms=[{"won": 1.0}, {"won": 1.0}]), judgement(outcome=0.5),
        RewardBlend(env=2.0, outcome=1.0), rewards=lambda _: (0.0, 3.0),
    )  # fmt: skip
    assert [turn.reward for turn in scored.turns] == [0.0, 6.5]
    assert scored.turns[1].reward_terms == {"env": 6.0, "judge_outcome": 0.5}


def test_an_event_score_reaches_its_turn_under_turn_level_credit() -> None:
    said = judgement([1.0, 0.0, 0.0], outcome=0.0)
    scored = blend(episode([0.0, 0.0, 0.0]), said, RewardBlend(env=0.0, event=1.0))
    returns = returns_of(scored, step_rewards=StepRewardSettings())
    # to_go[k] sums from turn k on: the judge's 1 of turn 0 is in the first alone
    assert returns.to_go.tolist() == [1.0, 0.0, 0.0]


numbers = st.floats(-10, 10, allow_nan=False)
weights = st.floats(0, 5, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.tuples(st.none() | numbers, numbers), min_size=1, max_size=6), numbers, weights, weights, weights)
def test_the_return_is_the_formula_for_any_numbers(turns, outcome, env, event, last) -> None:  # type: ignore[no-untyped-def]
    rewards = [reward for reward, _ in turns]
    if env > 0 and all(reward is None for reward in rewards):
        return
    totals = [total for _, total in turns]
    scored = blend(episode(rewards), judgement(totals, outcome), RewardBlend(env=env, event=event, outcome=last))
    by_hand = env * sum(reward or 0.0 for reward in rewards) + event * sum(totals) + last * outcome
    given_rewards = [turn.reward for turn in scored.turns if turn.reward is not None]
    assert sum(given_rewards) == pytest.approx(by_hand, abs=1e-9)

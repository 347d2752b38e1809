"""Baseline and scale, chosen independently, at both levels; and that leave-one-out is right in expectation.

Every expected number is written out by hand from the definitions: statistics of the group, of the batch, of the run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import get_args

import numpy as np
import pytest

from gspo_gym.errors import RecordError
from gspo_gym.learning.advantages import RunningReturns, batch_advantages, is_constant
from gspo_gym.learning.credit import Returns
from gspo_gym.learning.settings import AdvantageSettings

ROUNDING = 1e-6  # float32 results of order 1
BASELINES = get_args(AdvantageSettings.model_fields["baseline"].annotation)
SCALES = ("group", "batch", "running", "none")


def earned(*rewards: float) -> Returns:
    to_go = np.cumsum(np.array(rewards)[::-1])[::-1]
    return Returns(float(sum(rewards)), to_go, float(np.abs(rewards).sum()))


def compare(groups, settings, running=None):
    """Per group, per episode, the list of its turns' advantages."""
    values = iter(batch_advantages([[earned(*r) for r in group] for group in groups], settings, running).values)
    return [[next(values).tolist() for _ in group] for group in groups]


# Returns 1, 3 and 0, 0, 4: group means 2 and 4/3, variances 2 and (16 + 16 + 64) / 9 / 2 = 16/3.
GROUPS = [[[1.0], [3.0]], [[0.0], [0.0], [4.0]]]
# The batch: mean 8/5, variance (0.36 + 1.96 + 2.56 + 2.56 + 5.76) / 4 = 3.3.
# The run: three returns of 0 before, so that 8 of mean 1 have a variance of (3 * 1 + 0 + 4 + 1 + 1 + 9) / 7 = 18/7.
# The role's moving mean was 1/2.
BEFORE = RunningReturns(count=3, mean=0.0, squared_deviations=0.0, magnitude=0.0, role_means={"": 0.5})
CENTRED = {
    "group": [[-1, 1], [-4 / 3, -4 / 3, 8 / 3]],
    "leave_one_out": [[1 - 3, 3 - 1], [0 - 2, 0 - 2, 4 - 0]],
    "batch": [[-0.6, 1.4], [-1.6, -1.6, 2.4]],
    "running": [[0, 2], [-1, -1, 3]],
    "role": [[0.5, 2.5], [-0.5, -0.5, 3.5]],
    "none": [[1, 3], [0, 0, 4]],
}
STDS = {
    "group": (math.sqrt(2), math.sqrt(16 / 3)),
    "batch": (math.sqrt(3.3),) * 2,
    "running": (math.sqrt(18 / 7),) * 2,
    "none": (1, 1),
}


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_baseline_goes_with_every_scale(baseline, scale):
    settings = AdvantageSettings(baseline=baseline, scale=scale)
    for group, centred, std in zip(compare(GROUPS, settings, BEFORE), CENTRED[baseline], STDS[scale], strict=True):
        assert [a for (a,) in group] == pytest.approx([c / std for c in centred], abs=ROUNDING)


# Returns-to-go by turn: (1), (3, 3) and (2), (2, 1), in which an ended episode counts with 0 from then on.
TURN_GROUPS = [[[1.0], [0.0, 3.0]], [[2.0], [1.0, 1.0]]]
TURN_CENTRED = {
    # first group: means 2 and 3/2; second: its first turn is the same for both, the second has mean 1/2
    "group": [[[-1], [1, 1.5]], [[0], [0, 0.5]]],
    "leave_one_out": [[[1 - 3], [3 - 1, 3 - 0]], [[0], [0, 1 - 0]]],
    # over all four: (1 + 3 + 2 + 2) / 4 = 2 and (0 + 3 + 0 + 1) / 4 = 1
    "batch": [[[-1], [1, 2]], [[0], [0, 0]]],
    # over the six turns that were played: (1 + 3 + 3 + 2 + 2 + 1) / 6 = 2
    "running": [[[-1], [1, 1]], [[0], [0, -1]]],
    "role": [[[1], [3, 3]], [[2], [2, 1]]],  # nothing was seen before: 0
    "none": [[[1], [3, 3]], [[2], [2, 1]]],
}
TURN_STDS = {
    # the larger of the turns': of (1, 3) and (0, 3): 2 and 4.5; of (0, 1), the other being constant: 0.5
    "group": (math.sqrt(4.5), math.sqrt(0.5)),
    # of (1, 3, 2, 2) and (0, 3, 0, 1): 2/3 and (1 + 4 + 1 + 0) / 3
    "batch": (math.sqrt(2),) * 2,
    # (1 + 1 + 1 + 0 + 0 + 1) / 5
    "running": (math.sqrt(0.8),) * 2,
    "none": (1, 1),
}


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_baseline_goes_with_every_scale_turn_by_turn(baseline, scale):
    settings = AdvantageSettings(level="turn", baseline=baseline, scale=scale)
    for group, centred, std in zip(
        compare(TURN_GROUPS, settings), TURN_CENTRED[baseline], TURN_STDS[scale], strict=True
    ):
        for turns, expected in zip(group, centred, strict=True):
            assert turns == pytest.approx([c / std for c in expected], abs=ROUNDING)


def test_the_mean_of_a_role_moves_by_a_twentieth_an_episode_after_its_batch():
    def of(role, *rewards):
        return dataclasses.replace(earned(*rewards), role=role)

    settings = AdvantageSettings(baseline="role")
    assert settings.scale == "none"
    first = batch_advantages([[of("a", 1.0), of("a", 3.0)], [of("b", 4.0)]], settings)
    assert [v.tolist() for v in first.values] == [[1.0], [3.0], [4.0]]  # all means are 0 yet
    # 0.95 * (0.95 * 0 + 0.05 * 1) + 0.05 * 3, and 0.05 * 4
    assert first.running.role_means == pytest.approx({"a": 0.1975, "b": 0.2})
    second = batch_advantages([[of("b", 1.0), of("b", 0.0)], [of("c", 1.0)]], settings, first.running)
    assert [v.item() for v in second.values] == pytest.approx([0.8, -0.2, 1.0], abs=ROUNDING)
    assert second.running.role_means == pytest.approx({"a": 0.1975, "b": 0.95 * (0.95 * 0.2 + 0.05), "c": 0.05})
    # At level "turn" an episode counts with the mean of its returns-to-go, here of 3, 3 and 1.
    turns = batch_advantages([[of("a", 0.0, 2.0, 1.0)]], AdvantageSettings(level="turn", baseline="role"))
    assert turns.running.role_means == pytest.approx({"a": 0.05 * 7 / 3})
    restored = RunningReturns(**json.loads(json.dumps(dataclasses.asdict(second.running))))
    assert restored == second.running


def test_constant_groups_still_differ_from_each_other_when_the_batch_is_the_baseline():
    # mean 1/2, variance 4 * (1/4) / 3
    settings = AdvantageSettings(baseline="batch")
    result = batch_advantages([[earned(1.0)] * 2, [earned(0.0)] * 2], settings)
    a = 0.5 * math.sqrt(3)
    assert [v.item() for v in result.values] == pytest.approx([a, a, -a, -a], abs=ROUNDING)
    assert result.constant_groups == (True, True)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("none", [1, 0, 2]), ("role", [1, 0, 2]), ("batch", [0, -1, 1]), ("running", [0, -1, 1]), ("group", [0, 0, 0])],
)
def test_groups_of_one_learn_from_anything_but_their_group(baseline, expected):
    # returns 1, 0, 2: mean 1, std 1
    values = compare([[[1.0]], [[0.0]], [[2.0]]], AdvantageSettings(baseline=baseline))
    assert [a for ((a,),) in values] == pytest.approx(expected, abs=ROUNDING)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", ["group", "batch", "running"])
@pytest.mark.parametrize("level", ["trajectory", "turn"])
def test_nothing_is_divided_by_a_spread_of_rounding_alone(level, baseline, scale):
    settings = AdvantageSettings(level=level, baseline=baseline, scale=scale)
    assert compare([[[1.0], [1.0 + 1.2e-7]]], settings) == [[[0.0], [0.0]]]


def test_a_spread_of_the_run_counts_from_above_a_millionth_on():
    # the run's deviations are divided by 3 - 1: a std of 1e-6, which is rounding at returns of 1, or a little more
    settings = AdvantageSettings(baseline="none", scale="running")
    assert math.sqrt(2e-12 / 2) == 1e-6
    for squares, expected in ((2e-12, 0.0), (2.5e-12, 1 / math.sqrt(1.25e-12))):
        before = RunningReturns(count=2, mean=1.0, squared_deviations=squares, magnitude=1.0)
        assert compare([[[1.0]]], settings, before) == [[[pytest.approx(expected)]]]


@pytest.mark.parametrize("level", ["trajectory", "turn"])
@pytest.mark.parametrize(
    ("group", "expected"),
    [([], True), ([[1.0]], True), ([[1.0], [1.0 + 1e-7]], True), ([[1.0], [2.0]], False), ([[0.0], [1.0]], False)],
)
def test_a_group_is_constant_where_nobody_did_better(level, group, expected):
    assert is_constant([earned(*r) for r in group], AdvantageSettings(level=level)) is expected


def test_equal_returns_by_different_ways_are_constant_for_episodes_and_not_for_turns():
    group = [earned(1.0, 0.0), earned(0.0, 1.0)]
    assert is_constant(group, AdvantageSettings())
    assert not is_constant(group, AdvantageSettings(level="turn"))


# --- in expectation ---------------------------------------------------------------------------------------------------

STOP, GOOD = (
    0.3,
    0.6,
)  # probabilities of ending at once, and of the good answer after going on; logits are the parameters
# probability, rewards by turn, and the gradient of log-probability by turn: (d/d logit of stop, d/d logit of good)
EPISODES = [
    (STOP, (0.4,), [(1 - STOP, 0.0)]),
    ((1 - STOP) * GOOD, (0.1, 1.0), [(-STOP, 0.0), (0.0, 1 - GOOD)]),
    ((1 - STOP) * (1 - GOOD), (0.1, 0.0), [(-STOP, 0.0), (0.0, -GOOD)]),
]
# J = STOP * 0.4 + (1 - STOP) (0.1 + GOOD)
TRUE_GRADIENT = np.array([STOP * (1 - STOP) * (0.4 - 0.1 - GOOD), (1 - STOP) * GOOD * (1 - GOOD)])
G = 3


def expected_gradient(advantages_of):
    """Exactly, over all 27 groups of three episodes: E of the mean over episodes of sum_k A_k grad log p(action k)."""
    total = np.zeros(2)
    for group in itertools.product(EPISODES, repeat=G):
        probability = math.prod(p for p, _, _ in group)
        advantages = advantages_of([rewards for _, rewards, _ in group])
        for (_, _, gradients), values in zip(group, advantages, strict=True):
            for gradient, advantage in zip(gradients, values, strict=True):
                total += probability * advantage * np.array(gradient) / G
    return total


@pytest.mark.parametrize("level", ["trajectory", "turn"])
@pytest.mark.parametrize(("baseline", "factor"), [("leave_one_out", 1), ("none", 1), ("group", (G - 1) / G)])
def test_the_expected_gradient_is_that_of_the_return(level, baseline, factor):
    settings = AdvantageSettings(level=level, baseline=baseline, scale="none")
    gradient = expected_gradient(lambda group: compare([group], settings)[0])
    assert gradient == pytest.approx(factor * TRUE_GRADIENT, abs=ROUNDING)


def test_comparing_immediate_rewards_among_those_who_play_would_teach_to_stop():
    # as AgileRL does at the level of turns: going on is worth 0.7 and stopping 0.4, but the first turn earns 0.1 or 0.4
    def immediate(group):
        def centred(k):
            return [r[k] - np.mean([s[k] for s in group if len(s) > k]) if len(r) > k else None for r in group]

        by_turn = [centred(k) for k in range(max(len(r) for r in group))]
        return [[column[i] for column in by_turn if column[i] is not None] for i in range(len(group))]

    assert TRUE_GRADIENT[0] < 0, "the logit of stopping should fall"
    assert expected_gradient(immediate)[0] > 0, "and it would rise"


def test_a_group_divided_by_its_success_rate_is_maxrl():
    """(r - mean) / mean: of one success in four 3 and -1, of three in four 1/3 and -1; of none, and of all, 0."""
    settings = AdvantageSettings(scale="mean")
    returns = [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    groups = [[[0.0, float(r)] for r in group] for group in returns]
    advantages = [[episode[0] for episode in group] for group in compare(groups, settings)]
    expected = [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0] * 4, [0] * 4]
    for group, values in zip(advantages, expected, strict=True):
        assert group == pytest.approx(values, abs=ROUNDING)


@pytest.mark.parametrize("value", [0.5, -1.0, 2.0, 1 + 1e-5])
def test_a_success_rate_is_of_returns_of_0_and_1(value):
    settings = AdvantageSettings(scale="mean")
    compare([[[1.0], [0.0], [1 + 1e-7]]], settings)  # rounding is allowed
    with pytest.raises(RecordError, match=r'"mean" \(MaxRL\) divides by a success rate: expected returns of 0 or 1'):
        compare([[[1.0], [value]]], settings)


@pytest.mark.parametrize("other", [{"baseline": "leave_one_out"}, {"baseline": "none"}, {"level": "turn"}])
def test_a_success_rate_is_of_a_group_and_of_whole_episodes(other):
    with pytest.raises(ValueError, match="needs baseline"):
        AdvantageSettings(scale="mean", **other)


# --- the level that is chosen -----------------------------------------------------------------------------------------

AUTO = AdvantageSettings(level="auto", scale="none")
# Leave one out. EARLY: returns 2 and 0, so 2, 2 | -2, -2 by returns, 16 in squares; to go (2, 0) and (0, 0), so
# 2, 0 | -2, 0, 8 in squares. LATE: returns 1 and 1, so 0 by returns; to go (1, 1) and (1), so 0, 1 | 0, 1 in squares.
EARLY, EARLY_WHOLE, EARLY_TURNS = [[2.0, 0.0], [0.0, 0.0]], [[2, 2], [-2, -2]], [[2, 0], [-2, 0]]
LATE, LATE_WHOLE, LATE_TURNS = [[0.0, 1.0], [1.0]], [[0, 0], [0]], [[0, 1], [0]]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([EARLY, EARLY], [EARLY_TURNS, EARLY_TURNS]),
        ([LATE, LATE], [LATE_WHOLE, LATE_WHOLE]),
        ([EARLY, LATE], [EARLY_WHOLE, LATE_TURNS]),  # each by the other, and not by itself
        ([EARLY, LATE, EARLY], [EARLY_TURNS, LATE_TURNS, EARLY_TURNS]),  # 8 + 1 < 16 + 0, and 16 < 32
        ([EARLY], [EARLY_WHOLE]),  # there is no other
        ([[[1.0], [0.0]], EARLY], [[[1], [-1]], EARLY_WHOLE]),  # both levels are alike for one turn: 2 is not below 2
    ],
)
def test_a_group_has_the_level_that_is_quieter_in_the_other_groups(groups, expected):
    assert compare(groups, AUTO) == expected


def test_a_chosen_level_has_its_own_scale_and_constant_groups():
    # of turns: the std of (2, 0) is sqrt(2); of returns: LATE is constant
    settings = AdvantageSettings(level="auto")
    assert settings.baseline == "leave_one_out"
    assert compare([EARLY, EARLY], settings)[0] == [[pytest.approx(math.sqrt(2)), 0], [pytest.approx(-math.sqrt(2)), 0]]
    constant = [
        batch_advantages([[earned(*r) for r in g] for g in groups], settings).constant_groups
        for groups in ([LATE, LATE], [EARLY, LATE])
    ]
    assert constant == [(True, True), (False, False)]
    assert not is_constant([earned(*r) for r in LATE], settings)


def test_the_expected_gradient_of_a_chosen_level_is_that_of_the_return():
    """Exactly, over all pairs of groups of two; a level that its own group chooses has another one."""
    single = itertools.product(EPISODES, repeat=2)
    pairs = [(math.prod(p for p, _, _ in group), group) for group in single]

    def gradient(advantages_of):
        total = np.zeros(2)
        for (p, group), (q, other) in itertools.product(pairs, repeat=2):
            for (_, _, slopes), values in zip(group, advantages_of(group, other), strict=True):
                total += p * q * np.array(slopes).T @ np.array(values) / len(group)
        return total

    def rewards(group):
        return [list(r) for _, r, _ in group]

    chosen = gradient(lambda group, other: compare([rewards(group), rewards(other)], AUTO)[0])
    assert chosen == pytest.approx(TRUE_GRADIENT, abs=ROUNDING)
    own_choice = gradient(lambda group, _: compare([rewards(group), rewards(group)], AUTO)[0])
    assert own_choice != pytest.approx(TRUE_GRADIENT, abs=1e-3)


@pytest.mark.parametrize("other", [{"baseline": "running"}, {"scale": "running"}, {"discount": 0.9}])
def test_a_chosen_level_has_no_statistics_or_discount_of_one_level(other):
    with pytest.raises(ValueError, match="level"):
        AdvantageSettings(level="auto", **other)

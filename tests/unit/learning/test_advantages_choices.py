"""Baseline and scale, chosen independently, at both levels; and that leave-one-out is right in expectation.

Every expected number is written out by hand from the definitions: statistics of the group, of the batch, of the run.
"""

from __future__ import annotations

import itertools
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
BEFORE = RunningReturns(count=3, mean=0.0, squared_deviations=0.0, magnitude=0.0)
CENTRED = {
    "group": [[-1, 1], [-4 / 3, -4 / 3, 8 / 3]],
    "leave_one_out": [[1 - 3, 3 - 1], [0 - 2, 0 - 2, 4 - 0]],
    "batch": [[-0.6, 1.4], [-1.6, -1.6, 2.4]],
    "running": [[0, 2], [-1, -1, 3]],
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


def test_constant_groups_still_differ_from_each_other_when_the_batch_is_the_baseline():
    # mean 1/2, variance 4 * (1/4) / 3
    settings = AdvantageSettings(baseline="batch")
    result = batch_advantages([[earned(1.0)] * 2, [earned(0.0)] * 2], settings)
    a = 0.5 * math.sqrt(3)
    assert [v.item() for v in result.values] == pytest.approx([a, a, -a, -a], abs=ROUNDING)
    assert result.constant_groups == (True, True)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("none", [1, 0, 2]), ("batch", [0, -1, 1]), ("running", [0, -1, 1]), ("group", [0, 0, 0])],
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

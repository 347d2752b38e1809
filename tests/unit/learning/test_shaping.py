from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch

from gspo_gym.errors import CheckpointError, RecordError
from gspo_gym.learning import shaping
from gspo_gym.learning.batching import LabelledBatch, TrainBatch, select_trajectories
from gspo_gym.learning.settings import AdvantageSettings, RewardSettings
from gspo_gym.learning.shaping import AdvantageShaper, whiten

# log(old / reference) and advantage of each sampled token, trajectory by trajectory; trajectory 1 spans two rows.
KL = [[0.5, -0.25], [1.0, 0.5, 2.0], [-0.5]]
ADVANTAGES = [[1.0, 1.0], [-2.0, -2.0, 3.0], [0.5]]


def make_batch(kl=KL, advantages=ADVANTAGES):
    """Rows: trajectory 0; trajectory 1 but for its last token; trajectory 2; the last token of trajectory 1."""
    rows = [(0, kl[0], advantages[0]), (1, kl[1][:-1], advantages[1][:-1]), (2, kl[2], advantages[2])]
    rows.append((1, kl[1][-1:], advantages[1][-1:]))
    T = 2 * max(len(row[1]) for row in rows) + 1
    mask = torch.zeros(len(rows), T, dtype=torch.bool)
    gap, advantage = torch.full((len(rows), T), 7.0), torch.zeros(len(rows), T)
    for b, (_, kl_b, advantages_b) in enumerate(rows):
        places = slice(1, 2 * len(kl_b), 2)  # every other token is sampled
        mask[b, places] = True
        gap[b, places] = torch.tensor(kl_b)
        advantage[b, places] = torch.tensor(advantages_b)
    old = torch.where(mask, -1.0, 0.0)
    return LabelledBatch(
        token_ids=torch.ones(len(rows), T, dtype=torch.int64),
        attention_mask=torch.ones(len(rows), T, dtype=torch.bool),
        action_mask=mask,
        turn_index=mask.long() - 1,
        trajectory_index=torch.tensor([row[0] for row in rows]),
        rollout_logprobs=torch.zeros(len(rows), T),
        advantages=advantage,
        is_masked=torch.zeros(len(rows), dtype=torch.bool),
        old_logprobs=old,
        ref_logprobs=old - gap,
    )


def shaper_of(rewards=None, **advantages):
    return AdvantageShaper(AdvantageSettings(**advantages), RewardSettings(**(rewards or {})))


def shape(batch, rewards=None, **advantages):
    """The advantages by trajectory, and the metrics."""
    shaped = shaper_of(rewards, **advantages).shape([batch])
    return by_trajectory(shaped.parts[0]), shaped.metrics


def by_trajectory(batch):
    values = [[], [], []]
    for b, t in batch.action_mask.nonzero().tolist():
        values[int(batch.trajectory_index[b])].append(batch.advantages[b, t].item())
    return values


def assert_close(actual, expected, abs=1e-6):
    assert [pytest.approx(row, abs=abs) for row in expected] == actual


def test_without_a_setting_nothing_changes():
    actual, metrics = shape(make_batch())
    assert actual == ADVANTAGES
    assert metrics == {}


def test_kl_in_the_reward_counts_from_a_token_to_the_end_of_its_episode():
    """beta = 0.1. Trajectory 1 over both of its rows: 1 + 0.5 + 2 = 3.5, then 2.5, then 2."""
    actual, metrics = shape(make_batch(), rewards={"kl_coef": 0.1})
    expected = [[1 - 0.025, 1 + 0.025], [-2 - 0.35, -2 - 0.25, 3 - 0.2], [0.5 + 0.05]]
    assert_close(actual, expected)
    # means of the trajectories: 0.125, 3.5 / 3, -0.5
    assert metrics == {"shaping/kl": pytest.approx((0.125 + 3.5 / 3 - 0.5) / 3), "shaping/kl_coef": 0.1}


def test_kl_shaping_moves_advantage_within_an_episode_and_adds_none():
    """beta = 0.1; the mean of trajectory 1 is 3.5 / 3 over both of its rows."""
    actual, metrics = shape(make_batch(), kl_shaping_coef=0.1)
    mean = 3.5 / 3
    expected = [
        [1 + 0.1 * (0.125 - 0.5), 1 + 0.1 * (0.125 + 0.25)],
        [-2 + 0.1 * (mean - 1), -2 + 0.1 * (mean - 0.5), 3 + 0.1 * (mean - 2)],
        [0.5],
    ]
    assert_close(actual, expected)
    for before, after in zip(ADVANTAGES, actual, strict=True):
        assert sum(after) == pytest.approx(sum(before), abs=1e-6)
    assert set(metrics) == {"shaping/kl"}


def test_whitening_over_tokens_is_bessels():
    every = [a for trajectory in ADVANTAGES for a in trajectory]
    mean, scale = statistics.mean(every), math.sqrt(statistics.variance(every) + 1e-8)
    actual, _ = shape(make_batch(), whiten="tokens")
    assert_close(actual, [[(a - mean) / scale for a in trajectory] for trajectory in ADVANTAGES])


def test_whitening_over_trajectories_is_the_populations_of_one_advantage_each():
    """However many tokens they have: 1, -2 and 0.5."""
    advantages = [[1.0] * 2, [-2.0] * 3, [0.5]]
    mean, scale = statistics.mean([1, -2, 0.5]), statistics.pstdev([1, -2, 0.5]) + 1e-8
    actual, _ = shape(make_batch(advantages=advantages), whiten="trajectories")
    assert_close(actual, [[(a - mean) / scale for a in trajectory] for trajectory in advantages])


def test_whitening_over_trajectories_gives_each_the_same_weight_where_its_tokens_differ():
    weighted = [(a, 1 / (3 * len(trajectory))) for trajectory in ADVANTAGES for a in trajectory]
    mean = sum(share * a for a, share in weighted)
    scale = math.sqrt(sum(share * (a - mean) ** 2 for a, share in weighted)) + 1e-8
    actual, _ = shape(make_batch(), whiten="trajectories")
    assert_close(actual, [[(a - mean) / scale for a in trajectory] for trajectory in ADVANTAGES])


def test_two_tokens_are_whitened():
    """1 and 2: mean 1.5, Bessel's variance 0.5."""
    part = shaper_of(whiten="tokens").shape([select_trajectories(make_batch(advantages=[[1.0, 2.0], *KL[1:]]), [0])])
    assert part.parts[0].advantages[0, [1, 3]].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_the_smallest_advantages_are_scaled_by_what_is_added_to_the_spread():
    """+-1e-4: Bessel's variance is 2e-8, plus 1e-8. +-3e-8: the population's std is 3e-8, plus 1e-8."""
    for value, is_sample, expected in ((1e-4, True, 3**-0.5), (3e-8, False, 0.75)):
        values = torch.tensor([value, -value], dtype=torch.float64)
        (scaled,) = whiten([values], [torch.ones_like(values)], is_sample=is_sample)
        assert scaled.tolist() == pytest.approx([expected, -expected])


def test_advantages_differ_by_rounding_up_to_a_millionth_of_the_largest():
    for low, expected in ((1e6 - 1, [0, 0]), (1e6 - 1.01, [1, -1])):
        values = torch.tensor([1e6, low], dtype=torch.float64)
        assert whiten([values], [torch.ones(2)], is_sample=False)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rewards", "advantages", "uses_reference", "gives_advantages"),
    [
        ({}, {"clip": 1.0}, False, False),
        ({}, {"whiten": "tokens"}, False, True),
        ({"kl_coef": 0.1}, {}, True, True),
        ({}, {"kl_shaping_coef": 0.1}, True, True),
    ],
)
def test_what_a_shaper_needs_and_gives(rewards, advantages, uses_reference, gives_advantages):
    shaper = shaper_of(rewards, **advantages)
    assert (shaper.uses_reference, shaper.gives_advantages) == (uses_reference, gives_advantages)


@pytest.mark.parametrize("whiten", ["tokens", "trajectories"])
def test_advantages_that_differ_by_rounding_become_exactly_zero(whiten):
    """1 and 1 + 1.2e-7 would become about +-1e-3 by the formula of the tokens, +-1 by that of the trajectories."""
    advantages = [[1.0, 1.0], [1.0000001192, 1.0, 1.0], [1.0]]
    assert shape(make_batch(advantages=advantages), whiten=whiten)[0] == [[0.0] * 2, [0.0] * 3, [0.0]]


def test_a_single_token_is_not_whitened():
    batch = select_trajectories(make_batch(), [2])
    shaped = shaper_of(whiten="tokens").shape([batch]).parts[0]
    assert torch.equal(shaped.advantages, batch.advantages)


def test_clipping_comes_last_and_is_counted():
    every = [a for trajectory in ADVANTAGES for a in trajectory]
    mean, scale = statistics.mean(every), math.sqrt(statistics.variance(every) + 1e-8)
    actual, metrics = shape(make_batch(), whiten="tokens", clip=0.5)
    expected = [[max(-0.5, min(0.5, (a - mean) / scale)) for a in trajectory] for trajectory in ADVANTAGES]
    assert_close(actual, expected)
    assert metrics == {"advantage/clipped_fraction": sum(abs((a - mean) / scale) > 0.5 for a in every) / 6}
    assert 0 < metrics["advantage/clipped_fraction"] < 1


def test_the_order_is_reward_shaping_whitening_clip():
    """Zero advantages, so that what is whitened is the KL alone: -0.2 of the sums to go plus 0.1 of the shaping."""
    zeros = [[0.0] * len(trajectory) for trajectory in KL]
    actual, _ = shape(make_batch(advantages=zeros), rewards={"kl_coef": 0.2}, kl_shaping_coef=0.1, whiten="tokens")
    raw = []
    for trajectory in KL:
        mean = statistics.mean(trajectory)
        raw.append([-0.2 * sum(trajectory[t:]) + 0.1 * (mean - x) for t, x in enumerate(trajectory)])
    every = [a for trajectory in raw for a in trajectory]
    mean, scale = statistics.mean(every), math.sqrt(statistics.variance(every) + 1e-8)
    assert_close(actual, [[(a - mean) / scale for a in trajectory] for trajectory in raw])


@pytest.mark.parametrize("whiten", ["tokens", "trajectories"])
@pytest.mark.parametrize("division", [[[0], [1], [2]], [[2, 0], [1]], [[1, 2, 0]]])
def test_the_division_into_microbatches_changes_nothing(whiten, division):
    settings = {"kl_shaping_coef": 0.3, "whiten": whiten, "clip": 1.0}
    whole, metrics = shape(make_batch(), rewards={"kl_coef": 0.1}, **settings)
    parts = [select_trajectories(make_batch(), trajectories) for trajectories in division]
    shaped = shaper_of({"kl_coef": 0.1}, **settings).shape(parts)
    for trajectories, part in zip(division, shaped.parts, strict=True):
        # float32 is rounded to after float64 sums in another order
        assert_close(by_trajectory(part)[: len(trajectories)], [whole[i] for i in trajectories], abs=1e-6)
    assert shaped.metrics == pytest.approx(metrics)


@pytest.mark.parametrize(
    ("target", "horizon", "factor"),
    [
        # mean KL of the trajectories (0.125 + 3.5 / 3 - 0.5) / 3 = 0.2639; 3 trajectories
        (0.25, 30, 1 + (0.79166667 / 3 / 0.25 - 1) * 3 / 30),  # an error of 5.6 %
        (0.1, 30, 1 + 0.2 * 3 / 30),  # far above the target: 20 % at most
        (10.0, 30, 1 - 0.2 * 3 / 30),  # far below
        (10.0, 1, 1 - 0.2),  # one horizon at a time
    ],
)
def test_an_adaptive_beta_follows_its_target(target, horizon, factor, monkeypatch):
    monkeypatch.setattr(shaping, "_KL_HORIZON", horizon)
    shaper = shaper_of({"kl_coef": 0.1, "kl_target": target})
    assert shaper.shape([make_batch()]).metrics["shaping/kl_coef"] == 0.1, "used first, changed then"
    assert shaper.counters() == {"shaping.kl_coef": pytest.approx(0.1 * factor, rel=1e-6)}
    assert shaper.shape([make_batch()]).metrics["shaping/kl_coef"] == pytest.approx(0.1 * factor, rel=1e-6)


def test_an_adaptive_beta_is_restored_and_a_fixed_one_has_no_state():
    rewards = {"kl_coef": 0.1, "kl_target": 0.01}
    first, second, fixed = shaper_of(rewards), shaper_of(rewards), shaper_of({"kl_coef": 0.1})
    first.shape([make_batch()])
    second.restore(first.counters())
    assert second.counters() == first.counters()
    assert fixed.counters() == {}
    with pytest.raises(CheckpointError, match="kl_target"):
        second.restore({})
    with pytest.raises(CheckpointError, match="kl_target"):
        fixed.restore(first.counters())


def test_an_unscored_batch_is_refused_where_a_reference_is_needed():
    scored = make_batch()
    fields = {field.name: getattr(scored, field.name) for field in dataclasses.fields(TrainBatch)}
    shaper = shaper_of({"kl_coef": 0.1})
    for batch in (TrainBatch(**fields), dataclasses.replace(scored, ref_logprobs=None)):
        with pytest.raises(RecordError, match="reference"):
            shaper.shape([batch])


def test_what_is_left_out_of_the_batch_leaves_nothing_to_shape():
    assert shaper_of({"kl_coef": 0.1}, whiten="tokens", clip=1.0).shape([]).parts == []

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from gspo_gym.learning.batching import LabelledBatch
from gspo_gym.learning.correction import correct, pool_tokens
from gspo_gym.learning.settings import CorrectionSettings

LN2 = math.log(2)


@pytest.fixture
def batch():
    """Trajectory 0 in two rows, trajectory 1 in one; x marks log2(old / rollout) of the sampled tokens, by turn:

    row 0 (trajectory 0): turn 0: +1 +3; turn 1: -2
    row 1 (trajectory 0): turn 1: +2
    row 2 (trajectory 1): turn 0: -4 0
    """
    turn_index = torch.tensor([[-1, 0, 0, -1, 1], [-1, 1, -1, -1, -1], [-1, -1, 0, 0, -1]])
    gap = torch.tensor([[9.0, 1, 3, 9, -2], [9, 2, 9, 9, 9], [9, 9, -4, 0, 9]], dtype=torch.float64) * LN2
    mask = turn_index >= 0
    rollout = torch.where(mask, -1.5, 0.0)
    return LabelledBatch(
        token_ids=torch.ones(3, 5, dtype=torch.int64),
        attention_mask=torch.ones(3, 5, dtype=torch.bool),
        action_mask=mask,
        turn_index=turn_index,
        trajectory_index=torch.tensor([0, 0, 1]),
        rollout_logprobs=rollout,
        advantages=torch.where(mask, torch.tensor([[1.0], [1.0], [-1.0]]), 0.0),
        is_masked=torch.zeros(3, dtype=torch.bool),
        old_logprobs=torch.where(mask, rollout + gap, 0.0),
        ref_logprobs=None,
    )


@pytest.mark.parametrize(
    ("unit", "pools"),
    [
        ("token", [0, 1, 2, 3, 4, 5]),
        ("turn", [0, 0, 1, 1, 2, 2]),  # turn 1 of trajectory 0 lies in two rows
        ("segment", [0, 0, 0, 1, 2, 2]),
        ("trajectory", [0, 0, 0, 0, 1, 1]),
    ],
)
def test_tokens_are_pooled_by_their_unit(batch, unit, pools):
    found = pool_tokens(batch, unit)
    assert found.of_token.tolist() == pools
    assert found.num_tokens.tolist() == [pools.count(pool) for pool in range(max(pools) + 1)]


def weights_of(batch, now=None, **settings):
    correction = correct(batch, batch.old_logprobs if now is None else now, CorrectionSettings(**settings))
    assert bool((correction.weights[~batch.action_mask] == 1).all())
    return correction.weights[batch.action_mask].tolist(), correction


WIDE = {"high": 1e6}


@pytest.mark.parametrize(
    ("level", "log2_of_weights"),
    [
        ("token", [1, 3, -2, 2, -4, 0]),
        # turn 0: (1 + 3) / 2; turn 1 over two rows: (-2 + 2) / 2; the other trajectory's turn 0: -4 / 2
        ("turn", [2, 2, 0, 0, -2, -2]),
        # (1 + 3 - 2 + 2) / 4 and -4 / 2
        ("trajectory", [1, 1, 1, 1, -2, -2]),
    ],
)
def test_weights_are_geometric_means_over_their_level(batch, level, log2_of_weights):
    weights, correction = weights_of(batch, level=level, **WIDE)
    assert weights == pytest.approx([2.0**x for x in log2_of_weights])
    assert (correction.num_truncated, correction.num_masked, correction.num_off_policy) == (0, 0, 0)


def test_truncation_cuts_from_above_only(batch):
    weights, correction = weights_of(batch, level="token", mode="truncate", high=3.0)
    assert weights == pytest.approx([2, 3, 0.25, 3, 1 / 16, 1])
    assert correction.num_truncated == 2


def test_masking_leaves_out_what_is_outside_and_keeps_the_weight_inside(batch):
    weights, correction = weights_of(batch, level="token", mode="mask", low=0.2, high=5.0)
    assert weights == pytest.approx([2, 0, 0.25, 4, 0, 1])
    assert correction.num_masked == 2
    weights, correction = weights_of(batch, level="trajectory", mode="mask", low=0.5, high=5.0)
    assert weights == pytest.approx([2, 2, 2, 2, 0, 0])
    assert correction.num_masked == 2


def test_a_long_episode_is_weighted_as_a_short_one():
    """5,000 tokens each 1 % likelier for the learner: w = 1.01, not 1.01^5000 = 4e21."""
    T = 5001
    mask = torch.arange(T)[None] > 0
    long = LabelledBatch(
        token_ids=torch.ones(1, T, dtype=torch.int64), attention_mask=torch.ones(1, T, dtype=torch.bool),
        action_mask=mask, turn_index=mask.long() - 1, trajectory_index=torch.tensor([0]),
        rollout_logprobs=torch.where(mask, -1.0, 0.0), advantages=torch.zeros(1, T),
        is_masked=torch.tensor([False]), old_logprobs=torch.where(mask, -1.0 + math.log(1.01), 0.0).double(),
        ref_logprobs=None,
    )  # fmt: skip
    weights, _ = weights_of(long, level="trajectory")
    assert weights == pytest.approx([1.01] * (T - 1), rel=1e-6)


def test_an_off_policy_episode_loses_its_negative_advantages(batch):
    """mean log(rollout / now): for trajectory 1, now = rollout - 0.3 and - 0.1, it is 0.2."""
    now = batch.rollout_logprobs.clone()
    now[2, 2:4] -= torch.tensor([0.3, 0.1])
    now[:2] -= 5.0  # far off, but with positive advantages
    weights, correction = weights_of(batch, now, off_policy_threshold=0.19)
    assert weights == [1, 1, 1, 1, 0, 0]
    assert correction.num_off_policy == 2
    assert weights_of(batch, now, off_policy_threshold=0.21)[0] == [1] * 6


def test_the_off_policy_mean_is_the_trajectorys_and_the_sign_the_tokens(batch):
    """Trajectory 0 drifts by (0.4 + 0 + 0 + 0) / 4 = 0.1; of its turns only turn 1 has a negative advantage."""
    now = batch.rollout_logprobs.clone()
    now[0, 1] -= 0.4
    batch.advantages[0, 4] = batch.advantages[1, 1] = -1.0
    assert weights_of(batch, now, off_policy_threshold=0.09)[0] == [1, 1, 0, 0, 1, 1]
    assert weights_of(batch, now, off_policy_threshold=0.11)[0] == [1] * 6


def test_a_weight_on_the_bound_is_inside_it(batch):
    # log weights of 0.5, -0.5 and 0.75, which are exact in binary, so that exp gives the bounds to the last digit
    gaps = torch.tensor([0.5, -0.5, 0.75, 0.5, -0.5, 0.75], dtype=torch.float64)
    old = torch.full_like(batch.old_logprobs, -1.5).masked_scatter(batch.action_mask, -1.5 + gaps)
    batch = dataclasses.replace(batch, old_logprobs=old)
    low, high = torch.tensor([-0.5, 0.5], dtype=torch.float64).exp().tolist()
    _, correction = weights_of(batch, level="token", mode="truncate", high=high)
    assert correction.num_truncated == 2
    weights, correction = weights_of(batch, level="token", mode="mask", low=low, high=high)
    assert weights == [high, low, 0, high, low, 0]
    assert correction.num_masked == 2


def test_a_drift_of_the_threshold_and_an_advantage_of_zero_are_kept(batch):
    # -1.5 - -2 is exactly 0.5 at every token
    now = batch.rollout_logprobs - 0.5
    assert weights_of(batch, now, off_policy_threshold=0.5)[0] == [1] * 6
    assert weights_of(batch, now, off_policy_threshold=0.4)[1].num_off_policy == 2
    batch.advantages[2, 2:4] = torch.tensor([0.0, 0.5])
    assert weights_of(batch, now, off_policy_threshold=0.4)[1].num_off_policy == 0


def test_weights_are_constants(batch):
    now = batch.old_logprobs.clone().requires_grad_(True)
    correction = correct(batch, now, CorrectionSettings(level="token", off_policy_threshold=0.1))
    assert not correction.weights.requires_grad


def test_no_setting_no_correction(batch):
    assert correct(batch, batch.old_logprobs, CorrectionSettings()) is None

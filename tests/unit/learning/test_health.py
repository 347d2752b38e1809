from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist

import pytest
import torch

from gspo_gym.learning.batching import TrainBatch
from gspo_gym.learning.correction import Correction
from gspo_gym.learning.health import (
    EngineGap,
    PartFacts,
    Tally,
    batch_metrics,
    correction_metrics,
    effective_sample_fraction,
    engine_metrics,
)
from gspo_gym.learning.losses import LossStats
from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.settings import LossSettings


def gap(log_ratios, unit_lengths, means=(0.0,)):
    values = (torch.tensor(v, dtype=torch.float64) for v in (log_ratios, means, unit_lengths))
    return EngineGap(*values)


@pytest.fixture
def batch():
    """Trajectory 0: turn 0 has 2 tokens, turn 1 has 1 and, in the next row, 1 more; trajectory 1: one turn of 1."""
    turn_index = torch.tensor([[-1, 0, 0, 1], [-1, 1, -1, -1], [-1, 0, -1, -1]])
    mask = turn_index >= 0
    return TrainBatch(
        token_ids=torch.ones(3, 4, dtype=torch.int64),
        attention_mask=torch.ones(3, 4, dtype=torch.bool),
        action_mask=mask,
        turn_index=turn_index,
        trajectory_index=torch.tensor([0, 0, 1]),
        rollout_logprobs=torch.where(mask, -1.0, 0.0),
        advantages=torch.where(mask, torch.tensor([[2.0], [2.0], [0.0]]), 0.0),
        is_masked=torch.tensor([False, False, True]),
    )


def test_the_engine_gap_is_pooled_by_trajectory_and_its_units_are_measured(batch):
    logprobs = batch.rollout_logprobs + torch.tensor([[9.0, 1, 2, 3], [9, 4, 9, 9], [9, -1, 9, 9]])
    lengths = {"trajectory": [4, 1], "turn": [2, 2, 1], "segment": [3, 1, 1], "token": [1] * 5}
    for unit, expected in lengths.items():
        found = EngineGap.of(batch, logprobs, unit)
        assert found.log_ratios.tolist() == [1, 2, 3, 4, -1]
        assert found.trajectory_means.tolist() == [2.5, -1]
        assert found.unit_lengths.tolist() == expected


def test_the_distance_of_engine_and_learner_by_hand():
    metrics = engine_metrics([gap([0.1, -0.6], [2]), gap([0.2], [1])], LossSettings())
    assert metrics["kl/rollout_k1"] == pytest.approx(0.1)
    k3 = [math.exp(x) - 1 - x for x in (0.1, -0.6, 0.2)]
    assert metrics["kl/rollout_k3"] == pytest.approx(sum(k3) / 3)
    assert metrics["kl/rollout_max_gap"] == pytest.approx(0.6)
    # 0.2, -0.5 and 0.3 from their mean
    assert metrics["ratio/noise_sigma"] == pytest.approx(math.sqrt((0.04 + 0.25 + 0.09) / 3))


@pytest.mark.parametrize(("length", "share"), [(256, 0.85), (2048, 0.60), (8192, 0.29)])
def test_noise_that_moves_more_units_than_the_clip_allows_is_foreseen(length, share):
    """Noise of 0.03 nats per token against a range of 3.5e-4 on both sides: log s has 0.03 / sqrt(L)."""
    noise = gap([0.03, -0.03] * 50, [length] * 3)
    metrics = engine_metrics([noise], LossSettings(clip_low=3.5e-4, clip_high=3.5e-4))
    std = 0.03 / math.sqrt(length)
    assert metrics["ratio/predicted_noise"] == pytest.approx(std)
    normal = NormalDist(0.0, std)
    expected = normal.cdf(math.log(1 - 3.5e-4)) + 1 - normal.cdf(math.log(1 + 3.5e-4))
    assert metrics["ratio/noise_clip_fraction"] == pytest.approx(expected, rel=1e-9)
    assert metrics["ratio/noise_clip_fraction"] == pytest.approx(share, abs=0.005)


def test_an_engine_that_agrees_makes_no_noise():
    metrics = engine_metrics([gap([0.0, 0.0], [2])], LossSettings())
    names = ("ratio/noise_sigma", "ratio/predicted_noise", "ratio/noise_clip_fraction", "kl/rollout_k3")
    assert [metrics[name] for name in names] == [0, 0, 0, 0]
    assert metrics["correction/effective_sample_fraction"] == 1.0


def test_the_effective_sample_size_by_hand():
    """Weights 1 and 3: 16 / (2 * 10). A common factor says nothing, even one that overflows."""
    assert effective_sample_fraction(torch.tensor([0.0, math.log(3)])) == pytest.approx(0.8)
    huge = torch.tensor([2000.0, 2000.0 + math.log(3)], dtype=torch.float64)
    assert effective_sample_fraction(huge) == pytest.approx(0.8)
    assert effective_sample_fraction(torch.tensor([0.0] * 9 + [100.0])) == pytest.approx(0.1)


def test_shares_of_corrected_tokens_are_of_all_trained_tokens():
    weights = torch.ones(1, 1)
    corrections = [Correction(weights, 1, 2, 0), Correction(weights, 3, 0, 5)]
    assert correction_metrics(corrections, 20) == {
        "correction/truncated_fraction": 0.2,
        "correction/masked_fraction": 0.1,
        "correction/off_policy_fraction": 0.25,
    }


def test_the_batch_by_hand(batch):
    metrics = batch_metrics(batch, [batch])
    assert (metrics["batch/num_trajectories"], metrics["batch/num_actions"]) == (2, 5)
    assert metrics["batch/tokens_per_turn"] == pytest.approx(5 / 3)
    assert metrics["batch/zero_advantage_fraction"] == 0.5
    assert metrics["batch/masked_fraction"] == 0.5
    assert metrics["batch/padding_fraction"] == 0.0
    assert metrics["advantage/mean"] == pytest.approx(8 / 5)
    assert metrics["advantage/std"] == pytest.approx(math.sqrt((4 * 0.4**2 + 1.6**2) / 5))


def test_padding_is_counted_over_what_is_trained_on(batch):
    """The middle of three rows holds three tokens in a width of four."""
    shorter = dataclasses.replace(batch, attention_mask=torch.tensor([4, 3, 4])[:, None] > torch.arange(4))
    assert batch_metrics(batch, [shorter])["batch/padding_fraction"] == pytest.approx(1 / 12)
    assert batch_metrics(batch, [shorter, batch])["batch/padding_fraction"] == pytest.approx(1 / 24)
    assert batch_metrics(batch, [])["batch/padding_fraction"] == 0.0


def facts(num_tokens, ratios, *, correction=None, gap=None):
    zero = torch.zeros(())
    names = [field.name for field in dataclasses.fields(LossStats)][2:]
    sums = dict.fromkeys(names, zero) | {
        "unit_ratios": torch.tensor(ratios),
        "ref_k1": None,
        "ref_k3": None,
        "teacher": None,
    }
    return PartFacts(LossStats(num_tokens, 1, **sums), correction, gap)


def test_a_tally_counts_the_steps_that_were_taken():
    """Two steps of 3 + 2 and 5 tokens, and between them a skipped one, which only its learning rate speaks of."""
    tally = Tally(LossSettings(clip_low=0.5, clip_high=0.5))
    tally.add_empty_step()
    weights = torch.ones(1, 1)
    first = [
        facts(3, [1.0, 0.75], gap=gap([0.5, -0.5], [1]), correction=Correction(weights, 1, 2, 3)),
        facts(2, [1.125], gap=gap([0.5], [1])),
    ]
    tally.add_step(first, StepReport(learning_rate=0.1, grad_norm=2.0, is_skipped=False))
    tally.add_step([facts(9, [7.0])], StepReport(learning_rate=0.2, grad_norm=math.inf, is_skipped=True))
    tally.add_step([facts(5, [3.0])], StepReport(learning_rate=0.3, grad_norm=6.0, is_skipped=False))
    tally.add_step([facts(9, [7.0])], StepReport(learning_rate=0.4, grad_norm=math.nan, is_skipped=True))
    assert (tally.num_steps, tally.num_nonfinite_steps) == (2, 2)
    metrics = tally.metrics()
    assert metrics["ratio/noise_floor"] == 0.25, "of the first step alone"
    assert (metrics["ratio/min"], metrics["ratio/max"]) == (0.75, 3.0)
    assert metrics["kl/rollout_k1"] == pytest.approx(-0.5 / 3)
    # of noise with this deviation at each token
    noise = NormalDist(0.0, math.sqrt(2 / 9))
    beyond = noise.cdf(math.log(0.5)) + 1 - noise.cdf(math.log(1.5))
    assert metrics["ratio/noise_clip_fraction"] == pytest.approx(beyond)
    names = ("correction/truncated_fraction", "correction/masked_fraction", "correction/off_policy_fraction")
    assert [metrics[name] for name in names] == [0.1, 0.2, 0.3]
    expected = {
        "optim/learning_rate": 0.4,
        "optim/grad_norm": 4.0,
        "optim/grad_norm_max": 6.0,
        "batch/trained_tokens": 10,
        "optim/num_steps": 2,
        "optim/num_nonfinite_steps": 2,
        "optim/num_empty_steps": 1,
    }
    assert {name: metrics[name] for name in expected} == expected


def test_an_update_without_a_step_has_no_metrics_of_steps():
    tally = Tally(LossSettings())
    tally.add_empty_step()
    assert tally.metrics() == {
        "batch/trained_tokens": 0,
        "optim/num_steps": 0,
        "optim/num_nonfinite_steps": 0,
        "optim/num_empty_steps": 1,
    }

from __future__ import annotations

import math

import pytest
import torch

from gspo_gym.learning.health import loss_metrics
from gspo_gym.learning.losses import LossStats

# Sums over a micro-batch's tokens, each a number of its own.
SUMS = {
    "policy_loss": 1.0,
    "kl_loss": 20.0,
    "entropy_loss": -300.0,
    "tokens_clipped_low": 2.0,
    "tokens_clipped_high": 3.0,
    "tokens_dual_clipped": 1.0,
    "tokens_corrected": 0.0,
    "tokens_left_out": 0.0,
    "old_k1": 0.5,
    "old_k3": 0.25,
    "ref_k1": 7.0,
    "ref_k3": 9.0,
    "entropy_sum": 11.0,
}


def part(num_tokens, ratios, **others):
    """What the loss of a micro-batch leaves behind."""
    sums = {name: None if value is None else torch.tensor(value) for name, value in (SUMS | others).items()}
    unit_ratios = torch.tensor(ratios, dtype=torch.float64)
    return LossStats(num_tokens, 1, unit_ratios=unit_ratios, trajectory_log_ratios=torch.zeros(1), **sums)


def test_losses_are_means_over_steps_and_shares_over_tokens():
    """Two steps, of two micro-batches and of one: 4 + 5 + 1 tokens."""
    parts = [part(4, [1.0]), part(5, [1.0], policy_loss=3.0, old_k3=0.5), part(1, [1.0], kl_loss=2.0, ref_k1=1.0)]
    metrics = loss_metrics([parts[:2], parts[2:]])
    expected = {
        "loss/policy": (1 + 3 + 1) / 2,
        "loss/kl": (20 + 20 + 2) / 2,
        "loss/entropy": -900 / 2,
        "loss/total": (5 + 42 - 900) / 2,
        "clip/low_fraction": 6 / 10,
        "clip/high_fraction": 9 / 10,
        "clip/dual_fraction": 3 / 10,
        "kl/old_k1": 1.5 / 10,
        "kl/old_k3": (0.25 + 0.5 + 0.25) / 10,
        "kl/ref_k1": (7 + 7 + 1) / 10,
        "kl/ref_k3": 27 / 10,
        "policy/entropy": 33 / 10,
    }
    assert {name: value for name, value in metrics.items() if not name.startswith("ratio/")} == pytest.approx(expected)


def test_what_no_micro_batch_knows_is_left_out_and_no_step_has_no_metrics():
    metrics = loss_metrics([[part(4, [1.0], ref_k1=None, ref_k3=None, entropy_sum=None)]])
    assert not {"kl/ref_k1", "kl/ref_k3", "policy/entropy"} & set(metrics)
    assert metrics["kl/old_k1"] == 0.5 / 4
    assert loss_metrics([]) == {}


def test_ratios_are_ordered_over_all_units():
    """1.000, 1.001, ... 1.100, in two micro-batches and not in order: the quantile q is the q-th of them."""
    ratios = [1 + k / 1000 for k in range(101)]
    metrics = loss_metrics([[part(1, ratios[60:]), part(1, ratios[:60])]])
    logs = [math.log(s) for s in ratios]
    mean = sum(logs) / 101
    assert {name: value for name, value in metrics.items() if name.startswith("ratio/")} == pytest.approx(
        {
            "ratio/mean": 1.05,
            "ratio/min": 1.0,
            "ratio/q05": 1.005,
            "ratio/q50": 1.05,
            "ratio/q95": 1.095,
            "ratio/max": 1.1,
            "ratio/log_std": math.sqrt(sum((x - mean) ** 2 for x in logs) / 101),
            "ratio/is_constant": 0.0,
        },
        rel=1e-12,
    )


@pytest.mark.parametrize(
    ("ratios", "is_constant"), [([1.0], 1), ([1 - 9e-7, 1 + 9e-7], 1), ([1.0, 1 + 1.1e-6], 0), ([2.0, 2.0], 0)]
)
def test_ratios_within_a_millionth_of_one_are_constant(ratios, is_constant):
    assert loss_metrics([[part(1, ratios)]])["ratio/is_constant"] == is_constant

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from gspo_gym.errors import CheckpointError, ConfigError, NonFiniteError
from gspo_gym.learning.optimizer import PolicyOptimizer
from gspo_gym.learning.settings import OptimizerSettings


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        self.bias = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def settings(**overrides):
    return OptimizerSettings(**({"max_grad_norm": 100.0} | overrides))


def optimizer_of(model, settings, *, total_steps=None):
    return PolicyOptimizer(model, settings, learning_rate=0.1, total_steps=total_steps)


def give_gradients(model, matrix, bias):
    model.matrix.grad, model.bias.grad = torch.tensor(matrix), torch.tensor(bias)


def adamw_by_hand(value, gradients, *, rate, betas, eps, decay):
    """Loshchilov and Hutter, algorithm 2, for one number."""
    m = v = 0.0
    for k, g in enumerate(gradients, start=1):
        value *= 1 - rate * decay
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        value -= rate * (m / (1 - betas[0] ** k)) / (math.sqrt(v / (1 - betas[1] ** k)) + eps)
    return value


def test_two_steps_are_adamw_by_hand_with_decay_on_matrices_only():
    model = Small()
    optimizer = optimizer_of(model, settings(weight_decay=0.2, betas=(0.8, 0.9)))
    for g in (0.3, -0.7):
        give_gradients(model, [[g, 0.1], [0.1, 0.1]], [g, 0.1])
        optimizer.step(1.0)
    by_hand = {"rate": 0.1, "betas": (0.8, 0.9), "eps": 1e-8}
    # float32 arithmetic on numbers of order 1
    assert model.matrix[0, 0].item() == pytest.approx(adamw_by_hand(1.0, [0.3, -0.7], decay=0.2, **by_hand), abs=1e-6)
    assert model.bias[0].item() == pytest.approx(adamw_by_hand(0.5, [0.3, -0.7], decay=0.0, **by_hand), abs=1e-6)
    assert model.frozen.tolist() == [1.0, 1.0]
    assert all(p.grad is None for p in model.parameters()), "what was applied is gone"


def test_gradients_are_clipped_by_their_joint_norm_and_the_norm_is_reported_unclipped():
    # norms: (3, 0, 0, 0) and (0, 4) together 5; clipped to 1 they are (0.6, ...) and (..., 0.8)
    model = Small()
    optimizer = optimizer_of(model, settings(max_grad_norm=1.0))
    give_gradients(model, [[3.0, 0.0], [0.0, 0.0]], [0.0, 4.0])
    report = optimizer.step(1.0)
    assert report.grad_norm == pytest.approx(5.0, abs=1e-6)
    # after one step exp_avg is (1 - beta1) times the gradient; clipping divides by 5 + 1e-6
    first_moments = optimizer.tensors()
    assert first_moments["optimizer.exp_avg.matrix"][0, 0].item() == pytest.approx(0.1 * 0.6, abs=1e-6)
    assert first_moments["optimizer.exp_avg.bias"][1].item() == pytest.approx(0.1 * 0.8, abs=1e-6)


def test_the_rate_follows_the_schedule_and_a_skipped_step_takes_its_place():
    model = Small()
    optimizer = optimizer_of(model, settings(warmup_steps=4))
    rates = []
    for loss in (1.0, float("nan"), 1.0, 1.0):
        give_gradients(model, [[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0])
        rates.append(optimizer.step(loss).learning_rate)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1], abs=1e-15)
    # under a constant gradient every step of AdamW is the rate itself (up to eps): 0.025 + 0.075 + 0.1, without 0.05
    assert model.bias[0].item() == pytest.approx(0.5 - 0.2, abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_non_finite_step_leaves_parameters_and_state_bitwise_untouched(bad, place):
    model = Small()
    optimizer = optimizer_of(model, settings(weight_decay=0.1))
    give_gradients(model, [[0.1, 0.2], [0.3, 0.4]], [0.5, 0.6])
    optimizer.step(1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    before |= {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    give_gradients(model, [[0.1, bad if place == "gradient" else 0.2], [0.3, 0.4]], [0.5, 0.6])
    report = optimizer.step(bad if place == "loss" else 1.0)
    assert report.is_skipped
    after = dict(model.named_parameters()) | optimizer.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters()), "the bad gradients are gone"


def test_a_gradient_norm_that_overflows_is_not_finite():
    model = Small()
    give_gradients(model, [[3e38, 3e38], [0.0, 0.0]], [0.0, 0.0])
    assert optimizer_of(model, settings()).step(1.0).is_skipped


@pytest.mark.parametrize("allowed", [0, 2])
def test_more_bad_steps_in_a_row_than_allowed_end_the_run(allowed, monkeypatch):
    monkeypatch.setattr("gspo_gym.learning.optimizer.MAX_NONFINITE_STEPS", allowed)
    model = Small()
    optimizer = optimizer_of(model, settings())
    for _ in range(3):  # a good step in between starts the count anew
        for _ in range(allowed):
            assert optimizer.step(float("nan")).is_skipped
        give_gradients(model, [[1.0, 1.0], [1.0, 1.0]], [1.0, 1.0])
        assert not optimizer.step(1.0).is_skipped
    for _ in range(allowed):
        optimizer.step(float("nan"))
    with pytest.raises(NonFiniteError, match=f"{allowed + 1} steps in a row"):
        optimizer.step(float("nan"))


def run_steps(model, optimizer, numbers):
    for k in numbers:
        generator = torch.Generator().manual_seed(k)
        model.matrix.grad = torch.randn(2, 2, generator=generator)
        model.bias.grad = torch.randn(2, generator=generator)
        optimizer.step(1.0)


def test_restarting_from_what_was_written_is_bitwise_the_uninterrupted_run():
    schedule = settings(schedule="cosine", warmup_steps=2, weight_decay=0.1)
    whole, first, second = Small(), Small(), Small()
    run_steps(whole, optimizer_of(whole, schedule, total_steps=9), range(8))
    optimizer = optimizer_of(first, schedule, total_steps=9)
    run_steps(first, optimizer, range(4))
    written = save(optimizer.tensors())  # safetensors: the bytes of a file
    counters = optimizer.counters()
    second.load_state_dict(first.state_dict())
    restarted = optimizer_of(second, schedule, total_steps=9)
    loaded = load(written)
    restarted.restore(loaded, counters)
    run_steps(second, restarted, range(4, 8))
    assert all(torch.equal(value, loaded[name]) for name, value in load(written).items()), (
        "what was read is not touched"
    )
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_a_restart_before_the_first_step_has_no_state_to_lose():
    model = Small()
    optimizer = optimizer_of(model, settings())
    assert optimizer.tensors() == {}
    optimizer.restore({}, {"optimizer.num_attempts": 3, "optimizer.num_nonfinite_in_a_row": 1})
    assert optimizer.tensors() == {}
    assert optimizer.counters() == {"optimizer.num_attempts": 3, "optimizer.num_nonfinite_in_a_row": 1}


def test_the_state_of_another_model_is_refused():
    model = Small()
    optimizer = optimizer_of(model, settings())
    run_steps(model, optimizer, range(1))
    state, counters = optimizer.tensors(), optimizer.counters()
    with pytest.raises(CheckpointError, match="not trained here"):
        optimizer.restore(state | {"optimizer.exp_avg.stranger": torch.zeros(2)}, counters)
    with pytest.raises(CheckpointError, match="expected shape"):
        optimizer.restore(state | {"optimizer.exp_avg.bias": torch.zeros(3)}, counters)
    incomplete = {name: value for name, value in state.items() if name != "optimizer.step.bias"}
    with pytest.raises(CheckpointError, match="bias"):
        optimizer.restore(incomplete, counters)
    with pytest.raises(CheckpointError, match="num_attempts"):
        optimizer.restore(state, {})
    assert all(torch.equal(value, optimizer.tensors()[name]) for name, value in state.items()), (
        "a refusal changes nothing"
    )


def test_training_16_bit_weights_is_refused():
    with pytest.raises(ConfigError, match=r"matrix \(and 1 more\) has torch.bfloat16"):
        optimizer_of(Small().to(torch.bfloat16), settings())


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="trainable"):
        optimizer_of(Small().requires_grad_(False), settings())


def test_a_cosine_without_an_end_is_refused_when_built():
    with pytest.raises(ConfigError, match="total_steps"):
        optimizer_of(Small(), settings(schedule="cosine"))

"""The four ways to compute AdamW: each against the formula, and each written down and restarted bit for bit."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.learning.optimizer import PolicyOptimizer
from gspo_gym.learning.settings import OptimizerSettings

TORCH_KINDS = ("adamw", "adamw_fused")
RATE, BETAS, EPS, DECAY = 0.01, (0.8, 0.9), 1e-8, 0.2
SIZE = 64 * 80  # more than the 4096 numbers from which bitsandbytes takes 8 bits


class Model(nn.Module):
    """`large` and `vector` have moments in 20 and 17 blocks of 256, for kinds that keep 8 bits; `small` not."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(64, 80, generator=generator))
        self.small = nn.Parameter(torch.randn(4, 6, generator=generator))
        self.vector = nn.Parameter(torch.randn(16 * 256 + 1, generator=generator))


def optimizer_of(model, kind, **options):
    settings = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY, "max_grad_norm": 1e9}
    resolved = OptimizerSettings(**(settings | options), kind=kind)
    return PolicyOptimizer(model, resolved, learning_rate=RATE, total_steps=None)


def gradient(parameter, k):
    generator = torch.Generator().manual_seed(100 + k)
    return torch.randn(parameter.shape, generator=generator)


def run(model, optimizer, steps):
    for k in steps:
        for parameter in model.parameters():
            parameter.grad = gradient(parameter, k).to(parameter)
        optimizer.step(1.0)


def adamw(value, gradients):
    """Loshchilov and Hutter, algorithm 2, in float64, with decay of matrices only."""
    value, m, v = value.double(), torch.zeros(()), torch.zeros(())
    decay = DECAY if value.dim() > 1 else 0.0
    for k, g in enumerate(gradients, start=1):
        value = value * (1 - RATE * decay)
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g.double(), BETAS[1] * v + (1 - BETAS[1]) * g.double() ** 2
        value = value - RATE * (m / (1 - BETAS[0] ** k)) / ((v / (1 - BETAS[1] ** k)).sqrt() + EPS)
    return value


@pytest.mark.parametrize("kind", TORCH_KINDS)
def test_torchs_kinds_are_the_formula(kind):
    model, before = Model(), Model()
    run(model, optimizer_of(model, kind), range(3))
    for parameter, start in zip(model.parameters(), before.parameters(), strict=True):
        expected = adamw(start.detach(), [gradient(start, k) for k in range(3)])
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=0, atol=1e-6)  # float32, order 1


def test_the_fused_kernel_differs_from_plain_operations_by_roundings_only():
    plain, fused = Model(), Model()
    run(plain, optimizer_of(plain, "adamw"), range(10))
    run(fused, optimizer_of(fused, "adamw_fused"), range(10))
    # ten steps of rate 0.01 on numbers of order 1: a few times 2^-23 a step
    torch.testing.assert_close(fused.large, plain.large, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [TORCH_KINDS, TORCH_KINDS[::-1]])
def test_a_checkpoint_of_one_of_torchs_kinds_goes_on_with_the_other(first, second):
    model, expected = Model(), Model()
    run(expected, optimizer_of(expected, first), range(6))
    begun = optimizer_of(model, first)
    run(model, begun, range(3))
    going_on = optimizer_of(model, second)
    going_on.restore(load(save(begun.tensors())), begun.counters())
    run(model, going_on, range(3, 6))
    torch.testing.assert_close(model.large, expected.large, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", TORCH_KINDS)
def test_float64_state_restarts_bit_for_bit_in_place_of_what_was_there(kind):
    whole, model = Model().double(), Model().double()
    run(whole, optimizer_of(whole, kind), range(5))
    begun = optimizer_of(model, kind)
    run(model, begun, range(3))
    written, counters = {name: tensor.clone() for name, tensor in begun.tensors().items()}, begun.counters()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run(model, begun, range(7, 9))
    model.load_state_dict(weights)
    begun.restore(written, counters)
    run(model, begun, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    assert written["optimizer.step.small"].item() == 3, "what was read is not touched"


@pytest.mark.parametrize("kind", [*TORCH_KINDS, "adamw_8bit"])
def test_a_restart_from_before_the_first_step_forgets_what_was_there(kind):
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    model = Model()
    optimizer = optimizer_of(model, kind)
    assert optimizer.tensors() == {}
    counters = optimizer.counters()
    run(model, optimizer, range(1))
    assert optimizer.tensors() != {}
    optimizer.restore({}, counters)
    assert optimizer.tensors() == {}


def test_8_bit_moments_are_within_their_codes_of_the_formula_and_small_parameters_exact():
    pytest.importorskip("bitsandbytes")
    model, before = Model(), Model()
    run(model, optimizer_of(model, "adamw_8bit"), range(3))
    small = adamw(before.small.detach(), [gradient(before.small, k) for k in range(3)])
    torch.testing.assert_close(model.small.detach().double(), small, rtol=0, atol=1e-6)
    large = adamw(before.large.detach(), [gradient(before.large, k) for k in range(3)])
    gap = (model.large.detach().double() - large).abs()
    moved = (large - before.large.detach().double()).abs().mean()
    # A code is off by some percent of its value (7 bits over 7 decades); the smallest second moments of a block of 256
    # by more. So the mean error is percents of the mean step; single numbers stay within the step's own size.
    assert float(gap.mean()) < 0.1 * float(moved)
    assert float(gap.max()) > 1e-6, "these moments have 8 bits"


def test_8_bit_state_restarts_bit_for_bit_from_a_file_that_holds_codes_tables_and_scales():
    pytest.importorskip("bitsandbytes")
    whole, model = Model(), Model()
    run(whole, optimizer_of(whole, "adamw_8bit"), range(6))
    begun = optimizer_of(model, "adamw_8bit")
    run(model, begun, range(3))
    tensors = load(save(begun.tensors()))
    large = {name.split(".")[1]: value for name, value in tensors.items() if name.endswith(".large")}
    assert large.keys() == {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}
    assert (large["state1"].dtype, large["state1"].shape) == (torch.uint8, (64, 80))
    assert large["absmax1"].shape == (SIZE // 256,)
    assert large["step"].item() == 3
    assert tensors["optimizer.absmax1.vector"].shape == (17,)
    going_on = optimizer_of(model, "adamw_8bit")
    going_on.restore(tensors, begun.counters())
    run(model, going_on, range(3, 6))
    assert torch.equal(model.large, whole.large)
    assert torch.equal(model.small, whole.small)
    assert torch.equal(model.vector, whole.vector)


def test_8_bit_state_that_is_incomplete_or_another_kinds_is_refused():
    pytest.importorskip("bitsandbytes")
    model = Model()
    eight, plain = optimizer_of(model, "adamw_8bit"), optimizer_of(model, "adamw_fused")
    run(model, eight, range(1))
    run(model, plain, range(1))
    state, counters = eight.tensors(), eight.counters()
    with pytest.raises(CheckpointError, match="of another kind than 'adamw_fused'"):
        plain.restore(state, counters)
    with pytest.raises(CheckpointError, match="of another kind than 'adamw_8bit'"):
        eight.restore(plain.tensors(), plain.counters())
    without = {name: value for name, value in state.items() if name != "optimizer.qmap1.large"}
    with pytest.raises(CheckpointError, match=r"optimizer state of large: expected .*qmap1"):
        eight.restore(without, counters)
    without = {name: value for name, value in state.items() if name != "optimizer.state1.large"}
    with pytest.raises(CheckpointError, match=r"optimizer state of large: expected .*state1"):
        eight.restore(without, counters)
    with pytest.raises(CheckpointError, match=r"absmax1 of large: expected shape \(20,\), got \(19,\)"):
        eight.restore(state | {"optimizer.absmax1.large": torch.zeros(19)}, counters)


def test_8_bit_without_bitsandbytes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"'adamw_8bit' needs bitsandbytes.*pip install 'gspo-gym\[quant\]'"):
        optimizer_of(Model(), "adamw_8bit")


def test_paged_moments_need_cuda():
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match="pages between GPU and main memory, but the parameters are on cpu"):
        optimizer_of(Model(), "paged_adamw_8bit")


def test_8_bit_moments_are_refused_on_a_device_that_has_none():
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match="bitsandbytes has none for meta; take 'adamw'"):
        optimizer_of(Model().to("meta"), "adamw_8bit")


@pytest.mark.parametrize("kind", [*TORCH_KINDS, "adamw_8bit"])
def test_every_kind_follows_the_schedule(kind):
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    model = Model()
    optimizer = optimizer_of(model, kind, warmup_steps=2, weight_decay=0.0)
    before = model.small.detach().clone()
    model.small.grad = torch.ones(4, 6)
    assert math.isclose(optimizer.step(1.0).learning_rate, RATE / 2)
    # the first step of AdamW is the rate times the sign of the gradient
    torch.testing.assert_close(before - model.small.detach(), torch.full((4, 6), RATE / 2), rtol=0, atol=1e-6)

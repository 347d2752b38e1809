"""RMS norms with their own backward pass: the numbers of transformers' modules, of autograd, and of the formula."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from gspo_gym.learning.norms import RmsNorm, quicken_norms


def quick(kind: type[nn.Module], size: int) -> tuple[nn.Module, nn.Module]:
    """A norm with random weights, quickened, and as it was."""
    theirs = kind(size)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(1)))  # type: ignore[operator]
    ours = copy.deepcopy(theirs)
    assert quicken_norms(ours) == 1
    assert quicken_norms(ours) == 0
    return ours, theirs


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


def test_values_and_gradients_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    out = RmsNorm.apply(x, weight, 0.0)  # type: ignore[no-untyped-call]
    # mean(x²) = 12.5, so that x / sqrt(12.5) is 0.6 * sqrt(2) and 0.8 * sqrt(2)
    root, r = 2**0.5, 12.5**0.5
    torch.testing.assert_close(out, torch.tensor([[1.2 * root, 2.4 * root]], dtype=torch.float64))
    out[0, 0].backward()  # 2 * x0 / r with r = sqrt((x0² + x1²) / 2): d/dx0 = 2/r - x0²/r³, d/dx1 = -x0 x1/r³
    expected = torch.tensor([[2 / r - 9 / r**3, -12 / r**3]], dtype=torch.float64)
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(weight.grad, torch.tensor([0.6 * root, 0.0], dtype=torch.float64))


def test_gradients_are_those_of_differences() -> None:
    arguments = inputs(4, 3, 6, dtype=torch.float64), inputs(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: RmsNorm.apply(x, weight, 1e-6), arguments)


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (2, 3, 4, 8)])
def test_values_are_theirs_bit_for_bit_and_gradients_are_autograds(
    kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    found: list[list[Tensor]] = []
    for norm in quick(kind, 8):
        x = inputs(*shape)
        out = norm(x)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        assert x.grad is not None
        assert isinstance(norm.weight.grad, Tensor)
        found.append([out.detach(), x.grad, norm.weight.grad])
    assert torch.equal(found[0][0], found[1][0])
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))  # float32's rounding


def test_a_gradient_is_nan_and_not_nothing_where_the_squares_overflow() -> None:
    x = torch.full((1, 4), 1e33, requires_grad=True)  # its square is over float32's 3.4e38
    ours, _ = quick(LlamaRMSNorm, 4)
    ours(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isnan().all())


def test_frozen_weights_get_no_gradient() -> None:
    ours, _ = quick(Qwen3RMSNorm, 6)
    ours.weight.requires_grad_(False)  # type: ignore[operator]
    x = inputs(4, 6)
    ours(x).sum().backward()
    assert x.grad is not None
    assert ours.weight.grad is None


def test_another_formula_and_another_precision_are_left_alone() -> None:
    gemma = GemmaRMSNorm(8)  # multiplies by 1 + weight
    with torch.no_grad():
        gemma.weight.fill_(0.5)
    assert quicken_norms(nn.Sequential(gemma, nn.LayerNorm(8), nn.RMSNorm(8))) == 0
    half = Qwen3RMSNorm(8).to(torch.bfloat16)
    assert quicken_norms(half) == 0
    ours, theirs = quick(Qwen3RMSNorm, 8)
    ours, theirs = ours.to(torch.bfloat16), theirs.to(torch.bfloat16)
    x = inputs(4, 8, dtype=torch.bfloat16)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.filterwarnings("ignore")  # torch's compiler uses deprecated parts of torch
def test_a_model_that_torch_compiles_is_left_alone() -> None:
    norms = nn.Sequential(Qwen3RMSNorm(8), Qwen3RMSNorm(8))
    norms[1].compile()  # which does nothing before its first call
    assert quicken_norms(norms) == 0

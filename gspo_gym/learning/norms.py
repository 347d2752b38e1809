"""RMS normalization in fewer passes over memory, for a decoder that learns on a processor.

By its own backward pass, whose results differ from autograd's by rounding. The forward pass computes the same numbers.
D = hidden size.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RmsNorm(torch.autograd.Function):
    """x / sqrt(mean(x²) + eps) * weight (arXiv 1910.07467, equation 4), over the last of x's axes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # Any: untyped in torch
        normal, scale = _normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        scale = scale.masked_fill(scale == 0, math.nan)  # x² has overflowed: a step that is found to be not finite
        # With n = x * scale and g = gradient * weight: scale * (g - n * mean(g * n)).
        normal = x * scale
        product = gradient * normal
        of_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (product @ weight).div_(x.shape[-1]).unsqueeze(-1)
        of_x = normal.mul_(mean).neg_().addcmul_(gradient, weight).mul_(scale)
        return of_x, of_weight, None


def quicken_norms(decoder: nn.Module) -> int:
    """Give the decoder's RMS norms this forward pass where it computes what theirs does; return how many have it.

    On a processor and in float32 only; a module that is moved or converted later computes as before. A model that torch
    compiles is left alone.
    """
    if any(module._compiled_call_impl is not None for module in decoder.modules()):
        return 0
    norms = [module for module in decoder.modules() if _is_same(module)]
    for module in norms:
        module.forward = partial(_forward, module)
    return len(norms)


def _forward(module: Any, x: Tensor) -> Tensor:  # Any: transformers is untyped
    if not (_is_quick(x) and _is_quick(module.weight)):
        result: Tensor = type(module).forward(module, x)
        return result
    if not torch.is_grad_enabled():
        return _normalize(x, module.weight, module.variance_epsilon)[0]
    normal: Tensor = RmsNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return normal


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x [..., D], and 1 / sqrt(mean(x²) + eps) [..., 1]."""
    scale = x.pow(2).sum(-1, keepdim=True).div_(_number(x.shape[-1])).add_(_number(eps)).rsqrt_()
    return (x * scale).mul_(weight), scale


@cache
def _number(value: float) -> Tensor:
    # A tensor, because torch makes a new one of a plain number at each use, which takes longer than to divide by it.
    with torch.inference_mode(mode=False):
        return torch.tensor(value, dtype=torch.float32, device="cpu")


@torch.no_grad()
def _is_same(module: Any) -> bool:
    """Return whether a module is an RMS norm as here, by its numbers: some add 1 to their weights."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if type(weight) is not nn.Parameter or weight.dim() != 1 or not isinstance(eps, float):  # or is sharded
        return False
    if "forward" in vars(module) or not _is_quick(weight):
        return False
    x = torch.linspace(-2, 3, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(2, -1)
    return torch.equal(type(module).forward(module, x), _forward(module, x))  # without its hooks


def _is_quick(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32

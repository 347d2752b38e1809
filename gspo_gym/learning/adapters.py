"""A linear layer with a LoRA adapter in fewer passes over memory, for a model that learns or samples on a processor.

peft multiplies, scales and adds one after another, and autograd keeps what each of them leaves. Here the adapter's
product is added while it is computed. Results differ from peft's by rounding. N = tokens, R = rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class LoraLinear(torch.autograd.Function):
    """x W' + b + scale (x A') B' (arXiv 2106.09685, equation 3), of x [N, I], W [O, I], A [R, I] and B [O, R].

    W and b are frozen: they get no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:  # Any: untyped in torch
        output, low = _product(x, weight, bias, down, up, scale)
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, low = ctx.saved_tensors
        needs_x, _, _, needs_down, needs_up, _ = ctx.needs_input_grad
        of_low = torch.mm(gradient, up).mul_(ctx.scale)
        of_up = torch.mm(gradient.t(), low).mul_(ctx.scale) if needs_up else None
        of_down = torch.mm(of_low.t(), x) if needs_down else None
        of_x = torch.mm(gradient, weight).addmm_(of_low, down) if needs_x else None
        return of_x, None, None, of_down, of_up, None


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [N, O], and x A' [N, R]."""
    low = torch.mm(x, down.t())
    output = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    return output.addmm_(low, up.t(), alpha=scale), low


def quicken_adapters(model: nn.Module) -> int:
    """Give LoRA's linear layers this forward pass where it computes what theirs does; return how many have it.

    On a processor and in float32 only, and with one adapter that neither is merged nor drops out: a layer that becomes
    another later computes as before, and so does one that torch compiles.
    """
    layers = [module for module in model.modules() if _is_lora(module) and "forward" not in vars(module)]
    for layer in layers:
        layer.forward = partial(_forward, layer)
    return len(layers)


def _is_lora(module: nn.Module) -> bool:
    kind = type(module)  # peft is imported by those that use it
    return (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "Linear")


def _forward(layer: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:  # Any: peft is untyped
    is_plain = not args and not options and _is_quick(x) and not torch.is_autocast_enabled("cpu")
    factors = _factors_of(layer) if is_plain and not torch.compiler.is_compiling() else None
    if factors is None:
        result: Tensor = type(layer).forward(layer, x, *args, **options)
        return result
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled():
        output: Tensor = LoraLinear.apply(rows, *factors)  # type: ignore[no-untyped-call]
    else:
        output = _product(rows, *factors)[0]
    return output.view(*x.shape[:-1], -1)


# The arguments of `LoraLinear` but x.
_Factors = tuple[Tensor, Tensor | None, Tensor, Tensor, float]


def _factors_of(layer: Any) -> _Factors | None:
    """Return the factors of the layer's adapter if it is a plain one, alone, and all else of the layer is plain too.

    At every call: an adapter may be switched, merged, or let drop out. So it reads torch's tables of modules, because a
    module's attributes are looked up slowly.
    """
    names = layer.active_adapters
    if layer.disable_adapters or layer.merged_adapters or len(names) != 1 or layer.fan_in_fan_out:
        return None
    name, modules = names[0], layer._modules
    down, up, dropout = (modules[part]._modules.get(name) for part in ("lora_A", "lora_B", "lora_dropout"))
    if down is None or name in layer.lora_variant:
        return None
    if type(dropout) is not nn.Identity and (dropout.training or type(dropout) is not nn.Dropout):
        return None
    base = modules["base_layer"]
    if not (_is_plain(base) and _is_plain(down) and _is_plain(up)):
        return None
    (weight, bias), low, high = base._parameters.values(), down._parameters, up._parameters
    if low["bias"] is not None or high["bias"] is not None:
        return None
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return None
    return weight, bias, low["weight"], high["weight"], layer.scaling[name]


def _is_plain(linear: Any) -> bool:
    if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
        return False
    weight = linear._parameters.get("weight")
    if type(weight) is not nn.Parameter or not _is_quick(weight):  # such as a part of a weight
        return False
    # accelerate and others replace the forward
    return not linear._backward_hooks and not linear._backward_pre_hooks and "forward" not in linear.__dict__


def _is_quick(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_cpu

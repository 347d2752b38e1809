"""Frozen weights in 4 or 8 bits by bitsandbytes, under adapters of QLoRA: what they need, what they are, and back."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Literal

import torch

from gspo_gym.errors import ConfigError

Quantization = Literal["as_saved", "nf4", "int8"]

_DEVICES = ("cpu", "cuda", "xpu")


def check_quantization(device: str) -> None:
    """Require bitsandbytes and a device that it supports, before anything is downloaded.

    Raises:
        ConfigError: bitsandbytes is not installed, or does not support the device.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "quantized weights (qlora) need bitsandbytes, which is not installed: pip install 'gspo-gym[quant]', or "
            "train a LoRA on weights of 16 or 32 bits (lora)"
        )
    if torch.device(device).type not in _DEVICES:
        raise ConfigError(
            f"quantized weights (qlora): expected a device among {', '.join(_DEVICES)}, got {device!r}: bitsandbytes "
            "supports no other"
        )


def quantization_options(kind: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the options of transformers' `from_pretrained` for "nf4" or "int8" (Any: untyped).

    int8 is LLM.int8 (arXiv 2208.07339) without its outlier columns. It rounds activations to 8 bits, too: a difference
    in rounding becomes 1/127 of a token's largest activation, and logprobs agree less well.
    """
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        # 0: no outlier columns. All tokens of a batch choose them, and a logprob would depend on its neighbours.
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_not_about_casting)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            # The paper computes in bfloat16; in the dtype of the other weights, scored and sampled logprobs agree as
            # closely as that dtype allows.
            bnb_4bit_compute_dtype=dtype,
        )
    return {"quantization_config": config, "device_map": {"": device}}


def _is_not_about_casting(record: logging.LogRecord) -> bool:
    # bitsandbytes logs this in every forward of every layer although all is well.
    return "inputs will be cast" not in record.msg


def quantization_of(model: Any) -> str:
    """Return the kind of a quantized model, "nf4" or "int8" (Any: untyped)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "int8" if base.hf_quantizer.quantization_config.load_in_8bit else "nf4"


def is_quantized(model: Any) -> bool:
    """Return whether the model, or the one under its adapter, has quantized weights (Any: untyped)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "hf_quantizer", None) is not None


def dequantize(model: Any) -> None:
    """Replace quantized layers by plain ones with the weights that they compute with, in place (Any: untyped).

    An adapter stays where it is. The layers agree up to rounding, except that int8 ones also round their inputs.
    """
    import bitsandbytes as bnb

    for path, layer in list(model.named_modules()):
        if not isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            continue
        weight = layer.weight
        if isinstance(layer, bnb.nn.Linear4bit):
            values = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:  # scales of the rows: the layer takes them over from the weight at its first forward
            scales = weight.SCB if layer.state.SCB is None else layer.state.SCB
            values = weight.data.float() * scales.float().view(-1, 1) / 127
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight = torch.nn.Parameter(values, requires_grad=False)
        plain.bias = layer.bias
        model.set_submodule(path, plain)


def keep_differentiable(model: Any) -> None:
    """Forbid bitsandbytes to repack weights on a CPU.

    On a CPU with AVX512-BF16, the first forward in eval mode and without gradients would rearrange the weights for a
    kernel that has no backward pass: from then on no gradient reaches an adapter below, and nothing but a warning says
    so. Policies are sampled from and scored in just that mode.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False

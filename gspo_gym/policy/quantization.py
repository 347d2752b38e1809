"""Frozen weights in 4 bits for QLoRA (arXiv 2305.14314), bitsandbytes' NF4 with double quantization, or in 8 bits.

Only linear layers are quantized; embeddings, norms, the output head and a mixture's fused experts keep the dtype that
was asked for, in which the quantized layers also compute.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch

from gspo_gym.errors import ConfigError

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
    """Refuse a line that bitsandbytes logs in every forward of every layer although all is well."""
    return "inputs will be cast" not in record.msg


def quantization_of(model: Any) -> str:
    """Return the kind of a quantized model, "nf4" or "int8" (Any: untyped)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "int8" if base.hf_quantizer.quantization_config.load_in_8bit else "nf4"


def is_quantized(model: Any) -> bool:
    """Return whether the model, or the one under its adapter, has quantized weights (Any: untyped)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "hf_quantizer", None) is not None


def keep_differentiable(model: Any) -> None:
    """Forbid bitsandbytes to repack weights on a CPU.

    On a CPU with AVX512-BF16, the first forward in eval mode and without gradients would rearrange the weights for a
    kernel that has no backward pass: from then on no gradient reaches an adapter below, and nothing but a warning says
    so. Policies are sampled from and scored in just that mode.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False

"""Options of a policy's forward and backward in training: gradient checkpointing, compilation, Liger's kernels.

Results stay the same up to rounding, and parameter names stay. An engine that shares the weights is not affected: its
modules are copies, without compiled code.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo_gym.errors import ConfigError
from gspo_gym.policy.lora import is_adapter

_CPU_COMPILERS = ("g++", "clang++")
_GPU_COMPILERS = ("gcc", "clang")


def check_options(
    *, device: str, torch_compile: bool = False, liger_kernels: bool = False, attn_implementation: str | None = None
) -> None:
    """Refuse options that this machine does not support; to be called before anything is downloaded.

    Raises:
        ConfigError: Liger's or flash attention's kernels are not installed or the device is no GPU, or there is no
            compiler.
    """
    device_type = torch.device(device).type
    if attn_implementation == "flash_attention_2":
        if device_type != "cuda":
            raise ConfigError(
                f"attn_implementation: {attn_implementation!r} runs on CUDA only, the model is to be on {device!r}: "
                'take "sdpa"'
            )
        if importlib.util.find_spec("flash_attn") is None:
            raise ConfigError(
                f'attn_implementation: {attn_implementation!r} needs flash-attn, which is not installed; take "sdpa"'
            )
    if liger_kernels:
        if device_type != "cuda":
            raise ConfigError(f"liger_kernels: they run on CUDA only, but the model is to be on {device!r}; set false")
        if importlib.util.find_spec("liger_kernel") is None:
            raise ConfigError(
                "liger_kernels: liger-kernel is not installed: pip install 'gspo-gym[liger]', or set false"
            )
    if torch_compile:
        names = _GPU_COMPILERS if device_type == "cuda" else _CPU_COMPILERS
        # torch asks these variables first.
        candidates = (os.environ.get("CC" if device_type == "cuda" else "CXX"), *names)
        if not any(shutil.which(name) for name in candidates if name):
            raise ConfigError(
                f"torch_compile: torch writes C++ for {device_type} and finds no compiler ({' or '.join(names)}); "
                "install one, or set false"
            )


def prepare_for_training(
    model: Any,
    *,
    device: str | None = None,
    gradient_checkpointing: bool = False,
    torch_compile: bool = False,
    liger_kernels: bool = False,
) -> None:
    """Switch options on in the model, plain or with an adapter (Any: untyped).

    Args:
        device: that it will be on; None: it is there.
        gradient_checkpointing: each decoder layer keeps its input only and is computed again in the backward pass.
        torch_compile: each decoder layer is compiled at its first use, for shapes that vary.
        liger_kernels: fused norms and feed-forward activations.

    Raises:
        ConfigError: the machine or the model's architecture does not support it.
    """
    device = device or str(next(model.parameters()).device)
    check_options(device=device, torch_compile=torch_compile, liger_kernels=liger_kernels)
    inner = model.get_base_model() if is_adapter(model) else model
    layers = [module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)]
    name = type(inner).__name__
    if (gradient_checkpointing or torch_compile) and not layers:
        raise ConfigError(f"model: {name} has no decoder layers of transformers' kind to checkpoint or compile")
    if liger_kernels:
        apply_liger(inner)
    if gradient_checkpointing:
        try:
            # Reentrant checkpointing needs an input with a gradient, and an adapter's base has none.
            # transformers 5.24 has the first name, and warns of the second, which is all that earlier ones have.
            enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        except ValueError as error:
            raise ConfigError(f"gradient_checkpointing: {error}") from error
    if torch_compile:
        for layer in layers:  # one by one and not the whole model: layers share the code
            layer.compile(dynamic=True)


def apply_liger(model: Any) -> None:
    """Put Liger's layers into this model only (Any: untyped); classes that it replaces in transformers are put back.

    Raises:
        ConfigError: Liger has no kernels for this kind of model.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        model_types = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ConfigError(
            f"liger_kernels: there are none for models of type {kind!r}, only for {model_types}; set false"
        )
    module = sys.modules[type(model).__module__]
    # Liger writes into transformers' module, which other models of the process use, too.
    before = dict(vars(module))
    try:
        # Liger can replace the rotary embedding only in all models of the process; head and log-softmax belong to
        # `learning.logprobs`.
        _apply_liger_kernel_to_instance(model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    finally:
        vars(module).update(before)

"""The dropout of a LoRA adapter, under masks that a seed decides.

A ratio compares two policies. It compares their weights only if both were computed under the same masks (common random
numbers); with fresh masks in each pass it would mostly measure the masks. Used by the scorer alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn


def adapter_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The dropout layers of the model's adapters, none of its own; peft puts them into `lora_dropout` by adapter."""
    held = [module.get_submodule("lora_dropout") for module in model.modules() if "lora_dropout" in module._modules]
    return [layer for layers in held for layer in layers.modules() if isinstance(layer, nn.Dropout)]


@contextlib.contextmanager
def seeded_random(seed: int, device: torch.device) -> Iterator[None]:
    """Within, torch's generators of the CPU and of `device` start from the seed; afterwards they are as they were.

    `device` is that of a tensor, which has an index where it is a GPU.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # which initializes CUDA where there is a device
        for generator in (torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices)):
            generator.manual_seed(seed)
        yield


def switch(layers: Sequence[nn.Module], *, on: bool) -> None:
    """Let these layers drop out, or not."""
    for layer in layers:
        layer.training = on

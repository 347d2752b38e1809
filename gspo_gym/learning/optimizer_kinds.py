"""The AdamW that `OptimizerSettings.kind` names, and its state as named tensors: torch's, or bitsandbytes' in 8 bits.

Called by `PolicyOptimizer`, which decides when a step is taken. Each optimizer keeps, per parameter, what the table in
`_STATE_NAMES` says; both ways of torch's keep the same, so a checkpoint of one goes on with the other.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.learning.settings import OptimizerSettings

_ADAMW_NAMES = ("exp_avg", "exp_avg_sq", "step")
# bitsandbytes keeps the moments of a small parameter in float32, and those of a larger one as 8-bit codes of the table
# `qmap`, scaled by `absmax` for every 256 of them.
_BLOCK = 256
_EIGHT_BIT_NAMES = ("state1", "state2", "step")
_EIGHT_BIT_CODED_NAMES = (*_EIGHT_BIT_NAMES, "qmap1", "qmap2", "absmax1", "absmax2")


def build_adamw(matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], settings: OptimizerSettings) -> Any:
    """The optimizer of these parameters, with weight decay on `matrices` only.

    Any: torch's class or bitsandbytes', which is untyped; both are a `torch.optim.Optimizer`.

    Raises:
        ConfigError: bitsandbytes is asked for and not installed, or cannot do this on the parameters' device.
    """
    device = next(iter((*matrices, *others))).device
    groups = [
        {"params": list(parameters), "weight_decay": weight_decay}
        for parameters, weight_decay in ((matrices, settings.weight_decay), (others, 0.0))
        if parameters
    ]
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    if settings.kind in ("adamw", "adamw_fused"):
        return torch.optim.AdamW(groups, fused=settings.kind == "adamw_fused", **options)
    _check_bitsandbytes(settings.kind, device)
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(groups, is_paged=settings.kind == "paged_adamw_8bit", **options)


def state_names(settings: OptimizerSettings) -> tuple[str, ...]:
    """The names that `read_state` may give a parameter's state."""
    return _EIGHT_BIT_CODED_NAMES if _is_8bit(settings) else _ADAMW_NAMES


def read_state(optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state of one parameter by name; empty before its first step (Any: see `build_adamw`).

    The tensors are the live ones, but for `step`, and for the tables, of which bitsandbytes shares one among all
    parameters: a file takes no tensor twice.
    """
    if parameter not in optimizer.state:
        return {}
    state = {}
    for name, value in optimizer.state[parameter].items():
        tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
        state[name] = tensor.clone() if name.startswith("qmap") else tensor
    return state


def check_state(name: str, parameter: nn.Parameter, found: Mapping[str, Tensor], settings: OptimizerSettings) -> None:
    """Refuse what is not the whole state of the parameter called `name`, in its shape.

    Raises:
        CheckpointError: says what is missing or of another shape.
    """
    num_blocks = -(-parameter.numel() // _BLOCK)
    shapes = {"step": (), "qmap1": (256,), "qmap2": (256,), "absmax1": (num_blocks,), "absmax2": (num_blocks,)}
    expected: Sequence[str] = _ADAMW_NAMES
    if _is_8bit(settings):
        is_coded = "state1" in found and found["state1"].dtype == torch.uint8
        expected = _EIGHT_BIT_CODED_NAMES if is_coded else _EIGHT_BIT_NAMES
    if set(found) != set(expected):
        raise CheckpointError(f"optimizer state of {name}: expected {sorted(expected)}, got {sorted(found)}")
    for key, value in found.items():
        shape = shapes.get(key, tuple(parameter.shape))
        if tuple(value.shape) != shape:
            raise CheckpointError(f"optimizer state {key} of {name}: expected shape {shape}, got {tuple(value.shape)}")


def write_state(optimizer: Any, states: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
    """Put copies of these states, bit for bit, in place of all that the optimizer has (Any: see `build_adamw`)."""
    if isinstance(optimizer, torch.optim.AdamW):
        # Its own way, because that knows where each of its kinds counts the steps: on the CPU or beside the parameter.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        copies = {i: _copies(states[p]) for i, p in enumerate(parameters) if p in states}
        optimizer.load_state_dict(optimizer.state_dict() | {"state": copies})
        return
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = {
            name: _own_copy(optimizer, parameter, name, tensor) for name, tensor in state.items()
        }


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _own_copy(optimizer: Any, parameter: nn.Parameter, name: str, tensor: Tensor) -> Any:
    """What bitsandbytes keeps under that name: it counts steps in an int, and may page the moments."""
    if name == "step":
        return int(tensor)
    if name in ("state1", "state2"):
        return optimizer.get_state_buffer(parameter, dtype=tensor.dtype).copy_(tensor)
    return tensor.to(parameter.device, copy=True)


def _is_8bit(settings: OptimizerSettings) -> bool:
    return settings.kind in ("adamw_8bit", "paged_adamw_8bit")


def _check_bitsandbytes(kind: str, device: torch.device) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"optimizer kind {kind!r} needs bitsandbytes, which is not installed: pip install 'gspo-gym[quant]', or "
            "take 'adamw_fused'"
        )
    if kind == "paged_adamw_8bit" and device.type != "cuda":
        raise ConfigError(
            f"optimizer kind {kind!r} pages between GPU and main memory, but the parameters are on {device}: take "
            "'adamw_8bit'"
        )
    if device.type not in ("cpu", "cuda", "xpu"):
        raise ConfigError(f"optimizer kind {kind!r}: bitsandbytes has none for {device}; take 'adamw'")

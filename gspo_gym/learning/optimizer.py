"""AdamW (torch's, or bitsandbytes' in 8 bits) that skips steps which are not finite and restarts bit for bit.

The learning rate depends on the step alone: resuming a run needs only the step count. State is saved as named tensors;
both of torch's kinds keep the same, so a checkpoint of one goes on with the other.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo_gym.errors import CheckpointError, ConfigError, NonFiniteError
from gspo_gym.learning.settings import OptimizerSettings


@dataclass(frozen=True, slots=True)
class StepReport:
    """One attempted optimizer step.

    `grad_norm` is the global L2 norm before clipping; `is_skipped`: the loss or that norm was NaN or infinite, and
    neither parameters nor optimizer state were touched.
    """

    learning_rate: float
    grad_norm: float
    is_skipped: bool


class PolicyOptimizer:
    """The optimizer of a model's trainable parameters.

    Raises:
        ConfigError: nothing is trainable, a trainable parameter has 16 bits, a schedule without an end or room, or an
            optimizer that needs bitsandbytes without it.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        learning_rate: float,
        total_steps: int | None,
        max_nonfinite_steps: int,
    ) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_trainable(self._parameters)
        check_schedule(settings, total_steps)
        self._settings = settings
        self._peak = learning_rate
        self._total_steps = total_steps
        self._max_nonfinite_steps = max_nonfinite_steps
        self._num_attempts = 0
        self._num_nonfinite_in_a_row = 0
        matrices = [p for p in self._parameters.values() if p.dim() >= 2]
        vectors = [p for p in self._parameters.values() if p.dim() < 2]
        self._adamw = build_adamw(matrices, vectors, settings, learning_rate=learning_rate)

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def step(self, loss: float) -> StepReport:
        """Clip the accumulated gradients and take one step, unless `loss` or the gradients' norm is not finite.

        The gradients are gone afterwards.

        Raises:
            NonFiniteError: more than `max_nonfinite_steps` steps in a row had to be skipped.
        """
        rate = scheduled_rate(
            self._num_attempts, peak=self._peak, settings=self._settings, total_steps=self._total_steps
        )
        self._num_attempts += 1  # also if the step is skipped: a run's last step has the schedule's last rate
        parameters = [p for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = float(norm)
        is_skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if is_skipped:
            self.zero_grad()
            self._count_nonfinite(loss, grad_norm)
        else:
            self._num_nonfinite_in_a_row = 0
            torch.nn.utils.clip_grads_with_norm_(parameters, self._settings.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            self.zero_grad()
        return StepReport(rate, grad_norm, is_skipped)

    def tensors(self) -> dict[str, Tensor]:
        """Return AdamW's state, named `optimizer.<what>.<parameter>`; empty before the first step.

        The large tensors are the live ones: write them before the next step.
        """
        return {
            f"optimizer.{key}.{name}": tensor
            for name, parameter in self._parameters.items()
            for key, tensor in read_state(self._adamw, parameter).items()
        }

    def counters(self) -> dict[str, int]:
        return {
            "optimizer.num_attempts": self._num_attempts,
            "optimizer.num_nonfinite_in_a_row": self._num_nonfinite_in_a_row,
        }

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int | float]) -> None:
        """Go on exactly where `tensors()` and `counters()` were taken. Other names than ours are not looked at.

        Raises:
            CheckpointError: state of other parameters, of other shapes, or incomplete.
        """
        own = {name: value for name, value in tensors.items() if name.startswith("optimizer.")}
        names = state_names(self._settings)
        possible = {f"optimizer.{key}.{name}" for name in self._parameters for key in names}
        if strangers := sorted(set(own) - possible):
            raise CheckpointError(
                "optimizer state of parameters that are not trained here, or of another kind than "
                f"{self._settings.kind!r}: {strangers[:3]} ..."
            )
        # All is checked before anything is set: a refused state leaves the optimizer as it was.
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            state = {key: own[f"optimizer.{key}.{name}"] for key in names if f"optimizer.{key}.{name}" in own}
            if state:
                check_state(name, parameter, state, self._settings)
                states[parameter] = state
        try:
            num_attempts = int(counters["optimizer.num_attempts"])
            num_nonfinite_in_a_row = int(counters["optimizer.num_nonfinite_in_a_row"])
        except KeyError as error:
            raise CheckpointError(f"the optimizer's counter {error} is missing") from error
        self._num_attempts, self._num_nonfinite_in_a_row = num_attempts, num_nonfinite_in_a_row
        write_state(self._adamw, states)

    def _count_nonfinite(self, loss: float, grad_norm: float) -> None:
        self._num_nonfinite_in_a_row += 1
        if self._num_nonfinite_in_a_row > self._max_nonfinite_steps:
            raise NonFiniteError(
                f"optimizer step {self._num_attempts}: loss {loss}, gradient norm {grad_norm}; "
                f"{self._num_nonfinite_in_a_row} steps in a row were skipped, and {self._max_nonfinite_steps} are "
                "allowed. Parameters are those of the last finite step; lower the learning rate or the clip range"
            )


def _check_trainable(parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise ConfigError("no parameter of the model is trainable (requires_grad)")
    # In 16 bits, steps smaller than 1/256 of a weight would be rounded away.
    narrow = [name for name, p in parameters.items() if p.dtype not in (torch.float32, torch.float64)]
    if narrow:
        raise ConfigError(
            f"trainable parameters must be float32, but {narrow[0]} (and {len(narrow) - 1} more) has "
            f"{parameters[narrow[0]].dtype}. Load the model in float32, or train a LoRA, whose weights are float32 on "
            "a 16-bit model"
        )


def scheduled_rate(step: int, *, peak: float, settings: OptimizerSettings, total_steps: int | None) -> float:
    """Return the learning rate of the optimizer step number `step` (0 is the first).

    Linear warm-up: step k of `warmup_steps` W takes (k + 1) / W of the peak. Then the peak (constant), or from it a
    straight line (linear) or half a cosine (cosine) to `min_lr_fraction` of it, reached at step `total_steps - 1` and
    kept after. `total_steps` None means "not known", which a constant schedule with `num_warmup_steps` does not mind.

    >>> settings = OptimizerSettings(num_warmup_steps=2, schedule="cosine", min_lr_fraction=0.0)
    >>> [round(scheduled_rate(k, peak=1.0, settings=settings, total_steps=5), 3) for k in range(6)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]

    Raises:
        ConfigError: as `check_schedule`.
    """
    check_schedule(settings, total_steps)
    warmup = settings.warmup_steps(total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup  # no step has rate 0
    if settings.schedule == "constant" or total_steps is None:
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    remaining = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (settings.min_lr_fraction + (1 - settings.min_lr_fraction) * remaining)


def check_schedule(settings: OptimizerSettings, total_steps: int | None) -> None:
    """Raise a ConfigError for a decay or a warm-up fraction without `total_steps`, or a decay without a step."""
    if total_steps is None:
        settings.warmup_steps(total_steps)  # refuses a fraction of it
        if settings.schedule != "constant":
            raise ConfigError(
                f"schedule {settings.schedule!r} needs total_steps, the number of optimizer steps of the run"
            )
    elif (problem := settings.decay_problem(total_steps)) is not None:
        raise ConfigError(f"optimizer.schedule: {problem}")


_ADAMW_NAMES = ("exp_avg", "exp_avg_sq", "step")
# bitsandbytes keeps the moments of a small parameter in float32, and those of a larger one as 8-bit codes of the table
# `qmap`, scaled by `absmax` for every 256 of them.
_BLOCK = 256
_EIGHT_BIT_KINDS = ("adamw_8bit", "paged_adamw_8bit")
_EIGHT_BIT_NAMES = ("state1", "state2", "step")
_EIGHT_BIT_CODED_NAMES = (*_EIGHT_BIT_NAMES, "qmap1", "qmap2", "absmax1", "absmax2")


def build_adamw(
    matrices: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    settings: OptimizerSettings,
    *,
    learning_rate: float,
) -> Any:  # torch's class or bitsandbytes', which is untyped; both are a `torch.optim.Optimizer`
    """Return the optimizer of these parameters, with weight decay on `matrices` only.

    Raises:
        ConfigError: bitsandbytes is asked for and not installed, or cannot do this on the parameters' device.
    """
    device = next(iter((*matrices, *others))).device
    groups = [
        {"params": list(parameters), "weight_decay": weight_decay}
        for parameters, weight_decay in ((matrices, settings.weight_decay), (others, 0.0))
        if parameters
    ]
    options: dict[str, Any] = {"lr": learning_rate, "betas": settings.betas, "eps": settings.eps}
    if settings.kind in ("adamw", "adamw_fused"):
        return torch.optim.AdamW(groups, fused=settings.kind == "adamw_fused", **options)
    _check_bitsandbytes(settings.kind, device)
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(groups, is_paged=settings.kind == "paged_adamw_8bit", **options)


def state_names(settings: OptimizerSettings) -> tuple[str, ...]:
    """Return the names that `read_state` may give a parameter's state."""
    return _EIGHT_BIT_CODED_NAMES if _is_8bit(settings) else _ADAMW_NAMES


def read_state(optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of one parameter by name; empty before its first step (Any: see `build_adamw`).

    The tensors are the live ones, but for `step` and the tables.
    """
    if parameter not in optimizer.state:
        return {}
    state = {}
    for name, value in optimizer.state[parameter].items():
        tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
        # bitsandbytes shares a table among all parameters, and a file takes no tensor twice.
        state[name] = tensor.clone() if name.startswith("qmap") else tensor
    return state


def check_state(name: str, parameter: nn.Parameter, found: Mapping[str, Tensor], settings: OptimizerSettings) -> None:
    """Raise a CheckpointError for an incomplete state of the parameter called `name`, or one in another shape."""
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
    """Replace the optimizer's whole state by exact copies of these (Any: see `build_adamw`)."""
    if isinstance(optimizer, torch.optim.AdamW):
        # By torch, which knows where each of its kinds counts the steps: on the CPU or beside the parameter.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        copies = {
            i: {name: tensor.clone() for name, tensor in states[p].items()}
            for i, p in enumerate(parameters)
            if p in states
        }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": copies})
        return
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = {
            name: _own_copy(optimizer, parameter, name, tensor) for name, tensor in state.items()
        }


def _own_copy(optimizer: Any, parameter: nn.Parameter, name: str, tensor: Tensor) -> Any:
    # bitsandbytes counts steps in an int, and may page the moments.
    if name == "step":
        return int(tensor)
    if name in ("state1", "state2"):
        return optimizer.get_state_buffer(parameter, dtype=tensor.dtype).copy_(tensor)
    return tensor.to(parameter.device, copy=True)


def _is_8bit(settings: OptimizerSettings) -> bool:
    return settings.kind in _EIGHT_BIT_KINDS


def check_kind(kind: str, device: torch.device) -> None:
    """Raise a ConfigError for a kind of optimizer that cannot be had here for parameters on the device."""
    if kind in _EIGHT_BIT_KINDS:
        _check_bitsandbytes(kind, device)


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

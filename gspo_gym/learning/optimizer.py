"""AdamW that refuses what is not finite, follows a schedule, and can be written down and restarted bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gspo_gym.errors import CheckpointError, ConfigError, NonFiniteError
from gspo_gym.learning.optimizer_kinds import build_adamw, check_state, read_state, state_names, write_state
from gspo_gym.learning.schedule import check_schedule, learning_rate
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

    A skipped step still takes its place in the schedule, so that a run's last step has the last learning rate.

    Raises:
        ConfigError: nothing is trainable, a trainable parameter has 16 bits (steps smaller than 1/256 of a weight would
            be rounded away), a schedule without an end or room, or an optimizer that needs bitsandbytes without it.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        total_steps: int | None,
        max_nonfinite_steps: int,
    ) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_trainable(self._parameters)
        check_schedule(settings, total_steps)
        self._settings = settings
        self._total_steps = total_steps
        self._max_nonfinite_steps = max_nonfinite_steps
        self._num_attempts = 0
        self._num_nonfinite_in_a_row = 0
        matrices = [p for p in self._parameters.values() if p.dim() >= 2]
        others = [p for p in self._parameters.values() if p.dim() < 2]
        self._adamw = build_adamw(matrices, others, settings)

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def step(self, loss: float) -> StepReport:
        """Clip the accumulated gradients and take one step, unless `loss` or the gradients' norm is not finite.

        The gradients are gone afterwards.

        Raises:
            NonFiniteError: more than `max_nonfinite_steps` steps in a row had to be skipped.
        """
        rate = learning_rate(self._num_attempts, settings=self._settings, total_steps=self._total_steps)
        self._num_attempts += 1
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
        """AdamW's state, named `optimizer.<what>.<parameter>`; empty before the first step.

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
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            found = {key: own[f"optimizer.{key}.{name}"] for key in names if f"optimizer.{key}.{name}" in own}
            if found:
                check_state(name, parameter, found, self._settings)
                states[parameter] = found
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
    narrow = [name for name, p in parameters.items() if p.dtype not in (torch.float32, torch.float64)]
    if narrow:
        raise ConfigError(
            f"trainable parameters must be float32, but {narrow[0]} (and {len(narrow) - 1} more) has "
            f"{parameters[narrow[0]].dtype}. Load the model in float32, or train a LoRA, whose weights are float32 on "
            "a 16-bit model"
        )

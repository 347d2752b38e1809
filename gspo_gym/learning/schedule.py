"""The learning rate as a function of the step, and of nothing else: resuming a run needs only the step count."""

from __future__ import annotations

import math

from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import OptimizerSettings

_ROUNDING = 1e-9  # of a product of a fraction and a number of steps; far above float64's, far below a step


def learning_rate(step: int, *, settings: OptimizerSettings, total_steps: int | None) -> float:
    """The learning rate of the optimizer step number `step` (0 is the first).

    Linear warm-up: step k of `warmup_steps` W takes (k + 1) / W of the peak, so that no step has rate 0. Then the peak
    (constant), or from it a straight line (linear) or half a cosine (cosine) to `min_lr_fraction` of it, reached at
    step `total_steps - 1` and kept after. `total_steps` None means "not known", which a constant schedule with
    `num_warmup_steps` does not mind.

    >>> settings = OptimizerSettings(learning_rate=1.0, num_warmup_steps=2, schedule="cosine", min_lr_fraction=0.0)
    >>> [round(learning_rate(k, settings=settings, total_steps=5), 3) for k in range(6)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]

    Raises:
        ConfigError: as `check_schedule`.
    """
    check_schedule(settings, total_steps)
    peak, warmup = settings.learning_rate, warmup_steps(settings, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule == "constant" or total_steps is None:
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    remaining = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (settings.min_lr_fraction + (1 - settings.min_lr_fraction) * remaining)


def warmup_steps(settings: OptimizerSettings, total_steps: int | None) -> int:
    """The optimizer steps of linear warm-up: `num_warmup_steps`, or `warmup_fraction` of all steps, rounded up.

    A product that is whole up to float64's rounding is taken as whole: transformers' `warmup_ratio`, which is rounded
    up too, makes 8 steps of 0.07 * 100.

    >>> warmup_steps(OptimizerSettings(learning_rate=1.0, warmup_fraction=0.1), total_steps=30)
    3

    Raises:
        ConfigError: a fraction of an unknown number of steps.
    """
    if settings.warmup_fraction is None:
        return settings.num_warmup_steps
    if total_steps is None:
        raise ConfigError("warmup_fraction needs total_steps, the number of optimizer steps of the run")
    return math.ceil(settings.warmup_fraction * total_steps - _ROUNDING)


def check_schedule(settings: OptimizerSettings, total_steps: int | None) -> None:
    """Refuse a schedule that has no end or no room.

    Raises:
        ConfigError: a decay or a `warmup_fraction` without `total_steps`, or a decay that the warm-up leaves no step.
    """
    num_warmup_steps = warmup_steps(settings, total_steps)
    if settings.schedule == "constant":
        return
    if total_steps is None:
        raise ConfigError(f"schedule {settings.schedule!r} needs total_steps, the number of optimizer steps of the run")
    if total_steps <= num_warmup_steps:
        raise ConfigError(
            f"schedule {settings.schedule!r}: expected total_steps > the steps of warm-up, got {total_steps} <= "
            f"{num_warmup_steps}"
        )

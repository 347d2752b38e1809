"""The learning rate as a function of the step, and of nothing else: resuming a run needs only the step count."""

from __future__ import annotations

import math

from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import OptimizerSettings


def learning_rate(step: int, *, settings: OptimizerSettings, total_steps: int | None) -> float:
    """The learning rate of the optimizer step number `step` (0 is the first).

    Linear warm-up: step k of `num_warmup_steps` W takes (k + 1) / W of the peak, so that no step has rate 0. Then the
    peak, or half a cosine from the peak to `min_lr_fraction` of it, reached at step `total_steps - 1` and kept after.
    `total_steps` None means "not known", which a constant schedule does not mind.

    >>> settings = OptimizerSettings(learning_rate=1.0, num_warmup_steps=2, schedule="cosine", min_lr_fraction=0.0)
    >>> [round(learning_rate(k, settings=settings, total_steps=5), 3) for k in range(6)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]

    Raises:
        ConfigError: a cosine without `total_steps`, or with no step left after the warm-up.
    """
    peak, warmup = settings.learning_rate, settings.num_warmup_steps
    if settings.schedule == "cosine":
        check_cosine(settings, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if settings.schedule == "constant" or total_steps is None:
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    floor = settings.min_lr_fraction
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def check_cosine(settings: OptimizerSettings, total_steps: int | None) -> None:
    """Refuse a cosine that has no end or no room."""
    if total_steps is None:
        raise ConfigError("schedule 'cosine' needs total_steps, the number of optimizer steps of the run")
    if total_steps <= settings.num_warmup_steps:
        raise ConfigError(
            f"schedule 'cosine': expected total_steps > num_warmup_steps, got {total_steps} <= "
            f"{settings.num_warmup_steps}"
        )

"""A small run with a KL term, whose reference a test places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_run import small_run

from gspo_gym.config.run_config import RunConfig


def make_config(folder: Path, *, iterations: int = 2, reference: dict[str, Any], **model: Any) -> RunConfig:
    lora = {"lora": {"r": 4}} if model.get("trainer_mode") == "lora" else {}
    return RunConfig.from_dict(
        small_run(
            run={"folder": str(folder)},
            algorithm={"variety": "gspo_token"},
            model={**model},
            rollout={"max_turns": 3, "temperature": 0.7},
            training={"iterations_per_epoch": iterations, "checkpoint_every_n_iters": 1, **lora},
            loss={"kl_coef": 0.3, "entropy_coef": 0.5},  # entropy has a gradient, whatever is earned
            reference=reference,
            evaluation={"seeds": "0:2", "every_n_iters": 100},
        )
    )

"""A small run with a KL term, whose reference a test places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo_gym.config.run_config import RunConfig


def make_config(folder: Path, *, iterations: int = 2, reference: dict[str, Any], **model: Any) -> RunConfig:
    lora = {"lora": {"r": 4}} if model.get("trainer_mode") == "lora" else {}
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "algorithm": {"variety": "gspo_token"},
            "model": {"base": "tiny:qwen3-64", "label": "test", **model},
            "rollout": {
                "env_name": "GuessNumber",
                "env_config": {"style": "terse"},
                "max_turns": 3,
                "max_output_tokens": 3,
                "max_model_len": 256,
                "episodes_per_batch": 8,
                "temperature": 0.7,
            },
            "training": {
                "iterations_per_epoch": iterations,
                "group_size": 4,
                "batch_size": 4,
                "learning_rate": 1e-3,
                "checkpoint_every_n_iters": 1,
                **lora,
            },
            "loss": {"kl_coef": 0.3, "entropy_coef": 0.5},  # entropy has a gradient, whatever is earned
            "reference": reference,
            "evaluation": {"seeds": "0:2", "every_n_iters": 100},
        }
    )

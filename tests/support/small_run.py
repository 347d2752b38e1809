"""The settings of a small run of GuessNumber, of which a test states only what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def small_run(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run's sections: `sections`, key by key, over those of a run of two steps."""
    values: dict[str, Any] = {
        "model": {"base": "tiny:qwen3-64", "label": "test"},
        "rollout": {
            "env_name": "GuessNumber",
            "env_config": {"style": "terse"},
            "max_turns": 4,
            "max_output_tokens": 3,
            "max_model_len": 256,
            "episodes_per_batch": 8,
        },
        "training": {"iterations_per_epoch": 2, "group_size": 4, "batch_size": 4, "learning_rate": 1e-3},
        "evaluation": {"seeds": "0:4"},
    }
    return values | {name: values.get(name, {}) | dict(section) for name, section in sections.items()}

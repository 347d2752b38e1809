"""The reference of a KL term is where a run starts: its first step's KL is 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.run.records import read_metrics


def make_config(folder: Path, label: str, **more: Any) -> RunConfig:
    model = {"base": "tiny:qwen3-64", "label": label, **more.pop("model", {})}
    lora = {"lora": {"r": 4}} if model.get("trainer_mode") == "lora" else {}
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "algorithm": {"variety": "gspo_token"},
            "model": model,
            "rollout": {
                "env_name": "GuessNumber",
                "env_config": {"style": "terse"},
                "max_turns": 2,
                "max_output_tokens": 3,
                "max_model_len": 256,
                "episodes_per_batch": 4,
            },
            "training": {
                "iterations_per_epoch": 2,
                "group_size": 4,
                "batch_size": 4,
                "learning_rate": 1e-2,
                "checkpoint_every_n_iters": 1,
                **lora,
            },
            "loss": {"kl_coef": 0.3, "entropy_coef": 0.5},  # entropy has a gradient, whatever is earned
            "evaluation": {"seeds": "0:1", "every_n_iters": 100},
            **more,
        }
    )


def kl_by_step(config: RunConfig) -> list[float]:
    return [line["kl/ref_k3"] for line in read_metrics(config.run_folder)]


WARMUP = {"warmup": {"num_episodes": 4, "num_epochs": 1, "batch_size": 4, "learning_rate": 1e-2}}


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_kl_of_the_first_step_is_zero_after_a_warm_up(mode: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, "warm", model={"trainer_mode": mode}, **WARMUP)
    run_training(config)
    first, second = kl_by_step(config)
    assert first == 0.0
    assert second > 1e-6  # it is not the policy itself


def test_kl_of_the_first_step_is_zero_for_a_run_that_starts_from_an_adapter(tmp_path: Path) -> None:
    lora: dict[str, Any] = {"model": {"trainer_mode": "lora"}}
    run_training(make_config(tmp_path, "first", **lora, **WARMUP))
    checkpoint = str(tmp_path / "first" / "checkpoints" / "step_000002")
    config = make_config(tmp_path, "second", model={"trainer_mode": "lora", "base": checkpoint})
    run_training(config)
    assert kl_by_step(config)[0] == 0.0

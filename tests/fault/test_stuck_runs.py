"""Runs that cannot learn, or cannot go on, come to a named end within ten batches and say so in their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.errors import GymError, RolloutError, StuckError
from gspo_gym.run.recording import read_metrics

ROOT = Path(__file__).parents[2]


class Stubborn(TextEnv):
    """Fails where it is told to; else pays the letters, or the same for all."""

    def __init__(self, fails_in: str = "", pays: str = "letters") -> None:
        super().__init__()
        self.fails_in, self.pays = fails_in, pays

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        if self.fails_in == "reset":
            raise RuntimeError("the server is down")
        return "letters", {}

    def step(self, action: Any) -> Any:
        if self.fails_in == "step":
            raise RuntimeError("the server is down")
        return "", sum(map(ord, action)) % 97 / 97 if self.pays == "letters" else 0.5, True, False, {}


@pytest.fixture(autouse=True)
def env() -> Any:
    register("test_stuck/Stubborn-v0", entry_point=Stubborn)
    yield
    gymnasium.registry.pop("test_stuck/Stubborn-v0")


def make_config(folder: Path, *, num_steps: int = 40, learning_rate: float = 1e-3, **env_config: str) -> RunConfig:
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "algorithm": {"variety": "gspo_token"},
            "model": {"base": "tiny:qwen3-64", "label": "stuck"},
            "rollout": {
                "env_name": "test_stuck/Stubborn-v0",
                "env_config": env_config,
                "isolation": "thread",
                "max_turns": 1,
                "max_output_tokens": 2,
                "max_model_len": 64,
                "episodes_per_batch": 4,
            },
            "training": {
                "iterations_per_epoch": num_steps,
                "group_size": 2,
                "batch_size": 2,
                "learning_rate": learning_rate,
            },
            "loss": {},
            "evaluation": {"seeds": "0:1", "every_n_iters": 100},
        }
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"pays": "the same"}, StuckError),
        ({"fails_in": "reset"}, RolloutError),
        ({"fails_in": "step"}, RolloutError),
        ({"learning_rate": 1e38}, GymError),  # weights that are not finite: the engine, or the learner, says it
    ],
    ids=["nothing to learn", "no reset works", "no step works", "not finite"],
)
def test_a_run_that_cannot_go_on_ends_by_name_within_ten_batches(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as ended:
        run_training(make_config(tmp_path, **changes))
    summary = json.loads((tmp_path / "stuck" / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "failed"
    assert type(ended.value).__name__ in summary["error"]
    assert len(read_metrics(tmp_path / "stuck")) <= 10

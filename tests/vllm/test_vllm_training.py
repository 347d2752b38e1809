"""Whole runs whose episodes vLLM samples: in this process, with adapters, and behind a URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.vllm_server import VllmServer
from gspo_gym.engine.vllm_settings import VllmSettings
from gspo_gym.train import run_training


def config(folder: Path, **more: Any) -> RunConfig:
    """Two iterations of 16 episodes of GuessNumber, after a little warm-up."""
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "model": {"base": "tiny:qwen3-64", "label": "served", **more.get("model", {})},
            "rollout": {
                "env_name": "GuessNumber",
                "engine": "vllm",
                "max_turns": 3,
                "max_output_tokens": 3,
                "max_model_len": 256,
                "episodes_per_batch": 16,
            },
            "vllm": {} if "services" in more else {"kv_cache_gib": 0.25},
            "training": {"iterations_per_epoch": 2, "group_size": 4, "batch_size": 8, "learning_rate": 1e-2},
            "evaluation": {"seeds": "0:4"},
            "warmup": {"num_episodes": 16, "learning_rate": 1e-3},
            **{name: section for name, section in more.items() if name != "model"},
        }
    )


def require_sound(run: RunConfig) -> None:
    """Both steps were taken on samples of the committed weights, whose logprobs the learner's scores agree with."""
    summary = run_training(run)
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    lines = (run.run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["kl/rollout_max_gap"] <= 1e-4
        assert line["rollout/num_episodes"] == 16
        assert line["rollout/num_dropped"] == 0
        assert line["optim/grad_norm"] > 0


@pytest.mark.parametrize("trainer_mode", ["full", "lora"])
def test_two_steps_on_vllm_in_this_process_agree_with_the_learner(trainer_mode: str, tmp_path: Path) -> None:
    require_sound(config(tmp_path, model={"trainer_mode": trainer_mode}))


def test_two_steps_on_a_server_that_runs_already_agree_with_the_learner(model_folder: Path, tmp_path: Path) -> None:
    settings = VllmSettings(
        model=str(model_folder), max_model_len=256, dtype="float32", max_num_seqs=32, kv_cache_gib=0.25,
        enforce_eager=True,
    )  # fmt: skip
    with VllmServer(settings) as server:
        require_sound(config(tmp_path, services={"engine_urls": [server.url]}))

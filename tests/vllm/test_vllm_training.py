"""Whole runs whose episodes vLLM samples, with whole models and with adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.rollout.episode_files import read_episodes

TRAINING = {"iterations_per_epoch": 2, "group_size": 8, "batch_size": 16, "learning_rate": 1e-2}


def config(folder: Path, model: dict[str, Any], **more: Any) -> RunConfig:
    """Two iterations of 32 episodes of GuessNumber."""
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "model": model,
            "rollout": {
                "env_name": "GuessNumber",
                "env_config": {"style": "terse", "low": 1, "high": 8, "max_guesses": 4},
                "max_turns": 4,
                "max_output_tokens": 3,
                "max_model_len": 256,
                "episodes_per_batch": 32,
            },
            "training": TRAINING,
            "evaluation": {"seeds": "0:4"},
            **more,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the run "player", whose policy has learned from demonstrations how to guess, so that rewards differ."""
    folder = tmp_path_factory.mktemp("runs")
    warmup = {"num_episodes": 256, "num_epochs": 4, "learning_rate": 2e-3, "batch_size": 32}
    run_training(config(folder, {"base": "tiny:qwen3-64", "label": "player"}, warmup=warmup))
    return folder


def require_sound(run: RunConfig) -> None:
    """Both steps were taken on samples of the committed weights, whose logprobs the learner's scores agree with."""
    summary = run_training(run)
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    lines = (run.run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["kl/rollout_max_gap"] <= 1e-4
        assert (line["rollout/num_episodes"], line["rollout/num_dropped"]) == (32, 0)
        assert line["optim/grad_norm"] > 0


VLLM = {"kv_cache_gib": 0.25, "max_model_len": 256}


@pytest.fixture(scope="module")
def plain(folder: Path) -> RunConfig:
    """A sound run with nothing special about it: whole models, read from files."""
    run = config(folder, {"source": "player", "label": "plain"}, vllm=VLLM)
    require_sound(run)
    return run


def played(run: RunConfig) -> list[list[int]]:
    """The tokens of all training episodes."""
    files = [run.run_folder / "episodes" / f"step_{step:06d}.jsonl.gz" for step in (1, 2)]
    tokens = [segment.token_ids.tolist() for file in files for t in read_episodes(file) for segment in t.segments]
    assert len(tokens) >= 64
    return tokens


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["auto", "direct"])  # merged here, and as adapters
def test_two_steps_of_an_adapter_on_vllm_in_this_process_agree_with_the_learner(mode: str, folder: Path) -> None:
    training = {**TRAINING, "weight_sync": {"mode": mode}}
    model = {"source": "player", "label": f"lora-{mode}", "trainer_mode": "lora"}
    require_sound(config(folder, model, vllm=VLLM, training=training))


def test_a_runs_own_lines_are_not_buried_in_vllms_log(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    require_sound(config(folder, {"source": "player", "label": "quiet"}, vllm=VLLM))
    said = [line for stream in capfd.readouterr() for line in stream.splitlines()]
    print("\n".join(said))
    assert not [line for line in said if "INFO" in line or "WARNING" in line or "Loading" in line]


@pytest.mark.nightly
def test_a_run_whose_weights_are_handed_over_in_memory_plays_the_same_episodes(plain: RunConfig, folder: Path) -> None:
    training = {**TRAINING, "weight_sync": {"direct": "shared_memory"}}
    run = config(folder, {"source": "player", "label": "handed-over"}, vllm=VLLM, training=training)
    require_sound(run)
    assert played(run) == played(plain)


@pytest.mark.nightly
def test_a_run_whose_engine_sleeps_while_the_learner_works_plays_the_same_episodes(
    plain: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[int] = []
    sleep = VllmEngine.sleep

    async def count(engine: VllmEngine) -> None:
        await sleep(engine)
        slept.append(engine.weight_version)

    monkeypatch.setattr(VllmEngine, "sleep", count)
    run = config(folder, {"source": "player", "label": "asleep"}, vllm={**VLLM, "sleep_while_learning": True})
    require_sound(run)
    assert slept == [0, 1]
    assert played(run) == played(plain)

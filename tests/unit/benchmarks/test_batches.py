"""Batches that are played with a real model in the benchmark; here a small one, and the local engine alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.batches import make_config, measure


def test_a_batch_is_played_in_every_round_under_new_weights_and_the_first_is_not_counted(tmp_path: Path) -> None:
    config = make_config("tiny:qwen3-64", "local", tmp_path, num_episodes=8)
    (name, (seconds, num_sampled)), *others = asyncio.run(measure([config], repeats=2)).items()
    assert (name, len(seconds), others) == ("local", 2, [])
    assert 8 <= num_sampled <= 8 * 4 * 4  # of 8 episodes of up to 4 turns of up to 4 tokens
    assert min(seconds) > 0


def test_vllm_gets_the_same_job_and_its_own_section(tmp_path: Path) -> None:
    config = make_config("tiny:qwen3-64", "vllm", tmp_path, kv_cache_gib=2.0)
    local = make_config("tiny:qwen3-64", "local", tmp_path)
    assert config.vllm is not None
    assert (config.vllm.kv_cache_gib, config.rollout.episodes_per_batch) == (2.0, 96)
    assert config.rollout.model_copy(update={"engine": "local"}) == local.rollout
    assert config.training == local.training

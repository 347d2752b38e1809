"""A model learns to play from what an endpoint with text only plays: its own evaluations rise, the endpoint stays.

The quickstart's game and settings, with smaller numbers (1 to 4 in three guesses, a quarter of the warm-up, 24 steps of
64 episodes). The endpoint halves the range in half of its answers and guesses at random in the others, so that episodes
of a group differ, and those that halve it earn more. What is learned in so few steps is mostly to answer with a number
of the game: 1 - (3/4)^3 = 0.58 is what random legal guesses reach.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_server import FaultyServer
from guessing_endpoint import guessing
from small_quickstart import QUICKSTART, SMALLER

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config
from gspo_gym.run.records import read_metrics

RESCORED = [
    "rollout.engine=http",
    "rollout.rescore=true",
    # Bold enough for 24 steps, and a clip as wide as the ratio then moves at the second of two steps a batch.
    "training.learning_rate=1e-2",
    "loss.clip_low=3e-2",
    "loss.clip_high=4e-2",
]


@pytest.mark.nightly
def test_a_model_learns_from_what_an_endpoint_says(tmp_path: Path) -> None:
    with FaultyServer(dialect="text", write=guessing(0.5)) as server:
        where = [f'services.engine_urls=["{server.base_url}"]', f"run.folder={tmp_path}", "model.label=rescored"]
        summary = run_training(load_config(QUICKSTART, [*SMALLER, *RESCORED, *where]))
    before, after = (summary[name]["success_rate"] for name in ("initial_eval", "final_eval"))
    lines = read_metrics(tmp_path / "rescored")
    first, last = (sum(line["rollout/success_rate"] for line in part) / 8 for part in (lines[:8], lines[-8:]))
    print(f"the policy: success {before:.2f} -> {after:.2f}; the endpoint: {first:.2f} -> {last:.2f}")
    # With p = 0.3 and 100 seeds a standard error is 0.046: the gain is beyond all noise.
    assert before < 0.15
    assert after > 0.3
    # The endpoint learns nothing: with p = 0.8 and 8 x 64 episodes a standard error is 0.018, of a difference 0.025.
    assert abs(last - first) < 0.1

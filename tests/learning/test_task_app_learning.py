"""A model learns a game that a task app plays in another process as it learns it here, to the same success rate.

The quickstart's game and settings, with smaller numbers (1 to 4 in three guesses, 14 steps of 64 episodes), so that
both runs take half a minute. `services.task_url` is all that differs between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from app_process import serving_process
from small_quickstart import BRISK, QUICKSTART

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.records import read_metrics


def trained(folder: Path, label: str, *overrides: str) -> dict[str, Any]:
    run = [f"run.folder={folder}", f"model.label={label}"]
    return run_training(load_config(QUICKSTART, [*BRISK, *run, *overrides]))


@pytest.mark.slow
def test_a_game_is_learned_from_an_app_in_another_process_as_it_is_here(tmp_path: Path) -> None:
    here = trained(tmp_path, "here")
    with serving_process("GuessNumber") as url:
        there = trained(tmp_path, "there", f"services.task_url={url}")
    before, after = (there[name]["success_rate"] for name in ("initial_eval", "final_eval"))
    print(f"through the gateway: success {before:.2f} -> {after:.2f}; here: {here['final_eval']['success_rate']:.2f}")
    # The warm-up is played here in both, so that both begin with the same weights and evaluate the same episodes.
    assert there["initial_eval"] == here["initial_eval"]
    # With p = 0.5 and 200 seeds a standard error is 0.035, of a difference 0.05: both gains are beyond all noise.
    assert after > before + 0.2
    assert here["final_eval"]["success_rate"] > before + 0.2
    # The runs are alike but for the last bits of logprobs, which steps amplify; two evaluations of 200 at p = 0.86
    # differ by sqrt(2) * 0.025 in one standard error.
    assert abs(after - here["final_eval"]["success_rate"]) < 0.2
    first, second = (
        read_episodes(tmp_path / label / "episodes" / "step_000001.jsonl.gz") for label in ("here", "there")
    )
    assert len(first) == len(second) == 64
    for ours, theirs in zip(first, second, strict=True):
        assert [s.token_ids.tolist() for s in ours.segments] == [s.token_ids.tolist() for s in theirs.segments]
        assert ours.reward == theirs.reward
    losses = [[line["loss/total"] for line in read_metrics(tmp_path / label)[:1]] for label in ("here", "there")]
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-5)

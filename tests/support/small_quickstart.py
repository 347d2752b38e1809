"""The quickstart with smaller numbers: 1 to 4 in three guesses, a quarter of the warm-up, 24 steps of 64 episodes."""

from __future__ import annotations

from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
SMALLER = [
    "rollout.env_config.high=4",
    "rollout.env_config.max_guesses=3",
    "rollout.max_turns=3",
    "rollout.episodes_per_batch=64",
    "training.iterations_per_epoch=24",
    "training.checkpoint_every_n_iters=24",
    "evaluation.every_n_iters=24",
    "evaluation.seeds=0:100",
    "warmup.num_episodes=256",
]

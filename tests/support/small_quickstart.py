"""The quickstart with smaller numbers: 1 to 4 in three guesses, 24 gentle or 14 brisk steps of 64 episodes."""

from __future__ import annotations

from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
# The first version of its model, one pass at a lower rate, and a warm-up that leaves more of the format to learn: what
# so few steps do stays visible, whatever the quickstart itself does to be quick.
GENTLE = [
    "model.base=tiny:qwen3-64",
    "optimizer.schedule=constant",
    "training.learning_rate=2e-3",
    "training.update_epochs=1",
    "loss.clip_low=3e-3",
    "loss.clip_high=4e-3",
    "loss.entropy_coef=0",
    "warmup.num_epochs=4",
    "warmup.learning_rate=2e-3",
    "warmup.batch_size=64",
]
_LESS = [
    "rollout.env_config.high=4",
    "rollout.env_config.max_guesses=3",
    "rollout.max_turns=3",
    "rollout.episodes_per_batch=64",
    "warmup.num_episodes=256",
]
SMALLER = [
    *_LESS,
    "training.batch_size=32",
    "training.iterations_per_epoch=24",
    "training.checkpoint_every_n_iters=24",
    "evaluation.every_n_iters=24",
    "evaluation.seeds=0:100",
    *GENTLE,
]
# As the quickstart learns: its model, rate and three passes over a batch.
BRISK = [
    *_LESS,
    "training.batch_size=16",
    "training.iterations_per_epoch=14",
    "training.checkpoint_every_n_iters=14",
    "evaluation.every_n_iters=14",
]

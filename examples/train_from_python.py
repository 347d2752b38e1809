"""Train from Python, without a config file, on an environment of your own.

Run: python examples/train_from_python.py          (a few minutes on two CPU cores)
"""

import sys

from rich.console import Console
from write_environment import Doubling

import gspo_gym
from gspo_gym import RunConfig, run_training

gspo_gym.register("Doubling-v0", entry_point=Doubling)


def make_config(num_iterations: int) -> RunConfig:
    """The same sections and keys as a TOML file."""
    return RunConfig.from_dict(
        {
            "algorithm": {"variety": "gspo_token"},
            "model": {"base": "tiny:qwen3-64", "label": "doubling"},
            "rollout": {
                "env_name": "Doubling-v0",
                "max_turns": 3,
                "max_output_tokens": 4,
                "max_model_len": 256,
                "episodes_per_batch": 64,
            },
            "training": {
                "iterations_per_epoch": num_iterations,
                "group_size": 8,
                "batch_size": 32,
                "learning_rate": 1e-3,
            },
            "evaluation": {"seeds": "0:50", "every_n_iters": 20},
            "warmup": {"policy": "random", "num_episodes": 256, "learning_rate": 2e-3},
        }
    )


if __name__ == "__main__":
    config = make_config(num_iterations=int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    summary = run_training(config, set_aside=True, console=Console())  # says how it goes
    for name in ("initial_eval", "final_eval"):
        print(name, "mean return", summary[name]["mean_return"])

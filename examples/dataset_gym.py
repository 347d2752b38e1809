"""Questions with answers as an environment: rows, a reward function, a conversation, and a held-out side.

Run: python examples/dataset_gym.py          (half a minute on two CPU cores)
"""

import sys

import gspo_gym
from gspo_gym import DatasetEnv, RunConfig, run_training
from gspo_gym.run.records import read_metrics


def reward_fn(completion: str, answer: str, question: str) -> bool:
    """Any of these arguments, and any other column of the rows, may be asked for."""
    return answer.lower() in completion.lower()


# A file, a folder or hub id of the `datasets` package, or a loaded Dataset may stand in place of either list.
questions = DatasetEnv(
    rows=[{"question": "2+2?", "answer": "4"}, {"question": "Capital of France?", "answer": "Paris"}],
    held_out=[{"question": "3+3?", "answer": "6"}],
    reward=reward_fn,
    conversation=[{"role": "user", "content": "Q: {question}\nA:"}],
)
gspo_gym.register("Questions-v0", entry_point=questions.another)

if __name__ == "__main__":
    config = RunConfig.from_dict(
        {
            "model": {"base": "tiny:qwen3-64-v2", "label": "questions"},
            "rollout": {
                "env_name": "Questions-v0",
                "max_turns": 1,
                "max_output_tokens": 6,
                "max_model_len": 64,
                "episodes_per_batch": 128,
            },
            "training": {
                "iterations_per_epoch": int(sys.argv[1]) if len(sys.argv) > 1 else 40,
                "group_size": 16,
                "batch_size": 32,
                "learning_rate": 1.5e-3,
            },
            "loss": {"clip_low": 3e-2, "clip_high": 4e-2, "entropy_coef": 0.02},
            "evaluation": {"seeds": "0:50", "every_n_iters": 40},
            "warmup": {"policy": "random", "num_episodes": 256, "num_epochs": 4, "learning_rate": 2e-3},
        }
    )
    summary = run_training(config, set_aside=True)
    rewards = [line["rollout/reward_mean"] for line in read_metrics(config.run_folder)]
    print(f"training questions: mean reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    print(f"held-out 3+3?: {summary['final_eval']['mean_return']:.2f} (two rows teach no addition)")

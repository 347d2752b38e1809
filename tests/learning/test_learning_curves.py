"""Learning, at its smallest: of two policies one at least gets good at what it is rewarded for, from random weights.

Not the quickstart (too long for every run of the tests); the same code on a task that takes seconds: say one of two
letters, and the right one is told in the prompt.
"""

import gymnasium
import pytest

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.env.rewards import Reward


class Echo(TextEnv):
    """Say the letter that you are told."""

    policies = {"random": lambda env, rng: lambda messages: str(rng.choice(["a", "b"]))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.letter = str(self.np_random.choice(["a", "b"]))
        return self.letter, {}

    def step(self, action):
        is_right = action == self.letter
        return "", Reward({"right": float(is_right)}, success=is_right), True, False, {}


@pytest.fixture
def _echo():
    register("test_learning/Echo-v0", entry_point=Echo)
    yield
    gymnasium.registry.pop("test_learning/Echo-v0")


def make_config(folder, *, variety, seed):
    return RunConfig.from_dict(
        {
            "run": {"seed": seed, "folder": str(folder)},
            "algorithm": {"variety": variety},
            "model": {"base": "tiny:qwen3-64", "label": f"{variety}-{seed}"},
            "rollout": {
                "env_name": "test_learning/Echo-v0",
                "max_turns": 1,
                "max_output_tokens": 2,
                "max_model_len": 64,
                "episodes_per_batch": 64,
            },
            "training": {
                "iterations_per_epoch": 40,
                "group_size": 8,
                "batch_size": 32,
                "learning_rate": 2e-3,
                "checkpoint_every_n_iters": 40,
            },
            "loss": {} if variety == "grpo" else {"clip_low": 3e-2, "clip_high": 4e-2},  # two sampled tokens an episode
            "evaluation": {"seeds": "0:64", "every_n_iters": 40},
            "warmup": {"num_episodes": 256, "num_epochs": 4, "learning_rate": 2e-3},
        }
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_echo")
@pytest.mark.parametrize(
    "variety", ["gspo", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gspo_token", "grpo"))]
)
def test_of_two_run_seeds_one_learns_to_read_its_prompt_and_one_that_does_not_gets_no_worse(variety, tmp_path):
    # No more is promised of 40 steps: run seeds 0 and 1 end at 0.91 and 0.98 (gspo), 0.92 and 0.52 (gspo_token), 0.95
    # and 0.58 (grpo), of which gspo_token's reaches 1.0 after 120 steps and grpo's does not.
    final: list[float] = []
    while len(final) < 2 and max(final, default=0.0) < 0.9:
        summary = run_training(make_config(tmp_path, variety=variety, seed=len(final)))
        # guessing is right half of the time; 64 fair coins land outside 0.25 to 0.75 with probability 1e-4
        assert 0.25 <= summary["initial_eval"]["success_rate"] <= 0.75
        final.append(summary["final_eval"]["success_rate"])
    assert max(final) >= 0.9, final
    assert min(final) >= 0.25, final

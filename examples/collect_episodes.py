"""Collect a data set of episodes from any policy, keep it as JSON lines, and step many environments at once.

Run: python examples/collect_episodes.py
"""

import tempfile
from pathlib import Path

from gspo_gym import collect_episodes, load_episodes, make_vec, save_episodes


def careful(env, rng):
    """Guesses upwards one by one: a policy is a function from the conversation to the next message."""
    return lambda messages: str(sum(message.role == "assistant" for message in messages) + 1)


# "scripted:reference", a model ("tiny:qwen3-64", a folder, a hub id) or "openai:MODEL@http://host/v1" play as well.
collected = collect_episodes("GuessNumber", careful, seeds=range(50), env_config={"high": 8})
successes = [episode for episode in collected.trajectories if episode.success]

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "careful.jsonl"  # .parquet needs pip install "gspo-gym[datasets]"
    save_episodes(path, successes, policy_name=collected.policy_name, tools=collected.tools)
    print(f"{len(load_episodes(path))} of {len(collected.trajectories)} episodes succeeded and are in {path.name}")

# Four episodes in lockstep, with the interface of gymnasium.vector.
envs = make_vec("GuessNumber", 4)
observations, _ = envs.reset(seed=0)
for guess in ("4", "6", "7"):
    observations, rewards, terminations, truncations, _ = envs.step([guess] * 4)
    print(guess, observations, rewards)
envs.close()

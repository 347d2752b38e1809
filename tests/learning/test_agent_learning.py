"""The agent of examples/agent.py learns as it stands: to say digits, and then a larger one. Through a real gateway."""

from __future__ import annotations

from pathlib import Path

import agent
import pytest

from gspo_gym import GSPOTrainer, agent_app
from gspo_gym.run.records import read_events


@pytest.mark.slow
def test_the_agent_of_the_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    less = {"training.iterations_per_epoch": 15, "evaluation.seeds": "0:64", "evaluation.every_n_iters": 15}
    trainer = GSPOTrainer(env=agent_app(agent.rollout), args=agent.LIMITS | agent.STEPS | less)
    trainer.train()
    evaluations = [event["data"] for event in read_events(trainer.config.run_folder) if event["kind"] == "evaluation"]
    before, after = evaluations[0], evaluations[-1]
    print(f"mean return {before['mean_return']:.3f} to {after['mean_return']:.3f}, {after['mean_return_interval']}")
    # Answers of random weights begin with a digit 10 times of 263, at 0.5 for each of two: about 0.04. The least that
    # the second can be, with 95%, is more than the first was.
    assert after["mean_return_interval"][0] > before["mean_return"]

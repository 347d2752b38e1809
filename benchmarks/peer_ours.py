"""This project's side of `python -m benchmarks peers`: one job, as a user runs it, from a configuration.

Arguments: the job as JSON, the model's folder, the threads.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_games import GAMES, Goal, Job, report
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.env.core import Info, TextEnv
from gspo_gym.run.records import read_metrics

_goals: dict[str, Goal] = {}  # of this process: all episodes of a run count towards one


class PeerGame(TextEnv):
    """A game of `peer_games` as an environment; `job` is its JSON."""

    isolation = "thread"
    any_thread = True

    def __init__(self, *, job: str) -> None:
        self._job, self._earned = Job(**json.loads(job)), 0.0
        self._game = GAMES[self._job.game](self._job)
        self._goal = _goals.setdefault(job, Goal(self._job))

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed, options=options)
        self._earned = 0.0
        self._goal.start()
        return self._game.reset(int(self.np_random.integers(2**31))), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        text, earned, is_over = self._game.step(action)
        self._earned += earned
        if is_over:
            self._goal.add(self._earned)
        return text, earned, is_over, False, {}


def make_config(job: Job, model: str, folder: Path) -> RunConfig:
    """Return the run's configuration: what peer_trl sets is the same here, all else is a default but to learn."""
    num_steps = 10**5 if job.goal else job.num_steps + 1
    sections: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder / "runs"), "seed": job.seed, "log_episodes_every_n_iters": 0},
        "algorithm": {"variety": "gspo"},
        "model": {"base": model, "label": "peers"},
        "rollout": {
            "env_name": "benchmarks.peer_ours:PeerGame",
            "env_config": {"job": job.to_json()},
            "max_turns": job.num_turns,
            "max_output_tokens": job.num_tokens,
            # the last token may end the turn: it is sampled either way
            "min_output_tokens": job.num_tokens - 1 if job.game == "talk" else 0,
            "max_model_len": 1024,
            "episodes_per_batch": job.num_episodes,
            "max_concurrent_rollouts": job.num_episodes,
        },
        "training": {
            "iterations_per_epoch": num_steps,
            "group_size": 8,
            "batch_size": job.minibatch,
            "learning_rate": 3e-4,
            "checkpoint_every_n_iters": num_steps,
        },
        "loss": {"clip_low": 3e-2, "clip_high": 4e-2},
        "evaluation": {"seeds": [0], "every_n_iters": num_steps},
    }
    if job.goal:  # what the peer has not, or learns no faster with: see peers.py
        sections["algorithm"]["variety"] = "gspo_token"
        sections["advantages"] = {"level": "turn"}
        sections["training"]["update_epochs"] = 3
        sections["loss"]["entropy_coef"] = 0.02
    path = folder / "job.json"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return load_config(path)


def main() -> None:
    """Run the job and print the seconds of playing and learning of each step."""
    job, model = Job(**json.loads(sys.argv[1])), sys.argv[2]
    torch.set_num_threads(int(sys.argv[3]))
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder:
        config = make_config(job, model, Path(folder))
        run_training(config)
        lines = read_metrics(config.run_folder)
    playing = [line["time/rollout_seconds"] for line in lines[1:]]
    learning = [line["time/step_seconds"] - line["time/rollout_seconds"] for line in lines[1:]]
    report({"playing": playing, "learning": learning})


if __name__ == "__main__":
    # As a module of that name too, because the environment is looked up there: both must count towards one goal.
    from benchmarks.peer_ours import main as run_job

    run_job()

"""Runs whose reference is at a server of their own.

Pinned here:
1. placement "dedicated" gives the metrics and the weights of "shared", bit for bit, also when the reference moves;
2. a server that dies in the middle is a clear error; the run resumes with the reference as it was, at another port;
3. nothing is left running, and no file of the reference is left;
4. a reference that two processes share gives the same KL but for rounding.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ServiceError
from gspo_gym.run.records import read_metrics


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_config(folder: Path, *, iterations: int = 2, reference: dict[str, Any], **model: Any) -> RunConfig:
    lora = {"lora": {"r": 4}} if model.get("trainer_mode") == "lora" else {}
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "algorithm": {"variety": "gspo_token"},
            "model": {"base": "tiny:qwen3-64", "label": "test", **model},
            "rollout": {
                "env_name": "GuessNumber",
                "env_config": {"style": "terse"},
                "max_turns": 3,
                "max_output_tokens": 3,
                "max_model_len": 256,
                "episodes_per_batch": 8,
                "temperature": 0.7,
            },
            "training": {
                "iterations_per_epoch": iterations,
                "group_size": 4,
                "batch_size": 4,
                "learning_rate": 1e-3,
                "checkpoint_every_n_iters": 1,
                **lora,
            },
            "loss": {"kl_coef": 0.3, "entropy_coef": 0.5},  # entropy has a gradient, whatever is earned
            "reference": reference,
            "evaluation": {"seeds": "0:2", "every_n_iters": 100},
        }
    )


def served(**more: Any) -> dict[str, Any]:
    return {"placement": "dedicated", "port": free_port(), "health_interval_ms": 50, **more}


def weights(folder: Path, step: int) -> dict[str, Tensor]:
    (file,) = (folder / "test" / "checkpoints" / f"step_{step:06d}").glob("*model.safetensors")
    return load_file(file)


# How long things took; and what is computed from the engine's logprobs, whose last bit depends on which episodes shared
# a batch by chance.
NOT_COMPARED = (
    "time",
    "rollout/sampled_tokens_per_second",
    "kl/rollout",
    "ratio/noise",
    "ratio/predicted",
    "correction/",
)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "test")
    return [{name: value for name, value in line.items() if not name.startswith(NOT_COMPARED)} for line in lines]


def assert_same_run(one: Path, other: Path, steps: int) -> None:
    mine, others = weights(one, steps), weights(other, steps)
    assert mine.keys() == others.keys()
    assert all(mine[name].equal(others[name]) for name in mine)
    assert metrics(one) == metrics(other)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        pytest.param({}, {}, id="full", marks=pytest.mark.slow),
        pytest.param({}, {"update_every_n_iters": 1}, id="moving", marks=pytest.mark.slow),
        pytest.param({"trainer_mode": "lora"}, {}, id="lora", marks=pytest.mark.nightly),
    ],
)
def test_a_served_reference_trains_to_the_same_weights(
    model: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    shared, dedicated = tmp_path / "shared", tmp_path / "dedicated"
    run_training(make_config(shared, iterations=2, reference={"placement": "shared", **more}, **model))
    run_training(make_config(dedicated, iterations=2, reference=served(**more), **model))
    assert_same_run(dedicated, shared, 2)
    assert any(line["loss/kl"] > 0 for line in metrics(dedicated))  # the reference is not the policy
    assert not (dedicated / "test" / "reference").exists()


@contextlib.contextmanager
def killing_the_server(port: int, metrics_file: Path, after_step: int) -> Iterator[list[int]]:
    """Kill what answers at the port as soon as that step is on record; gives its process id."""
    killed: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            if metrics_file.is_file() and metrics_file.read_text().count("\n") >= after_step:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                    killed.append(json.load(answer)["pid"])
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.01)  # how often is asked; nothing waits for it

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_is_said_and_the_run_resumes(tmp_path: Path) -> None:
    reference = served(update_every_n_iters=1)
    config = make_config(tmp_path / "broken", iterations=30, reference=reference)
    with (
        killing_the_server(reference["port"], tmp_path / "broken" / "test" / "metrics.jsonl", 1) as killed,
        pytest.raises(ServiceError, match=r"the reference server at .* does not answer /(score|load)") as caught,
    ):
        run_training(config)
    assert len(killed) == 1
    assert "ended with status -9" in str(caught.value)  # SIGKILL
    assert "reference_server.log" in str(caught.value)
    done = json.loads((tmp_path / "broken" / "test" / "summary.json").read_text())
    assert done["status"] == "failed"
    steps = done["steps"] + 1
    elsewhere = {**reference, "port": free_port()}
    run_training(make_config(tmp_path / "broken", iterations=steps, reference=elsewhere), resume=True)
    shared = {"placement": "shared", "update_every_n_iters": 1}
    run_training(make_config(tmp_path / "whole", iterations=steps, reference=shared))
    assert_same_run(tmp_path / "broken", tmp_path / "whole", steps)

"""Runs whose reference is an actor of a real Ray.

Pinned here:
1. placement "dedicated" gives the metrics and the weights of "shared", bit for bit, also when the reference moves;
2. an actor that dies in the middle is a clear error; the run resumes with the reference as it was;
3. no process and no file is left, and the handler of SIGTERM stays the run's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from gspo_gym.base.leftovers import descendants
from gspo_gym.cli.train import run_training
from gspo_gym.cluster.ray import joined
from gspo_gym.errors import ServiceError
from gspo_gym.run.records import read_metrics
from tests.cluster.test_learner_ranks import actors_of, require_no_actors
from tests.cluster.test_ray import folder_of_ray, require_gone
from tests.support.reference_runs import make_config

pytestmark = pytest.mark.usefixtures("own_ray")


def dedicated(**more: Any) -> dict[str, Any]:
    return {"placement": "dedicated", **more}


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
        pytest.param({}, {"update_every_n_iters": 1}, id="moving"),
        pytest.param({}, {}, id="full", marks=pytest.mark.nightly),
        pytest.param({"trainer_mode": "lora"}, {}, id="lora", marks=pytest.mark.nightly),
    ],
)
def test_a_dedicated_reference_trains_to_the_same_weights(
    model: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    shared, own = tmp_path / "shared", tmp_path / "dedicated"
    run_training(make_config(shared, iterations=2, reference={"placement": "shared", **more}, **model))
    run_training(make_config(own, iterations=2, reference=dedicated(**more), **model))
    assert_same_run(own, shared, 2)
    assert any(line["loss/kl"] > 0 for line in metrics(own))  # the reference is not the policy
    assert not (own / "test" / "reference").exists()


@contextlib.contextmanager
def killing_the_actor(metrics_file: Path, after_step: int) -> Iterator[list[int]]:
    """Kill the reference as soon as that step is on record; gives its process."""
    killed: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            if metrics_file.is_file() and metrics_file.read_text().count("\n") >= after_step:
                killed.extend(actors_of("ScoringActor"))
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.01)  # how often it looks; nothing waits for it

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def test_an_actor_that_dies_in_the_middle_is_said_and_the_run_resumes(tmp_path: Path) -> None:
    reference = dedicated(update_every_n_iters=1)
    folder = tmp_path / "broken"
    with (
        killing_the_actor(folder / "test" / "metrics.jsonl", 1) as killed,
        pytest.raises(ServiceError, match=r"the reference's actor could not (score|replace|parameters): .*Actor"),
    ):
        run_training(make_config(folder, iterations=30, reference=reference))
    assert len(killed) == 1
    done = json.loads((folder / "test" / "summary.json").read_text())
    assert done["status"] == "failed"
    steps = done["steps"] + 1
    run_training(make_config(folder, iterations=steps, reference=reference), resume=True)
    shared = {"placement": "shared", "update_every_n_iters": 1}
    run_training(make_config(tmp_path / "whole", iterations=steps, reference=shared))
    assert_same_run(folder, tmp_path / "whole", steps)
    require_no_actors("ScoringActor")


def test_a_ray_that_is_started_for_it_ends_with_everything_and_changes_no_handler() -> None:
    def handler(*_: object) -> None: ...

    before = descendants(os.getpid())
    variables = {name: os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_TMPDIR")}
    former = signal.signal(signal.SIGTERM, handler)
    try:
        with joined(None) as ray:
            assert signal.getsignal(signal.SIGTERM) is handler
            assert ray.get(ray.put(7), timeout=60) == 7
            started, folder = descendants(os.getpid()) - before, folder_of_ray()
            assert started
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, former)
    require_gone(started, {folder})
    assert {name: os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_TMPDIR")} == variables

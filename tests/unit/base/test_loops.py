"""What is called in a notebook, where an event loop runs already, works as it does in a script.

The loop here is `asyncio.run`'s: what a cell's code sees in Jupyter is the same, a running loop in the calling thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import small_run

from gspo_gym import RunConfig, check_env, collect_episodes, make_vec, run_evaluation, run_training
from gspo_gym.base.loops import run_to_end
from gspo_gym.cli.authoring import make_card
from gspo_gym.config.build.episode_collection import CollectSettings
from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.run.records import read_metrics


def in_a_notebook(cell: Callable[[], Any]) -> Any:
    """What the cell gives, called while an event loop runs."""

    async def kernel() -> Any:
        return cell()

    return asyncio.run(kernel())


def config(folder: Path, *, iterations: int = 1) -> RunConfig:
    return RunConfig.from_dict(
        small_run(
            run={"folder": str(folder)},
            model={"label": "note"},
            training={"iterations_per_epoch": iterations, "checkpoint_every_n_iters": 1},
        )
    )


def test_a_run_is_trained_resumed_and_evaluated_in_a_running_loop(tmp_path: Path) -> None:
    first = in_a_notebook(lambda: run_training(config(tmp_path)))
    assert first["status"] == "completed"
    again = in_a_notebook(lambda: run_training(config(tmp_path, iterations=2), resume=True))
    assert again["status"] == "completed"
    assert [row["step"] for row in read_metrics(tmp_path / "note") if "step" in row][-1] == 2
    evaluation = in_a_notebook(lambda: run_evaluation(config(tmp_path), "scripted:reference"))
    assert evaluation.success_rate == 1.0


def test_a_run_that_is_refused_in_a_running_loop_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    in_a_notebook(lambda: run_training(config(tmp_path)))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="already holds a run"):
        in_a_notebook(lambda: run_training(config(tmp_path)))
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_episodes_cards_checks_and_vectors_are_made_in_a_running_loop() -> None:
    settings = CollectSettings(max_turns=4)
    played = in_a_notebook(
        lambda: collect_episodes("GuessNumber", "scripted:reference", seeds=[0, 1], settings=settings)
    )
    assert [trajectory.reward for trajectory in played.trajectories] == [1.0, 1.0]
    assert in_a_notebook(lambda: make_card("GuessNumber", num_seeds=2)).env_id == "gspo_gym/GuessNumber-v0"
    assert in_a_notebook(lambda: check_env("GuessNumber", seeds=range(2), num_leak_episodes=0)).passed

    def reset() -> Any:
        envs = make_vec("GuessNumber", num_envs=2)
        try:
            return envs.reset(seed=0)
        finally:
            envs.close()

    assert len(in_a_notebook(reset)[0]) == 2


def test_errors_come_out_as_they_are_and_context_variables_go_in() -> None:
    told = contextvars.ContextVar("told", default="nothing")

    async def look() -> str:
        await asyncio.sleep(0)
        return told.get()

    def cell() -> str:
        told.set("this")
        return run_to_end(look())

    assert in_a_notebook(cell) == "this"
    with pytest.raises(UnknownNameError, match="GuessNumber"):
        in_a_notebook(lambda: collect_episodes("GuessNumbers", "scripted:reference", seeds=[0]))


SCRIPT = """
    import asyncio, sys
    from gspo_gym.base.loops import run_to_end

    async def work():
        try:
            print("began", flush=True)
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            print("tidied up", flush=True)

    async def kernel():
        run_to_end(work())

    def plain_loop():  # as a notebook's kernel runs it: nothing takes SIGINT's handler away
        asyncio.new_event_loop().run_until_complete(kernel())

    try:
        {"run": lambda: asyncio.run(kernel()), "plain": plain_loop}[sys.argv[1]]()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("kind", ["run", "plain"])
def test_an_interruption_lets_the_work_tidy_up_and_reaches_the_caller(kind: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "began\n"
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert said == "tidied up\ninterrupted\n"

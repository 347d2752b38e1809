"""Commands that play end where an environment holds the interpreter; those that keep results can be gone on with.

Each in a process of its own, with a pattern that truly never ends. What was over is kept, the end names environment and
line, and `--resume` runs that environment in worker processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from gspo_gym.env.watchdog import Frozen, read_frozen
from gspo_gym.rollout.episode_files import load_episodes

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc"),
    pytest.mark.slow,  # processes that load torch
]

SUPPORT = Path(__file__).parents[2] / "support"
# A minute, the least that the lock may be held, is too long to be waited for here; so is twice what check and play give
# to a step.
IMPATIENT = (
    "import sys; from gspo_gym.cli import env, main; from gspo_gym.env import watchdog; "
    "watchdog._LEAST_SECONDS = 1.5; env._STEP_TIMEOUT_SECONDS = 1.0; sys.exit(main.main())"
)
FAST = ["--step-timeout-seconds", "1"]
CONFIG = """
[model]
base = "tiny:qwen3-64"
label = "frozen"
[rollout]
env_name = "frozen_env:Patterns-v0"
max_turns = 2
max_output_tokens = 80
max_model_len = 256
episodes_per_batch = 4
max_concurrent_rollouts = 1
[limits]
step_timeout_seconds = 1.0
[training]
iterations_per_epoch = 1
group_size = 4
batch_size = 4
learning_rate = 1e-3
"""


def command(folder: Path, *arguments: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    return programs.run(
        [sys.executable, "-c", IMPATIENT, *arguments],
        cwd=folder,
        input=typed,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        timeout=180,
    )


def assert_names_the_culprit(told: str, advice: str) -> None:
    assert "error: Patterns-v0: step() has held the interpreter for" in told
    assert advice in told
    assert re.search(r'frozen_env\.py", line \d+ in catastrophe', told)


def test_a_frozen_evaluation_keeps_its_rows_and_goes_on_in_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    evaluate = ["evaluate", "c.toml", "--model", "scripted:random", "--seeds", "0:4", "--json", "r.json"]
    ended = command(tmp_path, *evaluate)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert_names_the_culprit(ended.stderr, "go on with --resume, which runs Patterns-v0 in worker processes")
    rows = [json.loads(line) for line in (tmp_path / "r.json.part").read_text().splitlines()[1:]]
    assert [row["seed"] for row in rows] == [0, 1]
    assert read_frozen(tmp_path / "r.json.frozen.json").env_ids == ("Patterns-v0",)

    resumed = command(tmp_path, *evaluate, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "Patterns-v0: held the interpreter before" in resumed.stderr
    result = json.loads((tmp_path / "r.json").read_text())["evaluations"]["scripted:random"]
    assert [(row["seed"], row["outcome"]) for row in result["rows"]] == [
        (0, "terminated"),
        (1, "terminated"),
        (2, "action_limit"),
        (3, "terminated"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.toml", "r.json"]


def test_a_frozen_collection_keeps_its_episodes_and_goes_on_in_worker_processes(tmp_path: Path) -> None:
    collect = ["env", "collect", "frozen_env:Patterns-v0", "--policy", "scripted:random", "--seeds", "0:3"]
    collect += ["--concurrent", "1", "--out", "e.jsonl", *FAST]
    ended = command(tmp_path, *collect)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert_names_the_culprit(ended.stderr, "go on with --resume, which runs Patterns-v0 in worker processes")
    assert len((tmp_path / "e.jsonl.part").read_text().splitlines()) == 1 + 2
    assert read_frozen(tmp_path / "e.jsonl.frozen.json").env_ids == ("Patterns-v0",)

    resumed = command(tmp_path, *collect, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    episodes = load_episodes(tmp_path / "e.jsonl")
    assert [episode.outcome.value for episode in episodes] == ["terminated", "terminated", "action_limit"]
    assert [path.name for path in tmp_path.iterdir()] == ["e.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [(["check", "frozen_env:Patterns-v0"], None), (["play", "frozen_env:Patterns-v0"], "a" * 64 + "\n")],
)
def test_a_frozen_check_or_game_ends_and_says_why(tmp_path: Path, arguments: list[str], typed: str | None) -> None:
    ended = command(tmp_path, "env", *arguments, typed=typed)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert_names_the_culprit(ended.stderr, 'Set isolation = "process" in the class of Patterns-v0')
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_server_ends_and_says_why(tmp_path: Path) -> None:
    served = ["env", "serve", "frozen_env:Patterns-v0", "--protocol", "openenv", "--port", "0"]
    with programs.Popen(
        [sys.executable, "-c", IMPATIENT, *served, *FAST],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SUPPORT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1].replace("http", "ws", 1)
            with connect(f"{url}/ws", proxy=None) as socket:
                socket.send(json.dumps({"type": "reset", "data": {"seed": 2}}))
                assert json.loads(socket.recv(timeout=60))["type"] == "observation"
                socket.send(json.dumps({"type": "step", "data": {"message": "a" * 64}}))
                with pytest.raises(ConnectionClosed):
                    socket.recv(timeout=60)
            told = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert_names_the_culprit(told, "Serve Patterns-v0 with --isolation process, where a deadline ends what hangs.")
    assert list(tmp_path.iterdir()) == []
    assert read_frozen(tmp_path / "nothing.json") == Frozen()

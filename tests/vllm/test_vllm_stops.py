"""A training with vLLM, or a server of it, that is stopped or killed leaves no process.

Every process that a program starts inherits a mark in its environment, by which the test finds them all, whoever became
their parent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo_gym.policy.load import load_policy, save_policy

pytestmark = pytest.mark.nightly  # three programs, each with a vLLM of its own

CONFIG = """
[run]
folder = "{folder}"
[model]
base = "tiny:qwen3-64"
label = "stopped"
[rollout]
env_name = "GuessNumber"
env_config = {{ style = "terse" }}
engine = "vllm"
max_turns = 4
max_output_tokens = 3
max_model_len = 256
episodes_per_batch = 16
[training]
iterations_per_epoch = 1000
group_size = 4
batch_size = 16
learning_rate = 1e-3
[evaluation]
seeds = "0:4"
every_n_iters = 1000
[vllm]
kv_cache_gib = 0.25
{vllm}
"""
_TWO_COPIES = "[compute]\ngpu_count = 0\n[topology]\ngpus_for_vllm = 2\ngpus_for_training = 1"
_SECONDS = 300.0  # for vLLM to start on busy cores; and for what must happen at once on idle ones


def marked(mark: str) -> dict[int, str]:
    """The command lines of all processes with the mark, by pid; zombies have no environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"GSPO_GYM_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        except OSError:
            continue  # it has ended
    return found


def comes(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def require_gone(command: list[str], number: signal.Signals, folder: Path, is_ready: Callable[[str], bool]) -> None:
    """Start the command, send it the signal when it is ready, and ask for its exit code and that nothing is left.

    `is_ready` is asked with the mark of its processes.
    """
    mark = uuid.uuid4().hex
    with (folder / "log").open("w") as log:
        environment = {**os.environ, "GSPO_GYM_TEST_MARK": mark}
        process = subprocess.Popen([sys.executable, "-m", *command], env=environment, stdout=log, stderr=log)
        try:
            assert comes(lambda: is_ready(mark) or process.poll() is not None)
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert len(marked(mark)) > 1  # the mark is seen, and vLLM has a process of its own
            process.send_signal(number)
            code = process.wait(_SECONDS)
        finally:
            process.kill()
            process.wait()
    assert code == (143 if number == signal.SIGTERM else -number)
    assert comes(lambda: not marked(mark)), marked(mark)


def test_a_training_that_is_stopped_is_saved_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path / "runs", vllm=""))
    run = tmp_path / "runs" / "stopped"
    command = ["gspo_gym.train", str(tmp_path / "run.toml")]
    require_gone(command, signal.SIGTERM, tmp_path, lambda _: (run / "metrics.jsonl").exists())
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    last = len((run / "metrics.jsonl").read_text().splitlines())
    assert (run / "checkpoints" / f"step_{last:06d}" / "manifest.json").exists()


def test_a_server_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    save_policy(load_policy("tiny:qwen3-64", seed=1), tmp_path / "model")
    command = ["gspo_gym.cli", "models", "serve", str(tmp_path / "model"), "--engine", "vllm", "--port", "0"]
    options = ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-gib", "0.25", "--enforce-eager"]
    require_gone([*command, *options], signal.SIGKILL, tmp_path, lambda _: "serving" in (tmp_path / "log").read_text())


def test_a_training_that_is_killed_while_two_copies_start_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path / "runs", vllm=_TWO_COPIES))

    def is_starting(mark: str) -> bool:
        # vLLM's first processes have been seen for a while, and nothing has been sampled.
        return sum("multiprocessing.spawn" in line or "VLLM" in line for line in marked(mark).values()) > 1

    require_gone(["gspo_gym.train", str(tmp_path / "run.toml")], signal.SIGKILL, tmp_path, is_starting)
    assert not (tmp_path / "runs" / "stopped" / "metrics.jsonl").exists()

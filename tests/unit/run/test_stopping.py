"""Signals to real processes that train.

Pinned here:
1. a run that cannot end in its grace leaves with the same exit code, and says that it was interrupted;
2. a second signal ends it at once;
3. signals that the program handles or ignores are left to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fake_vllm
import programs
import pytest
from parent_of_all import descendants

from gspo_gym.cli.command_line import exit_code_of, interrupted_by_signals
from gspo_gym.run.records import read_events
from gspo_gym.run.registry import read_run
from gspo_gym.run.steering import Steering

# Takes the place of W&B's client. Its server is down: sending a line of metrics takes forever.
WANDB = """
import threading
from pathlib import Path

class Run:
    id = "1"

    def log(self, *arguments, **options):
        Path("hangs").touch()
        threading.Event().wait()

    finish = define_metric = lambda *arguments, **options: None

def Table(**options): ...

def init(**options):
    return Run()
"""
# Never answers, in a training episode: `Hanging` waits, `Frozen` holds the interpreter's lock.
ENVIRONMENT = """
import re
import time
from pathlib import Path
from gspo_gym.env.core import TextEnv

ROOT = Path(__file__).parent

class Hanging(TextEnv):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action):
        if (ROOT / "runs/test/checkpoints/step_000000").exists():
            (ROOT / "hangs").touch()
            self.hang()
        return "", float(len(action)), True, False, {}

    def hang(self):
        time.sleep(3600)

class Frozen(Hanging):
    def hang(self):
        re.match("(a+)+b", "a" * 64)
"""
# Follows vLLM's fake: no update of its weights ends.
HANGING_UPDATE = """

async def _hang(*_, **__):
    from pathlib import Path

    Path("hangs").touch()
    await asyncio.Event().wait()

AsyncLLM.collective_rpc = _hang
"""
CONFIG = """
run.stop_grace_seconds = {}
algorithm.variety = "gspo_token"
model = {{base = "tiny:qwen3-64", label = "test"}}
training = {{iterations_per_epoch = 2, group_size = 4, batch_size = 4, learning_rate = 1e-3}}
evaluation.seeds = "0:4"
tracking.report_to = ["wandb"]
[rollout]
env_name = "GuessNumber"
env_config = {{ style = "terse" }}
max_turns = 1
max_output_tokens = 3
max_model_len = 256
episodes_per_batch = 8
"""
JUDGE = """
[judge]
enabled = true
timeout_s = 3600
reward_blend = {{ env = 0.5, outcome = 0.5 }}
[judge.options]
outcome = true
provider = "local"
model = "hanging"
base_url = "http://127.0.0.1:{}/v1"
[judge.options.rubric_overrides.outcome]
goal_text = "The number is found."
criteria = [{{ id = "outcome.found", description = "It is found.", scale = "binary" }}]
"""
QUIET = ("tracking.report_to=[]",)


@pytest.fixture
def start_hanging_run(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a run and returns when it hangs."""
    processes = []

    def start(
        grace: float, *overrides: str, more: str = "", hangs: Callable[[], bool] = (tmp_path / "hangs").exists
    ) -> subprocess.Popen[str]:
        (tmp_path / "wandb.py").write_text(WANDB)
        (tmp_path / "hanging.py").write_text(ENVIRONMENT)
        (tmp_path / "config.toml").write_text(CONFIG.format(grace) + more)
        process = programs.Popen(
            [sys.executable, "-m", "gspo_gym.train", "config.toml", *overrides],
            cwd=tmp_path,
            env={**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        deadline = time.monotonic() + 100
        while not hangs() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[1]
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_hangs_leaves_when_its_grace_is_over(
    tmp_path: Path, start_hanging_run: Callable[[float], subprocess.Popen[str]], number: int, code: int
) -> None:
    process = start_hanging_run(0.5)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert "not done after run.stop_grace_seconds = 0.5; the last checkpoint stands" in said
    folder = tmp_path / "runs" / "test"
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert [event["kind"] for event in read_events(folder)][-2:] == ["stopped", "finished"]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_run_whose_environment_hangs_leaves_a_checkpoint(
    tmp_path: Path, start_hanging_run: Callable[..., subprocess.Popen[str]], isolation: str
) -> None:
    overrides = (
        "rollout.env_name=hanging:Hanging",
        "rollout.env_config={}",
        f"rollout.isolation={isolation}",
        "tracking.report_to=[]",
    )
    process = start_hanging_run(5.0, *overrides)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    folder = tmp_path / "runs" / "test"
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert [event["kind"] for event in read_events(folder)][-2:] == ["stopped", "finished"]
    assert (folder / "checkpoints" / "step_000000").exists()


@pytest.mark.slow
def test_a_run_whose_environment_holds_the_interpreter_leaves_soon_after_its_grace(
    tmp_path: Path, start_hanging_run: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start_hanging_run(
        1.0, "rollout.env_name=hanging:Frozen", "rollout.env_config={}", "rollout.isolation=thread", *QUIET
    )
    children = descendants(process.pid)
    assert children
    process.terminate()
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "SIGTERM: no reaction after 4 seconds: something holds the interpreter, or the main thread" in said  # 1 + 3
    assert time.monotonic() - began < 60
    folder = tmp_path / "runs" / "test"
    assert read_run(folder).status == "crashed"  # nothing could be recorded
    assert (folder / "checkpoints" / "step_000000" / "manifest.json").exists()
    while living(children) and time.monotonic() - began < 60:
        time.sleep(0.02)
    assert not living(children)


@pytest.mark.slow
def test_a_second_signal_ends_a_run_whose_environment_holds_the_interpreter(
    start_hanging_run: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start_hanging_run(
        3600.0, "rollout.env_name=hanging:Frozen", "rollout.env_config={}", "rollout.isolation=thread", *QUIET
    )
    while process.poll() is None:  # they count as two when half a second is between them
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert process.returncode == 130


@pytest.mark.slow
def test_a_run_whose_judge_does_not_answer_is_saved_at_once(
    tmp_path: Path, start_hanging_run: Callable[..., subprocess.Popen[str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as judge, contextlib.ExitStack() as stack:
        more = JUDGE.format(judge.getsockname()[1])
        judge.settimeout(100)

        def hangs() -> bool:  # the judge takes requests, and answers none
            stack.enter_context(judge.accept()[0])
            return True

        process = start_hanging_run(3600.0, *QUIET, more=more, hangs=hangs)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 143
    folder = tmp_path / "runs" / "test"
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert [event["kind"] for event in read_events(folder)][-2:] == ["stopped", "finished"]
    assert (folder / "checkpoints" / "step_000000" / "manifest.json").exists()


@pytest.mark.slow
def test_a_run_whose_engine_hangs_in_a_weight_update_leaves_when_its_grace_is_over(
    tmp_path: Path, start_hanging_run: Callable[..., subprocess.Popen[str]]
) -> None:
    folder = tmp_path / "runs" / "test"
    (tmp_path / "vllm.py").write_text(Path(fake_vllm.__file__).read_text() + HANGING_UPDATE)
    process = start_hanging_run(1.0, "rollout.engine=vllm", *QUIET)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "not done after run.stop_grace_seconds = 1; the last checkpoint stands" in said
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert [event["kind"] for event in read_events(folder)][-2:] == ["stopped", "finished"]
    assert (folder / "checkpoints" / "step_000000" / "manifest.json").exists()


def living(pids: Iterable[int]) -> list[int]:
    """Return those that run; a zombie does not, and its new parent may not look."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX":
                found.append(pid)
    return found


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(start_hanging_run: Callable[[float], subprocess.Popen[str]]) -> None:
    process = start_hanging_run(3600.0)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while not _has_default_action(process.pid, signal.SIGINT) and time.monotonic() < deadline:
        time.sleep(0.01)  # two signals of the same number that come together are one
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130)


def _has_default_action(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return not int(caught.split()[1], 16) & 1 << number - 1


def test_signals_that_the_program_handles_or_ignores_are_left_to_it() -> None:
    def mine(*_: object) -> None: ...

    wanted = {signal.SIGTERM: mine, signal.SIGINT: signal.SIG_IGN, signal.SIGHUP: signal.SIG_IGN}  # as under nohup
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        with Steering().handling_signals():
            assert {number: signal.getsignal(number) for number in wanted} == wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_hangup_stops_a_run_as_sigterm_does(number: signal.Signals) -> None:
    steering, before = Steering(), signal.signal(number, signal.SIG_DFL)  # which nohup has set to SIG_IGN
    try:
        with pytest.raises(SystemExit) as caught, steering.handling_signals():
            signal.raise_signal(number)
        assert (caught.value.code, steering.stopped_by) == (128 + number, number.name)
        assert signal.getsignal(number) == signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt) as interrupt, interrupted_by_signals():
            signal.raise_signal(number)
        assert exit_code_of(interrupt.value) == 128 + number
    finally:
        signal.signal(number, before)

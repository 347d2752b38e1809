"""An environment that holds the interpreter's lock: a process outside names it, ends the run, and it moves to workers.

Pinned here: 1. a catastrophic regular expression in a thread, or in an async environment, ends the process by the
watchdog, with a marker that names the environment; 2. what only waits, computes with the lock let go, or is no
environment is left alone; 3. the next start of the run makes that environment in worker processes, and says so.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import programs
import pytest
from gspo_gym_envs.code_repair.env import CodeRepair
from gspo_gym_envs.sql_analyst.env import SqlAnalyst
from small_run import small_run

from gspo_gym.cli.train import run_training
from gspo_gym.config.build import rollouts
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env import watchdog
from gspo_gym.env.watchdog import MARKER, SLOT_BYTES, Frozen, cpu_seconds, holder, read_frozen, seconds_until_frozen
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.errors import RecordError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

RUN = """
import asyncio, hashlib, re, sys, time
from pathlib import Path
from gspo_gym.env.session import EnvSession
from gspo_gym.types import Message
from gspo_gym.env.watchdog import watching

def catastrophe():
    re.match(r"(a+)+b", "a" * 64)

class Plain:
    def reset(self, *, seed=None, options=None):
        return "go", {}
    def step(self, action):
        ACTION()
        return "", 0.0, True, False, {}

class Async(Plain):
    async def step(self, action):
        ACTION()
        return "", 0.0, True, False, {}

async def play():
    other = EnvSession(Plain(), env_id="Innocent", step_timeout_seconds=1.0)
    session = EnvSession(KIND(), env_id="Patterns", step_timeout_seconds=1.0)
    await other.reset(0)
    await session.reset(0)
    print("playing", flush=True)
    try:
        await session.step(Message("assistant", "x"))
    finally:
        print("over", flush=True)

with watching(Path(sys.argv[1]) / "frozen.json", 1.5, advice="Do this with {env}."):
    asyncio.run(play())
"""


def run(folder: Path, kind: str, action: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(RUN).replace("KIND", kind).replace("ACTION()", action)
    return programs.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", ["Plain", "Async"])
def test_a_catastrophic_pattern_is_named_and_the_run_ended(tmp_path: Path, kind: str) -> None:
    (tmp_path / "frozen.json").write_text('{"env_ids": ["Earlier"], "call": "step()", "seconds": 60}')
    ended = run(tmp_path, kind, "catastrophe()")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "playing\n")
    frozen = read_frozen(tmp_path / MARKER)
    assert (frozen.env_ids, frozen.call) == (("Earlier", "Patterns"), "step()")
    assert (frozen.seconds >= 1.5, frozen.seconds.is_integer()) == (True, True)
    assert "Patterns: step() has held the interpreter" in ended.stderr
    assert "no Ctrl-C could end it. Do this with Patterns. Its threads:" in ended.stderr
    assert "in catastrophe" in ended.stderr  # the line of the author's code


def test_a_run_whose_folder_takes_no_marker_is_ended_all_the_same(tmp_path: Path) -> None:
    ended = run(tmp_path / "removed", "Plain", "catastrophe()")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "playing\n")
    assert "removed/frozen.json: not written, so that the next start knows of nothing" in ended.stderr
    assert "Patterns: step() has held the interpreter" in ended.stderr


def test_a_run_whose_terminal_is_gone_is_ended_all_the_same(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # as of a pager that was left
    try:
        code = textwrap.dedent(RUN).replace("KIND", "Plain").replace("ACTION()", "catastrophe()")
        command = [sys.executable, "-c", code, str(tmp_path)]
        ended = programs.run(command, stdout=subprocess.DEVNULL, stderr=write_end, timeout=120)
    finally:
        os.close(write_end)
    assert ended.returncode == -signal.SIGKILL
    assert read_frozen(tmp_path / MARKER).env_ids == ("Patterns",)


@pytest.mark.parametrize(
    "action",
    [
        "time.sleep(4)",  # late, and the lock is free
        "hashlib.pbkdf2_hmac('sha512', b'x', b'y', 3_000_000)",  # busy, and the lock is free
    ],
)
def test_what_lets_go_of_the_lock_is_left_to_its_deadline(tmp_path: Path, action: str) -> None:
    ended = run(tmp_path, "Plain", action)
    assert ended.returncode == 1
    assert "EnvTimeoutError: Patterns: step() did not answer within 1 seconds" in ended.stderr
    assert read_frozen(tmp_path / MARKER) == Frozen((), "", 0.0)


GUARDED = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from gspo_gym.env.watchdog import announced
from gspo_gym.env.watchdog import watching

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

"""


def guarded(*lines: str) -> list[str]:
    """What a program prints whose last lines are these; it must end by itself."""
    command = [sys.executable, "-c", GUARDED + "\n".join(lines)]
    return programs.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()


@pytest.mark.slow
def test_an_environment_that_computes_for_long_and_lets_others_run_is_left_alone() -> None:
    """Beats come every 0.2 s, so it is never silent for 0.8 s although it is busy for 3."""
    said = guarded("with watching(None, 0.8, advice=''), announced('Slow\\nstep()'):", "    spin(3)", "print('over')")
    assert said == ["over"]


def test_the_watcher_is_out_of_reach_of_ctrl_c_and_the_dump_of_threads_is_taken_back() -> None:
    said = guarded(
        "with watching(None, 60, advice=''):",
        "    [child] = Path(f'/proc/self/task/{os.getpid()}/children').read_text().split()",
        "    print(os.getsid(int(child)) == int(child))",  # a terminal's signals do not reach another session
        "print(faulthandler.unregister(signal.SIGUSR2))",  # whether there was anything to take back
    )
    assert said == ["True", "False"]


def test_watching_leaves_no_descriptor_and_no_thread() -> None:
    said = guarded(
        "import threading",
        "held = os.listdir('/proc/self/fd')",
        "for _ in range(3):",
        "    with watching(None, 60, advice=''):",
        "        pass",
        "print(os.listdir('/proc/self/fd') == held, threading.active_count())",
    )
    assert said == ["True 1"]


def test_a_program_that_handles_the_dumps_signal_itself_keeps_it() -> None:
    said = guarded(
        "signal.signal(signal.SIGUSR2, lambda *_: print('ours'))",
        "with watching(None, 60, advice=''):",
        "    os.kill(os.getpid(), signal.SIGUSR2)",
    )
    assert said == ["ours"]


def test_the_busiest_thread_must_be_busy_and_announced() -> None:
    board = bytearray(4 * SLOT_BYTES)

    def announce(thread: int, slot: int, text: str) -> None:
        head = thread.to_bytes(8, sys.byteorder) + len(text).to_bytes(2, sys.byteorder)
        board[slot * SLOT_BYTES : slot * SLOT_BYTES + 10 + len(text)] = head + text.encode()

    announce(11, 0, "Idle\nstep()")
    announce(12, 2, "Busy\nstep()")
    before = {10: 50.0, 11: 1.0, 12: 3.0}
    assert holder({10: 50.1, 11: 1.2, 12: 9.0}, before, bytes(board), 10.0) == "Busy\nstep()"  # 6 s of 10
    assert holder({10: 50.1, 11: 1.2, 12: 4.0}, before, bytes(board), 10.0) == "Busy\nstep()"  # a tenth is enough
    assert holder({10: 50.1, 11: 1.2, 12: 3.9}, before, bytes(board), 10.0) is None  # 0.9 s of 10: it waits
    assert holder({10: 59.0, 11: 1.2, 12: 9.0}, before, bytes(board), 10.0) is None  # our own code is busier
    assert holder({}, before, bytes(board), 10.0) is None


def test_an_awaitable_is_announced_while_it_runs_and_not_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mmap.mmap(-1, SLOT_BYTES)
    monkeypatch.setattr(watchdog._Open, "board", watchdog.Board(memory))
    on_board: list[str | None] = []

    def look() -> None:
        on_board.append(holder({threading.get_native_id(): 9.0}, {}, memory[:], 9.0))

    async def steps() -> str:
        look()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            look()
        return "given up"

    async def play() -> Any:
        async def wait() -> Any:
            return await watchdog.AnnouncedSteps(steps(), "Patterns\nstep()")

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        look()
        task.cancel()
        return await task

    assert asyncio.run(play()) == "given up"
    look()
    assert on_board == ["Patterns\nstep()", None, "Patterns\nstep()", None]
    memory.close()


@pytest.mark.slow
def test_a_threads_processor_time_is_its_own_in_the_system_and_outside() -> None:
    measured: list[tuple[float, float]] = []

    def work() -> None:
        used = resource.getrusage(resource.RUSAGE_THREAD)
        while used.ru_stime < 0.2 or used.ru_utime < 0.1:
            os.urandom(2**20)  # the system's time
            sum(range(10_000))  # the thread's own
            used = resource.getrusage(resource.RUSAGE_THREAD)
        found = cpu_seconds(os.getpid())[threading.get_native_id()]
        measured.append((found, used.ru_utime + used.ru_stime))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    [(found, used)] = measured
    assert found == pytest.approx(used, abs=0.05)  # ticks of 0.01 s, two of them rounded, and the call itself


def test_a_process_that_is_gone_has_used_no_time() -> None:
    gone = programs.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert cpu_seconds(gone.pid) == {}


def test_bundled_environments_that_run_what_a_model_wrote_run_in_workers() -> None:
    assert (CodeRepair.isolation, SqlAnalyst.isolation) == ("process", "process")


def test_the_limit_is_a_minute_or_twice_a_step() -> None:
    assert (seconds_until_frozen(30.0), seconds_until_frozen(1.0), seconds_until_frozen(45.0)) == (60.0, 60.0, 90.0)


def test_a_marker_that_cannot_be_read_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "frozen.json").write_text("{}")
    with pytest.raises(RecordError, match=r"frozen\.json: expected what the watchdog wrote, .* remove the file"):
        read_frozen(tmp_path / MARKER)


def settings(folder: Path, **training: Any) -> RunConfig:
    return RunConfig.from_dict(
        small_run(
            run={"folder": str(folder)},
            model={"label": "frozen"},
            rollout={"isolation": "thread", "max_turns": 2, "max_output_tokens": 4, "episodes_per_batch": 4},
            training={"iterations_per_epoch": 1, "group_size": 2, "checkpoint_every_n_iters": 1, **training},
            evaluation={"seeds": "0:2"},
        )
    )


def test_the_next_start_moves_the_environment_into_worker_processes_and_says_so(tmp_path: Path) -> None:
    config = settings(tmp_path)
    run_training(config)
    assert rollouts.build_environment(config).decision.isolation == "thread"
    marker = {"env_ids": ["gspo_gym/GuessNumber-v0"], "call": "step()", "seconds": 61.0}
    (config.run_folder / "frozen.json").write_text(json.dumps(marker))
    env = rollouts.build_environment(config)()
    assert isinstance(env, ProcessEnv)
    asyncio.run(env.close())
    run_training(settings(tmp_path, num_epochs=2), resume=True)
    events = [json.loads(line) for line in (config.run_folder / "events.jsonl").read_text().splitlines()]
    told = [event["data"] for event in events if event["kind"] == "frozen"]
    assert told == [{"env_ids": ["gspo_gym/GuessNumber-v0"], "seconds": 61.0}]

"""Runs whose processes have ended in one of several ways, or live: the records of short runs, without a model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gspo_gym.base.files import replace_file
from gspo_gym.run.process import PROCESS_FILE, read_process

# How a process leaves its run, and the status that the run then has.
ENDS = {
    "completes": "completed",
    "fails": "failed",
    "is stopped": "interrupted",
    "is killed": "crashed",
    "is killed after a resume of a completed run": "crashed",
    "is killed, and its pid is another process's": "crashed",
    "is killed on another machine with the same disk": "crashed",
    "runs on another machine with the same disk": "running",
    "runs": "running",
}
# Forks a process a run, each with the lock of its folder; ends those that are left when its input is closed.
_HOLDERS = """
import json, os, signal, sys, time
from pathlib import Path
from gspo_gym.run.process import holding
living = []
for line in sys.stdin:
    task = json.loads(line)
    pid = os.fork()
    if pid:
        (os.waitpid(pid, 0) if task["ends"] else living.append(pid))
        if task["ends"]:
            print(json.dumps(pid), flush=True)
        continue
    with holding(Path(task["folder"]), lambda text: None, has_begun=True):
        with open(Path(task["folder"], "events.jsonl"), "a") as file:
            file.write("".join(json.dumps(event) + "\\n" for event in task["events"]))
        if task["is_killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if not task["ends"]:
            print(json.dumps(os.getpid()), flush=True)
            time.sleep(600)
    os._exit(0)
for pid in living:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


@contextlib.contextmanager
def held_runs(folder: Path, count: int) -> Iterator[dict[Path, str]]:
    """Make runs in the folder, their processes in all ways of ENDS in turn; give the status of each."""
    expected = {}
    # The pid of this process stands for a reused one: it lives, and holds nothing.
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holders:
        assert holders.stdin is not None
        assert holders.stdout is not None
        for number in range(count):
            end = list(ENDS)[number % len(ENDS)]
            run = folder / f"run_{number:04d}"
            _begin(run, number)
            task = {
                "folder": str(run),
                "events": _events_of(end),
                "is_killed": "killed" in end,
                "ends": ENDS[end] != "running",
            }
            holders.stdin.write(json.dumps(task) + "\n")
            holders.stdin.flush()
            holders.stdout.readline()
            info = read_process(run)
            if "another process's" in end and info is not None:
                info = dataclasses.replace(info, pid=os.getpid())
            if "another machine" in end and info is not None:
                info = dataclasses.replace(info, host="far", boot_id="other")
            assert info is not None
            replace_file(run / PROCESS_FILE, json.dumps(dataclasses.asdict(info)))
            expected[run] = ENDS[end]
        yield expected


def _begin(run: Path, number: int) -> None:
    run.mkdir()
    (run / "config.toml").write_text(f"# run {number:032x}\n[run]\nseed = {number}\n")
    lines = [_event("started", 0, {}, seq=1)]
    for step in range(0, 60, 10):
        rows = [{"seed": seed, "episode_return": 0.5, "success": True, "num_turns": 3} for seed in range(4)]
        data = {"score": "success_rate", "success_rate": step / 60, "rows": rows}
        lines.append(_event("evaluation", step, data, seq=len(lines) + 1))
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [{"schema": 1, "step": step, "time": 0.0, "loss/total": 0.1} for step in range(1, 60)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))


def _events_of(end: str) -> list[dict[str, object]]:
    status = ENDS[end]
    if status in ("completed", "failed", "interrupted"):
        return [_event("finished", 59, {"status": status}, seq=8)]
    if "after a resume" in end:
        return [_event("finished", 59, {"status": "completed"}, seq=8), _event("resumed", 59, {}, seq=9)]
    return []


def _event(kind: str, step: int, data: dict[str, object], *, seq: int) -> dict[str, object]:
    return {"schema": 1, "seq": seq, "time": 0.0, "step": step, "kind": kind, "data": data}

"""Trainer of scripted runs: `fake_trainer.py CONFIG.toml [--resume]` writes a run folder as the recorder does.

The script is rollout.env_config of the configuration:

    starts      file that gets one line for every start: the job's label, and "--resume" if it was given
    events      number of events of kind "judge_paused" in the run, beside "started" and "finished" (3)
    pause       named pipe from which it reads after "started": it goes on when that is opened for writing and closed
    ending      "completed" (default); "failed"; "crash", without a word in the run folder; "crash once", which is a
                crash unless it resumes; "crash early", which at the first start leaves no checkpoint; "deaf", which
                waits for ever and takes no SIGTERM
    model       a real model, which its checkpoint then holds, instead of some bytes
    child       a process that it starts and leaves behind sleeps for that many seconds
    stray       the same, in a session of its own, where no signal to the trainer's group reaches it; its id goes
                into the file `stray.pid` beside `starts`
    clock       seconds that the clock is set back by after the first event
    line        a line that is added to the run's events before its end

Only the standard library where no model is asked for, since tests start many.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NoReturn


class Run:
    """The run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        events = folder / "events.jsonl"
        self.set_back = 0.0
        self.seq = len(events.read_text(encoding="utf-8").splitlines()) if events.exists() else 0

    def append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"schema": 1, "time": time.time() - self.set_back, **line}) + "\n")

    def event(self, kind: str, step: int, data: dict[str, Any]) -> None:
        self.seq += 1
        self.append("events.jsonl", {"seq": self.seq, "step": step, "kind": kind, "data": data})

    def finish(self, status: str, step: int, error: str | None = None) -> None:
        self.event("finished", step, {"status": status} | ({} if error is None else {"error": error}))
        summary = {"schema": 1, "status": status, "error": error, "steps": step, "final_eval": {"mean_return": 0.5}}
        (self.folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")

    def checkpoint(self, step: int) -> None:
        folder = self.folder / "checkpoints" / f"step_{step:06d}"
        (folder / "resume").mkdir(parents=True)
        files = {"config.json": "{}", "model.safetensors": "w" * 700, "resume/state.json": "{}"}
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        entries = {
            name: {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in files.items()
        }
        manifest = {"schema": 1, "step": step, "run": self.folder.name, "files": entries}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        self.event("checkpoint", step, {"folder": str(folder)})


def _save(base: str, folder: Path) -> None:
    # Here, since only this takes more than the standard library.
    from gspo_gym.policy.load import load_policy, save_policy
    from gspo_gym.policy.manifest import Origin, seal

    checkpoint = folder / "checkpoints" / "step_000001"
    shutil.rmtree(checkpoint)
    (checkpoint / "resume").mkdir(parents=True)
    save_policy(load_policy(base), checkpoint)
    seal(checkpoint, step=1, origin=Origin(run=folder.name))
    (folder / "config.toml").write_text(f'[model]\nbase = "{base}"\n', encoding="utf-8")


def main(path: str, *options: str) -> None:
    config = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    script, label = config["rollout"].get("env_config", {}), config["model"]["label"]
    ending = script.get("ending", "completed")
    if "starts" in script:
        with Path(script["starts"]).open("a", encoding="utf-8") as starts:
            starts.write(" ".join([label, *options]) + "\n")
    run = Run(Path(config["run"]["folder"]) / label)

    def stop(number: int, _frame: object) -> NoReturn:
        run.finish("interrupted", 0)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if ending == "deaf" else stop)
    run.event("resumed" if "--resume" in options else "started", 0, {"run": label})
    if "stray" in script and "--resume" not in options:
        stray = subprocess.Popen(["sleep", str(script["stray"])], close_fds=False, start_new_session=True)
        Path(script["starts"]).with_name("stray.pid").write_text(str(stray.pid), encoding="utf-8")
    if "line" in script:
        with (run.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(script["line"] + "\n")
        run.seq += 1
    run.set_back = script.get("clock", 0.0)
    if "child" in script:
        subprocess.Popen(["sleep", str(script["child"])], close_fds=False)
    if ending == "crash early" and len(Path(script["starts"]).read_text(encoding="utf-8").splitlines()) == 1:
        os._exit(4)
    if "pause" in script:
        Path(script["pause"]).read_bytes()
    if "--resume" not in options:
        run.append("metrics.jsonl", {"step": 1, "loss/total": 0.5, "batch/mean_return": 0.25})
        run.checkpoint(1)
    if "model" in script:
        _save(script["model"], run.folder)
    for number in range(script.get("events", 3)):
        run.event("judge_paused", 1, {"number": number})
    if ending == "deaf":
        while True:
            signal.pause()
    if ending == "crash" or (ending == "crash once" and "--resume" not in options):
        print("warming up\nMemoryError: no room for the model\nbye", flush=True)
        os._exit(3)
    if ending == "failed":
        run.finish("failed", 1, "RolloutError: all episodes fail")
        sys.exit(2)
    run.append("metrics.jsonl", {"step": 2, "loss/total": 0.25, "batch/mean_return": 0.75})
    run.finish("completed", 2)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What a kill loses: `python -m benchmarks crash --count 50 --seed 0`.

A small real run gets SIGKILL at moments drawn uniformly over its life and is started again with `--resume auto` until
it is done. Then its weights, optimizer, counters, tasks and records are compared with those of an undisturbed run, byte
for byte, times excepted. So are runs that go on from each of their steps, and runs that go on from a checkpoint from
which a piece of state is missing, which must differ. Every run is a process of its own, forked with all modules loaded.
`stops` starts, interrupts and compares its runs with the same functions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from gspo_gym.cli.train import run_training
from gspo_gym.config.build import run as _loads_all_that_a_run_needs  # noqa: F401  # before the forks, which are quick then
from gspo_gym.config.run_config import RunConfig
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.rollout.ledger import entry_to_json, imbalances, read_ledger
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.seeding import generator

# Of the life of a process, and of no step.
_LIFE = ("started", "resumed", "stopped", "finished")
_OF_TIME = ("time", "rollout/sampled_tokens_per_second")

# Names of what is compared, each with a digest.
Fingerprint = Mapping[str, object]


@dataclass
class Report:
    """What came of the interrupted runs.

    Attributes:
        interrupted: number of signals by what the run was doing.
        num_starts: runs that were started to go on from what another left.
        failed: runs that did not end as they must, with the reason.
        differing: parts of the fingerprint that were not those of the undisturbed run, with the run.
        controls: whether what must be noticed was noticed, by its name.
        seconds: from each signal to the end of the process.
    """

    interrupted: Counter[str] = field(default_factory=Counter)
    num_starts: int = 0
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    controls: dict[str, bool] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.failed and not self.differing and all(self.controls.values())


def run_crash(count: int, seed: int, *, num_steps: int) -> int:
    """Measure and print; the exit status."""
    return show(lambda folder: measure(folder, count=count, seed=seed, num_steps=num_steps))


def show(measured: Callable[[Path], Report]) -> int:
    """Measure in an empty folder and print the report; return the exit status."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder:
        report = measured(Path(folder))
    table = Table("what", "came of it")
    for doing, number in sorted(report.interrupted.items()):
        table.add_row(f"interrupted {doing}", str(number))
    table.add_row("starts after these", f"{report.num_starts}, of which {len(report.failed)} failed")
    table.add_row("seconds from a signal to the end, at most", f"{max(report.seconds, default=0.0):.2f}")
    table.add_row("parts not as undisturbed", str(len(report.differing)))
    for name, was_noticed in report.controls.items():
        table.add_row(name, "noticed" if was_noticed else "NOT NOTICED")
    console = Console()
    console.print(table)
    for line in (*report.failed, *report.differing):
        console.print(line, markup=False)
    console.print("as it should be" if report.is_good else "NOT AS IT SHOULD BE")
    return 0 if report.is_good else 1


def measure(folder: Path, *, count: int, seed: int, num_steps: int) -> Report:
    """Kill `count` runs, stop one at each step, and leave out pieces of state, in a folder that is empty."""
    report = Report()
    whole = settings(folder / "whole", num_steps=num_steps)
    seconds = play(whole)
    expected = fingerprint(whole.run_folder)
    for number in range(count):
        config = settings(folder / f"killed_{number}", num_steps=num_steps)
        doing, code = interrupt(config, signal.SIGKILL, generator(seed, "crash", number), seconds, report)
        if code != -signal.SIGKILL:
            report.failed.append(f"kill {number}: it had ended with {code}")
        resume_and_compare(config, f"kill {number}, {doing}", expected, report)
        shutil.rmtree(config.run.folder)
    for step in range(num_steps):
        config = cut_after(step, whole, folder / f"stopped_{step}")
        resume_and_compare(config, f"stop after step {step}", expected, report)
    for name, drop in CONTROLS.items():
        config = cut_after(num_steps // 2, whole, folder / f"without_{name}")
        drop(config.run_folder / "checkpoints" / f"step_{num_steps // 2:06d}")
        play(config)
        report.controls[f"without {name}"] = fingerprint(config.run_folder) != expected
    return report


def settings(folder: Path, *, num_steps: int, concurrency: int = 1) -> RunConfig:
    """A run of four episodes a step that saves after every step, and keeps all checkpoints.

    Episodes are sampled one by one: the logprobs of a batch differ in the last digit from those of another batch.
    """
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "algorithm": {"variety": "gspo_token"},
            "model": {"base": "tiny:qwen3-64", "label": "run"},
            "rollout": {
                "env_name": "benchmarks.letters:Letters",
                "isolation": "thread",
                "max_turns": 2,
                "max_output_tokens": 3,
                "max_model_len": 160,
                "episodes_per_batch": 4,
                "max_concurrent_rollouts": concurrency,
            },
            "training": {
                "iterations_per_epoch": num_steps,
                "group_size": 2,
                "batch_size": 2,
                "learning_rate": 1e-3,
                "checkpoint_every_n_iters": 1,
                "keep_every": 1,
            },
            "loss": {},
            "evaluation": {"seeds": "0:2", "every_n_iters": 4},
        }
    )


def play(config: RunConfig) -> float:
    """Train in a process of its own, with `--resume auto`, until it has ended; return the seconds."""
    began = time.monotonic()
    if os.waitpid(_fork(config), 0)[1]:
        raise RuntimeError((Path(config.run.folder) / "error.txt").read_text(encoding="utf-8"))
    return time.monotonic() - began


def interrupt(
    config: RunConfig, number: int, moments: np.random.Generator, seconds: float, report: Report
) -> tuple[str, int]:
    """Start a run and send it a signal at a uniformly random moment of its `seconds`; again if it has ended before.

    Return what the run was doing and its exit code.
    """
    while True:
        pid, moment = _fork(config), time.monotonic() + moments.uniform(0, seconds)
        while not _has_ended(pid) and time.monotonic() < moment:
            time.sleep(0.001)
        doing, sent = _doing(config.run_folder), time.monotonic()
        os.kill(pid, number)  # it is not reaped yet, so that the number is its own
        if (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) != 0:
            report.interrupted[doing] += 1
            report.seconds.append(time.monotonic() - sent)
            return doing, code
        shutil.rmtree(config.run.folder)


def cut_after(step: int, whole: RunConfig, folder: Path) -> RunConfig:
    """Copy a run as a kill leaves it after the checkpoint of a step."""
    config = whole.model_copy(update={"run": whole.run.model_copy(update={"folder": str(folder)})})
    shutil.copytree(whole.run_folder, config.run_folder)
    for path in (config.run_folder / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    (config.run_folder / "summary.json").unlink()
    return config


def fingerprint(folder: Path) -> Fingerprint:
    """Digests of all that a run leaves, times excepted."""
    newest = max((folder / "checkpoints").glob("step_*"))
    state = json.loads((newest / "resume" / "state.json").read_text(encoding="utf-8"))
    events = [event for event in read_events(folder) if event["kind"] not in _LIFE]
    # A checkpoint is written beside what happens meanwhile, so its event has no certain place.
    certain = sorted((event["step"], event["kind"], json.dumps(event["data"], sort_keys=True)) for event in events)
    ledger = read_ledger(folder / "ledger.jsonl")
    return {
        "weights": _digest((newest / "model.safetensors").read_bytes()),
        "optimizer": _digest((newest / "resume" / "learner.safetensors").read_bytes()),
        "counters": _digest(state["counters"]),
        "tasks": _digest({k: v for k, v in state["trainer"].items() if k not in ("wall_seconds", "last_seq")}),
        "metrics": _digest([_certain(line) for line in read_metrics(folder)]),
        "events": _digest(certain),
        "ledger": _digest([sorted(json.dumps(entry_to_json(entry)) for entry in ledger), imbalances(ledger)]),
        "episodes": _digest({path.name: _episodes(path) for path in episode_paths(folder)}),
    }


def resume_and_compare(
    config: RunConfig,
    name: str,
    expected: Fingerprint,
    report: Report,
    fingerprint_of: Callable[[Path], Fingerprint] = fingerprint,
) -> None:
    """Go on with a run until it is done, and note what is not as in the undisturbed one."""
    report.num_starts += 1
    try:
        play(config)
    except RuntimeError as error:
        report.failed.append(f"{name}: {error}")
        return
    actual = fingerprint_of(config.run_folder)
    report.differing += [f"{name}: {part}" for part, digest in expected.items() if actual[part] != digest]


def _fork(config: RunConfig) -> int:
    """Start a run in a forked process, which ends as the command does; its errors go to error.txt beside its folder."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        Path(config.run.folder).mkdir(parents=True, exist_ok=True)
        run_training(config, resume="auto")
        code = 0
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        (Path(config.run.folder) / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        os._exit(code)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _doing(folder: Path) -> str:
    """Return what a run is doing, as its folder shows."""
    checkpoints = folder / "checkpoints"
    if not (folder / "config.toml").exists():
        return "in start-up"
    if (folder / "summary.json").exists():
        return "at its end"
    if not checkpoints.exists():
        return "in warm-up"
    if any(path.is_dir() for path in checkpoints.glob(".*")):
        return "while saving"
    evaluated = {event["step"] for event in read_events(folder) if event["kind"] == "evaluation"}
    step = max((line["step"] for line in read_metrics(folder)), default=0)
    return "in an evaluation" if step % 4 == 0 and step not in evaluated else "in a step"


def _episodes(path: Path) -> list[Any]:
    return [
        [t.trajectory_id, t.attempt, t.task.seed, t.reward, t.outcome.value]
        + [
            [column.tolist() for column in (s.token_ids, s.action_mask, s.rollout_logprobs, s.weight_version)]
            for s in t.segments
        ]
        for t in read_episodes(path)
    ]


def _certain(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(_OF_TIME)}


def _digest(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def _change(checkpoint: Path, name: str, change: Callable[[Path], None]) -> None:
    """Change a file of a checkpoint, and let its manifest call it sound."""
    change(checkpoint / name)
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    data = (checkpoint / name).read_bytes()
    manifest["files"][name] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _without_moments(path: Path) -> None:
    save_file({name: torch.zeros_like(t) if "exp_avg" in name else t for name, t in load_file(path).items()}, path)


def _with_zero(section: str, name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        state = json.loads(path.read_text(encoding="utf-8"))
        assert state[section][name] != 0
        state[section][name] = 0
        path.write_text(json.dumps(state), encoding="utf-8")

    return change


# Each takes a checkpoint and drops a piece of its state.
CONTROLS: Mapping[str, Callable[[Path], None]] = {
    "moments": lambda path: _change(path, "resume/learner.safetensors", _without_moments),
    "seeds": lambda path: _change(path, "resume/state.json", _with_zero("counters", "learner.num_updates")),
    "tasks": lambda path: _change(path, "resume/state.json", _with_zero("trainer", "num_tasks")),
    "counts": lambda path: _change(path, "resume/state.json", _with_zero("trainer", "sampled_tokens")),
}

"""What a kill loses: `python -m benchmarks crash --count 50 --seed 0`.

A small real run gets SIGKILL at moments drawn uniformly over its life and is started again with `--resume auto` until
it is done. Then its weights, optimizer, counters, tasks and records are compared with those of an undisturbed run, byte
for byte, times excepted. So are runs that go on from each of their steps, and runs that go on from a checkpoint from
which a piece of state is missing, which must differ. Every run is a process of its own, forked with all modules loaded.
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
from gspo_gym.rollout.ledger import Dispatched, entry_to_json, imbalances, read_ledger
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.seeding import generator

NUM_STEPS = 20
# Of the life of a process, and of no step.
_LIFE = ("started", "resumed", "stopped", "finished")
_OF_TIME = ("time", "rollout/sampled_tokens_per_second")

# Names of what is compared, each with a digest.
Fingerprint = Mapping[str, str]


@dataclass
class CrashReport:
    """What came of the runs; `is_good` if nothing was lost and every missing piece was noticed.

    Attributes:
        kills: number of kills by what the run was doing.
        num_starts: processes that were needed after the kills.
        failed: starts with `--resume auto` that did not end well, with their errors.
        differing: parts of the fingerprint that were not those of the undisturbed run, with the run.
        steps: steps from each of which a run went on.
        controls: whether a missing piece of state was noticed, by its name.
        concurrency: whether tasks and seeds are the same with 1, with 8, and with 8 resumed at 4.
    """

    kills: Counter[str] = field(default_factory=Counter)
    num_starts: int = 0
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    controls: dict[str, bool] = field(default_factory=dict)
    concurrency: bool = False

    @property
    def is_good(self) -> bool:
        return not self.failed and not self.differing and all(self.controls.values()) and self.concurrency


def run_crash(count: int, seed: int, *, num_steps: int = NUM_STEPS) -> int:
    """Measure and print; the exit status."""
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        started = time.monotonic()
        report = measure(Path(folder), count=count, seed=seed, num_steps=num_steps)
        seconds = time.monotonic() - started
    console = Console()
    console.print(render(report))
    for line in (*report.failed, *report.differing):
        console.print(line)
    console.print(f"{'as it should be' if report.is_good else 'NOT AS IT SHOULD BE'}; {seconds:.0f} seconds")
    return 0 if report.is_good else 1


def measure(folder: Path, *, count: int, seed: int, num_steps: int = NUM_STEPS) -> CrashReport:
    """Kill `count` runs, stop one at each step, and leave out pieces of state, in a folder that is empty."""
    torch.set_num_threads(1)
    report = CrashReport()
    whole = settings(folder / "whole", num_steps=num_steps)
    began = time.monotonic()
    play(whole)
    seconds = time.monotonic() - began
    expected = fingerprint(whole.run_folder)
    for number in range(count):
        config = settings(folder / f"killed_{number}", num_steps=num_steps)
        report.kills[kill_once(config, generator(seed, "crash", number), seconds)] += 1
        _resume_and_compare(config, f"kill {number}", expected, report)
        shutil.rmtree(config.run.folder)
    for step in range(num_steps):
        config = cut_after(step, whole, folder / f"stopped_{step}")
        _resume_and_compare(config, f"stop after step {step}", expected, report)
        report.steps.append(step)
    for name, drop in CONTROLS.items():
        config = cut_after(num_steps // 2, whole, folder / f"without_{name}")
        drop(config.run_folder / "checkpoints" / f"step_{num_steps // 2:06d}")
        play(config)
        report.controls[name] = fingerprint(config.run_folder) != expected
    report.concurrency = _is_the_same_at_any_concurrency(folder, num_steps)
    return report


def settings(folder: Path, *, num_steps: int = NUM_STEPS, concurrency: int = 1, num_episodes: int = 4) -> RunConfig:
    """A run of so many episodes a step that saves after every step, and keeps all checkpoints.

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
                "episodes_per_batch": num_episodes,
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


def play(config: RunConfig) -> None:
    """Train in a process of its own, with `--resume auto`, until it has ended."""
    status = os.waitpid(_fork(config), 0)[1]
    if status:
        raise RuntimeError((Path(config.run.folder) / "error.txt").read_text(encoding="utf-8"))


def kill_once(config: RunConfig, rng: np.random.Generator, seconds: float) -> str:
    """Start a run and kill it at a uniformly random moment of its `seconds`; return what it was doing."""
    folder = config.run_folder
    while True:
        pid, moment = _fork(config), time.monotonic() + rng.uniform(0, seconds)
        while (ended := os.waitpid(pid, os.WNOHANG)[0] == pid) is False and time.monotonic() < moment:
            time.sleep(0.001)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return _doing(folder)
        shutil.rmtree(config.run.folder)  # quicker than the undisturbed one: that was no kill


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
    told = sorted((event["step"], event["kind"], json.dumps(event["data"], sort_keys=True)) for event in events)
    ledger = read_ledger(folder / "ledger.jsonl")
    return {
        "weights": _digest((newest / "model.safetensors").read_bytes()),
        "optimizer": _digest((newest / "resume" / "learner.safetensors").read_bytes()),
        "counters": _digest(state["counters"]),
        "tasks": _digest({k: v for k, v in state["trainer"].items() if k not in ("wall_seconds", "last_seq")}),
        "metrics": _digest([_certain(line) for line in read_metrics(folder)]),
        "events": _digest(told),
        "ledger": _digest([sorted(json.dumps(entry_to_json(entry)) for entry in ledger), imbalances(ledger)]),
        "episodes": _digest({path.name: _episodes(path) for path in episode_paths(folder)}),
    }


def render(report: CrashReport) -> Table:
    """The table."""
    table = Table("what", "came of it")
    kills = ", ".join(f"{number} {doing}" for doing, number in sorted(report.kills.items()))
    table.add_row(f"{report.kills.total()} kills", kills)
    table.add_row("starts after them", f"{report.num_starts}, of which {len(report.failed)} failed")
    table.add_row("stops and resumes", f"after each of the steps {report.steps[0]} to {report.steps[-1]}")
    table.add_row("not as undisturbed", str(len(report.differing)))
    for name, was_noticed in report.controls.items():
        table.add_row(f"without {name}", "noticed" if was_noticed else "NOT NOTICED")
    table.add_row("tasks and seeds at 1, 8, and 8 resumed at 4", "the same" if report.concurrency else "NOT THE SAME")
    return table


def _resume_and_compare(config: RunConfig, name: str, expected: Fingerprint, report: CrashReport) -> None:
    report.num_starts += 1
    try:
        play(config)
    except RuntimeError as error:
        report.failed.append(f"{name}: {error}")
        return
    actual = fingerprint(config.run_folder)
    report.differing += [f"{name}: {part}" for part, digest in expected.items() if actual[part] != digest]


def _fork(config: RunConfig) -> int:
    """Start a run in a forked process, and return its pid; its errors go to error.txt beside its folder."""
    pid = os.fork()
    if pid:
        return pid
    try:
        Path(config.run.folder).mkdir(parents=True, exist_ok=True)
        run_training(config, resume="auto")
        os._exit(0)
    except BaseException:
        (Path(config.run.folder) / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        os._exit(1)


def _doing(folder: Path) -> str:
    """What a killed run was doing, as its folder shows."""
    drafts = [path for path in (folder / "checkpoints").glob(".*") if path.is_dir()]
    if not list((folder / "checkpoints").glob("step_*")):
        return "before the first checkpoint"
    if (folder / "summary.json").exists():
        return "at its end"
    return "while saving" if drafts else "in a step"


def _is_the_same_at_any_concurrency(folder: Path, num_steps: int) -> bool:
    played, num_episodes = [], 16  # twice as many as are in play at most
    for concurrency in (1, 8):
        config = settings(
            folder / f"at_{concurrency}", num_steps=num_steps, concurrency=concurrency, num_episodes=num_episodes
        )
        play(config)
        played.append(_seeds(config.run_folder))
    resumed = cut_after(num_steps // 2, config, folder / "at_4")
    play(resumed.model_copy(update={"rollout": resumed.rollout.model_copy(update={"max_concurrent_rollouts": 4})}))
    played.append(_seeds(resumed.run_folder))
    return len(played[0]) == num_steps * num_episodes and played == played[:1] * 3


def _seeds(folder: Path) -> list[tuple[Any, ...]]:
    entries = [entry for entry in read_ledger(folder / "ledger.jsonl") if isinstance(entry, Dispatched)]
    return sorted((e.trajectory_id, e.attempt, e.task_id, e.env_seed, e.sampling_seed) for e in entries)


def _episodes(path: Path) -> list[Any]:
    return [
        [t.trajectory_id, t.attempt, t.task.seed, t.reward, t.outcome.value]
        + [
            [each.tolist() for each in (s.token_ids, s.action_mask, s.rollout_logprobs, s.weight_version)]
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

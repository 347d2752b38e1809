"""What SIGTERM leaves: `python -m benchmarks stops --count 30 --seed 0`.

A small real run with warm-up, evaluations and a checkpoint every third step gets SIGTERM at moments drawn uniformly
over its life, its environments in threads and in worker processes by turns; a moment after its end is drawn again. It
must leave in its grace with exit code 143, its last completed step saved and no process behind, and end as an
undisturbed run when it is resumed.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.crash import fingerprint, play, settings
from benchmarks.letters import Letters
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.core import PolicyFactory
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.run.settings import RunSettings
from gspo_gym.seeding import generator

GRACE_SECONDS = RunSettings().stop_grace_seconds
NUM_STEPS = 12
_EXIT_CODE = 128 + signal.SIGTERM
_CHILD_SECONDS = 15.0  # until no child is left; those that hang have 10 of them after SIGTERM


def _says_letters(_env: Any, _rng: Any) -> Any:
    return lambda _messages: "ab"


class Talker(Letters):
    """Letters with a player for the warm-up."""

    policies: ClassVar[dict[str, PolicyFactory]] = {"random": _says_letters}


@dataclass
class StopsReport:
    """What came of the stops; the lists are empty if all is well.

    Attributes:
        stops: number of stops by what the run was doing.
        exit_codes: number of stops by exit code; a process that the signal's default action ended counts as 143, too.
        seconds: from each signal to the process's end.
        unsaved: stops whose last completed step is not in the newest checkpoint.
        children: stops after which processes were left.
        differing: stops after which the resumed run did not end as an undisturbed one.
    """

    stops: Counter[str] = field(default_factory=Counter)
    exit_codes: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        ended = set(self.exit_codes) == {_EXIT_CODE} and max(self.seconds) <= GRACE_SECONDS
        return ended and not self.unsaved and not self.children and not self.differing


def run_stops(count: int, seed: int) -> int:
    """Measure and print; the exit status."""
    with tempfile.TemporaryDirectory(prefix="stops-") as folder:
        report = measure(Path(folder), count=count, seed=seed)
    console = Console()
    console.print(render(report))
    for line in (*report.unsaved, *report.children, *report.differing):
        console.print(line)
    console.print("as it should be" if report.is_good else "NOT AS IT SHOULD BE")
    return 0 if report.is_good else 1


def measure(folder: Path, *, count: int, seed: int, num_steps: int = NUM_STEPS) -> StopsReport:
    """Stop `count` runs at random moments and resume each, in a folder that is empty."""
    torch.set_num_threads(1)
    report = StopsReport()
    whole = _config(folder / "whole", num_steps, "thread")
    began = time.monotonic()
    play(whole)
    seconds = time.monotonic() - began
    expected = _fingerprint(whole.run_folder)
    for number in range(count):
        isolation = ("thread", "process")[number % 2]
        config = _config(folder / f"stopped_{number}", num_steps, isolation)
        moments = generator(seed, "stops", number)
        while (doing := _stop_once(config, moments.uniform(0, seconds), report)) is None:
            shutil.rmtree(config.run.folder)
        name = f"stop {number}, {isolation}, {doing}"
        report.stops[doing] += 1
        if config.run_folder.exists() and not _is_saved(config.run_folder):
            report.unsaved.append(name)
        play(config)
        actual = _fingerprint(config.run_folder)
        report.differing += [f"{name}: {part}" for part, digest in expected.items() if actual[part] != digest]
        shutil.rmtree(config.run.folder)
    return report


def render(report: StopsReport) -> Table:
    """The table."""
    table = Table("what", "came of it")
    for doing, number in sorted(report.stops.items()):
        table.add_row(f"SIGTERM {doing}", str(number))
    table.add_row("exit codes", ", ".join(f"{code}: {number}" for code, number in report.exit_codes.items()))
    median, most = statistics.median(report.seconds), max(report.seconds)
    table.add_row("seconds until the end", f"median {median:.2f}, most {most:.2f}")
    table.add_row("last completed step not saved", str(len(report.unsaved)))
    table.add_row("children left", str(len(report.children)))
    table.add_row("parts not as undisturbed when resumed", str(len(report.differing)))
    return table


def _config(folder: Path, num_steps: int, isolation: str) -> RunConfig:
    values = settings(folder, num_steps=num_steps).model_dump(exclude_none=True)
    values["rollout"] |= {"env_name": "benchmarks.stops:Talker", "isolation": isolation}
    values["training"] |= {"checkpoint_every_n_iters": 3}
    return RunConfig.from_dict({**values, "warmup": {"num_episodes": 8, "learning_rate": 1e-3}})


def _fingerprint(folder: Path) -> dict[str, Any]:
    """Return what is compared: a stop adds a checkpoint and its event, so that of events only evaluations are."""
    evaluations = [(event["step"], event["data"]) for event in read_events(folder) if event["kind"] == "evaluation"]
    return {**fingerprint(folder), "events": evaluations}


def _stop_once(config: RunConfig, delay: float, report: StopsReport) -> str | None:
    """Start a run and send it SIGTERM after the delay; return what it was doing, None if it had ended."""
    pid, moment = _fork(config), time.monotonic() + delay
    while not _has_ended(pid) and time.monotonic() < moment:
        time.sleep(0.001)
    doing, children = _doing(config.run_folder), _descendants(pid)
    os.kill(pid, signal.SIGTERM)  # it is not reaped yet, so that the number is its own
    told = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return None
    report.seconds.append(time.monotonic() - told)
    report.exit_codes[_EXIT_CODE if code == -signal.SIGTERM else code] += 1
    while (left := [child for child in children if _is_alive(child)]) and time.monotonic() < told + _CHILD_SECONDS:
        time.sleep(0.01)
    if left:
        report.children.append(f"{len(left)} left after: {doing}")
    return doing


def _fork(config: RunConfig) -> int:
    """Start a run in a forked process, which ends as the command does; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        Path(config.run.folder).mkdir(parents=True, exist_ok=True)
        run_training(config, resume="auto")
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        os._exit(code)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _doing(folder: Path) -> str:
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


def _is_saved(folder: Path) -> bool:
    """Return whether the newest checkpoint is of the last step that was recorded; True before the first one."""
    saved = [int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*")]
    done = max((line["step"] for line in read_metrics(folder)), default=0)
    return max(saved, default=0) == done  # in start-up there is nothing to save yet


def _descendants(pid: int) -> list[tuple[int, str]]:
    """Return the processes below one, each with its start, which tells it from a later one of its number."""
    stats = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (stat := _stat(int(path.name))) is not None:
            stats[int(path.name)] = stat
    found = {pid}
    while new := {child for child, stat in stats.items() if int(stat[1]) in found} - found:
        found |= new
    return [(child, stats[child][19]) for child in found - {pid} if child in stats]


def _is_alive(process: tuple[int, str]) -> bool:
    stat = _stat(process[0])
    return stat is not None and stat[0] not in "ZX" and stat[19] == process[1]


def _stat(pid: int) -> list[str] | None:
    """Return the fields of a process after its name; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None

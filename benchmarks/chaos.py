"""What faults of a run's processes cost: `python -m benchmarks chaos --count 40 --steps 60 --seed 0`.

A small training of several processes (`gspo-gym train`) is disturbed at random moments: a process of a random kind gets
SIGKILL, or SIGSTOP and never SIGCONT, or all that two processes send each other gets lost. The processes are found from
outside, by their parents and command lines. If the driver is killed, the run is started again with `--resume`. At the
end episodes, ledger and weights are compared with those of an undisturbed run, and nothing may be left: no process,
socket, shared memory or temporary file. Faults that are planted into copies of the run must be noticed.

As root the runs have namespaces of their own, so that what is left is seen, whatever else the machine does, and that
connections can be cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.crash import settings
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import UsageError
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.rollout.ledger import Disposition, Terminal, imbalances, read_ledger
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.seeding import generator

NUM_STEPS = 60
SAME = 5e-6  # of issue 19: between weights, which move by about 1e-3 a step
HEARTBEAT_SECONDS = 5.0
_STEP_TIMEOUT_SECONDS = 5.0  # for an environment's answer
_GROUP_TIMEOUT_SECONDS = 30.0  # for an answer of the ranks; then what they say to each other is lost
_STUCK_SECONDS = 600.0  # without a step
_END_SECONDS = 20.0  # until nothing is left; what hangs has 10 of them after SIGTERM
_LOOK_SECONDS = 0.1
_BESIDE_PROB = 0.4  # that a fault comes while the run recovers from the one before
_BESIDE_SECONDS = 6.0
_ALONE = "GSPO_GYM_CHAOS_ALONE"
_PR_SET_CHILD_SUBREAPER = 36
_CUT_PRIORITY = 50  # of the rules that cut, before that of all local addresses
_ESTABLISHED, _LISTENS = "01", "0A"  # states of /proc/net/tcp

# What the command lines of a kind of process hold.
_SIGNS: Mapping[str, tuple[str, ...]] = {
    "rank": ("ray::LearnerRank",),
    "replica": ("ray::SamplingActor",),
    "reference": ("ray::ScoringActor",),
    "raylet": ("raylet/raylet ",),
    "head of Ray": ("gcs/gcs_server ",),
    "environment server": ("gspo_gym.env.workers.host",),
}
_WORKER = "environment worker"  # a child of an environment server, with the same command line
_DRIVER = "driver"
_TO_DRIVER, _BETWEEN_RANKS = "connection of a rank to the driver", "connection between the ranks"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to which kind of process, or of connection.

    Attributes:
        act: "kill", "stop" for ever, "pause" for longer than the heartbeat, "cut".
        is_of_all: all processes of the kind at once.
    """

    kind: str
    act: str
    is_of_all: bool = False

    def __str__(self) -> str:
        one = "an" if self.kind.startswith("e") else "a"
        return f"{self.act} {'every' if self.is_of_all else one} {self.kind}"


# Drawn without putting back until none is left, so that each kind has its share.
FAULTS = (
    Fault(_WORKER, "kill"),
    Fault(_WORKER, "kill"),
    Fault(_WORKER, "stop"),
    Fault("environment server", "kill"),
    Fault("environment server", "stop"),
    Fault(_DRIVER, "kill"),
    Fault(_DRIVER, "pause"),
)
OF_RANKS = (Fault("rank", "kill"), Fault("rank", "stop"), Fault("rank", "kill", is_of_all=True))
OF_REPLICAS = (Fault("replica", "kill"), Fault("replica", "stop"), Fault("replica", "kill", is_of_all=True))
OF_RAY = (Fault("raylet", "kill"), Fault("raylet", "stop"), Fault("head of Ray", "kill"))
OF_THE_REFERENCE = (Fault("reference", "kill"), Fault("reference", "stop"))
_END_THE_RUN = (*OF_RAY, *OF_THE_REFERENCE)  # with a sentence: `--resume` goes on
# What needs a network of its own: packets vanish both ways, and nothing is closed.
CUTS = (Fault(_TO_DRIVER, "cut"), Fault(_BETWEEN_RANKS, "cut", is_of_all=True))


@dataclass(frozen=True, slots=True)
class Layout:
    """What the run consists of.

    Attributes:
        num_replicas: processes that sample; one is the driver.
        has_reference: the driver learns, and a process scores for the KL terms, in place of two ranks.
    """

    num_replicas: int = 1
    has_reference: bool = False

    def faults(self) -> tuple[Fault, ...]:
        """Return what can be done to it here."""
        cuts = CUTS if _is_alone() else ()
        of_learner = OF_THE_REFERENCE if self.has_reference else (*OF_RANKS, *cuts)
        of_replicas = OF_REPLICAS if self.num_replicas > 1 else ()
        return (*FAULTS, *of_learner, *of_replicas, *OF_RAY)


@dataclass(frozen=True, slots=True)
class Process:
    """A process below this one; `started` tells it from a later one of its number."""

    pid: int
    parent: int
    started: int
    command: str


@dataclass
class Done:
    """A fault that was done.

    Attributes:
        step: the last one that was complete.
        phase: what the run was doing, as its lock's file says.
        at: seconds since 1970.
        noticed_seconds: until the run recorded that ranks were lost; None: it recorded nothing.
        recovered_seconds: until a step was complete that was not before; None: the run has not gone on yet.
    """

    fault: Fault
    step: int
    phase: str
    at: float
    noticed_seconds: float | None = None
    recovered_seconds: float | None = None


@dataclass
class ChaosReport:
    """What came of the faults; the lists of text are empty if all is well.

    Attributes:
        step_seconds: median of the undisturbed run's.
        failed: ends of the run that were not ours.
        left: what was there after an end, and should not have been.
        lost, twice: episodes that were not kept once.
        differing: parts of the run that are not the undisturbed run's.
        weights, moments: the largest difference of a number; 0.0: bit for bit the same.
        controls: whether a planted fault was noticed, by its name.
    """

    num_wanted: int
    step_seconds: float = 0.0
    faults: list[Done] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    num_episodes: int = 0
    weights: float = float("inf")
    moments: float = float("inf")
    controls: dict[str, bool] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        is_whole = len(self.faults) == self.num_wanted and not self.failed and not self.left
        is_same = not self.lost and not self.twice and not self.differing and self.weights <= SAME
        return is_whole and is_same and bool(self.controls) and all(self.controls.values())


def run_chaos(count: int, seed: int, *, num_steps: int = NUM_STEPS, layout: Layout | None = None) -> int:
    """Measure and print; the exit status."""
    layout = layout or Layout()
    if not sys.platform.startswith("linux"):
        raise UsageError(f"chaos: expected Linux, whose /proc tells what runs, got {sys.platform}")
    if _ALONE not in os.environ and (command := _command_alone()) is not None:
        return subprocess.run([*command, *_own_command()], env={**os.environ, _ALONE: "1"}, check=False).returncode
    console = Console(width=160)
    if not _is_alone():
        console.print(
            "not root, or without unshare and ip: no connection is cut, and no socket and shared memory looked at"
        )
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        began = time.monotonic()
        report = measure(Path(folder), count=count, seed=seed, num_steps=num_steps, layout=layout, tell=console.print)
        seconds = time.monotonic() - began
    console.print(render(report))
    for line in (*report.failed, *report.left, *report.lost, *report.twice, *report.differing):
        console.print(line, markup=False)
    console.print(f"{'as it should be' if report.is_good else 'NOT AS IT SHOULD BE'}; {seconds:.0f} seconds")
    return 0 if report.is_good else 1


def measure(
    folder: Path, *, count: int, seed: int, num_steps: int, layout: Layout, tell: Callable[[str], object]
) -> ChaosReport:
    """Do `count` faults to a run of so many steps, and compare it, in a folder that is empty."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a killed driver leaves becomes our child
    report = ChaosReport(count)
    whole = configure(folder / "whole", num_steps, layout)
    run = _Run(whole, folder / "tmp")
    while run.status() is None:
        time.sleep(_LOOK_SECONDS)
    if run.status():
        raise RuntimeError(f"the undisturbed run failed:\n{run.last_lines()}")
    _wait_for_nothing_left(run, "the undisturbed run", report)
    report.step_seconds = statistics.median(m["time/step_seconds"] for m in read_metrics(whole.run_folder))
    tell(f"undisturbed: {num_steps} steps, {report.step_seconds:.2f} seconds each")
    disturbed = configure(folder / "disturbed", num_steps, layout)
    faults = drawn(generator(seed, "chaos", "faults"), count, layout.faults())
    _disturb(_Run(disturbed, folder / "tmp"), faults, generator(seed, "chaos"), report, tell)
    _compare(disturbed.run_folder, whole.run_folder, report)
    for name, plant in CONTROLS.items():
        control, copied = ChaosReport(0), folder / name / "run"
        shutil.copytree(whole.run_folder, copied)
        plant(copied)
        _compare(copied, whole.run_folder, control)
        report.controls[name] = bool(control.lost or control.twice or control.differing or control.weights > SAME)
    report.controls["a process that stays"] = _is_a_leftover_noticed(run)
    return report


def configure(folder: Path, num_steps: int, layout: Layout) -> RunConfig:
    """A run of several processes of each kind that is disturbed, which saves after every fifth step."""
    values = settings(folder, num_steps=num_steps, concurrency=4).model_dump(exclude_none=True)
    values["rollout"] |= {"isolation": "process", "engine": "local"}
    values["compute"] = {"gpu_count": 0}
    values["topology"] = {
        "type": "cluster",
        "gpus_for_vllm": layout.num_replicas,
        "gpus_for_training": 1 if layout.has_reference else 2,
        "heartbeat_seconds": HEARTBEAT_SECONDS,
        "group_timeout_seconds": _GROUP_TIMEOUT_SECONDS,
        "max_restarts": 10,  # faults may overlap
    }
    if layout.has_reference:
        values["topology"]["gpus_for_ref"] = 1
        values["reference"] = {"placement": "dedicated"}
        values["loss"] = {"kl_coef": 0.05}
    values["limits"] = {"step_timeout_seconds": _STEP_TIMEOUT_SECONDS}
    values["training"] |= {"checkpoint_every_n_iters": 5}
    del values["training"]["keep_last"]
    values["evaluation"] |= {"every_n_iters": 20}
    return RunConfig.from_dict(values)


def render(report: ChaosReport) -> Table:
    """The table: a row for each fault, and then what is compared."""
    table = Table("fault", "times", "while", "noticed after: median, longest", "a step later: median, longest")
    for fault in dict.fromkeys(each.fault for each in report.faults):
        done = [each for each in report.faults if each.fault == fault]
        phases = ", ".join(f"{number} {phase}" for phase, number in Counter(each.phase for each in done).most_common())
        noticed = [each.noticed_seconds for each in done if each.noticed_seconds is not None]
        recovered = [each.recovered_seconds for each in done if each.recovered_seconds is not None]
        table.add_row(str(fault), str(len(done)), phases, _seconds(noticed), _seconds(recovered))
    table.add_row(f"undisturbed: a step takes {report.step_seconds:.2f} s", end_section=True)
    table.add_row("episodes lost, kept twice", f"{len(report.lost)}, {len(report.twice)} of {report.num_episodes}")
    table.add_row("parts not as undisturbed", str(len(report.differing)))
    table.add_row("weights, moments differ by at most", f"{report.weights:.1e}, {report.moments:.1e}")
    table.add_row("left behind", str(len(report.left)))
    for name, was_noticed in report.controls.items():
        table.add_row(f"planted: {name}", "noticed" if was_noticed else "NOT NOTICED")
    return table


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f} s" if values else "-"


class _Run:
    """A training in processes of its own, which may be started again."""

    def __init__(self, config: RunConfig, temporary: Path) -> None:
        self.config, self.temporary = config, temporary
        self.folder = config.run_folder
        temporary.mkdir(exist_ok=True)
        self._file = Path(f"{config.run.folder}.toml")
        self._file.write_text(config.to_toml(), encoding="utf-8")
        self._output = Path(f"{config.run.folder}.log")
        self.start()

    def start(self) -> None:
        """Start it, or go on with it."""
        self.began = time.time()
        variables = {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        with self._output.open("ab") as output:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "gspo_gym.cli", "train", str(self._file), "--resume=auto"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._driver.pid

    def status(self) -> int | None:
        """Return the driver's exit status, None while it runs; take the dead that it left off the list."""
        for name in Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split():
            if int(name) != self.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(int(name), os.WNOHANG)
        return self._driver.poll()

    def end(self) -> None:
        self._driver.kill()
        self._driver.wait()

    def num_steps(self) -> int:
        """Return the last complete step."""
        return max((line["step"] for line in _lines(self.folder / "metrics.jsonl")), default=0)

    def phase(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / ".lock").read_text(encoding="utf-8").strip() or "starting"
        return "starting"

    def last_lines(self) -> str:
        return "\n".join(self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])

    def processes(self, kind: str) -> list[Process]:
        """Return the run's processes of a kind."""
        if kind == _DRIVER:
            return [process for process in processes_below(os.getpid()) if process.pid == self.pid]
        found = processes_below(self.pid)
        servers = {process.pid for process in found if _has_sign(process, "environment server")}
        if kind == _WORKER:
            return [process for process in found if process.parent in servers]
        return [process for process in found if _has_sign(process, kind) and process.parent not in servers]

    def connections(self, kind: str) -> list[frozenset[tuple[int, int]]]:
        """Return the run's connections of a kind: for each pair of processes, the ports of both ends of all of them."""
        ranks = [_ports(rank.pid) for rank in self.processes("rank")]
        others = [_ports(self.pid)] if kind == _TO_DRIVER else ranks
        pairs = [(rank, other) for rank in ranks for other in others if rank is not other]
        return [both for rank, other in pairs if (both := frozenset(rank & {ends[::-1] for ends in other}))]


def _has_sign(process: Process, kind: str) -> bool:
    return any(sign in process.command for sign in _SIGNS[kind])


def _ports(pid: int) -> set[tuple[int, int]]:
    """Return the ports of a process's connections, its own first."""
    inodes = set()
    with contextlib.suppress(OSError):  # it has ended, or closes one
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
            _, ours, theirs, state, *_ = fields = line.split()
            if state == _ESTABLISHED and fields[9] in inodes:
                found.add((int(ours.rpartition(":")[2], 16), int(theirs.rpartition(":")[2], 16)))
    return found


def _cut(ports: Iterable[tuple[int, int]]) -> None:
    # Two processes may both have named a connection, and a rule cannot be added twice.
    for source, target in {way for ends in ports for way in (ends, ends[::-1])}:
        rule = f"pref {_CUT_PRIORITY} ipproto tcp sport {source} dport {target} blackhole"
        for family in ("-4", "-6"):
            subprocess.run(["ip", family, "rule", "add", *rule.split()], check=True)


def _mend_cuts() -> None:
    for family in ("-4", "-6"):
        command = ["ip", family, "rule", "del", "pref", str(_CUT_PRIORITY)]
        while subprocess.run(command, capture_output=True, check=False).returncode == 0:
            pass


def _lines(path: Path) -> Iterator[Any]:
    """Yield the complete lines of a file that is being written (Any: JSON)."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            yield json.loads(line)


def processes_below(pid: int) -> list[Process]:
    """Return the processes that a process has started, and theirs."""
    found: dict[int, Process] = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended
            stat = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if stat[0] not in "ZX":
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(path.name)] = Process(int(path.name), int(stat[1]), int(stat[19]), command)
    below = {pid}
    while new := {each.pid for each in found.values() if each.parent in below} - below:
        below |= new
    return [found[each] for each in sorted(below - {pid}) if each in found]


def _disturb(
    run: _Run, faults: Sequence[Fault], rng: np.random.Generator, report: ChaosReport, tell: Callable[[str], object]
) -> None:
    num_steps = run.config.training.iterations_per_epoch
    try:
        for number, fault in enumerate(faults):
            # Where fewer steps are left than faults, they cannot all wait for one.
            is_late = run.num_steps() + report.num_wanted - number >= num_steps
            is_beside = (number > 0 and rng.uniform() < _BESIDE_PROB) or is_late
            aim = int((number + rng.uniform()) * (num_steps - 1) / report.num_wanted)
            if is_beside:
                moment = time.monotonic() + rng.uniform(0, _BESIDE_SECONDS)
                has_come = partial(_is_past_or_at, moment, aim, run)
            else:
                _go_on(run, report, until=partial(_has_come_to, aim, run, report))
                moment = time.monotonic() + rng.uniform() * report.step_seconds
                has_come = partial(_is_past_or_at, moment, num_steps, run)
            _go_on(run, report, until=has_come)
            tell("; ".join(f"{each.fault}: {each.recovered_seconds}" for each in report.faults[-1:]))
            if (done := _do(fault, run, rng, report)) is None:
                tell("the run ended before all faults were done")
                break
            report.faults.append(done)
            tell(f"{number + 1}: after step {done.step}, {done.phase}: {fault}{', beside' * is_beside}")
        _go_on(run, report, until=lambda: False)
        _wait_for_nothing_left(run, "the end", report)
    finally:
        run.end()


def drawn(rng: np.random.Generator, count: int, faults: Sequence[Fault] = FAULTS) -> list[Fault]:
    """Return so many faults in a random order; each comes once before any comes again."""
    found: list[Fault] = []
    while len(found) < count:
        found += [faults[index] for index in rng.permutation(len(faults))]
    return found[:count]


def _go_on(run: _Run, report: ChaosReport, *, until: Callable[[], bool]) -> None:
    """Wait, and start the run again where it fails, until it is done or something is so."""
    progress, since = run.num_steps(), time.monotonic()
    while not until():
        status = run.status()
        _note_progress(run, report)
        if status == 0:
            return
        # Ray ends what has joined it when it is gone: then it is the driver's death. A step may have ended meanwhile.
        ending_faults = [done for done in report.faults if done.fault in _END_THE_RUN and done.at > run.began]
        if status is not None and not ending_faults:
            report.failed.append(f"after step {run.num_steps()} it ended with status {status}:\n{run.last_lines()}")
            if len(report.failed) > 3:
                raise RuntimeError("\n".join(report.failed))
        if status is not None:
            for done in ending_faults:
                done.step, done.recovered_seconds = run.num_steps(), None
            _wait_for_nothing_left(run, f"the end after step {run.num_steps()}", report)
            run.start()
        if (now := run.num_steps()) != progress:
            progress, since = now, time.monotonic()
        if time.monotonic() > since + _STUCK_SECONDS:
            shown = [f"{each.pid} of {each.parent}: {each.command}" for each in processes_below(os.getpid())]
            raise RuntimeError("\n".join([f"no step for {_STUCK_SECONDS:g} seconds:", *shown, run.last_lines()]))
        time.sleep(_LOOK_SECONDS)


def _has_come_to(step: int, run: _Run, report: ChaosReport) -> bool:
    """Return whether the run has done the step, and recovered from all faults."""
    return run.num_steps() >= step and all(done.recovered_seconds is not None for done in report.faults)


def _is_past_or_at(moment: float, step: int, run: _Run) -> bool:
    return time.monotonic() >= moment or run.num_steps() >= step


def _note_progress(run: _Run, report: ChaosReport) -> None:
    if not (waiting := [done for done in report.faults if done.recovered_seconds is None]):
        return
    told = [event["time"] for event in _lines(run.folder / "events.jsonl") if event["kind"] == "ranks_lost"]
    step = run.num_steps()
    for done in waiting:
        if done.noticed_seconds is None:
            done.noticed_seconds = next((at - done.at for at in told if at > done.at), None)
        if step > done.step:
            done.recovered_seconds = time.time() - done.at


def _do(fault: Fault, run: _Run, rng: np.random.Generator, report: ChaosReport) -> Done | None:
    """Do it as soon as there is such a process; return None if the run ends before."""
    if fault.act == "cut":
        _mend_cuts()  # earlier ones, of ranks that are gone
    find = run.connections if fault.act == "cut" else run.processes
    _go_on(run, report, until=lambda: bool(find(fault.kind)))
    if not (found := find(fault.kind)):
        return None
    hit = found if fault.is_of_all else [found[rng.integers(len(found))]]
    done = Done(fault, run.num_steps(), run.phase(), time.time())
    for each in hit:
        if isinstance(each, Process):
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(each.pid, signal.SIGKILL if fault.act == "kill" else signal.SIGSTOP)
    _cut([ends for each in hit if not isinstance(each, Process) for ends in each])
    if fault.act == "pause":
        time.sleep(1.6 * HEARTBEAT_SECONDS)
        os.kill(run.pid, signal.SIGCONT)
    if fault == Fault(_DRIVER, "kill"):
        while run.status() is None:
            time.sleep(_LOOK_SECONDS)
        _wait_for_nothing_left(run, f"the driver's death after step {done.step}", report)
        run.start()
    return done


def _wait_for_nothing_left(run: _Run, after: str, report: ChaosReport) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while (left := _left(run)) and time.monotonic() < deadline:
        run.status()  # which takes the dead off
        time.sleep(_LOOK_SECONDS)
    report.left += [f"after {after}: {each}" for each in left]
    for process in processes_below(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _left(run: _Run) -> list[str]:
    """Return what a run that has ended has left."""
    left = [f"process {each.pid}: {each.command}" for each in processes_below(os.getpid())]
    left += [f"temporary file {path}" for path in run.temporary.iterdir() if not is_probe_of_tempfile(path)]
    if not _is_alone():
        return left
    left += [f"shared memory {path}" for path in Path("/dev/shm").iterdir()]
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
            if line.split()[3] in (_ESTABLISHED, _LISTENS):
                left.append(f"socket {name} {line.split()[1]} {line.split()[2]}")
    return left + [f"socket {line}" for line in Path("/proc/net/unix").read_text().splitlines()[1:]]


def is_probe_of_tempfile(path: Path) -> bool:
    """Return whether a file is Python's own, by which `tempfile` finds out whether it can write to a folder.

    It is there for a moment in each process that starts; a kill -9 in that moment leaves it, whatever the program.
    """
    return (
        re.fullmatch(r"[a-z0-9_]{8}", path.name) is not None and path.is_file() and path.read_bytes() in (b"", b"blat")
    )


def _is_a_leftover_noticed(run: _Run) -> bool:
    """Leave a process whose parent has ended, and a temporary file."""
    subprocess.run(["sh", "-c", "sleep 60 & : > $0", str(run.temporary / "left")], check=True)
    left = _left(run)
    for process in processes_below(os.getpid()):
        os.kill(process.pid, signal.SIGKILL)
    return any(each.startswith("process") for each in left) and any(each.startswith("temporary") for each in left)


@dataclass(frozen=True, slots=True)
class _Essence:
    """What two runs must have in common, whatever happened to their processes."""

    kept: Counter[tuple[str, int, int]]
    parts: Mapping[str, object]
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def _essence(folder: Path) -> _Essence:
    newest = max((folder / "checkpoints").glob("step_*"))
    state = json.loads((newest / "resume" / "state.json").read_text(encoding="utf-8"))
    entries = read_ledger(folder / "ledger.jsonl")
    begun = {(e.trajectory_id, e.attempt): e for e in entries if not isinstance(e, Terminal)}
    kept: Counter[tuple[str, int, int]] = Counter()
    for entry in entries:
        if isinstance(entry, Terminal) and entry.disposition is Disposition.KEPT:
            dispatched = begun[entry.trajectory_id, entry.attempt]
            kept[entry.trajectory_id, dispatched.env_seed, dispatched.sampling_seed] += 1
    parts = {
        "newest checkpoint": newest.name,
        "counters": state["counters"],
        "tasks": {
            name: value
            for name, value in state["trainer"].items()
            if name not in ("wall_seconds", "last_seq", "attempts")  # of failed attempts, which there are
        },
        "evaluations": [
            (e["step"], e["data"] | {"num_retries": 0})  # of failed attempts, which there are
            for e in read_events(folder)
            if e["kind"] == "evaluation"
        ],
        "trained tokens": [(line["step"], line.get("batch/trained_tokens")) for line in read_metrics(folder)],
        "episodes": {path.name: sorted(_tokens(path)) for path in episode_paths(folder)},
        "ledger": list(imbalances(entries)),
    }
    return _Essence(kept, parts, load_file(newest / "model.safetensors"), _moments(newest / "resume"))


def _moments(folder: Path) -> dict[str, Tensor]:
    """Return the learner's tensors whole: each rank has written its rows, and the first also what is not shared out."""
    rows: dict[str, list[Tensor]] = {}
    for path in sorted(folder.glob("learner*.safetensors")):
        for name, tensor in load_file(path).items():
            rows.setdefault(name, []).append(tensor)
    return {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in rows.items()}


def _tokens(path: Path) -> list[Any]:
    return [
        [t.trajectory_id, t.task.seed, t.sampling_seed, t.reward, t.outcome.value]
        + [[each.tolist() for each in (s.token_ids, s.action_mask, s.weight_version)] for s in t.segments]
        for t in read_episodes(path)
    ]


def _compare(folder: Path, undisturbed: Path, report: ChaosReport) -> None:
    ours, theirs = _essence(folder), _essence(undisturbed)
    report.num_episodes = theirs.kept.total()
    report.lost = [f"lost: {each}{_failures(folder, each[0])}" for each in theirs.kept if each not in ours.kept]
    report.twice = [f"kept {n} times: {each}" for each, n in ours.kept.items() if n != 1 or each not in theirs.kept]
    report.differing = [
        f"differs: {name}: {_only_in(ours.parts[name], part)}, undisturbed {_only_in(part, ours.parts[name])}"
        for name, part in theirs.parts.items()
        if ours.parts[name] != part
    ]
    if ours.parts["ledger"]:
        report.differing += [f"ledger: {line}" for line in (ours.parts["ledger"],)]
    report.weights = _difference(ours.weights, theirs.weights)
    report.moments = _difference(ours.moments, theirs.moments)


def _only_in(part: object, other: object) -> str:
    """Return what of a part the other has not, at most a few lines of it."""
    if isinstance(part, list) and isinstance(other, list):
        part = [each for each in part if each not in other] or f"the same {len(part)} in another order or number"
    elif isinstance(part, dict) and isinstance(other, dict):
        part = {name: value for name, value in part.items() if name not in other or other[name] != value}
    return textwrap.shorten(repr(part), 800)


def _failures(folder: Path, trajectory_id: str) -> str:
    """Return the reasons for which attempts of an episode were not kept."""
    ends = [entry for entry in read_ledger(folder / "ledger.jsonl") if isinstance(entry, Terminal)]
    return "".join(f"; attempt {e.attempt}: {e.reason}" for e in ends if e.trajectory_id == trajectory_id and e.reason)


def _difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def _drop_an_end(folder: Path) -> None:
    lines = (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if '"kept"' in line)
    (folder / "ledger.jsonl").write_text("".join(lines[:last] + lines[last + 1 :]), encoding="utf-8")


def _repeat_an_end(folder: Path) -> None:
    path = folder / "ledger.jsonl"
    line = next(line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if '"kept"' in line)
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


def _drop_a_file(folder: Path) -> None:
    next(iter(episode_paths(folder))).unlink()


def _move_a_weight(folder: Path) -> None:
    path = max((folder / "checkpoints").glob("step_*")) / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 2 * SAME
    save_file(tensors, path, {"format": "pt"})


# Each plants a fault into a run's folder.
CONTROLS: Mapping[str, Callable[[Path], None]] = {
    "an episode that is lost": _drop_an_end,
    "an episode that counts twice": _repeat_an_end,
    "a file of episodes that is lost": _drop_a_file,
    "a weight that is changed": _move_a_weight,
}


def _command_alone() -> list[str] | None:
    """Return what a command is run by to have processes, sockets and shared memory to itself; None: it cannot."""
    if os.getuid() != 0 or any(shutil.which(name) is None for name in ("unshare", "ip", "mount")):
        return None
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    # Rules about ports come before the one that finds all local addresses, which is the first of all otherwise.
    later = "&& ".join(f"ip {f} rule add pref 100 lookup local && ip {f} rule del pref 0 " for f in ("-4", "-6"))
    prepare = f'ip link set lo up && {later} && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    command = [*namespaces, "sh", "-c", prepare, "sh"]
    return command if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0 else None


def _own_command() -> list[str]:
    return [sys.executable, "-m", "benchmarks", *sys.argv[1:]]


def _is_alone() -> bool:
    return _ALONE in os.environ

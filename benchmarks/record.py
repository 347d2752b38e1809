"""Numbers of a benchmark: shown with the machine and its load, kept as a line of JSON, and compared with the last one.

Costs are compared in parts of a peer's, where one ran in the same rounds: a busy machine slows both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

MIN_ROUNDS = 3  # of fewer, nothing says how much they differ by chance
MIN_CHANGE = 1.03  # of medians: less is not worth a line


@dataclass(frozen=True, slots=True)
class Value:
    """A measured cost (less is better), an entry a round.

    Attributes:
        name: the work and its shape; values of one name are compared with each other.
        ours: of this project.
        peer: of `peer_name` in the same rounds; empty: there was none.
        unit: of both.
        goal: so many times less than the peer's; None: there is none.
    """

    name: str
    ours: tuple[float, ...]
    peer: tuple[float, ...] = ()
    peer_name: str = ""
    unit: str = "s"
    goal: float | None = None

    @property
    def ratios(self) -> tuple[float, ...]:
        """The peer's cost in times of ours, by round; empty without a peer."""
        return tuple(peer / ours for ours, peer in zip(self.ours, self.peer, strict=True)) if self.peer else ()


@dataclass(frozen=True, slots=True)
class Machine:
    """The parts of a machine that a speed depends on; numbers of two are not compared."""

    processor: str
    cores: int
    torch: str
    threads: int


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a kept file."""

    benchmark: str
    at: str
    machine: Machine
    load: tuple[float, float]
    values: tuple[Value, ...]

    def to_json(self) -> str:
        """Return the line, without its end."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Line:
        """Return the line of this text."""
        fields: dict[str, Any] = json.loads(text)  # Any: JSON
        values = tuple(
            Value(**{key: tuple(each) if isinstance(each, list) else each for key, each in value.items()})
            for value in fields["values"]
        )
        return cls(fields["benchmark"], fields["at"], Machine(**fields["machine"]), tuple(fields["load"]), values)


def this_machine(threads: int) -> Machine:
    """Return the machine that this process runs on."""
    cores = len(os.sched_getaffinity(0))
    return Machine(_processor(), cores, torch.__version__, threads)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def on_machine(machine: Machine) -> Iterator[list[float]]:
    """Print the machine and its load (of a minute) before, and the load after; give both loads, when they are known."""
    console = Console(width=200)
    loads = [os.getloadavg()[0]]
    console.print(
        f"{machine.processor}, {machine.cores} core(s), torch {machine.torch}, {machine.threads} torch thread(s); "
        f"load {loads[0]:.2f}",
        highlight=False,
    )
    yield loads
    loads.append(os.getloadavg()[0])
    console.print(f"load {loads[1]:.2f}", highlight=False)


def render(values: Sequence[Value]) -> Table:
    """Return a table of medians; the ratio is the median of those of the rounds, with the least and the largest."""
    table = Table("measured", "ours", "peer", "")
    for heading in ("times faster", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for value in values:
        ratio = goal = ""
        if value.ratios:
            lowest, middle, highest = (f(value.ratios) for f in (min, statistics.median, max))
            ratio = f"{middle:.2f}x ({lowest:.2f} to {highest:.2f})"
            goal = "" if value.goal is None else f"{value.goal:.2f}x"
        peer = f"{statistics.median(value.peer):.3f} {value.unit}" if value.peer else "not there"
        table.add_row(
            value.name, f"{statistics.median(value.ours):.3f} {value.unit}", peer, value.peer_name, ratio, goal
        )
    return table


def keep(path: Path, line: Line) -> Line | None:
    """Append the line; return the last one of the same benchmark on the same machine, or None."""
    last = None
    if path.exists():
        earlier = [Line.of_json(text) for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
        known = [each for each in earlier if (each.benchmark, each.machine) == (line.benchmark, line.machine)]
        last = known[-1] if known else None
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line.to_json() + "\n")
    return last


def finish(benchmark: str, values: Sequence[Value], *, machine: Machine, loads: Sequence[float], path: Path) -> int:
    """Keep the values and print what became slower; return 1 if anything did, else 0."""
    line = Line(
        benchmark,
        datetime.now(UTC).isoformat(timespec="seconds"),
        machine,
        (round(loads[0], 2), round(loads[1], 2)),
        tuple(dataclasses.replace(value, goal=None) for value in values),
    )
    console, last = Console(width=200, highlight=False), keep(path, line)
    if last is None:
        console.print(f"{path}: the first line of this benchmark on this machine; nothing to compare with")
        return 0
    slower, unjudged = compare(last, line)
    for sentence in slower:
        console.print(f"slower: {sentence}")
    if unjudged:
        console.print(f"not judged, fewer than {MIN_ROUNDS} rounds or not in both: {', '.join(unjudged)}")
    num_judged = len(line.values) - len(unjudged)
    console.print(
        f"{path}: {len(slower)} of {num_judged} became slower since {last.at} (load {last.load[0]:.2f} then, "
        f"{line.load[0]:.2f} now)"
    )
    return int(bool(slower))


def compare(last: Line, now: Line) -> tuple[list[str], list[str]]:
    """Return a sentence for each value that became slower beyond its noise, and the names of those not judged.

    Slower beyond noise: every round now costs more than every round of the last line, and the medians differ by more
    than 3 %. Where both lines have TRL beside ours, costs are in parts of its; other peers are this project's own code.
    """
    slower: list[str] = []
    unjudged: list[str] = []
    known = {value.name: value for value in last.values}
    for value in now.values:
        before = known.get(value.name)
        if before is None or min(len(before.ours), len(value.ours)) < MIN_ROUNDS:
            unjudged.append(value.name)
            continue
        has_peer = bool(before.peer and value.peer) and before.peer_name == value.peer_name
        has_peer = has_peer and value.peer_name.startswith("TRL")
        old, new = (_costs(each, in_peers=has_peer) for each in (before, value))
        change = statistics.median(new) / statistics.median(old)
        if min(new) > max(old) and change > MIN_CHANGE:
            beside = f" beside {value.peer_name}" if has_peer else ""
            slower.append(
                f"{value.name}{beside}: {change:.2f} times the cost ({_range(old)} before, {_range(new)} now"
                f"{'' if has_peer else ' ' + value.unit})"
            )
    return slower, unjudged


def _costs(value: Value, *, in_peers: bool) -> tuple[float, ...]:
    return tuple(1 / ratio for ratio in value.ratios) if in_peers else value.ours


def _range(costs: Sequence[float]) -> str:
    return f"{min(costs):.3f} to {max(costs):.3f}"

"""Measurements side by side: `python -m benchmarks NAME`, in a checkout; each is in a file of its name.

Machine and load are printed beside the numbers. Those of `engines`, `prefixes`, `peers` and `quick` can be kept
(`--keep FILE`) and are then compared with the last ones of the same machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.batches import run_batches
from benchmarks.chaos import Layout, run_chaos
from benchmarks.crash import run_crash
from benchmarks.engines import run_engines
from benchmarks.faults import run_faults
from benchmarks.mutants import QUICK, Effort, choose_files, inside, run_mutants
from benchmarks.night import add_arguments as add_arguments_of_night
from benchmarks.night import plan_of, run_night
from benchmarks.peers import PEER, SPEED, choose, peer_is_installed, run_peers, run_real
from benchmarks.pipeline import Workload, run_pipeline
from benchmarks.prefixes import run_prefixes
from benchmarks.record import Value, finish, on_machine, render, this_machine
from benchmarks.stops import run_stops
from gspo_gym.cli.command_line import Parser, parse_and_run
from gspo_gym.errors import UsageError
from gspo_gym.policy.bases import SMOLLM2

Arguments = argparse.Namespace


def _gateway(a: Arguments) -> int:
    from benchmarks.gateway import run_gateway  # needs the packages of an extra

    return run_gateway(repeats=a.repeats)


def _engines(a: Arguments) -> list[Value]:
    if a.model == SMOLLM2:
        return run_batches(a.model, num_episodes=a.episodes or 96, repeats=a.repeats)
    return run_engines(a.model, dtype=a.dtype, num_episodes=a.episodes or 64, repeats=a.repeats)


def _peers(a: Arguments) -> list[Value]:
    if a.model == SMOLLM2:
        return run_real(a.model, rounds=a.repeats, threads=a.threads, with_peer=not a.alone)
    return run_peers(choose(a.files, learn=a.learn), rounds=a.repeats, threads=a.threads)


def _quick(a: Arguments) -> list[Value]:
    """Measure what takes minutes, smaller than its own command does, with the peer where it is installed."""
    values = run_engines(a.model, dtype=a.dtype, num_episodes=a.episodes or 32, repeats=a.repeats)
    values += run_prefixes(a.model, [], repeats=a.repeats)
    if not peer_is_installed():
        Console(width=160).print(f"{PEER} is not installed; `make peers` does it")
    return values + run_peers(SPEED, rounds=a.repeats, threads=a.threads, with_peer=peer_is_installed())


def _mutants(a: Arguments) -> int:
    root = a.root.resolve()
    tests = tuple(inside(test, root) for test in a.tests)
    effort = Effort(a.count or 20, a.seed, a.seconds, a.expression, tests)
    paths = choose_files(a.files, root, sample=a.sample, seed=a.seed)
    return run_mutants(paths, effort, root=root, processes=a.processes or 1, kept=a.json)


# Benchmarks that only print, and return an exit status.
PRINTED: Mapping[str, Callable[[Arguments], int]] = {
    "faults": lambda a: run_faults(a.episodes or 2000),
    "pipeline": lambda a: run_pipeline(Workload(num_groups=a.groups), repeats=a.repeats),
    "gateway": _gateway,
    "mutants": _mutants,
    "night": lambda a: run_night(plan_of(a)),
    "crash": lambda a: run_crash(a.count or 50, a.seed, num_steps=a.steps or 20),
    "chaos": lambda a: run_chaos(
        a.count or 40, a.seed, num_steps=a.steps or 60, layout=Layout(a.replicas, a.reference)
    ),
    "stops": lambda a: run_stops(a.count or 30, a.seed, num_steps=a.steps or 12),
}
# Benchmarks whose numbers are shown, and can be kept.
KEPT: Mapping[str, Callable[[Arguments], list[Value]]] = {
    "engines": _engines,
    "prefixes": lambda a: run_prefixes(a.model, a.files, repeats=a.repeats),
    "peers": _peers,
    "quick": _quick,
}
_TAKE_FILES = ("mutants", "prefixes", "peers", "night")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("what", choices=[*KEPT, *PRINTED], help="what to measure")
    parser.add_argument(
        "files",
        nargs="*",
        help="mutants: files to mutate, below the root; prefixes: episodes; peers: shapes (all); night: "
        "section.key=value, over the configuration of every game",
    )
    parser.add_argument(
        "--count",
        type=int,
        help="mutants: how many a file (20); crash: kills (50); stops: how many (30); chaos: faults (40)",
    )
    parser.add_argument("--steps", type=int, help="steps of the run: 20 for crash, 12 for stops, 60 for chaos")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="mutants, crash, stops, chaos: which ones; night: the first run seed (default: %(default)s)",
    )
    parser.add_argument("--processes", type=int, help="mutants: files at a time (1); night: runs at a time (2)")
    _add_arguments_of_mutants(parser)
    add_arguments_of_night(parser)
    parser.add_argument(
        "--model",
        default="tiny:qwen3-256",
        help="hub id, folder or tiny:NAME; of prefixes also wide, a larger one; of engines and peers also smollm2, the "
        "instruct model (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--episodes", type=int, help="default: 64 for engines (32 in quick), 2000 for faults")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument(
        "--repeats",
        "--rounds",
        type=int,
        default=3,
        help="runs of each engine, updates, or pairs with the peer (default: %(default)s)",
    )
    parser.add_argument(
        "--groups", type=int, default=16, help="pipeline: groups of 8 episodes a step; more make learning longer"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=2,
        help="chaos: processes that sample; 1: the driver does (default: %(default)s)",
    )
    parser.add_argument("--reference", action="store_true", help="chaos: one learner and a reference, not two ranks")
    parser.add_argument("--alone", action="store_true", help="peers of smollm2: without TRL")
    parser.add_argument("--learn", action="store_true", help="peers: time to learn two games, which takes long")
    parser.add_argument(
        "--keep",
        type=Path,
        help=f"append the numbers to this file and compare with its last ones of this machine: {', '.join(KEPT)}",
    )
    parser.set_defaults(run=run)


def _add_arguments_of_mutants(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mutants")
    group.add_argument(
        "--root", type=Path, default=Path(), metavar="FOLDER", help="the checkout (default: this folder)"
    )
    group.add_argument("--sample", type=int, default=0, metavar="N", help="draw N modules of gspo_gym by the seed, too")
    group.add_argument("--tests", nargs="+", action="extend", default=[], help="test files instead of the nearest ones")
    group.add_argument("-m", dest="expression", default=QUICK, help="which tests, as pytest's (default: %(default)s)")
    group.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="processor time of a file, after which no further test file begins (default: %(default)s)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="append each file's result, a line when it is known")


def run(arguments: Arguments) -> int:
    """Measure and print; return 1 if a goal is missed or a kept number became slower."""
    what = arguments.what
    if arguments.files and what not in _TAKE_FILES:
        raise UsageError(f"{what} takes no files, got {' '.join(arguments.files)}")
    if arguments.keep is not None and what in PRINTED:
        raise UsageError(f"--keep: {what} only prints; what can be kept are the numbers of {', '.join(KEPT)}")
    torch.set_num_threads(arguments.threads)
    machine = this_machine(arguments.threads)
    with on_machine(machine) as loads:
        if what in PRINTED:
            return PRINTED[what](arguments)
        values = KEPT[what](arguments)
        Console(width=160).print(f"medians of {arguments.repeats} round(s)", render(values))
    if arguments.keep is None:
        return 0
    name = f"{what} --learn" if arguments.learn else what
    return finish(name, values, machine=machine, loads=loads, path=arguments.keep)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = Parser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    return parse_and_run(parser, argv)

"""Cost of the learner's output head beside the naive one: `python -m benchmarks head`.

A vocabulary of 151,936 and 4,096 sampled tokens, forward and backward, with gradients of weight and hidden states. The
naive head makes all logits and takes torch's log_softmax, without entropies; the learner's (`learning.head`) also gives
entropies. The two take turns, each time in a process of its own. Medians of their times and of their memory: the peak
of the process's resident memory, less what it had before the pass.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.record import Value
from gspo_gym.learning.head import ChunkedHead, OutputHead
from gspo_gym.learning.settings import UpdateSettings
from gspo_gym.types import Sampling

Costs = dict[str, float]  # by the keys of GOALS

GOALS = {"seconds": 1.1, "MiB": 1 / 8}  # of the naive head's, with a vocabulary of this size
_VOCABULARY = 151_936


def run_head(
    *, repeats: int, threads: int, vocab_size: int = _VOCABULARY, width: int = 128, num_tokens: int = 4096
) -> tuple[int, list[Value]]:
    """Measure and print; return the exit status, 1 if a ratio misses its goal, and the costs."""
    runs = measure_heads(repeats, threads, vocab_size, width, num_tokens)
    medians = {
        kind: {what: statistics.median(run[what] for run in each) for what in GOALS} for kind, each in runs.items()
    }
    Console().print(f"V = {vocab_size:,}, {num_tokens:,} tokens, hidden size {width}, float32; median of {repeats}")
    shape = f"head, V = {vocab_size:,}, {num_tokens:,} tokens"
    values = [
        Value(
            f"{shape}, {what}",
            *(tuple(run[what] for run in runs[kind]) for kind in ("learner", "naive")),
            "naive",
            what,
        )
        for what in GOALS
    ]
    return print_heads(medians), values


def measure_heads(repeats: int, threads: int, vocab_size: int, width: int, num_tokens: int) -> dict[str, list[Costs]]:
    """Return the costs of each head by round, "naive" and "learner"."""
    runs: dict[str, list[Costs]] = {"naive": [], "learner": []}
    for _ in range(repeats):
        for kind, measured in runs.items():
            shape = [str(number) for number in (threads, vocab_size, width, num_tokens)]
            command = [sys.executable, "-m", "benchmarks.head", kind, *shape]
            measured.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return runs


def print_heads(medians: dict[str, Costs]) -> int:
    """Print the costs, their ratios and the goals; return 1 if a ratio misses its goal, else 0."""
    table = Table("head", *GOALS)
    for kind, costs in medians.items():
        table.add_row(kind, *(f"{costs[what]:,.2f}" for what in GOALS))
    ratios = {what: medians["learner"][what] / medians["naive"][what] for what in GOALS}
    table.add_row("ratio", *(f"{ratio:.3f}" for ratio in ratios.values()))
    table.add_row(f"goal of V = {_VOCABULARY:,}", *(f"{goal:.3f}" for goal in GOALS.values()))
    Console().print(table)
    return int(any(ratios[what] > goal for what, goal in GOALS.items()))


def measure(kind: str, vocab_size: int, width: int, num_tokens: int) -> Costs:
    """Return seconds and peak memory of one pass of a head, forward and backward; for a fresh process."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(width, vocab_size, bias=False)
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    targets = torch.randint(0, vocab_size, (num_tokens,))
    before, start = _resident_mib("VmRSS"), time.perf_counter()
    _logprobs(kind, linear, hidden, targets).mean().backward()
    return {"seconds": time.perf_counter() - start, "MiB": _resident_mib("VmHWM") - before}


def _logprobs(kind: str, linear: torch.nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    if kind == "naive":
        return torch.log_softmax(linear(hidden), -1).gather(-1, targets[:, None])
    budget = UpdateSettings(learning_rate=1e-6).logits_bytes
    head = ChunkedHead(OutputHead(linear), linear.out_features, Sampling(), budget, entropy_has_gradient=False)
    return head.compute(hidden, targets, drops_out=False)[0]


def _resident_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[3:]))))

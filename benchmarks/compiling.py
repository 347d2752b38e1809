"""Whether compiled layers pay: `python -m benchmarks compile [FILE...]`.

The episodes are those of `prefixes`. A learner whose model has `model.torch_compile` and one without make the same
updates, in turn. The first update of the one compiles, which takes as much longer as `compiling` says; `pays after` so
many updates with episodes of this kind: a run with fewer steps is slower with the switch.
"""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.prefixes import cases_of, make_learner, model_of, update_in_turn, with_advantages
from benchmarks.record import Value
from gspo_gym.policy.options import prepare_for_training


def run_compile(base: str, files: list[str], *, repeats: int) -> list[Value]:
    """Measure and print; return the costs of compiled layers beside those of layers as they are."""
    model = model_of(base)
    table = Table("episodes", "as it is s", "compiled s", "speed", "compiling s", "pays after")
    values = []
    for name, batch in cases_of(files).items():
        learners = {"plain": make_learner(copy.deepcopy(model)), "compiled": make_learner(compiled(model))}
        seconds = update_in_turn(learners, with_advantages(batch), num_rounds=repeats + 1)
        plain, fast = (statistics.median(seconds[kind][1:]) for kind in learners)
        extra = seconds["compiled"][0] - fast
        values.append(Value(f"learning from {name}, {base}", seconds["compiled"][1:], seconds["plain"][1:], "as it is"))
        numbers = (f"{plain:.2f}", f"{fast:.2f}", f"{plain / fast:.2f}", f"{extra:.0f}")
        table.add_row(name, *numbers, updates_to_pay(plain, fast, extra))
    Console().print(f"{base}, float32; median of {repeats}")
    Console().print(table)
    return values


def compiled(model: Any) -> Any:
    """Return a copy whose layers are compiled (Any: transformers is untyped)."""
    copied = copy.deepcopy(model)
    prepare_for_training(copied, torch_compile=True)
    return copied


def updates_to_pay(plain: float, fast: float, extra: float) -> str:
    """Return after how many updates `extra` seconds are won back by updates of `fast` instead of `plain` seconds."""
    return "never" if fast >= plain else f"{math.ceil(extra / (plain - fast)):,}"

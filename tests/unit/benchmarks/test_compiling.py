"""`benchmarks compile`: after how many updates compiled layers pay, and that it measures such layers."""

from __future__ import annotations

import pytest
import torch

from benchmarks.compiling import compiled, run_compile, updates_to_pay
from gspo_gym.policy.load import load_policy


def test_compiling_pays_when_what_each_update_wins_adds_up_to_what_it_cost() -> None:
    assert updates_to_pay(0.5, 0.25, 20.0) == "80"
    assert updates_to_pay(0.5, 0.25, 20.1) == "81"
    assert updates_to_pay(2.5, 0.5, 8000.0) == "4,000"
    assert updates_to_pay(0.25, 0.25, 20.0) == updates_to_pay(0.25, 0.5, 20.0) == "never"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's compiler, on import
def test_one_of_the_two_models_has_compiled_layers() -> None:
    model = load_policy("tiny:qwen3-64").model
    copied = compiled(model)
    has_compiled = [[layer._compiled_call_impl is not None for layer in m.model.layers] for m in (copied, model)]
    assert has_compiled == [[True] * len(model.model.layers), [False] * len(model.model.layers)]
    with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
        (value,) = run_compile("tiny:qwen3-64", [], repeats=2)
    assert (value.peer_name, len(value.ours), len(value.peer)) == ("as it is", 2, 2)

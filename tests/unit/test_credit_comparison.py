"""How the comparison of credit sums up its runs; that it trains is tested with the other examples."""

import importlib.util
import math
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "credit_comparison.py"
CURVES = {
    "one": [[(0, 0.3), (10, 0.71), (20, 0.6)], [(0, 0.3), (10, 0.5), (20, 0.9)], [(0, 0.3), (10, 0.4), (20, 0.5)]],
    "two": [[(0, 0.3), (10, 0.4), (20, 0.5)], [(0, 0.3), (10, 0.4), (20, 0.4)], [(0, 0.3), (10, 0.7)]],
    "three": [[(0, 0.9)]],
}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("credit_comparison", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_methods_have_the_same_budget_and_differ_in_nothing_but_the_method(example):
    differing = {"algorithm.variety", "advantages.level", "loss.clip_low", "loss.clip_high", "training.learning_rate"}
    assert [set(settings) for settings in example.METHODS.values()] == [differing] * 3
    assert not differing & set(example.BUDGET)


def test_the_goal_is_reached_at_the_first_evaluation_that_is_not_below_it(example):
    assert example.GOAL == 0.7
    assert [example.steps_to_goal(curve) for curve in CURVES["one"]] == [10, 20, math.inf]
    assert example.steps_to_goal(CURVES["two"][2]) == 10


def test_a_median_counts_runs_that_did_not_get_there(example):
    assert example.table(CURVES).splitlines()[2:] == [
        "| one | 20 | 10, 20, not reached | 0.600 | 0.600, 0.900, 0.500 |",
        "| two | not reached | not reached, not reached, 10 | 0.500 | 0.500, 0.400, 0.700 |",
        "| three | 0 | 0 | 0.900 | 0.900 |",
    ]


def test_the_same_curves_give_the_same_figure(example, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    files = [tmp_path / f"{name}.svg" for name in ("first", "second")]
    for file in files:
        example.plot(CURVES, file)
    first, second = (file.read_text() for file in files)
    assert first == second
    assert first.startswith("<?xml")

"""The benchmark: every engine does the same work, and the table says how fast."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from benchmarks.engines import ENGINES, Measurement, make_workload, render
from benchmarks.main import main
from benchmarks.pipeline import StepTimes, Workload
from benchmarks.pipeline import measure as measure_pipeline
from benchmarks.pipeline import render as render_pipeline
from gspo_gym.policy.load import load_policy


def test_the_workload_is_ragged_within_its_bounds_and_the_same_every_time() -> None:
    plans = make_workload(64)
    assert plans == make_workload(64)
    turns = {len(plan.num_sampled) for plan in plans}
    sampled = [n for plan in plans for n in plan.num_sampled]
    observed = [len(o) for plan in plans for o in plan.observations]
    assert turns == {3, 4, 5, 6}
    assert (min(sampled), max(sampled)) == (8, 64)  # 286 draws reach both ends of 8..64 under this seed
    assert 20 <= min(observed) <= max(observed) <= 30
    assert all(plans[i].prompt == plans[i - i % 8].prompt for i in range(64))
    assert len({plan.prompt for plan in plans}) == 8


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_samples_exactly_what_the_plans_ask_for(name: str) -> None:
    plans = make_workload(3, group_size=2)
    model = load_policy("tiny:qwen3-64").model
    assert ENGINES[name](model, plans) == sum(sum(plan.num_sampled) for plan in plans)


def test_the_table_shows_rates_and_ratios_to_the_first_row(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=120).print(render({"slow": Measurement(1000, (9.0, 10.0, 90.0)), "fast": Measurement(1000, (2.5,))}))
    rows = [line for line in capsys.readouterr().out.splitlines() if "1,000" in line]
    assert [cell.strip() for cell in rows[0].split("│")][4:6] == ["100", "1.00x"]
    assert [cell.strip() for cell in rows[1].split("│")][4:6] == ["400", "4.00x"]


@pytest.mark.slow
def test_the_pipeline_benchmark_trains_and_every_turn_takes_the_same_time_in_every_run() -> None:
    workload = Workload(num_steps=3, num_groups=2, group_size=2, num_turns=2, turn_seconds=0.01, observation_tokens=8)
    latencies = [workload.latency(seed, member, 0) for seed in range(500) for member in range(8)]
    assert latencies[:8] == [workload.latency(0, member, 0) for member in range(8)]
    assert np.mean(latencies) == pytest.approx(0.01, rel=0.1)  # the mean of exp(N(ln m - 1/2, 1)) is m
    assert np.quantile(latencies, 0.99) == pytest.approx(0.01 * np.exp(2.326 - 0.5), rel=0.2)
    synchronous, ahead = (measure_pipeline(workload, max_staleness) for max_staleness in (0, 1))
    assert (synchronous.staleness, synchronous.num_late) == (0.0, 0.0)
    assert 0.0 <= ahead.staleness <= 1.0
    assert synchronous.step >= synchronous.playing + synchronous.learning - 1e-9


def test_the_pipeline_table_shows_the_ratio_to_the_longer_of_playing_and_learning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = [StepTimes(5.0, 3.0, 2.0, 0.0, 0.0), StepTimes(3.3, 0.3, 3.0, 1.0, 0.0), StepTimes(2.4, 0.0, 2.4, 1.5, 8.0)]
    Console(width=120).print(render_pipeline(times))
    rows = [
        [cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if " s " in line
    ]
    assert [(row[1], row[5], row[7]) for row in rows] == [("0", "1.67", "0"), ("1", "1.10", "0"), ("2", "0.80", "8")]


def test_an_unknown_model_is_a_message_and_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "--model", "tiny:nothing"]) == 2
    assert "UnknownNameError: model 'tiny:nothing'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmarks_run_where_the_gateways_packages_are_not_installed() -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(['starlette', 'fastapi', 'uvicorn']))"
    subprocess.run([sys.executable, "-c", f"{hidden}; import benchmarks.main"], check=True, timeout=120)

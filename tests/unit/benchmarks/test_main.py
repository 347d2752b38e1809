"""The benchmark: every engine does the same work, and the table says how fast."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checkpoints import Costs as CheckpointCosts
from benchmarks.checkpoints import measure as measure_checkpoints
from benchmarks.engines import ENGINES, Measurement, make_workload, render
from benchmarks.head import measure_heads, print_heads
from benchmarks.isolation import Costs, private_bytes_of
from benchmarks.isolation import measure as measure_isolation
from benchmarks.isolation import render as render_isolation
from benchmarks.main import main
from benchmarks.page import chromium
from benchmarks.pipeline import StepTimes, Workload
from benchmarks.pipeline import measure as measure_pipeline
from benchmarks.pipeline import render as render_pipeline
from benchmarks.pool import longest_wait, run_pool
from benchmarks.tokens import TokenCosts
from benchmarks.weights import Costs as WeightCosts
from benchmarks.weights import render as render_weights
from gspo_gym.errors import MissingExtraError
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
    from rich.console import Console

    Console(width=120).print(render({"slow": Measurement(1000, (9.0, 10.0, 90.0)), "fast": Measurement(1000, (2.5,))}))
    rows = [line for line in capsys.readouterr().out.splitlines() if "1,000" in line]
    assert [cell.strip() for cell in rows[0].split("│")][4:6] == ["100", "1.00x"]
    assert [cell.strip() for cell in rows[1].split("│")][4:6] == ["400", "4.00x"]


@pytest.mark.slow
def test_the_head_benchmark_measures_the_memory_of_all_logits() -> None:
    runs = measure_heads(1, threads=1, vocab_size=4096, width=8, num_tokens=512)
    assert {kind: len(each) for kind, each in runs.items()} == {"naive": 1, "learner": 1}
    assert runs["naive"][0]["MiB"] > 3 * 512 * 4096 * 4 / 2**20 * 0.9  # logits, their log-softmax and a gradient
    assert min(each[0]["seconds"] for each in runs.values()) > 0.0


@pytest.mark.parametrize(("seconds", "mib", "status"), [(1.1, 12.5, 0), (1.15, 12.5, 1), (0.5, 12.6, 1)])
def test_the_head_benchmark_compares_with_all_logits_and_says_the_goals(
    capsys: pytest.CaptureFixture[str], seconds: float, mib: float, status: int
) -> None:
    naive = {"seconds": 1.0, "MiB": 100.0}
    assert print_heads({"naive": naive, "learner": {"seconds": seconds, "MiB": mib}}) == status
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    ratio, goal = [[float(n) for n in row[1:]] for row in rows if row and row[0] in ("ratio", "goal of V = 151,936")]
    assert ratio == pytest.approx([seconds, mib / 100])
    assert goal == [1.1, 0.125]


def test_the_checkpoint_benchmark_saves_every_repeat(tmp_path: Path) -> None:
    costs = asyncio.run(measure_checkpoints(load_policy("tiny:qwen3-64"), tmp_path, repeats=2))
    assert [len(each) for each in (costs.copy, costs.blocked, costs.whole, costs.longest_wait)] == [2] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    costs = CheckpointCosts(copy=[1.0, 3.0, 2.0], blocked=[2.2, 9.0, 0.1])
    assert costs.ratio == pytest.approx(1.1)


def test_the_cost_of_recording_is_the_median_of_the_pairs_over_a_step() -> None:
    costs = TokenCosts(
        step=2.0, update=[1.0, 5.0, 1.0], recorded=[1.01, 5.02, 1.5], num_bytes=400, column_bytes=300, num_tokens=10
    )
    assert costs.share == pytest.approx(0.02 / 2.0)  # differences 0.01, 0.02 and 0.5


def test_a_page_without_a_browser_to_look_with_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingExtraError, match="apt-get install chromium-headless-shell"), chromium():
        pass


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


def test_the_pool_takes_at_least_the_longest_wait_of_an_episode() -> None:
    workload = Workload(num_groups=2, group_size=3, num_turns=2, turn_seconds=0.1, observation_tokens=8)
    waits = [
        workload.latency(seed, member, 0) + workload.latency(seed, member, 1) for seed in (0, 1) for member in (0, 1, 2)
    ]
    assert longest_wait(workload) == max(waits)
    (value,) = run_pool(workload, repeats=1)
    assert value.ours[0] >= max(waits)
    assert value.peer[0] >= max(waits)
    assert value.goal == pytest.approx(1 / 1.05)


def test_the_pipeline_table_shows_the_ratio_to_the_longer_of_playing_and_learning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rich.console import Console

    times = [StepTimes(5.0, 3.0, 2.0, 0.0, 0.0), StepTimes(3.3, 0.3, 3.0, 1.0, 0.0), StepTimes(2.4, 0.0, 2.4, 1.5, 8.0)]
    Console(width=120).print(render_pipeline(times))
    rows = [
        [cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if " s " in line
    ]
    assert [(row[1], row[5], row[7]) for row in rows] == [("0", "1.67", "0"), ("1", "1.10", "0"), ("2", "0.80", "8")]


def test_an_unknown_model_is_a_message_and_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "--model", "tiny:nothing"]) == 2
    assert "UnknownNameError: model 'tiny:nothing'" in capsys.readouterr().err


def test_both_places_play_the_same_turns_and_only_a_worker_has_memory_of_its_own() -> None:
    costs = asyncio.run(measure_isolation(2))
    # halving 1..8 finds the number of these seeds in as many guesses wherever it is played
    assert len(costs["thread"].step) == len(costs["process"].step) >= 2
    for place, num_sizes in (("thread", 0), ("process", 2)):
        assert (len(costs[place].reset), len(costs[place].open_and_close)) == (2, 2)
        assert len(costs[place].private_bytes) == num_sizes


def test_private_memory_is_what_a_process_has_written() -> None:
    code = "import sys; held = bytearray(b'x' * 50_000_000); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # 50 MB that it filled, and an interpreter of some 10 MB
        assert 50_000_000 <= private_bytes_of(process.pid) <= 80_000_000


def test_the_isolation_table_shows_medians_in_milliseconds_and_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    costs = {
        "thread": Costs([0.001, 0.002, 0.009], [0.0005], [0.0001]),
        "process": Costs([0.004], [0.001], [0.0002], [7_000_000, 9_000_000]),
    }
    Console(width=120).print(render_isolation(costs))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["thread", "2.00", "0.50", "0.10", "-"] in rows
    assert ["process", "4.00", "1.00", "0.20", "8.0"] in rows


def test_the_weights_table_shows_medians_and_the_ratio_to_the_fastest_way(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    costs = {"disk": WeightCosts([1.0, 2.0, 9.0], [3.0, 4.0, 11.0]), "memory": WeightCosts([0.5], [1.6])}
    Console(width=120).print(render_weights(costs))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["disk", "2.000", "4.000", "2.50"] in rows
    assert ["memory", "0.500", "1.600", "1.00"] in rows


@pytest.mark.slow
def test_the_benchmarks_run_where_the_gateways_packages_are_not_installed() -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(['starlette', 'fastapi', 'uvicorn']))"
    subprocess.run([sys.executable, "-c", f"{hidden}; import benchmarks.main"], check=True, timeout=120)

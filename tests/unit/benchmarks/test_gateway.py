"""The gateway's benchmark: the same episodes both ways, and the difference as a share of the engine's time."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console

from benchmarks.gateway import ENGINE_SECONDS, Load, Measured, measure, render


def test_agents_in_another_process_make_as_many_calls_as_the_engine_is_asked_directly() -> None:
    measured = asyncio.run(measure(Load(num_episodes=3, env_seconds=0.001, num_turns=2)))
    assert len(measured.gateway) == len(measured.bare) == 6
    assert min(measured.gateway) >= ENGINE_SECONDS
    assert min(measured.bare) >= ENGINE_SECONDS
    assert measured.wall_seconds >= 2 * ENGINE_SECONDS  # two turns, one after the other
    assert measured.cpu_seconds > 0


def test_environments_take_their_time_in_every_run_the_same() -> None:
    pauses = Load(num_episodes=500, env_seconds=0.2).pauses()
    assert pauses == Load(num_episodes=500, env_seconds=0.2).pauses()
    flat = [pause for episode in pauses for pause in episode]
    assert len(flat) == 5000
    assert 0 <= min(flat) <= max(flat) <= 0.4
    assert sum(flat) / 5000 == pytest.approx(0.2, rel=0.03)  # 0.4 / sqrt(12 * 5000) is 0.8 % of it


def test_the_table_shows_medians_of_what_is_added_and_its_share() -> None:
    measured = Measured(bare=[0.05] * 3, gateway=[0.052, 0.054, 0.056], wall_seconds=0.5, cpu_seconds=0.0045)
    assert measured.overhead(50) == pytest.approx(0.004)
    slower, quicker = (
        Measured(bare=[b] * 3, gateway=[g] * 3, wall_seconds=w, cpu_seconds=w / 100)
        for b, g, w in ((0.06, 0.09, 1.0), (0.04, 0.041, 0.3))
    )
    shown = io.StringIO()
    Console(file=shown, width=120).print(render({Load(128, 0.2): [slower, measured, quicker]}))
    (row,) = (line for line in shown.getvalue().splitlines() if "128" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    # Each the median of three rounds: the second's, but for the processor's time, of 10 / 3, 1.5 and 1 ms a call. Its
    # 99th percentile of three values, interpolated, is 54 + 0.98 * 2 = 55.96.
    assert cells == ["128", "200 ms", "50.0", "54.0", "4.0 (8%)", "50.0", "56.0", "6.0 (12%)", "6", "1.50"]

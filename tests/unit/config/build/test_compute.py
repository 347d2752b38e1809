"""The threads of a run: which one the learner works in, and how many of torch's it uses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_quickstart import QUICKSTART

from gspo_gym.config.build import rollouts
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.compute import start_compute
from gspo_gym.config.build.threads import NumThreads, computing_elsewhere, faster
from gspo_gym.config.run_config import load_config
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events
from gspo_gym.run.report.progress import QuietProgress


@pytest.fixture(autouse=True)
def numbers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Pass:
    """A forward pass that takes the seconds of torch's present number of threads, by its own clock."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now, self.shapes = seconds, 0.0, set[tuple[int, ...]]()

    def forward(self) -> None: ...

    def __call__(self, input_ids: torch.Tensor) -> None:
        self.shapes.add(tuple(input_ids.shape))
        self.now += self.seconds[torch.get_num_threads()]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 0.010, 3: 0.004}, 3),
        ({1: 0.010, 3: 0.0095}, 1),  # not worth two more cores
        ({1: 0.010, 3: 0.030}, 1),
        ({1: 50.0, 3: 20.0}, 3),
    ],
)
def test_more_threads_are_used_where_they_take_less_than_nine_tenths_of_the_time(
    seconds: dict[int, float], expected: int
) -> None:
    passes = Pass(seconds)
    assert faster(passes, (4, 2), 3, clock=lambda: passes.now) == expected
    assert passes.shapes == {(4, 2)}
    assert passes.now <= max(20.0, 0.4 + sum(seconds.values()))  # a large model's pass is not waited for twice


def started(
    folder: Path, *, num_threads: int, max_staleness: int = 0, recorded: dict[str, int] | None = None
) -> tuple[dict[str, tuple[str, int]], list[str]]:
    """Start a run's threads; return the thread, and torch's number in it, of the learner's work and the engine's."""
    config = load_config(QUICKSTART, [f"training.max_staleness={max_staleness}", 'correction.old_logprobs="rollout"'])
    told: list[str] = []
    found: dict[str, tuple[str, int]] = {}

    def look() -> tuple[str, int]:
        return threading.current_thread().name.removesuffix("_0"), torch.get_num_threads()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            player = await rollouts.build_player(config, build.build_policy(config))
            stack.push_async_callback(player.close)
            recorder = RunRecorder.create(folder, config.to_toml())
            stack.callback(recorder.close)
            if recorded is not None:
                recorder.event("threads", 0, recorded)
            progress = QuietProgress(told.append)
            compute = await start_compute(
                config, player, num_threads=num_threads, recorder=recorder, progress=progress, stack=stack
            )
            found["learner"] = await compute(look)
            assert isinstance(player.engine, LocalEngine)
            found["engine"] = await player.engine.compute(look)

    asyncio.run(main())
    return found, told


def test_learner_and_engine_share_a_thread_in_which_the_numbers_change(tmp_path: Path) -> None:
    """A resumed run keeps the numbers that it began with, on a machine with more cores."""
    found, told = started(tmp_path, num_threads=5, recorded={"sampling": 3, "learning": 2})
    assert found == {"learner": ("gspo-gym-engine", 2), "engine": ("gspo-gym-engine", 3)}
    assert told == []


def test_a_new_run_chooses_both_numbers_says_so_and_records_them(tmp_path: Path) -> None:
    found, told = started(tmp_path, num_threads=2)
    (event,) = [event for event in read_events(tmp_path) if event["kind"] == "threads"]
    numbers = NumThreads(**event["data"])
    assert {numbers.sampling, numbers.learning} <= {1, 2}
    assert found == {"learner": ("gspo-gym-engine", numbers.learning), "engine": ("gspo-gym-engine", numbers.sampling)}
    assert told == [f"torch threads: {numbers.sampling} while sampling, {numbers.learning} while learning"]


def test_a_number_from_the_environment_is_used_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found, _ = started(tmp_path, num_threads=3, recorded={"sampling": 1, "learning": 1})
    assert found == {"learner": ("gspo-gym-engine", 3), "engine": ("gspo-gym-engine", 3)}


def test_one_thread_is_neither_compared_nor_recorded(tmp_path: Path) -> None:
    found, told = started(tmp_path, num_threads=1)
    assert found == {"learner": ("gspo-gym-engine", 1), "engine": ("gspo-gym-engine", 1)}
    assert told == []
    assert [event["kind"] for event in read_events(tmp_path)] == ["started"]


@pytest.mark.parametrize(("num_threads", "engine", "learner"), [(1, 1, 1), (2, 1, 1), (5, 2, 3)])
def test_played_ahead_they_split_the_threads(tmp_path: Path, num_threads: int, engine: int, learner: int) -> None:
    found, _ = started(tmp_path, num_threads=num_threads, max_staleness=1)
    assert found == {"learner": ("gspo-gym-learner", learner), "engine": ("gspo-gym-engine", engine)}


def test_the_loop_computes_with_one_thread_and_gets_its_number_back() -> None:
    torch.set_num_threads(3)
    with computing_elsewhere("cpu") as num_threads:
        assert (num_threads, torch.get_num_threads()) == (3, 1)
    assert torch.get_num_threads() == 3
    with computing_elsewhere("cuda:1") as num_threads:
        assert (num_threads, torch.get_num_threads()) == (3, 3)

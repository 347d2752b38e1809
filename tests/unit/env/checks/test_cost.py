"""What an environment costs: leaks of every kind are found and named, and the times that are told are those spent."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gspo_gym.env.checks.checker import CheckReport, can_count_files, check_env, find_leaks
from gspo_gym.env.core import TextEnv


class Greeter(TextEnv):
    """One turn. Leaves nothing behind."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "Say hello.", {}

    def step(self, action: str) -> Any:
        return "Bye.", 0.0, True, False, {}


def problems_of(report: CheckReport, name: str) -> list[str]:
    return [problem.text for problem in report.problems if problem.check == name]


def check(env: Any, **settings: Any) -> CheckReport:
    return check_env(env, **{"seeds": range(2), "num_leak_episodes": 8, **settings})


# -- leaks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_set_aside", [False, True])
def test_older_objects_are_set_aside_while_it_counts_and_those_of_others_stay_so(was_set_aside: bool) -> None:
    """Else a collection goes through all that torch has loaded. One object stands for all: others die as they like."""
    older_object: list[None] = []

    def is_set_aside() -> bool:
        return not any(tracked is older_object for tracked in gc.get_objects())

    seen: list[bool] = []

    async def play() -> None:
        seen.append(is_set_aside())

    if was_set_aside:
        gc.freeze()
    try:
        assert asyncio.run(find_leaks(play, num_episodes=2)) == []
        assert is_set_aside() == was_set_aside
        assert set(seen) == {True}
    finally:
        gc.unfreeze()


def test_a_file_that_stays_open_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.touch()
    kept = []

    class KeepsFile(Greeter):
        def close(self) -> None:
            kept.append(path.open())

    try:
        report = check(KeepsFile)
    finally:
        for file in kept:
            file.close()
    expected = f"expected an episode to leave nothing behind after close, got 1 files an episode, such as {path}"
    assert problems_of(report, "leaks")[0] == expected
    assert report.measurements["leaks_per_episode"]["files"] == 1.0


def test_a_thread_that_goes_on_is_named() -> None:
    over = threading.Event()
    threads = []

    class KeepsThread(Greeter):
        def reset(self, **given: Any) -> Any:
            threads.append(threading.Thread(target=over.wait, name="ticker"))
            threads[-1].start()
            return super().reset(**given)

    try:
        report = check(KeepsThread)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    problem, *_ = problems_of(report, "leaks")  # what it leaves behind takes up memory, too
    assert "got 1 threads an episode, such as ticker" in problem


def test_a_child_process_that_nobody_ends_is_named() -> None:
    children: list[subprocess.Popen[bytes]] = []

    class KeepsChild(Greeter):
        def step(self, action: str) -> Any:
            children.append(subprocess.Popen(["sleep", "600"]))
            return super().step(action)

    try:
        report = check(KeepsChild, num_leak_episodes=4)
    finally:
        for child in children:
            child.kill()
            child.wait()
    problem, *_ = problems_of(report, "leaks")
    assert "got 1 child processes an episode, such as sleep" in problem


def test_memory_that_grows_is_told_in_bytes_an_episode() -> None:
    class KeepsHistory(Greeter):
        history: ClassVar[list[bytes]] = []

        def step(self, action: str) -> Any:
            self.history.append(bytes(50_000))
            return super().step(action)

    report = check(KeepsHistory)
    KeepsHistory.history.clear()
    [problem] = problems_of(report, "leaks")
    line = KeepsHistory.step.__code__.co_firstlineno + 1
    assert f" bytes of memory an episode, such as {__file__}:{line}" in problem
    assert report.measurements["leaks_per_episode"]["bytes of memory"] == pytest.approx(50_000, rel=0.1)


def test_memory_that_grows_at_once_and_then_no_more_is_no_leak() -> None:
    """Each half of 2 gets 10,000 bytes, which is more than 2 * 2,048; the two of 8 that follow get none."""
    kept: list[bytes] = []
    num_played = 0

    async def play() -> None:
        nonlocal num_played
        num_played += 1
        if num_played in (3, 5):
            kept.append(bytes(10_000))

    assert asyncio.run(find_leaks(play, num_episodes=4)) == []
    assert num_played == 2 + 2 * 2 + 2 * 8


def test_tables_that_grow_here_and_there_are_no_leak() -> None:
    """Each half of 8 gets 40,000 bytes, which is more than 8 * 2,048, but from another line than the other half."""
    kept: list[bytes] = []
    num_played = 0

    def allocate_elsewhere() -> bytes:
        return bytes(40_000)

    async def play() -> None:
        nonlocal num_played
        num_played += 1
        if num_played in (3, 5, 7):
            kept.append(bytes(40_000))
        if num_played == 15:
            kept.append(allocate_elsewhere())

    assert asyncio.run(find_leaks(play, num_episodes=4)) == []
    assert num_played == 2 + 2 * 2 + 2 * 8


# Of the 3 episodes in each half of 6, one leaks in one half and two in the other: the smaller number counts, 1/3.
@pytest.mark.parametrize(("num_episodes", "told"), [(4, "0.5"), (6, "0.333")])
def test_what_only_one_of_the_played_tasks_leaks_is_found(num_episodes: int, told: str) -> None:
    kept: list[Any] = []

    class KeepsSometimes(Greeter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if seed == 0:
                kept.append(Path(__file__).open())  # noqa: SIM115 - that is the point
            return super().reset(seed=seed)

    try:
        report = check(KeepsSometimes, num_leak_episodes=num_episodes)
    finally:
        for file in kept:
            file.close()
    problem, *_ = problems_of(report, "leaks")
    assert f"got {told} files an episode" in problem


@functools.lru_cache(maxsize=4)
def big_table(number: int) -> bytes:
    return bytes(500_000) + bytes([number])


def test_caches_pools_and_what_is_closed_are_no_leak(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.touch()
    numbers = itertools.cycle(range(3))

    class Tidy(Greeter):
        """Fills a bounded cache, and ends a file, a thread and a child with each episode."""

        def reset(self, **given: Any) -> Any:
            self.close()
            big_table(next(numbers))
            self.file = path.open()
            self.over = threading.Event()
            self.thread = threading.Thread(target=self.over.wait)
            self.thread.start()
            self.child = subprocess.Popen(["sleep", "600"])
            return super().reset(**given)

        def close(self) -> None:
            if hasattr(self, "file"):
                self.file.close()
                self.over.set()  # and nobody waits for the thread: it needs a moment
                self.child.kill()
                self.child.wait()
                del self.file

    report = check(Tidy)
    assert problems_of(report, "leaks") == []
    assert report.measurements["leaks_per_episode"] == {}


def test_not_looking_for_leaks_is_said() -> None:
    report = check(Greeter, num_leak_episodes=0)
    assert "leaks were not looked for" in report.notes
    assert "leaks_per_episode" not in report.measurements


# -- time ------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only where an environment says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.slow
def test_times_are_told_as_median_99_percent_and_longest() -> None:
    clock = Clock()
    durations = itertools.chain([0.002] * 90, [0.004] * 9, [0.1], itertools.repeat(0.0))

    class Slow(Greeter):
        def reset(self, **given: Any) -> Any:
            clock.now += 0.5
            return super().reset(**given)

        def step(self, action: str) -> Any:
            clock.now += next(durations)
            return super().step(action)

    report = check(Slow, seeds=range(100), clock=clock, num_leak_episodes=0)
    assert problems_of(report, "time") == []
    # One player and 100 seeds: the 99 % quantile lies at 0.99 * 99 = 98.01 of the sorted times 0..99, a hundredth of
    # the way from 4 ms to 100 ms.
    [told] = [fact.text for fact in report.facts if fact.check == "time"]
    assert told == "reset 500 / 500 / 500 ms, step 2 / 4.96 / 100 ms (median / 99% / longest)"
    assert report.measurements["step_seconds"] == {
        "median": pytest.approx(0.002),
        "p99": pytest.approx(0.00496),
        "max": pytest.approx(0.1),
        "num_calls": 100,
    }


def test_only_calls_beyond_the_limit_are_problems() -> None:
    clock = Clock()

    class SlowOnSeedOne(Greeter):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            clock.now += 0.25 if seed == 1 else 0.125
            return super().reset(seed=seed)

    slow = check(SlowOnSeedOne, clock=clock, max_step_seconds=0.2, num_leak_episodes=0)
    assert problems_of(slow, "time") == [
        "arbitrary actions, seed 1: reset(): expected an answer within 0.2 seconds, it took 0.25"
    ]
    assert problems_of(check(SlowOnSeedOne, clock=clock, max_step_seconds=0.25, num_leak_episodes=0), "time") == []


def test_there_is_a_proc_here_so_that_files_and_children_are_really_counted() -> None:
    assert sys.platform == "linux"
    assert can_count_files()

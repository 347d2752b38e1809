"""Isolation: where an environment runs is what was asked for, what it says, or what a trial in a worker shows."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.env.workers import isolation
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.isolation import Decision, isolated_factory
from gspo_gym.env.workers.limits import WorkerLimits
from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.types import Message

SUBJECT = """
import random
import numpy as np
from gspo_gym.env.core import TextEnv

class Quiet(TextEnv):
    def __init__(self, says=None):
        if says is not None:
            self.isolation = says
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "hello", {}
    def step(self, action):
        return self.answer(), 0.0, False, False, {}
    def answer(self):
        return str(self.np_random.random())

class Draws(Quiet):
    def answer(self):
        return str(random.random() + np.random.random())

class Seeds(Quiet):
    def reset(self, *, seed=None, options=None):
        np.random.seed(seed)
        return "hello", {}

class Broken(Draws):
    def step(self, action):
        raise ValueError("not today")

class LoadsOnce(Quiet):
    # As packages that draw a number while they are imported, which is when the first environment is made.
    loaded = None
    def __init__(self):
        if LoadsOnce.loaded is None:
            LoadsOnce.loaded = random.random()

class NeverMade(Quiet):
    def __init__(self):
        raise ValueError("not today")

class DrawsWhenMade(Quiet):
    def __init__(self):
        self.number = random.random()
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("subject")
    (folder / "isolation_subject.py").write_text(SUBJECT, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield __import__("isolation_subject")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["isolation_subject"]


def runs_in_process(env: Any) -> bool:
    if isinstance(env, ProcessEnv):
        env.kill()
        return True
    return False


def test_what_is_asked_for_is_done(subject: Any) -> None:
    assert not runs_in_process(isolated_factory(subject.Draws, isolation="thread")())
    assert runs_in_process(isolated_factory(subject.Quiet, isolation="process")())
    assert runs_in_process(isolated_factory("GuessNumber", {"high": 3}, "process")())
    with pytest.raises(ConfigError, match=r"isolation: expected one of .*got 'fork'"):
        isolated_factory("GuessNumber", isolation="fork")
    with pytest.raises(UnknownNameError, match="did you mean 'GuessNumber'"):
        isolated_factory("GuesNumber")


def test_an_environment_that_says_where_it_runs_is_believed(subject: Any) -> None:
    assert isolated_factory("GuessNumber").decision == Decision("thread", "it says so")
    assert isolated_factory("SqlAnalyst").decision == Decision("process", "it says so")
    # on the instance, as an adapter of a suite whose games differ would
    assert isolated_factory(subject.Draws, {"says": "thread"}).decision == Decision("thread", "it says so")


def test_one_that_touches_the_generators_of_the_process_is_found_out_and_told_of_once(
    subject: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gspo_gym.env.workers.isolation")
    draws, seeds = isolated_factory(subject.Draws), isolated_factory(subject.Seeds)
    assert draws.decision.isolation == seeds.decision.isolation == "process"
    assert draws.decision.reason == "it uses the generator of numpy.random, random, which a process shares"
    assert seeds.decision.reason == "it uses the generator of numpy.random, which a process shares"
    assert runs_in_process(draws())
    assert [record.message.partition(":")[0] for record in caplog.records] == ["Draws", "Seeds"]
    quiet = isolated_factory(subject.Quiet)
    assert quiet.decision == Decision("thread", "it was tried, and leaves alone what a process shares")
    assert not runs_in_process(quiet())


def test_what_only_loading_draws_is_no_reason_for_worker_processes(subject: Any) -> None:
    assert isolated_factory(subject.LoadsOnce).decision.isolation == "thread"
    assert isolated_factory(subject.DrawsWhenMade).decision.isolation == "process"


def test_one_that_cannot_be_tried_stays_in_a_thread_and_says_why(subject: Any) -> None:
    class Local(TextEnv):
        pass

    for env, kwargs, why in (
        (Local, {}, "expected a class or function at the top of a module"),
        (subject.Quiet, {"says": object()}, "expected text, a number"),
        (subject.Broken, {}, "it could not be tried in a worker process: Broken: step() raised ValueError: not today"),
    ):
        decision = isolated_factory(env, kwargs).decision
        assert decision.isolation == "thread"
        assert why in decision.reason


def test_a_trial_can_be_made_inside_a_running_event_loop(subject: Any) -> None:
    async def decide() -> str:
        return isolated_factory(subject.Draws, {"says": None}).decision.isolation

    assert asyncio.run(decide()) == "process"


def test_what_a_program_registers_runs_in_a_worker_with_its_arguments_and_time_limit(subject: Any) -> None:
    register("isolation_tests/Draws-v0", subject.Draws, max_episode_steps=2, kwargs={"says": "process"})

    async def play() -> list[bool]:
        factory = isolated_factory("isolation_tests/Draws-v0", isolation="process")
        session = await open_session(factory, env_id="Draws", step_timeout_seconds=60)
        try:
            assert session.env.declared_isolation == "process"
            await session.reset(0)
            return [(await session.step(Message("assistant", "x"))).truncated for _ in range(2)]
        finally:
            await session.close()

    try:
        assert asyncio.run(play()) == [False, True]
    finally:
        gymnasium.registry.pop("isolation_tests/Draws-v0")


def test_factories_of_the_same_thing_are_equal() -> None:
    assert isolated_factory("GuessNumber", {"high": 3}) == isolated_factory("gspo_gym/GuessNumber-v0", {"high": 3})
    assert isolated_factory("GuessNumber") != isolated_factory("GuessNumber", isolation="process")
    assert isolated_factory("GuessNumber") != isolated_factory("GuessNumber", limits=WorkerLimits(memory_mb=1))


SLOW = """
import fcntl, os, time
from gspo_gym.env.core import TextEnv

with open({lock!r}, "a") as core:  # the one core that all processes share
    fcntl.flock(core, fcntl.LOCK_EX)
    time.sleep(0.2)

class Slow(TextEnv):
    isolation = "process"
    def reset(self, *, seed=None, options=None):
        return str(os.getpid()), {{}}
    def step(self, action):
        return "", 0.0, True, False, {{}}
"""


LOADED_ONCE = """
import threading, time
from gspo_gym.env.core import TextEnv

class Slow(TextEnv):
    isolation = "thread"
    loading = threading.Lock()
    data = None
    def __init__(self):
        with Slow.loading:
            if Slow.data is None:
                time.sleep(2.0)
                Slow.data = []
"""


def test_sixteen_workers_that_import_a_slow_module_at_once_are_each_given_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_subject.py").write_text(SLOW.format(lock=str(tmp_path / "core")), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    factory = isolated_factory(__import__("slow_subject").Slow, start_timeout_seconds=2.0)  # of 16 * 0.2

    async def play() -> int:
        opened = await asyncio.gather(
            *(open_session(lambda: factory(), env_id="Slow", step_timeout_seconds=2.0) for _ in range(16)),
            return_exceptions=True,
        )
        sessions = [session for session in opened if isinstance(session, EnvSession)]
        try:
            return len({session.env.pid for session in sessions})
        finally:
            for session in sessions:
                session.env.kill()
                await session.close()

    assert asyncio.run(play()) == 16


def test_the_first_may_take_five_minutes_and_later_ones_as_long_as_loading_was_seen_to_take(
    subject: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "_SLOWEST_SECONDS", {})  # what other tests of this process have made
    factory = isolated_factory("GuessNumber", {"high": 5}, "thread")
    assert factory.seconds_to_make(30.0) == 300.0
    assert factory.seconds_to_make(400.0) == 400.0  # as configured, if that is more
    factory()
    assert factory.seconds_to_make(299.0) == 299.0  # it took less than 2.99 seconds
    for slowest, limit in ((0.5, 50.0), (0.1, 30.0), (4.0, 300.0)):
        monkeypatch.setitem(isolation._SLOWEST_SECONDS, factory._kind, slowest)
        assert factory.seconds_to_make(30.0) == limit
    broken = isolated_factory(subject.NeverMade, isolation="thread")
    with pytest.raises(ValueError, match="not today"):
        broken()
    assert broken.seconds_to_make(1.0) == 1.0


def test_what_the_first_in_a_thread_loads_for_all_is_charged_to_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_in_thread.py").write_text(LOADED_ONCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    factory = isolated_factory(__import__("slow_in_thread").Slow)

    async def play() -> None:
        opened = (open_session(lambda: factory(), env_id="Slow", step_timeout_seconds=1.5) for _ in range(4))
        for session in await asyncio.gather(*opened):
            await session.close()

    asyncio.run(play())

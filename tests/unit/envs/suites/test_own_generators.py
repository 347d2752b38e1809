"""The process's generators, lent: an episode's streams are its own, and the global ones stay as they were."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from gspo_gym_envs.suites import reasoning_gym as own_generators
from gspo_gym_envs.suites.reasoning_gym import OwnGenerators

from gspo_gym.errors import EnvError


def global_draws() -> tuple[float, float]:
    return random.random(), float(np.random.random_sample())


def test_streams_go_on_where_they_were_left_whatever_happens_between() -> None:
    first, second = OwnGenerators(1), OwnGenerators(2)
    drawn = []
    for _ in range(3):
        with first.in_place():
            drawn.append(global_draws())
        with second.in_place():
            global_draws()
        global_draws()
    python, numpy = random.Random(1), np.random.RandomState(1)
    assert drawn == [(python.random(), numpy.random_sample()) for _ in range(3)]


def test_the_global_streams_are_untouched_even_when_the_code_inside_raises() -> None:
    random.seed(3)
    expected = random.Random(3).random()

    def break_off() -> None:
        with OwnGenerators(1).in_place():
            random.seed(99)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert random.random() == expected


def test_seeds_beyond_32_bits_are_taken() -> None:
    with OwnGenerators(2**40 + 7).in_place():
        assert np.random.random_sample() == np.random.RandomState(7).random_sample()


def test_whoever_waits_for_a_hanging_episode_is_told_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_generators, "_MAX_WAIT_SECONDS", 0.01)
    has_it, may_go = threading.Event(), threading.Event()

    def hang() -> None:
        with OwnGenerators(1).in_place():
            has_it.set()
            may_go.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    has_it.wait()
    try:
        with pytest.raises(EnvError, match='isolation "process"'), OwnGenerators(2).in_place():
            pass
    finally:
        may_go.set()
        thread.join()
    with OwnGenerators(2).in_place():  # it is free again
        pass

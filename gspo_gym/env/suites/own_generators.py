"""The process's random generators, lent to one episode at a time.

Packages that draw from the modules `random` and `numpy.random` share one stream among all episodes of a process. Here
an episode has streams of its own, which stand in the place of the global ones while its code runs; afterwards those are
as they were. What draws from them in another thread meanwhile (a library that waits a random time before it tries
again) is still seen by the episode; only a process of its own (`TextEnv.isolation`) keeps that out.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from gspo_gym.errors import EnvError

_MAX_WAIT_SECONDS = 60.0
_in_use = threading.RLock()  # the global generators exist once


class OwnGenerators:
    """The states in which one episode left the two global generators.

    >>> mine, before = OwnGenerators(0), random.getstate()
    >>> with mine.in_place():
    ...     first = random.random()
    >>> random.getstate() == before, first == random.Random(0).random()
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state(legacy=True)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the global generators are the episode's.

        Raises:
            EnvError: another episode's code has had them for a minute; it hangs, and nobody can take them from it.
        """
        if not _in_use.acquire(timeout=_MAX_WAIT_SECONDS):
            raise EnvError(
                f"another environment of this process has not returned for {_MAX_WAIT_SECONDS:g} seconds, and this one "
                'needs the random generators that it uses; run such environments with isolation "process"'
            )
        try:
            python, numpy = random.getstate(), np.random.get_state(legacy=True)
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state(legacy=True)
                random.setstate(python)
                np.random.set_state(numpy)
        finally:
            _in_use.release()

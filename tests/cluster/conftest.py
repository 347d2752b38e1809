"""A Ray for the tests of this folder, which they join by RAY_ADDRESS."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from gspo_gym.base.leftovers import remove_folder, temporary_folder
from gspo_gym.cluster.ray import _OwnRay

_STATUS = pytest.StashKey[int]()


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """A Ray with five cores."""
    folder = temporary_folder("gspo_ray_")
    ray = _OwnRay(folder, 5)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ray.variables, "RAY_ADDRESS": ray.address}.items():
            patch.setenv(name, value)
        yield
    ray.close()
    remove_folder(folder)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End without Python's own end: threads of Ray's outlive `ray.shutdown`.

    One wrote into memory that was gone by then (a segmentation fault after 111 tests that had passed, once).
    """
    if "ray" in sys.modules and (status := config.stash.get(_STATUS, None)) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

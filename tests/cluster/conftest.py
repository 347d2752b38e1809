"""A Ray for the tests of this folder, which they join by RAY_ADDRESS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gspo_gym.base.leftovers import remove_folder, temporary_folder
from gspo_gym.cluster.ray import _OwnRay


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

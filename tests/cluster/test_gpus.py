"""Where Ray puts the processes of a run on several GPUs, which Ray only counts here: there are none."""

from __future__ import annotations

import os

import pytest

from gspo_gym.config.build.processes import launching
from gspo_gym.config.machines import with_all_gpus
from gspo_gym.config.run_config import load_config
from tests.support.small_quickstart import QUICKSTART


class Viewer:
    """An actor that says which GPUs it sees."""

    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_process_sees_a_gpu_of_its_own_and_together_they_take_all_that_are_visible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config, _ = with_all_gpus(load_config(QUICKSTART, []), 4)
    places = [("learner", 0), ("learner", 1), ("replica", 0), ("replica", 1)]
    with launching(config) as cluster:
        assert cluster is not None
        actors = [cluster.start(*place, Viewer) for place in places]
        visible_gpus = [cluster.ray.get(actor.gpus.remote(), timeout=120) for actor in actors]
        assert sorted(visible_gpus) == ["4", "5", "6", "7"]
        assert cluster.ray.available_resources().get("GPU", 0) == 0

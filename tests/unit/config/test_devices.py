"""Which GPU is whose: the table in `config.devices`, and what CUDA_VISIBLE_DEVICES makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_gym.cli.main import main
from gspo_gym.config.build import reference as build_reference
from gspo_gym.config.build import trainer as build
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import Placement, names_of, place, require_gpus
from gspo_gym.errors import ConfigError, MissingExtraError

Make = Callable[[dict[str, Any]], RunConfig]


def dedicated() -> dict[str, Any]:
    return {"reference": {"placement": "dedicated"}, "loss": {"kl_coef": 0.1}}


def split(gpu_count: int, **topology: int) -> dict[str, Any]:
    return {"compute": {"gpu_count": gpu_count}, "topology": {"gpus_for_training": 1, **topology}}


# What is given, and the learner's GPU, those of vLLM, those of the reference, tensor and data parallel sizes.
PLACES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "one GPU for all": ({"compute": {"gpu_count": 1}, "vllm": {}}, (0, (0,), (0,), 1, 1)),
    "vLLM on all, the learner on the first": (
        {"compute": {"gpu_count": 4}, "vllm": {"tensor_parallel_size": 2}},
        (0, (0, 1, 2, 3), (0,), 2, 2),
    ),
    "one each": (split(2, gpus_for_vllm=1), (1, (0,), (), 1, 1)),
    "copies": (split(4, gpus_for_vllm=3), (3, (0, 1, 2), (), 1, 3)),
    "one model on two": (split(3, gpus_for_vllm=2, tensor_parallel=2), (2, (0, 1), (), 2, 1)),
    "the learner on the first of vLLM's, and a reference": (
        {**split(5, gpus_for_vllm=4, tensor_parallel=2, gpus_for_ref=1), **dedicated(), "topology.type": "colocated"},
        (0, (0, 1, 2, 3), (4,), 2, 2),
    ),
    "two models on two each, and a reference": (
        {**split(6, gpus_for_vllm=4, tensor_parallel=2, gpus_for_ref=1), **dedicated()},
        (4, (0, 1, 2, 3), (5,), 2, 2),
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_each_part_has_the_gpus_that_the_table_says(case: str, make: Make) -> None:
    changes, (learner, vllm, reference, tensor, data) = PLACES[case]
    config = make(changes)
    placement = place(config.sections)
    assert placement == Placement(
        learner=learner,
        vllm=vllm,
        reference=reference,
        is_split="topology" in changes and "topology.type" not in changes,
        tensor_parallel_size=tensor,
        data_parallel_size=data,
    )
    assert config.compute is not None
    assert placement.num_gpus == config.compute.gpu_count


def test_the_size_of_a_topology_is_that_of_vllm(make: Make) -> None:
    changes = {**split(5, gpus_for_vllm=4, tensor_parallel=2), "vllm": {}}
    vllm = make(changes).vllm
    assert vllm is not None
    assert vllm.tensor_parallel_size == 2
    assert make({**split(5, gpus_for_vllm=4, tensor_parallel=2)}).rollout.engine == "vllm"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("1", "2")),
        ("4,5,6", ("5", "6")),
        (" 4, 5 , 6 ", ("5", "6")),
        ("GPU-aa,GPU-bb,MIG-cc", ("GPU-bb", "MIG-cc")),
    ],
)
def test_a_child_is_told_of_gpus_by_the_names_that_this_process_was_told(visible: str | None, names: Any) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert names_of([1, 2], environment) == names


@pytest.mark.parametrize("visible", ["4,5", "4,5,-1,6", "", "4,,6"])
def test_a_gpu_that_is_hidden_cannot_be_given_to_a_child(visible: str) -> None:
    with pytest.raises(ConfigError, match=r"topology: expected 3 GPUs, and this process sees [012] \(CUDA_VISIBLE_"):
        names_of([2], {"CUDA_VISIBLE_DEVICES": visible})


def test_fewer_gpus_than_asked_for_are_an_error_that_says_what_hides_them() -> None:
    require_gpus(2, 2, {"CUDA_VISIBLE_DEVICES": "0,1"}, "compute.gpu_count")
    with pytest.raises(ConfigError, match=r"compute\.gpu_count: expected 3 GPUs, and this process sees 2; use fewer"):
        require_gpus(3, 2, {}, "compute.gpu_count")


class EightGpus:
    """What torch says of a machine with eight GPUs, of which the last is another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=0: "NVIDIA A100" if gpu == 7 else "NVIDIA H200")


def test_the_learner_is_on_its_own_gpu_or_on_the_current_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    EightGpus(monkeypatch)
    assert build.device_of(make(split(4, gpus_for_vllm=3))) == "cuda:3"
    assert build.device_of(make({"compute": {"gpu_count": 2}, "vllm": {}})) == "cuda"
    assert build.device_of(make({"compute": {"gpu_count": 1}})) == "cuda"
    assert build.device_of(make({})) == "cuda"
    assert build.device_of(make({"compute": {"gpu_count": 0}})) == "cpu"


def test_more_gpus_than_there_are_and_one_of_another_type_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    EightGpus(monkeypatch)
    with pytest.raises(ConfigError, match=r"compute\.gpu_count: expected 9 GPUs, and this process sees 8"):
        build.device_of(make(split(9, gpus_for_vllm=8)))
    with pytest.raises(ConfigError, match=r"vllm\.tensor_parallel_size: expected 16 GPUs, and this process sees 8"):
        build.device_of(make({"vllm": {"tensor_parallel_size": 16}}))
    typed = {"compute": {"gpu_count": 8, "gpu_type": "H200"}, "topology": {"gpus_for_vllm": 7, "gpus_for_training": 1}}
    with pytest.raises(ConfigError, match=r"compute\.gpu_type: expected 'H200', but the device here is 'NVIDIA A100'"):
        build.device_of(make(typed))


def test_gpus_of_actors_are_none_of_the_driver_and_all_of_them_must_be_here(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"gpus_for_vllm": 7, "gpus_for_training": 2}
    nine = make({"compute": {"gpu_count": 9}, "topology": {"type": "cluster", **two}})
    eight = make({"compute": {"gpu_count": 8}, "topology": {**two, "gpus_for_vllm": 6}})
    with pytest.raises(ConfigError, match=r"compute\.gpu_count: expected 9 GPUs, and this process sees 0"):
        build.drivers_device(nine)
    EightGpus(monkeypatch)
    assert build.drivers_device(eight) == "cpu"
    assert build.actors_device(eight) == "cuda"
    with pytest.raises(ConfigError, match=r"compute\.gpu_count: expected 9 GPUs, and this process sees 8"):
        build.drivers_device(nine)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # of several machines
    assert build.drivers_device(nine) == "cpu"


def test_a_run_takes_the_gpus_that_are_visible_if_ray_is_here(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    EightGpus(monkeypatch)
    monkeypatch.setattr(build, "require_ray", lambda: None)
    config, line = build.on_visible_gpus(make({}))
    assert config.gpu_count == 8
    assert line == "8 GPUs: 4 sample and 4 learn, as [topology] can say; compute.gpu_count = 1 takes one"

    def missing() -> None:
        raise MissingExtraError("several processes need Ray")

    monkeypatch.setattr(build, "require_ray", missing)
    config, line = build.on_visible_gpus(make({}))
    assert config.gpu_count is None
    assert line == "one of 8 GPUs is used: several processes need Ray"


def test_checking_a_configuration_says_what_becomes_of_the_visible_gpus(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    EightGpus(monkeypatch)
    monkeypatch.setattr(build, "require_ray", lambda: None)
    file = tmp_path / "run.toml"
    file.write_text(make({}).to_toml())
    main(["config", "check", str(file)])
    assert "note: 8 GPUs: 4 sample and 4 learn, as [topology] can say" in capsys.readouterr().out


def test_the_reference_sees_its_own_gpus_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make({**split(4, gpus_for_vllm=2, gpus_for_ref=1), **dedicated()})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,6,4,2")
    assert build_reference._gpus(config, "cuda") == ("2",)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert build_reference._gpus(config, "cuda") == ("3",)
    assert build_reference._gpus(make({"compute": {"gpu_count": 1}, **dedicated()}), "cuda") == ("0",)
    shared = {**split(2, gpus_for_vllm=1, gpus_for_ref=1), **dedicated(), "topology.type": "colocated"}
    assert build_reference._gpus(make(shared), "cuda:1") == ("1",)
    assert build_reference._gpus(make({**shared, "compute.gpu_count": 0}), "cpu") is None  # processes take no GPU

"""Machinery that this version does not have: its settings are checked, and a run with them is refused with a list."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_gym.cli.train import run_training
from gspo_gym.config.build import rollouts
from gspo_gym.config.build import trainer as build
from gspo_gym.config.run_config import RunConfig, model_name
from gspo_gym.config.services import missing_machinery, refuse_to_run
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.policy.load import load_policy

Make = Callable[[dict[str, Any]], RunConfig]

EVERYTHING: dict[str, Any] = {
    "services": {"task_url": "http://localhost:8001/", "judge_url": "http://localhost:8002"},
    "compute": {"gpu_count": 5, "gpu_type": "H100", "nodes": 1},
    "topology": {"gpus_for_vllm": 2, "gpus_for_training": 2, "gpus_for_ref": 1},
    "vllm": {"max_model_len": 1024},
    "reference": {"placement": "dedicated"},
    "loss": {"kl_coef": 0.01},
    "judge": {
        "enabled": True,
        "options": {"event": True, "provider": "openai", "model": "m"},
        "reward_blend": {"event": 0.5},
    },
}
TWO_LEARN = {
    "compute": {"gpu_count": 0},
    "topology": {"type": "cluster", "gpus_for_vllm": 1, "gpus_for_training": 2},
    "rollout.engine": "local",
}
TWO_SAMPLE: dict[str, Any] = {**TWO_LEARN, "topology": {"type": "cluster", "gpus_for_vllm": 2, "gpus_for_training": 1}}


def test_everything_that_is_missing_is_listed_at_once(make: Make) -> None:
    config = make(EVERYTHING)
    with pytest.raises(ConfigError) as caught:
        refuse_to_run(config.sections)
    assert str(caught.value).splitlines() == [
        "the configuration is valid, but asks for what this version does not have. Remove these to train in this "
        "process:",
        '  reference.placement = "dedicated": topology.gpus_for_training = 2 processes hold the reference themselves; '
        'set "shared"',
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {
                "compute": {"gpu_count": 2},
                "topology": {"type": "colocated", "gpus_for_vllm": 2, "gpus_for_training": 2},
            },
            'topology.gpus_for_training = 2: with topology.type = "colocated" one GPU learns; set "cluster"',
        ),
        (
            {
                "compute": {"gpu_count": 0},
                "topology": {"gpus_for_vllm": 1, "gpus_for_training": 2, "gpus_for_ref": 1},
                "reference": {"placement": "dedicated"},
                "loss.kl_coef": 0.1,
            },
            'reference.placement = "dedicated": topology.gpus_for_training = 2 processes hold the reference themselves',
        ),
        (
            {**TWO_SAMPLE, "topology": {**TWO_SAMPLE["topology"], "tensor_parallel": 2}},
            "topology.tensor_parallel = 2: the local engine shares no layer out",
        ),
        (
            {**TWO_SAMPLE, "model.trainer_mode": "qlora"},
            'model.trainer_mode = "qlora": topology.gpus_for_vllm = 2 processes cannot be given quantized weights',
        ),
        (
            {**TWO_SAMPLE, "rollout.engine": "vllm", "model.trainer_mode": "qlora"},
            'model.trainer_mode = "qlora": vLLM would sample',
        ),
        (
            {
                **TWO_SAMPLE,
                "rollout.engine": "vllm",
                "model.trainer_mode": "lora",
                "training.weight_sync": {"mode": "direct"},
            },
            'training.weight_sync.mode = "direct": topology.gpus_for_vllm = 2 processes with vLLM take whole weights',
        ),
        (
            {**TWO_SAMPLE, "rollout.engine": "vllm", "training.weight_sync": {"direct": "shared_memory"}},
            'training.weight_sync.direct = "shared_memory": topology.gpus_for_vllm = 2 processes are always given',
        ),
        (
            {
                "compute": {"gpu_count": 2},
                "topology": {"type": "cluster", "gpus_for_vllm": 1, "gpus_for_training": 1},
                "optimizer.kind": "adamw_8bit",
            },
            'optimizer.kind = "adamw_8bit": topology.gpus_for_training = 1 processes cannot share moments',
        ),
        ({**TWO_LEARN, "model.trainer_mode": "qlora"}, 'model.trainer_mode = "qlora": topology.gpus_for_training = 2'),
        ({**TWO_LEARN, "optimizer.kind": "adamw_8bit"}, 'optimizer.kind = "adamw_8bit": topology.gpus_for_training'),
        ({"compute": {"gpu_count": 1, "nodes": 2}}, "compute.nodes = 2"),
        ({"vllm": {}, "model.trainer_mode": "qlora"}, 'model.trainer_mode = "qlora"'),
        (
            {"reference": {"placement": "dedicated"}, "loss.kl_coef": 0.1, "model.trainer_mode": "qlora"},
            'reference.placement = "dedicated": quantized weights',
        ),
    ],
)
def test_each_of_them_alone_is_refused_before_anything_is_built(
    changes: dict[str, Any], named: str, make: Make, tmp_path: Path
) -> None:
    config = make({**changes, "run.folder": str(tmp_path / "runs"), "model.base": "no/such-model"})
    (line,) = missing_machinery(config.sections)
    assert line.startswith(named)
    with pytest.raises(ConfigError, match="asks for what this version does not have"):
        run_training(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"services": {}},
        {"services": {"task_url": "https://x.org"}},
        {"compute": {"gpu_count": 0}},
        {"compute": {"gpu_count": 1}},
        {"compute": {"gpu_count": 4}, "vllm": {"tensor_parallel_size": 2}},
        {"compute": {"gpu_count": 3}, "topology": {"gpus_for_vllm": 2, "gpus_for_training": 1}},
        {"compute": {"gpu_count": 0}, "topology": {"gpus_for_vllm": 2, "gpus_for_training": 1}},
        {"compute": {"gpu_count": 2}, "topology": {"type": "colocated", "gpus_for_vllm": 2, "gpus_for_training": 1}},
        TWO_SAMPLE,
        {**TWO_SAMPLE, "rollout.engine": "vllm"},
        {
            **TWO_SAMPLE,
            "rollout.engine": "vllm",
            "model.trainer_mode": "lora",
            "training.weight_sync": {"mode": "full"},
        },
        {**TWO_LEARN, "rollout.engine": "vllm"},
        {
            **TWO_SAMPLE,
            "training.weight_sync_interval": 2,
            "training.max_staleness": 1,
            "correction.old_logprobs": "rollout",
        },
        {"vllm": {}},
        {"rollout.engine": "vllm"},
        {"judge": {"options": {"event": True}}},
        {"judge": EVERYTHING["judge"], "services": {"judge_url": "http://localhost:8002"}},
        {"loss.kl_coef": 0.1},
        {"loss.kl_coef": 0.1, "reference.placement": "dedicated"},
    ],
)
def test_what_this_version_has_is_not_refused(changes: dict[str, Any], make: Make) -> None:
    config = make(changes)
    assert missing_machinery(config.sections) == []
    refuse_to_run(config.sections)


def test_an_evaluation_is_refused_as_well(make: Make) -> None:
    with pytest.raises(ConfigError, match="training takes 0 GPUs or 1"):
        asyncio.run(rollouts.build_player(make({"compute": {"gpu_count": 2}}), load_policy("tiny:qwen3-64")))


def test_weights_that_are_somebody_elses_can_be_evaluated_but_not_trained(make: Make, tmp_path: Path) -> None:
    urls = {"services.engine_urls": ["http://localhost:8000"]}
    config = make({"rollout.engine": "http", "services": {}, **urls, "run.folder": str(tmp_path / "runs")})
    assert missing_machinery(config.sections) == []
    with pytest.raises(
        ConfigError,
        match=r'rollout\.engine: .* train with "local" or "vllm", and use this to evaluate\..* set rollout\.rescore = '
        r"true: the learner's own logprobs .* without correction, off-policy on purpose",
    ):
        run_training(config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_that_is_not_installed_is_said_before_anything_is_written(make: Make, tmp_path: Path) -> None:
    config = make({"vllm": {"max_model_len": 512}, "run.folder": str(tmp_path / "runs")})
    with pytest.raises(MissingExtraError, match=r"vLLM is not installed; pip install 'gspo-gym\[vllm\]'"):
        run_training(config)
    assert not (tmp_path / "runs").exists()


def test_a_url_loses_its_last_slash(make: Make) -> None:
    services = make(EVERYTHING).services
    assert services is not None
    assert services.task_url == "http://localhost:8001"


def test_no_gpu_is_the_processor_although_there_may_be_gpus(make: Make) -> None:
    assert build.device_of(make({"compute": {"gpu_count": 0}})) == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_one_gpu_is_an_error_where_there_is_none(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"compute\.gpu_count: expected a CUDA device, and torch sees none here"):
        build.device_of(make({"compute": {"gpu_count": 1}}))


def test_another_gpu_than_the_one_that_is_named_is_an_error() -> None:
    build.require_gpu_type("h100", "NVIDIA H100 80GB HBM3")
    with pytest.raises(ConfigError, match=r"compute\.gpu_type: expected 'A100', but the device here is 'NVIDIA H200'"):
        build.require_gpu_type("A100", "NVIDIA H200")


def test_a_source_is_the_last_checkpoint_of_a_run_or_the_one_that_it_names(make: Make, tmp_path: Path) -> None:
    for step in (10, 20):
        folder = tmp_path / "earlier" / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}", encoding="utf-8")
    (tmp_path / "earlier" / "checkpoints" / "step_000030").mkdir()  # was never completed
    checkpoints = tmp_path / "earlier" / "checkpoints"

    def name(source: str) -> str:
        return model_name(make({"run.folder": str(tmp_path), "model.base": ..., "model.source": source}))

    assert name("ft:earlier") == name("earlier") == name("rl:earlier") == str(checkpoints / "step_000020")
    assert name("peft:earlier:step_000010") == str(checkpoints / "step_000010")
    with pytest.raises(ConfigError, match=r"model\.source: 'ft:earlier:step_000030': .* are step_000010, step_000020"):
        name("ft:earlier:step_000030")
    with pytest.raises(ConfigError, match=r"model\.source: 'never': expected a checkpoint in .*; there is none"):
        name("never")


def test_the_policy_is_asked_as_the_policy_config_says(make: Make) -> None:
    said = {"system_prompt": "Be brief.", "chat_template_kwargs": {"enable_thinking": False}}
    config = make({"rollout.policy_config": said})
    player = asyncio.run(rollouts.build_player(config, build.build_policy(config)))
    try:
        assert player.renderers.system_prompt == "Be brief."
        assert player.renderers._template_kwargs == {"enable_thinking": False}
    finally:
        asyncio.run(player.engine.close())

"""vLLM's own server as the teacher of a run: its logprobs of a prompt, and the vocabulary of the folder it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_run import small_run

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.endpoint import EndpointTeacher
from gspo_gym.policy.load import Policy
from gspo_gym.policy.manifest import sha256_of
from gspo_gym.run.records import read_metrics, read_teacher

TOLERANCE = 1e-4  # nats, in float32, as of what vLLM samples


def test_vllm_scores_the_sampled_tokens_as_the_same_model_here(text_url: str, policy: Policy) -> None:
    ids = torch.tensor([[11, 12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 0, 0]])
    actions = torch.tensor([[0, 0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 0, 0, 0]], dtype=torch.bool)
    turns = torch.where(actions, 0, -1)
    batch = TokenBatch(ids, ids > 0, actions, turns, torch.tensor([0, 1]), torch.zeros(ids.shape))
    expected = LogprobComputer(policy.model).compute(ids, ids > 0, actions).logprobs.detach()
    teacher = EndpointTeacher(text_url, model="policy")
    for _ in range(2):  # the second time some of the prompt may be in its cache
        torch.testing.assert_close(teacher.logprobs(batch), expected, rtol=0, atol=TOLERANCE)


def test_a_run_is_taught_by_vllm(text_url: str, model_folder: Path, tmp_path: Path) -> None:
    # As the server's weights: A is then 0, up to what two programs round.
    values = small_run(
        model={"base": str(model_folder)},
        run={"folder": str(tmp_path)},
        training={"iterations_per_epoch": 1},
        distillation={"teacher": text_url, "reward": False},
    )
    run_training(RunConfig.from_dict(values))
    (line,) = read_metrics(tmp_path / "test")
    assert line["distillation/advantage"] == pytest.approx(0, abs=TOLERANCE)
    facts = read_teacher(tmp_path / "test")
    assert facts is not None
    assert (facts["model"], facts["root"]) == ("policy", str(model_folder))
    assert facts["weights_sha256"] == sha256_of(model_folder / "model.safetensors")

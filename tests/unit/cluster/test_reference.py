"""The dedicated reference, with its actor in this process: what it scores, how it moves, what becomes of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_gym.cluster.reference import RayReference
from gspo_gym.errors import CheckpointError, ServiceError
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_policy
from gspo_gym.types import Sampling
from tests.support.local_ray import GetTimeoutError, LocalRay, RayError, RayTaskError

PLAIN = Sampling(temperature=1.0)


@pytest.fixture
def policy() -> Policy:
    return load_policy("tiny:qwen3-64@5")


@pytest.fixture
def batch() -> TokenBatch:
    """Two rows of 12 and 7 tokens; what follows the fourth one was sampled."""
    attention_mask = torch.arange(12) < torch.tensor([[12], [7]])
    action_mask = attention_mask & (torch.arange(12) >= 4)
    return TokenBatch(
        token_ids=torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(1)) * attention_mask,
        attention_mask=attention_mask,
        action_mask=action_mask,
        turn_index=action_mask.long() - 1,
        trajectory_index=torch.arange(2),
        rollout_logprobs=torch.zeros(2, 12),
    )


def start(policy: Policy, folder: Path, ray: LocalRay, sampling: Sampling = PLAIN) -> RayReference:
    save_policy(policy, folder / "policy")
    return RayReference(
        ray,
        policy.model,
        folder / "policy",
        max_wait_seconds=7.0,
        silence_seconds=9.0,
        dtype="float32",
        device="cpu",
        sampling=sampling,
        logits_bytes=1024,
        num_threads=torch.get_num_threads(),
        visible_gpus=None,
    )


def own_logprobs(model: Any, batch: TokenBatch, sampling: Sampling = PLAIN) -> torch.Tensor:
    computer = LogprobComputer(model, sampling=sampling, logits_bytes=1024)
    with torch.no_grad():
        return computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask).logprobs


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(temperature=1.3, min_p=0.1, top_k=9, top_p=0.9)])
def test_logprobs_are_those_of_the_scorer_here_bit_for_bit(
    sampling: Sampling, policy: Policy, batch: TokenBatch, tmp_path: Path
) -> None:
    ray = LocalRay()
    logprobs = start(policy, tmp_path, ray, sampling).logprobs(batch)
    assert logprobs.equal(own_logprobs(policy.model, batch, sampling))
    assert not logprobs[~batch.action_mask].any()
    assert bool((logprobs[batch.action_mask] < 0).all())
    assert ray.timeouts[0] == 7.0


@pytest.mark.parametrize("has_adapter", [False, True])
def test_it_follows_the_policy_when_it_is_told_to_and_is_given_back_what_it_was(
    has_adapter: bool, policy: Policy, batch: TokenBatch, tmp_path: Path
) -> None:
    if has_adapter:
        policy = adapt_policy(policy, LoraSettings(r=4), seed=0)
    reference = start(policy, tmp_path, LocalRay())
    at_first = reference.logprobs(batch)
    saved = {name: tensor.clone() for name, tensor in reference.tensors().items()}
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad or not has_adapter}
    assert saved.keys() == {f"reference.{name}" for name in trained}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.05)
    assert reference.logprobs(batch).equal(at_first), "frozen while the policy moves"
    reference.refresh()
    moved = reference.logprobs(batch)
    assert moved.equal(own_logprobs(policy.model, batch))
    assert not moved.equal(at_first)
    reference.restore(saved)
    assert reference.logprobs(batch).equal(at_first)
    with pytest.raises(CheckpointError, match="reference policy"):
        reference.restore({})
    name = next(iter(saved))
    with pytest.raises(CheckpointError, match=f"reference policy: {name} has another shape"):
        reference.restore({**saved, name: torch.zeros(3)})


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({"score": GetTimeoutError("x")}, r"actor did not answer score within 600 seconds$"),
        ({"score": GetTimeoutError("x"), "life": GetTimeoutError("y")}, r"actor was not heard of for 9 seconds$"),
        (
            {"score": RayError("Worker exit detail: it was killed Some common causes")},
            "could not score: RayError: it was killed$",
        ),
        ({"score": RayTaskError(ValueError("no such token"))}, "could not score: ValueError: no such token$"),
    ],
)
def test_an_actor_that_hangs_or_is_lost_is_an_error_that_says_so(
    failures: dict[str, Exception], message: str, policy: Policy, batch: TokenBatch, tmp_path: Path
) -> None:
    ray = LocalRay()
    reference = start(policy, tmp_path, ray)
    ray.failures = failures
    with pytest.raises(ServiceError, match=message):
        reference.logprobs(batch)


def test_logprobs_that_are_not_finite_are_refused(policy: Policy, batch: TokenBatch, tmp_path: Path) -> None:
    reference = start(policy, tmp_path, LocalRay())
    with torch.no_grad():
        next(iter(policy.model.parameters())).fill_(torch.nan)
    reference.refresh()
    with pytest.raises(ServiceError, match="not finite"):
        reference.logprobs(batch)

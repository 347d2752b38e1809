"""Models with more logits than their tokenizer has ids: what lies beyond is neither sampled nor scored.

Expected values are softmaxes over the tokenizer's ids alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import small_run

from gspo_gym.cli.train import run_training
from gspo_gym.cli.verify import verify_step
from gspo_gym.config.run_config import RunConfig
from gspo_gym.diagnosis.oracle import Model, StepRecords
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import adapt_policy, load_policy, load_skeleton, save_policy
from gspo_gym.run.records import read_metrics
from gspo_gym.types import Outcome, Sampling, Segment, Task, Trajectory

NUM_IDS, NUM_ROWS = 263, 320  # of tiny:qwen3-64's tokenizer, and of the model
PROMPT = [72, 105]
# transformers' loader imports torch's compiler, which uses deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with such a model, whose rows beyond the tokenizer are as likely as the others."""
    policy = load_policy("tiny:qwen3-64", seed=3)
    assert len(policy.tokenizer) == NUM_IDS
    policy.model.resize_token_embeddings(NUM_ROWS)
    with torch.no_grad():
        weight = policy.model.get_output_embeddings().weight
        weight[NUM_IDS:] = weight[: NUM_ROWS - NUM_IDS].flip(1)
    folder = tmp_path_factory.mktemp("padded")
    save_policy(policy, folder)
    return str(folder)


def expected_logprobs(model: Any, sampled: list[int]) -> torch.Tensor:
    """[T], over the tokenizer's ids, by a plain forward of transformers."""
    logits = model(input_ids=torch.tensor([[*PROMPT, *sampled]]), use_cache=False).logits[0, 1:-1, :NUM_IDS]
    return logits.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]


def scored(model: Any, sampled: list[int], **options: Any) -> torch.Tensor:
    """[T], as the learner computes them."""
    token_ids = torch.tensor([[*PROMPT, *sampled]])
    action_mask = torch.ones_like(token_ids, dtype=torch.bool)
    action_mask[:, : len(PROMPT)] = False
    computer = LogprobComputer(model, **options)
    return computer.compute(token_ids, torch.ones_like(action_mask), action_mask).logprobs[0, len(PROMPT) :]


@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 40}, {"top_p": 0.9, "temperature": 1.5}, {"min_p": 0.01}])
def test_what_is_sampled_is_the_tokenizers_and_has_the_logprobs_that_are_scored(
    padded: str, sampling: dict[str, Any], is_lora: bool
) -> None:
    policy = load_policy(padded)
    policy = adapt_policy(policy, LoraSettings(r=2), seed=0) if is_lora else policy

    async def sample() -> Any:
        engine = LocalEngine(policy.model, max_model_len=128)
        params = SamplingParams(max_tokens=100, stop_token_ids=(), seed=1, **sampling)
        completion = await engine.generate(PROMPT, params)
        await engine.close()
        return completion

    completion = asyncio.run(sample())
    sampled = completion.token_ids.tolist()
    assert max(sampled) < NUM_IDS  # of 100 from both halves one in ten would be beyond: 0.9^100 is 3e-5
    with torch.no_grad():
        if not sampling:
            np.testing.assert_allclose(completion.logprobs, expected_logprobs(policy.model, sampled), atol=1e-5)
        learnt = scored(policy.model, sampled, sampling=Sampling(**sampling))
    np.testing.assert_allclose(completion.logprobs, learnt, atol=1e-5)


def test_scored_logprobs_and_their_gradient_are_those_of_the_tokenizers_ids(padded: str) -> None:
    policy, sampled = load_policy(padded), [40, 7, 200, 258, 99]
    weight = policy.model.get_output_embeddings().weight
    gradients = []
    for logprobs in (expected_logprobs(policy.model, sampled), scored(policy.model, sampled)):
        weight.grad = None
        logprobs.sum().backward()
        gradients.append(weight.grad)
        torch.testing.assert_close(logprobs, expected_logprobs(policy.model, sampled), rtol=0, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)


def test_an_id_beyond_that_some_engine_sampled_has_a_logprob_beside_the_tokenizers(padded: str) -> None:
    policy, stray = load_policy(padded), NUM_IDS + 5
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
        expected = logits[[*range(NUM_IDS), stray]].log_softmax(-1)[-1]
        torch.testing.assert_close(scored(policy.model, [stray])[0], expected, rtol=0, atol=1e-5)


def test_the_oracle_takes_a_step_with_such_ids_as_the_learner_does(padded: str) -> None:
    model, sampled = load_policy(padded).model, [40, NUM_IDS + 5, 7, NUM_ROWS - 1]
    ids = np.array([*PROMPT, *sampled], dtype=np.int32)
    is_action = np.arange(len(ids)) >= len(PROMPT)
    segment = Segment(ids, is_action, 0 * ids, np.where(is_action, 0, -1), np.where(is_action, 0, -1))
    task = Task("env", 0)
    episode = Trajectory("task/0", 0, task, 0, (segment,), (), (), Outcome.TERMINATED)
    config = {"rollout.temperature": 1.0, "training.score_truncated": False}
    rows = {"segment": np.zeros(len(sampled), dtype=np.int64)}
    records = StepRecords(config, [episode], {}, rows, rows["segment"])
    oracle = Model({"policy": model}, {}, records, NUM_IDS)
    with torch.no_grad():
        learnt = scored(model, sampled)
    np.testing.assert_allclose(oracle.forward("policy", np.arange(len(sampled)))[0], learnt, atol=1e-5)


def test_a_model_with_as_many_logits_as_ids_is_left_as_it_is() -> None:
    assert not hasattr(load_policy("tiny:qwen3-64").model, "num_token_ids")


def test_a_model_without_weights_knows_it_too(padded: str) -> None:
    assert load_skeleton(padded).model.num_token_ids == NUM_IDS


def test_a_run_on_such_a_model_loses_no_attempt_and_is_verified(padded: str, tmp_path: Path) -> None:
    config = RunConfig.from_dict(
        small_run(
            run={"folder": str(tmp_path), "log_tokens_every_n_iters": 1},
            model={"base": padded, "label": "padded"},
            rollout={"max_turns": 2, "max_output_tokens": 8},
            training={"batch_size": 8, "learning_rate": 1e-2, "checkpoint_every_n_iters": 1},
            loss={"entropy_coef": 0.5},  # entropy has a gradient, whatever is earned
            evaluation={"seeds": "0:1"},
        )
    )
    run_training(config)
    assert [line["rollout/attempts"] for line in read_metrics(config.run_folder)] == [8, 8]  # none played again
    result = verify_step(config.run_folder, 2)
    assert (result.difference, result.missing) == (None, [])

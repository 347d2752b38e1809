"""`benchmarks decode`: the loop by hand computes what the model does, and the episodes have the shape that is named."""

from __future__ import annotations

import pytest
import torch

from benchmarks.decode import Loop, make_episodes, run_decode
from gspo_gym.errors import UsageError
from gspo_gym.policy.load import load_policy


def test_the_loop_by_hand_gives_the_model_s_logits_token_by_token() -> None:
    model = load_policy("tiny:qwen3-128").model
    prompts = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(0))
    loop = Loop(model, 3, 12)
    with torch.inference_mode():
        expected = model(input_ids=prompts, use_cache=False).logits
    torch.testing.assert_close(loop.logits(prompts[:, :6], 0), expected[:, 5])
    for place in (6, 7, 8):
        torch.testing.assert_close(loop.logits(prompts[:, place : place + 1], place), expected[:, place])


def test_the_loop_samples_from_the_model_and_keeps_what_it_sampled() -> None:
    model = load_policy("tiny:qwen3-64").model
    prompts = torch.randint(0, 256, (2, 5), generator=torch.Generator().manual_seed(1))
    loop = Loop(model, 2, 9)
    sampled = loop.sample(prompts, 4, seed=3)
    draws, history = torch.Generator().manual_seed(3), prompts
    with torch.inference_mode():
        for _ in range(4):  # the same draws from the whole history, read anew for each token
            logits = model(input_ids=history, use_cache=False).logits[:, -1]
            history = torch.cat([history, torch.multinomial(logits.softmax(-1), 1, generator=draws)], 1)
    assert torch.equal(history[:, 5:], sampled)


def test_episodes_have_one_shape_and_prompts_of_their_own() -> None:
    plans = make_episodes(5, num_turns=3, num_sampled=7, num_observed=2)
    assert {plan.num_sampled for plan in plans} == {(7, 7, 7)}
    assert {len(part) for plan in plans for part in plan.observations} == {2}
    assert len({plan.prompt for plan in plans}) == 5
    assert {plan.num_tokens for plan in plans} == {64 + 3 * (7 + 2)}


@pytest.mark.slow
def test_the_benchmark_names_both_goals() -> None:
    values = run_decode("tiny:qwen3-64", repeats=1, nums_sequences=(2,))
    assert [(value.peer_name, value.unit) for value in values] == [("a loop by hand", "s"), ("of 4 turns", "ms")]
    assert [round(1 / value.goal, 2) for value in values if value.goal] == [1.18, 1.3]
    assert all(len(value.ours) == len(value.peer) == 1 for value in values)


def test_a_model_that_is_no_qwen3_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="the loop by hand is of Qwen3, got a qwen3_moe"):
        run_decode("tiny:qwen3-moe-64", repeats=1)

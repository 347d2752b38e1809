"""vLLM in process with whole-model updates: agreement with the learner, sampling, caches, versions and life."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import Turn, nudge, plain_logprobs, play, play_many, publish, worst_gap

from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.vllm import VllmEngine
from gspo_gym.engine.vllm_worker import RELOAD_METHOD
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError, EngineTimeoutError
from gspo_gym.models import Policy, save_policy
from gspo_gym.types import Completion, FinishReason

TOLERANCE = 1e-4  # nats, in float32

Save = Callable[[Any], WeightUpdate]


@pytest.fixture(scope="module")
def save(full_engine: VllmEngine, policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """`save(model)` stages a model as the engine's next version."""
    numbers = itertools.count()

    def stage(model: Any) -> WeightUpdate:
        folder = tmp_path_factory.mktemp("staged") / str(next(numbers))
        save_policy(Policy(model=model, tokenizer=policy.tokenizer, base=policy.base), folder)
        return WeightUpdate(full_engine.weight_version + 1, "full", folder)

    return stage


@pytest.fixture
def model(policy: Policy, full_engine: VllmEngine, save: Save, loop_thread: Any) -> Any:
    """A copy of the policy's model, which the engine holds when the test begins."""
    model = copy.deepcopy(policy.model)
    loop_thread.run(publish(full_engine, save(model)))
    return model


def sampled(completion: Completion) -> list[int]:
    return [int(token) for token in completion.token_ids]


def test_logprobs_agree_with_a_plain_forward_before_and_after_ten_updates(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any, record_property: Callable[[str, object], None]
) -> None:
    gaps = [worst_gap(model, loop_thread.run(play_many(full_engine, range(4))))]
    for number in range(10):
        before = worst_gap(model, loop_thread.run(play_many(full_engine, [100 + number])))
        nudge(model, number)
        update = save(model)
        loop_thread.run(publish(full_engine, update))
        turns = loop_thread.run(play_many(full_engine, range(4)))  # the same prompts: what is cached of them is stale
        assert all((turn.completion.weight_version == update.version).all() for turn in turns)
        gaps += [before, worst_gap(model, turns)]
    record_property("worst_gap", max(gaps))
    assert max(gaps) <= TOLERANCE


def test_stale_keys_and_values_would_be_seen(full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any) -> None:
    """The weights change behind the engine's back, twice: with its salt and its reset left out, then with the salt."""
    llm = full_engine._llm

    async def reload_secretly(update: WeightUpdate) -> None:
        await llm.collective_rpc(RELOAD_METHOD, kwargs={"weights_path": str(update.folder)})

    loop_thread.run(play(full_engine, 50))
    nudge(model, 50)
    update = save(model)
    loop_thread.run(reload_secretly(update))
    stale = worst_gap(model, loop_thread.run(play(full_engine, 50)))
    assert stale > TOLERANCE

    full_engine._version += 1  # another salt and nothing else
    salted = worst_gap(model, loop_thread.run(play(full_engine, 50)))
    assert salted <= TOLERANCE

    full_engine._version -= 1  # the salt under which stale blocks lie
    loop_thread.run(publish(full_engine, update))
    full_engine._version -= 1
    reset = worst_gap(model, loop_thread.run(play(full_engine, 50)))
    full_engine._version += 1
    assert reset <= TOLERANCE


def test_a_seed_decides_the_sample_alone_and_among_others(full_engine: VllmEngine, loop_thread: Any) -> None:
    async def sample(seeds: list[int]) -> list[tuple[int, ...]]:
        calls = [
            full_engine.generate([72, 105], SamplingParams(max_tokens=12, stop_token_ids=(), seed=seed))
            for seed in seeds
        ]
        return [tuple(sampled(completion)) for completion in await asyncio.gather(*calls)]

    seeds = [3, 2**63 - 1, 2**62, 0, *range(100, 120)]
    together = loop_thread.run(sample(seeds))
    assert [loop_thread.run(sample([seed]))[0] for seed in seeds[:4]] == together[:4]
    assert len(set(together)) == len(seeds)


def processed(logits: torch.Tensor, seen: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Logprobs of the distribution that `SamplingParams` describe, from the [V] logits of one position."""
    logits = logits.double().clone()
    for token in set(seen):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits = logits / (sampling.temperature or 1.0)
    probs = torch.softmax(logits, dim=-1)
    kept = probs >= sampling.min_p * probs.max()
    if sampling.top_k:
        order = torch.argsort(probs.where(kept, 0.0), descending=True)
        kept[order[sampling.top_k :]] = False
    probs = probs.where(kept, 0.0) / probs.where(kept, 0.0).sum()
    order = torch.argsort(probs, descending=True)
    before = torch.cumsum(probs[order], 0) - probs[order]
    kept[order[before >= sampling.top_p]] = False
    return torch.log(probs.where(kept, 0.0) / probs.where(kept, 0.0).sum())


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7},
        {"top_p": 0.6},
        {"top_k": 5},
        {"min_p": 0.6},
        {"repetition_penalty": 1.3},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.2, "repetition_penalty": 0.9},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_logprobs_are_those_of_the_sampling_distribution_renormalised(
    full_engine: VllmEngine, model: Any, loop_thread: Any, changes: dict[str, Any]
) -> None:
    sampling = SamplingParams(max_tokens=24, stop_token_ids=(), seed=11, **changes)
    prompt = [72, 105, 32, 72]
    completion = loop_thread.run(full_engine.generate(prompt, sampling))
    tokens = [*prompt, *sampled(completion)]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    expected = [
        float(processed(logits[end - 1], tokens[:end], sampling)[tokens[end]])
        for end in range(len(prompt), len(tokens))
    ]
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    untruncated = plain_logprobs(model, prompt, sampled(completion))
    assert np.abs(completion.logprobs - untruncated).max() > 0.05  # it did change the distribution


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_one(
    full_engine: VllmEngine, model: Any, loop_thread: Any
) -> None:
    greedy = SamplingParams(max_tokens=8, stop_token_ids=(), seed=0, temperature=0, top_p=0.5, top_k=1)
    random = SamplingParams(max_tokens=8, stop_token_ids=(), seed=1)

    async def side_by_side() -> list[Completion]:  # vLLM treats a batch of greedy requests alone in another way
        return list(await asyncio.gather(full_engine.generate([72, 105], greedy), full_engine.generate([9], random)))

    for completion in (loop_thread.run(full_engine.generate([72, 105], greedy)), loop_thread.run(side_by_side())[0]):
        tokens = [72, 105, *sampled(completion)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
        assert tokens[2:] == logits[1:-1].argmax(-1).tolist()
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, [72, 105], tokens[2:]), atol=TOLERANCE)


def test_a_stop_token_ends_the_completion_as_its_last_token_but_not_before_min_tokens(
    full_engine: VllmEngine, loop_thread: Any
) -> None:
    stops = tuple(range(100))  # about a third of all tokens

    async def sample(min_tokens: int) -> list[Completion]:
        calls = [
            full_engine.generate(
                [72], SamplingParams(max_tokens=40, stop_token_ids=stops, seed=seed, min_tokens=min_tokens)
            )
            for seed in range(16)
        ]
        return list(await asyncio.gather(*calls))

    for min_tokens in (0, 5):
        for completion in loop_thread.run(sample(min_tokens)):
            tokens = sampled(completion)
            ends = [position for position, token in enumerate(tokens) if token in stops]
            assert completion.finish_reason is FinishReason.STOP
            assert ends == [len(tokens) - 1]
            assert len(tokens) > min_tokens


def test_the_models_own_end_tokens_end_nothing_and_are_not_withheld(
    full_engine: VllmEngine, policy: Policy, loop_thread: Any
) -> None:
    """Of 64 x 64 nearly uniform draws out of some 300 tokens about 13 are the end token, were it not withheld."""
    end = policy.tokenizer.eos_token_id

    async def sample() -> list[Completion]:
        calls = [
            full_engine.generate([72], SamplingParams(max_tokens=64, stop_token_ids=(), seed=seed, min_tokens=64))
            for seed in range(64)
        ]
        return list(await asyncio.gather(*calls))

    completions = loop_thread.run(sample())
    assert all(len(completion.token_ids) == 64 for completion in completions)
    assert any(end in completion.token_ids for completion in completions)


def test_the_context_ends_a_completion_and_refuses_a_prompt_that_fills_it(
    full_engine: VllmEngine, loop_thread: Any
) -> None:
    limit = full_engine.capabilities.max_model_len
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(), seed=0, min_tokens=8)
    completion = loop_thread.run(full_engine.generate([7] * (limit - 2), sampling))
    assert (len(completion.token_ids), completion.finish_reason) == (2, FinishReason.LENGTH)
    with pytest.raises(ContextOverflowError, match=f"context of {limit}"):
        loop_thread.run(full_engine.generate([7] * limit, sampling))


def test_what_vllm_cannot_sample_is_refused(full_engine: VllmEngine, loop_thread: Any) -> None:
    for temperature in (0.001, 2.5):  # vLLM would sample the first at 0.01
        with pytest.raises(ConfigError, match=r"SamplingParams\.temperature"):
            loop_thread.run(
                full_engine.generate([7], SamplingParams(1, stop_token_ids=(), seed=0, temperature=temperature))
            )
    with pytest.raises(EngineError, match="prompt tokens must be in"):
        loop_thread.run(full_engine.generate([7, 10**6], SamplingParams(1, stop_token_ids=(), seed=0)))


async def running(engine: VllmEngine, number: int) -> list[asyncio.Task[Completion]]:
    """Long calls in flight, of which each has some tokens: they began together with a short one, which has ended."""
    calls = [
        asyncio.create_task(
            engine.generate(
                [72, index], SamplingParams(max_tokens=400, stop_token_ids=(), seed=index), session_id=f"long-{index}"
            )
        )
        for index in range(number)
    ]
    await engine.generate([72], SamplingParams(max_tokens=10, stop_token_ids=(), seed=0))
    return calls


def test_kept_calls_go_on_under_the_new_weights_and_every_token_says_under_which(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any
) -> None:
    old = copy.deepcopy(model)
    nudge(model, 7)
    update = save(model)

    async def update_in_flight() -> list[Turn]:
        calls = await running(full_engine, 4)
        await publish(full_engine, update, "keep")
        return [Turn([72, index], await call) for index, call in enumerate(calls)]

    for turn in loop_thread.run(update_in_flight()):
        versions = turn.completion.weight_version
        num_old = int((versions == update.version - 1).sum())
        assert 0 < num_old < 400
        assert versions.tolist() == [update.version - 1] * num_old + [update.version] * (400 - num_old)
        for scored_by, tokens in ((old, slice(0, num_old)), (model, slice(num_old, 400))):
            expected = plain_logprobs(scored_by, turn.prompt, sampled(turn.completion))
            np.testing.assert_allclose(turn.completion.logprobs[tokens], expected[tokens], atol=TOLERANCE)


def test_drained_calls_end_under_the_old_weights_and_later_ones_wait(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any
) -> None:
    nudge(model, 8)
    update = save(model)

    async def update_drained() -> tuple[list[Completion], Completion]:
        calls = await running(full_engine, 2)
        pausing = asyncio.create_task(full_engine.pause("wait"))
        await asyncio.sleep(0)  # it has closed the gate
        late = asyncio.create_task(full_engine.generate([72], SamplingParams(4, stop_token_ids=(), seed=0)))
        await pausing
        assert all(call.done() for call in calls)
        assert not late.done()
        await full_engine.apply_weights(update)
        await full_engine.resume(update.version)
        return [await call for call in calls], await late

    early, late = loop_thread.run(update_drained())
    assert all((completion.weight_version == update.version - 1).all() for completion in early)
    assert (late.weight_version == update.version).all()
    assert worst_gap(model, [Turn([72], late)]) <= TOLERANCE


def test_aborted_cancelled_and_late_calls_free_what_they_held(full_engine: VllmEngine, loop_thread: Any) -> None:
    async def give_up() -> None:
        aborted, cancelled = await running(full_engine, 2)
        assert full_engine._llm.get_num_unfinished_requests() == 2
        await full_engine.abort("long-0")
        cancelled.cancel()
        with pytest.raises(EngineError, match="aborted"):
            await aborted
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(EngineTimeoutError):
            await full_engine.generate(
                [72], SamplingParams(max_tokens=400, stop_token_ids=(), seed=0), deadline_seconds=0.01
            )
        assert full_engine._llm.get_num_unfinished_requests() == 0
        assert (await full_engine.health()).num_in_flight == 0

    loop_thread.run(give_up())


def test_weights_that_do_not_fit_are_refused_before_any_is_read(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any, tmp_path: Path
) -> None:
    """The engine stays paused, and can still be given the right ones."""
    from safetensors.torch import load_file, save_file

    right = save(model)
    assert right.folder is not None
    partial, wrong_shape = tmp_path / "partial", tmp_path / "wrong_shape"
    weights = load_file(right.folder / "model.safetensors")
    norm = next(name for name in weights if name.endswith("input_layernorm.weight"))
    for folder, changed in (
        (partial, {name: tensor for name, tensor in weights.items() if name != norm}),
        (wrong_shape, {**weights, norm: torch.ones(3)}),
    ):
        folder.mkdir()
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})

    async def fail(folder: Path) -> None:
        await full_engine.apply_weights(WeightUpdate(right.version, "full", folder))

    loop_thread.run(full_engine.pause("wait"))
    for folder, reason in ((tmp_path / "none", "got none"), (partial, norm), (wrong_shape, norm)):
        with pytest.raises(EngineError, match=reason):
            loop_thread.run(fail(folder))
    with pytest.raises(ConfigError, match="'full', got 'shared'"):
        loop_thread.run(full_engine.apply_weights(WeightUpdate(right.version, "shared")))
    loop_thread.run(full_engine.apply_weights(right))
    loop_thread.run(full_engine.resume(right.version))
    assert worst_gap(model, loop_thread.run(play(full_engine, 1))) <= TOLERANCE


def test_checksums_follow_the_weights_and_attest_something(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any
) -> None:
    original = loop_thread.run(full_engine.checksums())
    assert full_engine.capabilities.has_checksums
    assert any(name.endswith("embed_tokens.weight") for name in original)
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of b""
    assert nothing not in original.values()
    changed_model = copy.deepcopy(model)
    nudge(changed_model, 3)
    loop_thread.run(publish(full_engine, save(changed_model)))
    changed = loop_thread.run(full_engine.checksums())
    assert changed.keys() == original.keys()
    assert all(changed[name] != original[name] for name in original)
    loop_thread.run(publish(full_engine, save(model)))
    assert loop_thread.run(full_engine.checksums()) == original


def test_an_engine_that_sleeps_makes_calls_wait_and_wakes_up_unchanged(
    full_engine: VllmEngine, model: Any, save: Save, loop_thread: Any
) -> None:
    update = save(model)

    async def sleep_and_wake() -> Completion:
        await full_engine.sleep()
        call = asyncio.create_task(full_engine.generate([72], SamplingParams(4, stop_token_ids=(), seed=0)))
        with pytest.raises(EngineError, match="asleep"):
            await full_engine.apply_weights(update)
        assert not call.done()
        await full_engine.wake_up()
        with pytest.raises(EngineError, match="not asleep"):
            await full_engine.wake_up()
        return await call

    version = full_engine.weight_version
    completion = loop_thread.run(sleep_and_wake())
    assert (completion.weight_version == version).all()
    assert worst_gap(model, [Turn([72], completion)]) <= TOLERANCE

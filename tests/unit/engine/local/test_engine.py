"""The local engine's results: exact logprobs, seeds, kept caches, and weights that change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.local.kv_store import BlockStore, PlainStore
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.lora import add_lora
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.types import Completion, FinishReason

MAX_LEN = 256
# float32 carries 24 bits; the shape of a batch changes the order of sums, which moved these logprobs by at most 2e-6
# when measured. 1e-5 leaves a factor of five and is ten times sharper than the 1e-4 that is promised.
TOLERANCE = 1e-5


def _run(model: Any, use: Callable[[LocalEngine], Coroutine[Any, Any, Any]], **options: int) -> Any:
    """Run `use(engine)` on a fresh engine and close it."""

    async def main() -> Any:
        engine = LocalEngine(model, max_model_len=MAX_LEN, **options)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def _sampling(seed: int, max_tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=(), seed=seed, **fields)


def _prompt(seed: int, length: int) -> list[int]:
    return list(np.random.default_rng(seed).integers(0, 256, length).tolist())


async def _play(engine: LocalEngine, index: int, num_turns: int = 4) -> list[tuple[list[int], Completion]]:
    """An episode of ragged turns; returns the prompt and the completion of each."""
    history, turns = _prompt(index // 4, 20 + index // 4), []
    for turn in range(num_turns):
        completion = await engine.generate(
            history, _sampling(100 * index + turn, 3 + (7 * index + 5 * turn) % 11), session_id=f"s{index}"
        )
        turns.append((history, completion))
        history = [*history, *completion.token_ids.tolist(), *_prompt(1000 + index * 10 + turn, 1 + (index + turn) % 9)]
    return turns


def _assert_exact(model: Any, turns: Sequence[tuple[list[int], Completion]], plain_logprobs: Any) -> None:
    for prompt, completion in turns:
        expected = plain_logprobs(model, prompt, completion.token_ids.tolist())
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=TOLERANCE)


def test_logprobs_agree_with_a_plain_forward_over_turns_with_kept_caches_and_copied_prefixes(
    model: Any, plain_logprobs: Any
) -> None:
    async def use(engine: LocalEngine) -> tuple[list[list[tuple[list[int], Completion]]], Any]:
        return await asyncio.gather(*(_play(engine, index) for index in range(16))), engine.counters

    episodes, counters = _run(model, use)
    assert counters.num_kept_tokens > 0
    assert counters.num_copied_tokens > 0  # four episodes share each first prompt
    for turns in episodes:
        _assert_exact(model, turns, plain_logprobs)


@pytest.mark.parametrize("layout", [PlainStore, BlockStore])
def test_each_layout_gives_the_same_logprobs(
    layout: Any, model: Any, plain_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_gym.engine.local.kv_store.store_type", lambda *_: layout)

    async def use(engine: LocalEngine) -> list[Any]:
        return await asyncio.gather(*(_play(engine, index) for index in range(16)))

    for turns in _run(model, use):
        _assert_exact(model, turns, plain_logprobs)


def test_only_the_new_tokens_of_a_turn_are_read(model: Any) -> None:
    async def use(engine: LocalEngine) -> Any:
        prompt = _prompt(0, 30)
        first = await engine.generate(prompt, _sampling(0, 10), session_id="a")
        before = engine.counters
        await engine.generate([*prompt, *first.token_ids.tolist(), 1, 2, 3, 4], _sampling(1, 1), session_id="a")
        return before, engine.counters

    before, after = _run(model, use)
    assert before.num_read_tokens == 30
    # The last sampled token was never fed back, so it is read with the four new ones; 39 are kept.
    assert after.num_read_tokens - before.num_read_tokens == 5
    assert after.num_kept_tokens - before.num_kept_tokens == 39


async def _no_other() -> Engine:
    raise AssertionError("no engine is to be replaced")


@pytest.mark.parametrize(
    "front",
    [lambda engine: engine, lambda engine: RebuildableEngine(engine, _no_other), lambda engine: RoutedEngine([engine])],
    ids=["bare", "rebuildable", "routed"],
)
def test_when_ended_sessions_are_forgotten_the_engine_samples_as_a_fresh_one_and_living_sessions_keep_theirs(
    model: Any, front: Callable[[Engine], Engine]
) -> None:
    async def fresh(engine: Engine) -> bytes:
        return (await engine.generate(_prompt(0, 90), _sampling(0), session_id="b")).logprobs.tobytes()

    async def used(local: LocalEngine) -> tuple[bytes, Any, Any]:
        engine = front(local)
        alive = _prompt(1, 90)
        alive += (await engine.generate(alive, _sampling(1), session_id="alive")).token_ids.tolist()
        await engine.generate(_prompt(0, 90)[:37], _sampling(2), session_id="a")
        await engine.end_session("a")
        await engine.forget_ended()
        logprobs, before = await fresh(engine), local.counters
        await engine.generate([*alive, 7], _sampling(3), session_id="alive")
        return logprobs, before, local.counters

    logprobs, before, after = _run(model, used)
    assert logprobs == _run(model, fresh)
    assert before.num_copied_tokens == 0
    assert after.num_kept_tokens - before.num_kept_tokens == 101  # all but the sampled token that was not fed back


def test_a_session_whose_history_was_rewritten_reuses_only_what_still_agrees(model: Any, plain_logprobs: Any) -> None:
    async def use(engine: LocalEngine) -> list[tuple[list[int], Completion]]:
        prompt = _prompt(0, 40)
        turns = [(prompt, await engine.generate(prompt, _sampling(0), session_id="a"))]
        rewritten = [*prompt[:25], 7, *prompt[26:]]
        shortened = prompt[:10]
        for changed in (rewritten, shortened, prompt):
            turns.append((changed, await engine.generate(changed, _sampling(0), session_id="a")))
        return turns

    turns = _run(model, use)
    _assert_exact(model, turns, plain_logprobs)
    assert turns[0][1].token_ids.tolist() == turns[3][1].token_ids.tolist()


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(model: Any) -> None:
    prompt = _prompt(5, 33)

    async def alone(engine: LocalEngine) -> Completion:
        return await engine.generate(prompt, _sampling(77, 40))

    async def in_a_crowd(engine: LocalEngine) -> Completion:
        crowd = [asyncio.create_task(_play(engine, index)) for index in range(20)]
        await engine.generate([1], _sampling(0, 5))  # the crowd has been running for five steps and more
        mine = await engine.generate(prompt, _sampling(77, 40))
        await asyncio.gather(*crowd)
        return mine

    expected, crowded = _run(model, alone), _run(model, in_a_crowd)
    assert crowded.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(crowded.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)


def test_other_seeds_give_other_tokens(model: Any) -> None:
    async def use(engine: LocalEngine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate([1, 2, 3], _sampling(seed, 20)) for seed in range(8)))

    assert len({tuple(c.token_ids.tolist()) for c in _run(model, use)}) == 8


def test_a_longer_limit_extends_the_same_tokens(model: Any) -> None:
    async def use(engine: LocalEngine) -> list[Completion]:
        return [await engine.generate([1, 2, 3], _sampling(4, length)) for length in (5, 20)]

    short, long = _run(model, use)
    assert long.token_ids[:5].tolist() == short.token_ids.tolist()


def test_greedy_takes_the_argmax_and_reports_its_logprob_at_temperature_one(model: Any, plain_logprobs: Any) -> None:
    async def use(engine: LocalEngine) -> Completion:
        return await engine.generate(_prompt(2, 9), _sampling(0, 6, temperature=0.0))

    completion = _run(model, use)
    history = _prompt(2, 9)
    for token in completion.token_ids.tolist():
        with torch.no_grad():
            assert model(torch.tensor([history])).logits[0, -1].argmax().item() == token
        history.append(token)
    _assert_exact(model, [(_prompt(2, 9), completion)], plain_logprobs)


def test_logprobs_are_of_the_tempered_and_truncated_distribution(model: Any) -> None:
    prompt = _prompt(3, 12)

    async def use(engine: LocalEngine) -> Completion:
        return await engine.generate(prompt, _sampling(9, 8, temperature=0.7, top_k=5))

    completion = _run(model, use)
    history = list(prompt)
    for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([history])).logits[0, -1].double() / 0.7
        best = logits.topk(5)
        assert token in best.indices.tolist()
        expected = (logits[token] - best.values.logsumexp(0)).item()  # log of its share of the five
        assert logprob == pytest.approx(expected, abs=TOLERANCE)
        history.append(token)


def test_sampling_ends_with_a_stop_token_and_keeps_it(model: Any) -> None:
    async def use(engine: LocalEngine) -> tuple[Completion, Completion]:
        free = await engine.generate([1, 2, 3], _sampling(4, 20))
        stop = int(free.token_ids[6])
        stopping = SamplingParams(max_tokens=20, stop_token_ids=(9999, stop), seed=4)
        return free, await engine.generate([1, 2, 3], stopping)

    free, stopped = _run(model, use)
    first = free.token_ids.tolist().index(int(free.token_ids[6]))
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert (free.finish_reason, stopped.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)


def test_sampling_ends_where_the_context_does_and_a_prompt_without_room_is_an_overflow(model: Any) -> None:
    async def use(engine: LocalEngine) -> Completion:
        with pytest.raises(ContextOverflowError, match="256 tokens leaves no room in a context of 256"):
            await engine.generate(_prompt(0, MAX_LEN), _sampling(0))
        return await engine.generate(_prompt(0, MAX_LEN - 3), _sampling(0, 50))

    completion = _run(model, use)
    assert len(completion.token_ids) == 3
    assert completion.finish_reason is FinishReason.LENGTH


def test_prompts_longer_than_one_step_may_read_are_read_in_parts(
    model: Any, plain_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_gym.engine.local.batcher._MAX_READ_TOKENS", 13)

    async def use(engine: LocalEngine) -> list[tuple[list[int], Completion]]:
        prompts = [_prompt(seed, length) for seed, length in ((1, 60), (2, 14), (3, 1), (4, 26))]
        completions = await asyncio.gather(*(engine.generate(p, _sampling(i)) for i, p in enumerate(prompts)))
        return list(zip(prompts, completions, strict=True))

    _assert_exact(model, _run(model, use), plain_logprobs)


def test_more_requests_than_slots_are_all_answered_exactly(model: Any, plain_logprobs: Any) -> None:
    async def use(engine: LocalEngine) -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*(_play(engine, index) for index in range(12)))

    for turns in _run(model, use, max_batch_size=3):
        _assert_exact(model, turns, plain_logprobs)


def test_sixty_four_episodes_at_once_sample_what_one_at_a_time_does(model: Any) -> None:
    async def together(engine: LocalEngine) -> list[Any]:
        return await asyncio.gather(*(_play(engine, index, num_turns=3) for index in range(64)))

    async def in_turn(engine: LocalEngine) -> list[Any]:
        return [await _play(engine, index, num_turns=3) for index in range(64)]

    def tokens(episodes: list[Any]) -> list[list[list[int]]]:
        return [[completion.token_ids.tolist() for _, completion in turns] for turns in episodes]

    assert tokens(_run(model, together)) == tokens(_run(model, in_turn))


def test_after_an_update_logprobs_are_the_new_weights_and_carry_the_new_version(
    model: Any, plain_logprobs: Any
) -> None:
    async def use(engine: LocalEngine) -> None:
        old = await _play(engine, 0)
        _assert_exact(model, old, plain_logprobs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model(torch.tensor([old[-1][0]])).logits.square().mean().backward()
        optimizer.step()
        await WeightSync(engine).publish(3)
        prompt, before = old[-1]  # the session's own history, whose keys the engine still held
        after = await engine.generate(prompt, _sampling(303, len(before.token_ids)), session_id="s0")
        _assert_exact(model, [(prompt, after)], plain_logprobs)
        assert np.abs(plain_logprobs(model, prompt, before.token_ids.tolist()) - before.logprobs).max() > 0.01
        assert old[0][1].weight_version.tolist() == [0] * len(old[0][1].token_ids)
        assert after.weight_version.tolist() == [3] * len(after.token_ids)
        assert engine.weight_version == 3

    _run(model, use)


def _scale_in_place(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(1.5)


def _scale_behind_autograds_back(parameter: torch.Tensor) -> None:
    parameter.data.mul_(1.5)  # leaves the version counter alone


def _replace_the_storage(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data * 1.5


@pytest.mark.parametrize("change", [_scale_in_place, _scale_behind_autograds_back, _replace_the_storage])
def test_keys_of_older_weights_cannot_be_used(
    model: Any, plain_logprobs: Any, change: Callable[[torch.Tensor], None]
) -> None:
    prompt = _prompt(0, 30)

    async def use(engine: LocalEngine) -> Completion:
        first = await engine.generate(prompt, _sampling(0, 10), session_id="a")
        change(model.model.layers[0].self_attn.k_proj.weight)
        history = [*prompt, *first.token_ids.tolist()]
        for session in ("a", "other", None):
            with pytest.raises(EngineError, match=r"weights changed since version 0 .* publish them"):
                await engine.generate(history, _sampling(1), session_id=session)
        await WeightSync(engine).publish(1)
        before = engine.counters
        completion = await engine.generate(history, _sampling(1), session_id="a")
        assert engine.counters.num_kept_tokens == before.num_kept_tokens
        assert engine.counters.num_read_tokens == before.num_read_tokens + len(history)
        _assert_exact(model, [(history, completion)], plain_logprobs)
        return completion

    _run(model, use)


def test_the_check_for_stale_keys_is_needed(model: Any, plain_logprobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the engine would go on from old keys: the logprobs would be those of no policy at all."""
    monkeypatch.setattr("gspo_gym.engine.local.shared_model.SharedModel.weights_changed", lambda self: False)
    monkeypatch.setattr("gspo_gym.engine.local.shared_model.SharedModel.contents_changed", lambda self: False)
    prompt = _prompt(0, 30)

    async def use(engine: LocalEngine) -> float:
        first = await engine.generate(prompt, _sampling(0, 10), session_id="a")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight.mul_(-3)
        history = [*prompt, *first.token_ids.tolist()]
        stale = await engine.generate(history, _sampling(1), session_id="a")
        return float(np.abs(stale.logprobs - plain_logprobs(model, history, stale.token_ids.tolist())).max())

    assert _run(model, use) > 100 * TOLERANCE


def test_a_lora_model_samples_with_its_adapter_and_follows_its_updates(model: Any, plain_logprobs: Any) -> None:
    adapted = add_lora(model, LoraSettings(r=4), seed=0)
    for module in adapted.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(0.5)
    adapted.train()  # as a learner may leave it: dropout must not reach the engine

    def plain(history: list[int], completion: Completion) -> Any:
        adapted.eval()
        expected = plain_logprobs(adapted, history, completion.token_ids.tolist())
        adapted.train()
        return expected

    async def use(engine: LocalEngine) -> None:
        prompt = _prompt(0, 20)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.2)
        await WeightSync(engine).publish(1)
        completion = await engine.generate(prompt, _sampling(0), session_id="a")
        np.testing.assert_allclose(completion.logprobs, plain(prompt, completion), rtol=0, atol=TOLERANCE)
        with adapted.disable_adapter():
            base = plain(prompt, completion)
            again = await engine.generate(prompt, _sampling(0))  # the learner's switch is not the engine's
        assert np.abs(base - completion.logprobs).max() > 0.01
        assert again.token_ids.tolist() == completion.token_ids.tolist()
        assert adapted.training

    _run(adapted, use)


def test_an_update_takes_over_an_adapter_that_was_put_on_or_merged_meanwhile(model: Any, plain_logprobs: Any) -> None:
    prompt = _prompt(0, 20)

    async def use(engine: LocalEngine) -> None:
        plain = await engine.generate(prompt, _sampling(0))
        adapted = add_lora(model, LoraSettings(r=4), seed=0)
        adapted.eval()
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.2)
        for version, change in enumerate((lambda: None, adapted.merge_adapter), start=1):
            change()
            await WeightSync(engine).publish(version)
            completion = await engine.generate(prompt, _sampling(0))
            _assert_exact(adapted, [(prompt, completion)], plain_logprobs)
            assert np.abs(plain_logprobs(adapted, prompt, plain.token_ids.tolist()) - plain.logprobs).max() > 0.01

    _run(model, use)


def test_the_learners_model_is_left_as_it_was(model: Any) -> None:
    model.train()
    implementation = model.config._attn_implementation
    weights = [(id(p), p.data_ptr(), p._version, p.requires_grad) for p in model.parameters()]

    async def use(engine: LocalEngine) -> None:
        await _play(engine, 0)
        await WeightSync(engine).publish(1)

    _run(model, use)
    assert model.training
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert [(id(p), p.data_ptr(), p._version, p.requires_grad) for p in model.parameters()] == weights


def test_the_learner_can_take_gradients_while_the_engine_samples(model: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        model.train()
        episodes = [asyncio.create_task(_play(engine, index)) for index in range(8)]
        await asyncio.sleep(0)
        loss = model(torch.tensor([_prompt(0, 30)])).logits.square().mean()
        loss.backward()
        await asyncio.gather(*episodes)

    _run(model, use)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_weights_that_give_nan_are_an_error_for_each_request_and_the_engine_recovers(
    model: Any, plain_logprobs: Any
) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    sound = weight.detach().clone()

    async def use(engine: LocalEngine) -> None:
        await engine.generate(_prompt(0, 30), _sampling(0), session_id="a")
        with torch.no_grad():
            weight.fill_(float("nan"))
        await WeightSync(engine).publish(1)
        results = await asyncio.gather(
            *(engine.generate(_prompt(i, 20), _sampling(i), session_id="a") for i in range(3)), return_exceptions=True
        )
        assert [str(r) for r in results] == ["the model's logits are not finite (weights of version 1)"] * 3
        with torch.no_grad():
            weight.copy_(sound)
        await WeightSync(engine).publish(2)
        for length in (5, 50):  # shorter than what the poisoned slots held, and longer
            prompt = _prompt(9, length)
            _assert_exact(model, [(prompt, await engine.generate(prompt, _sampling(0)))], plain_logprobs)

    _run(model, use)


@pytest.mark.parametrize("name", ["tiny:qwen3-128", "tiny:qwen3-moe-64"])
def test_grouped_heads_and_experts_are_exact_too(name: str, plain_logprobs: Any) -> None:
    model = load_policy(name).model

    async def use(engine: LocalEngine) -> list[Any]:
        return await asyncio.gather(*(_play(engine, index, num_turns=2) for index in range(4)))

    for turns in _run(model, use):
        _assert_exact(model, turns, plain_logprobs)


def test_half_precision_agrees_to_its_own_rounding(plain_logprobs: Any) -> None:
    model = load_policy("tiny:qwen3-64", dtype="bfloat16").model

    async def use(engine: LocalEngine) -> list[Any]:
        return await _play(engine, 0)

    for prompt, completion in _run(model, use):
        expected = plain_logprobs(model, prompt, completion.token_ids.tolist())
        # bfloat16 keeps 8 bits: a logit near 1 is off by 2^-8 = 0.004 after rounding once, and here after two layers.
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 5000}, r"^LocalEngine: max_model_len 5000 exceeds the 4096 positions of \w+$"),
        ({"max_model_len": 1}, "max_model_len >= 2"),
        ({"max_model_len": 64, "max_batch_size": 0}, "max_batch_size >= 1"),
        ({"max_model_len": 64, "device": "cuda"}, "the model is on cpu, expected cuda"),
    ],
)
def test_impossible_settings_are_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalEngine(model, **options)


def test_the_shortest_context_and_one_slot_are_enough(model: Any) -> None:
    async def main() -> int:
        engine = LocalEngine(model, max_model_len=2, max_batch_size=1, device="cpu")
        completion = await engine.generate([5], SamplingParams(max_tokens=9, stop_token_ids=(), seed=0))
        await engine.close()
        return len(completion.token_ids)

    assert asyncio.run(main()) == 1

"""The general way of running a model: what is kept and what is not, weights that change, and what its probe finds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import transformers

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local import plain_model
from gspo_gym.engine.local.batch import Caching, Request
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.local.plain_model import PlainModel
from gspo_gym.engine.local.shared_model import SharedModel, check_length, inner_model, keeps_logits
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.lora import add_lora
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.types import Completion

MAX_LEN = 512
TOLERANCE = 1e-5  # float32 rounding, five times over
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def _falcon() -> Any:
    return transformers.FalconForCausalLM(transformers.FalconConfig(**SMALL, num_attention_heads=4))


def _mamba() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL, state_size=4))


def _gpt() -> Any:
    config = transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LEN)
    return transformers.OpenAIGPTLMHeadModel(config)


def _whole_gpt() -> Any:
    return _WholeGPT(_gpt().config)


class _WholeGPT(transformers.OpenAIGPTLMHeadModel):
    """Cannot be asked for the logits of some tokens only."""

    def forward(self, input_ids: torch.Tensor) -> Any:
        return super().forward(input_ids=input_ids)


MODELS: dict[str, Callable[[], Any]] = {"turns": _falcon, "tokens": _mamba, "none": _gpt}


def _build(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = make().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """One model for each kind of caching."""
    return _build(MODELS[request.param])


@pytest.fixture
def falcon() -> Any:
    return _build(_falcon)


def _run(model: Any, use: Callable[[LocalEngine], Coroutine[Any, Any, Any]], **options: int) -> Any:
    async def main() -> Any:
        engine = LocalEngine(model, max_model_len=MAX_LEN, **options)
        assert engine.path.name == "general"
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def _sampling(max_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=(), seed=seed)


def _prompt(length: int, start: int = 0) -> list[int]:
    return [(7 * i + start) % 60 + 3 for i in range(length)]


def _assert_exact(model: Any, prompt: list[int], completion: Completion, plain_logprobs: Any) -> None:
    expected = plain_logprobs(model, prompt, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=TOLERANCE)


async def _until_sampling(engine: LocalEngine) -> None:
    while engine.counters.num_sampled_tokens == 0:  # noqa: ASYNC110  # nothing to wait on: the task is still running
        await asyncio.sleep(0.001)


def test_a_turn_reads_only_what_its_cache_does_not_hold() -> None:
    async def use(engine: LocalEngine) -> list[int]:
        prompt = _prompt(30)
        first = await engine.generate(prompt, _sampling(10), session_id="a")
        before = engine.counters
        history = [*prompt, *first.token_ids.tolist(), 1, 2, 3, 4]
        await engine.generate(history, _sampling(2), session_id="a")
        after = engine.counters
        return [before.num_read_tokens, after.num_read_tokens - before.num_read_tokens, after.num_kept_tokens]

    # The last sampled token was never fed back, so it is read with the four new ones; 39 are kept.
    assert _run(_build(_falcon), use) == [30, 5, 39]
    # A cache that goes on from single tokens only is of no use to the second turn, which reads all its 44 tokens.
    assert _run(_build(_mamba), use) == [30, 44, 0]
    # Without a cache, ten tokens read 30, 31, .. 39 tokens, and two read 44 and 45.
    assert _run(_build(_gpt), use) == [sum(range(30, 40)), 44 + 45, 0]


def test_prompts_join_step_by_step_as_far_as_those_in_work_can_wait(
    falcon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_model, "_MAX_READ_TOKENS", 20)
    plain = PlainModel(falcon, max_model_len=MAX_LEN)
    plain.verify()
    batch = plain_model.GeneralBatch(plain, max_batch_size=8)
    for number, length in enumerate((10, 9, 5, 30, 1)):
        prompt = np.array(_prompt(length, number), np.int32)
        batch.submit(Request(prompt, _sampling(2), 2, session_id=str(number)))
    num_read = []
    for _ in range(4):
        batch.step()
        num_read.append(batch.counters.num_read_tokens)
    # 10 and 9 leave room for one token, with which the 5 join; 30 are more than there is room for, and join alone.
    assert num_read == [10 + 9 + 5, 24 + 30, 54 + 1, 55]
    assert batch.num_in_flight == 0
    assert batch.counters.num_steps == 4
    held = batch._held[0].tokens  # the ten that were read, and the first of the two that were sampled
    batch.submit(Request(np.append(held, np.array([2, 3], np.int32)), _sampling(1), 1, session_id="0"))
    batch.step()
    assert (batch.counters.num_kept_tokens, batch.counters.num_read_tokens) == (11, 55 + 2)
    # Of a turn, only what is new counts: two tokens of fifteen, which leave room for another prompt.
    held = batch._held[0].tokens
    batch.submit(Request(np.append(held, np.array([4, 5], np.int32)), _sampling(1), 1, session_id="0"))
    batch.submit(Request(np.array(_prompt(18, 7), np.int32), _sampling(1), 1, session_id="7"))
    batch.step()
    assert (len(held), batch.counters.num_read_tokens) == (13, 57 + 2 + 18)


def test_a_session_whose_history_was_rewritten_starts_over(model: Any, plain_logprobs: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        prompt = _prompt(40)
        first = await engine.generate(prompt, _sampling(6), session_id="a")
        for changed in ([*prompt[:25], 7, *prompt[26:]], prompt[:10], prompt):
            completion = await engine.generate(changed, _sampling(6), session_id="a")
            _assert_exact(model, changed, completion, plain_logprobs)
        assert completion.token_ids.tolist() == first.token_ids.tolist()
        assert engine.counters.num_kept_tokens == 0

    _run(model, use)


def test_more_requests_than_slots_are_all_answered_exactly(model: Any, plain_logprobs: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        prompts = [_prompt(5 + index, index) for index in range(7)]
        sampled = [
            engine.generate(p, _sampling(3 + index, index), session_id=str(index)) for index, p in enumerate(prompts)
        ]
        for prompt, completion in zip(prompts, await asyncio.gather(*sampled), strict=True):
            _assert_exact(model, prompt, completion, plain_logprobs)

    _run(model, use, max_batch_size=2)


def test_cancelling_a_request_frees_its_slot_and_leaves_its_session_sound(model: Any, plain_logprobs: Any) -> None:
    async def use(engine: LocalEngine) -> None:
        hog = asyncio.create_task(engine.generate(_prompt(3), _sampling(500), session_id="a"))
        await _until_sampling(engine)
        hog.cancel()
        completion = await engine.generate(_prompt(3), _sampling(5), session_id="a")
        with pytest.raises(asyncio.CancelledError):
            await hog
        _assert_exact(model, _prompt(3), completion, plain_logprobs)
        await WeightSync(engine).publish(1)  # nothing is in flight any more

    _run(model, use, max_batch_size=1)


def test_nothing_is_kept_for_requests_without_a_session_or_sessions_that_ended(falcon: Any) -> None:
    async def use(engine: LocalEngine) -> list[int]:
        held = engine._worker.batch._held
        sizes = []
        await engine.generate(_prompt(9), _sampling(2))
        sizes.append(len(held))
        for session in ("a", "b"):
            await engine.generate(_prompt(9), _sampling(2), session_id=session)
        sizes.append(len(held))
        await engine.end_session("a")
        # The worker has taken the command before this, which leaves the slot that "a" had alone.
        await engine.generate(_prompt(9), _sampling(1), session_id="b")
        sizes.append(len(held))
        return sizes

    assert _run(falcon, use) == [0, 2, 1]


def _scale_in_place(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(1.5)


def _scale_behind_autograds_back(parameter: torch.Tensor) -> None:
    parameter.data.mul_(1.5)


@pytest.mark.parametrize("change", [_scale_in_place, _scale_behind_autograds_back])
def test_caches_of_older_weights_cannot_be_used(
    model: Any, plain_logprobs: Any, change: Callable[[torch.Tensor], None]
) -> None:
    async def use(engine: LocalEngine) -> None:
        prompt = _prompt(20)
        first = await engine.generate(prompt, _sampling(4), session_id="a")
        change(max(model.parameters(), key=torch.Tensor.numel))
        history = [*prompt, *first.token_ids.tolist(), 4]
        with pytest.raises(EngineError, match=r"weights changed since version 0 .* publish them"):
            await engine.generate(history, _sampling(4), session_id="a")
        await WeightSync(engine).publish(1)
        completion = await engine.generate(history, _sampling(4), session_id="a")
        _assert_exact(model, history, completion, plain_logprobs)
        assert completion.weight_version.tolist() == [1] * 4
        assert engine.counters.num_kept_tokens == 0

    _run(model, use)


def test_the_check_for_stale_caches_is_needed(
    falcon: Any, plain_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_gym.engine.local.shared_model.SharedModel.weights_changed", lambda self: False)
    monkeypatch.setattr("gspo_gym.engine.local.shared_model.SharedModel.contents_changed", lambda self: False)

    async def use(engine: LocalEngine) -> float:
        prompt = _prompt(20)
        first = await engine.generate(prompt, _sampling(4), session_id="a")
        with torch.no_grad():
            for block in falcon.transformer.h:
                block.self_attention.query_key_value.weight.mul_(-3)
        history = [*prompt, *first.token_ids.tolist(), 4]
        stale = await engine.generate(history, _sampling(4), session_id="a")
        return float(np.abs(stale.logprobs - plain_logprobs(falcon, history, stale.token_ids.tolist())).max())

    assert _run(falcon, use) > 100 * TOLERANCE


def test_weights_that_give_nan_are_an_error_and_the_engine_recovers(model: Any, plain_logprobs: Any) -> None:
    weight = model.get_output_embeddings().weight
    sound = weight.detach().clone()

    async def use(engine: LocalEngine) -> None:
        with torch.no_grad():
            weight.fill_(float("nan"))
        await WeightSync(engine).publish(1)
        with pytest.raises(EngineError, match="logits are not finite \\(weights of version 1\\)"):
            await engine.generate(_prompt(8), _sampling(3), session_id="a")
        with torch.no_grad():
            weight.copy_(sound)
        await WeightSync(engine).publish(2)
        completion = await engine.generate(_prompt(8), _sampling(3), session_id="a")
        _assert_exact(model, _prompt(8), completion, plain_logprobs)

    _run(model, use)


def test_the_learners_model_keeps_its_modes_its_adapter_is_sampled_with_and_no_weight_is_copied(
    falcon: Any, plain_logprobs: Any
) -> None:
    adapted = add_lora(falcon, LoraSettings(r=4, target_modules=("query_key_value",)), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.2)
    adapted.train()
    assert inner_model(adapted) is falcon

    async def use(engine: LocalEngine) -> Completion:
        shared = engine._worker.batch.shared.module
        assert {id(p) for p in shared.parameters()} == {id(p) for p in falcon.parameters()}
        completion: Completion = await engine.generate(_prompt(9), _sampling(6))
        return completion

    completion = _run(adapted, use)
    assert all(module.training for module in adapted.modules())
    adapted.eval()
    _assert_exact(adapted, _prompt(9), completion, plain_logprobs)
    with adapted.disable_adapter():
        base = plain_logprobs(adapted, _prompt(9), completion.token_ids.tolist())
    assert np.abs(base - completion.logprobs).max() > 0.01


@pytest.mark.parametrize(
    ("limit", "shapes"),
    [
        (1, [(1, 9), (1, 9), (1, 5), (1, 3), (1, 1)]),
        (20, [(2, 9), (3, 5)]),  # a third row of nine would be 27 tokens; three of five are 15
        (10_000, [(5, 9)]),
    ],
)
@pytest.mark.parametrize(
    ("make", "constant", "size"), [(_gpt, "_MAX_TOKENS_AT_ONCE", 1), (_whole_gpt, "_MAX_LOGITS_AT_ONCE", 64)]
)
def test_sequences_are_read_together_as_far_as_memory_goes_with_the_same_result(
    make: Callable[[], Any],
    constant: str,
    size: int,
    limit: int,
    shapes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a model that gives the logits of every token, these are bounded, too: 64 numbers each."""
    plain = PlainModel(_build(make), max_model_len=MAX_LEN)
    sequences = [np.array(_prompt(length, length), np.int32) for length in (3, 9, 9, 1, 5)]
    with torch.inference_mode():
        expected = torch.stack([plain.logits(torch.tensor(s)[None])[0, -1] for s in sequences])
        monkeypatch.setattr(plain_model, constant, limit * size)
        read: list[tuple[int, ...]] = []
        plain.shared.module.register_forward_pre_hook(
            lambda module, _, options: read.append(tuple(options["input_ids"].shape)), with_kwargs=True
        )
        torch.testing.assert_close(plain.read(sequences), expected)
    assert read == shapes


def test_a_model_that_looks_into_the_padding_is_read_in_rows_of_one_length(
    monkeypatch: pytest.MonkeyPatch, plain_logprobs: Any
) -> None:
    """As a mixture of experts with a capacity for the whole batch would, and the learner's padding would not show."""
    gpt = _build(_gpt)
    original = type(gpt).forward
    shapes: set[tuple[int, ...]] = set()

    def forward_that_counts_its_rows_lengths(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        shapes.add(tuple(input_ids.shape))
        output = original(self, input_ids, **options)
        is_padded = (input_ids[:, -1:] == input_ids[:, -2:-1]).any() if input_ids.shape[1] > 1 else False
        output.logits = output.logits * (1.5 if is_padded else 1.0)
        return output

    monkeypatch.setattr(type(gpt), "forward", forward_that_counts_its_rows_lengths)

    async def use(engine: LocalEngine) -> None:
        shapes.clear()
        prompts = [_prompt(length, length) for length in (5, 5, 9)]
        completions = await asyncio.gather(*(engine.generate(p, _sampling(1)) for p in prompts))
        assert {columns for _, columns in shapes} == {5, 9}
        for prompt, completion in zip(prompts, completions, strict=True):
            _assert_exact(gpt, prompt, completion, plain_logprobs)

    _run(gpt, use)


def test_a_cache_that_forgets_is_found_and_not_used(falcon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = type(falcon).forward

    def forward_that_forgets(self: Any, input_ids: torch.Tensor, past_key_values: Any = None, **options: Any) -> Any:
        if past_key_values is not None:
            past_key_values.layers[0].values *= 0.99
        return original(self, input_ids, past_key_values=past_key_values, **options)

    monkeypatch.setattr(type(falcon), "forward", forward_that_forgets)
    plain = PlainModel(falcon, max_model_len=MAX_LEN)
    plain.verify()
    assert plain.caching is Caching.NONE


def test_a_cache_whose_fault_shows_only_in_other_weights_is_dropped_when_they_come(plain_logprobs: Any) -> None:
    """An untrained Jamba hardly uses its state-space layer, whose cache goes on from single tokens only."""
    config = transformers.JambaConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2, mamba_d_state=4,
        mamba_dt_rank=4, use_mamba_kernels=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        jamba = transformers.JambaForCausalLM(config).eval()

    async def use(engine: LocalEngine) -> list[Caching]:
        seen = [engine.path.caching]
        with torch.no_grad():
            for parameter in jamba.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        await WeightSync(engine).publish(1)
        seen.append(engine.path.caching)
        history = _prompt(12)
        for seed in range(2):
            completion = await engine.generate(history, _sampling(5, seed), session_id="a")
            _assert_exact(jamba, history, completion, plain_logprobs)
            history = [*history, *completion.token_ids.tolist(), 5, 6, 7]
        return seen

    assert _run(jamba, use) == [Caching.TURNS, Caching.TOKENS]


def test_a_model_that_writes_to_its_weights_when_it_runs_is_refused(
    falcon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = type(falcon).forward

    def forward_that_writes(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        self.lm_head.weight.mul_(1)
        return original(self, input_ids, **options)

    monkeypatch.setattr(type(falcon), "forward", forward_that_writes)
    with pytest.raises(ConfigError, match="running FalconForCausalLM changes its weights"):
        PlainModel(falcon, max_model_len=MAX_LEN).verify()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_shortest_contexts_can_be_probed(size: int) -> None:
    for caching, make in MODELS.items():
        plain = PlainModel(_build(make), max_model_len=size)
        plain.verify()
        if size > 3:  # in shorter ones a lost state can hardly show
            assert plain.caching.value == caching


class _RecordedFalcon(transformers.FalconForCausalLM):
    """Notes how many tokens it reads with a cache, forward by forward, and the rows that it reads without."""

    lengths: list[int] = []  # of the class, because the engine makes an object of its own
    rows: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, use_cache: bool | None = None, **options: Any) -> Any:
        if use_cache:
            self.lengths.append(input_ids.shape[1])
        else:
            self.rows.extend(input_ids.tolist())
        return super().forward(input_ids=input_ids, use_cache=use_cache, **options)


def test_the_probe_of_turns_goes_on_from_a_cache_with_many_tokens_and_with_one_by_turns_of_two_sequences() -> None:
    """Of 80 tokens: a third, a third, all but one of the rest, and the last."""
    _RecordedFalcon.lengths.clear()
    _RecordedFalcon.rows.clear()
    config = transformers.FalconConfig(**SMALL, num_attention_heads=4)
    probed = PlainModel(_build(lambda: _RecordedFalcon(config)), max_model_len=MAX_LEN)
    probed.verify()
    assert probed.caching is Caching.TURNS
    assert _RecordedFalcon.lengths == [26, 26, 27, 27, 26, 26, 1, 1]
    # Before that: each sequence alone; then both with beginnings of them, longest first, padded with their last token.
    one, other, *together = _RecordedFalcon.rows
    assert one != other
    assert together == [one, other, other[:77] + [other[76]] * 3, one[:40] + [one[39]] * 40, [one[0]] * 80]


def test_a_probe_agrees_up_to_its_tolerance_and_not_beyond(falcon: Any) -> None:
    probe = plain_model._Probe(PlainModel(falcon, max_model_len=MAX_LEN))
    expected = probe._expected[0][:1]
    moved = expected + torch.linspace(0, 0.5, SMALL["vocab_size"])
    assert not probe._agrees(moved, [*expected])
    probe._tolerance = probe.difference
    assert probe._agrees(moved, [*expected])
    probe._tolerance *= 0.999
    assert not probe._agrees(moved, [*expected])


def test_probes_reach_beyond_windows_unless_they_are_long() -> None:
    falcon = _build(_falcon)
    lengths = []
    for window in (8, 200, 1020, 1021, 4096):
        falcon.config.sliding_window = window
        lengths.append(PlainModel(falcon, max_model_len=2048).probe_length())
    assert lengths == [80, 204, 1024, 80, 80]  # four more than the window, up to 1,024
    assert PlainModel(falcon, max_model_len=50).probe_length() == 50


def _offload_to_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


def _offload_to_memory(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def _dispatch(model: Any, folder: Path) -> Any:
    return accelerate.dispatch_model(model, {"": "cpu"}, offload_dir=folder, force_hooks=True)


@pytest.mark.parametrize("place", [_offload_to_disk, _offload_to_memory, _dispatch])
def test_a_model_that_accelerate_has_placed_is_sampled_from_where_it_is(
    place: Callable[[Any, Path], Any], tmp_path: Path, plain_logprobs: Any
) -> None:
    reference, placed = (load_policy("tiny:qwen3-64", seed=1).model for _ in range(2))
    placed = place(placed, tmp_path)

    async def main() -> None:
        engine = LocalEngine(placed, max_model_len=64, device="cpu")
        is_offloaded = place is not _dispatch
        assert engine.path.name == ("general" if is_offloaded else "packed")
        if is_offloaded:
            assert engine.path.reason == "Qwen3ForCausalLM is not on one device: its weights are ['offloaded']"
        prompt = _prompt(12)
        for version in range(2):
            completion = await engine.generate(prompt, _sampling(5, version), session_id="a")
            _assert_exact(reference, prompt, completion, plain_logprobs)
            prompt = [*prompt, *completion.token_ids.tolist(), 9]
            await WeightSync(engine).publish(version + 1)
        await engine.close()

    asyncio.run(main())


def test_the_store_of_offloaded_weights_is_shared_as_the_weights_are(falcon: Any) -> None:
    placed = _offload_to_memory(falcon, Path())
    copied = SharedModel(placed, max_model_len=16).module
    theirs, ours = (
        [hook.weights_map for module in model.modules() if (hook := getattr(module, "_hf_hook", None)) is not None]
        for model in (placed, copied)
    )
    assert any(store is not None for store in theirs)
    assert all(store is copy for store, copy in zip(theirs, ours, strict=True))


def test_a_model_that_halves_its_weights_where_it_samples_leaves_them_to_the_learner() -> None:
    sizes = {"attention_hidden_size": 32, "intermediate_size": 48, "context_length": 128}
    config = transformers.RwkvConfig(**{**SMALL, "num_hidden_layers": 7}, **sizes, rescale_every=6)
    model = _build(lambda: transformers.RwkvForCausalLM(config))
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.inference_mode():
        SharedModel(model, max_model_len=64).module(input_ids=torch.tensor([[1, 2, 3]]))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert model.config.rescale_every == 6


def test_the_positions_of_a_model_of_images_too_are_those_of_its_text_part() -> None:
    text = transformers.LlamaConfig(**SMALL, num_attention_heads=4, intermediate_size=48, max_position_embeddings=40)
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=text))
    check_length(model, 40)
    with pytest.raises(ConfigError, match="max_model_len 41 exceeds the 40 positions of LlavaForConditional"):
        check_length(model, 41)


def test_rounding_is_sixty_four_times_that_of_the_largest_logprob_and_the_tolerance_at_most(falcon: Any) -> None:
    shared = SharedModel(falcon, max_model_len=16)
    assert shared.rounding(torch.tensor([-0.5, -2.0])) == 2.0**-16  # 64 * 2**-23 * 2
    assert shared.rounding(torch.tensor([-1000.0])) == shared.tolerance == 0.001


def test_a_model_whose_weights_were_never_loaded_is_refused() -> None:
    with torch.device("meta"):
        empty = _falcon()
    with pytest.raises(ConfigError, match="the weights of FalconForCausalLM are on the meta device"):
        LocalEngine(empty, max_model_len=16)


def test_a_parameter_that_was_moved_counts_as_changed() -> None:
    model = load_policy("tiny:qwen3-64", seed=0).model
    shared = SharedModel(model, max_model_len=64)
    assert keeps_logits(shared.module)
    assert not shared.weights_changed()
    weight = next(model.parameters())
    weight.data = weight.data.clone()  # other memory, and the same version
    assert shared.weights_changed()
    shared.accept_weights()
    assert not shared.weights_changed()

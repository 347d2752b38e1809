"""The engine over a vLLM server: handshake, samples, updates and faults, against a stub with vLLM's routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from fake_vllm import VOCAB_SIZE, FakeVllm, Stage, logits_of, served
from moved_clock import move_clock
from safetensors.numpy import save_file

from gspo_gym.base.retries import RetrySettings
from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.gate import probing
from gspo_gym.engine.vllm.http import VllmHttpEngine, VllmHttpSettings
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError, EnginePoisonedError, EngineTimeoutError
from gspo_gym.types import Completion

T = TypeVar("T")
PLAIN = SamplingParams(max_tokens=6, stop_token_ids=(), seed=7)


@pytest.fixture
def fake(tmp_path: Path) -> FakeVllm:
    return FakeVllm(model_folder=str(staged(tmp_path / "model")))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with served() as stage:
        yield stage


@pytest.fixture
def url(stage: Stage, fake: FakeVllm) -> str:
    stage.fake = fake
    return stage.url


def staged(folder: Path, shape: tuple[int, int] = (4, 2)) -> Path:
    """A folder with the weights of a model of one matrix."""
    folder.mkdir()
    save_file({"embed": np.zeros(shape, np.float32)}, folder / "model.safetensors")
    return folder


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


async def no_wait(_seconds: float) -> None:
    """In place of the clock between retries."""


def using(url: str, use: Callable[[VllmHttpEngine], Awaitable[T]], **changes: Any) -> T:
    """What `use` gives, with an engine of its own."""

    async def run() -> T:
        settings = VllmHttpSettings(**{"url": url, "vocab_size": VOCAB_SIZE, **changes})
        engine = await VllmHttpEngine.start(settings, sleep=no_wait)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


async def publish(engine: VllmHttpEngine, update: WeightUpdate) -> None:
    await engine.pause("wait")
    await engine.apply_weights(update)
    await engine.resume(update.version)


def expected_logprobs(weights: str, prompt: list[int], completion: Completion, temperature: float = 1.0) -> Any:
    """From the stub's table of logits."""
    before = [prompt[-1], *completion.token_ids[:-1].tolist()]
    rows = np.array([logits_of(weights, token) / temperature for token in before])
    logprobs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    return logprobs[np.arange(len(before)), completion.token_ids]


def body_of(fake: FakeVllm, path: str) -> Any:
    return [body for _, seen, _, body in fake.seen if seen == path][-1]


def test_handshake_finds_what_our_own_server_can_do(url: str) -> None:
    async def capabilities(engine: VllmHttpEngine) -> Any:
        return engine.capabilities

    found = using(url, capabilities)
    assert (found.update_kinds, found.pause_modes) == (("full",), ("wait", "keep"))
    assert all((found.is_trainable, found.seeds_per_request, found.reuses_prefixes, found.has_checksums))
    assert (found.max_model_len, found.logprob_mode) == (128, "processed")


def test_ids_that_the_tokenizer_does_not_have_are_never_sampled(url: str) -> None:
    num_ids = VOCAB_SIZE // 2

    async def sample(engine: VllmHttpEngine) -> Completion:
        return await engine.generate([1, 2], SamplingParams(max_tokens=100, stop_token_ids=(), seed=1))

    completion = using(url, sample, num_token_ids=num_ids)
    assert completion.token_ids.max() < num_ids <= using(url, sample).token_ids.max()
    before = [2, *completion.token_ids[:-1].tolist()]
    rows = np.array([logits_of(" ", token)[:num_ids] for token in before])  # the distribution over the others
    expected = rows[np.arange(100), completion.token_ids] - np.logaddexp.reduce(rows, axis=1)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_a_sample_is_asked_for_with_every_field_and_answered_with_its_logprobs(fake: FakeVllm, url: str) -> None:
    sampling = SamplingParams(max_tokens=6, stop_token_ids=(3,), seed=2**63 + 5, temperature=0.5)

    async def sample(engine: VllmHttpEngine) -> Completion:
        return await engine.generate([1, 2], sampling, session_id="episode-1")

    completion = using(url, sample)
    expected = expected_logprobs(" ", [1, 2], completion, temperature=0.5)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    assert completion.weight_version.tolist() == [0] * len(completion.token_ids)
    body = body_of(fake, "/inference/v1/generate")
    assert (body["token_ids"], body["model"], body["stream"]) == ([1, 2], "policy", False)
    assert body["cache_salt"].startswith("policy-v0-")
    assert body["sampling_params"] == {
        "n": 1, "max_tokens": 6, "min_tokens": 0, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": [],
        "stop_token_ids": [3], "ignore_eos": True, "logprobs": 0, "detokenize": False,
        "seed": 5,  # vLLM's seeds have 63 bits
    }  # fmt: skip
    assert fake.headers[-1]["x-session-id"] == "episode-1"


def test_without_the_token_route_completions_are_asked_and_only_drained_updates_promised(
    fake: FakeVllm, url: str, tmp_path: Path
) -> None:
    fake.has_generate = False

    async def sample(engine: VllmHttpEngine) -> tuple[Any, Completion]:
        await publish(engine, WeightUpdate(4, "full", staged(tmp_path / "v4")))
        return engine.capabilities, await engine.generate([1, 2], PLAIN)

    capabilities, completion = using(url, sample)
    assert capabilities.pause_modes == ("wait",)
    assert completion.weight_version.tolist() == [4] * 6
    body = body_of(fake, "/v1/completions")
    assert (body["prompt"], body["return_token_ids"], body["logprobs"]) == ([1, 2], True, 0)
    assert body["cache_salt"].startswith("policy-v4-")


def test_raw_logprobs_are_refused_whether_the_server_says_so_or_not(fake: FakeVllm, url: str) -> None:
    fake.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        using(url, lambda engine: engine.health())
    fake.is_dev = False
    with pytest.raises(ConfigError, match="its logprobs are raw"):
        using(url, lambda engine: engine.health())


def test_another_dtype_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a server in bfloat16, it computes in float32"):
        using(url, lambda engine: engine.health(), dtype="bfloat16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_dev": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"max_lora_rank": 8, "loads_adapters": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"workers": ""}, "--worker-extension-cls"),
    ],
)
def test_a_server_whose_weights_cannot_change_says_why(
    fake: FakeVllm, url: str, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    for name, value in changes.items():
        setattr(fake, name, value)

    async def update(engine: VllmHttpEngine) -> None:
        assert engine.capabilities.update_kinds == ()
        assert (await engine.generate([1], PLAIN)).weight_version.tolist() == [0] * 6
        await engine.pause("wait")
        await engine.apply_weights(WeightUpdate(1, "full", staged(tmp_path / "v1")))

    with pytest.raises(ConfigError, match=reason):
        using(url, update)


def test_a_gpu_server_reloads_without_our_workers(fake: FakeVllm, url: str, tmp_path: Path) -> None:
    fake.workers, fake.device = "", "cuda"
    using(url, lambda engine: publish(engine, WeightUpdate(1, "full", staged(tmp_path / "v1"))))
    assert body_of(fake, "/collective_rpc")["method"] == "reload_weights"


def test_a_server_that_a_dead_client_left_paused_runs_again(fake: FakeVllm, url: str) -> None:
    fake.is_paused = True
    using(url, lambda engine: engine.health())
    assert not fake.is_paused


def test_control_can_be_elsewhere_than_samples_but_not_on_another_machine(fake: FakeVllm, url: str) -> None:
    with pytest.raises(ConfigError, match="control routes have no protection"):
        using(url, lambda engine: engine.health(), control_url="http://10.0.0.7:8000")
    control = FakeVllm(model_folder=fake.model_folder)
    # Labels are of the server that samples: naming the weights of another one must not go unnoticed.
    with served(control) as other, pytest.raises(EngineError, match="somebody else changes them"):
        using(url, lambda engine: engine.generate([1], PLAIN), control_url=other.url)
    assert "/update_weight_version" in control.paths()
    assert "/update_weight_version" not in fake.paths()


def test_tokens_after_an_update_are_of_the_new_weights_and_carry_its_version(url: str, tmp_path: Path) -> None:
    folders = [staged(tmp_path / f"v{version}") for version in (1, 2, 3)]

    async def run(engine: VllmHttpEngine) -> list[Completion]:
        completions = []
        for version, folder in enumerate(folders, start=1):
            await publish(engine, WeightUpdate(version, "full", folder))
            completions.append(await engine.generate([5], PLAIN))
        return completions

    for version, (folder, completion) in enumerate(zip(folders, using(url, run), strict=True), start=1):
        np.testing.assert_allclose(completion.logprobs, expected_logprobs(f"{folder} ", [5], completion), atol=1e-5)
        assert completion.weight_version.tolist() == [version] * 6


def test_no_two_updates_share_a_salt_even_of_one_version(fake: FakeVllm, url: str, tmp_path: Path) -> None:
    async def run(engine: VllmHttpEngine) -> None:
        for name in ("once", "again"):
            await publish(engine, WeightUpdate(1, "full", staged(tmp_path / name)))
            await engine.generate([5], PLAIN)

    using(url, run)
    bodies = [body for _, path, _, body in fake.seen if path == "/inference/v1/generate"]
    assert len({body["cache_salt"] for body in bodies[-2:]}) == 2


def test_probes_sample_the_new_weights_before_the_commit_and_others_wait(url: str, tmp_path: Path) -> None:
    folder = staged(tmp_path / "v1")

    async def run(engine: VllmHttpEngine) -> None:
        await engine.pause("wait")
        other = asyncio.create_task(engine.generate([5], PLAIN))
        await engine.apply_weights(WeightUpdate(1, "full", folder))
        with probing():
            seen = await engine.generate([5], PLAIN)
        np.testing.assert_allclose(seen.logprobs, expected_logprobs(f"{folder} ", [5], seen), atol=1e-5)
        assert not other.done()
        await engine.resume(1)
        assert (await other).weight_version.tolist() == [1] * 6

    using(url, run)


def test_an_update_that_failed_half_way_leaves_the_engine_paused_for_its_caller_to_poison(
    fake: FakeVllm, url: str, tmp_path: Path
) -> None:
    fake.fail["/reset_prefix_cache"] = (500, {"error": "no"})  # the weights are new, the cache is old

    async def run(engine: VllmHttpEngine) -> None:
        waiting = asyncio.create_task(engine.generate([5], PLAIN))
        await waiting
        await engine.pause("wait")
        waiting = asyncio.create_task(engine.generate([5], PLAIN))
        with pytest.raises(EngineError, match=r"weights of version 1 could not be loaded: .*HTTP 500"):
            await engine.apply_weights(WeightUpdate(1, "full", staged(tmp_path / "v1")))
        assert engine.weight_version == 0
        assert fake.is_paused
        engine.poison("version 1 was half applied")
        with pytest.raises(EnginePoisonedError, match="half applied"):
            await waiting
        assert (await engine.health()).is_poisoned

    using(url, run)
    assert fake.paths("/collective_rpc") == ["/collective_rpc"]


@pytest.mark.parametrize("shape", [(4, 3), None])
def test_a_folder_with_other_weights_never_reaches_the_server(
    fake: FakeVllm, url: str, tmp_path: Path, shape: tuple[int, int] | None
) -> None:
    folder = tmp_path / "wrong" if shape is None else staged(tmp_path / "wrong", shape)

    async def run(engine: VllmHttpEngine) -> None:
        await engine.pause("wait")
        with pytest.raises(EngineError, match=r"expected weights|of another shape, such as embed: expected \(4, 2\)"):
            await engine.apply_weights(WeightUpdate(1, "full", folder))

    using(url, run)
    assert fake.paths("/collective_rpc") == []


def test_somebody_elses_update_is_noticed(fake: FakeVllm, url: str) -> None:
    async def run(engine: VllmHttpEngine) -> None:
        await engine.generate([1], PLAIN)
        fake.label = "another-trainers-v9"
        with pytest.raises(EngineError, match="somebody else changes them"):
            await engine.generate([1], PLAIN)

    using(url, run)


def test_adapters_are_named_by_version_and_unloaded_when_no_request_needs_them(
    fake: FakeVllm, url: str, tmp_path: Path
) -> None:
    fake.max_lora_rank = 8

    async def run(engine: VllmHttpEngine) -> list[Completion]:
        assert engine.capabilities.update_kinds == ("adapter",)
        completions = []
        for version in (1, 2, 3):
            await publish(engine, WeightUpdate(version, "adapter", adapter(tmp_path / f"v{version}")))
            completions.append(await engine.generate([5], PLAIN))
            assert [name.rsplit("-", 1)[0] for name in fake.adapters] == [f"policy-v{version}"]
        return completions

    for version, completion in enumerate(using(url, run), start=1):
        expected = expected_logprobs(f" {tmp_path / f'v{version}'}", [5], completion)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        assert completion.weight_version.tolist() == [version] * 6


def test_a_folder_without_an_adapter_never_reaches_the_server(fake: FakeVllm, url: str, tmp_path: Path) -> None:
    fake.max_lora_rank = 8

    async def run(engine: VllmHttpEngine) -> None:
        await engine.pause("keep")
        with pytest.raises(EngineError, match="expected an adapter"):
            await engine.apply_weights(WeightUpdate(1, "adapter", tmp_path))

    using(url, run)
    assert fake.paths("/v1/load_lora_adapter") == []


@pytest.mark.parametrize("status", [500, 503, 429])
def test_samples_are_tried_again_under_a_new_request_id_and_the_same_seed(
    fake: FakeVllm, url: str, status: int
) -> None:
    async def run(engine: VllmHttpEngine) -> None:
        start = len(fake.seen)
        fake.fail["/inference/v1/generate"] = (status, {"error": "busy"})
        with pytest.raises(EngineError, match=rf"HTTP {status}.*\(3 attempts\)"):
            await engine.generate([1], PLAIN)
        bodies = [body for _, _, _, body in fake.seen[start:]]
        assert len({body["request_id"] for body in bodies}) == 3
        assert {body["sampling_params"]["seed"] for body in bodies} == {7}

    using(url, run, retries=RetrySettings(max_attempts=3))


def test_a_refused_sample_is_not_tried_again(fake: FakeVllm, url: str) -> None:
    async def run(engine: VllmHttpEngine) -> None:
        start = len(fake.seen)
        fake.fail["/inference/v1/generate"] = (400, {"error": "no"})
        with pytest.raises(EngineError, match="HTTP 400"):
            await engine.generate([1], PLAIN)
        assert len(fake.seen) == start + 1

    using(url, run)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_token_ids": [1, 1]}, "another prompt"),
        ({"model": "policy-v9"}, "expected a sample of 'policy'"),
        ({"token_ids": [64]}, r"expected token ids in \[0, 63\]"),
        ({"logprob": float("nan")}, "expected finite logprobs"),
        ({"logprob": 0.5}, "expected finite logprobs"),
        ({"finish_reason": "abort"}, "finish reason"),
        ({"weight_versions": None}, "expected choices"),
        ({"weight_versions": [{"version": "LABEL", "start": 1, "end": 2}]}, "weight versions of 1 tokens in a row"),
    ],
)
def test_an_answer_that_cannot_be_believed_is_never_a_sample(
    fake: FakeVllm, url: str, wrong: dict[str, Any], message: str
) -> None:
    async def run(engine: VllmHttpEngine) -> None:
        ids = wrong.get("token_ids", [3])
        choice = {
            "finish_reason": wrong.get("finish_reason", "length"),
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": ids[0], "logprob": wrong.get("logprob", -1.0)}]},
            "weight_versions": wrong.get("weight_versions", [{"version": "LABEL", "start": 0, "end": 1}]),
        }
        answer = {
            "model": wrong.get("model", "policy"),
            "prompt_token_ids": wrong.get("prompt_token_ids", [1]),
            "choices": [choice],
        }
        fake.fail["/inference/v1/generate"] = (200, json.loads(json.dumps(answer).replace("LABEL", fake.label)))
        with pytest.raises(EngineError, match=message):
            await engine.generate([1], SamplingParams(max_tokens=1, stop_token_ids=(), seed=0))

    using(url, run, retries=RetrySettings(max_attempts=1))


def test_requests_that_cannot_be_are_refused_before_they_are_sent(fake: FakeVllm, url: str) -> None:
    async def run(engine: VllmHttpEngine) -> None:
        start = len(fake.seen)
        with pytest.raises(EngineError, match=r"prompt tokens must be in \[0, 64\)"):
            await engine.generate([1, 64], PLAIN)
        with pytest.raises(ContextOverflowError, match="128"):
            await engine.generate([1] * 128, PLAIN)
        with pytest.raises(ConfigError, match="temperature"):
            await engine.generate([1], SamplingParams(max_tokens=1, stop_token_ids=(), seed=0, temperature=2.5))
        assert len(fake.seen) == start

    using(url, run)


def test_min_tokens_is_refused_where_the_server_would_withhold_more_than_was_asked(fake: FakeVllm, url: str) -> None:
    fake.skip_tokenizer_init = False

    async def run(engine: VllmHttpEngine) -> None:
        with pytest.raises(ConfigError, match="withholds end tokens of the model's own"):
            await engine.generate([1], SamplingParams(max_tokens=4, stop_token_ids=(2,), seed=0, min_tokens=1))

    using(url, run)


@pytest.mark.parametrize("has_generate", [True, False])
def test_a_schema_reaches_a_server_with_a_tokenizer(fake: FakeVllm, url: str, has_generate: bool) -> None:
    fake.skip_tokenizer_init, fake.has_generate = False, has_generate

    async def run(engine: VllmHttpEngine) -> bool:
        await engine.generate([1], SamplingParams(max_tokens=4, stop_token_ids=(2,), seed=0, json_schema="{}"))
        return engine.capabilities.structured_output

    assert using(url, run)
    path = "/inference/v1/generate" if has_generate else "/v1/completions"
    body = body_of(fake, path)
    assert (body["sampling_params"] if has_generate else body)["structured_outputs"] == {"json": "{}"}


def test_a_schema_is_refused_where_the_server_has_no_tokenizer(url: str) -> None:
    async def run(engine: VllmHttpEngine) -> bool:
        with pytest.raises(ConfigError, match="without a tokenizer"):
            await engine.generate([1], SamplingParams(max_tokens=4, stop_token_ids=(2,), seed=0, json_schema="{}"))
        return engine.capabilities.structured_output

    assert not using(url, run)


async def seen_a_request(fake: FakeVllm, path: str) -> None:
    before = fake.paths(path)
    while fake.paths(path) == before:  # noqa: ASYNC110 the stub is in another thread
        await asyncio.sleep(0)


async def disconnected(fake: FakeVllm, num_times: int) -> None:
    while fake.num_disconnects < num_times:  # noqa: ASYNC110 the stub is in another thread
        await asyncio.sleep(0)


def test_abort_deadline_and_close_hang_up_on_the_server(fake: FakeVllm, url: str) -> None:
    path = "/inference/v1/generate"

    async def run(engine: VllmHttpEngine) -> None:
        fake.hang.add(path)
        calls = []
        for _ in range(2):
            calls.append(asyncio.create_task(engine.generate([1], PLAIN, session_id=f"s{len(calls)}")))
            await seen_a_request(fake, path)
        await engine.abort("s0")
        with pytest.raises(EngineError, match="session s0: the call was aborted"):
            await calls[0]
        await disconnected(fake, 1)
        late = asyncio.create_task(engine.generate([1], PLAIN, deadline_seconds=60.0))
        await seen_a_request(fake, path)
        move_clock(asyncio.get_running_loop(), 60.0)
        with pytest.raises(EngineTimeoutError, match="60 seconds"):
            await late
        await disconnected(fake, 2)
        assert not calls[1].done()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await calls[1]
        await disconnected(fake, 3)

    using(url, run)


def test_health_says_why_the_server_is_not_well(fake: FakeVllm, url: str) -> None:
    async def run(engine: VllmHttpEngine) -> None:
        assert (await engine.health()).is_alive
        fake.fail["/health"] = (503, None)
        health = await engine.health()
        assert not health.is_alive
        assert health.reason is not None
        assert "HTTP 503" in health.reason

    using(url, run)


def test_nothing_that_answers_is_an_error_that_names_the_url() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/v1/models: connection failed"):
        using("http://127.0.0.1:9", lambda engine: engine.health(), retries=RetrySettings(max_attempts=2))


def test_a_key_that_is_not_set_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KEY", raising=False)
    with pytest.raises(ConfigError, match="VLLM_KEY"):
        using(url, lambda engine: engine.health(), api_key_env="VLLM_KEY")

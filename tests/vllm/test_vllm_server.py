"""vLLM's own server, started by `gspo-gym serve` or by a user, and the engine that speaks to it.

One server for adapters; the others are shared with other files, but for a user's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import http.client
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from agreement import Turn, nudge, plain_logprobs, play_many, publish, worst_gap

from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.vllm.http import VllmHttpEngine, VllmHttpSettings
from gspo_gym.engine.vllm.server import VllmServer
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.errors import ConfigError, EngineError, EngineTimeoutError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_policy
from gspo_gym.types import Completion, FinishReason

TOLERANCE = 1e-4  # nats, in float32
LONG = SamplingParams(max_tokens=1500, stop_token_ids=(), seed=0)
SHORT = SamplingParams(max_tokens=10, stop_token_ids=(), seed=1)
ADAPTED = "tiny:qwen3-128"

Connect = Callable[[str], VllmHttpEngine]
Stage = Callable[[Policy], WeightUpdate]


@pytest.fixture(scope="module")
def connect(loop_thread: Any, policy: Policy) -> Iterator[Connect]:
    """`connect(url)` gives an engine; closed after the module."""
    engines: list[VllmHttpEngine] = []

    def start(url: str) -> VllmHttpEngine:
        vocab_size = policy.model.config.vocab_size
        engines.append(loop_thread.run(VllmHttpEngine.start(VllmHttpSettings(url, vocab_size, dtype="float32"))))
        return engines[-1]

    yield start
    for engine in engines:
        loop_thread.run(engine.close())


@pytest.fixture(scope="module")
def engine(server: VllmServer, connect: Connect) -> VllmHttpEngine:
    """Takes whole models; its weights are what the last test left."""
    return connect(server.url)


@pytest.fixture(scope="module")
def adapter_engine(connect: Connect, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHttpEngine]:
    """Takes adapters of `ADAPTED`; its server was started by the command, and ends as that is told to."""
    model_folder = tmp_path_factory.mktemp("adapted") / "model"
    save_policy(load_policy(ADAPTED, seed=1), model_folder)
    command = [sys.executable, "-m", "gspo_gym.cli", "serve", str(model_folder), "--engine", "vllm"]
    options = "--port 0 --dtype float32 --max-model-len 2048 --max-num-seqs 32 --kv-cache-gib 0.25 --enforce-eager"
    with subprocess.Popen(
        [*command, *options.split(), "--max-lora-rank", "8", "--max-loras", "2"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"serving {model_folder} with vLLM at http://127.0.0.1:"), line
        url = line.split()[-1]
        yield connect(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)


@pytest.fixture
def stage(tmp_path: Path, engine: VllmHttpEngine) -> Stage:
    """`stage(policy)` gives its weights as the engine's next version."""
    numbers = itertools.count()

    def save(policy: Policy) -> WeightUpdate:
        folder = tmp_path / str(next(numbers))
        save_policy(policy, folder)
        return WeightUpdate(engine.weight_version + 1, "full", folder)

    return save


@pytest.fixture
def learner(policy: Policy, engine: VllmHttpEngine, stage: Stage, loop_thread: Any) -> Policy:
    """A copy of the policy, which the engine holds when the test begins."""
    copied = Policy(model=copy.deepcopy(policy.model), tokenizer=policy.tokenizer, base=policy.base)
    loop_thread.run(publish(engine, stage(copied)))
    return copied


async def running(engine: VllmHttpEngine, num_calls: int) -> list[asyncio.Task[Completion]]:
    """Long calls, each with some tokens and far from its end.

    Now and then the server (0.32, on a processor) answers nobody until it has sampled all; then they begin again.
    """
    once = httpx.Limits(max_keepalive_connections=0)  # a server that answered nobody meanwhile closes idle connections
    async with httpx.AsyncClient(
        base_url=engine._settings.url, trust_env=False, verify=False, limits=once, timeout=60
    ) as server:
        for _ in range(10):
            before = await metric(server, "vllm:generation_tokens_total")
            calls = [
                asyncio.create_task(engine.generate([72, number], LONG, session_id=f"long-{number}"))
                for number in range(num_calls)
            ]
            while not any(call.done() for call in calls):
                num_running = await metric(server, "vllm:num_requests_running")
                num_sampled = await metric(server, "vllm:generation_tokens_total") - before
                # More, if it has not yet heard of some ends.
                if num_running >= num_calls and num_sampled >= 10 * num_calls and not any(c.done() for c in calls):
                    return calls
            await asyncio.gather(*calls)
    raise AssertionError("ten times, the calls had ended before the server said that it samples them")


async def metric(server: httpx.AsyncClient, name: str) -> float:
    """A number that the server counts, over all its models; 0 before it has counted anything."""
    lines = (await server.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


async def num_known(engine: VllmHttpEngine) -> int:
    """Requests that the server had not forgotten; it has now, for the route that tells gives them up."""
    answer = await engine._client.post("/abort_requests", {})
    return int(answer["aborted"])


def test_our_server_offers_everything_that_training_needs(engine: VllmHttpEngine) -> None:
    found = engine.capabilities
    assert (found.update_kinds, found.pause_modes, found.max_model_len) == (("full",), ("wait", "keep"), 2048)
    assert (found.logprob_mode, found.reuses_prefixes, found.has_checksums) == ("processed", True, True)
    assert engine.handshake.route.path == "/inference/v1/generate"
    assert engine.handshake.why_no_updates is None


def test_logprobs_agree_with_a_plain_forward_before_and_after_updates(
    engine: VllmHttpEngine,
    learner: Policy,
    stage: Stage,
    loop_thread: Any,
    record_property: Callable[[str, object], None],
) -> None:
    gaps = [worst_gap(learner.model, loop_thread.run(play_many(engine, range(4))))]
    for number in range(5):
        nudge(learner.model, number)
        stale = loop_thread.run(play_many(engine, range(4)))
        update = stage(learner)
        loop_thread.run(publish(engine, update))
        turns = loop_thread.run(play_many(engine, range(4)))  # the same prompts: what is cached of them is stale
        assert all((turn.completion.weight_version == update.version).all() for turn in turns)
        gaps.append(worst_gap(learner.model, turns))
        assert worst_gap(learner.model, stale) > 10 * TOLERANCE  # an update that was skipped would be seen
    record_property("worst_gap", max(gaps))
    assert max(gaps) <= TOLERANCE


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=24, stop_token_ids=(), seed=5),
        SamplingParams(max_tokens=24, stop_token_ids=(), seed=5, temperature=0.0),
        SamplingParams(max_tokens=24, stop_token_ids=tuple(range(0, 256, 2)), seed=5, min_tokens=4),
        SamplingParams(max_tokens=24, stop_token_ids=(), seed=5, temperature=0.7, top_p=0.8, top_k=20, min_p=0.05),
    ],
    ids=["plain", "greedy", "stops", "truncated"],
)
def test_equal_seeds_sample_equal_tokens_and_stops_are_the_requests_own(
    engine: VllmHttpEngine, sampling: SamplingParams, loop_thread: Any
) -> None:
    async def twice() -> tuple[Completion, Completion]:
        return await engine.generate([72, 105], sampling), await engine.generate([72, 105], sampling)

    first, again = loop_thread.run(twice())
    assert first.token_ids.tolist() == again.token_ids.tolist()
    if sampling.stop_token_ids:
        assert first.finish_reason is FinishReason.STOP
        assert first.token_ids[-1] % 2 == 0
        assert len(first.token_ids) > 4  # none of the first four tokens stops
    else:
        assert (first.finish_reason, len(first.token_ids)) == (FinishReason.LENGTH, 24)


def test_end_tokens_of_the_model_are_neither_obeyed_nor_withheld(
    engine: VllmHttpEngine, learner: Policy, loop_thread: Any
) -> None:
    """With `min_tokens` a plain forward, in which nothing is withheld but the request's stops, still agrees."""
    sampling = SamplingParams(max_tokens=64, stop_token_ids=(7,), seed=9, min_tokens=64)
    completion = loop_thread.run(engine.generate([72, 105], sampling))
    tokens = completion.token_ids.tolist()
    assert len(tokens) == 64
    probs = np.exp([plain_logprobs(learner.model, [72, 105, *tokens[:k]], [7])[0] for k in range(64)])
    expected = plain_logprobs(learner.model, [72, 105], tokens) - np.log1p(-probs)
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


def test_frozen_calls_go_on_under_the_new_weights_and_each_token_says_which(
    engine: VllmHttpEngine, learner: Policy, stage: Stage, loop_thread: Any
) -> None:
    old = copy.deepcopy(learner.model)
    nudge(learner.model, 20)
    update = stage(learner)

    async def update_in_flight() -> list[Turn]:
        calls = await running(engine, 4)
        await publish(engine, update, "keep")
        return [Turn([72, number], await call) for number, call in enumerate(calls)]

    for turn in loop_thread.run(update_in_flight()):
        versions = turn.completion.weight_version
        num_old = int((versions == update.version - 1).sum())
        assert 0 < num_old < LONG.max_tokens
        assert versions.tolist() == [update.version - 1] * num_old + [update.version] * (LONG.max_tokens - num_old)
        for model, tokens in ((old, slice(0, num_old)), (learner.model, slice(num_old, LONG.max_tokens))):
            expected = plain_logprobs(model, turn.prompt, turn.completion.token_ids.tolist())
            np.testing.assert_allclose(turn.completion.logprobs[tokens], expected[tokens], atol=TOLERANCE)


def test_a_folder_with_other_weights_fails_the_update_and_reaches_no_worker(
    engine: VllmHttpEngine, learner: Policy, stage: Stage, tmp_path: Path, loop_thread: Any
) -> None:
    update = stage(learner)
    other = load_policy("tiny:qwen3-128", seed=1)
    save_policy(other, tmp_path / "other")

    async def try_them() -> Completion:
        for folder in (tmp_path / "other", tmp_path / "nothing"):
            await engine.pause("wait")
            with pytest.raises(EngineError, match=f"weights of version {update.version} could not be loaded"):
                await engine.apply_weights(WeightUpdate(update.version, "full", folder))
            await engine.resume(engine.weight_version)
        return await engine.generate([72], SHORT)

    completion = loop_thread.run(try_them())
    expected = plain_logprobs(learner.model, [72], completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


def test_checksums_change_with_the_weights_and_only_with_them(
    engine: VllmHttpEngine, learner: Policy, stage: Stage, loop_thread: Any
) -> None:
    async def checksums_after(update: WeightUpdate) -> dict[str, str]:
        await publish(engine, update)
        return dict(await engine.checksums())

    first = loop_thread.run(checksums_after(stage(learner)))
    again = loop_thread.run(checksums_after(stage(learner)))
    nudge(learner.model, 30)
    changed = loop_thread.run(checksums_after(stage(learner)))
    assert first == again
    assert first.keys() == changed.keys()
    assert all(first[name] != changed[name] for name in first)


def test_an_abort_a_deadline_and_a_cancelled_call_free_the_server(engine: VllmHttpEngine, loop_thread: Any) -> None:
    async def give_up() -> int:
        calls = await running(engine, 2)
        assert await num_known(engine) == 2  # the server gives them up; the engine asks again
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        calls = await running(engine, 2)
        await engine.abort("long-0")
        with pytest.raises(EngineError, match="session long-0: the call was aborted"):
            await calls[0]
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        with pytest.raises(EngineTimeoutError):
            await engine.generate([72], LONG, deadline_seconds=0.05)
        for _ in range(3):  # meanwhile it hears of those that hung up; the rest of their tokens would take longer
            await engine.generate([72], SHORT)
        return await num_known(engine)

    assert loop_thread.run(give_up()) == 0


def test_a_prompt_outside_the_vocabulary_never_reaches_the_server_which_would_die_of_it(
    engine: VllmHttpEngine, policy: Policy, loop_thread: Any
) -> None:
    with pytest.raises(EngineError, match="prompt tokens must be in"):
        loop_thread.run(engine.generate([72, policy.model.config.vocab_size], SHORT))
    assert loop_thread.run(engine.health()).is_alive


def test_a_port_that_is_taken_is_refused(server: VllmServer, model_folder: Path) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        VllmServer(VllmSettings(str(model_folder), max_model_len=2048), port=port).start()


def test_adapters_agree_with_a_plain_forward_and_calls_in_flight_keep_theirs(
    adapter_engine: VllmHttpEngine, tmp_path: Path, loop_thread: Any, record_property: Callable[[str, object], None]
) -> None:
    adapted = adapt_policy(load_policy(ADAPTED, seed=1), LoraSettings(r=4, alpha=8), seed=0)
    assert adapter_engine.capabilities.update_kinds == ("adapter",)
    gaps = [worst_gap(adapted.model, loop_thread.run(play_many(adapter_engine, range(3))))]
    for version in range(1, 4):  # one more than there are places
        before = copy.deepcopy(adapted.model)
        nudge(adapted.model, version, scale=0.05)
        save_policy(adapted, tmp_path / f"policy-v{version}")
        update = WeightUpdate(version, "adapter", tmp_path / f"policy-v{version}")

        async def update_in_flight(update: WeightUpdate) -> tuple[Completion, list[Turn]]:
            (call,) = await running(adapter_engine, 1)
            await publish(adapter_engine, update, "keep")
            return await call, await play_many(adapter_engine, range(3))

        kept, turns = loop_thread.run(update_in_flight(update))
        assert (kept.weight_version == version - 1).all()
        assert all((turn.completion.weight_version == version).all() for turn in turns)
        gaps += [worst_gap(before, [Turn([72, 0], kept)]), worst_gap(adapted.model, turns)]
        assert worst_gap(before, turns) > 10 * TOLERANCE  # another adapter would be seen
    cards = loop_thread.run(adapter_engine._client.get("/v1/models"))["data"]
    assert [card["id"].rsplit("-", 1)[0] for card in cards if card["parent"]] == ["policy-v3"]
    record_property("worst_gap", max(gaps))
    assert max(gaps) <= TOLERANCE


@pytest.mark.nightly
def test_a_server_with_raw_logprobs_is_refused(raw_server: VllmServer, connect: Connect) -> None:
    with pytest.raises(ConfigError, match="its logprobs are raw"):
        connect(raw_server.url)


@pytest.mark.nightly
def test_a_users_own_server_is_used_for_what_it_can(
    model_folder: Path, policy: Policy, connect: Connect, tmp_path: Path, loop_thread: Any
) -> None:
    """Started plainly: with a tokenizer, without the token route and without development mode."""
    path = tmp_path / "vllm.sock"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder)]
    options = f"--uds {path} --dtype float32 --max-model-len 512 --enforce-eager --kv-cache-memory-bytes 250000000"
    env = {name: value for name, value in os.environ.items() if name != "VLLM_SERVER_DEV_MODE"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options.split(), "--logprobs-mode", "processed_logprobs", "--served-model-name", "mine"],
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    try:
        await_health(process, path, tmp_path / "log")
        engine = connect(f"unix:{path}")
        assert engine.capabilities.update_kinds == ()
        assert "VLLM_SERVER_DEV_MODE=1" in str(engine.handshake.why_no_updates)
        assert engine.handshake.route.path == "/v1/completions"
        turns = loop_thread.run(play_many(engine, range(2)))
        assert worst_gap(policy.model, turns) <= TOLERANCE
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def await_health(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    while True:
        assert process.poll() is None, log.read_text()
        connection = http.client.HTTPConnection("localhost", timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(path))
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        time.sleep(0.2)  # it says nowhere else when it is ready

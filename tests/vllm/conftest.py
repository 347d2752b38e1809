"""For the tests with vLLM itself, on the CPU: an event loop that outlives a test, and engines that several tests share.

`make vllm` runs these tests with an interpreter that has vLLM; every other stage leaves this folder out (`--ignore` in
pyproject.toml). An engine takes ten seconds to start and belongs to the loop that it was started in, so there is one
loop, in a thread of its own, and an engine or a server for each configuration, shared by the whole session. A test that
breaks an engine starts its own. Without the tests marked nightly at most seven are started: a test that needs one more
is nightly, or takes the place of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from agreement import publish
from tiny_vllm import SETTINGS, START_SECONDS

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.vllm import transfer
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.settings import VllmSettings, environment
from gspo_gym.policy.load import Policy, load_policy, save_policy

T = TypeVar("T")

CHUNK_BYTES = 50_000  # the tiny model's 24 tensors are then 9 chunks, the embeddings a larger one by themselves

# vLLM and torch warn when they are imported and started, in code that nobody here can change. Each entry is one kind of
# one origin; all other warnings are errors, as everywhere.
IMPORT_WARNINGS = (
    r"ignore:`torch\.jit\.:DeprecationWarning",
    r"ignore:`torch\.distributed\.reduce_op` is deprecated:FutureWarning",
    r"ignore:.*Unclosed context <zmq:ResourceWarning",  # of the handshake with the engine's process
    r"ignore:.*Unclosed context <zmq:pytest.PytestUnraisableExceptionWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in IMPORT_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


class LoopThread:
    """An event loop in a thread of its own; engines live in it, and tests hand it coroutines."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="vllm-tests")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_seconds: float = 300.0) -> T:
        """The coroutine's result; raises what it raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_seconds)

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


StartEngine = Callable[..., VllmEngine]


@pytest.fixture(autouse=True, scope="session")
def small_chunks() -> Iterator[None]:
    """Weights that are handed over go in many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "CHUNK_BYTES", CHUNK_BYTES)
        yield


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def policy() -> Policy:
    """A tiny Qwen3, as it was before anything was learned; tests copy it before they change it."""
    return load_policy("tiny:qwen3-64", seed=1)


@pytest.fixture(scope="session")
def model_folder(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy as files."""
    folder = tmp_path_factory.mktemp("model") / "policy"
    save_policy(policy, folder)
    return folder


@pytest.fixture(scope="session")
def start_engine(loop_thread: LoopThread, model_folder: Path) -> Iterator[StartEngine]:
    """`start_engine(**settings)` starts vLLM with `SETTINGS` but for these; closed after the session, with all of its
    processes."""
    others = set(multiprocessing.active_children())
    engines: list[VllmEngine] = []

    def start(**changes: Any) -> VllmEngine:
        settings = VllmSettings(**{"model": str(model_folder), **SETTINGS, **changes})
        with environment({"CXX": "/no/compiler"}):  # none is needed
            engines.append(loop_thread.run(VllmEngine.start(settings)))
        return engines[-1]

    yield start
    for engine in engines:
        loop_thread.run(engine.close())
    for process in set(multiprocessing.active_children()) - others:
        process.join(60)  # what had to be killed ends a moment later on a busy machine
        assert not process.is_alive(), process


@pytest.fixture(scope="session")
def full_engine(start_engine: StartEngine) -> VllmEngine:
    """Takes whole models, by files or handed over. Its version and weights are what the last test left."""
    return start_engine(transfer="shared_memory")


@pytest.fixture(scope="session")
def adapter_engine(start_engine: StartEngine) -> VllmEngine:
    """Takes LoRA adapters of rank 8 at most."""
    return start_engine(max_lora_rank=8, max_loras=3)


@contextlib.contextmanager
def vllms_own_server(model_folder: Path, log: Path, *options: str) -> Iterator[str]:
    """Yield the base URL of vLLM's own server, as its user starts it, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = "--served-model-name policy --dtype float32 --enforce-eager --kv-cache-memory-bytes 250000000"
    # Whole prompts in one step: the CPU's generator cannot take draws back.
    common += f" --max-model-len 4096 --no-enable-chunked-prefill --max-num-batched-tokens 4096 --port {port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *common.split(), *options], stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)  # it says nowhere else when it is ready
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def _is_healthy(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@pytest.fixture(scope="session")
def text_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Has the tokenizer, so that it speaks in text and obeys schemas."""
    log = tmp_path_factory.mktemp("text") / "log"
    with vllms_own_server(model_folder, log, "--logprobs-mode", "processed_logprobs") as url:
        yield url


@pytest.fixture(scope="session")
def raw_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Gives logprobs before the temperature, as vLLM does by itself."""
    with vllms_own_server(model_folder, tmp_path_factory.mktemp("raw") / "log") as url:
        yield url


@pytest.fixture(scope="session")
def save(
    full_engine: VllmEngine, policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Any], WeightUpdate]:
    """`save(model)` stages a model as the engine's next version."""
    numbers = itertools.count()

    def stage(model: Any) -> WeightUpdate:
        folder = tmp_path_factory.mktemp("staged") / str(next(numbers))
        save_policy(Policy(model=model, tokenizer=policy.tokenizer, base=policy.base), folder)
        return WeightUpdate(full_engine.weight_version + 1, "full", folder)

    return stage


@pytest.fixture
def model(policy: Policy, full_engine: VllmEngine, save: Callable[[Any], WeightUpdate], loop_thread: LoopThread) -> Any:
    """A copy of the policy's model, which the engine holds when the test begins."""
    model = copy.deepcopy(policy.model)
    loop_thread.run(publish(full_engine, save(model)))
    return model

"""Weights handed to vLLM in memory: agreement with the learner, versions, and failures at every point of a transfer.

On a processor by "shared_memory"; the same agreement is asked of "ipc" on a GPU, and of "nccl" on two.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agreement import Turn, nudge, play, play_many, publish, worst_gap
from tiny_vllm import SETTINGS
from transformers import Qwen3ForCausalLM

from gspo_gym.config.build.engines import learner_score
from gspo_gym.engine.base import SamplingParams, WeightUpdate
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.errors import EngineError, EnginePoisonedError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.attestation import Canary, canary_prompts
from gspo_gym.policy.load import Policy, adapt_policy, save_policy
from gspo_gym.policy.staging import Handover
from gspo_gym.policy.weight_sync import Target, WeightSync
from gspo_gym.types import Completion

TOLERANCE = 1e-4  # nats, in float32
NUM_GPUS = torch.cuda.device_count()
# Each way, and whether the head is the embeddings; the first is that of the engine that other tests share.
CASES = [
    ("shared_memory", True),
    pytest.param(("shared_memory", False), marks=pytest.mark.nightly),
    pytest.param(("ipc", False), marks=pytest.mark.skipif(NUM_GPUS < 1, reason="ipc needs a GPU")),
    pytest.param(("nccl", False), marks=pytest.mark.skipif(NUM_GPUS < 2, reason="nccl needs two GPUs")),
]
POINTS = {  # of a transfer, and what is then said to have failed
    "start": "while a weight update is already active",
    "chunk": "No such file or directory: '/proc/self/fd/nothing'",
    "kill": "EngineDeadError: vLLM ended before it had answered",
}


@pytest.fixture(scope="module", params=CASES)
def case(request: Any, policy: Policy) -> tuple[str, Policy]:
    """A way of transfer, and a policy whose head is its embeddings' or its own, where the transfer finds it."""
    transfer, is_tied = request.param
    config = copy.deepcopy(policy.model.config)
    config.tie_word_embeddings = is_tied
    model = Qwen3ForCausalLM(config).eval().to("cpu" if transfer == "shared_memory" else "cuda")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    return transfer, Policy(model=model, tokenizer=policy.tokenizer, base=policy.base)


@pytest.fixture(scope="module")
def engine(
    case: tuple[str, Policy], request: Any, start_engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    """Has the shapes of the case's policy; its version and weights are what the last test left."""
    transfer, policy = case
    if policy.model.config.tie_word_embeddings:
        shared: VllmEngine = request.getfixturevalue("full_engine")
        return shared
    folder = tmp_path_factory.mktemp("began") / "policy"
    save_policy(policy, folder)
    device_ids = {"device_ids": (1,)} if transfer == "nccl" else {}
    started: VllmEngine = start_engine(model=str(folder), transfer=transfer, **device_ids)
    return started


def next_update(engine: VllmEngine, policy: Policy) -> WeightUpdate:
    return Handover(policy, dtype="float32").stage(engine.weight_version + 1, "transfer")


def on_processor(model: Any) -> Any:
    return model if model.device.type == "cpu" else copy.deepcopy(model).to("cpu")


@pytest.mark.parametrize("num_updates", [3, pytest.param(10, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("is_adapter", [False, True])
def test_logprobs_agree_with_a_plain_forward_before_and_after_transfers(
    is_adapter: bool, num_updates: int, case: tuple[str, Policy], engine: VllmEngine, loop_thread: Any
) -> None:
    """Of the whole model, and of a LoRA that is merged on its way."""
    policy = Policy(model=copy.deepcopy(case[1].model), tokenizer=case[1].tokenizer, base=case[1].base)
    if is_adapter:
        policy = adapt_policy(policy, LoraSettings(r=4, alpha=8), seed=0)
    loop_thread.run(publish(engine, next_update(engine, policy)))
    gaps = [worst_gap(on_processor(policy.model), loop_thread.run(play_many(engine, range(4))))]
    for number in range(num_updates):
        before = on_processor(copy.deepcopy(policy.model))
        nudge(policy.model, number, scale=0.05)
        update = next_update(engine, policy)
        loop_thread.run(publish(engine, update))
        turns = loop_thread.run(play_many(engine, range(4)))  # the same prompts: what is cached of them is stale
        assert all((turn.completion.weight_version == update.version).all() for turn in turns)
        gaps.append(worst_gap(on_processor(policy.model), turns))
        assert worst_gap(before, turns) > TOLERANCE  # the update was one
    print(f"{case[0]}: largest difference: {max(gaps):.2e} nats")
    assert max(gaps) <= TOLERANCE


def test_kept_calls_go_on_under_the_new_weights_and_drained_ones_end_under_the_old(
    case: tuple[str, Policy], engine: VllmEngine, loop_thread: Any
) -> None:
    policy = Policy(model=copy.deepcopy(case[1].model), tokenizer=case[1].tokenizer, base=case[1].base)
    loop_thread.run(publish(engine, next_update(engine, policy)))

    async def update_in_flight(mode: Any) -> list[Completion]:
        sampling = [SamplingParams(max_tokens=400, stop_token_ids=(), seed=seed) for seed in range(3)]
        calls = [asyncio.create_task(engine.generate([72, seed], each)) for seed, each in enumerate(sampling)]
        await engine.generate([72], SamplingParams(max_tokens=10, stop_token_ids=(), seed=0))  # they have some tokens
        await publish(engine, next_update(engine, policy), mode)
        return list(await asyncio.gather(*calls))

    version = engine.weight_version
    nudge(policy.model, 20)
    for completion in loop_thread.run(update_in_flight("wait")):
        assert set(completion.weight_version.tolist()) == {version}
    old = on_processor(copy.deepcopy(policy.model))
    nudge(policy.model, 21)
    for seed, completion in enumerate(loop_thread.run(update_in_flight("keep"))):
        versions = completion.weight_version.tolist()
        num_old = versions.count(version + 1)
        assert 0 < num_old < 400
        assert versions == [version + 1] * num_old + [version + 2] * (400 - num_old)
        early = replace(
            completion,
            token_ids=completion.token_ids[:num_old],
            logprobs=completion.logprobs[:num_old],
            weight_version=completion.weight_version[:num_old],
        )
        assert worst_gap(old, [Turn([72, seed], early)]) <= TOLERANCE
        late = replace(
            completion,
            token_ids=completion.token_ids[num_old:],
            logprobs=completion.logprobs[num_old:],
            weight_version=completion.weight_version[num_old:],
        )
        prompt = [72, seed, *completion.token_ids[:num_old].tolist()]
        assert worst_gap(on_processor(policy.model), [Turn(prompt, late)]) <= TOLERANCE


class Partial:
    """All of a policy's tensors but one."""

    def __init__(self, whole: Any, missing: str) -> None:
        self.whole, self.missing, self.device = whole, missing, whole.device

    def metadata(self) -> list[Any]:
        return [meta for meta in self.whole.metadata() if meta.name != self.missing]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in self.whole if name != self.missing)


def test_a_model_that_is_not_whole_is_refused_before_any_of_it_is_sent(
    case: tuple[str, Policy], engine: VllmEngine, loop_thread: Any
) -> None:
    """vLLM would keep the old values of what is missing. The engine stays paused, and can be given the right ones."""
    policy = Policy(model=copy.deepcopy(case[1].model), tokenizer=case[1].tokenizer, base=case[1].base)
    nudge(policy.model, 30)
    right = next_update(engine, policy)
    missing = "model.layers.1.input_layernorm.weight"
    loop_thread.run(engine.pause("wait"))
    with pytest.raises(EngineError, match=rf"1 are missing, .* such as {missing}: expected \(64,\), got None"):
        loop_thread.run(engine.apply_weights(replace(right, tensors=Partial(right.tensors, missing))))
    loop_thread.run(engine.apply_weights(right))
    loop_thread.run(engine.resume(right.version))
    assert worst_gap(on_processor(policy.model), loop_thread.run(play(engine, 1))) <= TOLERANCE


class Sabotaged:
    """A running `AsyncLLM` whose workers are made to fail at one point of the next transfer, truly."""

    def __init__(self, llm: Any, core: Any) -> None:
        self._llm, self._core = llm, core
        self._num_chunks = 0
        self.point: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def start_weight_update(self) -> None:
        if self.point == "start":
            await self._llm.start_weight_update()  # one is under way, then
        await self._llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        self._num_chunks += self.point is not None
        if self.point == "chunk" and self._num_chunks == 3:
            request.update_info["path"] = "/proc/self/fd/nothing"
        if self.point == "kill" and self._num_chunks == 3:
            workers = psutil.Process(self._core.pid).children()
            for process in (self._core, *workers):
                process.kill()
        await self._llm.update_weights(request)


def held_chunks() -> list[str]:
    """Pieces of memory that this process holds for workers to open, and files of ours in the memory's file system.

    Folders there are staged weights, of this program or of tests beside it, and no transfer's.
    """
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    named = [os.readlink(link) for link in links if link.is_symlink()]
    files = [path.name for path in Path("/dev/shm").iterdir() if not path.is_dir()]
    return [name for name in (*named, *files) if "gspo_gym" in name]


@pytest.mark.nightly
def test_a_transfer_that_fails_poisons_and_the_rebuilt_engine_has_the_weights(
    policy: Policy, model_folder: Path, loop_thread: Any
) -> None:
    """At three points, one after another, an engine each; nothing is left behind in memory."""
    settings = VllmSettings(str(model_folder), **SETTINGS, transfer="shared_memory")
    learner = Policy(model=copy.deepcopy(policy.model), tokenizer=policy.tokenizer, base=policy.base)
    before, made = held_chunks(), []

    async def make() -> VllmEngine:
        others = {process.pid for process in multiprocessing.active_children()}
        engine = await VllmEngine.start(settings)
        (core,) = [process for process in multiprocessing.active_children() if process.pid not in others]
        assert engine._transfer is not None
        saboteur = engine._transfer._client._llm = Sabotaged(engine._llm, core)
        made.append((engine, saboteur))
        return engine

    async def main() -> None:
        engine = RebuildableEngine(await make(), make)
        reasons: list[str] = []
        sync = WeightSync(
            [Target(engine, engine.rebuild)],
            kind="transfer",
            staging=Handover(learner, dtype="float32"),
            canary=Canary(canary_prompts(256, 512), learner_score(learner.model, 1.0)),
            verify_every_k=1,
            on_event=lambda name, values: reasons.append(values["reason"]),
        )
        for version, (point, reason) in enumerate(POINTS.items(), start=1):
            nudge(learner.model, version)
            failing, made[-1][1].point = made[-1][0], point
            await sync.publish(version)
            assert len(reasons) == version
            assert reason in reasons[-1]
            with pytest.raises(EnginePoisonedError):
                await failing.generate([72], SamplingParams(max_tokens=1, stop_token_ids=(), seed=0))
            assert failing.weight_version == version - 1
            turns = await play(engine, version)
            assert {int(v) for turn in turns for v in turn.completion.weight_version} == {version}
            assert worst_gap(learner.model, turns) <= TOLERANCE
            assert held_chunks() == before
        await engine.close()

    loop_thread.run(main(), timeout_seconds=900)

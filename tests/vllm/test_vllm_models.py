"""Exported models in vLLM: its logprobs are the learner's; and vLLM behind `gspo-gym models serve`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from agreement import nudge, play_many, publish, worst_gap

from gspo_gym.engine.base import WeightUpdate
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.learning.saved import copy_state
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.export import export
from gspo_gym.policy.load import Policy, adapt_policy, load_policy

TOLERANCE = 1e-5  # nats, in float32 on a processor


class Learner:
    """Nothing to resume."""

    def copy_state(self) -> Callable[[Path], None]:
        return copy_state({})

    def counters(self) -> dict[str, int]:
        return {}


@pytest.fixture(scope="module")
def adapted() -> Policy:
    """The tiny policy with an adapter that changes much."""
    policy = adapt_policy(load_policy("tiny:qwen3-64", seed=1), LoraSettings(r=4, alpha=8), seed=0)
    nudge(policy.model, 7, scale=0.1)
    return policy


@pytest.fixture(scope="module")
def checkpoint(adapted: Policy, tmp_path_factory: pytest.TempPathFactory) -> str:
    store = CheckpointStore(tmp_path_factory.mktemp("run"))
    return str(store.save(3, policy=adapted, learner=Learner(), trainer_state={}))


def test_a_peft_folder_in_vllm_has_the_learners_logprobs(
    adapter_engine: VllmEngine, adapted: Policy, checkpoint: str, tmp_path: Path, loop_thread: Any
) -> None:
    before = loop_thread.run(play_many(adapter_engine, range(3)))
    export(checkpoint, tmp_path / "out", describe=lambda _: "")
    update = WeightUpdate(adapter_engine.weight_version + 1, "adapter", tmp_path / "out")
    loop_thread.run(publish(adapter_engine, update))
    gap = worst_gap(adapted.model, loop_thread.run(play_many(adapter_engine, range(3))))
    print(f"PEFT folder in vLLM: {gap:.1e} nats")
    assert gap < TOLERANCE
    assert worst_gap(adapted.model, before) > 1000 * TOLERANCE  # the base without it would be seen


@pytest.mark.nightly
def test_a_merged_folder_in_vllm_has_the_learners_logprobs(
    start_engine: Any, adapted: Policy, checkpoint: str, tmp_path: Path, loop_thread: Any
) -> None:
    export(checkpoint, tmp_path / "out", describe=lambda _: "", is_merged=True)
    engine = start_engine(model=str(tmp_path / "out"))
    gap = worst_gap(adapted.model, loop_thread.run(play_many(engine, range(3))))
    print(f"merged folder in vLLM: {gap:.1e} nats")
    assert gap < TOLERANCE


@pytest.fixture
def url(checkpoint: str) -> Iterator[str]:
    """`gspo-gym models serve --engine vllm` of the checkpoint with its adapter."""
    words = ["models", "serve", checkpoint, "--engine", "vllm", "--name", "lora", "--port", "0"]
    words += ["--max-model-len", "512", "--kv-cache-gib", "0.25", "--enforce-eager", "--dtype", "float32"]
    environment = {**os.environ, "CXX": "/no/compiler"}
    command = [sys.executable, "-m", "gspo_gym.cli", *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = next((m for line in process.stdout if (m := re.match(r"serving lora at (\S+)", line))), None)
        assert found is not None
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.nightly
def test_a_lora_is_served_by_vllm_over_openais_protocol(url: str, adapted: Policy) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        asked: dict[str, Any] = {"model": "lora", "messages": [{"role": "user", "content": "Hi."}], "seed": 5}
        whole = client.chat.completions.create(**asked, n=2, max_tokens=40, logprobs=True)
        streamed = ["", ""]
        for chunk in client.chat.completions.create(**asked, n=2, max_tokens=40, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert [choice.message.content for choice in whole.choices] == streamed
        assert streamed[0] != streamed[1]
        # The first token's logprob is that of the model with its adapter.
        tokenizer = adapted.tokenizer
        prompt = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            logits = adapted.model(input_ids=torch.as_tensor(prompt["input_ids"])).logits[0, -1]
        expected = torch.log_softmax(logits.double(), -1)
        first = whole.choices[0].logprobs.content[0].logprob
        assert (expected - first).abs().min() < TOLERANCE

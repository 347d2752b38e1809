"""The model that `smollm2` names, from the real package: converted once, then loaded, shown and asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch

from gspo_gym.cli.main import main
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.bases import adapter_base, gguf_of
from gspo_gym.policy.facts import facts_of
from gspo_gym.policy.gguf import cache_folder
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_policy


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # 0.5 GB
        yield


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("smollm2")


def test_it_answers_a_question(policy: Policy) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = prompt["input_ids"]
    answer = policy.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert policy.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_its_weights_are_those_of_the_file_dequantized(policy: Policy) -> None:
    file = gguf_of("smollm2")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    # Neither is rearranged by llama.cpp, as queries and keys are.
    layer = policy.model.model.layers[7]
    found = {"blk.7.ffn_down.weight": layer.mlp.down_proj.weight, "blk.7.attn_v.weight": layer.self_attn.v_proj.weight}
    for name, weight in found.items():
        assert tensors[name].tensor_type.name == "Q4_1"
        expected = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        torch.testing.assert_close(weight.detach(), torch.from_numpy(expected), rtol=1e-6, atol=0)


def test_its_facts_are_known_before_training(capsys: pytest.CaptureFixture[str], policy: Policy) -> None:
    facts = facts_of("smollm2")
    assert (facts.architecture, facts.num_parameters, facts.context) == ("LlamaForCausalLM", 134_515_008, 8192)
    assert (facts.num_token_ids, facts.num_rows, facts.eos_token_ids) == (49152, 49152, (2,))
    assert (facts.license, facts.sampling) == ("apache-2.0", {"temperature": 0.2, "top_p": 0.9})
    assert facts.template.has_system_role
    assert facts.template.tools is not None
    assert main(["models", "show", "smollm2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["num_parameters"], shown["trained_here"]) == (134_515_008, None)
    assert shown["dequantized"]["types"] == ["Q4_1", "Q8_0"]


def test_it_is_converted_once_and_an_adapter_names_it_and_not_the_cache(policy: Policy, tmp_path: Path) -> None:
    (folder,) = cache_folder().iterdir()
    changed = (folder / "model.safetensors").stat().st_mtime_ns
    adapted = adapt_policy(load_policy("smollm2"), LoraSettings(r=2), seed=0)
    save_policy(adapted, tmp_path / "adapter")
    assert adapter_base(tmp_path / "adapter") == adapted.base == "smollm2"
    assert load_policy(str(tmp_path / "adapter")).tokenizer.eos_token == "<|im_end|>"
    assert list(cache_folder().iterdir()) == [folder]
    assert (folder / "model.safetensors").stat().st_mtime_ns == changed

"""The model that `smollm2` names, from the real package: converted once, then loaded, shown and asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import peft
import pytest
import torch
from agreement import nudge, plain_logprobs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gspo_gym.cli.main import main
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.bases import adapter_base, gguf_of
from gspo_gym.policy.export import export
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


def test_an_adapter_of_it_and_the_merged_model_load_elsewhere_with_equal_logprobs(tmp_path: Path) -> None:
    """The adapter by peft on what `smollm2` was converted to; merged in float32, and in bfloat16, rounded once."""
    adapted = adapt_policy(load_policy("smollm2"), LoraSettings(r=4, alpha=8, target_modules="all-linear"), seed=0)
    nudge(adapted.model, 7, scale=0.01)
    save_policy(adapted, tmp_path / "checkpoint")
    write = partial(export, str(tmp_path / "checkpoint"), describe=lambda _: "")
    write(tmp_path / "adapter")
    write(tmp_path / "merged", is_merged=True)
    write(tmp_path / "half", is_merged=True, dtype="bfloat16")

    ids = adapted.tokenizer("The capital of France is Paris, and the capital of Spain is Madrid.")["input_ids"]
    expected = plain_logprobs(adapted.model, ids[:4], ids[4:])
    with adapted.model.disable_adapter():
        assert abs(plain_logprobs(adapted.model, ids[:4], ids[4:]) - expected).max() > 1e-2  # the base would be seen

    (folder,) = cache_folder().iterdir()
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    np.testing.assert_allclose(plain_logprobs(theirs, ids[:4], ids[4:]), expected, rtol=1e-5, atol=1e-5)
    merged = load(tmp_path / "merged")
    np.testing.assert_allclose(plain_logprobs(merged, ids[:4], ids[4:]), expected, rtol=1e-5, atol=1e-5)

    # By equation 3 of arXiv 2106.09685: W + alpha / r * B A.
    layer = theirs.base_model.model.model.layers[11].mlp.down_proj
    delta = 8 / 4 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    whole = merged.model.layers[11].mlp.down_proj.weight
    torch.testing.assert_close(whole, layer.base_layer.weight + delta, rtol=1e-6, atol=1e-6)
    half = load_file(tmp_path / "half" / "model.safetensors")["model.layers.11.mlp.down_proj.weight"]
    assert torch.equal(half, whole.detach().to(torch.bfloat16))

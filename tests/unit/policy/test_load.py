"""Policies from names: tiny models, folders, adapters, and clear errors for what does not exist."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_gym.errors import CheckpointError, ConfigError, UnknownNameError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.bases import list_tiny
from gspo_gym.policy.load import Policy, load_policy, load_skeleton, load_tokenizer, save_policy, tiny_tokenizer
from gspo_gym.policy.lora import add_lora

TINY = "tiny:qwen3-64"


def _logits(policy: Policy, text: str = "hello") -> torch.Tensor:
    ids = torch.tensor([policy.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        logits: torch.Tensor = policy.model(ids).logits
    return logits


def _trained_lora(seed: int = 0) -> Policy:
    """A tiny model whose adapter does something: B is not zero."""
    policy = load_policy(TINY, seed=seed)
    model = add_lora(policy.model, LoraSettings(), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    model.eval()
    return Policy(model=model, tokenizer=policy.tokenizer, base=policy.base)


def test_the_seed_decides_a_tiny_models_weights_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, again, other = (load_policy(TINY, seed=s) for s in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)


def test_a_name_with_a_seed_rebuilds_the_same_weights_whatever_the_argument_says() -> None:
    assert torch.equal(_logits(load_policy(f"{TINY}@5", seed=9)), _logits(load_policy(TINY, seed=5)))


@pytest.mark.parametrize("name", list_tiny())
def test_a_fresh_tiny_model_predicts_nearly_uniformly(name: str) -> None:
    policy = load_policy(name)
    logprobs = _logits(policy, "Guess a number from 1 to 100.<|im_end|>").log_softmax(-1)
    entropy = float(-(logprobs.exp() * logprobs).sum(-1).mean())
    # Logits of standard deviation s cost about s^2 / 2 nats of entropy, and s = std of the embedding * sqrt(hidden);
    # twice that allows for the spread of one draw. It is 0.8 in the second versions, and at most 0.32 in the first.
    assert entropy > math.log(len(policy.tokenizer)) - (0.8 if name.endswith("-v2") else 0.32) ** 2


@pytest.mark.parametrize("name", list_tiny())
def test_tiny_models_tie_their_embeddings(name: str) -> None:
    model = load_policy(name).model
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_ids_of_the_tiny_tokenizer_are_the_bytes_of_the_text() -> None:
    text = "grüße 你好 \U0001f600\n\x00"
    tokenizer = tiny_tokenizer()
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_roles_are_one_token_each_in_the_second_version_where_they_are_whole_words() -> None:
    tokenizer = load_tokenizer("tiny:qwen3-64-v2")
    chat = [{"role": "user", "content": "usernames, user"}, {"role": "assistant", "content": "4"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    start, end, line, system, user, assistant = 257, 258, 10, 263, 264, 265
    turn = [start, user, line, *b"usernames, ", user, end, line, start, assistant, line, ord("4"), end, line]
    assert ids == [*turn, start, assistant, line]
    assert tokenizer.decode(ids).startswith("<|im_start|>user\nusernames, user<|im_end|>\n<|im_start|>assistant\n4")
    assert tokenizer("system tools")["input_ids"] == [system, *b" tools"]


def test_a_tokenizer_can_be_had_without_its_model(tmp_path: Path) -> None:
    save_policy(load_policy(TINY), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert load_tokenizer(TINY)("hé<|im_end|>")["input_ids"] == [104, 195, 169, 258]
    assert load_tokenizer(str(tmp_path))("hé<|im_end|>")["input_ids"] == [104, 195, 169, 258]
    with pytest.raises(UnknownNameError, match="did you mean 'tiny:qwen3-64'"):
        load_tokenizer("tiny:qwen-64")
    with pytest.raises(UnknownNameError, match="not a folder here"):
        load_tokenizer("./nowhere")


def test_special_tokens_are_one_id_each_and_tags_survive_decoding() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("<think>a</think><tool_call>{}</tool_call><|im_end|>")["input_ids"]
    assert ids == [261, ord("a"), 262, 259, ord("{"), ord("}"), 260, 258]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think><tool_call>{}</tool_call>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)


def test_the_tiny_template_is_chatml_with_hermes_tool_calls_and_one_line_tools() -> None:
    schema = {"type": "object", "properties": {"sql": {"type": "string"}, "limit": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "query", "description": "Run it.", "parameters": schema}}]
    call = {"id": "1", "type": "function", "function": {"name": "query", "arguments": {"sql": "x", "limit": 1}}}
    text = tiny_tokenizer().apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "3 rows"},
        ],
        tools=tools,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.\n\n"
        'Tools, used as <tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>\n'
        "query(sql: string, limit: integer) Run it.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "query", "arguments": {"sql": "x", "limit": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n3 rows<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_tools_the_tiny_template_adds_no_system_prompt() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    text = tiny_tokenizer().apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"


@pytest.mark.parametrize("name", [TINY, "tiny:qwen3-moe-64"])
def test_a_saved_full_model_loads_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    policy = load_policy(name, seed=3)
    save_policy(policy, tmp_path)
    loaded = load_policy(str(tmp_path))
    assert torch.equal(_logits(loaded), _logits(policy))
    assert loaded.tokenizer.chat_template == policy.tokenizer.chat_template
    assert loaded.tokenizer("é<|im_end|>")["input_ids"] == policy.tokenizer("é<|im_end|>")["input_ids"]


def test_a_saved_adapter_loads_back_bit_for_bit_with_the_base_beside_it(tmp_path: Path) -> None:
    policy = _trained_lora()
    save_policy(policy, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == f"{TINY}@0"
    loaded = load_policy(str(tmp_path))
    assert torch.equal(_logits(loaded), _logits(policy))
    trainable = {name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)


def test_an_adapter_that_was_loaded_is_saved_without_need_of_the_folder_that_it_came_from(tmp_path: Path) -> None:
    """As of a resumed run, whose older checkpoints are removed while it goes on."""
    policy, older, newer = _trained_lora(seed=4), tmp_path / "older", tmp_path / "newer"
    save_policy(policy, older)
    save_policy(load_policy(str(older)), newer)
    shutil.rmtree(older)
    config = json.loads((newer / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"{TINY}@4"
    assert (newer / "base").is_dir()
    loaded, saved = load_policy(str(newer)).model.state_dict(), policy.model.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def test_an_adapter_without_its_base_folder_rebuilds_the_base_from_its_name(tmp_path: Path) -> None:
    policy = _trained_lora(seed=4)
    policy.model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert not (tmp_path / "base").exists()
    assert torch.equal(_logits(load_policy(str(tmp_path))), _logits(policy))


def test_an_adapters_saved_base_is_the_one_it_was_trained_on_even_if_that_had_changed(tmp_path: Path) -> None:
    policy = _trained_lora()
    with torch.no_grad():
        policy.model.get_base_model().get_input_embeddings().weight.mul_(2)
    save_policy(policy, tmp_path)
    assert torch.equal(_logits(load_policy(str(tmp_path))), _logits(policy))


def test_a_fresh_adapter_changes_nothing_and_leaves_the_global_generator_alone() -> None:
    policy = load_policy(TINY)
    expected = _logits(policy)
    before = torch.get_rng_state()
    model = add_lora(policy.model, LoraSettings(r=4, target_modules=("q_proj", "v_proj")), seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    model.eval()
    assert torch.equal(_logits(Policy(model, policy.tokenizer, policy.base)), expected)  # B = 0, and x + 0 = x exactly
    # Per layer A [4, 64] and B [out, 4] on q (64 -> 64) and v (64 -> 32): 512 + 384 numbers, two layers.
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * (512 + 384)


def test_lora_targets_that_match_nothing_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        add_lora(load_policy(TINY).model, LoraSettings(target_modules=("no_such_module",)), seed=0)


def test_dtype_is_applied_to_all_parameters_and_an_unknown_one_is_refused() -> None:
    model = load_policy(TINY, dtype="bfloat16").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        load_policy(TINY, dtype="int8")


def test_an_unknown_tiny_name_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tiny:qwen3-64'"):
        load_policy("tiny:qwen-64")


@pytest.mark.parametrize("name", ["./runs/nothing", "no/such/folder", "/nowhere"])
def test_a_folder_that_does_not_exist_is_told_apart_from_a_hub_id_at_once(name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"not a folder here .* not a tiny model"):
        load_policy(name)


def test_a_path_under_an_existing_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownNameError, match="does not look like"):
        load_policy("runs/nothing")


def test_a_folder_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"expected config\.json .* found notes\.txt"):
        load_policy(str(tmp_path))


def test_a_folder_with_damaged_weights_is_a_checkpoint_error(tmp_path: Path) -> None:
    save_policy(load_policy(TINY), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_policy(str(tmp_path))


def test_a_folder_that_lacks_a_weight_is_refused_and_not_filled_with_random_numbers(tmp_path: Path) -> None:
    save_policy(load_policy(TINY), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weights are missing: \['model.layers.1.mlp.up_proj.weight'\]"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_that_is_asked_for_is_taken_and_computes_the_same(attention: str, tmp_path: Path) -> None:
    save_policy(load_policy("tiny:qwen3-64", seed=1), tmp_path)
    ids = torch.arange(40)[None]
    expected = load_policy("tiny:qwen3-64", seed=1).model(input_ids=ids).logits
    for base in ("tiny:qwen3-64", str(tmp_path)):
        model = load_policy(base, seed=1, attn_implementation=attention).model
        assert model.config._attn_implementation == attention
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
        assert load_skeleton(base, attn_implementation=attention).model.config._attn_implementation == attention


def test_an_attention_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="attn_implementation: tiny:qwen3-64@0 does not run with 'flash_attention_2'"):
        load_policy("tiny:qwen3-64", attn_implementation="flash_attention_2")

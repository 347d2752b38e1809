"""Staged weights: what is in a folder, that it is there completely or not at all, and when it goes.

Compared with: transformers' own loading of the folder, and a merge by PEFT itself on a copy.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from gspo_gym.engine.base import TensorMeta, WeightUpdate
from gspo_gym.errors import ConfigError, EngineError, UsageError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import Policy, adapt_policy, load_policy
from gspo_gym.policy.staging import Handover, Staging, num_weight_bytes, staging_root, tensor_digests, verify_staged

DENSE, MOE = "tiny:qwen3-64", "tiny:qwen3-moe-64"


def with_adapter(base: str, seed: int = 0) -> Policy:
    """A policy with an adapter that changes something: B of a fresh one is zero."""
    policy = adapt_policy(load_policy(base, seed=1), LoraSettings(r=4, alpha=8), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(3, 19).reshape(2, 8)).logits
    return out


def folder_of(update: WeightUpdate) -> Path:
    assert update.folder is not None
    return update.folder


@pytest.mark.parametrize("base", [DENSE, MOE])
def test_a_full_folder_is_a_transformers_model_that_computes_the_same(base: str, tmp_path: Path) -> None:
    policy = load_policy(base, seed=1)
    update = Staging(policy, tmp_path / "w").stage(3, "full")
    assert (update.version, update.kind, folder_of(update).name) == (3, "full", "policy-v3")
    loaded = AutoModelForCausalLM.from_pretrained(folder_of(update), local_files_only=True)
    assert torch.equal(logits(loaded), logits(policy.model))


@pytest.mark.parametrize("base", [DENSE, MOE])
def test_a_lora_is_merged_as_peft_merges_it_and_the_policy_is_left_as_it_was(base: str, tmp_path: Path) -> None:
    policy = with_adapter(base)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    update = Staging(policy, tmp_path / "w").stage(1, "full")
    loaded = AutoModelForCausalLM.from_pretrained(folder_of(update), local_files_only=True)
    merged = copy.deepcopy(policy.model).merge_and_unload()
    torch.testing.assert_close(logits(loaded), logits(merged), rtol=0, atol=1e-6)
    assert (logits(loaded) - logits(load_policy(base, seed=1).model)).abs().max() > 0.01  # the adapter says something
    after = policy.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_tied_weights_are_written_once_and_large_ones_in_several_files(tmp_path: Path) -> None:
    policy = load_policy(DENSE, seed=1)
    assert policy.model.config.tie_word_embeddings
    update = Staging(policy, tmp_path / "runs" / "w", max_shard_size="100KB").stage(1, "full")
    assert list(update.checksums) == sorted(update.checksums)
    digests = tensor_digests(update)
    assert "lm_head.weight" not in digests
    assert "model.embed_tokens.weight" in digests
    assert len(list(folder_of(update).glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder_of(update), local_files_only=True)
    assert torch.equal(logits(loaded), logits(policy.model))


def test_weights_are_written_in_the_precision_of_the_engine(tmp_path: Path) -> None:
    policy = load_policy(DENSE, seed=1)
    update = Staging(policy, tmp_path / "w", dtype="bfloat16").stage(1, "full")
    loaded = AutoModelForCausalLM.from_pretrained(folder_of(update), local_files_only=True, dtype="auto")
    assert json.loads((folder_of(update) / "config.json").read_text())["dtype"] == "bfloat16"
    own = policy.model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, own[name].to(torch.bfloat16))


def test_an_adapter_folder_is_in_the_layout_of_peft_and_small(tmp_path: Path) -> None:
    from peft import PeftModel

    policy = with_adapter(DENSE)
    update = Staging(policy, tmp_path / "w").stage(7, "adapter")
    names = {path.name for path in folder_of(update).iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "manifest.json"} <= names
    assert not any(name.startswith("model") for name in names)
    assert all("lora_" in name for name in tensor_digests(update))
    loaded = PeftModel.from_pretrained(load_policy(DENSE, seed=1).model, folder_of(update))
    assert torch.equal(logits(loaded), logits(policy.model))


def test_digests_are_of_the_bytes_of_files_and_of_tensors(tmp_path: Path) -> None:
    policy = load_policy(DENSE, seed=1)
    update = Staging(policy, tmp_path / "w").stage(1, "full")
    config = folder_of(update) / "config.json"
    assert update.checksums["config.json"] == hashlib.sha256(config.read_bytes()).hexdigest()
    manifest = json.loads((folder_of(update) / "manifest.json").read_text())
    assert (manifest["schema"], manifest["version"], manifest["kind"]) == (1, 1, "full")
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == dict(update.checksums)
    norm = policy.model.model.norm.weight.detach()
    assert tensor_digests(update)["model.norm.weight"] == hashlib.sha256(norm.numpy().tobytes()).hexdigest()
    verify_staged(update)
    config.write_text("{}")
    with pytest.raises(EngineError, match=r"config\.json: is missing or was changed"):
        verify_staged(update)


def test_a_path_is_never_written_twice(tmp_path: Path) -> None:
    staging = Staging(load_policy(DENSE, seed=1), tmp_path / "w")
    staging.stage(1, "full")
    with pytest.raises(UsageError, match="never written twice"):
        staging.stage(1, "full")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("base", [DENSE, MOE])
@pytest.mark.parametrize("is_adapter", [False, True])
def test_what_is_handed_over_is_what_would_be_in_a_file(
    base: str, dtype: str | None, is_adapter: bool, tmp_path: Path
) -> None:
    """Byte for byte, experts one by one; and its metadata says so before anything is merged or cast."""
    policy = with_adapter(base) if is_adapter else load_policy(base, seed=1)
    update = Handover(policy, dtype=dtype).stage(1, "transfer")
    assert (update.kind, update.folder) == ("transfer", None)
    assert tensor_digests(update) == tensor_digests(Staging(policy, tmp_path / "w", dtype=dtype).stage(1, "full"))
    tensors = update.tensors
    assert tensors is not None
    assert tensors.device.type == "cpu"
    for _ in range(2):  # as often as asked for
        found = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
        assert found == list(tensors.metadata())


def test_weights_without_numbers_share_no_memory_and_are_handed_over_each() -> None:
    policy = load_policy(DENSE, seed=1)
    for name in ("one", "other"):
        policy.model.model.norm.register_buffer(name, torch.zeros(0))
    names = {name for name, _ in Handover(policy).stage(1, "transfer").tensors or ()}
    assert {"model.norm.one", "model.norm.other"} <= names


def test_what_is_handed_over_is_not_copied_unless_it_must_be() -> None:
    policy = load_policy(DENSE, seed=1)
    own = {name: parameter.data_ptr() for name, parameter in policy.model.named_parameters()}
    update = Handover(policy, dtype="float32").stage(1, "transfer")
    assert {name: tensor.data_ptr() for name, tensor in update.tensors or ()} == own
    assert not any(tensor.requires_grad for _, tensor in update.tensors or ())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_that_was_written_over_cannot_be_handed_over_again(dtype: str, fused: bool) -> None:
    """Not even half of it: an optimizer's step is seen before the first tensor, and after the last."""
    policy = load_policy(DENSE, seed=1, dtype=dtype)
    old = Handover(policy).stage(1, "transfer")
    tensors = iter(old.tensors or ())
    next(tensors)
    parameter = policy.model.model.norm.weight  # 64 numbers, all of them one
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=1e-2, fused=fused).step()
    for read in (lambda: list(tensors), lambda: next(iter(old.tensors or ()))):
        with pytest.raises(EngineError, match="were changed since this version of them was to be sent"):
            read()
    assert len(list(Handover(policy).stage(2, "transfer").tensors or ())) == 24


def test_two_numbers_that_changed_places_are_other_weights() -> None:
    policy = load_policy(DENSE, seed=1)
    old = Handover(policy).stage(1, "transfer")
    with torch.no_grad():
        first = policy.model.lm_head.weight[0]
        first[:2] = first[:2].flip(0)
    with pytest.raises(EngineError, match="were changed"):
        next(iter(old.tensors or ()))


def test_what_cannot_be_staged_is_refused(tmp_path: Path) -> None:
    staging = Staging(load_policy(DENSE, seed=1), tmp_path / "w")
    with pytest.raises(ConfigError, match="a policy with a LoRA adapter"):
        staging.stage(1, "adapter")
    with pytest.raises(UsageError, match="not written into folders"):
        staging.stage(1, "shared")
    with pytest.raises(UsageError, match="'full' are not handed over"):
        Handover(load_policy(DENSE, seed=1)).stage(1, "full")
    with pytest.raises(ConfigError, match="at least 2"):
        Staging(load_policy(DENSE, seed=1), tmp_path / "w", keep=1)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"target_modules": ["lm_head"]}, "share their weights"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "share their weights"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"target_modules": ["q_proj"], "alora_invocation_tokens": [5]}, "ALora"),
    ],
)
def test_an_adapter_that_whole_weights_do_not_show_is_not_handed_over_as_such(
    adapter: dict[str, Any], message: str, tmp_path: Path
) -> None:
    policy = load_policy(DENSE, seed=1)
    adapted = Policy(
        get_peft_model(policy.model, LoraConfig(r=2, task_type="CAUSAL_LM", **adapter)), policy.tokenizer, policy.base
    )
    with pytest.raises(ConfigError, match=f"{message}.*models merge"):
        Staging(adapted, tmp_path / "w").stage(1, "full")
    with pytest.raises(ConfigError, match=f"{message}.*models merge"):
        Handover(adapted).stage(1, "transfer")
    Handover(adapted, trained_only=True).stage(1, "transfer")  # to a replica that has the same model


def test_versions_beyond_those_kept_go_one_commit_later(tmp_path: Path) -> None:
    """keep = 3: of versions 1..6, the three newest stay, and one more that expired at the latest commit."""
    staging = Staging(with_adapter(DENSE), tmp_path / "w", keep=3)
    there = []
    for version in range(1, 7):
        staging.stage(version, "adapter")
        staging.retire(version)
        there.append(sorted(int(path.name.removeprefix("policy-v")) for path in staging.root.iterdir()))
    assert there == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    for _ in range(2):  # closing twice is fine
        staging.close()
        assert not (tmp_path / "w").exists()


def test_the_root_is_new_each_time_and_what_was_left_behind_is_gone(tmp_path: Path) -> None:
    first = staging_root(tmp_path, in_memory=False, num_bytes=1)
    (first / "policy-v1").mkdir()
    second = staging_root(tmp_path, in_memory=False, num_bytes=1)
    assert first != second
    assert not first.exists()
    assert second.is_dir()
    assert second.is_relative_to(tmp_path)


def test_weights_go_into_memory_only_where_there_is_room_for_twice_of_them(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        assert staging_root(tmp_path, in_memory=True, num_bytes=1).is_relative_to(tmp_path)
        return
    free = shutil.disk_usage("/dev/shm").free
    small = staging_root(tmp_path, in_memory=True, num_bytes=int(0.45 * free))
    assert small.is_relative_to("/dev/shm")
    large = staging_root(tmp_path, in_memory=True, num_bytes=int(0.55 * free))
    assert large.is_relative_to(tmp_path)
    assert not small.exists()
    assert staging_root(tmp_path / "run" / "fresh", in_memory=False, num_bytes=1).parent == tmp_path / "run" / "fresh"


def test_weights_are_counted_in_bytes() -> None:
    """A bfloat16 model takes half of a float32 one."""
    wide, narrow = (load_policy(DENSE, dtype=dtype, seed=1).model for dtype in ("float32", "bfloat16"))
    assert num_weight_bytes(wide) == 2 * num_weight_bytes(narrow)

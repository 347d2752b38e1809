"""Exported models: the same function as the learner's, verified, whole or not there."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import nudge, plain_logprobs
from peft import (
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    TrainableTokensConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_gym.errors import CheckpointError, ConfigError, StorageError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.saved import copy_state
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.export import Weights, export, require_sums
from gspo_gym.policy.load import Policy, adapt_policy, load_policy
from gspo_gym.policy.quantization import Quantization

PROMPT, SAMPLED = list(range(40, 60)), [72, 105, 10, 200, 33, 7, 91, 120]
# transformers' loader imports torch's compiler, which uses deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


class Learner:
    """Nothing to resume."""

    def copy_state(self) -> Callable[[Path], None]:
        return copy_state({})

    def counters(self) -> dict[str, int]:
        return {}


def trained(quantization: Quantization = "as_saved", *, is_lora: bool = True) -> Policy:
    """A tiny policy that is not as it began."""
    policy = load_policy("tiny:qwen3-64", seed=3, quantization=quantization)
    if is_lora:
        policy = adapt_policy(policy, LoraSettings(r=4, alpha=8), seed=0)
    nudge(policy.model, 7, scale=0.1 if is_lora else 0.02)
    return policy


def saved(policy: Policy, folder: Path) -> str:
    return str(CheckpointStore(folder).save(3, policy=policy, learner=Learner(), trainer_state={}))


def scored(policy: Policy) -> np.ndarray[Any, Any]:
    """The learner's logprobs of SAMPLED after PROMPT."""
    tokens = torch.tensor([[*PROMPT, *SAMPLED]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    acted = mask.clone()
    acted[:, : len(PROMPT)] = False
    with torch.no_grad():
        logprobs = LogprobComputer(policy.model).compute(tokens, mask, acted).logprobs
    return logprobs[0, len(PROMPT) :].double().numpy()


def card(weights: Weights) -> str:
    return f"{weights.layout} {weights.dtype}"


def plain(folder: Path, **options: Any) -> Any:
    """The model as a user of transformers loads it, without anything of ours."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "Hi."}], tokenize=False)
    return model


def test_a_peft_folder_in_transformers_has_the_learners_logprobs(tmp_path: Path) -> None:
    policy = trained()
    weights = export(saved(policy, tmp_path / "run"), tmp_path / "out", describe=card)
    model = PeftModel.from_pretrained(plain(tmp_path / "out" / "base"), tmp_path / "out").eval()
    expected = scored(policy)
    np.testing.assert_allclose(plain_logprobs(model, PROMPT, SAMPLED), expected, atol=1e-5)
    bare = plain_logprobs(plain(tmp_path / "out" / "base"), PROMPT, SAMPLED)
    assert np.abs(bare - expected).max() > 1e-2  # an adapter that was left out would be seen
    assert (weights.layout, weights.dtype, weights.merged_from) == ("peft", None, None)


def test_a_full_model_is_copied_byte_for_byte_and_nothing_of_the_run_with_it(tmp_path: Path) -> None:
    policy = trained(is_lora=False)
    checkpoint = Path(saved(policy, tmp_path / "run"))
    export(str(checkpoint), tmp_path / "out", describe=card)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert not {"resume", "manifest.json"} & {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "README.md").read_text() == "transformers None"
    np.testing.assert_allclose(plain_logprobs(plain(tmp_path / "out"), PROMPT, SAMPLED), scored(policy), atol=1e-5)


# Weights are rounded to 24, 8 and 11 significant bits, by at most 2**-24, 2**-9 and 2**-12 of each. A logprob here is a
# difference of logits that seven matrices in each of two layers, and the head, had part in; errors of single weights
# have random signs. 16 times the rounding leaves room for them to add up, and an adapter that was left out or merged
# twice changes these logprobs by more than 0.1.
@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("bfloat16", 9), ("float16", 12)])
def test_a_merged_model_agrees_with_the_adapter_as_closely_as_its_dtype_allows(
    tmp_path: Path, dtype: str, bits: int
) -> None:
    policy = trained()
    weights = export(saved(policy, tmp_path / "run"), tmp_path / "out", describe=card, is_merged=True, dtype=dtype)
    assert (weights.dtype, weights.merged_from) == (dtype, "lora")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert plain(tmp_path / "out", dtype="auto").dtype == getattr(torch, dtype)
    # Computed in float32, so that nothing but the written weights differs.
    merged = plain_logprobs(plain(tmp_path / "out", dtype=torch.float32), PROMPT, SAMPLED)
    gap = np.abs(merged - scored(policy)).max()
    print(f"{dtype}: {gap:.2e} nats")
    assert gap < max(1e-5, 16 * 2.0**-bits)


@pytest.mark.parametrize(("kind", "tolerance"), [("nf4", 1e-4), ("int8", 0.1)])
def test_a_qlora_is_merged_into_the_weights_that_it_was_trained_on(
    tmp_path: Path, kind: Quantization, tolerance: float
) -> None:
    policy = trained(kind)
    weights = export(saved(policy, tmp_path / "run"), tmp_path / "out", describe=card, is_merged=True)
    assert weights.merged_from == kind
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    gap = np.abs(plain_logprobs(plain(tmp_path / "out"), PROMPT, SAMPLED) - scored(policy)).max()
    # int8 layers also round their inputs, to 1/127 of the largest in a token.
    original = np.abs(
        plain_logprobs(load_policy("tiny:qwen3-64", seed=3).model, PROMPT, SAMPLED) - scored(policy)
    ).max()
    print(f"{kind}: {gap:.2e} nats; without the adapter {original:.2e}")
    assert gap < tolerance < original


def of_kind(config: PeftConfig, folder: Path) -> PeftModel:
    """A tiny model (its head is tied to its embeddings) under a random adapter of PEFT's, saved as PEFT saves it."""
    policy = load_policy("tiny:qwen3-64", seed=3)
    model = get_peft_model(policy.model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.peft_config["default"].base_model_name_or_path = policy.base
    model.save_pretrained(folder, save_embedding_layers=False)
    policy.tokenizer.save_pretrained(folder)
    return model.eval()


Q = ["q_proj", "v_proj"]
KINDS: dict[str, Callable[[], PeftConfig]] = {
    "a tied head": lambda: LoraConfig(r=2, target_modules=["lm_head"]),
    "tied embeddings": lambda: LoraConfig(r=2, target_modules=["embed_tokens"]),
    "both and a layer": lambda: LoraConfig(r=2, target_modules=["lm_head", "embed_tokens", "q_proj"]),
    "tied adapters": lambda: LoraConfig(r=2, target_modules=["embed_tokens"], ensure_weight_tying=True),
    "DoRA": lambda: LoraConfig(r=2, target_modules=Q, use_dora=True),
    "rank-stabilized": lambda: LoraConfig(r=2, target_modules=Q, use_rslora=True),
    "a whole head": lambda: LoraConfig(r=2, target_modules=Q, modules_to_save=["lm_head"]),
    "whole embeddings": lambda: LoraConfig(r=2, target_modules=Q, modules_to_save=["embed_tokens"]),
    "whole norms": lambda: LoraConfig(r=2, target_modules=Q, modules_to_save=["input_layernorm"]),
    "tokens": lambda: LoraConfig(r=2, target_modules=Q, trainable_token_indices=[50, 72]),
    "tokens of the head": lambda: LoraConfig(r=2, target_modules=Q, trainable_token_indices={"lm_head": [50, 72]}),
    "tokens alone": lambda: TrainableTokensConfig(token_indices=[50, 72], target_modules=["embed_tokens"]),
    "IA3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: LoHaConfig(r=2, target_modules=Q),
    "OFT": lambda: OFTConfig(r=0, oft_block_size=4, target_modules=Q),
    "norms": lambda: LNTuningConfig(target_modules=["input_layernorm", "norm"]),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@pytest.mark.filterwarnings("ignore:Unsupported layer type .*RMSNorm:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_merged_to_its_own_function(kind: str, tmp_path: Path) -> None:
    model = of_kind(KINDS[kind](), tmp_path / "adapter")
    expected = plain_logprobs(model, PROMPT, SAMPLED)
    bare = plain_logprobs(load_policy("tiny:qwen3-64", seed=3).model, PROMPT, SAMPLED)
    assert np.abs(bare - expected).max() > 1e-2, "an adapter that was left out would be seen"
    export(str(tmp_path / "adapter"), tmp_path / "out", describe=card, is_merged=True)
    np.testing.assert_allclose(plain_logprobs(plain(tmp_path / "out"), PROMPT, SAMPLED), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer")
@pytest.mark.filterwarnings("ignore:Adapter 'default'. .* have invalid shape")
def test_an_adapter_with_a_bias_that_its_base_has_no_place_for_is_refused(tmp_path: Path) -> None:
    of_kind(LoraConfig(r=2, target_modules=Q, lora_bias=True), tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"PEFT cannot merge this adapter \(LORA\).*no bias"):
        export(str(tmp_path / "adapter"), tmp_path / "out", describe=card, is_merged=True)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_folder_that_is_read_back_as_another_function_is_not_published(tmp_path: Path) -> None:
    policy = load_policy("tiny:qwen3-64", seed=3)
    with torch.no_grad():
        policy.model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5  # above float16's largest number, 65504
    base = saved(policy, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"as it was written is another function.*nothing was written"):
        export(base, tmp_path / "out", describe=card, dtype="float16")
    export(base, tmp_path / "out", describe=card, dtype="bfloat16")


def test_a_damaged_checkpoint_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    checkpoint = Path(saved(trained(), tmp_path / "run"))
    path = checkpoint / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    for is_merged in (False, True):
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: is damaged"):
            export(str(checkpoint), tmp_path / "out", describe=card, is_merged=is_merged)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_that_its_run_removes_meanwhile_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    checkpoint = Path(saved(trained(is_lora=False), tmp_path / "run"))
    shutil.rmtree(checkpoint / "resume")  # as far as the removing came: then nothing is verified
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to("gone")  # listed, and not there when it is copied
    with pytest.raises(CheckpointError, match="step_000003: was removed while it was copied; export a newer"):
        export(str(checkpoint), tmp_path / "out", describe=card)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_holds_something_is_replaced_only_by_force_and_only_by_a_whole_export(tmp_path: Path) -> None:
    base, out = saved(trained(), tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"already holds something.*--force"):
        export(base, out, describe=card)

    def fail(_: Weights) -> str:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        export(base, out, describe=fail, force=True)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    export(base, out, describe=card, force=True)
    assert (out / "adapter_config.json").exists()
    assert not (out / "mine.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize(
    ("is_lora", "options", "message"),
    [
        (False, {"is_merged": True}, "no adapter to merge"),
        (True, {"dtype": "float16"}, "is an adapter, which stays in float32"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, is_lora: bool, options: Any, message: str) -> None:
    base = saved(trained(is_lora=is_lora), tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        export(base, tmp_path / "out", describe=card, **options)
    assert not (tmp_path / "out").exists()


def test_the_sums_are_those_of_sha256sum_and_name_what_was_changed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(saved(trained(), tmp_path / "run"), out, describe=card)
    checked = subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=out, check=False)
    assert checked.returncode == 0
    require_sums(out)
    (out / "more.txt").write_text("more")
    with pytest.raises(StorageError, match=r"more\.txt: is missing, changed or not listed"):
        require_sums(out)

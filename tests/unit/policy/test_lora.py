"""Adapters: which matrices they are on, and what becomes of one that a run goes on with under other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gspo_gym.errors import ConfigError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_policy

TINY, MOE = "tiny:qwen3-64", "tiny:qwen3-moe-64"
DENSE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(settings: LoraSettings, base: str = TINY) -> Policy:
    return adapt_policy(load_policy(base), settings, seed=1)


def trained(settings: LoraSettings, base: str = TINY) -> Policy:
    """A policy whose adapter does something, as after training: both factors are random."""
    policy = adapted(settings, base)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    return policy


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = policy.model(torch.arange(12)[None]).logits
    return output


def saved(policy: Policy, folder: Path) -> Policy:
    save_policy(policy, folder)
    return load_policy(str(folder))


def matrices(policy: Policy) -> set[str]:
    """The last name before each factor A, such as q_proj, from the parameters' own names."""
    return {
        name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in policy.model.named_parameters() if "lora_A" in name
    }


def ranks(policy: Policy) -> set[int]:
    return {parameter.shape[0] for name, parameter in policy.model.named_parameters() if "lora_A" in name}


@pytest.mark.parametrize("targets", ["all-linear", ("all-linear",)])
def test_all_linear_is_every_linear_layer_but_the_head_also_as_the_only_name_of_a_list(targets: Any) -> None:
    assert matrices(adapted(LoraSettings(target_modules=targets))) == DENSE


def test_a_list_names_modules_by_the_end_of_their_names() -> None:
    assert matrices(adapted(LoraSettings(target_modules=("self_attn.q_proj", "up_proj")))) == {"q_proj", "up_proj"}


def test_a_name_that_means_nothing_is_an_error_although_another_means_something() -> None:
    with pytest.raises(ConfigError, match="the model has no 'q_porj'; did you mean 'q_proj'"):
        adapted(LoraSettings(target_modules=("q_porj", "v_proj")))


@pytest.mark.parametrize(("targets", "message"), [((), "at least one"), (("all-linear", "q_proj"), "no others beside")])
def test_a_list_of_targets_that_contradicts_itself_is_refused(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraSettings(target_modules=targets)


def test_dropout_is_in_the_adapter_and_nowhere_else() -> None:
    model = adapted(LoraSettings(dropout=0.25)).model
    dropouts = {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    assert set(dropouts.values()) == {0.25}
    assert len(dropouts) == 2 * 7  # two layers of seven matrices
    assert all("lora_dropout" in name for name in dropouts)


def test_adapter_weights_are_float32_on_a_bfloat16_base_also_when_loaded(tmp_path: Path) -> None:
    policy = adapt_policy(load_policy(TINY, dtype="bfloat16"), LoraSettings(r=2), seed=0)
    save_policy(policy, tmp_path)
    for model in (policy.model, load_policy(str(tmp_path), dtype="bfloat16").model):
        kinds = {("lora_" in name, parameter.dtype) for name, parameter in model.named_parameters()}
        assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_experts_are_adapted_each_with_the_full_rank_and_routers_are_left_alone() -> None:
    policy = adapted(LoraSettings(r=3), MOE)
    shapes = {
        name.removeprefix("base_model.model.model.layers.0."): tuple(parameter.shape)
        for name, parameter in policy.model.named_parameters()
        if "layers.0.mlp" in name and parameter.requires_grad
    }
    # four experts of rank 3: A stacks 12 rows; gate_up_proj is 64 -> 128, down_proj 64 -> 64
    assert sorted(shapes.values()) == [(12, 64), (12, 64), (64, 12), (128, 12)]
    assert all("experts" in name for name in shapes)


def test_a_router_is_adapted_if_it_is_named() -> None:
    policy = adapted(LoraSettings(target_modules=("gate.weight",)), MOE)
    assert matrices(policy) == {"gate"}


def test_dropout_on_fused_experts_is_refused_and_possible_on_attention_alone() -> None:
    with pytest.raises(
        ConfigError, match=r"lora.dropout: there is none for the fused parameters down_proj, gate_up_proj"
    ):
        adapted(LoraSettings(dropout=0.1), MOE)
    assert matrices(adapted(LoraSettings(dropout=0.1, target_modules=("q_proj",)), MOE)) == {"q_proj"}


def test_names_of_older_layouts_are_told_the_name_of_the_fused_parameter() -> None:
    with pytest.raises(ConfigError, match="the model has no 'gate_proj'; did you mean 'gate_up_proj'"):
        adapted(LoraSettings(target_modules=("gate_proj", "up_proj", "down_proj")), MOE)


@pytest.mark.parametrize("base", [TINY, MOE])
def test_an_adapter_of_the_settings_own_shape_goes_on_bit_for_bit(base: str, tmp_path: Path) -> None:
    policy = trained(LoraSettings(r=4, alpha=8), base)
    expected = logits(policy)
    going_on = adapt_policy(saved(policy, tmp_path), LoraSettings(r=4, alpha=8), seed=9)
    assert torch.equal(logits(going_on), expected)
    trainable = {name for name, parameter in going_on.model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}


def test_the_dropout_is_the_runs_and_not_the_adapters(tmp_path: Path) -> None:
    policy = trained(LoraSettings(r=4, dropout=0.5))
    expected = logits(policy)
    going_on = adapt_policy(saved(policy, tmp_path), LoraSettings(r=4, dropout=0.1), seed=9)
    assert torch.equal(logits(going_on), expected)
    assert {m.p for m in going_on.model.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}


def test_an_adapter_of_another_shape_is_widened_and_the_log_shows_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = saved(trained(LoraSettings(r=4, alpha=8, target_modules=("q_proj", "v_proj"))), tmp_path)
    adapt_policy(policy, LoraSettings(r=8, alpha=8, target_modules=("q_proj",)), seed=0)
    (line,) = caplog.messages
    assert "r 4, alpha 8 on 4 matrices (q_proj, v_proj)" in line
    assert "r 8, alpha 8 on 2 matrices (q_proj)" in line


# What an adapter had, what the run asks for, and what the merged one is: rank max, alpha = old scale times it, union.
MERGES = [
    ((4, 8, ("q_proj",)), (8, 8, ("v_proj",)), (8, 16.0, {"q_proj", "v_proj"})),
    ((8, 8, ("q_proj", "v_proj")), (2, 64, ("q_proj",)), (8, 8.0, {"q_proj", "v_proj"})),
    ((4, 2, ("down_proj",)), (4, 8, "all-linear"), (4, 2.0, DENSE)),
]


@pytest.mark.parametrize(("had", "asked", "merged"), MERGES)
def test_merging_takes_the_larger_rank_the_modules_of_both_and_changes_no_logit(
    had: Any, asked: Any, merged: Any, tmp_path: Path
) -> None:
    policy = trained(LoraSettings(r=had[0], alpha=had[1], target_modules=had[2]))
    expected, weights = logits(policy), dict(policy.model.named_parameters())
    settings = LoraSettings(r=asked[0], alpha=asked[1], target_modules=asked[2])
    wide = adapt_policy(saved(policy, tmp_path), settings, seed=2)
    config = wide.model.peft_config["default"]
    assert (config.r, config.lora_alpha, matrices(wide)) == merged
    assert ranks(wide) == {merged[0]}
    torch.testing.assert_close(logits(wide), expected, rtol=0, atol=1e-6)  # sums of more terms, all new ones exactly 0
    for name, parameter in wide.model.named_parameters():
        if "lora_A" in name and name in weights:
            assert torch.equal(parameter[: had[0]], weights[name]), "the old factor lies in the first ranks"
            assert had[0] == merged[0] or bool(parameter[had[0] :].ne(0).any()), "what is new can learn"
        if "lora_B" in name and name in weights:
            assert torch.equal(parameter[:, : had[0]], weights[name])
            assert not bool(parameter[:, had[0] :].any()), "what is new adds nothing yet"


def test_keeping_alpha_instead_of_the_scale_would_halve_what_the_adapter_computes(tmp_path: Path) -> None:
    # delta = alpha / r * B A: with the same factors and alpha 8, rank 8 has 1 where rank 4 has 2
    policy = trained(LoraSettings(r=4, alpha=8, target_modules=("q_proj",)))
    settings = LoraSettings(r=8, alpha=8, target_modules=("q_proj",))
    wide = adapt_policy(saved(policy, tmp_path), settings, seed=2).model
    layer = wide.get_base_model().model.layers[0].self_attn.q_proj
    a, b = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    torch.testing.assert_close(layer.scaling["default"] * (b @ a), 2 * (b[:, :4] @ a[:4]), rtol=0, atol=1e-6)


def test_merging_widens_every_expert_in_its_own_place(tmp_path: Path) -> None:
    policy = trained(LoraSettings(r=2, alpha=4), MOE)
    expected = logits(policy)
    wide = adapt_policy(saved(policy, tmp_path), LoraSettings(r=5, alpha=4), seed=2)
    torch.testing.assert_close(logits(wide), expected, rtol=0, atol=1e-6)
    assert not torch.equal(expected, logits(load_policy(MOE)))


def test_merging_again_changes_nothing(tmp_path: Path) -> None:
    settings = LoraSettings(r=8, alpha=8, target_modules=("v_proj",))
    first = saved(trained(LoraSettings(r=4, alpha=8, target_modules=("q_proj",))), tmp_path / "first")
    once = adapt_policy(first, settings, seed=2)
    again = adapt_policy(saved(once, tmp_path / "once"), settings, seed=3)
    assert torch.equal(logits(again), logits(once))
    assert again.model.peft_config["default"].lora_alpha == 16.0


def test_an_adapter_that_the_settings_cannot_describe_is_refused() -> None:
    policy = load_policy(TINY)
    model = get_peft_model(policy.model, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ConfigError, match=r"expected a LoRA adapter that \[training.lora\] can describe.*use_dora"):
        adapt_policy(Policy(model, policy.tokenizer, policy.base), LoraSettings(), seed=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("targets", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head", "q_proj")])
def test_an_adapter_of_the_embeddings_or_the_head_learns_by_autograds_gradient(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    policy = trained(LoraSettings(r=2, alpha=4, target_modules=targets))
    ids, valid = torch.arange(40, 60)[None], torch.ones(1, 20, dtype=torch.bool)
    acted = valid.clone()
    acted[:, :8] = False
    weights = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert len(weights) == 2 * len(targets) + 2 * ("q_proj" in targets)  # of two layers
    plain = policy.model(ids, use_cache=False).logits[0, 7:-1].log_softmax(-1).gather(-1, ids[0, 8:, None])
    learnt = LogprobComputer(policy.model).compute(ids, valid, acted).logprobs
    expected, found = (torch.autograd.grad(sums.sum(), list(weights.values())) for sums in (plain, learnt))
    for name, one, other in zip(weights, expected, found, strict=True):
        assert one.abs().max() > 1e-3, name
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(saved(policy, tmp_path)), logits(policy))


def test_only_the_trained_adapter_is_saved(tmp_path: Path) -> None:
    policy = adapted(LoraSettings(r=2))
    policy.model.add_adapter("reference", LoraConfig(r=2, target_modules=["q_proj"]))
    save_policy(policy, tmp_path)
    assert not (tmp_path / "reference").exists()

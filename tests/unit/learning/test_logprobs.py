from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.load import load_policy
from gspo_gym.types import Sampling

# Logits and logprobs here are of order 10; float32 rounds them to 1e-6, and a sum over 32 hidden units in another order
# moves a few of those.
FLOAT32 = 2e-5
# Of a sampled token: two float32 for each of 61 logits.
TOKEN_BYTES = 2 * 4 * 61


@pytest.fixture
def tokens():
    """Three rows of 12; the second has 9 tokens; sampled runs inside, up to the end, and one in the last place."""
    token_ids = torch.randint(3, 61, (3, 12), generator=torch.Generator().manual_seed(1))
    attention_mask = torch.ones(3, 12, dtype=torch.bool)
    attention_mask[1, 9:] = False
    action_mask = torch.zeros(3, 12, dtype=torch.bool)
    action_mask[0, 1:3] = action_mask[0, 5:8] = action_mask[1, 2:9] = action_mask[2, 11] = True
    return token_ids, attention_mask, action_mask


def compute_once(model, *tokens, temperature=1.0):
    return LogprobComputer(model, sampling=Sampling(temperature=temperature)).compute(*tokens).logprobs


def from_all_logits(model, token_ids, attention_mask, action_mask, temperature=1.0):
    """Logprobs and entropies by the model's own forward and [B, T, V] logits, one token at a time."""
    logits = model(input_ids=token_ids, attention_mask=attention_mask.long()).logits
    distribution = torch.log_softmax(logits / temperature, dim=-1)
    logprobs, entropy = torch.zeros(token_ids.shape), torch.zeros(token_ids.shape)
    for b, t in action_mask.nonzero().tolist():
        logprobs[b, t] = distribution[b, t - 1, token_ids[b, t]]
        entropy[b, t] = -(distribution[b, t - 1].exp() * distribution[b, t - 1]).sum()
    return logprobs, entropy.detach()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": 1.5}),
        ("cohere", {"logit_scale": 2.0, "initializer_range": 0.1}),
        ("granite", {"logits_scaling": 3.0}),
        ("mistral", {"sliding_window": 4}),
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    ],
)
def test_logprobs_entropy_and_gradients_are_those_of_the_models_own_logits(make_model, tokens, kind, config):
    model = make_model(kind, **config).eval()
    expected, expected_entropy = from_all_logits(model, *tokens, temperature=0.7)
    weights = torch.linspace(-1, 1, expected.numel()).reshape(expected.shape)
    (expected * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    scores = LogprobComputer(model, sampling=Sampling(temperature=0.7), logits_bytes=5 * TOKEN_BYTES).compute(*tokens)
    torch.testing.assert_close(scores.logprobs, expected, rtol=0, atol=FLOAT32)
    torch.testing.assert_close(scores.entropy, expected_entropy, rtol=0, atol=FLOAT32)
    assert scores.logprobs.dtype == torch.float32
    assert not scores.entropy.requires_grad
    (scores.logprobs * weights).sum().backward()
    scored = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert scored.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        # 1e-4 of the largest entry: sums of a few hundred float32 products in another order; and 1e-6 of the model's
        # largest, for gradients that are 0 but for rounding (a key's bias)
        tolerance = 1e-4 * float(gradient.abs().max()) + 1e-6 * largest
        torch.testing.assert_close(scored[name], gradient, rtol=0, atol=tolerance)


def test_in_float64_scoring_and_the_models_logits_agree_to_its_last_digits(make_model, tokens):
    model = make_model(dtype=torch.float64).eval()
    distribution = torch.log_softmax(model(input_ids=tokens[0], attention_mask=tokens[1].long()).logits / 2, -1)
    expected = distribution[:, :-1].gather(-1, tokens[0][:, 1:, None]).squeeze(-1)
    logprobs = compute_once(model, *tokens, temperature=2.0)
    # 1e-6, not 1e-13, because rotary angles and attention kernels of transformers pass through float32 here and there
    torch.testing.assert_close(logprobs[:, 1:][tokens[2][:, 1:]], expected[tokens[2][:, 1:]], rtol=0, atol=1e-6)
    assert logprobs.dtype == torch.float64


def test_a_16_bit_model_is_scored_in_float32(make_model, tokens):
    model = make_model(dtype=torch.bfloat16)
    logprobs = compute_once(model, *tokens)
    assert logprobs.dtype == torch.float32
    # exp of the logprobs of all tokens at one place sums to 1 in float32; in bf16 it would be off by up to 1e-2
    every_token = torch.arange(61)[:, None]
    prefix = tokens[0][:1, :4].expand(61, 4)
    mask = torch.zeros(61, 5, dtype=torch.bool)
    mask[:, 4] = True
    scored = compute_once(model, torch.cat([prefix, every_token], 1), torch.ones(61, 5, dtype=torch.bool), mask)
    assert scored[:, 4].exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 12, 13, 100])
def test_the_chunk_size_changes_nothing(make_model, tokens, num_tokens):
    model = make_model(dtype=torch.float64)
    whole = LogprobComputer(model).compute(*tokens)
    chunked = LogprobComputer(model, logits_bytes=num_tokens * 2 * TOKEN_BYTES).compute(*tokens)
    # float64: only the matrix product's order of summation may differ
    torch.testing.assert_close(chunked.logprobs, whole.logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(chunked.entropy, whole.entropy, rtol=0, atol=1e-12)


class WidestLogits(TorchDispatchMode):
    """Notes the largest tensor whose last axis is the vocabulary's."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[-1] == 61:
                self.rows = max(self.rows, value.numel() // 61)
        return out


def test_no_more_than_a_chunk_of_logits_exists_forward_or_backward(make_model, tokens):
    model = make_model()
    computer = LogprobComputer(model, logits_bytes=4 * 8 * 4 * 61)  # 8 copies through a module with a hook
    head_rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: head_rows.append(output.numel() // 61))
    with WidestLogits() as widest:
        computer.compute(*tokens).logprobs.sum().backward()
    assert int(tokens[2].sum()) == 13
    # three full chunks and one token, computed once more in the backward pass; B * T would be 36 rows
    assert sorted(head_rows) == sorted([4, 4, 4, 1] * 2)
    # an embedding's gradient is [61, 32]; nothing else ends in the vocabulary. 4 rows of logits, 32 = the head's weight
    # transposed for its product.
    assert widest.rows <= 32


def test_the_decoder_keeps_no_keys_and_values(make_model, tokens):
    model, kept = make_model(), []
    model.model.register_forward_hook(lambda module, inputs, output: kept.append(output.past_key_values))
    compute_once(model, *tokens)
    assert kept == [None] * 3, "the model's own forward and the decoder's in the probe, and the tokens'"


def test_without_gradients_nothing_is_computed_twice(make_model, tokens):
    model = make_model()
    computer = LogprobComputer(model, logits_bytes=4 * 8 * 4 * 61)  # 8 copies through a module with a hook
    head_rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: head_rows.append(output.numel() // 61))
    with torch.no_grad():
        computer.compute(*tokens)
    assert head_rows == [4, 4, 4, 1]


def test_what_stands_in_the_padding_changes_nothing(make_model, tokens):
    token_ids, attention_mask, action_mask = tokens
    computer = LogprobComputer(make_model())
    other = torch.where(attention_mask, token_ids, 60)
    assert torch.equal(
        computer.compute(*tokens).logprobs, computer.compute(other, attention_mask, action_mask).logprobs
    )


def test_dropout_is_off_with_and_without_gradients(make_model, tokens):
    model = make_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    computer = LogprobComputer(model)
    model.train()
    with_gradients = computer.compute(*tokens).logprobs.detach()
    model.train()
    with torch.no_grad():
        without = computer.compute(*tokens).logprobs
    # equal but for the order of summation, as the two may take different kernels; dropout would move them by units
    torch.testing.assert_close(with_gradients, without, rtol=0, atol=FLOAT32)
    assert not any(module.training for module in model.modules()), "also when the backward pass computes parts again"


def test_dropout_stays_off_where_the_backward_pass_applies_the_head_again(make_model, tokens):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False, lora_dropout=0.5)
    model = peft.get_peft_model(make_model(), config).train()
    gradients = []
    for num_tokens in (1000, 4):  # the first keeps its logits, the second computes them again
        model.zero_grad()
        LogprobComputer(model, logits_bytes=num_tokens * TOKEN_BYTES).compute(*tokens).logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    for kept, computed_again in zip(*gradients, strict=True):
        torch.testing.assert_close(computed_again, kept, rtol=0, atol=1e-4 * float(kept.abs().max()))


def test_gradient_checkpointing_still_acts_and_changes_no_gradient(make_model, tokens):
    model = make_model(attention_dropout=0.5).train()
    LogprobComputer(model).compute(*tokens).logprobs.sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    computer = LogprobComputer(model)
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    computer.compute(*tokens).logprobs.sum().backward()
    assert len(calls) == 2, "the layer ran once forward and once more in the backward pass"
    assert not any(module.training for module in model.modules()), "an engine that shares the model can decode with it"
    for name, parameter in model.named_parameters():
        # the same operations in the same order
        torch.testing.assert_close(parameter.grad, plain[name], rtol=0, atol=1e-5 * float(plain[name].abs().max()))


def test_checkpointed_layers_that_would_drop_out_are_refused(make_model):
    # OPT's layers read their own training flag for dropout, which checkpointing needs to be set
    model = make_model("opt", ffn_dim=48, word_embed_proj_dim=16, dropout=0.5)
    LogprobComputer(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ConfigError, match="drops out in eval mode"):
        LogprobComputer(model)


def test_a_lora_model_is_scored_as_peft_computes_it(make_model, tokens):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(make_model(), config)
    expected, _ = from_all_logits(model.eval(), *tokens)
    logprobs = LogprobComputer(model, logits_bytes=4 * TOKEN_BYTES).compute(*tokens).logprobs
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=FLOAT32)
    with model.disable_adapter():
        base, _ = from_all_logits(model, *tokens)
    assert float((logprobs - base).abs().max().detach()) > 0.01, "the adapter does something"


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(make_model):
    model = make_model(initializer_range=0.02)  # an untrained model's logits are small, so that a softcap hardly shows
    original = type(model).forward

    class Capped(type(model)):
        def forward(self, *args, **kwargs):
            output = original(self, *args, **kwargs)
            output.logits = 30 * torch.tanh(output.logits / 30)
            return output

    model.__class__ = Capped
    with pytest.raises(ConfigError, match="changes its logits"):
        LogprobComputer(model)
    assert not model.lm_head._forward_hooks, "what the probe watched with is removed"


@pytest.mark.parametrize(("num_roundings", "is_refused"), [(7.5, False), (8.5, True)])
def test_logits_may_differ_by_eight_roundings_of_the_largest(make_model, num_roundings, is_refused):
    class Off(type(make_model())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            off = torch.zeros_like(output.logits)
            # at the smallest logit, where the sum is rounded least
            off[0, 0, output.logits[0, 0].abs().argmin()] = output.logits.abs().max()
            output.logits = output.logits + num_roundings * torch.finfo(torch.float32).eps * off
            return output

    model = make_model()
    model.__class__ = Off
    with pytest.raises(ConfigError, match="changes its logits") if is_refused else contextlib.nullcontext():
        LogprobComputer(model)


def test_a_head_of_zeros_gives_each_of_the_tokens_the_same_logprob(make_model, tokens):
    model = make_model("qwen3")
    torch.nn.init.zeros_(model.lm_head.weight)  # no logit is large, and none may differ
    logprobs = compute_once(model, *tokens)
    # log(1/61) = -4.1108739
    assert torch.allclose(logprobs[tokens[2]], torch.tensor(-4.1108739), rtol=0, atol=1e-6)


def test_a_model_that_does_not_do_what_its_config_says_is_refused(make_model):
    model = make_model("cohere", logit_scale=0.25)
    model.config.logit_scale = 0.5
    with pytest.raises(ConfigError, match="changes its logits"):
        LogprobComputer(model)


@pytest.mark.parametrize(
    "logits_of",
    [
        lambda head, hidden: hidden @ head.weight.T,
        lambda head, hidden: head(hidden) + head(hidden),
        lambda head, hidden: head(hidden[:, -1:]),
        lambda head, hidden: head(hidden)[:, -1:],
    ],
    ids=["never", "twice", "to the last token", "and cut"],
)
def test_a_model_must_apply_its_head_once_to_every_token(make_model, logits_of):
    class Other(type(make_model())):
        def forward(self, **inputs):
            return SimpleNamespace(logits=logits_of(self.lm_head, self.model(**inputs).last_hidden_state))

    model = make_model()
    model.__class__ = Other
    with pytest.raises(ConfigError, match="applied once"):
        LogprobComputer(model)


def test_a_model_that_gives_its_head_a_hundredth_more_than_its_decoder_says_is_refused(make_model):
    class Other(type(make_model())):
        def forward(self, **inputs):
            return SimpleNamespace(logits=self.lm_head(1.01 * self.model(**inputs).last_hidden_state))

    model = make_model()
    model.__class__ = Other
    with pytest.raises(ConfigError, match="cannot be scored"):
        LogprobComputer(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_looks_into_its_padding_is_refused(make_model, dtype):
    model = make_model(dtype=dtype)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigError, match="cannot be scored"):
        LogprobComputer(model)


def test_a_model_whose_weights_are_not_finite_is_refused(make_model):
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(ConfigError, match="weights sound"):
        LogprobComputer(model)


@pytest.mark.parametrize("names", ["itself", "none"])
def test_a_model_that_names_no_decoder_is_scored_through_its_base_model(make_model, tokens, names):
    class Own(type(make_model())):
        def get_decoder(self):
            return self if names == "itself" else None

    expected = compute_once(make_model(), *tokens)
    model = make_model()
    model.__class__ = Own
    assert torch.equal(compute_once(model, *tokens), expected)


def test_a_module_without_an_output_head_is_refused(make_model):
    with pytest.raises(ConfigError, match="output head"):
        LogprobComputer(make_model().model)


def test_left_padding_and_uncaused_tokens_are_refused(make_model, tokens):
    token_ids, attention_mask, action_mask = tokens
    computer = LogprobComputer(make_model())
    with pytest.raises(RecordError, match="on the right"):
        computer.compute(token_ids, attention_mask.flip(1), action_mask)
    with pytest.raises(RecordError, match="on the right"):
        computer.compute(token_ids, attention_mask, action_mask | ~attention_mask)
    with pytest.raises(RecordError, match="position 0"):
        computer.compute(token_ids, attention_mask, attention_mask)


def make_computer(model, *, temperature=1.0, **settings):
    return LogprobComputer(model, sampling=Sampling(temperature=temperature), **settings)


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"temperature": float("nan")}, {"logits_bytes": 0}])
def test_settings_out_of_range_are_refused(make_model, setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        make_computer(make_model(), **setting)


def test_a_model_that_cannot_be_called_without_a_cache_is_refused() -> None:
    policy = load_policy("tiny:qwen3-64")

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> None:
        raise AssertionError("never called")

    policy.model.forward = forward
    with pytest.raises(ConfigError, match=r"takes no token ids without a cache: .*use_cache"):
        LogprobComputer(policy.model)

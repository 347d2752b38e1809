"""Shared prefixes against rows: the same logprobs and gradients, from fewer tokens."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from gspo_gym.errors import ConfigError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.prefixes import SHARED_ATTENTION, PrefixSharing, build_trie

# A row more than the three that begin alike, a prefix of another, two that differ late, one repeated, one of one token.
ROWS = [
    [5, 6, 7, 8, 9, 10, 11],
    [5, 6, 7, 8, 12],
    [5, 6, 7, 8],
    [30, 31, 32, 33, 34, 35],
    [5, 6, 7, 8, 9, 13, 14, 15],
    [5, 6, 7, 8, 9, 10, 11],
    [40],
    [5, 20, 21],
]
# Its nodes: 7 of the first; 12; none; 6; 13, 14, 15; none; 40; 20, 21.
NUM_NODES = 7 + 1 + 0 + 6 + 3 + 0 + 1 + 2


def padded(rows):
    width = max(len(row) for row in rows)
    token_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    attention_mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return token_ids, attention_mask


@pytest.fixture
def batch():
    token_ids, attention_mask = padded([[*row, 50 + b] for b, row in enumerate(ROWS)])
    action_mask = attention_mask.clone()
    action_mask[:, 0] = False
    action_mask[0, 2:5] = False
    return token_ids, attention_mask, action_mask


def test_every_shared_token_stands_once_and_every_row_can_be_read_off():
    token_ids, attention_mask = padded(ROWS)
    trie = build_trie(token_ids, attention_mask)
    assert trie.num_tokens == NUM_NODES
    assert torch.equal(trie.token_ids[0][trie.places][attention_mask], token_ids[attention_mask])
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    assert torch.equal(trie.positions[0][trie.places][attention_mask], positions[attention_mask])
    for a, first in enumerate(ROWS):
        for b, second in enumerate(ROWS):
            for t in range(min(len(first), len(second))):
                assert (trie.places[a, t] == trie.places[b, t]) == (first[: t + 1] == second[: t + 1])


def test_rows_attend_together_with_others_that_have_at_least_half_as_many_new_tokens():
    # In order, the new tokens: 4, and 3 after 4; none; 3 after 5; 1 after 4; 2 after 1; 6; 1.
    def shapes(rows):
        masks = [(b, None if b.mask is None else tuple(b.mask.shape)) for b in build_trie(*padded(rows)).buckets]
        return [(b.num_rows, len(b.queries), len(b.keys), mask) for b, mask in masks]

    assert shapes(ROWS) == [
        (2, 2 * 6, 2 * 6, None),
        (1, 1, 1, None),
        (3, 3 * 3, 3 * 8, (3, 1, 3, 8)),
        (1, 1, 5, (1, 1, 1, 5)),
    ]
    assert shapes([[5, 6, 7, 8], [9, 10]]) == [(2, 2 * 4, 2 * 4, None)]
    # One shared token is enough to attend together.
    one = [[5, 1, 2, 3], [5, 4, 6, 7], [5, 8, 9, 10]]
    assert shapes(one) == [(1, 4, 4, None), (2, 2 * 3, 2 * 4, (2, 1, 3, 4))]


def test_the_probe_shares_five_of_its_sixteen_tokens(make_model):
    decoder, tokens = make_model().model, []
    decoder.embed_tokens.register_forward_hook(lambda _module, inputs, _output: tokens.append(inputs[0].numel()))
    PrefixSharing(decoder, True)
    assert tokens == [16, 16 - 5]


def compute(model, batch, share_prefixes, **settings):
    model.zero_grad()
    computer = LogprobComputer(model, share_prefixes=share_prefixes, entropy_has_gradient=True, **settings)
    tokens = []
    hook = computer._parts.decoder.get_input_embeddings().register_forward_hook(
        lambda _module, inputs, _output: tokens.append(inputs[0].numel())
    )
    computed = computer.compute(*batch)
    hook.remove()
    weights = torch.linspace(-1, 1, batch[0].numel(), dtype=computed.logprobs.dtype).view(batch[0].shape)
    (weights * (computed.logprobs + computed.entropy)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return computed, gradients, tokens[0]


def assert_same(shared, rows, *, tolerance):
    for name in ("logprobs", "entropy"):
        expected = getattr(rows[0], name).detach()
        atol = tolerance * float(expected.abs().max())
        torch.testing.assert_close(getattr(shared[0], name), expected, rtol=0, atol=atol)
    assert shared[1].keys() == rows[1].keys()
    whole = torch.cat([gradient.flatten() for gradient in rows[1].values()]).norm()
    difference = torch.cat([(shared[1][name] - gradient).flatten() for name, gradient in rows[1].items()]).norm()
    assert float(difference) <= tolerance * float(whole)


def norms_in_float64(model):
    """Let the norms of a float64 model compute in float64: those of transformers pass through float32."""

    def forward(norm, hidden):
        return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(forward, module)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt_neox", "gpt2"])
def test_logprobs_entropies_and_gradients_are_those_of_the_rows(make_model, batch, kind, dtype, tolerance):
    model = make_model(kind, dtype=dtype)
    if dtype == torch.float64:
        norms_in_float64(model)
    rows, shared = (compute(model, batch, wanted) for wanted in (False, True))
    assert (rows[2], shared[2]) == (len(ROWS) * 8, NUM_NODES)
    assert_same(shared, rows, tolerance=tolerance)


def test_gradient_checkpointing_computes_the_same_trie_again(make_model, batch):
    model = norms_in_float64(make_model(dtype=torch.float64))
    rows = compute(model, batch, False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    shared = compute(model, batch, True)
    assert calls[-2:] == [1, 1]
    assert shared[2] == NUM_NODES
    assert_same(shared, rows, tolerance=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_adapter_shares_unless_its_dropout_draws_by_row(make_model, batch, dropout):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=dropout)
    model = peft.get_peft_model(norms_in_float64(make_model(dtype=torch.float64)), config)
    rows, shared = (compute(model, batch, wanted) for wanted in (False, "auto"))
    assert shared[2] == (len(ROWS) * 8 if dropout else NUM_NODES)
    assert_same(shared, rows, tolerance=1e-12)
    if dropout:
        with pytest.raises(ConfigError, match=r"training.share_prefixes: .* dropout .* draws by row"):
            LogprobComputer(model, share_prefixes=True)


def test_the_models_own_forward_is_what_it_was(make_model):
    token_ids, attention_mask = padded(ROWS)
    model = make_model().eval()
    inputs = {"input_ids": token_ids, "attention_mask": attention_mask.long()}
    expected = model(**inputs).logits
    LogprobComputer(model, share_prefixes=True)
    assert model.config._attn_implementation == SHARED_ATTENTION
    assert torch.equal(model(**inputs).logits, expected)


def drop_the_trie(model):
    class Dropping(type(model.model)):
        def forward(self, shared_prefixes=None, **inputs):
            return super().forward(**inputs)

    model.model.__class__ = Dropping


def refuse_the_trie(model):
    class Strict(type(model.model)):
        def forward(self, input_ids, use_cache):
            return super().forward(input_ids=input_ids, use_cache=use_cache)

    model.model.__class__ = Strict


def chunk_a_layer(model):
    model.config.layer_types[1] = "chunked_attention"


@pytest.mark.parametrize(
    ("kind", "options", "change", "reason"),
    [
        ("mistral", {"sliding_window": 4}, None, "sliding window"),
        ("qwen3", {"attn_implementation": "eager"}, None, 'its attention is "eager"'),
        ("qwen3", {}, chunk_a_layer, "layers of chunked_attention"),
        ("qwen3", {}, drop_the_trie, "come out otherwise"),
        ("qwen3", {"dtype": torch.bfloat16}, drop_the_trie, "come out otherwise"),
        ("qwen3", {}, refuse_the_trie, "unexpected keyword argument"),
    ],
)
def test_what_cannot_share_is_named_or_computed_by_rows(make_model, batch, caplog, kind, options, change, reason):
    model = make_model(kind, **options)
    own = model.config._attn_implementation
    if change is not None:
        change(model)
    with pytest.raises(ConfigError, match=f"training.share_prefixes: .* cannot share prefixes: .*{reason}"):
        PrefixSharing(model.model, True)
    with caplog.at_level(logging.INFO):
        sharing = PrefixSharing(model.model, "auto")
    assert "training.share_prefixes: off, since" in caplog.text
    assert sharing.shared(batch[0], batch[1]) is None
    assert model.config._attn_implementation == own


def test_auto_shares_where_a_sixth_of_the_tokens_is_saved_and_says_so_once(make_model, caplog):
    model = make_model()
    with caplog.at_level(logging.INFO):
        computer = LogprobComputer(model, share_prefixes="auto")
        # two rows of 6 tokens that share the first `n`: 12 - n in the trie, 12 / 1.2 = 10 at most
        for n, is_shared in ((1, False), (2, True), (3, True)):
            token_ids = torch.tensor([[7] * n + [20] * (6 - n), [7] * n + [30] * (6 - n)])
            assert (computer.prefixes.shared(token_ids, token_ids > 0) is not None) == is_shared
    assert caplog.messages == ["training.share_prefixes: the first rows hold 1.09 times the tokens of their trie"]
    assert LogprobComputer(model, share_prefixes=False).prefixes.shared(token_ids, token_ids > 0) is None

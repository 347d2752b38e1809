"""The head's own backward pass against finite differences, autograd over all logits, and a count of its memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_gym.learning.head import ChunkedHead, OutputHead
from gspo_gym.types import Sampling

VOCABULARY, WIDTH, TOKENS = 61, 3, 7


def make_head(*, bias=False, dtype=torch.float64):
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return linear, hidden, torch.randint(0, VOCABULARY, (TOKENS,))


def chunked(linear, *, chunk, temperature=1.0, entropy_has_gradient=False, **parts):
    num_copies = 3 if entropy_has_gradient else 2  # of a plain linear head; in 16 bits, one more in these
    itemsize = {torch.float64: 8 * num_copies, torch.float32: 4 * num_copies, torch.bfloat16: 4 * num_copies + 2}
    budget = chunk * VOCABULARY * itemsize[linear.weight.dtype]
    head = OutputHead(linear, **parts)
    return ChunkedHead(head, VOCABULARY, Sampling(temperature=temperature), budget, entropy_has_gradient)


def from_all_logits(linear, hidden, targets, *, factor=1.0):
    """Logprobs and entropies by logsumexp."""
    logits = linear(hidden).to(torch.promote_types(hidden.dtype, torch.float32)) * factor
    normalizer = torch.logsumexp(logits, -1)
    entropy = normalizer - (torch.softmax(logits, -1) * logits).sum(-1)
    return logits.gather(-1, targets[:, None]).squeeze(-1) - normalizer, entropy


@pytest.mark.parametrize("chunk", [1, 3, 7, 8])
@pytest.mark.parametrize("entropy_has_gradient", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_finite_differences(chunk, entropy_has_gradient, bias):
    linear, hidden, targets = make_head(bias=bias)
    head = chunked(linear, chunk=chunk, temperature=0.7, entropy_has_gradient=entropy_has_gradient, multiplier=1.5)

    def compute(*_inputs):
        logprobs, entropy = head.compute(hidden, targets, drops_out=False)
        return (logprobs, entropy) if entropy_has_gradient else logprobs

    assert torch.autograd.gradcheck(compute, (hidden, *linear.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [2, 7])
def test_values_and_gradients_are_those_of_all_logits(dtype, chunk):
    linear, hidden, targets = make_head(dtype=dtype, bias=True)
    weights = torch.linspace(-1, 1, TOKENS, dtype=dtype)
    expected, expected_entropy = from_all_logits(linear, hidden, targets, factor=2 / 0.5)
    inputs = (hidden, linear.weight, linear.bias)
    gradients = torch.autograd.grad((weights * (expected + expected_entropy)).sum(), inputs)

    head = chunked(linear, chunk=chunk, temperature=0.5, entropy_has_gradient=True, multiplier=2.0)
    logprobs, entropy = head.compute(hidden, targets, drops_out=False)
    assert logprobs.grad_fn is not None
    assert logprobs.grad_fn.name() == "_LinearHeadBackward"
    # values of order 10, gradients of order 1, each a sum of at most 61 products
    rounding = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=rounding)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=rounding)
    for actual, gradient in zip(
        torch.autograd.grad((weights * (logprobs + entropy)).sum(), inputs), gradients, strict=True
    ):
        torch.testing.assert_close(actual, gradient, rtol=0, atol=rounding)


def test_logprobs_are_bit_for_bit_those_of_torchs_log_softmax():
    linear, hidden, targets = make_head(dtype=torch.float32)
    expected = torch.log_softmax(linear(hidden) / 0.7, -1).gather(-1, targets[:, None]).squeeze(-1)
    logprobs, _ = chunked(linear, chunk=7, temperature=0.7).compute(hidden, targets, drops_out=False)
    assert torch.equal(logprobs, expected)


class Operations(TorchDispatchMode):
    """Notes products, and the most rows of logits in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.num_head_products, self.rows = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[-1] == VOCABULARY:
            self.num_head_products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            self.rows = max(self.rows, out.shape[0])
        return out


@pytest.mark.parametrize("entropy_has_gradient", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("chunk", "num_products"), [(4, 2 * 2), (7, 1), (100, 1)])
def test_a_chunk_of_logits_exists_and_is_computed_twice_unless_it_is_the_only_one(
    chunk, num_products, bias, entropy_has_gradient
):
    linear, hidden, targets = make_head(bias=bias)
    head = chunked(linear, chunk=chunk, entropy_has_gradient=entropy_has_gradient)
    with Operations() as seen:
        logprobs, _ = head.compute(hidden, targets, drops_out=False)
        logprobs.sum().backward()
    assert (seen.rows, seen.num_head_products) == (min(chunk, TOKENS), num_products)


def test_a_budget_below_one_token_computes_one_at_a_time():
    linear, hidden, targets = make_head()
    with torch.no_grad(), Operations() as seen:
        chunked(linear, chunk=0).compute(hidden, targets, drops_out=False)
    assert (seen.rows, seen.num_head_products) == (WIDTH, TOKENS)  # [D, V] is the weight, transposed


def test_a_16_bit_heads_gradient_does_not_lose_digits_with_the_number_of_its_chunks():
    torch.manual_seed(0)
    linear = nn.Linear(1, VOCABULARY, bias=True).bfloat16()
    hidden = torch.ones(1024, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1024, dtype=torch.int64)
    logprobs, _ = chunked(linear, chunk=1).compute(hidden, targets, drops_out=False)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    # all tokens are the same: 1024 times the gradient of one, whose entries bf16 rounds to 1/256
    p = torch.softmax(linear(hidden[:1]).float(), -1)[0]
    expected = 1024 * (torch.eye(VOCABULARY)[0] - p)
    torch.testing.assert_close(linear.weight.grad[:, 0].float(), expected, rtol=2 / 256, atol=0)
    torch.testing.assert_close(linear.bias.grad.float(), expected, rtol=2 / 256, atol=0)
    assert (hidden.grad.dtype, linear.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("chunk", [2, 7])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(chunk):
    gradients = []
    for frozen in ((), ("weight", "bias"), ("hidden",), ("bias",)):
        linear, hidden, targets = make_head(bias=True)
        inputs = {"hidden": hidden, "weight": linear.weight, "bias": linear.bias}
        for name in frozen:
            inputs[name].requires_grad_(False)
        chunked(linear, chunk=chunk).compute(hidden, targets, drops_out=False)[0].sum().backward()
        assert all((inputs[name].grad is None) == (name in frozen) for name in inputs)
        gradients.append({name: value.grad for name, value in inputs.items() if name not in frozen})
    for some in gradients[1:]:
        assert all(torch.equal(gradient, gradients[0][name]) for name, gradient in some.items())


def test_without_an_entropy_bonus_the_entropy_is_detached():
    linear, hidden, targets = make_head()
    for wanted in (False, True):
        logprobs, entropy = chunked(linear, chunk=2, entropy_has_gradient=wanted).compute(
            hidden, targets, drops_out=False
        )
        assert (logprobs.requires_grad, entropy.requires_grad) == (True, wanted)


def test_no_sampled_token_gives_no_logprob_and_no_gradient():
    linear, hidden, targets = make_head()
    logprobs, _ = chunked(linear, chunk=2).compute(hidden[:0], targets[:0], drops_out=False)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert not linear.weight.grad.any()


def other_heads():
    hooked, _, _ = make_head()
    hooked.register_forward_hook(lambda _module, _inputs, output: output * 2)
    narrowed, _, _ = make_head()
    narrowed.register_forward_pre_hook(lambda _module, inputs: inputs[0] * 2)

    class Doubled(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * 2

    doubled = Doubled(WIDTH, VOCABULARY, bias=False).double()
    doubled.load_state_dict(make_head()[0].state_dict())
    replaced, _, _ = make_head()  # as accelerate does
    replaced.forward = lambda hidden: nn.functional.linear(hidden, replaced.weight) * 2
    return {"hook": hooked, "hook before": narrowed, "subclass": doubled, "replaced": replaced}


@pytest.mark.parametrize("kind", ["hook", "hook before", "subclass", "replaced"])
def test_a_module_that_is_more_than_its_weight_is_called(kind):
    linear = other_heads()[kind]
    plain, hidden, targets = make_head()
    logprobs, _ = chunked(linear, chunk=2).compute(hidden, targets, drops_out=False)
    expected, _ = from_all_logits(plain, hidden, targets, factor=2)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("sampling", "num_copies"), [(Sampling(), 8), (Sampling(top_k=5), 12)])
def test_a_head_that_autograd_goes_through_keeps_more_of_each_token(sampling, num_copies):
    linear, hidden, targets = make_head(dtype=torch.float32)
    budget = 3 * num_copies * 4 * VOCABULARY  # three tokens of num_copies [V] in float32
    head = ChunkedHead(OutputHead(linear, softcap=30.0), VOCABULARY, sampling, budget, entropy_has_gradient=False)
    with torch.no_grad(), Operations() as seen:
        head.compute(hidden, targets, drops_out=False)
    assert seen.num_head_products == 3  # 7 tokens: 3, 3 and 1


def test_under_autocast_the_head_computes_in_16_bits_in_both_passes():
    linear, hidden, targets = make_head(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = chunked(linear, chunk=2).compute(hidden, targets, drops_out=False)
        expected, _ = from_all_logits(linear, hidden, targets)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    (actual,) = torch.autograd.grad(logprobs.sum(), linear.weight)
    (gradient,) = torch.autograd.grad(expected.sum(), linear.weight)
    torch.testing.assert_close(actual, gradient, rtol=0, atol=0.02)  # bf16 rounds sums of order 4 to 1/64


class LiveLogits(TorchDispatchMode):
    """Counts the most memories of this many rows of logits that were held at a time."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._shape, self._held, self.most = (rows, VOCABULARY), {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self._shape and out.dtype == torch.float64:
            storage = StorageWeakRef(out.untyped_storage())
            self._held[storage.cdata] = storage
            self._held = {key: each for key, each in self._held.items() if not each.expired()}
            self.most = max(self.most, len(self._held))
        return out


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_a_divergence_holds_the_logits_of_a_chunk_in_the_copies_that_the_budget_counts(divergence):
    """Eight, as of every head without a backward pass of its own; two chunks of four and three tokens."""
    linear, hidden, targets = make_head()
    teacher = make_head()[0]
    heads = [
        ChunkedHead(OutputHead(m), VOCABULARY, Sampling(), 4 * 8 * 8 * VOCABULARY, False) for m in (linear, teacher)
    ]
    with Operations() as seen, LiveLogits(4) as memory:
        heads[0].diverge(hidden, heads[1], hidden.detach(), targets, divergence, drops_out=False).sum().backward()
    assert seen.rows == 4
    assert 0 < memory.most <= 8

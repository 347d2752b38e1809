"""Hidden states -> logprobs and entropies of sampled tokens, with a bounded number of logits in memory.

`truncate` leaves the tokens that truncated sampling leaves: the learner then evaluates the distribution that was
sampled from. It is the engine's rule again, which the learner may not import; a test holds the two together.
V = vocabulary, A = sampled tokens, C = sampled tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gspo_gym.types import Sampling


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Output head of a causal language model: logits = cap(module(hidden) * multiplier).

    Attributes:
        module: Any: peft wraps what transformers names.
        num_token_ids: ids from there on are not the tokenizer's, and have no part in the distribution; None: all are.
    """

    module: Any
    multiplier: float = 1.0
    softcap: float | None = None
    num_token_ids: int | None = None

    def finish_logits(self, head_output: Tensor) -> Tensor:
        """Return the model's logits in float32 (float64 of a float64 model)."""
        logits = head_output.to(_working_dtype(head_output))
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    @property
    def is_plain_linear(self) -> bool:
        """Whether the logits are hidden @ weight.T + bias times a number, and nothing watches the module."""
        module = self.module
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or self.softcap is not None:
            return False
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        return not any(hooks) and "forward" not in vars(module)  # accelerate and others replace it


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """Head that computes logprobs under one distribution, chunk by chunk.

    Attributes:
        vocab_size: V, of the head's output.
        sampling: the distribution of the logprobs.
        logits_bytes: memory of a chunk's logits and of what is made of them; at least one token is computed at a time.
        entropy_has_gradient: whether entropies are differentiable; costs one [C, V] more in the backward pass.
    """

    head: OutputHead
    vocab_size: int
    sampling: Sampling
    logits_bytes: int
    entropy_has_gradient: bool

    def compute(self, hidden: Tensor, targets: Tensor, *, drops_out: bool) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies, both [A], of hidden states [A, D] and targets [A].

        drops_out: whether a dropout acts in the head, whose masks the backward pass must draw again.
        """
        num_ids = self.head.num_token_ids
        # An engine that does not know the tokenizer may sample an id which that has not.
        is_plain = self._has_own_backward(hidden) and (num_ids is None or bool((targets < num_ids).all()))
        size = self._chunk_size(hidden, is_plain=is_plain)
        if is_plain:
            weight, bias = self.head.module.weight, self.head.module.bias
            if num_ids is not None:
                weight, bias = weight[:num_ids], None if bias is None else bias[:num_ids]
            results: tuple[Tensor, Tensor] = _LinearHead.apply(  # type: ignore[no-untyped-call]
                hidden, weight, bias, targets, self, size
            )
            return results
        if len(targets) <= size:  # one chunk: keeping its logits is no more than recomputing would hold
            return self._compute_chunk(hidden, targets)
        pieces = [
            checkpoint(self._compute_chunk, h, t, use_reentrant=False, preserve_rng_state=drops_out)
            for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
        ]
        return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])

    def _has_own_backward(self, hidden: Tensor) -> bool:
        if not self.head.is_plain_linear or self.sampling.is_truncated:
            return False
        return self.head.module.weight.dtype == hidden.dtype and not torch.is_autocast_enabled(hidden.device.type)

    def _chunk_size(self, hidden: Tensor, *, is_plain: bool) -> int:
        # In float32 or better, and one more in 16 bits where the head computes so.
        if is_plain:
            num_copies = 3 if self.entropy_has_gradient else 2
        else:
            num_copies = 12 if self.sampling.is_truncated else 8  # measured; autograd keeps most results
            num_copies += 0 if self.head.num_token_ids is None else 2
        working = _working_dtype(hidden)
        token_bytes = num_copies * working.itemsize + (0 if hidden.dtype == working else hidden.dtype.itemsize)
        return max(1, self.logits_bytes // (self.vocab_size * token_bytes))

    def compare(
        self, hidden: Tensor, other: ChunkedHead, other_hidden: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log(other / own) of targets [A], and KL(own || other) of the whole distributions, [A] nats.

        Hidden states [A, D] are those of each; both heads have the ids of one tokenizer. For use without gradients.
        """
        num_ids = min(self.vocab_size, other.vocab_size)  # beyond them there is padding
        size = min(self._chunk_size(hidden, is_plain=False), other._chunk_size(other_hidden, is_plain=False))
        log_ratios, divergences = [hidden.new_zeros(0)], [hidden.new_zeros(0)]
        for part in _parts(len(targets), size):
            at = targets[part, None]
            own = self._log_softmax(hidden[part], targets[part])
            theirs = other._log_softmax(other_hidden[part], targets[part])
            log_ratios.append((theirs.gather(-1, at) - own.gather(-1, at)).squeeze(-1))
            own, theirs = own[:, :num_ids], theirs[:, :num_ids]
            divergences.append((own.exp() * (own - theirs).masked_fill(own.isneginf(), 0.0)).sum(-1))
        return torch.cat(log_ratios), torch.cat(divergences)

    def diverge(
        self,
        hidden: Tensor,
        other: ChunkedHead,
        other_hidden: Tensor,
        targets: Tensor,
        divergence: Literal["reverse_kl", "forward_kl"],
        *,
        drops_out: bool,
    ) -> Tensor:
        """Return [A] nats, KL(own || other) ("reverse_kl") or KL(other || own), both at temperature 1 and untruncated.

        Differentiable in own; the other's is a constant. Arguments as in `compare` and `compute`.
        """
        own, theirs = (replace(head, sampling=Sampling()) for head in (self, other))
        num_ids = min(self.vocab_size, other.vocab_size)  # beyond them there is padding

        def of_chunk(own_hidden: Tensor, their_hidden: Tensor, tokens: Tensor) -> Tensor:
            with torch.no_grad():
                their_logprobs = torch.log_softmax(theirs._logits(their_hidden, tokens)[:, :num_ids], dim=-1)
            logits = own._logits(own_hidden, tokens)[:, :num_ids]
            result: Tensor = _Divergence.apply(logits, their_logprobs, divergence)  # type: ignore[no-untyped-call]
            return result

        inputs = hidden, other_hidden, targets
        size = min(own._chunk_size(hidden, is_plain=False), theirs._chunk_size(other_hidden, is_plain=False))
        if len(targets) <= size:
            return of_chunk(*inputs)
        pieces = [
            checkpoint(of_chunk, *parts, use_reentrant=False, preserve_rng_state=drops_out)
            for parts in zip(*(torch.split(values, size) for values in inputs), strict=True)
        ]
        return torch.cat(pieces)

    def _log_softmax(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return [C, V] logprobs of all tokens, differentiable."""
        # float32 or better: bf16 would lose the ratio's 3rd digit
        return torch.log_softmax(self._logits(hidden, targets), dim=-1)

    def _logits(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return [C, V] logits of the distribution, differentiable."""
        logits = self.head.finish_logits(self.head.module(hidden))
        if self.sampling.temperature != 1.0:
            logits = logits / self.sampling.temperature
        if self.head.num_token_ids is not None:
            is_padding = torch.arange(logits.shape[-1], device=logits.device) >= self.head.num_token_ids
            # What was sampled has a logprob in any case, as in `truncate`.
            hidden_ids = is_padding.expand_as(logits).scatter(-1, targets[:, None], False)
            logits = logits.masked_fill(hidden_ids, float("-inf"))
        if self.sampling.is_truncated:
            logits = truncate(logits, targets, self.sampling)
        return logits

    def _compute_chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a chunk by autograd, for every kind of head and distribution."""
        log_softmax = self._log_softmax(hidden, targets)
        with torch.set_grad_enabled(self.entropy_has_gradient and torch.is_grad_enabled()):
            # A truncated token adds 0, where -inf * 0 would make value and gradient NaN.
            entropy = -(log_softmax.exp() * log_softmax.masked_fill(log_softmax.isneginf(), 0.0)).sum(-1)
        return log_softmax.gather(-1, targets[:, None]).squeeze(-1), entropy


class _LinearHead(torch.autograd.Function):
    """Logprobs and entropies under a linear head, with a backward pass that computes the logits of a chunk again.

    The same values as `ChunkedHead._compute_chunk`, from the same operations in the same order. All chunks use the
    same memory: on a CPU, fresh pages for each cost more time than the arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunked: ChunkedHead,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        buffers = _Buffers(min(size, len(targets)), hidden, weight, bias, chunked)
        logprobs = torch.empty(len(targets), dtype=_working_dtype(hidden), device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for part in _parts(len(targets), size):
            log_softmax, scratch = buffers.log_softmax(part)
            logprobs[part] = log_softmax.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = -torch.exp(log_softmax, out=scratch).mul_(log_softmax).sum(-1)
        # A single chunk is kept: that is no more than computing it again would hold.
        saved_chunk = buffers.result if 0 < len(targets) <= size and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, saved_chunk)
        ctx.chunked, ctx.size = chunked, size
        if not chunked.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grads: Tensor, entropy_grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, saved_chunk = ctx.saved_tensors
        chunked_head: ChunkedHead = ctx.chunked
        scale = chunked_head.head.multiplier / chunked_head.sampling.temperature
        logprob_grads, entropy_grads = logprob_grads * scale, entropy_grads * scale
        buffers = _Buffers(min(ctx.size, len(targets)), hidden, weight, bias, chunked_head, result=saved_chunk)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over chunks in float32: each addition in bf16 would lose the gradient's 3rd digit.
        grad_weight = torch.zeros_like(weight, dtype=_working_dtype(weight)) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=_working_dtype(bias)) if needs_bias else None
        for part in _parts(len(targets), ctx.size):
            log_softmax, grads = buffers.log_softmax(part) if saved_chunk is None else (saved_chunk, buffers.scratch)
            torch.exp(log_softmax, out=grads)
            # d logprob / d logits = [is the target] - p;  d entropy / d logits = -p (log p + entropy)
            by_logprob = logprob_grads[part, None]
            if chunked_head.entropy_has_gradient:
                grads.mul_((log_softmax + entropy[part, None]).mul_(entropy_grads[part, None]).add_(by_logprob))
            else:
                grads.mul_(by_logprob)
            grads.neg_()
            at_target = targets[part, None]
            grads.scatter_(-1, at_target, grads.gather(-1, at_target) + by_logprob)
            if grad_bias is not None:
                grad_bias += grads.sum(0)
            grads = buffers.as_head_output(grads)
            if grad_hidden is not None:
                torch.mm(grads, weight, out=grad_hidden[part])
            if grad_weight is not None and grad_weight.dtype == grads.dtype:
                grad_weight.addmm_(grads.t(), hidden[part])
            elif grad_weight is not None:
                grad_weight += grads.t() @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


class _Divergence(torch.autograd.Function):
    """KL of two distributions over a vocabulary, [C] of logits [C, V] and the other's logprobs [C, V], a constant.

    With p of the logits and q the other's, KL(p || q) has the slope p (log p - log q - KL) in the logits, and
    KL(q || p) has p - q. By autograd's way through the softmax, equal distributions would get a gradient of rounding;
    by these formulas, it is 0 to the bit.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, other: Tensor, divergence: Literal["reverse_kl", "forward_kl"]) -> Tensor:
        own = torch.log_softmax(logits, dim=-1)
        p = own.exp()
        if divergence == "reverse_kl":
            gap = (own - other).masked_fill_(own.isneginf(), 0.0)  # ids of a padded vocabulary
            result = (p * gap).sum(-1)
            slopes = gap.sub_(result[:, None]).mul_(p)
        else:
            q = other.exp()
            result = ((other - own).masked_fill_(other.isneginf(), 0.0).mul_(q)).sum(-1)
            slopes = p.sub_(q)
        ctx.save_for_backward(slopes)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * grads[:, None], None, None


class _Buffers:
    """Memory of one chunk's logits, which all chunks of a pass use.

    Attributes:
        result: [C, V], the log-softmax of the last chunk. scratch: the same shape, free after `log_softmax`.
    """

    def __init__(
        self,
        num_tokens: int,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunked_head: ChunkedHead,
        *,
        result: Tensor | None = None,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._multiplier, self._temperature = chunked_head.head.multiplier, chunked_head.sampling.temperature
        self.scratch = hidden.new_empty(num_tokens, weight.shape[0], dtype=_working_dtype(hidden))
        self.result = torch.empty_like(self.scratch) if result is None else result
        is_narrow = hidden.dtype != self.scratch.dtype
        self._output = torch.empty_like(self.scratch, dtype=hidden.dtype) if is_narrow else self.scratch

    def log_softmax(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return the log-softmax [C, V] of some hidden states, and memory of its shape to work in."""
        hidden = self._hidden[part]
        output, logits, result = (b[: len(hidden)] for b in (self._output, self.scratch, self.result))
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=output)
        else:
            torch.addmm(self._bias, hidden, self._weight.t(), out=output)
        if output is not logits:
            logits.copy_(output)
        if self._multiplier != 1.0:
            logits.mul_(self._multiplier)
        if self._temperature != 1.0:
            logits.div_(self._temperature)
        return torch.log_softmax(logits, dim=-1, out=result), logits

    def as_head_output(self, grads: Tensor) -> Tensor:
        """Return gradients of logits in the dtype of the head's output."""
        return grads if self._output is self.scratch else self._output[: len(grads)].copy_(grads)


def _parts(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


TRUNCATION_NAMES = ("min_p", "top_k", "top_p")  # the parameters that `truncate` reads, in the order in which they act


def truncate(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    """Return [A, V] logits after the temperature, -inf outside the tokens that `sampling` keeps and `targets` [A].

    The kept set is a constant for the gradient.
    """
    # The sampled tokens are kept in any case. The policy that sampled kept them; the present one may have moved, or
    # have rounded otherwise, and a logprob of -inf would say that it never could.
    is_kept = _kept_mask(logits.detach(), sampling).scatter(-1, targets[:, None], True)
    return logits.masked_fill(~is_kept, float("-inf"))


def _kept_mask(logits: Tensor, sampling: Sampling) -> Tensor:  # [A, V] bool
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)  # equal logits are ranked by token id
    rank = torch.arange(logits.shape[-1], device=logits.device)
    is_kept = torch.ones_like(sorted_logits, dtype=torch.bool)
    if sampling.min_p > 0:
        is_kept = sorted_logits >= sorted_logits[:, :1] + math.log(sampling.min_p)
    if sampling.top_k > 0:
        is_kept &= rank < sampling.top_k
    if sampling.top_p < 1:
        sorted_logits = sorted_logits.masked_fill(~is_kept, float("-inf"))
        # As the engine computes it: softmax is off by 3e-5 at 150,000 logits in float32, which is a token or two.
        probs = (sorted_logits - sorted_logits.logsumexp(dim=-1, keepdim=True)).exp_()
        mass_before = probs.cumsum(dim=-1) - probs
        is_kept &= (mass_before < sampling.top_p) | (rank == 0)
    return torch.zeros_like(is_kept).scatter(-1, order, is_kept)

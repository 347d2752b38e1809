"""Model x tokens -> the logprob of each sampled token, without a [B, T, V] tensor.

The one place where the learner evaluates a policy: the old, the present and the reference logprobs come from here, and
a ratio differs from 1 only if weights do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.learning.collective import Collective, OneProcess, Work, device_of
from gspo_gym.learning.head import ChunkedHead, OutputHead
from gspo_gym.learning.norms import quicken_norms
from gspo_gym.learning.prefixes import PrefixSharing
from gspo_gym.learning.sequence import SequenceSharing
from gspo_gym.learning.settings import DEFAULT_LOGITS_BYTES
from gspo_gym.types import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Logprobs and entropies of sampled tokens; float32 (float64 of a float64 model), nats.

    Attributes:
        logprobs: [B, T], differentiable; 0 where nothing was sampled.
        entropy: [B, T], of the distribution each token was sampled from; 0 where nothing was sampled. Differentiable if
            the computer was told so, else detached.
        divergence: [B, T], from another model's distribution, differentiable; 0 where nothing was sampled. None: not
            asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    divergence: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Against:
    """A frozen model that a policy's distributions are compared with, over the whole vocabulary, at temperature 1.

    Attributes:
        computer: of that model. divergence: KL(policy || it) is "reverse_kl", KL(it || policy) "forward_kl".
    """

    computer: LogprobComputer
    divergence: Literal["reverse_kl", "forward_kl"]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Decoder and output head of a causal language model; Any: untyped libraries."""

    decoder: Any
    head: OutputHead


class LogprobComputer:
    """Computes logprobs of sampled tokens under a causal language model of transformers, plain or wrapped by peft.

    The logprob of the token at position t comes from the logits at t - 1. The model runs in eval mode with and without
    gradients, and is left in it. The dropout of a LoRA adapter acts within `adapter_dropout` only. Gradient
    checkpointing that was switched on before still acts.

    Args:
        sampling: that the tokens were drawn with: logits are divided by its temperature, and truncated as it says; None
            takes the whole softmax of temperature 1.
        logits_bytes, entropy_has_gradient: see `ChunkedHead`; the second is for an entropy bonus.
        share_prefixes: see `PrefixSharing`.
        collective: the ranks that hold the model; None: it is whole in this process.

    Attributes:
        has_dropout: whether a dropout acts in `adapter_dropout`; its masks depend on the shapes of micro-batches.

    Raises:
        ConfigError: temperature or logits_bytes out of range, prefixes that cannot be shared, or the model computes its
            logits in a way that is not understood here: a probe compares with the model's own forward, with padding and
            mask.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sampling: Sampling | None = None,
        logits_bytes: int = DEFAULT_LOGITS_BYTES,
        entropy_has_gradient: bool = False,
        share_prefixes: bool | Literal["auto"] = False,
        collective: Collective | None = None,
    ) -> None:
        sampling = sampling or Sampling()
        if not sampling.temperature > 0:
            raise ConfigError(
                f"LogprobComputer.temperature: expected > 0, got {sampling.temperature} (greedy samples are not "
                "trainable)"
            )
        if logits_bytes < 1:
            raise ConfigError(f"LogprobComputer.logits_bytes: expected at least 1, got {logits_bytes}")
        self._model = model
        self.collective = collective or OneProcess()
        self._parts = _take_apart(model)
        self.sampling = sampling
        self._dropouts = adapter_dropouts(model)
        self._drops_out = False
        device = device_of(model, self.collective)
        quicken_norms(self._parts.decoder)
        vocab_size = _probe(model, self._parts, self.collective.forward, device)
        self.has_dropout = any(dropout.p > 0 for dropout in self._dropouts)
        reason = "the dropout of its adapter draws by row" if self.has_dropout else None
        self.prefixes = PrefixSharing(
            self._parts.decoder, share_prefixes, unless=reason, forward=self.collective.forward, device=device
        )
        self._sequence = None
        if (group := self.collective.sequence) is not None:
            self._sequence = SequenceSharing(self._parts.decoder, group, self.collective.forward, unless=reason)
        self._head = ChunkedHead(self._parts.head, vocab_size, sampling, logits_bytes, entropy_has_gradient)

    def compute(
        self, token_ids: Tensor, attention_mask: Tensor, action_mask: Tensor, *, against: Against | None = None
    ) -> TokenLogprobs:
        """Return logprob and entropy of every sampled token; [B, T] inputs as in `TokenBatch`, on the model's device.

        With `against`, in one process, the divergence from that model, too. Gradients flow unless disabled.

        Raises:
            RecordError: padding that is not on the right, or a sampled token at position 0.
        """
        if bool((attention_mask[:, 1:] & ~attention_mask[:, :-1]).any()) or bool((~attention_mask & action_mask).any()):
            raise RecordError("LogprobComputer: expected padding on the right only, and no sampled token in it")
        if bool(action_mask[:, 0].any()):
            raise RecordError("LogprobComputer: the token at position 0 has no context to be sampled from")
        # Dropout in one of two passes would be a difference that the ratio takes for learning, and the backward pass
        # may run parts of the forward again.
        _eval_mode(self._model)
        switch(self._dropouts, on=self._drops_out)
        predicts_action = action_mask[:, 1:]

        targets = token_ids[:, 1:][predicts_action]

        def score() -> tuple[Tensor, ...]:
            with _as_current(token_ids.device), _checkpointing(self._model):
                # the last token predicts none of them
                hidden, is_own = self._hidden_states(token_ids[:, :-1], attention_mask[:, 1:], predicts_action)
            if self._sequence is None or is_own is None:
                scores = self._head.compute(hidden, targets, drops_out=self._drops_out)
                if against is None:
                    return scores
                states = against.computer._constant_states(token_ids, attention_mask, predicts_action)
                heads = self._head, against.computer._head
                return *scores, heads[0].diverge(
                    hidden, heads[1], states, targets, against.divergence, drops_out=self._drops_out
                )
            own = self._head.compute(hidden, targets[is_own], drops_out=self._drops_out)
            logprobs, entropy = self._sequence.of_all(torch.stack(own), is_own)
            return logprobs, entropy

        scores = self.collective.forward(score)
        zeros = torch.zeros(action_mask.shape, dtype=scores[0].dtype, device=scores[0].device)
        return TokenLogprobs(*(zeros.masked_scatter(action_mask, values) for values in scores))

    @torch.no_grad()
    def compare(
        self, other: LogprobComputer, token_ids: Tensor, attention_mask: Tensor, action_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log(other / own) of every sampled token, and KL(own || other) there; [B, T] nats, without gradient.

        Inputs as in `compute`, in one process, without an adapter's dropout. 0 where nothing was sampled.
        """
        predicts_action = action_mask[:, 1:]
        hidden = [computer._constant_states(token_ids, attention_mask, predicts_action) for computer in (self, other)]
        targets = token_ids[:, 1:][predicts_action]
        log_ratios, kl = self._head.compare(hidden[0], other._head, hidden[1], targets)
        zeros = torch.zeros(action_mask.shape, dtype=kl.dtype, device=kl.device)
        return zeros.masked_scatter(action_mask, log_ratios), zeros.masked_scatter(action_mask, kl)

    @torch.no_grad()
    def _constant_states(self, token_ids: Tensor, attention_mask: Tensor, predicts_action: Tensor) -> Tensor:
        """Return the hidden states [A, D] before the sampled tokens, [B, T] inputs as in `compute`; no gradient."""
        _eval_mode(self._model)
        with _as_current(token_ids.device):
            states, _ = self._hidden_states(token_ids[:, :-1], attention_mask[:, 1:], predicts_action)
        return states

    def _hidden_states(
        self, token_ids: Tensor, attention_mask: Tensor, is_predicted: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [A, D] of the tokens that are wanted, [B, T], and which of them are this rank's.

        None: all are.
        """
        trie = self.prefixes.shared(token_ids, attention_mask)
        if self._sequence is not None:
            return self._sequence.hidden_states(self._parts.decoder, token_ids, trie, is_predicted)
        if trie is None:
            return _hidden_states(self._parts.decoder, token_ids)[is_predicted], None
        return trie.hidden_states(self._parts.decoder).index_select(0, trie.places[is_predicted]), None

    @contextlib.contextmanager
    def adapter_dropout(self, seed: int) -> Iterator[None]:
        """Let the dropout of the model's LoRA adapter act while inside, if it has one.

        The first `compute` within draws the same masks whenever seed and shapes are the same. The global generators are
        left as they were.
        """
        # Common random numbers: with fresh masks in each pass a ratio would mostly measure the masks. The backward pass
        # belongs within, too, for parts of the forward may run again there (under the same masks).
        if not self._dropouts:
            yield
            return
        with seeded_random(seed, next(self._model.parameters()).device):
            self._drops_out = True
            try:
                yield
            finally:
                self._drops_out = False
                switch(self._dropouts, on=False)


def _eval_mode(model: nn.Module) -> None:
    for module in model.modules():
        module.training = False


@contextlib.contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """Let layers on which gradient checkpointing is switched on checkpoint themselves, although in eval mode."""
    # transformers' layers do so only while their own `training` flag is set. The flags of the modules in them, which
    # decide about dropout, stay off; and so does the layer's own when the backward pass runs it again.
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    try:
        for layer in layers:
            layer.training = torch.is_grad_enabled()
        yield
    finally:
        for layer in layers:
            layer.training = False


def _as_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # Kernels other than torch's (Liger's) run on the current GPU; each thread begins with the first.
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _take_apart(model: Any) -> _Parts:  # Any: transformers and peft are untyped
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(causal).__name__
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    decoder = causal.get_decoder() if hasattr(causal, "get_decoder") else None
    if decoder is None or decoder is causal:
        decoder = getattr(causal, "base_model", None)
    if head is None or decoder is None or decoder is causal:
        raise ConfigError(f"{name}: expected a causal language model with a decoder and an output head")
    config = causal.config.get_text_config()
    multiplier = 1.0
    if (logit_scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
        multiplier *= float(logit_scale)
    if (logits_scaling := getattr(config, "logits_scaling", None)) is not None:  # Granite
        multiplier /= float(logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    softcap = None if softcap is None else float(softcap)
    return _Parts(decoder, OutputHead(head, multiplier, softcap, getattr(causal, "num_token_ids", None)))


def _hidden_states(decoder: Any, token_ids: Tensor) -> Tensor:
    # Without an attention mask: rows are padded on the right, where a causal model never looks. Positions are then
    # 0, 1, 2, ... in every row, as a mask would give, and attention kernels take their fastest path.
    hidden: Tensor = decoder(input_ids=token_ids, use_cache=False).last_hidden_state
    return hidden


@torch.no_grad()
def _probe(model: Any, parts: _Parts, forward: Callable[[Work], tuple[Tensor, ...]], device: torch.device) -> int:
    """Compare with the model's own forward on two padded rows: the input of its head, and its final logits.

    Returns the number of logits of a token.
    """
    # The two are compared apart because the second must agree to a few roundings: a forgotten softcap is invisible in
    # the small logits of an untrained model at any tolerance that attention kernels could meet.
    vocabulary = model.get_input_embeddings().weight.shape[0]
    token_ids = torch.arange(3, 19, device=device).reshape(2, 8) % vocabulary
    attention_mask = torch.ones_like(token_ids)
    attention_mask[1, 5:] = 0
    head_calls: list[tuple[Tensor, Tensor]] = []
    hook = parts.head.module.register_forward_hook(
        lambda _module, inputs, output: head_calls.append((inputs[0], output))
    )
    _eval_mode(model)
    kind = type(model).__name__
    try:
        own_logits = model(input_ids=token_ids, attention_mask=attention_mask, use_cache=False).logits
        with torch.enable_grad(), _checkpointing(model):
            (hidden,) = forward(lambda: (_hidden_states(parts.decoder, token_ids),))
            hidden = hidden.detach()
    except TypeError as error:
        raise ConfigError(f"{kind}: cannot be scored, since it takes no token ids without a cache: {error}") from error
    finally:
        hook.remove()
    valid = attention_mask.bool()
    if len(head_calls) != 1 or head_calls[0][0].shape != hidden.shape or head_calls[0][1].shape != own_logits.shape:
        raise ConfigError(f"{kind}: its logits are not its output head applied once to its decoder's last hidden state")
    if not bool(torch.isfinite(own_logits[valid]).all()):
        raise ConfigError(f"{kind}: its logits are NaN or infinite on a probe of eight tokens; are its weights sound?")
    head_input, head_output = head_calls[0]
    # With and without a mask, other attention kernels run: about a hundred roundings per token; in 16 bits some
    # percent, more where a mixture of experts routes a token differently. Looking into the padding is off by order 1.
    gap = (hidden[valid] - head_input[valid]).norm(dim=-1) / head_input[valid].norm(dim=-1)
    if bool(gap.gt(min(1e3 * torch.finfo(hidden.dtype).eps, 0.25)).any()):
        raise ConfigError(
            f"{kind}: the decoder's hidden states, computed with gradients and without an attention mask, are not "
            "those its output head is given under right padding (it looks into the padding, or drops out in eval "
            "mode); this model cannot be scored"
        )
    head_logits = parts.head.finish_logits(head_output)[valid]
    rounding = torch.finfo(head_output.dtype).eps * own_logits[valid].abs().max()
    if bool(((head_logits - own_logits[valid]).abs() > 8 * rounding).any()):
        raise ConfigError(
            f"{kind}: it changes its logits after the output head in a way other than the known ones (logit_scale, "
            "logits_scaling, final_logit_softcapping); this model cannot be scored"
        )
    return int(own_logits.shape[-1])


def adapter_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """Return the dropout layers of the model's adapters, which peft puts into `lora_dropout` by adapter."""
    dropout_dicts = [
        module.get_submodule("lora_dropout") for module in model.modules() if "lora_dropout" in module._modules
    ]
    return [layer for layers in dropout_dicts for layer in layers.modules() if isinstance(layer, nn.Dropout)]


@contextlib.contextmanager
def seeded_random(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's generators of the CPU and of `device` from the seed; afterwards they are as they were.

    `device` is that of a tensor, which has an index where it is a GPU.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # which initializes CUDA where there is a device
        for generator in (torch.default_generator, *(torch.cuda.default_generators[d.index] for d in devices)):
            generator.manual_seed(seed)
        yield


def switch(layers: Sequence[nn.Module], *, on: bool) -> None:
    """Let these layers drop out, or not."""
    for layer in layers:
        layer.training = on

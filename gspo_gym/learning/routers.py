"""How a mixture of experts spreads its tokens: watched while the learner scores, never acted on.

A router that sends every token to the same experts has stopped learning to choose; reinforcement can drive it there
unseen. Called by the learner; a model without experts has no routers, and all of this does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Routers:
    """The routers of a model, one a layer; `top_k` experts compute each token."""

    modules: tuple[nn.Module, ...]
    num_experts: int
    top_k: int


def find_routers(model: nn.Module) -> Routers:
    """The routers of a transformers model: modules named gate or router that map hidden states to one logit an expert.

    None are found in a model whose config names no number of experts.
    """
    config: Any = getattr(model, "config", None)  # Any: transformers is untyped
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for name in names if (n := getattr(text, name, None))), None)
    top_k = getattr(text, "num_experts_per_tok", None)
    if num_experts is None or top_k is None:
        return Routers((), 0, 0)
    found = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("gate", "router") and _experts_of(module) == num_experts
    ]
    return Routers(tuple(found), int(num_experts), int(top_k))


class RouterLoad:
    """Counts what the routers did with the tokens of one update."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._loads: dict[nn.Module, Tensor] = {}
        self._entropies: dict[nn.Module, Tensor] = {}
        self._num_tokens = 0

    @contextlib.contextmanager
    def watching(self, attention_mask: Tensor) -> Iterator[None]:
        """Count the tokens of the forward pass within, given the [B, T] mask of the tokens that it computes.

        The backward pass stays outside: with gradient checkpointing it computes the forward again.
        """
        if not self._routers.modules:
            yield
            return
        is_token = attention_mask.reshape(-1)

        def count(module: nn.Module, inputs: Sequence[Any], output: Any) -> None:  # Any: models differ
            with torch.no_grad():
                logits = _logits(module, inputs[0], output).reshape(-1, self._routers.num_experts)
                if len(logits) != len(is_token):  # a model that packs its tokens first: which is which is not known
                    return
                self._count(module, logits[is_token].float())

        handles = [module.register_forward_hook(count) for module in self._routers.modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._num_tokens += int(is_token.sum())

    def metrics(self) -> dict[str, float]:
        """The `router` metrics; none if nothing was counted."""
        if not self._loads:
            return {}
        load_LE = torch.stack(list(self._loads.values()))
        entropy = torch.stack(list(self._entropies.values())).mean() / self._num_tokens
        return {
            "router/load_max_over_mean": float((load_LE.amax(1) / load_LE.double().mean(1)).mean()),
            "router/idle_fraction": float((load_LE == 0).double().mean()),
            "router/entropy": float(entropy),
        }

    def _count(self, module: nn.Module, logits: Tensor) -> None:
        chosen = logits.topk(self._routers.top_k, dim=-1).indices.reshape(-1)
        load = torch.bincount(chosen, minlength=self._routers.num_experts)
        entropy = torch.special.entr(logits.softmax(-1)).sum(dtype=torch.float64)
        self._loads[module] = self._loads.get(module, torch.zeros_like(load)) + load
        self._entropies[module] = self._entropies.get(module, torch.zeros_like(entropy)) + entropy


def _experts_of(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _logits(module: nn.Module, hidden: Tensor, output: Any) -> Tensor:
    """What a linear router gives; one that gives choices or probabilities instead is applied here once more."""
    if isinstance(output, Tensor):
        return output
    weight = module.weight
    assert isinstance(weight, Tensor), "find_routers asks for it"
    return nn.functional.linear(hidden.to(weight.dtype), weight)

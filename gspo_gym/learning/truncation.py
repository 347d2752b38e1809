"""The tokens that truncated sampling leaves, so that the learner can score the distribution that was sampled from.

The engine truncates and draws; this is the same rule for the learner, which may not import it. A test holds the two
together. V = vocabulary, A = sampled tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_gym.errors import ConfigError
from gspo_gym.types import Sampling


@dataclass(frozen=True, slots=True)
class Truncation:
    """How the rollouts were truncated, after the temperature: min-p first, then top-k, then top-p of what is left.

    Attributes:
        min_p: keep tokens with at least this share of the likeliest one's probability; 0 keeps all.
        top_k: keep this many tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this probability; 1 keeps all.

    Raises:
        ConfigError: a value out of range.
    """

    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ConfigError(f"Truncation: expected 0 <= min_p <= 1, top_k >= 0 and 0 < top_p <= 1, got {self}")

    @classmethod
    def of(cls, sampling: Sampling) -> Truncation:
        """Return the truncation of a way of sampling."""
        return cls(min_p=sampling.min_p, top_k=sampling.top_k, top_p=sampling.top_p)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is truncated."""
        return self.top_k == 0 and self.top_p >= 1 and self.min_p <= 0

    def apply(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[A, V] logits, -inf outside what is kept; the sampled tokens [A] are kept in any case.

        The policy that sampled kept them; the one that scores may have moved, or have rounded otherwise, and a logprob
        of -inf would say that it never could. The kept set is a constant for the gradient.
        """
        kept = self._kept(logits.detach()).scatter(-1, targets[:, None], True)
        return logits.masked_fill(~kept, float("-inf"))

    def _kept(self, logits: Tensor) -> Tensor:
        """[A, V] bool. Equal logits are ranked by token id."""
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        kept = torch.ones_like(ordered, dtype=torch.bool)
        if self.min_p > 0:
            kept = ordered >= ordered[:, :1] + math.log(self.min_p)
        if self.top_k > 0:
            kept &= rank < self.top_k
        if self.top_p < 1:
            probs = ordered.masked_fill(~kept, float("-inf")).softmax(dim=-1)
            mass_before = probs.cumsum(dim=-1) - probs
            kept &= (mass_before < self.top_p) | (rank == 0)
        return torch.zeros_like(kept).scatter(-1, order, kept)

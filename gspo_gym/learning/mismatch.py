"""The alarm for an engine whose logprobs are not the learner's, although both claim the same weights.

Stale keys and values, another temperature, precision or adapter, an update that was skipped, sampling truncated by a
default nobody set: each changes the logprobs of the first batch it touches, and none raises anything by itself.
Called by the trainer with what an update reported; what happens then is the trainer's affair.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from gspo_gym.errors import EngineMismatchError

# In float32 two implementations of a model differ by some 1e-5 nats at most (1e-6 for small ones). In 16 bits the
# largest of a batch's differences grows with the batch, so its mean is judged: prime-rl's limit for the KL between
# engine and learner.
MAX_GAP_FLOAT32 = 1e-4
MAX_KL_16_BITS = 0.01


class MismatchAlarm:
    """Judges every batch whose tokens were all sampled under the weights that the learner then scored them with.

    Args:
        max_gap: largest |learner's - engine's logprob| of a trained token, nats; None: `MAX_GAP_FLOAT32`, or where the
            model has weights in 16 bits `MAX_KL_16_BITS` of the mean instead.
        patience: alarms in a row that are only reported; the next is an error. A batch without gaps ends the row.
        has_16_bits: of the model.
    """

    def __init__(self, *, max_gap: float | None = None, patience: int = 2, has_16_bits: bool = False) -> None:
        self._max_gap = max_gap
        self._patience = patience
        self._has_16_bits = has_16_bits
        self._num_in_a_row = 0

    def check(self, metrics: Mapping[str, float], *, sampled_under: Collection[int], version: int) -> str | None:
        """What is wrong with a batch, in a sentence; None: nothing, or it cannot be judged.

        `metrics` are the update's. A batch with older tokens in it, or without a trained token, is not judged: there a
        difference is what an update is for.

        Raises:
            EngineMismatchError: it was wrong more than `patience` times in a row.
        """
        if set(sampled_under) != {version} or "kl/rollout_max_gap" not in metrics:
            return None
        reason = self._reason(metrics)
        if reason is None:
            self._num_in_a_row = 0
            return None
        self._num_in_a_row += 1
        if self._num_in_a_row > self._patience:
            raise EngineMismatchError(
                f"in {self._num_in_a_row} batches in a row {reason}. Look for a temperature or a truncation that the "
                "engine applies by itself, another precision, keys and values kept over an update, or an update that "
                "never arrived; correction.max_engine_gap is the limit"
            )
        return reason

    def _reason(self, metrics: Mapping[str, float]) -> str | None:
        gap, kl = metrics["kl/rollout_max_gap"], metrics["kl/rollout_k3"]
        if self._max_gap is None and self._has_16_bits:
            if kl <= MAX_KL_16_BITS:  # written so that NaN is an alarm
                return None
            return f"the engine's KL divergence from the learner is {kl:.3g} nats; expected at most {MAX_KL_16_BITS:g}"
        limit = MAX_GAP_FLOAT32 if self._max_gap is None else self._max_gap
        if gap <= limit:
            return None
        return f"a logprob of the engine is {gap:.3g} nats from the learner's; expected at most {limit:g}"


def has_16_bits(model: nn.Module) -> bool:
    """Whether some of a model's weights are in 16 bits; then so are its logits' errors."""
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())

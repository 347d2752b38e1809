"""The protocol of learner and reference server: safetensors bodies for numbers, JSON for the rest.

    GET  /health     {"status": "loading"}, with 503, or "ready" and what the model is
    POST /score?temperature=...    token_ids [B, T] int64, attention_mask and action_mask [B, T] bool
                                   -> logprobs [B, T], as `learning.logprobs` gives them without shared prefixes, bit
                                   for bit
    POST /load       {"file": ..., "version": ...}: other parameters, for servers that belong to a run

The tensors travel padded as they are, because the shape of a batch decides how kernels round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

import torch
from torch import Tensor

from gspo_gym.errors import RecordError
from gspo_gym.learning.head import TRUNCATION_NAMES
from gspo_gym.types import Sampling

TOKEN_HEADER = "X-Reference-Token"  # of clients that may change the weights
TOKEN_VARIABLE = "GSPO_GYM_REFERENCE_TOKEN"  # where a run's server finds its token
MAX_BODY_BYTES = 1 << 30  # of a micro-batch: 17 bytes a token

_INPUTS = {"token_ids": torch.int64, "attention_mask": torch.bool, "action_mask": torch.bool}


# What an address says of `Sampling`, and how each is read back.
_READERS = {name: type(getattr(Sampling(), name)) for name in ("temperature", *TRUNCATION_NAMES)}
_NAMES = ("temperature", "logits_bytes", *TRUNCATION_NAMES)


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """The distribution of the logprobs, and the memory to compute them in; see `learning.logprobs.LogprobComputer`."""

    sampling: Sampling
    logits_bytes: int

    def to_query(self) -> str:
        """Return the query of an address; floats are written in full and read back exactly."""
        held = self.sampling.values() | {"logits_bytes": self.logits_bytes}
        return urlencode({name: held[name] for name in _NAMES})

    @staticmethod
    def from_query(query: str) -> ScoringSettings:
        """Read a query of `to_query`.

        Raises:
            RecordError: a name or a number is missing, unknown or unreadable.
        """
        values = dict(parse_qsl(query))
        try:
            settings = ScoringSettings(
                Sampling(**{name: read(values.pop(name)) for name, read in _READERS.items()}),
                logits_bytes=int(values.pop("logits_bytes")),
            )
        except (KeyError, ValueError) as error:
            raise RecordError(f"/score: expected {', '.join(_NAMES)}: {error}") from error
        if values:
            raise RecordError(f"/score: unknown settings {', '.join(sorted(values))}")
        return settings


def check_inputs(tensors: Mapping[str, Tensor], vocab_size: int) -> None:
    """Refuse what cannot be scored.

    Raises:
        RecordError: a tensor is missing or of another shape or type, or a token is not in the vocabulary.
    """
    if tensors.keys() != _INPUTS.keys():
        raise RecordError(f"/score: expected {', '.join(_INPUTS)}, got {', '.join(sorted(tensors)) or 'nothing'}")
    shape = tensors["token_ids"].shape
    for name, dtype in _INPUTS.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.shape != shape or tensor.ndim != 2 or 0 in shape:
            raise RecordError(f"/score: {name}: expected {dtype} [B, T], got {tensor.dtype} {list(tensor.shape)}")
    # Outside of it an embedding would be read beyond its end, on a GPU without an error.
    lowest, highest = int(tensors["token_ids"].min()), int(tensors["token_ids"].max())
    if lowest < 0 or highest >= vocab_size:
        raise RecordError(f"/score: expected token ids from 0 to {vocab_size - 1}, got {lowest} to {highest}")

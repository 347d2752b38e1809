"""The protocol of learner and reference server: safetensors bodies for numbers, JSON for the rest.

    GET  /health     {"status": "loading"}, with 503, or "ready" and what the model is
    POST /score?temperature=...    token_ids [B, T] int64, attention_mask and action_mask [B, T] bool
                                   -> logprobs [B, T], as `learning.scoring` gives them, bit for bit; if several
                                   processes share the model, but for the order in which sums are taken
    POST /load       {"file": ..., "version": ...}: other parameters, for servers that belong to a run

The tensors travel padded as they are, because the shape of a batch decides how kernels round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from urllib.parse import parse_qsl, urlencode

import torch
from torch import Tensor

from gspo_gym.errors import RecordError
from gspo_gym.learning.scoring import Truncation

TOKEN_HEADER = "X-Reference-Token"  # of clients that may change the weights
TOKEN_VARIABLE = "GSPO_GYM_REFERENCE_TOKEN"  # where a run's server finds its token
MAX_BODY_BYTES = 1 << 30  # of a micro-batch: 17 bytes a token

_INPUTS = {"token_ids": torch.int64, "attention_mask": torch.bool, "action_mask": torch.bool}


_TRUNCATION = {name: type(value) for name, value in asdict(Truncation()).items()}  # how each is read back


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """The distribution of the logprobs; see `learning.scoring.Scorer`."""

    temperature: float
    chunk_tokens: int
    truncation: Truncation

    def to_query(self) -> str:
        """Return the query of an address; floats are written in full and read back exactly."""
        values = {"temperature": self.temperature, "chunk_tokens": self.chunk_tokens}
        return urlencode({**values, **asdict(self.truncation)})

    @staticmethod
    def from_query(query: str) -> ScoringSettings:
        """Read a query of `to_query`.

        Raises:
            RecordError: a name or a number is missing, unknown or unreadable.
        """
        values = dict(parse_qsl(query))
        try:
            settings = ScoringSettings(
                temperature=float(values.pop("temperature")),
                chunk_tokens=int(values.pop("chunk_tokens")),
                truncation=Truncation(**{name: read(values.pop(name)) for name, read in _TRUNCATION.items()}),
            )
        except (KeyError, ValueError) as error:
            names = ", ".join(("temperature", "chunk_tokens", *_TRUNCATION))
            raise RecordError(f"/score: expected {names}: {error}") from error
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
    lowest, highest = int(tensors["token_ids"].min()), int(tensors["token_ids"].max())
    if lowest < 0 or highest >= vocab_size:
        raise RecordError(f"/score: expected token ids from 0 to {vocab_size - 1}, got {lowest} to {highest}")

"""The frozen model of a reference server, or this process's part of a model that ranks share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gspo_gym.errors import RecordError
from gspo_gym.learning.scoring import Scorer
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.parallel import copy_into
from gspo_gym.policy.reference.wire import ScoringSettings


class FrozenModel:
    """A model that scores, one request at a time; with tp > 1, every rank is asked the same at once."""

    def __init__(self, base: str, *, dtype: str, device: str, tp: int = 1) -> None:
        """Load what `models.load_policy` takes, and raise as it does."""
        policy = load_policy(base, dtype=dtype, device=device, tp=tp)
        self._model = policy.model.requires_grad_(False)
        self._scorers: dict[ScoringSettings, Scorer] = {}
        self.info: Mapping[str, Any] = {  # Any: JSON values
            "status": "ready",
            "model": policy.base,
            "pid": os.getpid(),
            "dtype": dtype,
            "tp": tp,
            "vocab_size": policy.model.get_input_embeddings().num_embeddings,
            "num_parameters": sum(parameter.numel() for parameter in policy.model.parameters()),  # of all ranks
            "version": 0,
        }

    @torch.no_grad()
    def score(self, tensors: Mapping[str, Tensor], settings: ScoringSettings) -> Tensor:
        """Return [B, T] logprobs, on the processor.

        Raises:
            RecordError, ConfigError: the request cannot be scored.
        """
        device = next(self._model.parameters()).device
        inputs = {name: tensor.to(device) for name, tensor in tensors.items()}
        if settings not in self._scorers:
            self._scorers[settings] = Scorer(
                self._model, sampling=settings.sampling, chunk_tokens=settings.chunk_tokens
            )
        return self._scorers[settings].score(**inputs).logprobs.cpu()

    @torch.no_grad()
    def replace(self, file: Path, version: int) -> None:
        """Take other parameters, from a safetensors file that names them as the model does.

        Raises:
            RecordError: the file holds others, or cannot be read.
        """
        own = dict(self._model.named_parameters())
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
                if shapes != {name: tuple(parameter.shape) for name, parameter in own.items()}:
                    raise RecordError(f"/load: {file} holds other parameters than the model's {len(own)}")
                for name, parameter in own.items():
                    copy_into(parameter, tensors.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise RecordError(f"/load: {file} cannot be read: {error}") from error
        self.info = {**self.info, "version": version}

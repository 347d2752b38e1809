"""The base of every settings record, so that all of them are strict in the same way.

A settings record lives beside the code it governs; `config.py` composes them into the file a user writes. Nothing here
may import torch.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen record of settings: unknown keys are errors, and so are values of another type or out of range."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

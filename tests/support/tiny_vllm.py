"""How the tests run vLLM on a tiny model."""

from __future__ import annotations

from typing import Any

# Fields of `VllmSettings`: in float32 and not compiled.
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "dtype": "float32",
    "max_num_seqs": 32,
    "kv_cache_gib": 0.25,
    "enforce_eager": True,
}
START_SECONDS = 300.0

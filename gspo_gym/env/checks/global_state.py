"""What all episodes of a process share: its random generators, working directory and environment variables.

An environment that changes these disturbs its neighbours and is disturbed by them; it needs a process of its own
(`TextEnv.isolation`). Read here and never written. Called by the checks.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

GENERATOR = "the generator of "


def global_state() -> Mapping[str, Any]:
    """What is shared, by name, as it is now; only to be compared (hence Any)."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        f"{GENERATOR}random": random.getstate(),
        f"{GENERATOR}numpy.random": (kind, np.asarray(keys).tobytes(), *rest),
        "the working directory": _working_directory(),
        "the environment variables": dict(os.environ),
    }
    torch: Any = sys.modules.get("torch")  # never loaded for this: who has not loaded it cannot have changed it
    if hasattr(torch, "get_rng_state"):
        state[f"{GENERATOR}torch"] = torch.get_rng_state().numpy().tobytes()
    return state


@contextmanager
def watching(changed: list[str]) -> Iterator[None]:
    """Afterwards, `changed` has got the names of what was changed meanwhile."""
    before = global_state()
    yield
    after = global_state()
    changed += [name for name, value in after.items() if name in before and value != before[name]]


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody removed it
        return None

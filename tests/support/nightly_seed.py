"""The first of the new seeds that `make nightly` draws and prints; without it a nightly test has always the same ones.

A seed that fails becomes a case of its own beside the fixed ones.
"""

from __future__ import annotations

import os

FIRST_SEED = int(os.environ.get("GSPO_GYM_FIRST_SEED", "1000000"))

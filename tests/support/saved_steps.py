"""Two saved steps of what should be one run, compared."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from gspo_gym.learning.saved import SavedTensors

# Adam's moments are sums of gradients. A weight is one step away from them: Adam divides by a root, and where a
# gradient is of the size of its rounding, so is what it is divided by. Of all weights one was seen off by 5.2e-6, on
# processors without AVX-512, while the moments agreed to 8e-9 (to 7e-8 in other runs). A step moves weights by 2e-3.
MOMENTS = 1e-6
WEIGHTS = 1e-5


def require_same(actual: Path, expected: Path) -> None:
    """AssertionError unless two steps' folders have the same weights and moments, but for rounding."""
    for ours, theirs, most in (
        (load_file(actual / "model.safetensors"), load_file(expected / "model.safetensors"), WEIGHTS),
        (SavedTensors.of_learner(actual / "resume"), SavedTensors.of_learner(expected / "resume"), MOMENTS),
    ):
        assert ours.keys() == theirs.keys()
        apart: dict[str, float] = {key: _largest(ours[key].float() - theirs[key].float()) for key in ours}
        assert max(apart.values()) <= most, {key: value for key, value in apart.items() if value > most}


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())

"""What each `loss.surrogate` reads of [loss], and the clip range that follows from it; `losses.py` has formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# By surrogate: the keys of [loss] that it reads of these, and the units that it is defined for (absent: all of them).
SURROGATE_KEYS: Mapping[str, tuple[str, ...]] = {
    "clip": ("clip_low", "clip_high", "dual_clip"),
    "cispo": ("clip_high",),
    "sapo": ("sapo_temperatures",),
    "gmpo": ("clip_low", "clip_high"),
    "dppo": ("clip_low", "clip_high"),
    "vespo": (),
}
SURROGATE_UNITS: Mapping[str, tuple[str, ...]] = {
    "gmpo": ("trajectory", "segment", "turn"),
    "dppo": ("token",),
    "vespo": ("trajectory",),
}
# Clip ranges that follow from a surrogate: of ratios e^-0.4 to e^0.4 (arXiv 2507.20673); of probabilities
# 0.2 (prime-rl; verl).
_SURROGATE_CLIPS: Mapping[str, Mapping[str, float]] = {
    "gmpo": {"clip_low": -math.expm1(-0.4), "clip_high": math.expm1(0.4)},
    "dppo": {"clip_low": 0.2, "clip_high": 0.2},
}
_CISPO_CLIP_HIGH = 4.0  # of a token's ratio: a cap of 5 (arXiv 2510.13786)


def with_following_clips(loss: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of [loss] (Any: unchecked) with the clip range that follows from the surrogate."""
    surrogate = loss.get("surrogate")
    clips = _SURROGATE_CLIPS.get(surrogate, {}) if isinstance(surrogate, str) else {}
    if surrogate == "cispo" and loss.get("unit") == "token":
        clips = {"clip_high": _CISPO_CLIP_HIGH}
    return {**loss, **{name: clip for name, clip in clips.items() if loss.get(name) is None}}


def surrogate_problem(surrogate: str, unit: str, changed: Sequence[str]) -> str | None:
    """Return why a surrogate does not go with the unit, or with a key of those `changed`; None: it goes with all."""
    others = {name for names in SURROGATE_KEYS.values() for name in names} - set(SURROGATE_KEYS[surrogate])
    if idle := [name for name in changed if name in others]:
        return f'{idle[0]}: has no effect with surrogate "{surrogate}"; remove it'
    units = SURROGATE_UNITS.get(surrogate)
    if units is not None and unit not in units:
        return f'surrogate: "{surrogate}" needs unit {" or ".join(map(repr, units))}, got {unit!r}'
    return None

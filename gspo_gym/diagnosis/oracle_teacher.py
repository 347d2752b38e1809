"""A second path to a teacher's term of the loss, for `oracle.py`; nothing of `learning/losses.py` is in it.

With p_T and p_S the teacher's and the policy's distributions at a token, n the sampled tokens of the optimizer step,
w the correction's weight and s the ratio, the term is coefficient / n times

    sampled      -w s A, A = log p_T - log p_S of the token [+ KL(S || T)]; 0 where its probability fell by > 0.2
    reverse_kl   w sum over the vocabulary of p_S (log p_S - log p_T)
    forward_kl   w sum over the vocabulary of p_T (log p_T - log p_S)                                arXiv 2306.13649
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def is_exact(config: Mapping[str, Any]) -> bool:
    """Return whether whole distributions are compared (Any: TOML's values); runs of earlier versions have no key."""
    return "distillation.teacher" in config and config.get("distillation.divergence", "sampled") != "sampled"


def taught(
    config: Mapping[str, Any],
    columns: Mapping[str, Floats],
    at: NDArray[np.int64],
    seen: Mapping[str, Floats],
    share: Floats,
    s: Floats,
) -> tuple[dict[str, Floats], Floats]:
    """Return terms of the tokens `at`, and the slopes of the loss in their logprob [1, A], or in that and D [2, A].

    `columns` are recorded of all tokens, `seen` of a pass over these; `share` is w / n over what each weighs.
    """
    share = config["distillation.coefficient"] * share
    if is_exact(config):
        divergence = seen["teacher_divergence"]
        terms = {"loss/distillation": share * divergence, "distillation/divergence": divergence}
        return terms, np.stack([0 * share, share])
    unread = np.full(len(columns["old_logprob"]), np.nan)  # a step without any feedback has no column
    gap = columns.get("teacher_log_ratio", unread)[at]  # NaN: a turn without feedback
    fallen = np.exp(columns["old_logprob"][at]) - np.exp(seen["logprob"])
    x = gap.clip(-20.0, 20.0)
    kl = columns["teacher_kl"][at] if config["distillation.baseline"] else np.expm1(x) - x
    advantage = gap + kl * config["distillation.baseline"]
    pull = -share * (fallen <= 0.2) * s * np.nan_to_num(advantage)
    terms = {"distillation/advantage": advantage, "distillation/kl": kl, "loss/distillation": pull}
    return terms | {"distillation/dropped_fraction": gap * 0 + (fallen > 0.2)}, pull[None]


def divergence_of(config: Mapping[str, Any], own: Any, teacher: Any) -> Any:
    """Return [n] divergences of torch's logprobs [n, V] (Any: untyped here), differentiable in the policy's own."""
    p, q = (teacher, own) if config["distillation.divergence"] == "forward_kl" else (own, teacher)
    return (p.exp() * (p - q).masked_fill(p.isneginf(), 0.0)).sum(-1)

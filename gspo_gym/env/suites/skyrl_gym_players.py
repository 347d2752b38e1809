"""Hand-written players of the environments of skyrl-gym whose rows have the answer, for `skyrl_gym.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message

_FORMS = {"aime": "Answer: {}"}  # how an answer is written, by id; else as in GSM8K
_GSM8K = "#### {}"


def right_answer(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """The row's answer; `env` is a `SkyRLGymEnv` (Any: `PolicyFactory` fixes the type)."""
    row = env.row
    answer = row["reward_model" if env.game == "aime" else "reward_spec"]["ground_truth"]
    return lambda _messages: _FORMS.get(env.game, _GSM8K).format(answer)


def wrong_answer(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """A random number of three digits in the right form."""

    def play(_messages: Sequence[Message]) -> str:
        return _FORMS.get(env.game, _GSM8K).format(rng.integers(100, 1000))

    return play

"""TextEnv and ToolEnv: what an environment author subclasses.

The interface is Gymnasium's own. An observation is a string (shown to the model as a user message) or a sequence of
messages; an action is the model's text. Methods may be `async`. One instance plays one episode at a time; the rollout
makes a fresh one per episode. Who calls these methods: `env/session.py`, which also accepts plain objects that merely
have `reset` and `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import gymnasium
import numpy as np

from gspo_gym.types import Message

Observation = str | Sequence[Message | Mapping[str, Any]]
Info = dict[str, Any]


class ScriptedPolicy(Protocol):
    """A player written by hand: it sees the conversation so far and returns its next message or its text."""

    def __call__(self, messages: Sequence[Message]) -> Message | str: ...


# Given the environment instance that is being played (so that a reference may read the hidden answer) and a generator.
PolicyFactory = Callable[[Any, np.random.Generator], ScriptedPolicy]


class Conversation(gymnasium.Space[Any]):
    """The space of what is said: any string, or any non-empty sequence of messages (for Gymnasium's own tools)."""

    def contains(self, x: Any) -> bool:
        if isinstance(x, str):
            return True
        return isinstance(x, Sequence) and bool(x) and all(isinstance(m, Message | Mapping) for m in x)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short random string of printable ASCII."""
        length = int(self.np_random.integers(1, 9))
        return "".join(chr(int(c)) for c in self.np_random.integers(32, 127, size=length))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation)

    def __hash__(self) -> int:
        return hash(Conversation)

    def __repr__(self) -> str:
        return "Conversation()"


class TextEnv(gymnasium.Env[Any, Any]):
    """An environment that talks: override `reset` and `step`, plainly or as `async def`.

    `reset(*, seed=None, options=None) -> (observation, info)` starts an episode; everything random in it must come from
    `self.np_random` (call `super().reset(seed=seed)` first).

    `step(action: str) -> (observation, reward, terminated, truncated, info)` answers one action. `reward` is a number, a
    `Reward` with named terms, or None for "not scored here". `info` is for people only.

    Attributes:
        policies: hand-written players by name. "reference" earns the top score (it may read hidden state);
            "random" plays legal moves at random and is what warm-up imitates.
        reward_range: smallest and largest possible return of an episode, checked by `check_env`.
    """

    observation_space: gymnasium.Space[Any] = Conversation()
    action_space: gymnasium.Space[Any] = Conversation()
    metadata: dict[str, Any] = {"render_modes": []}
    policies: ClassVar[Mapping[str, PolicyFactory]] = {}
    reward_range: ClassVar[tuple[float, float]] = (-float("inf"), float("inf"))

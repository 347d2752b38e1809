"""The environment of the runs that are killed and stopped: it imports little, for workers load it again and again."""

from __future__ import annotations

from typing import Any, ClassVar

from gspo_gym.env.core import PolicyFactory, TextEnv


class Letters(TextEnv):
    """Two turns, each paid by its letters, so that no two episodes earn the same."""

    policies: ClassVar[dict[str, PolicyFactory]] = {"random": lambda _env, _rng: lambda _messages: "ab"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self._turns = 0
        return f"letters {self.np_random.integers(100)}", {}

    def step(self, action: Any) -> Any:
        self._turns += 1
        return "more", sum(map(ord, action)) % 97 / 97, self._turns == 2, False, {}

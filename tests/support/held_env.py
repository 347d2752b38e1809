"""An environment that writes down what it plays and holds the later seeds until the file `go` is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gspo_gym.env.core import PolicyFactory, TextEnv
from gspo_gym.env.registry import register


def _says_go(env: Any, rng: Any) -> Any:
    return lambda messages: "go"


class Held(TextEnv):
    """Returns its seed as the reward. Seeds from 8 on wait; 3 fails once, until the file `failed` is there."""

    isolation = "thread"
    policies: dict[str, PolicyFactory] = {"random": _says_go, "other": _says_go}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        with Path("played.txt").open("a") as file:
            file.write(f"{seed}\n")
        self.seed = seed or 0
        return f"task {seed}", {}

    def step(self, action: str) -> Any:
        if self.seed == 3 and not Path("failed").exists():
            Path("failed").touch()
            raise RuntimeError("as planned")
        while self.seed >= 8 and not Path("go").exists():
            time.sleep(0.01)
        return "", float(self.seed), True, False, {}


register("Held-v0", entry_point=Held)

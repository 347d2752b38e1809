"""The bundled environments, found by Gymnasium through its `gymnasium.envs` entry point.

They use only what a stranger's environment may use: `gspo_gym.env`, `gspo_gym.types` and `gspo_gym.errors`. Nothing
heavy is imported until an environment is made.
"""

from __future__ import annotations

from gymnasium.envs.registration import register

BUNDLED = {
    "GuessNumber-v0": "gspo_gym_envs.guess_number.env:GuessNumber",
    "FrozenLake-v0": "gspo_gym_envs.frozen_lake.env:FrozenLake",
    "SqlAnalyst-v0": "gspo_gym_envs.sql_analyst.env:SqlAnalyst",
}


def register_envs() -> None:
    """Called by Gymnasium inside the `gspo_gym` namespace when it loads its plugins."""
    for name, entry_point in BUNDLED.items():
        register(id=name, entry_point=entry_point, disable_env_checker=True, order_enforce=False)

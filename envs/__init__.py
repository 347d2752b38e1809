"""The bundled environments, found through the `gymnasium.envs` entry point.

They use only what a stranger's environment may use: `gspo_gym.env`, `gspo_gym.types` and `gspo_gym.errors`. Nothing
heavy is imported until an environment is made.
"""

from __future__ import annotations

import gymnasium
from gymnasium.envs.registration import register

BUNDLED = {
    "gspo_gym/Dataset-v0": "gspo_gym.env.dataset:DatasetEnv",  # rows of the user's; needs the argument `rows`
    "gspo_gym/GuessNumber-v0": "gspo_gym_envs.guess_number.env:GuessNumber",
    "gspo_gym/FrozenLake-v0": "gspo_gym_envs.frozen_lake.env:FrozenLake",
    "gspo_gym/SqlAnalyst-v0": "gspo_gym_envs.sql_analyst.env:SqlAnalyst",
}


def register_envs() -> None:
    """Put the bundled environments into Gymnasium's registry; doing it again changes nothing.

    The entry point, and run at import too, so that `gymnasium.make("gspo_gym_envs:gspo_gym/GuessNumber-v0")` works in
    a program that never imports gspo_gym (Gymnasium 1.4 itself no longer loads entry points).
    """
    for name, entry_point in BUNDLED.items():
        if name not in gymnasium.registry:
            register(id=name, entry_point=entry_point, disable_env_checker=True, order_enforce=False)


register_envs()

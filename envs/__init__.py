"""The bundled environments, found through the `gymnasium.envs` entry point.

They use only what a stranger's environment may use: `gspo_gym.env`, the types, errors and seeds, and the ground below
them (`gspo_gym.base`). Nothing heavy is imported until an environment is made.
"""

from __future__ import annotations

import gymnasium
from gymnasium.envs.registration import register

OWN = {
    "gspo_gym/GuessNumber-v0": "gspo_gym_envs.guess_number.env:GuessNumber",
    "gspo_gym/FrozenLake-v0": "gspo_gym_envs.frozen_lake.env:FrozenLake",
    "gspo_gym/SqlAnalyst-v0": "gspo_gym_envs.sql_analyst.env:SqlAnalyst",
    "gspo_gym/CodeRepair-v0": "gspo_gym_envs.code_repair.env:CodeRepair",
    "gspo_gym/SupportDesk-v0": "gspo_gym_envs.support_desk.env:SupportDesk",
    "gspo_gym/Countdown-v0": "gspo_gym_envs.countdown.env:Countdown",
    "gspo_gym/Wordle-v0": "gspo_gym_envs.wordle.env:Wordle",
    "gspo_gym/TicTacToe-v0": "gspo_gym_envs.tic_tac_toe.env:TicTacToe",
    "gspo_gym/Homestead-v0": "gspo_gym_envs.homestead.env:Homestead",
}
# Other projects' environments; each needs an argument that names one of them, or a URL.
SUITES = {
    "gspo_gym/OpenEnv-v0": "gspo_gym_envs.suites.openenv:OpenEnvEnv",  # needs the argument `url`
    "gspo_gym/NeMoGym-v0": "gspo_gym_envs.suites.nemo_gym:NeMoGymEnv",  # needs `url` and `rows`
    "gspo_gym/ToyText-v0": "gspo_gym_envs.suites.toy_text:ToyTextEnv",
    "gspo_gym/Discrete-v0": "gspo_gym_envs.suites.discrete:DiscreteEnv",
    "gspo_gym/ReasoningGym-v0": "gspo_gym_envs.suites.reasoning_gym:ReasoningGymEnv",
    "gspo_gym/Gem-v0": "gspo_gym_envs.suites.gem:GemEnv",
    "gspo_gym/SkyRLGym-v0": "gspo_gym_envs.suites.skyrl_gym:SkyRLGymEnv",
    "gspo_gym/TextArena-v0": "gspo_gym_envs.suites.textarena:TextArenaEnv",
    "gspo_gym/Verifiers-v0": "gspo_gym_envs.suites.verifiers:VerifiersEnv",
}
BUNDLED = {
    "gspo_gym/Dataset-v0": "gspo_gym.env.data.dataset:DatasetEnv",  # rows of the user's; needs the argument `rows`
    **OWN,
    **SUITES,
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

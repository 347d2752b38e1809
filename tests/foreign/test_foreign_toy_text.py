"""Gymnasium's toy text suite, all of it, as it is in the registry of the installed version."""

from __future__ import annotations

import gymnasium
from gspo_gym_envs.suites.toy_text import GAMES


def test_every_game_of_the_suite_keeps_the_contract(check_into_table):
    suite = sorted(
        spec.id for spec in gymnasium.registry.values() if str(spec.entry_point).startswith("gymnasium.envs.toy_text")
    )
    assert suite == sorted(game.env_id for game in GAMES.values())
    failed = []
    for env_id in suite:
        # 200 turns, the longest time limit of the suite: crossing the larger lake takes a hundred.
        report = check_into_table("gymnasium", env_id, "ToyText", {"game": env_id}, max_turns=200)
        failed += [] if report.passed else [env_id]
    assert failed == []


def test_classic_control_keeps_the_contract(check_into_table):
    # Each of 50 steps costs 1 in the latter two, and so does an answer without an action.
    costly = {"illegal_penalty": 1.0, "reward_range": [-50.0, 0.0]}
    options = {"CartPole-v1": {}, "MountainCar-v0": costly, "Acrobot-v1": costly}
    failed = [
        env_id
        for env_id, more in options.items()
        if not check_into_table("gymnasium", env_id, "Discrete", {"env": env_id, "max_steps": 50, **more}).passed
    ]
    assert failed == []

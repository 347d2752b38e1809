"""The hand-written players of FrozenLake: functions of where the agent stands, which they read from the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message

from .lake import MOVE_NAMES, best_moves, distances_to_goal, neighbour


def best_play(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """A shortest path on firm ice; on slippery ice the moves most likely to reach a goal in the steps left.

    `env` is a `FrozenLake` after `reset` (Any: `PolicyFactory` fixes the type).
    """
    return _likeliest_moves(env) if env.is_slippery else _shortest_path(env)


def random_moves(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """A uniformly chosen legal move every time; holes are legal."""

    def play(_messages: Sequence[Message]) -> str:
        return MOVE_NAMES[int(rng.choice(env.legal_moves()))][0]

    return play


def _shortest_path(env: Any) -> ScriptedPolicy:
    distances = distances_to_goal(env.lake)

    def distance_after(move: int) -> float:
        cell = neighbour(env.lake, env.cell, move)
        return float("inf") if cell is None else distances.get(cell, float("inf"))

    def play(_messages: Sequence[Message]) -> str:
        return MOVE_NAMES[min(env.legal_moves(), key=distance_after)][0]

    return play


def _likeliest_moves(env: Any) -> ScriptedPolicy:
    goals = {cell for cell, letter in enumerate("".join(env.lake)) if letter == "G"}
    moves_by_steps_left = best_moves(env.transitions, goals, env.steps_left)

    def play(_messages: Sequence[Message]) -> str:
        return MOVE_NAMES[moves_by_steps_left[env.steps_left - 1][env.cell]][0]

    return play

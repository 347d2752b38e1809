"""Hand-written players of GEM's games, for `gem.py`. References read the secret or the solution from the game."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.suites.own_generators import OwnGenerators
from gspo_gym.types import Message


def references(game: str) -> dict[str, PolicyFactory]:
    """{"reference": the player that earns 1} for the ids of games that have one, else nothing.

    >>> list(references("game:Sudoku-v0-easy")), references("game:Sokoban-v0-easy")
    (['reference'], {})
    """
    for name, policy in _REFERENCES.items():
        if game.startswith(f"game:{name}-"):
            return {"reference": policy}
    return {}


def random_play(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """GEM's own random action; `env` is a `GemEnv` (Any: `PolicyFactory` fixes the type).

    Two games have none, so theirs is here. Others forget the \\boxed{} in which they want it, or add brackets.
    """
    own = OwnGenerators(int(rng.integers(2**31)))  # the game's must not notice that anybody draws

    def play(_messages: Sequence[Message]) -> str:
        for name, draw in _RANDOM_MOVES.items():
            if env.game.startswith(f"game:{name}-"):
                return f"\\boxed{{{draw(env.inner, rng)}}}"
        with own.in_place():
            said = str(env.inner.sample_random_action()).replace("[", "").replace("]", "")
        return said if "\\boxed" in said else f"\\boxed{{{said}}}"

    return play


def _tower_move(_game: Any, rng: np.random.Generator) -> str:
    return " ".join(rng.choice(["A", "B", "C"], size=2, replace=False))


def _sudoku_move(game: Any, rng: np.random.Generator) -> str:
    return " ".join(str(number) for number in rng.integers(1, game.scale + 1, size=3))


_RANDOM_MOVES = {"TowerofHanoi": _tower_move, "Sudoku": _sudoku_move}


def _saying(moves: Iterator[str]) -> ScriptedPolicy:
    return lambda _messages: f"\\boxed{{{next(moves)}}}"


def _guess(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    return _saying(iter([str(env.inner.game_number)]))


def _code(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    return _saying(iter([" ".join(map(str, env.inner.game_code))]))


def _sudoku(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    game = env.inner
    cells = [(row, column) for row in range(game.scale) for column in range(game.scale)]
    return _saying(
        f"{row + 1} {column + 1} {game.full_grid[row][column]}" for row, column in cells if not game.board[row][column]
    )


def _towers(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    return _saying(_tower_moves(env.inner.num_disks, "A", "C", "B"))


def _tower_moves(num_disks: int, source: str, target: str, spare: str) -> Iterator[str]:
    if num_disks:
        yield from _tower_moves(num_disks - 1, source, spare, target)
        yield f"{source} {target}"
        yield from _tower_moves(num_disks - 1, spare, target, source)


_REFERENCES: Mapping[str, PolicyFactory] = {
    "GuessTheNumber": _guess,
    "Mastermind": _code,
    "Sudoku": _sudoku,
    "TowerofHanoi": _towers,
}

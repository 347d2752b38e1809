"""The hand-written players of TicTacToe; they read the board from the environment. Cells are said as 1 to 9."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message

from .board import best_cells, free_cells, is_over, other, placed, winner
from .opponents import Opponent


def best_play(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Earns the top: against the random opponent a win that knows what it will answer, else perfect play.

    Perfect play alone would leave some games against the random opponent drawn. `env` is a `TicTacToe` after `reset`
    (Any: `PolicyFactory` fixes the type).
    """
    if env.opponent != "random":
        return perfect_play(env, rng)

    def play(_messages: Sequence[Message]) -> str:
        line = winning_line(env.board, env.side, env.answerer)
        return str((line[0] if line else best_cells(env.board, env.side)[0]) + 1)

    return play


def perfect_play(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Minimax: any of the moves that keep the best result which perfect play allows; never loses."""
    return _chosen(env, rng, best_cells)


def random_moves(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """A uniformly chosen free cell every time."""
    return _chosen(env, rng, lambda board, _side: free_cells(board))


def winning_line(board: str, side: str, opponent: Opponent) -> list[int] | None:
    """The moves of `side`, to move, that win against an opponent whose answers are known; None: there are none."""
    for cell in free_cells(board):
        mine = placed(board, cell, side)
        if winner(mine) == side:
            return [cell]
        if is_over(mine):
            continue
        answered = placed(mine, opponent(mine, other(side)), other(side))
        rest = None if is_over(answered) else winning_line(answered, side, opponent)
        if rest is not None:
            return [cell, *rest]
    return None


def _chosen(env: Any, rng: np.random.Generator, cells: Callable[[str, str], list[int]]) -> ScriptedPolicy:
    return lambda _messages: str(int(rng.choice(cells(env.board, env.side))) + 1)

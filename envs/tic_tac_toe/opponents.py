"""Who answers the model's moves in TicTacToe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gspo_gym.errors import ContractError

from .board import best_cells, free_cells

# Given the board and its own side: the cell (0 to 8) that it takes.
Opponent = Callable[[str, str], int]


def random_opponent(order: Sequence[int]) -> Opponent:
    """Takes the first free cell of a shuffled order of all cells.

    To whoever does not know the order, that is a uniformly random free cell each time, whatever was played before.
    """
    return lambda board, _side: next(cell for cell in order if board[cell] == " ")


def perfect_opponent(order: Sequence[int]) -> Opponent:
    """Takes one of the best cells: of several, the first in the order."""
    return lambda board, side: min(best_cells(board, side), key=order.index)


def checked_move(opponent: Opponent, board: str, side: str) -> int:
    """The cell that an opponent takes.

    Raises:
        ContractError: it is not a free one.
    """
    cell = opponent(board, side)
    if cell not in free_cells(board):
        raise ContractError(f"opponent: expected one of the free cells {free_cells(board)} of {board!r}, got {cell!r}")
    return int(cell)

"""The board of tic-tac-toe and what perfect play makes of it.

A board is a string of nine characters, row by row: "X", "O", or a space where a cell is free. Sides are "X" and "O".
"""

from __future__ import annotations

import functools

EMPTY = " " * 9
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def other(side: str) -> str:
    """The side that plays against this one."""
    return "O" if side == "X" else "X"


def free_cells(board: str) -> list[int]:
    """The cells that are free, in rising order.

    >>> free_cells("XO  X   O")
    [2, 3, 5, 6, 7]
    """
    return [cell for cell, letter in enumerate(board) if letter == " "]


def placed(board: str, cell: int, side: str) -> str:
    """The board after a move onto a free cell."""
    return f"{board[:cell]}{side}{board[cell + 1 :]}"


def winner(board: str) -> str | None:
    """The side with three in a line; None: neither has."""
    for a, b, c in _LINES:
        if board[a] != " " and board[a] == board[b] == board[c]:
            return board[a]
    return None


def is_over(board: str) -> bool:
    """Whether a side has won or no cell is free."""
    return winner(board) is not None or " " not in board


@functools.cache  # 5,478 boards can come up
def value(board: str, side: str) -> int:
    """What `side`, to move, reaches against perfect play: 1 a win, 0 a draw, -1 a loss. Exact (minimax)."""
    if (won := winner(board)) is not None:
        return 1 if won == side else -1
    if " " not in board:
        return 0
    return max(value_after(board, cell, side) for cell in free_cells(board))


def value_after(board: str, cell: int, side: str) -> int:
    """As `value`, for `side`, after its move onto `cell`."""
    return -value(placed(board, cell, side), other(side))


def best_cells(board: str, side: str) -> list[int]:
    """The moves that keep the value of the board, in rising order; the board is not over.

    >>> best_cells("X  O  X O", "X")
    [2]
    """
    best = value(board, side)
    return [cell for cell in free_cells(board) if value_after(board, cell, side) == best]

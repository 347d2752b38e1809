"""What follows from a map alone: checking it, distances to the goal, legal moves, and the best move on slippery ice.

Cells are numbered row by row, cell = row * num_columns + column, and moves 0 left, 1 down, 2 right, 3 up: Gymnasium's
own numbering.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set

from gspo_gym.errors import ConfigError

LEFT, DOWN, RIGHT, UP = range(4)
MOVE_NAMES = ("left", "down", "right", "up")
_DELTAS = ((0, -1), (1, 0), (0, 1), (-1, 0))

# Gymnasium's FrozenLakeEnv.P: for each cell and move, the outcomes (probability, next cell, reward, terminated).
Transitions = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]


def neighbour(lake: Sequence[str], cell: int, move: int) -> int | None:
    """The cell that `move` leads to on firm ice, or None if that is off the lake."""
    num_columns = len(lake[0])
    row, column = cell // num_columns + _DELTAS[move][0], cell % num_columns + _DELTAS[move][1]
    if not (0 <= row < len(lake) and 0 <= column < num_columns):
        return None
    return row * num_columns + column


def distances_to_goal(lake: Sequence[str]) -> dict[int, int]:
    """Moves from each cell to the nearest goal over safe cells, on firm ice; cells that cannot reach one are absent.

    >>> distances_to_goal(["SF", "HG"])
    {3: 0, 1: 1, 0: 2}
    """
    letters = "".join(lake)
    distances = {cell: 0 for cell, letter in enumerate(letters) if letter == "G"}
    frontier = deque(distances)
    while frontier:
        cell = frontier.popleft()
        for move in range(4):
            near = neighbour(lake, cell, move)
            if near is not None and near not in distances and letters[near] != "H":
                distances[near] = distances[cell] + 1
                frontier.append(near)
    return distances


def checked_lake(rows: Sequence[str]) -> tuple[str, ...]:
    """The rows as a tuple.

    Raises:
        ConfigError: not a rectangle of S, F, H and G with exactly one S, or no goal can be reached from it.
    """
    lake = tuple(rows)
    letters = "".join(lake)
    if not letters or any(len(row) != len(lake[0]) for row in lake) or set(letters) - set("SFHG"):
        raise ConfigError(f"FrozenLake: expected equally long rows of the letters S, F, H, G, got {list(rows)}")
    if letters.count("S") != 1:
        raise ConfigError(f"FrozenLake: expected exactly one start S on the map, got {letters.count('S')}")
    if letters.index("S") not in distances_to_goal(lake):
        raise ConfigError(f"FrozenLake: no goal G can be reached from the start on the map {list(rows)}")
    return lake


def best_moves(transitions: Transitions, goals: Set[int], num_steps: int) -> list[list[int]]:
    """The move most likely to end at a goal: `best_moves(...)[k - 1][cell]` is the one with k steps left.

    Backward induction over the finite horizon (Puterman 1994, section 4.5), exact for the transition table given;
    of equally good moves the one with the lowest number.
    """
    chance = [1.0 if cell in goals else 0.0 for cell in transitions]
    moves_by_steps_left: list[list[int]] = []
    for _ in range(num_steps):
        moves: list[int] = []
        next_chance: list[float] = []
        for cell, outcomes_by_move in transitions.items():
            values = [sum(p * chance[to] for p, to, _, _ in outcomes_by_move[move]) for move in range(4)]
            moves.append(values.index(max(values)))
            next_chance.append(1.0 if cell in goals else max(values))
        chance = next_chance
        moves_by_steps_left.append(moves)
    return moves_by_steps_left

"""The land of Homestead: its cells, who is on it, and how it is drawn from a generator.

Cells are numbered row by row, cell = row * size + column. What may be done on the land is in `rules.py`, how it is
shown in `view.py`.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gspo_gym.errors import ConfigError

GRASS, TREE, WATER, STONE, COAL, IRON, GEM, SEEDS = ".", "T", "~", "#", "c", "i", "g", "s"
TABLE, FURNACE, YOUNG_CROP, RIPE_CROP = "t", "f", "p", "P"
DEER, WOLF = "d", "w"
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
FULL = 9  # of health and of each need

_MAX_DRAWS = 1_000
_STONE_SHARE, _WATER_SHARE, _TREE_SHARE = 0.25, 0.08, 0.12
_ORES = COAL * 4 + IRON * 4 + GEM * 2
_NUM_SEEDS, _NUM_DEER = 5, 5
_DEER_HEALTH = 3
_MIN_WALKABLE = 40


@dataclass(slots=True)
class Creature:
    """A deer or a wolf."""

    kind: str
    cell: int
    health: int


@dataclass(slots=True)
class World:
    """Everything that an action can change.

    Attributes:
        size: rows and columns. cells: what is on the ground, a letter a cell.
        cell, facing: where the player stands, and the direction (a key of `DIRECTIONS`) it looks.
        health, food, water, energy: 0 to `FULL`; without health the player is dead.
        things: how many of "wood", "stone", "coal", "iron", "gem" and "seed" are carried.
        tools: the tools made, such as "wood pickaxe".
        creatures: deer, and wolves at night. crops: the step in which each crop was planted, by cell.
        num_steps: steps so far. rng: of everything that happens by chance.
    """

    size: int
    cells: list[str]
    cell: int
    rng: np.random.Generator
    creatures: list[Creature]
    facing: str = "down"
    health: int = FULL
    food: int = FULL
    water: int = FULL
    energy: int = FULL
    things: Counter[str] = field(default_factory=Counter)
    tools: set[str] = field(default_factory=set)
    crops: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0

    @property
    def front(self) -> int | None:
        """The cell that the player looks at; None: the edge of the land."""
        return self.neighbour(self.cell, self.facing)

    def neighbour(self, cell: int, direction: str) -> int | None:
        """The next cell in a direction; None: off the land."""
        rows, columns = DIRECTIONS[direction]
        row, column = cell // self.size + rows, cell % self.size + columns
        return row * self.size + column if 0 <= row < self.size and 0 <= column < self.size else None

    def distance(self, a: int, b: int) -> int:
        """Steps of a king on a chessboard between two cells."""
        return max(abs(a // self.size - b // self.size), abs(a % self.size - b % self.size))

    def creature_at(self, cell: int | None) -> Creature | None:
        """Who stands on a cell."""
        return next((creature for creature in self.creatures if creature.cell == cell), None)

    def is_free(self, cell: int | None) -> bool:
        """Whether a cell is grass with nobody on it."""
        return cell is not None and self.cells[cell] == GRASS and cell != self.cell and self.creature_at(cell) is None

    def is_near(self, letter: str, *, distance: int = 2) -> bool:
        """Whether something is on the ground within so many steps of the player."""
        return any(
            found == letter and self.distance(cell, self.cell) <= distance for cell, found in enumerate(self.cells)
        )

    def copy(self) -> World:
        """One that goes on by itself, by the same chance."""
        return copy.deepcopy(self)


def drawn_world(rng: np.random.Generator, size: int) -> World:
    """A land on which everything can be reached: trees, water, seeds, deer and stone on foot, ores by digging.

    Raises:
        ConfigError: none is found (sizes from 12 up always have one).
    """
    for _ in range(_MAX_DRAWS):
        cells = _drawn_cells(rng, size)
        middle = size // 2
        grass = [cell for cell, letter in enumerate(cells) if letter == GRASS]
        start = min(grass, key=lambda cell: abs(cell // size - middle) + abs(cell % size - middle))
        world = World(size, cells, start, rng, [])
        walkable = _reached(world, GRASS)
        if _has_everything(world, walkable):
            places = rng.choice(sorted(walkable - {start}), size=_NUM_DEER, replace=False)
            world.creatures = [Creature(DEER, int(cell), _DEER_HEALTH) for cell in places]
            return world
    raise ConfigError(f"Homestead: expected a size with room for everything, found no land in {_MAX_DRAWS} of {size}")


def _drawn_cells(rng: np.random.Generator, size: int) -> list[str]:
    """Stone on the heights with ores in it, water in the depths, trees and seeds between."""
    height = _smooth_noise(rng, size)
    order = np.argsort(height, axis=None)
    cells = np.full(size * size, GRASS)
    num_water, num_stone = int(_WATER_SHARE * cells.size), int(_STONE_SHARE * cells.size)
    cells[order[:num_water]] = WATER
    cells[order[-num_stone:]] = STONE
    cells[rng.choice(order[-num_stone:], size=len(_ORES), replace=False)] = list(_ORES)
    between = rng.permutation(order[num_water:-num_stone])
    num_trees = int(_TREE_SHARE * cells.size)
    cells[between[:num_trees]] = TREE
    cells[between[num_trees : num_trees + _NUM_SEEDS]] = SEEDS
    return [str(letter) for letter in cells]


def _smooth_noise(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Random heights on every fourth cell, linear between them, [size, size]."""
    num_knots = size // 4 + 1
    places = np.linspace(0, num_knots - 1, size)
    weights = np.maximum(0.0, 1.0 - np.abs(places[:, None] - np.arange(num_knots)))
    heights: NDArray[np.float64] = weights @ rng.random((num_knots, num_knots)) @ weights.T
    return heights


def _reached(world: World, passable: str) -> set[int]:
    """The cells that can be walked to from the player's, if these letters can be walked on."""
    reached, frontier = {world.cell}, deque([world.cell])
    while frontier:
        for near in _around(world, frontier.popleft()):
            if near not in reached and world.cells[near] in passable:
                reached.add(near)
                frontier.append(near)
    return reached


def _has_everything(world: World, walkable: set[int]) -> bool:
    if len(walkable) < _MIN_WALKABLE:
        return False
    dug = _reached(world, GRASS + STONE + COAL)
    on_foot, by_digging = (Counter(world.cells[cell] for cell in _edge(world, reached)) for reached in (walkable, dug))
    has_ores = by_digging[IRON] >= 2 and by_digging[GEM] >= 1 and sum(world.cells[cell] == COAL for cell in dug) >= 2
    return has_ores and all(on_foot[letter] > 0 for letter in (TREE, WATER, SEEDS, STONE))


def _edge(world: World, reached: set[int]) -> Sequence[int]:
    return [*{near for cell in reached for near in _around(world, cell)} - reached]


def _around(world: World, cell: int) -> Iterator[int]:
    for direction in DIRECTIONS:
        near = world.neighbour(cell, direction)
        if near is not None:
            yield near

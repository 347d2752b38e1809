"""The hand-written players of Homestead. The reference sees all of the land and what chance will bring."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message

from .rules import ACTIONS, GATHERED, MADE, PLACED, act, missing_for
from .world import (
    COAL,
    DEER,
    DIRECTIONS,
    FURNACE,
    GEM,
    GRASS,
    IRON,
    RIPE_CROP,
    SEEDS,
    STONE,
    TABLE,
    TREE,
    WATER,
    WOLF,
    YOUNG_CROP,
    World,
)

_LOW = 3  # a need that is this low goes before everything else
_TIRED = 7  # energy at which it is worth sleeping
_NEAR = 2  # steps within which a table or furnace serves

# The eight cells around one, in a circle; the even ones share a side with it.
_RING = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))

Goal = Callable[[int, str], bool]  # of the cell stood on and the direction looked in


def planner(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Unlocks everything. It tries each action out on a copy of the world before it says it.

    `env` is a `Homestead` after `reset` (Any: `PolicyFactory` fixes the type).
    """

    def play(_messages: Sequence[Message]) -> str:
        world, unlocked = env.world.copy(), set(env.achievements.unlocked)
        actions: list[str] = []
        while len(actions) < env.max_actions and world.health > 0:
            actions.append(next_action(world, unlocked))
            outcome = act(world, actions[-1])
            unlocked.update(outcome.achieved)
            if outcome.is_bitten or len(unlocked) == len(env.achievements.names):
                break
        return ",".join(actions)

    return play


def random_actions(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """As many actions as a turn allows, uniformly chosen."""
    return lambda _messages: ",".join(map(str, rng.choice(ACTIONS, size=env.max_actions)))


def next_action(world: World, unlocked: Collection[str]) -> str:
    """What the planner does next: the first of its wishes that it knows a way to."""
    return next(filter(None, _wishes(world, unlocked)), "wait")


def _wishes(world: World, unlocked: Collection[str]) -> Iterator[str | None]:
    """First actions of ways to what is wanted, most urgent first; None: there is no way."""
    if any(c.kind == WOLF and world.distance(c.cell, world.cell) <= 1 for c in world.creatures):
        yield _way_to(world, _faces_creature(world, WOLF), "use")
    if world.water <= _LOW:
        yield _way_to(world, _faces(world, WATER), "use")
    if world.food <= _LOW:
        yield _way_to(world, _faces(world, RIPE_CROP), "use")
        yield _way_to(world, _faces_creature(world, DEER), "use")
    if world.energy <= (_LOW if "rest" in unlocked else _TIRED):
        yield "sleep"
    if "eat_crop" not in unlocked:
        yield _way_to(world, _faces(world, RIPE_CROP), "use")
    if "place_plant" not in unlocked:
        yield _placing(world, "plant") if world.things["seed"] else _way_to(world, _faces(world, SEEDS), "use")
    yield from _tool_wishes(world, unlocked)
    if "gather_gem" not in unlocked:
        yield _way_to(world, _faces(world, GEM), "use")
    if "eat_meat" not in unlocked:
        yield _way_to(world, _faces_creature(world, DEER), "use")
    if "drink" not in unlocked:
        yield _way_to(world, _faces(world, WATER), "use")
    if "defeat_wolf" not in unlocked:
        yield _way_to(world, _faces_creature(world, WOLF), "use")


def _tool_wishes(world: World, unlocked: Collection[str]) -> Iterator[str | None]:
    """Everything that is placed or made, in an order in which each only needs those before it."""
    names = [*PLACED, *MADE]
    wanted = [name for name in names if not {f"place_{name}", f"make_{name.replace(' ', '_')}"} & set(unlocked)]
    needed = {
        thing: sum((PLACED[name][1] if name in PLACED else MADE[name]).get(thing, 0) for name in wanted)
        for thing, _ in GATHERED.values()
    }
    if world.things["wood"] < needed["wood"]:
        yield _way_to(world, _faces(world, TREE), "use")
    if "table" in wanted:
        yield _placing(world, "table", near=STONE)
        yield _placing(world, "table")
    for name in ("wood pickaxe", "wood sword"):
        if name in wanted:
            yield _making(world, name)
    if world.things["stone"] < needed["stone"]:
        yield _way_to(world, _faces(world, STONE), "use")
    for name in ("stone pickaxe", "stone sword"):
        if name in wanted:
            yield _making(world, name)
    if "furnace" in wanted:
        yield _placing(world, "furnace", near=TABLE)
    for thing, letter in (("coal", COAL), ("iron", IRON)):
        if world.things[thing] < needed[thing]:
            yield _way_to(world, _faces(world, letter), "use")
    for name in ("iron pickaxe", "iron sword"):
        if name in wanted:
            yield _making(world, name)
    if "wall" in wanted:
        yield _placing(world, "wall")


def _making(world: World, name: str) -> str | None:
    if any(world.things[thing] < number for thing, number in MADE[name].items()):
        return None
    letters = (TABLE, FURNACE) if name.startswith("iron") else (TABLE,)
    return _way_to(world, lambda cell, _: all(_is_near(world, cell, letter) for letter in letters), name)


def _placing(world: World, name: str, near: str | None = None) -> str | None:
    """A way to a place with grass ahead, near something; it keeps off narrow places, which it would close for good."""
    if (
        not missing_for(world, name)
        and (near is None or _is_near(world, world.cell, near))
        and _is_open(world, world.front)
    ):
        return name

    def goal(cell: int, facing: str) -> bool:
        ahead = world.neighbour(cell, facing)
        return _is_open(world, ahead) and ahead != world.cell and (near is None or _is_near(world, cell, near))

    return _way_to(world, goal, name)


def _is_open(world: World, cell: int | None) -> bool:
    """Whether a free cell can be built on without cutting anything off: no part of the land, and no crop or seeds.

    The cells around it that can be walked to from it directly must hang together around it: then every way over the
    cell has a way around it.
    """
    if cell is None or not world.is_free(cell):
        return False
    row, column = divmod(cell, world.size)
    ring = [_letter_at(world, row + down, column + right) for down, right in _RING]
    if {YOUNG_CROP, RIPE_CROP, SEEDS} & set(ring[::2]):
        return False
    # A stretch of grass ends where a cell of the ring is grass and the next one is not; a lone corner leads nowhere.
    is_grass = [letter == GRASS for letter in ring]
    corners = [i for i in range(1, 8, 2) if not is_grass[i - 1] and not is_grass[(i + 1) % 8]]
    stretches = [is_grass[i] and not is_grass[(i + 1) % 8] and i not in corners for i in range(8)]
    return sum(stretches) <= 1


def _letter_at(world: World, row: int, column: int) -> str:
    """What is on the ground; "" off the land."""
    is_land = 0 <= row < world.size and 0 <= column < world.size
    return world.cells[row * world.size + column] if is_land else ""


def _is_near(world: World, cell: int, letter: str) -> bool:
    return any(found == letter and world.distance(other, cell) <= _NEAR for other, found in enumerate(world.cells))


def _faces(world: World, letter: str) -> Goal:
    def goal(cell: int, facing: str) -> bool:
        ahead = world.neighbour(cell, facing)
        return ahead is not None and world.cells[ahead] == letter and world.creature_at(ahead) is None

    return goal


def _faces_creature(world: World, kind: str) -> Goal:
    cells = {creature.cell for creature in world.creatures if creature.kind == kind}
    return lambda cell, facing: world.neighbour(cell, facing) in cells


def _way_to(world: World, goal: Goal, then: str) -> str | None:
    """The first action of a quickest way to a cell and direction with the goal, digging where need be; None: no way.

    Dijkstra's algorithm over (cell, direction); `then` is the action once the goal is reached.
    """
    start = (world.cell, world.facing)
    if goal(*start):
        return then
    diggable = {letter for letter, (_, tool) in GATHERED.items() if tool in world.tools}
    occupied = {creature.cell for creature in world.creatures}
    seen = {start}
    frontier: list[tuple[int, int, int, str, str]] = [(0, 0, *start, "")]  # cost, tie-breaker, state, first action
    num_pushed = 0
    while frontier:
        cost, _, cell, facing, first = heapq.heappop(frontier)
        if first and goal(cell, facing):
            return first
        for action, spent, state in _moves(world, cell, facing, diggable, occupied):
            if state not in seen:
                seen.add(state)
                num_pushed += 1
                heapq.heappush(frontier, (cost + spent, num_pushed, *state, first or action))
    return None


def _moves(
    world: World, cell: int, facing: str, diggable: Collection[str], occupied: Collection[int]
) -> Iterator[tuple[str, int, tuple[int, str]]]:
    """(action, steps, cell and direction after it) of what can be done in one place, as the land lies now."""
    for direction in DIRECTIONS:
        to = world.neighbour(cell, direction)
        is_way = to is not None and world.cells[to] == GRASS and to not in occupied
        yield direction, 1, (to if is_way and to is not None else cell, direction)
    ahead = world.neighbour(cell, facing)
    if ahead is not None and world.cells[ahead] in diggable and ahead not in occupied:
        yield "use", 2, (ahead, facing)

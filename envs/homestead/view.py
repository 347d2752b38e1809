"""How Homestead is told: what the player sees around itself, how it is, and the rules in words."""

from __future__ import annotations

from collections.abc import Sequence

from .rules import ACTIONS, MADE, PLACED, is_night
from .world import World

_PLAYER = {"up": "^", "down": "v", "left": "<", "right": ">"}
_OUTSIDE = "x"
_DAY_RADIUS, _NIGHT_RADIUS = 3, 2

_RULES = (
    "You settle in a wilderness. The map shows what is around you, with you in its middle as ^ v < or >, the way you "
    "look: . grass, T tree, ~ water, # stone, c coal, i iron, g gem, s seeds, t table, f furnace, p crop, P ripe crop, "
    "d deer, w wolf, x the edge of the land. Walk with up, down, left, right: you turn that way, and step if there is "
    "grass. use works on what is ahead: it gathers (stone and coal with a wood pickaxe, iron with a stone pickaxe, a "
    "gem with an iron pickaxe), drinks, eats a ripe crop and hits animals. "
)


def rules_text(max_actions: int, num_achievements: int) -> str:
    """The rules in sentences."""
    costs = [
        f"{name} ({' '.join(f'{number} {thing}' for thing, number in cost.items())})"
        for name, cost in [*((name, cost) for name, (_, cost) in PLACED.items()), *MADE.items()]
    ]
    return (
        f"{_RULES}These put something on the grass ahead or make a tool: {', '.join(costs)}. A furnace and tools need "
        "a table near, tools of iron also a furnace. sleep restores energy, wait does nothing. Food, water and energy "
        "run down; wolves come at night, and a bite ends your turn. Answer with actions, separated by commas, at most "
        f"{max_actions}: {', '.join(ACTIONS)}. Each of {num_achievements} achievements counts once: find them."
    )


def map_rows(world: World) -> list[str]:
    """What is around the player, in rows of letters; less of it at night."""
    radius = _NIGHT_RADIUS if is_night(world) else _DAY_RADIUS
    row, column = divmod(world.cell, world.size)
    span = range(-radius, radius + 1)
    animals = {creature.cell: creature.kind for creature in world.creatures} | {world.cell: _PLAYER[world.facing]}

    def letter(row: int, column: int) -> str:
        if not (0 <= row < world.size and 0 <= column < world.size):
            return _OUTSIDE
        cell = row * world.size + column
        return animals.get(cell, world.cells[cell])

    return ["".join(letter(row + down, column + right) for right in span) for down in span]


def status(world: World) -> str:
    """Health, needs, time of day, and what is carried."""
    needs = f"H{world.health} F{world.food} W{world.water} E{world.energy} {'night' if is_night(world) else 'day'}"
    carried = [*(f"{thing} {number}" for thing, number in sorted(world.things.items()) if number), *sorted(world.tools)]
    return f"{needs}\n{', '.join(carried)}" if carried else needs


def told(world: World, news: Sequence[str]) -> str:
    """An observation: what is new, the map, and how the player is."""
    return "\n".join([*news, *map_rows(world), status(world)])


def verbose_status(world: World, num_unlocked: int, num_achievements: int, turns_left: int) -> str:
    """As `status`, in sentences."""
    carried = [*(f"{number} {thing}" for thing, number in sorted(world.things.items()) if number), *sorted(world.tools)]
    return (
        f"It is {'night' if is_night(world) else 'day'}. Health {world.health}, food {world.food}, "
        f"water {world.water}, energy {world.energy}. You carry {', '.join(carried) or 'nothing'}. "
        f"{num_unlocked} of {num_achievements} achievements, {turns_left} turns left."
    )

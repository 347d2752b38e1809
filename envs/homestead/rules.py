"""What can be done in Homestead, what it takes, and what a step of time does.

`act` makes one action and lets one step pass. It tells what came of it; what that earns is the environment's affair.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .world import (
    COAL,
    DEER,
    DIRECTIONS,
    FULL,
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
    Creature,
    World,
)

# What is carried after `use` on it, and the tool without which nothing happens.
GATHERED = {
    TREE: ("wood", None),
    STONE: ("stone", "wood pickaxe"),
    COAL: ("coal", "wood pickaxe"),
    IRON: ("iron", "stone pickaxe"),
    GEM: ("gem", "iron pickaxe"),
    SEEDS: ("seed", None),
}
# What is put on the ground, and what it costs.
PLACED = {
    "table": (TABLE, {"wood": 2}),
    "furnace": (FURNACE, {"stone": 2}),
    "wall": (STONE, {"stone": 1}),
    "plant": (YOUNG_CROP, {"seed": 1}),
}
# What is made beside a table (of iron: and a furnace), and what it costs.
MADE = {
    f"{material} {tool}": cost
    for material, cost in (
        ("wood", {"wood": 1}),
        ("stone", {"wood": 1, "stone": 1}),
        ("iron", {"wood": 1, "coal": 1, "iron": 1}),
    )
    for tool in ("pickaxe", "sword")
}
ACTIONS = (*DIRECTIONS, "use", *PLACED, *MADE, "sleep", "wait")

# Seeds themselves are no achievement: planting them is.
ACHIEVEMENTS = (
    *(f"gather_{thing}" for thing, _ in GATHERED.values() if thing != "seed"),
    *(f"place_{name}" for name in PLACED),
    *(f"make_{name.replace(' ', '_')}" for name in MADE),
    "drink",
    "eat_meat",
    "eat_crop",
    "rest",
    "defeat_wolf",
)

RIPE_AFTER = 60  # steps
DAY, NIGHT_FROM = 100, 60  # a day has so many steps, the last of them from here on are night
MAX_WOLVES = 2
WOLF_HEALTH = 5
_DAMAGE = {"iron sword": 5, "stone sword": 3, "wood sword": 2}  # without a sword: 1
_FOOD = {DEER: 6, RIPE_CROP: 4}
_DRINK = 3
_REST = 2
_FOOD_STEPS, _WATER_STEPS, _ENERGY_STEPS = 25, 20, 30  # steps in which one of each is used up
_HEAL_STEPS, _HARM_STEPS = 10, 5  # steps in which one health comes back, or goes while something is used up
_WOLF_PROB, _DEER_MOVE_PROB, _WOLF_CHASE_PROB, _BITE_PROB = 0.1, 0.3, 0.7, 0.25
_BITE = 1
_WOLF_DISTANCES = range(3, 6)  # from the player, where a wolf comes from


@dataclass(slots=True)
class Outcome:
    """What came of an action.

    Attributes:
        achieved: names of `ACHIEVEMENTS`, new or again.
        problem: why nothing was done; "" if something was.
        is_bitten: a wolf bit in this step.
    """

    achieved: list[str] = field(default_factory=list)
    problem: str = ""
    is_bitten: bool = False


def act(world: World, action: str) -> Outcome:
    """Make one of `ACTIONS` and let one step pass; changes the world."""
    outcome = Outcome()
    if action in DIRECTIONS:
        world.facing = action
        if world.front is not None and world.is_free(world.front):
            world.cell = world.front
    elif action in PLACED:
        _place(world, action, outcome)
    elif action in MADE:
        _make(world, action, outcome)
    elif action == "use":
        _use(world, outcome)
    elif action == "sleep":
        _sleep(world, outcome)
    _pass_time(world, outcome)
    return outcome


def is_night(world: World) -> bool:
    """Whether wolves are about and little can be seen."""
    return world.num_steps % DAY >= NIGHT_FROM


def missing_for(world: World, action: str) -> str:
    """What is lacking for an action of `PLACED` or `MADE`, in words; "" if nothing is."""
    cost = PLACED[action][1] if action in PLACED else MADE[action]
    lacking = [f"{number} {thing}" for thing, number in cost.items() if world.things[thing] < number]
    if action in MADE or action == "furnace":
        lacking += [] if world.is_near(TABLE) else ["a table near"]
    if action.startswith("iron"):
        lacking += [] if world.is_near(FURNACE) else ["a furnace near"]
    if action in PLACED and not world.is_free(world.front):
        lacking.append("grass ahead")
    return f"needs {', '.join(lacking)}" if lacking else ""


def _pay(world: World, cost: dict[str, int]) -> None:
    for thing, number in cost.items():
        world.things[thing] -= number


def _place(world: World, action: str, outcome: Outcome) -> None:
    outcome.problem = missing_for(world, action)
    front = world.front
    if outcome.problem or front is None:
        return
    letter, cost = PLACED[action]
    _pay(world, cost)
    world.cells[front] = letter
    if letter == YOUNG_CROP:
        world.crops[front] = world.num_steps
    outcome.achieved.append(f"place_{action}")


def _make(world: World, action: str, outcome: Outcome) -> None:
    outcome.problem = missing_for(world, action)
    if not outcome.problem:
        _pay(world, MADE[action])
        world.tools.add(action)
        outcome.achieved.append(f"make_{action.replace(' ', '_')}")


def _use(world: World, outcome: Outcome) -> None:
    front = world.front
    creature = world.creature_at(front)
    if creature is not None:
        _hit(world, creature, outcome)
        return
    letter = "" if front is None else world.cells[front]
    if letter in GATHERED:
        _gather(world, letter, outcome)
    elif letter == WATER:
        world.water = min(FULL, world.water + _DRINK)
        outcome.achieved.append("drink")
    elif letter == RIPE_CROP and front is not None:
        world.food = min(FULL, world.food + _FOOD[RIPE_CROP])
        world.cells[front] = GRASS
        outcome.achieved.append("eat_crop")
    else:
        outcome.problem = "not ripe" if letter == YOUNG_CROP else "nothing to use ahead"


def _gather(world: World, letter: str, outcome: Outcome) -> None:
    thing, tool = GATHERED[letter]
    if tool is not None and tool not in world.tools:
        outcome.problem = f"needs a {tool}"
        return
    world.things[thing] += 1
    if letter != TREE and world.front is not None:  # trees grow faster than anyone can fell them
        world.cells[world.front] = GRASS
    if f"gather_{thing}" in ACHIEVEMENTS:
        outcome.achieved.append(f"gather_{thing}")


def _hit(world: World, creature: Creature, outcome: Outcome) -> None:
    creature.health -= next((damage for sword, damage in _DAMAGE.items() if sword in world.tools), 1)
    if creature.health > 0:
        return
    world.creatures.remove(creature)
    if creature.kind == DEER:
        world.food = min(FULL, world.food + _FOOD[DEER])
        outcome.achieved.append("eat_meat")
    else:
        outcome.achieved.append("defeat_wolf")


def _sleep(world: World, outcome: Outcome) -> None:
    if world.energy == FULL:
        outcome.problem = "not tired"
        return
    world.energy = min(FULL, world.energy + _REST)
    if world.energy == FULL:
        outcome.achieved.append("rest")


def _pass_time(world: World, outcome: Outcome) -> None:
    world.num_steps += 1
    step = world.num_steps
    world.food = max(0, world.food - (step % _FOOD_STEPS == 0))
    world.water = max(0, world.water - (step % _WATER_STEPS == 0))
    world.energy = max(0, world.energy - (step % _ENERGY_STEPS == 0))
    if min(world.food, world.water, world.energy) == 0:
        world.health -= step % _HARM_STEPS == 0
    elif step % _HEAL_STEPS == 0:
        world.health = min(FULL, world.health + 1)
    for cell, planted in list(world.crops.items()):
        if step - planted >= RIPE_AFTER:
            del world.crops[cell]
            world.cells[cell] = RIPE_CROP
    for creature in world.creatures:
        outcome.is_bitten |= _prowl(world, creature) if creature.kind == WOLF else _graze(world, creature)
    _come_and_go(world)
    world.health = max(0, world.health)


def _graze(world: World, deer: Creature) -> bool:
    if world.rng.random() < _DEER_MOVE_PROB:
        _wander(world, deer)
    return False


def _prowl(world: World, wolf: Creature) -> bool:
    """A wolf's step towards the player, or its bite; True: it bit."""
    rows = world.cell // world.size - wolf.cell // world.size
    columns = world.cell % world.size - wolf.cell % world.size
    if abs(rows) + abs(columns) == 1:
        if world.rng.random() >= _BITE_PROB:
            return False
        world.health -= _BITE
        return True
    if world.rng.random() >= _WOLF_CHASE_PROB:
        _wander(world, wolf)
        return False
    vertical, horizontal = "down" if rows > 0 else "up", "right" if columns > 0 else "left"
    direction = vertical if abs(rows) >= abs(columns) else horizontal
    to = world.neighbour(wolf.cell, direction)
    if to is not None and world.is_free(to):
        wolf.cell = to
    return False


def _wander(world: World, creature: Creature) -> None:
    to = world.neighbour(creature.cell, tuple(DIRECTIONS)[int(world.rng.integers(len(DIRECTIONS)))])
    if to is not None and world.is_free(to):
        creature.cell = to


def _come_and_go(world: World) -> None:
    """Wolves come one by one at night and are gone by day."""
    wolves = [creature for creature in world.creatures if creature.kind == WOLF]
    if not is_night(world):
        if wolves:
            world.creatures = [creature for creature in world.creatures if creature.kind != WOLF]
        return
    if len(wolves) >= MAX_WOLVES or world.rng.random() >= _WOLF_PROB:
        return
    places = [
        cell
        for cell in range(len(world.cells))
        if world.distance(cell, world.cell) in _WOLF_DISTANCES and world.is_free(cell)
    ]
    if places:
        world.creatures.append(Creature(WOLF, places[int(world.rng.integers(len(places)))], WOLF_HEALTH))

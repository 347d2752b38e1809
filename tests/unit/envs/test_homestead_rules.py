"""Homestead's rules, one by one on lands written by hand, and what every drawn land has."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from gspo_gym_envs.homestead.policies import _is_open, next_action
from gspo_gym_envs.homestead.rules import ACHIEVEMENTS, GATHERED, MADE, PLACED, WOLF_HEALTH, act, is_night
from gspo_gym_envs.homestead.world import Creature, World, drawn_world

MEADOW = ["....."] * 5


def land(rows: list[str], **kwargs: object) -> World:
    """A land of ours; the player stands in its middle (cell 12) and looks down (at cell 17), nobody else is there."""
    size = len(rows)
    return World(size, list("".join(rows)), size * size // 2, np.random.default_rng(0), [], **kwargs)


def facing(letter: str, **kwargs: object) -> World:
    """A meadow with one thing ahead of the player."""
    return land(["....."] * 3 + [f"..{letter}..", "....."], **kwargs)


def test_walking_turns_and_steps_onto_free_grass_only() -> None:
    world = land([".....", "..T..", ".....", ".....", "....."])
    act(world, "up")
    assert (world.cell, world.facing) == (12, "up")  # the tree is in the way
    act(world, "right")
    assert (world.cell, world.facing) == (13, "right")
    for _ in range(3):
        act(world, "right")
    assert world.cell == 14  # the edge of the land


@pytest.mark.parametrize(("letter", "thing", "tool"), [(k, t, tool) for k, (t, tool) in GATHERED.items()])
def test_gathering_needs_its_tool_and_clears_the_cell_but_for_trees(letter: str, thing: str, tool: str | None) -> None:
    if tool is not None:
        world = facing(letter)
        assert act(world, "use").problem == f"needs a {tool}"
        assert (world.cells[17], world.things[thing]) == (letter, 0)
    world = facing(letter, tools={tool} if tool else set())
    outcome = act(world, "use")
    assert outcome.achieved == ([] if thing == "seed" else [f"gather_{thing}"])
    assert world.things[thing] == 1
    assert world.cells[17] == ("T" if letter == "T" else ".")


@pytest.mark.parametrize(
    ("action", "letter", "cost"),
    [
        ("table", "t", {"wood": 2}),
        ("furnace", "f", {"stone": 2}),
        ("wall", "#", {"stone": 1}),
        ("plant", "p", {"seed": 1}),
    ],
)
def test_placing_takes_its_cost_and_needs_grass_ahead(action: str, letter: str, cost: dict[str, int]) -> None:
    rows = ["t....", *MEADOW[1:]]  # a table is two cells away, near enough for a furnace
    world = land(rows, things=Counter({thing: number - 1 for thing, number in cost.items()}))
    [(thing, number)] = cost.items()
    assert act(world, action).problem == f"needs {number} {thing}"
    world.things[thing] = number
    assert act(world, action).achieved == [f"place_{action}"]
    assert (world.cells[17], world.things[thing]) == (letter, 0)
    world.things[thing] = number
    assert act(world, action).problem == "needs grass ahead"
    assert world.things[thing] == number


@pytest.mark.parametrize("name", MADE)
def test_making_a_tool_takes_its_cost_and_what_must_be_near(name: str) -> None:
    cost = {
        "wood": 1,
        **({"stone": 1} if "stone" in name else {}),
        **({"coal": 1, "iron": 1} if "iron" in name else {}),
    }
    near = ["a table near", *(["a furnace near"] if "iron" in name else [])]
    world = land(MEADOW, things=Counter(cost))
    assert act(world, name).problem == f"needs {', '.join(near)}"
    world = land(["tf...", *MEADOW[1:]], things=Counter(cost))
    assert act(world, name).achieved == [f"make_{name.replace(' ', '_')}"]
    assert (world.tools, sum(world.things.values())) == ({name}, 0)
    assert "needs 1 wood" in act(world, name).problem


def test_a_table_three_cells_away_is_not_near() -> None:
    world = land(["t......"] + ["......."] * 6, things=Counter(wood=1))  # the player stands at (3, 3)
    assert act(world, "wood sword").problem == "needs a table near"


def test_drinking_eating_and_sleeping_restore_up_to_the_full() -> None:
    world = facing("~", water=8)
    assert act(world, "use").achieved == ["drink"]
    assert world.water == 9
    world = facing("P", food=2)
    assert act(world, "use").achieved == ["eat_crop"]
    assert (world.food, world.cells[17]) == (6, ".")
    world = land(MEADOW, energy=6)
    assert [act(world, "sleep").achieved for _ in range(2)] == [[], ["rest"]]  # 6 + 2 + 2 is capped at 9
    assert act(world, "sleep").problem == "not tired"


def test_a_crop_is_ripe_after_sixty_steps_and_not_before() -> None:
    world = land(MEADOW, things=Counter(seed=1))
    act(world, "plant")  # planted in step 0, ripe when step 60 is over
    for _ in range(58):
        act(world, "wait")
    assert (world.num_steps, world.cells[17]) == (59, "p")
    assert act(world, "use").problem == "not ripe"
    assert world.cells[17] == "P"


@pytest.mark.parametrize(
    ("tools", "deer_blows", "wolf_blows"),
    [
        (set(), 3, 5),
        ({"wood sword"}, 2, 3),
        ({"wood sword", "stone sword"}, 1, 2),
        ({"stone sword", "iron sword"}, 1, 1),
    ],
)
def test_blows_grow_with_the_best_sword(tools: set[str], deer_blows: int, wolf_blows: int) -> None:
    # ceil(health / damage): deer 3 and wolf 5, by 1, 2, 3, 5
    for kind, health, blows, achieved in (("d", 3, deer_blows, "eat_meat"), ("w", 5, wolf_blows, "defeat_wolf")):
        world = land(["~~~~~", "~~~~~", "~~.~~", "~~.~~", "~~~~~"], tools=tools, num_steps=70)
        victim = Creature(kind, 17, health)
        world.creatures = [victim]
        outcomes = [act(world, "use").achieved for _ in range(blows)]
        assert outcomes == [[]] * (blows - 1) + [[achieved]]
        assert victim not in world.creatures


def test_needs_fall_in_their_own_time() -> None:
    world = land(MEADOW)
    for _ in range(59):
        act(world, "wait")
    # floor(59 / 25) = 2 food, floor(59 / 20) = 2 water, floor(59 / 30) = 1 energy
    assert (world.food, world.water, world.energy, world.health) == (7, 7, 8, 9)


def test_health_falls_while_something_is_used_up_and_comes_back_otherwise() -> None:
    starving, well = land(MEADOW, food=0, health=5), land(MEADOW, health=5)
    for _ in range(10):
        act(starving, "wait")
        act(well, "wait")
    assert (starving.health, well.health) == (3, 6)  # one every 5 steps down, one every 10 up


def test_nights_are_the_last_forty_of_a_hundred_steps() -> None:
    nights = [is_night(land(MEADOW, num_steps=step)) for step in range(200)]
    assert nights == ([False] * 60 + [True] * 40) * 2


def test_wolves_come_at_night_and_are_gone_by_day() -> None:
    world = drawn_world(np.random.default_rng(0), 16)
    num_wolves = []
    for _ in range(220):
        world.health = world.food = world.water = world.energy = 9
        act(world, "wait")
        num_wolves.append(sum(creature.kind == "w" for creature in world.creatures))
    assert max(num_wolves) == 2
    assert all(n == 0 for step, n in enumerate(num_wolves, 1) if step % 100 < 60)
    assert sum(num_wolves[60:99]) > 0


def test_a_wolf_comes_nearer_and_bites_one_health_off_from_beside_only() -> None:
    world = land(MEADOW, num_steps=60)
    wolf = Creature("w", 0, WOLF_HEALTH)
    world.creatures = [wolf]
    num_bites = 0
    for _ in range(39):  # until the last step of the night
        health, cell = world.health, wolf.cell
        is_bitten = act(world, "wait").is_bitten
        world.creatures = [wolf]  # no second one
        healed = min(9, health + 1) if world.num_steps % 10 == 0 else health
        assert world.health == healed - is_bitten
        assert not is_bitten or abs(cell // 5 - 2) + abs(cell % 5 - 2) == 1
        num_bites += is_bitten
    # It comes beside within a few steps and then bites one time in four: about eight times, at least once but for
    # odds of 0.75^30 = 0.0002.
    assert 1 <= num_bites <= 20
    assert abs(wolf.cell // 5 - 2) + abs(wolf.cell % 5 - 2) == 1  # beside the player it stays


def test_a_copy_goes_on_by_the_same_chance_without_touching_the_original() -> None:
    world = drawn_world(np.random.default_rng(1), 16)
    twin = world.copy()
    for _ in range(80):
        act(twin, "wait")
    assert world.num_steps == 0
    for _ in range(80):
        act(world, "wait")
    assert (world.creatures, world.health, world.cells) == (twin.creatures, twin.health, twin.cells)


@pytest.mark.parametrize("size", [12, 16, 32])
def test_every_drawn_land_has_what_the_achievements_need(size: int) -> None:
    needed_stone = PLACED["furnace"][1]["stone"] + PLACED["wall"][1]["stone"] + 2  # and a stone pickaxe and sword
    for seed in range(40):
        world = drawn_world(np.random.default_rng(seed), size)
        letters = Counter(world.cells)
        assert min(letters["T"], letters["~"], letters["s"]) >= 1
        assert letters["#"] >= needed_stone
        assert letters["c"] >= 2
        assert letters["i"] >= 2
        assert letters["g"] >= 1
        assert [creature.kind for creature in world.creatures] == ["d"] * 5
        assert len({creature.cell for creature in world.creatures} | {world.cell}) == 6
        assert world.cells[world.cell] == "."


def test_every_rule_that_achieves_something_names_an_achievement() -> None:
    names = {f"place_{name}" for name in PLACED} | {f"make_{name.replace(' ', '_')}" for name in MADE}
    names |= {f"gather_{thing}" for thing, _ in GATHERED.values()} - {"gather_seed"}
    assert set(ACHIEVEMENTS) - names == {"drink", "eat_meat", "eat_crop", "rest", "defeat_wolf"}
    assert names <= set(ACHIEVEMENTS)


def test_the_planner_digs_where_there_is_no_other_way() -> None:
    rows = ["#####", "#~###", "##.##", "#####", "#####"]
    world = land(rows, tools={"wood pickaxe"}, water=1)
    actions = []
    while world.water < 4:
        actions.append(next_action(world, ACHIEVEMENTS))
        act(world, actions[-1])
    # up or left, dig, step, turn to the water, drink: five actions are the fewest there are
    assert len(actions) == 5
    assert actions[-1] == "use"


def test_the_planner_waits_where_nothing_is_left_to_wish_for() -> None:
    assert next_action(land(MEADOW), ACHIEVEMENTS) == "wait"


@pytest.mark.parametrize(
    ("rows", "is_open"),
    [
        (MEADOW, True),
        (["~~~~~", "~~~~~", ".....", "~~~~~", "~~~~~"], False),  # a corridor: it is the only way
        (["~~~~~", ".....", ".....", "~~~~~", "~~~~~"], True),  # two cells wide: there is a way around
        (["~~~~~", "~.~.~", ".....", "~~~~~", "~~~~~"], False),  # the corners alone are no way around
        (["~~~~~", "~~.~~", "~~.~~", "~~~~~", "~~~~~"], True),  # a dead end
        ([".....", ".....", ".p...", ".....", "....."], False),  # it might close the only side of the crop
    ],
)
def test_the_planner_builds_only_where_nothing_is_cut_off(rows: list[str], is_open: bool) -> None:
    world = land(rows)
    world.cell = 0  # the player is elsewhere
    assert _is_open(world, 12) is is_open

"""Homestead as an environment: what turns earn and end, what is told, and that everything can be achieved."""

from __future__ import annotations

from pathlib import Path

import gspo_gym_envs.homestead.env as homestead
import numpy as np
import pytest
from gspo_gym_envs.homestead.env import Homestead
from gspo_gym_envs.homestead.rules import ACHIEVEMENTS
from gspo_gym_envs.homestead.world import Creature, World

from gspo_gym.env.rewards import Reward

EMPTY = ["....."] * 5


def land(rows: list[str], **kwargs: object) -> World:
    """A land of ours; the player stands in its middle and looks down, nobody else is there."""
    size = len(rows)
    return World(size, list("".join(rows)), size * size // 2, np.random.default_rng(0), [], **kwargs)


def on(rows: list[str], **kwargs: object) -> Homestead:
    """The environment with an episode on a land of ours."""
    env = Homestead(style="terse", **kwargs)
    env.reset(seed=0)
    env.world = land(rows)
    return env


def play(env: Homestead, policy: str, seed: int) -> tuple[float, Reward, str]:
    """(return, last reward, last observation) of a hand-written player."""
    env.reset(seed=seed)
    player = env.policies[policy](env, np.random.default_rng((seed, 1)))
    total, is_over = 0.0, False
    while not is_over:
        text, reward, terminated, truncated, _ = env.step(str(player(())))
        total, is_over = total + float(reward), terminated or truncated
    return total, reward, text


def test_an_achievement_earns_its_share_the_first_time_and_is_reported_every_time() -> None:
    env = on([".....", ".....", "..v..", "..~..", "....."])
    rewards = [env.step("use")[1] for _ in range(2)]
    assert [dict(reward.terms) for reward in rewards] == [{"achievements": pytest.approx(1 / 20)}, {}]
    assert [reward.events for reward in rewards] == [("drink",), ("drink",)]


def test_several_achievements_of_a_turn_add_up() -> None:
    env = on([".....", ".....", ".....", "..T..", "....."])
    reward = env.step("use,use,use,use,up,table,wood pickaxe,wood sword")[1]
    assert reward.events == ("gather_wood", "place_table", "make_wood_pickaxe", "make_wood_sword")
    assert dict(reward.terms) == {"achievements": pytest.approx(4 / 20)}


def test_an_observation_reads_exactly_so() -> None:
    env = on([".....", ".....", ".....", "..T..", "....."])
    text = env.step("use,sleep,furnace,left")[0]
    assert text.splitlines() == [
        "+gather_wood",
        "sleep: not tired",
        "furnace: needs 2 stone, a table near, grass ahead",
        "xxxxxxx",  # 7 x 7 around the player, who stands one from the left edge of a land of five
        "xx.....",
        "xx.....",
        "xx.<...",
        "xx..T..",
        "xx.....",
        "xxxxxxx",
        "H9 F9 W9 E9 day",
        "wood 1",
    ]


def test_at_night_less_is_seen() -> None:
    env = on(EMPTY)
    env.world.num_steps = 70
    *rows, status = env.step("wait")[0].splitlines()
    assert [len(row) for row in rows] == [5] * 5
    assert status == "H9 F9 W9 E9 night"


def test_the_verbose_style_tells_the_rules_and_the_state_in_sentences() -> None:
    env = Homestead(style="verbose")
    first = env.reset(seed=0)[0]
    assert "Answer with actions, separated by commas, at most 8: up, down, left, right, use, table," in first
    assert "iron sword (1 wood 1 coal 1 iron)" in first
    env.world = land(EMPTY)
    assert env.step("wait")[0].splitlines()[-1] == (
        "It is day. Health 9, food 9, water 9, energy 9. You carry nothing. 0 of 20 achievements, 59 turns left."
    )


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("", "unknown action 1"),
        ("jump", "unknown action 1"),
        ("up,use,fly", "unknown action 3"),
        ("up,,use", "unknown action 2"),
        ("up use", "unknown action 1"),
        ("up\nuse", "unknown action 1"),
        (",".join(["up"] * 9), "at most 8 actions"),
        ("use," * 5000, "at most 8 actions"),
    ],
)
def test_an_illegal_answer_does_nothing_but_let_a_step_pass(action: str, error: str) -> None:
    env = on(EMPTY)
    text, reward, terminated, truncated, _ = env.step(action)
    assert text.splitlines()[0] == error
    assert (dict(reward.terms), terminated, truncated) == ({"illegal": -0.01}, False, False)
    assert (env.world.cell, env.world.num_steps) == (12, 1)


def test_words_are_read_in_any_case_with_white_space_and_directions_by_their_letter() -> None:
    env = on(EMPTY)
    env.step(" UP, l ,Left")
    assert (env.world.cell, env.world.facing) == (12 - 5 - 2, "left")


def test_a_bite_ends_the_turn() -> None:
    env = on([".....", ".~.~.", "..~..", ".~.~.", "....."])  # nowhere for the wolf to go but to stay beside
    env.world.cells[12] = "."
    env.world.num_steps = 70
    env.world.creatures = [Creature("w", 12, 5)]
    env.world.cell = 11
    text = env.step(",".join(["wait"] * 8))[0]
    num_steps = env.world.num_steps - 70
    assert text.splitlines()[0] == "bitten"
    assert env.world.health == 8
    assert num_steps < 8  # eight chances of 1/2 with this generator: the first bite comes before the last of them


def test_death_terminates_and_is_no_success() -> None:
    env = on(EMPTY)
    env.world.health, env.world.water, env.world.num_steps = 1, 0, 4
    text, reward, terminated, truncated, _ = env.step("wait,wait,wait")
    assert (text, reward.success, terminated, truncated) == ("dead", False, True, False)
    assert env.world.num_steps == 5  # thirst takes one health every five steps; the other waits were not made


def test_the_turn_limit_truncates() -> None:
    env = Homestead(style="terse", max_turns=2)
    env.reset(seed=0)
    assert env.step("wait")[2:4] == (False, False)
    text, reward, terminated, truncated, _ = env.step("wait")
    assert (text, reward.success, terminated, truncated) == ("time is up", False, False, True)


def test_the_last_achievement_terminates_at_once() -> None:
    env = on([".....", ".....", ".....", "..~..", "....."])
    for name in ACHIEVEMENTS:
        if name != "drink":
            env.achievements.unlock(name)
    env.achievements.turn_events()
    text, reward, terminated, _, _ = env.step("use,use")
    assert (text.splitlines()[-1], reward.success, terminated, env.world.num_steps) == ("all done", True, True, 1)


@pytest.mark.parametrize("kwargs", [{}, {"size": 12}])
def test_the_reference_achieves_everything(kwargs: dict[str, int]) -> None:
    env = Homestead(style="terse", **kwargs)
    seeds = (*range(3), 609, 1425, 2**31)  # in 609 and 1425 careless building cuts off the stone, or the crop
    for seed in seeds:
        total, reward, text = play(env, "reference", seed)
        assert (total, reward.success) == (pytest.approx(1.0, abs=1e-12), True), (seed, text)


def test_random_play_achieves_a_few() -> None:
    env = Homestead(style="terse")
    returns = [play(env, "random", seed)[0] for seed in range(20)]
    assert 0.05 < np.mean(returns) < 0.4  # one to eight of twenty; more would make the game trivial
    assert min(returns) >= env.reward_range[0]


def test_illegal_answers_only_are_the_lowest_return() -> None:
    env = Homestead(style="terse", max_turns=5)
    env.reset(seed=0)
    rewards = [float(env.step("")[1]) for _ in range(5)]
    assert sum(rewards) == pytest.approx(env.reward_range[0])


def test_seeds_are_lands_and_the_same_seed_is_the_same_land() -> None:
    env, other = Homestead(style="terse"), Homestead(style="terse")
    lands = set()
    for seed in range(20):
        assert env.reset(seed=seed)[0] == other.reset(seed=seed)[0]
        assert env.world.cells == other.world.cells
        lands.add("".join(env.world.cells))
    assert len(lands) == 20


def test_chance_within_an_episode_follows_from_the_seed() -> None:
    env, other = Homestead(style="terse"), Homestead(style="terse")
    for one in (env, other):
        one.reset(seed=3)
    answers = [[one.step(",".join(["wait"] * 8))[0] for _ in range(12)] for one in (env, other)]  # 96 steps, a night
    assert answers[0] == answers[1]


def test_the_readme_names_every_achievement() -> None:
    readme = (Path(homestead.__file__).parent / "README.md").read_text()
    assert [name for name in ACHIEVEMENTS if f"`{name}`" not in readme] == []
    assert len(ACHIEVEMENTS) == 20


def test_an_answer_that_could_not_be_read_is_illegal() -> None:
    env = on(EMPTY)
    text, reward, _, _, _ = env.invalid_action("unclosed <think>")
    assert text.splitlines()[0] == "unclosed <think>"
    assert dict(reward.terms) == {"illegal": -0.01}

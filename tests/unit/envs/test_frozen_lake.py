"""FrozenLake: Gymnasium's maps and dynamics unchanged, exact transcripts, and shaping that cannot be farmed."""

from __future__ import annotations

import itertools
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gspo_gym_envs.frozen_lake.env import FrozenLake
from gspo_gym_envs.frozen_lake.lake import best_moves, distances_to_goal
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map
from gymnasium.utils.env_checker import check_env

from gspo_gym.env.rewards import Reward

CORRIDOR = ["SFFFG"]


def answers(env: FrozenLake, *actions: str) -> list[tuple[str, dict[str, float], bool, bool]]:
    """Each answer to the actions: (text, reward terms, terminated, truncated)."""
    env.reset(seed=0)
    heard = []
    for action in actions:
        text, reward, terminated, truncated, _ = env.step(action)
        heard.append((text, dict(reward.terms), terminated, truncated))
    return heard


def play(env: FrozenLake, policy: str, seed: int) -> tuple[float, int, Reward]:
    """(return, number of turns, last reward) of a hand-written player."""
    env.reset(seed=seed)
    player = env.policies[policy](env, np.random.default_rng((seed, 1)))
    total, turns, done = 0.0, 0, False
    while not done:
        _, reward, terminated, truncated, _ = env.step(str(player(())))
        total, turns, done = total + reward, turns + 1, terminated or truncated
    return total, turns, reward


def test_the_first_observation_is_the_map_with_the_agent_and_its_legal_moves() -> None:
    assert FrozenLake(style="terse").reset(seed=0)[0] == "A to G, not H.\nAFFF\nFHFH\nFFFH\nHFFG\nd/r"


def test_a_won_episode_reads_exactly_so() -> None:
    # Four moves, so each step is worth 0.25 / 4 = 0.0625, and the last gives back the 0.1875 advanced until then.
    assert answers(FrozenLake(style="terse", map=CORRIDOR), "r", "Right", " R\n", "r") == [
        ("SAFFG\nl/r", {"progress": 0.0625}, False, False),
        ("SFAFG\nl/r", {"progress": 0.0625}, False, False),
        ("SFFAG\nl/r", {"progress": 0.0625}, False, False),
        ("goal", {"goal": 1.0, "progress": -0.1875}, True, False),
    ]


def test_falling_takes_the_advance_back_and_ends_the_episode() -> None:
    assert answers(FrozenLake(style="terse", map=["SFG", "FHF"]), "r", "d") == [
        ("SAG\nFHF\nl/d/r", {"progress": 0.125}, False, False),
        ("hole", {"progress": -0.125}, True, False),
    ]


@pytest.mark.parametrize("text", ["", "x", "righ", "right!", "go right", "2", "r r", "u", "l"])
def test_anything_but_a_move_on_the_lake_is_illegal_and_costs_a_step(text: str) -> None:
    env = FrozenLake(style="terse", max_steps=6)
    assert answers(env, text) == [("illegal\nAFFF\nFHFH\nFFFH\nHFFG\nd/r", {"illegal": -0.05}, False, False)]
    assert env.steps_left == 5


def test_an_answer_that_could_not_be_read_costs_a_step_too() -> None:
    env = FrozenLake(style="terse", map=CORRIDOR, max_steps=4)
    env.reset(seed=0)
    text, reward, terminated, truncated, _ = env.invalid_action("unclosed <think>")
    assert (text, dict(reward.terms)) == ("unclosed <think>\nAFFFG\nr", {"illegal": -0.05})
    assert (terminated, truncated, env.steps_left) == (False, False, 3)


def test_running_out_of_steps_is_a_truncation_that_keeps_the_advance() -> None:
    heard = answers(FrozenLake(style="terse", map=CORRIDOR, max_steps=4), "r", "r", "l", "r")
    assert heard[-1] == ("SFAFG\nl/r", {"progress": 0.0625}, False, True)
    assert sum(value for _, terms, _, _ in heard for value in terms.values()) == 0.125  # two of four moves done: 0.25/2


def test_reaching_the_goal_on_the_last_step_is_no_truncation() -> None:
    assert answers(FrozenLake(style="terse", map=CORRIDOR, max_steps=4), "r", "r", "r", "r")[-1][2:] == (True, False)


def test_a_verbose_episode_reads_exactly_so() -> None:
    env = FrozenLake(map=["SF", "HG"], style="verbose")
    assert env.reset(seed=0)[0] == (
        "You stand on a frozen lake, at A on the map. F is ice, H is a hole, G is the goal. Reach the goal without "
        "falling into a hole, in at most 4 moves. Answer with one move: left, down, right or up.\n"
        "AF\nHG\nMoves: down, right. Steps left: 4."
    )
    assert env.step("right")[0] == "SA\nHG\nMoves: left, down. Steps left: 3."


@pytest.mark.parametrize("name", ["4x4", "8x8"])
def test_named_maps_are_gymnasium_s(name: str) -> None:
    env = FrozenLake(style="terse", map=name)
    env.reset(seed=0)
    assert list(env.lake) == MAPS[name]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_random_maps_are_gymnasium_s_for_the_episode_s_seed(size: int) -> None:
    env = FrozenLake(style="terse", map="random", size=size)
    for seed in range(50):
        env.reset(seed=seed)
        assert list(env.lake) == generate_random_map(size=size, seed=seed)


def test_an_unseeded_reset_goes_on_to_another_map() -> None:
    env, again = FrozenLake(style="terse", map="random"), FrozenLake(style="terse", map="random")
    maps = []
    for lake in (env, again):
        lake.reset(seed=5)
        first = lake.lake
        lake.reset()
        maps.append((first, lake.lake))
    assert maps[0] == maps[1]
    assert maps[0][0] != maps[0][1]


def test_slippery_ice_follows_gymnasium_s_transition_table() -> None:
    env = FrozenLake(style="terse", is_slippery=True)
    counts = {0: 0, 1: 0, 4: 0}
    for seed in range(1500):
        env.reset(seed=seed)
        env.step("r")
        counts[env.cell] += 1
    # "r" in the corner: right to cell 1, down to 4, or up against the edge, a third each.
    # Binomial(1500, 1/3): mean 500, standard deviation 18.3; five deviations of slack.
    assert all(abs(count - 500) < 5 * 18.3 for count in counts.values())


def test_the_ice_does_not_repeat_the_draws_that_made_the_map() -> None:
    env = FrozenLake(style="terse", map="random", is_slippery=True)
    env.reset(seed=11)
    slips = env._inner.np_random.random(4)
    assert not np.isin(slips, np.random.default_rng(11).random(64)).any()


def test_pushing_against_the_edge_is_legal_only_on_slippery_ice() -> None:
    env = FrozenLake(style="terse", is_slippery=True, max_steps=9)
    assert env.reset(seed=0)[0].endswith("\nl/d/r/u")
    assert "illegal" not in env.step("l")[1].terms


def test_distances_agree_with_breadth_first_search_by_hand() -> None:
    # S F H     4 3 .
    # F F F  -> 3 2 1
    # H F G     . 1 0
    assert distances_to_goal(["SFH", "FFF", "HFG"]) == {0: 4, 1: 3, 3: 3, 4: 2, 5: 1, 7: 1, 8: 0}


def test_distances_are_the_step_counts_of_gymnasium_s_own_dynamics() -> None:
    for seed in range(30):
        lake = generate_random_map(size=4, seed=seed)
        table = FrozenLakeEnv(desc=lake, is_slippery=False).P
        letters = "".join(lake)
        reachable = {0: {cell for cell, letter in enumerate(letters) if letter == "G"}}
        for steps in range(1, 16):  # Bellman-Ford over the table, an implementation of its own
            reachable[steps] = {
                cell
                for cell in range(16)
                if letters[cell] not in "GH" and any(table[cell][a][0][1] in reachable[steps - 1] for a in range(4))
            }
        expected = {}
        for steps, cells in reachable.items():
            for cell in cells:
                expected.setdefault(cell, steps)
        assert distances_to_goal(lake) == expected


def test_every_path_to_the_goal_returns_exactly_the_top() -> None:
    env = FrozenLake(style="terse", map=["SF", "FG"], max_steps=6)
    won = set()
    for moves in itertools.product("ldru", repeat=6):
        env.reset(seed=0)
        total, illegal = 0.0, 0
        for move in moves:
            _, reward, terminated, truncated, _ = env.step(move)
            total += reward
            illegal += "illegal" in reward.terms
            if terminated or truncated:
                break
        if terminated and not illegal:
            won.add(total)
        else:
            assert total < 1.0
    assert won == {1.0}


def test_walking_to_and_fro_earns_nothing() -> None:
    env = FrozenLake(style="terse", map="8x8")
    heard = answers(env, *["r", "l"] * 32)
    assert heard[-1][3]
    assert sum(value for _, terms, _, _ in heard for value in terms.values()) == 0.0


def test_reference_earns_the_top_by_a_shortest_path_on_200_random_maps_and_random_play_does_not() -> None:
    env = FrozenLake(style="terse", map="random")
    random_wins = 0
    for seed in range(200):
        total, turns, last = play(env, "reference", seed)
        assert (total, last.success, last.events) == (env.reward_range[1], True, ("goal",))
        assert turns == distances_to_goal(env.lake)[0]
        random_wins += play(env, "random", seed)[2].success is True
    assert 0 < random_wins < 40  # a sixth at most; 300 seeds gave 6.7%


def test_on_slippery_ice_the_reference_reaches_the_optimum() -> None:
    env = FrozenLake(style="terse", is_slippery=True, max_steps=100)
    env.reset(seed=0)
    table = env.transitions
    # The optimum by an independent implementation: the transition tensor, iterated 100 times.
    probability = np.zeros((16, 4, 16))
    for cell, moves in table.items():
        for move, outcomes in moves.items():
            for p, to, _, _ in outcomes:
                probability[cell, move, to] += p
    value = np.eye(16)[15]
    for _ in range(100):
        value = np.where(np.arange(16) == 15, 1.0, (probability @ value).max(axis=1))
    # The reference's value: the same table under its moves.
    moves_by_steps_left = best_moves(table, {15}, 100)
    under_reference = np.eye(16)[15]
    for moves in moves_by_steps_left:
        under_reference = np.array([probability[cell, moves[cell]] @ under_reference for cell in range(16)])
    assert under_reference[0] == pytest.approx(value[0], abs=1e-12)  # sums of 100 products in double precision
    wins = sum(play(env, "reference", seed)[2].success is True for seed in range(100))
    deviation = (100 * value[0] * (1 - value[0])) ** 0.5
    assert abs(wins - 100 * value[0]) < 4 * deviation


@pytest.mark.parametrize("kwargs", [{}, {"map": "random"}, {"map": "random", "size": 3, "is_slippery": True}])
def test_a_thousand_random_episodes_stay_in_the_stated_range(kwargs: dict[str, object]) -> None:
    env = FrozenLake(style="terse", **kwargs)
    low, high = env.reward_range
    rng = np.random.default_rng(0)
    words = ["l", "d", "r", "u", "left", "DOWN", "", "x"]
    for seed in range(1000):
        env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            _, reward, terminated, truncated, _ = env.step(str(rng.choice(words)))
            total, done = total + reward, terminated or truncated
        assert low - 1e-12 <= total <= high  # sixteen times -0.05 rounds within 1e-15; the top is exact
        assert terminated != truncated


def test_the_lowest_return_is_that_of_illegal_answers_only() -> None:
    env = FrozenLake(style="terse")
    heard = answers(env, *["x"] * 16)
    assert heard[-1][3]
    total = sum(value for _, terms, _, _ in heard for value in terms.values())
    assert total == pytest.approx(env.reward_range[0], abs=1e-12)  # sixteen times -0.05 rounds within 1e-15


def test_gymnasium_s_checker_accepts_it() -> None:
    check_env(gymnasium.make("gspo_gym/FrozenLake-v0").unwrapped, skip_render_check=True)


def test_pygame_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['pygame'] = None; from gspo_gym_envs.frozen_lake.env import FrozenLake; "
        "print(FrozenLake(style='terse').reset(seed=0)[0])"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("A to G")

"""Gymnasium's toy text in words: what is shown is what is, and the references play best on average."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gspo_gym_envs.suites.toy_text import GAMES, Table, ToyTextEnv, best_moves, value_of_hit, value_of_stick

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.registry import make
from gspo_gym.errors import ConfigError, UnknownNameError


def returns(game: str, policy: str, seeds: range, **kwargs: Any) -> list[float]:
    env = ToyTextEnv(game, **kwargs)
    totals = []
    for seed in seeds:
        env.reset(seed=seed)
        player = env.policies[policy](env, np.random.default_rng(seed))
        total, done = 0.0, False
        while not done:
            _, reward, terminated, truncated, _ = env.step(player(()))
            total, done = total + reward, terminated or truncated
        totals.append(float(total))
    return totals


def test_the_suite_is_covered() -> None:
    suite = {s.id for s in gymnasium.registry.values() if str(s.entry_point).startswith("gymnasium.envs.toy_text")}
    assert suite == {game.env_id for game in GAMES.values()}


@pytest.mark.parametrize("game", ["Blackjack", "CliffWalking", "FrozenLake"])
def test_it_keeps_the_contract(game: str) -> None:
    report = check_env("ToyText", env_config={"game": game}, seeds=range(2), num_leak_episodes=4)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", GAMES)
def test_it_is_gymnasium_s_own_game(name: str) -> None:
    game = GAMES[name]
    env, plain = make("ToyText", game=game.env_id), gymnasium.make(game.env_id)
    rng = np.random.default_rng(0)
    for seed in range(3):
        env.reset(seed=seed)
        plain.reset(seed=seed)
        done = False
        while not done:
            action = int(rng.integers(len(game.actions)))
            _, reward, terminated, truncated, _ = env.step(game.actions[action])
            seen, *expected, _ = plain.step(action)
            assert [float(reward), terminated, truncated or env.unwrapped.steps_left == 0][:2] == expected[:2]
            assert env.unwrapped.observation == seen
            done = terminated or truncated


def test_the_taxi_s_surroundings_are_told() -> None:
    env = ToyTextEnv("Taxi")
    env.reset(seed=0)
    env.inner.s = env.observation = env.inner.encode(0, 4, 4, 3)  # first row, last column, riding, to the blue stand
    lines = env._view().splitlines()
    assert lines[1] == "|R: | : :T|"
    assert lines[-1] == (
        "The taxi is in row 1, column 5, at the green stand. "
        "The passenger is in the taxi and wants to go to the blue stand."
    )


def test_a_hand_is_told() -> None:
    env = ToyTextEnv("Blackjack")
    env.reset(seed=0)
    env.observation = (13, 1, 1)
    assert env._view() == "Your cards sum to 13, counting an ace as 11. The dealer shows an ace."
    env.observation = (20, 10, 0)
    assert env._view() == "Your cards sum to 20. The dealer shows a 10."


def test_maps_show_where_the_player_is() -> None:
    env = ToyTextEnv("FrozenLake", is_slippery=False)
    assert "slippery" not in env.reset(seed=0)[0]
    assert env.step("right")[0].splitlines() == ["F A F F", "F H F H", "F F F H", "H F F G"]
    _, reward, terminated, _, _ = env.step("down")
    assert (float(reward), reward.success, terminated) == (0.0, False, True)
    assert "slippery" in ToyTextEnv("FrozenLake8x8").reset(seed=0)[0]


def test_cliff_walking_s_reference_takes_the_thirteen_steps_of_the_book() -> None:
    assert returns("CliffWalking", "reference", range(2)) == [-13.0, -13.0]


def test_taxi_s_reference_earns_what_breadth_first_search_finds() -> None:
    env = ToyTextEnv("Taxi")
    for seed in range(5):
        env.reset(seed=seed)
        frontier, seen, steps = {int(env.observation)}, set(), 0
        while not any(end for s in frontier for moves in env.inner.P[s].values() for _, _, _, end in moves):
            seen |= frontier
            frontier = {to for s in frontier for moves in env.inner.P[s].values() for _, to, _, _ in moves} - seen
            steps += 1
        # Every step but the last costs 1; no wrong pick-up or drop-off is on a shortest way.
        assert returns("Taxi", "reference", range(seed, seed + 1)) == [20.0 - steps]


def test_on_ice_the_reference_reaches_the_goal_as_often_as_can_be() -> None:
    env = ToyTextEnv("FrozenLake")
    # Independent: the chance to reach the goal in 100 steps, summed over Gymnasium's table under the reference's moves.
    moves = best_moves(Table.of(env.inner.P), 100).moves
    under_reference = np.zeros(16)
    for step in range(100):
        new = np.zeros(16)
        for cell in range(16):
            for p, to, reward, end in env.inner.P[cell][int(moves[step, cell])]:
                new[cell] += p * (reward + (0.0 if end else under_reference[to]))
        under_reference = new
    # Known: 0.74 within 100 steps (the reward threshold that Gymnasium registers says so).
    assert under_reference[0] == pytest.approx(0.74, abs=0.01)
    wins = sum(returns("FrozenLake", "reference", range(100)))
    assert abs(wins - 74) < 4 * (100 * 0.74 * 0.26) ** 0.5


def test_blackjack_s_player_is_basic_strategy_for_an_endless_deck() -> None:
    # Hard hands, from the book (Sutton and Barto, figure 5.2): the lowest sum on which it sticks, by the dealer's card.
    sticks_from = {1: 17, 2: 13, 3: 13, 4: 12, 5: 12, 6: 12, 7: 17, 8: 17, 9: 17, 10: 17}
    for shown, expected in sticks_from.items():
        sticks = [total for total in range(11, 22) if value_of_stick(total, shown) >= value_of_hit(total, False, shown)]
        assert min(sticks) == expected, shown
    soft = {1: 19, 2: 18, 3: 18, 4: 18, 5: 18, 6: 18, 7: 18, 8: 18, 9: 19, 10: 19}
    for shown, expected in soft.items():
        sticks = [total for total in range(12, 22) if value_of_stick(total, shown) >= value_of_hit(total, True, shown)]
        assert min(sticks) == expected, shown


def test_a_dealer_who_shows_a_six_busts_as_often_as_simulation_says() -> None:
    rng = np.random.default_rng(0)
    busts = 0
    for _ in range(20_000):
        total, aces = 6, 0
        while total < 17:
            card = min(int(rng.integers(1, 14)), 10)
            total, aces = total + (11 if card == 1 else card), aces + (card == 1)
            while total > 21 and aces:
                total, aces = total - 10, aces - 1
        busts += total > 21
    # A hand of 4 wins only if the dealer busts: value = P(bust) - (1 - P(bust)).
    prob = (value_of_stick(4, 6) + 1) / 2
    assert abs(busts / 20_000 - prob) < 4 * (prob * (1 - prob) / 20_000) ** 0.5


def test_saying_nothing_to_the_end_never_pays() -> None:
    for game, expected in {"Blackjack": -1.0, "CliffWalking": -20_000.0, "Taxi": -2_000.0, "FrozenLake": 0.0}.items():
        env = ToyTextEnv(game)
        env.reset(seed=0)
        total, truncated = 0.0, False
        while not truncated:
            _, reward, terminated, truncated, _ = env.step("")
            assert not terminated
            total += reward
        assert total == pytest.approx(expected, abs=1e-12)  # a sum of twenty times 0.05
        assert reward.success is False


def test_the_taxi_s_best_return_is_the_nearest_ride() -> None:
    # From the yellow stand to the red one: a pick-up and four squares cost 5, the drop-off earns 20.
    # At worst each of 200 answers costs 10, and 10 more that are declared for those without an action.
    assert ToyTextEnv("Taxi").reward_range == (-4000.0, 15.0)


def test_options_of_a_game_reach_gymnasium_and_bad_ones_are_refused() -> None:
    assert ToyTextEnv("Blackjack", sab=False, natural=True).reward_range[1] == 1.5
    assert "counts one and a half" in ToyTextEnv("Blackjack", sab=False, natural=True).reset(seed=0)[0]
    with pytest.raises(ConfigError, match="takes no argument 'slippery'"):
        ToyTextEnv("FrozenLake", slippery=True)
    with pytest.raises(ConfigError, match="render_mode has no effect"):
        ToyTextEnv("FrozenLake", render_mode="human")
    with pytest.raises(UnknownNameError, match="there is no game 'Taxi-v3'; did you mean 'Taxi-v4'"):
        ToyTextEnv("Taxi-v3")


def test_pygame_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['pygame'] = None\n"
        "from gspo_gym_envs.suites.toy_text import GAMES, ToyTextEnv\n"
        "for game in GAMES: print(ToyTextEnv(game).reset(seed=0)[0])"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Blackjack" in run.stdout

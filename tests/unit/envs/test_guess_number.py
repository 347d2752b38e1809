"""GuessNumber: exact transcripts, exact success probabilities by enumeration, and what a return can be."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import cache
from pathlib import Path

import gspo_gym_envs.guess_number.env as guess_number
import gymnasium
import numpy as np
import pytest
from gspo_gym_envs.guess_number.env import GuessNumber
from gymnasium.utils.env_checker import check_env

from gspo_gym.env.rewards import Reward
from gspo_gym.types import Message


def answers(env: GuessNumber, number: int, *actions: str) -> list[tuple[str, dict[str, float], bool, bool]]:
    """Each answer to the actions: (text, reward terms, terminated, truncated)."""
    env.reset(seed=0, options={"number": number})
    heard = []
    for action in actions:
        text, reward, terminated, truncated, _ = env.step(action)
        heard.append((text, dict(reward.terms), terminated, truncated))
    return heard


def play(env: GuessNumber, policy: str, seed: int) -> tuple[list[str], float, bool | None]:
    """(everything said, return, success) of a hand-written player."""
    messages = [Message("user", env.reset(seed=seed)[0])]
    player = env.policies[policy](env, np.random.default_rng((seed, 1)))  # with the environment's seed it would know
    rewards: list[Reward] = []
    terminated = False
    while not terminated:
        action = str(player(tuple(messages)))
        text, reward, terminated, truncated, _ = env.step(action)
        assert not truncated
        messages += [Message("assistant", action), Message("user", text)]
        rewards.append(reward)
    return [m.content for m in messages], float(sum(rewards)), rewards[-1].success


def test_a_won_episode_reads_exactly_so() -> None:
    env = GuessNumber(style="terse")
    assert env.reset(seed=0, options={"number": 6})[0] == "Guess 1-8. 4 tries."
    assert answers(env, 6, "4", "7", "6") == [
        ("higher", {}, False, False),
        ("lower", {}, False, False),
        ("correct", {"found": 1.0}, True, False),
    ]


def test_a_lost_episode_is_terminated_by_its_own_rule_and_names_the_number() -> None:
    assert answers(GuessNumber(style="terse"), 6, "8", "8", "five", "5") == [
        ("lower", {}, False, False),
        ("lower", {"inconsistent": -0.1}, False, False),
        ("not a number 1-8", {"illegal": -0.1}, False, False),
        ("lost: 6", {}, True, False),
    ]


def test_a_verbose_episode_reads_exactly_so() -> None:
    env = GuessNumber(low=1, high=16, max_guesses=3, style="verbose")
    assert env.reset(seed=0)[0] == (
        "I am thinking of a whole number from 1 to 16. You have 3 tries. After each guess I say whether my number is "
        "higher or lower. Answer with the number alone."
    )
    assert [text for text, *_ in answers(env, 9, "8", "0", "12")] == [
        "My number is higher. You have 2 tries.",
        "not a number 1-16. You have 1 try.",
        "You have no tries left. The number was 9.",
    ]


@pytest.mark.parametrize("text", ["6", " 6\n", "+6", "06"])
def test_an_integer_alone_is_a_guess(text: str) -> None:
    assert answers(GuessNumber(style="terse"), 6, text) == [("correct", {"found": 1.0}, True, False)]


@pytest.mark.parametrize("text", ["", "6.", "6.0", "six", "my guess: 6", "6 7", "٦", "6_0", "0", "9", "-6", "6" * 5000])
def test_anything_else_is_illegal_and_costs_a_try(text: str) -> None:
    assert answers(GuessNumber(style="terse"), 6, text) == [("not a number 1-8", {"illegal": -0.1}, False, False)]


def test_an_answer_that_could_not_be_read_costs_a_try_too() -> None:
    env = GuessNumber(style="terse", max_guesses=2)
    env.reset(seed=0, options={"number": 6})
    text, reward, terminated, _, _ = env.invalid_action("unclosed <think>")
    assert (text, dict(reward.terms), terminated) == ("unclosed <think>", {"illegal": -0.1}, False)
    text, reward, terminated, _, _ = env.invalid_action("unclosed <think>")
    assert (text, terminated, reward.success) == ("lost: 6", True, False)


def test_the_number_is_uniform_and_the_same_for_the_same_seed() -> None:
    first, second = GuessNumber(style="terse"), GuessNumber(style="terse")
    counts = np.zeros(9, int)
    for seed in range(4000):
        first.reset(seed=seed)
        second.reset(seed=seed)
        assert first._number == second._number
        counts[first._number] += 1
    # Binomial(4000, 1/8): mean 500, standard deviation 20.9; five deviations of slack.
    assert counts[0] == 0
    assert np.all(np.abs(counts[1:] - 500) < 5 * 20.9)


def success_probability(n: int, k: int, allowed: str) -> Fraction:
    """By playing the environment: every number x every sequence of guesses, each guess uniform over what is `allowed`.

    "all": the whole range; "consistent": what the hints so far leave.
    """
    env = GuessNumber(style="terse", low=1, high=n, max_guesses=k)
    total = Fraction(0)
    for number in range(1, n + 1):
        for guesses in itertools.product(range(1, n + 1), repeat=k):
            env.reset(options={"number": number})
            weight, low, high = Fraction(1, n), 1, n
            for guess in guesses:
                if not low <= guess <= high:
                    weight = Fraction(0)
                    break
                weight /= high - low + 1
                text, _, terminated, _, _ = env.step(str(guess))
                if terminated and text == "correct":
                    # The guesses after the end are free: give this prefix its share of the sequences that start so.
                    unused = k - guesses.index(guess) - 1
                    weight /= n**unused
                    break
                if terminated:
                    weight = Fraction(0)
                elif allowed == "consistent":
                    low, high = (guess + 1, high) if text == "higher" else (low, guess - 1)
            total += weight
    return total


@cache
def consistent_play(n: int, k: int) -> Fraction:
    """Success of uniform guesses among the n numbers left, k tries left: condition on the guess and the number.

    The guess is right with 1/n; else the number is one of the g - 1 below or n - g above the guess g.
    """
    if n == 0 or k == 0:
        return Fraction(0)
    below_and_above = sum(
        (Fraction(g - 1, n) * consistent_play(g - 1, k - 1) + Fraction(n - g, n) * consistent_play(n - g, k - 1))
        for g in range(1, n + 1)
    )
    return Fraction(1, n) + below_and_above / n


def test_blind_guessing_succeeds_with_the_closed_form_probability() -> None:
    assert success_probability(4, 3, "all") == 1 - (1 - Fraction(1, 4)) ** 3 == Fraction(37, 64)


def test_consistent_guessing_succeeds_with_the_recursion_s_probability() -> None:
    assert success_probability(4, 3, "consistent") == consistent_play(4, 3)


def test_the_readme_states_the_exact_probabilities_of_the_default() -> None:
    readme = (Path(guess_number.__file__).parent / "README.md").read_text()
    blind = 1 - (1 - Fraction(1, 8)) ** 4
    assert f"{blind} = {float(blind):.4f}" in readme
    assert f"{consistent_play(8, 4)} = {float(consistent_play(8, 4)):.4f}" in readme


@pytest.mark.parametrize(("n", "k"), [(8, 4), (7, 3), (1, 1), (100, 7), (127, 7)])
def test_the_reference_wins_for_every_number_when_two_to_the_k_exceeds_n(n: int, k: int) -> None:
    env = GuessNumber(style="terse", low=1, high=n, max_guesses=k)
    assert 2**k > n
    returns = {play_number(env, number) for number in range(1, n + 1)}
    assert returns == {1.0}


def play_number(env: GuessNumber, number: int) -> float:
    messages = [Message("user", env.reset(options={"number": number})[0])]
    player = env.policies["reference"](env, np.random.default_rng(0))
    total, terminated = 0.0, False
    while not terminated:
        action = str(player(tuple(messages)))
        text, reward, terminated, _, _ = env.step(action)
        messages += [Message("assistant", action), Message("user", text)]
        total += reward
    return total


def test_with_8_numbers_and_3_tries_binary_search_finds_exactly_7() -> None:
    env = GuessNumber(style="terse", max_guesses=3)
    assert sum(play_number(env, number) for number in range(1, 9)) == 7.0


def test_the_reference_needs_nothing_but_the_conversation() -> None:
    class OnlyTheRange:
        low, high = 1, 8

    player = GuessNumber.policies["reference"](OnlyTheRange(), np.random.default_rng(0))
    said = [Message("user", "Guess 1-8. 4 tries."), Message("assistant", "4"), Message("user", "higher")]
    assert player(said) == "6"  # 5..8 is left; (5 + 8) // 2


def test_reference_earns_the_top_on_200_seeds_and_blind_guessing_does_not() -> None:
    env = GuessNumber(style="terse")
    top = env.reward_range[1]
    assert [play(env, "reference", seed)[1:] for seed in range(200)] == [(top, True)] * 200
    wins = sum(play(env, "random", seed)[2] is True for seed in range(200))
    # Binomial(200, 1695/4096 = 0.4138): mean 82.8, standard deviation 6.97; five deviations of slack.
    assert abs(wins - 82.8) < 5 * 6.97


@pytest.mark.parametrize(
    ("guesses", "expected"),
    [
        ("4 5 6", 1.0),
        ("7 7 6", 0.9),
        ("3 2 6", 0.9),
        ("x 7 6", 0.9),
        ("9 x 6", 0.8),
        ("7 8 8 6", 0.8),
        ("x x x 6", 0.7),
    ],
)
def test_every_mistake_on_the_way_takes_a_tenth_off_a_win(guesses: str, expected: float) -> None:
    heard = answers(GuessNumber(style="terse"), 6, *guesses.split())
    total = sum(value for _, terms, _, _ in heard for value in terms.values())
    assert total == pytest.approx(expected, abs=1e-12)  # four decimal tenths: rounding below 1e-15


@pytest.mark.parametrize(
    ("kwargs", "worst"),
    [({}, ["x"] * 4), ({"inconsistent_penalty": 0.5}, ["8"] * 4), ({"low": 1, "high": 1}, ["x"] * 4)],
)
def test_the_reward_range_is_attained_from_below(kwargs: dict[str, float], worst: list[str]) -> None:
    env = GuessNumber(style="terse", **kwargs)
    total = sum(value for _, terms, _, _ in answers(env, 1, *worst) for value in terms.values())
    assert total == pytest.approx(env.reward_range[0], abs=1e-12)  # four decimal fractions: rounding below 1e-15


def test_a_thousand_random_episodes_stay_in_the_stated_range() -> None:
    env = GuessNumber(style="terse")
    rng = np.random.default_rng(0)
    words = [*map(str, range(-1, 11)), "", "x", "4.", "higher"]
    low, high = env.reward_range
    for seed in range(1000):
        env.reset(seed=seed)
        total, terminated, turns = 0.0, False, 0
        while not terminated:
            _, reward, terminated, _, _ = env.step(str(rng.choice(words)))
            assert float(reward) == pytest.approx(sum(reward.terms.values()), abs=1e-15)  # at most one term a turn
            total, turns = total + reward, turns + 1
        assert low - 1e-12 <= total <= high  # -0.1 four times rounds within 1e-15
        assert turns <= 4


def test_reset_options_choose_the_number_without_moving_the_generator() -> None:
    chosen, drawn = GuessNumber(style="terse"), GuessNumber(style="terse")
    chosen.reset(seed=3, options={"number": 2})
    drawn.reset(seed=3)
    assert chosen._number == 2
    chosen.reset()
    drawn.reset()
    assert chosen._number == drawn._number


def test_gymnasium_s_checker_accepts_it() -> None:
    check_env(gymnasium.make("gspo_gym/GuessNumber-v0").unwrapped, skip_render_check=True)

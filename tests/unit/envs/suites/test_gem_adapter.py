"""The GEM adapter over a stand-in of the package (`fake_suites`): texts, rewards, seeds, generators, failures.

The real games are played by tests/foreign.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from gspo_gym_envs.suites.gem import GemEnv, _tower_moves
from gymnasium.error import ResetNeeded

from gspo_gym.env.checks.checker import check_env
from gspo_gym.errors import ContractError, EnvError, MissingExtraError, UnknownNameError

pytestmark = pytest.mark.usefixtures("fake_suites")
GUESS = "game:GuessTheNumber-v0-easy"


def test_an_observation_has_its_prefix_and_suffix_and_the_last_has_no_request() -> None:
    env = GemEnv(GUESS, most=5)
    assert env.reset(seed=0)[0] == "Ready?\nGuess 1 to 5 in \\boxed{}.\nBoard: ."
    number = env.inner.game_number
    text, reward, terminated, truncated, _ = env.step(f"\\boxed{{{number + 1}}}")
    assert text in (f"No.\nBoard: {number + 1}", f"Wrong.\nBoard: {number + 1}")
    assert (dict(reward.terms), reward.success, terminated, truncated) == ({"reward": 0.0}, None, False, False)
    assert env.step(f"So \\boxed{{{number}}}")[:3] == ("Right.", 1.0, True)
    with pytest.raises(ResetNeeded):
        env.step("\\boxed{1}")


def test_raw_text_is_gem_s_to_judge_and_so_is_an_unreadable_message() -> None:
    for act in (lambda env: env.step("5"), lambda env: env.invalid_action("no call")):
        env = GemEnv(GUESS)
        env.reset(seed=0)
        text, reward, terminated, _, _ = act(env)
        assert (text, float(reward), terminated) == ("No guess.", -0.1, True)


def test_a_seed_means_the_game_that_gem_plays_with_it_and_its_draws_are_its_own() -> None:
    env = GemEnv(GUESS, most=1000)
    env.reset(seed=3)
    assert env.inner.game_number == random.Random(3).randint(1, 1000)
    # Its hints, with other draws of the process and of another episode between them.
    expected = random.Random(3)
    expected.randint(1, 1000)
    other = GemEnv(GUESS, most=1000)
    for _ in range(20):
        random.random()
        other.reset(seed=8)
        assert env.step("\\boxed{0}")[0].startswith(expected.choice(["No.", "Wrong."]))


def test_the_process_s_generators_are_left_as_they_were() -> None:
    random.seed(1)
    before, numpys = random.getstate(), np.random.get_state(legacy=True)[1].tobytes()
    env = GemEnv(GUESS)
    env.reset(seed=0)
    env.step("\\boxed{0}")
    env.policies["random"](env, np.random.default_rng(0))(())
    assert random.getstate() == before
    assert np.random.get_state(legacy=True)[1].tobytes() == numpys


def test_a_random_player_says_what_gem_can_read_and_the_game_does_not_notice() -> None:
    env, other = GemEnv(GUESS), GemEnv(GUESS)
    env.reset(seed=5)
    other.reset(seed=5)
    player = env.policies["random"](env, np.random.default_rng(0))
    said = [player(()) for _ in range(50)]
    assert {f"\\boxed{{{number}}}" for number in range(1, 10)} >= set(said)
    assert len(set(said)) > 4
    assert env.step("\\boxed{0}")[0] == other.step("\\boxed{0}")[0]


def test_a_question_ends_without_words_and_tells_whether_it_was_right() -> None:
    env = GemEnv("rg:chain_sum")
    env.reset(seed=0)
    text, reward, terminated, truncated, _ = env.step("yes")
    assert (text, float(reward), reward.success, terminated, truncated) == ("", 1.0, True, True, True)


def test_towers_of_hanoi_are_solved_in_the_fewest_moves() -> None:
    towers = {"A": [4, 3, 2, 1], "B": [], "C": []}
    moves = list(_tower_moves(4, "A", "C", "B"))
    for source, target in (move.split() for move in moves):
        assert not towers[target] or towers[target][-1] > towers[source][-1]
        towers[target].append(towers[source].pop())
    assert (towers["C"], len(moves)) == ([4, 3, 2, 1], 2**4 - 1)


def test_it_keeps_the_contract() -> None:
    report = check_env(lambda: GemEnv(GUESS, max_turns=3), seeds=range(3), num_leak_episodes=4)
    assert report.passed, str(report)


def test_what_gem_raises_or_answers_wrongly_is_an_error_and_no_reward() -> None:
    with pytest.raises(EnvError) as caught:
        GemEnv("game:Words-v0").reset(seed=0)
    text = str(caught.value)
    assert text.startswith("GEM game:Words-v0: make raised LookupError: Resource words not found. xx")
    assert len(text) < 260
    env = GemEnv("game:Odd-v0")
    env.reset(seed=0)
    with pytest.raises(ContractError, match="expected five values from step, got tuple of length 3"):
        env.step("x")
    env = GemEnv(GUESS)
    env.reset(seed=0)
    with pytest.raises(EnvError, match="step raised ValueError"):
        env.step("\\boxed{x}")


def test_unknown_ids_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'game:GuessTheNumber-v0-easy'"):
        GemEnv("game:GuessTheNumber-v0-eas")
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[envs-gem\]'"):
        GemEnv(GUESS)

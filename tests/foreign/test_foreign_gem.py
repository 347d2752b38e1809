"""GEM's games offline, some of its questions, and what the rest needs."""

from __future__ import annotations

import importlib
from importlib.metadata import version

import numpy as np
import pytest

from gspo_gym.env.registry import make
from gspo_gym.errors import EnvError, UnknownNameError

# Games that do not work, and what their error names: nltk's word list is a download, two cannot be made, and in two
# random play reaches the target, which is the top score.
FAILING_GAMES = {
    "game:Wordle-v0-hard": "words",
    "game:Wordle-v0-easy": "words",
    "game:Wordle-v0-random": "words",
    "game:Hangman-v0-random": "words",
    "game:Hangman-v0-easy": "words",
    "game:Hangman-v0-hard": "words",
    "game:WordSearch-v0-easy": "words",
    "game:WordSearch-v0-hard": "words",
    "game:WordSearch-v0-random": "words",
    "game:FifteenPuzzle-v0-random": "TypeError",
    "game:Crosswords-v0-random": "ValueError",
    "game:Game2048-v0-random": "random to earn less",
}
# Where making one game may take seconds, so that a check of many episodes takes minutes.
SLOW_GAMES = ("game:Sudoku-v0-hard", "game:Sudoku-v0-random", "game:Sokoban-v0-hard")
# Of the variants of a game that passes, the easy one: a check takes seconds, for it plays in processes that import gem.
PLAYED = "-easy"
# A game that is guessed, one that is solved, and one of each that fails: what is played on every change.
EACH_KIND = (
    "game:GuessTheNumber-v0-easy",
    "game:TowerofHanoi-v0-easy",
    "game:Wordle-v0-easy",
    "game:FifteenPuzzle-v0-random",
)
NOT_TRIED = {"game:Sokoban-v0-random": "making one game took a minute and a half; not tried"}
QUESTIONS = ("rg:chain_sum", "rg:gcd", "rg:sudoku")


def ids(*prefixes: str) -> list[str]:
    return [
        env_id
        for env_id in importlib.import_module("gem.envs.registration").ENV_REGISTRY
        if env_id.startswith(prefixes)
    ]


def check_games(check_into_table, games):
    """The games that pass; of those that do not, each must be known to."""
    passed, surprises = [], {}
    for game in games:
        report = check_into_table("gem-llm", game, "Gem", {"game": game})
        reason = FAILING_GAMES.get(game)
        if (reason is None) != report.passed or (reason is not None and reason not in str(report)):
            surprises[game] = str(report)
        passed += [game] * report.passed
    assert surprises == {}
    return passed


def test_games_of_each_kind_keep_the_contract_or_fail_as_known(check_into_table):
    assert check_games(check_into_table, EACH_KIND) == list(EACH_KIND[:2])


@pytest.mark.nightly
def test_all_games_keep_the_contract_or_fail_as_known(check_into_table):
    games = [game for game in ids("game:") if game.endswith(PLAYED) or game in FAILING_GAMES]
    assert len(check_games(check_into_table, games)) == 9  # of twelve games: three need word lists


@pytest.mark.parametrize(
    "question", [QUESTIONS[0], *(pytest.param(q, marks=pytest.mark.nightly) for q in QUESTIONS[1:])]
)
def test_questions_keep_the_contract(check_into_table, question):
    assert check_into_table("gem-llm", question, "Gem", {"game": question}).passed


@pytest.mark.nightly
@pytest.mark.parametrize("game", SLOW_GAMES)
def test_a_slow_game_is_the_same_for_a_seed(game, foreign_table):
    env, other = make("Gem", game=game), make("Gem", game=game)
    assert env.reset(seed=1)[0] == other.reset(seed=1)[0]
    move = env.unwrapped.policies["random"](env.unwrapped, np.random.default_rng(0))(())
    assert env.step(move)[:2] == other.step(move)[:2]
    foreign_table("gem-llm", version("gem-llm"), f"{game} (one seed only)", True)


def test_the_rest_is_in_the_table(foreign_table):
    for game, reason in NOT_TRIED.items():
        foreign_table("gem-llm", version("gem-llm"), game, False, reason)


def test_data_sets_and_mathematics_need_a_network_and_say_so(foreign_table, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for game in ids("math:", "code:", "logic:", "qa:", "eval:"):
        with pytest.raises(
            EnvError, match=r"make raised (ConnectionError|ImportError|LocalEntryNotFoundError)"
        ) as caught:
            make("Gem", game=game).reset(seed=0)
        foreign_table("gem-llm", version("gem-llm"), game, False, str(caught.value).partition(": make ")[2])


def test_the_board_is_in_the_observation_and_no_history_is():
    env = make("Gem", game="game:TowerofHanoi-v0-easy")
    assert "A: [3, 2, 1]" in env.reset(seed=0)[0]
    text = env.step("I move. \\boxed{A C}")[0]
    assert "A: [3, 2]" in text
    assert "C: [1]" in text
    assert "You are playing" not in text


def test_raw_text_without_a_box_is_a_format_error_of_gem_s_own():
    env = make("Gem", game="game:GuessTheNumber-v0-easy")
    env.reset(seed=0)
    _, reward, terminated, truncated, _ = env.step("5")
    assert (float(reward), terminated, truncated) == (-0.1, True, False)


def test_unknown_ids_are_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'game:Sudoku-v0-easy'"):
        make("Gem", game="game:Sudoku-v0-eazy")

"""TextArena 0.7.4: check_env over every game, and what the adapter says of seeds, seats, secrets and rewards.

Every registered game is tried in one variant, two of them for a move; on every change, games of each kind. Nothing is
downloaded: games that need word lists must refuse.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.playing import Playthrough, play
from gspo_gym.env.registry import make
from gspo_gym.errors import ConfigError
from gspo_gym.types import Message

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of nltk and of games that are imported late

WORDS = "needs word lists of nltk"
KEY = "OpenRouter API key not found"
SYNTAX = "SyntaxError"  # the game is written for Python 3.12 and later
SWAPPED = (
    "expected a finite reward of player 0"  # it gives a reason where the reward should be, and the other way round
)
# Games that are not played, and what they say. All of these are defects of the package, or what it would download.
NOT_PLAYED = {
    **dict.fromkeys(("Hangman-v0", "WordLadder-v0", "Wordle-v0", "WordSearch-v0", "DontSayIt-v0"), WORDS),
    **dict.fromkeys(("LetterAuction-v0", "SpellingBee-v0", "WordChains-v0", "Codenames-v0"), WORDS),
    **dict.fromkeys(("GuessWho-v0", "TwentyQuestions-v0", "Debate-v0", "ScenarioPlanning-v0"), KEY),
    **dict.fromkeys(("Checkers-v0", "Chess-v0", "IteratedStagHunt-v0", "ReverseTicTacToe-v0", "Klondike-v0"), SYNTAX),
    "UltimateTexasHoldem-v0": SYNTAX,
    "UsedCarNegotiation-v0": "FileNotFoundError",
    "UsedCar-v0-balanced": "No module named 'textarena.envs.UsedCar'",
    "ScorableGames-v0": "Game configuration directory not found",
    **dict.fromkeys(("Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"), SWAPPED),
    "CharacterConclave-v0": "missing 1 required positional argument: 'observation_type'",
    "PublicGoodsGame-v0": "step() did not answer within",  # loops for ever once all players are eliminated
    "SantoriniBaseFixed-v0": "1000 turns of the others",  # forgives any number of invalid moves
}
ENDLESS = ("PublicGoodsGame-v0",)  # there is nothing to wait for
HARD_TO_MAKE = ("RushHour-v0", "Sokoban-v0")  # some seconds a reset: made twice and played for a move
# Played alone, against one, against several, with a secret, and what is not played, for each reason: on every change.
EACH_KIND = (
    *("2048-v0", "GuessTheNumber-v0", "Sudoku-v0", "TowerOfHanoi-v0"),
    *("KuhnPoker-v0", "SimpleNegotiation-v0", "TicTacToe-v0", "TwoDollar-v0"),
    *("Poker-v0", "ThreePlayerTicTacToe-v0"),
    *("Wordle-v0", "Debate-v0", "Chess-v0", "UsedCarNegotiation-v0", "Countdown-v0"),
)


def games() -> list[str]:
    """One variant of every game: the plain one, or the first."""
    try:
        from gspo_gym_envs.suites.textarena import games as registered

        variants = registered()
    except ImportError:  # in the other virtual environment nothing here is run
        return []
    first: dict[str, str] = {}
    for name in sorted(variants, key=len):
        first.setdefault(name.partition("-v0")[0], name)
    return sorted(first.values())


def nightly(game: str) -> Any:
    return pytest.param(game, marks=() if game in EACH_KIND else pytest.mark.nightly)


@pytest.mark.parametrize("game", [nightly(game) for game in games() if game not in HARD_TO_MAKE])
def test_check_env(game: str, foreign_table: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    report = check_env(
        "TextArena",
        env_config={"game": game},
        seeds=(0, 2),
        max_turns=20,
        step_timeout_seconds=3.0 if game in ENDLESS else 20.0,
        num_leak_episodes=0,
    )
    capsys.readouterr()  # games print
    problems = [problem for problem in report.problems if problem.check not in ("tricks", "copying")]
    shown = (problems or report.problems)[0] if report.problems else None
    reason = "" if shown is None else f"{shown.check}: {shown.text}"[:160]
    foreign_table("textarena", importlib.metadata.version("textarena"), game, report.passed, reason)
    if game in NOT_PLAYED:
        assert NOT_PLAYED[game] in str(report)
    else:
        # A trick is allowed to win: saying the rules again, whose example is a legal move, may beat a random opponent,
        # and so may a fact of TruthAndDeception.
        assert problems == [], str(report)


@pytest.mark.nightly
@pytest.mark.parametrize("game", HARD_TO_MAKE)
def test_a_game_that_is_hard_to_make_is_the_same_for_a_seed(game: str, foreign_table: Callable[..., None]) -> None:
    env, other = make("TextArena", game=game), make("TextArena", game=game)
    shown = env.reset(seed=2)[0]
    assert shown == other.reset(seed=2)[0]
    move = env.unwrapped.policies["random"](env.unwrapped, np.random.default_rng(0))([Message("user", shown)])
    assert env.step(move)[:2] == other.step(move)[:2]
    foreign_table("textarena", importlib.metadata.version("textarena"), f"{game} (one seed only)", True)


def played(policy: str, seed: int, **config: Any) -> Playthrough:
    def policy_of(env: Any, rng: Any) -> Any:
        return env.policies[policy](env, rng)

    return asyncio.run(
        play(
            lambda: make("TextArena", **config),
            policy_of,
            seed=seed,
            name=str(config["game"]),
            max_turns=100,
            step_timeout_seconds=60.0,
        )
    )


def test_a_seed_means_the_game_that_textarena_plays_with_it() -> None:
    for seed in range(20):
        number = random.Random(seed).randint(1, 20)  # what the game draws first
        env = make("TextArena", game="GuessTheNumber-v0")
        env.reset(seed=seed)
        _, reward, terminated, _, info = env.step(f"I say [{number}]")
        assert (float(reward), reward.success, terminated) == (1.0, True, True)
        assert info["reason"] == "Congratulations! You guessed the correct number."


def test_puzzles_are_solved_by_their_players() -> None:
    for game, most_turns in (("GuessTheNumber-v0", 5), ("TowerOfHanoi-v0", 7), ("TowerOfHanoi-v0-medium", 15)):
        for seed in range(8):
            run = played("reference", seed, game=game)
            assert (run.success, run.episode_return, len(run.answers) <= most_turns) == (True, 1.0, True)


@pytest.mark.parametrize("seat", [0, 1])
def test_a_perfect_player_of_tic_tac_toe_never_loses(seat: int) -> None:
    returns = [played("scripted", seed, game="TicTacToe-v0", seat=seat).episode_return for seed in range(20)]
    assert min(returns) >= 0.0  # type: ignore[type-var]
    assert max(returns) == 1.0  # type: ignore[type-var]
    run = played("scripted", 0, game="TicTacToe-v0", seat=seat, opponent="scripted")
    assert (run.episode_return, run.success) == (0.0, False)  # two of them draw, and a draw is no success


def test_who_begins_wins_nim_against_anybody() -> None:
    for opponent in ("random", "scripted"):
        run = played("scripted", 3, game="Nim-v0", opponent=opponent)  # 3 ^ 4 ^ 5 = 2, so the first player has won
        assert (run.episode_return, run.success) == (1.0, True)


def test_a_card_is_told_to_its_holder_only() -> None:
    heard: list[str] = []

    def opponent(messages: Any) -> str:
        heard.append(messages[0].content)
        return "[check]"

    env = make("TextArena", game="KuhnPoker-v0", opponent=opponent)
    mine = env.reset(seed=1)[0]
    env.step("[check]")
    assert "Your card is" in mine
    assert "Your card is" in heard[0]
    assert mine.partition("Your card is")[2][:6] != heard[0].partition("Your card is")[2][:6]


def test_self_play_scores_both_seats() -> None:
    env = make("TextArena", game="TicTacToe-v0", opponent="self")
    observation = env.reset(seed=0)[0]
    for turn, cell in enumerate((0, 3, 1, 4, 2)):  # player 0 fills the top row
        assert observation.endswith(f"You are Player {turn % 2} now.")
        observation, reward, terminated, _, _ = env.step(f"[{cell}]")
    assert terminated
    assert reward.terms == {"seat 0": 1.0, "seat 1": -1.0}


def test_words_that_are_not_there_are_not_downloaded() -> None:
    with pytest.raises(ConfigError, match=r"python -m nltk\.downloader words"):
        make("TextArena", game="Wordle-v0")


TRANSCRIPTS = """
import contextlib, hashlib, io, json, sys
import numpy as np
from gspo_gym.env.registry import make
from gspo_gym.types import Message

digests = {}
for game in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()):
        env = make("TextArena", game=game)
        player = env.policies["random"](env, np.random.default_rng(0))
        said = [Message("user", env.reset(seed=5)[0])]
        for _ in range(12):
            said.append(Message("assistant", player(said)))
            observation, _, terminated, _, _ = env.step(said[-1].content)
            said.append(Message("user", observation))
            if terminated:
                break
    digests[game] = hashlib.sha256(repr(said).encode()).hexdigest()
print(json.dumps(digests))
"""


@pytest.mark.parametrize(
    ("choice", "least"),
    [(EACH_KIND, 10), pytest.param(games(), 50, marks=pytest.mark.nightly)],
    ids=["each kind", "all"],
)
def test_a_seed_holds_in_another_process_with_other_hashes(choice: Sequence[str], least: int) -> None:
    played_games = [game for game in choice if game not in NOT_PLAYED and game not in HARD_TO_MAKE]
    answers = []
    for hash_seed in ("1", "2"):  # the order of sets of strings differs
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", TRANSCRIPTS, *played_games]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert len(answers[0]) >= least
    assert answers[0] == answers[1]

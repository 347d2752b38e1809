"""The hand-written TextArena players, on conversations in the games' own words."""

from __future__ import annotations

import numpy as np
import pytest
from gspo_gym_envs.suites.textarena import RandomMover, scripted_player

from gspo_gym.types import Message


def said_by(game: str, *observations: str) -> str:
    factory = scripted_player(game)
    assert factory is not None
    player = factory(None, np.random.default_rng(0))
    messages: list[Message] = []
    for observation in observations:
        messages.append(Message("user", observation))
        said = player(tuple(messages))
        assert isinstance(said, str)
        messages.append(Message("assistant", said))
    return said


def test_bisection_finds_every_number_of_twenty_in_five_guesses() -> None:
    for number in range(1, 21):
        observations = ["You have to guess the number between 1 and 20 within 10 turns."]
        for _ in range(5):  # 2^5 > 20
            guess = int(said_by("GuessTheNumber-v0", *observations).strip("[]"))
            if guess == number:
                break
            observations.append(f"The target number is {'higher' if guess < number else 'lower'}.")
        assert guess == number


@pytest.mark.parametrize("num_disks", [1, 3, 5])
def test_a_tower_is_moved_in_the_fewest_moves(num_disks: int) -> None:
    pegs: dict[str, list[int]] = {"A": list(range(num_disks, 0, -1)), "B": [], "C": []}
    num_moves = 0
    while len(pegs["C"]) < num_disks:
        board = "".join(f"{name}: {disks}\n" for name, disks in pegs.items())
        source, target = said_by("TowerOfHanoi-v0", f"Current Board: \n{board}.").strip("[]").split()
        disk = pegs[source].pop()
        assert not pegs[target] or pegs[target][-1] > disk
        pegs[target].append(disk)
        num_moves += 1
    assert num_moves == 2**num_disks - 1


def test_nim_leaves_a_balance_of_zero() -> None:
    board = "[GAME] Current Pile:\n  pile 0: 3\n  pile 1: 4\n  pile 2: 5"
    assert said_by("Nim-v0", board) == "[0 2]"  # 3 ^ 4 ^ 5 = 2; 3 ^ 2 = 1, so two of pile 0 go: 1 ^ 4 ^ 5 = 0


def test_nim_in_a_lost_position_takes_one_object_that_is_there() -> None:
    board = "Current Pile:\n  pile 0: 0\n  pile 1: 4\n  pile 2: 4"
    assert said_by("Nim-v0-large", board) in ("[1 1]", "[2 1]")


def drawn_board(cells: str) -> str:
    rows = [
        "|".join(f" {c if c in 'XO' else 3 * r + i} " for i, c in enumerate(cells[3 * r : 3 * r + 3])) for r in range(3)
    ]
    return "[GAME] Current Board:\n\n" + "\n---+---+---\n".join(rows) + "\n\nAvailable Moves: '[1]'"


def test_tic_tac_toe_takes_the_win_and_blocks_the_loss() -> None:
    assert said_by("TicTacToe-v0", drawn_board("OO.XX....")) == "[2]"  # O has as many marks as X, so O moves and wins
    assert said_by("TicTacToe-v0", drawn_board("OO.X.....")) == "[2]"  # X is to move and must take the third corner


def test_a_game_without_a_player_has_none() -> None:
    assert scripted_player("KuhnPoker-v0") is None


def test_the_random_player_keeps_to_the_listed_moves() -> None:
    mover = RandomMover(np.random.default_rng(0))
    rules = "[GAME] Play like '[4]'."
    told = [
        Message("user", rules),
        Message("assistant", "[4]"),
        Message("user", "Available Moves: '[0]', '[7]'\nDone."),
    ]
    assert {mover(told) for _ in range(50)} == {"[0]", "[7]"}


def test_the_random_player_varies_the_numbers_of_an_example() -> None:
    mover = RandomMover(np.random.default_rng(0))
    moves = {mover([Message("user", "[GAME] Use the format '[0 3]'.")]) for _ in range(200)}
    assert "[0 3]" in moves
    assert len(moves) > 10
    assert all(len(move) == 5 for move in moves)


def test_the_random_player_says_a_digit_where_nothing_is_shown() -> None:
    assert RandomMover(np.random.default_rng(0))([Message("user", "Speak.")]).strip("[]").isdigit()

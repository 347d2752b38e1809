"""TicTacToe: perfect play against an independent search, each opponent, both sides, and what a return can be."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import numpy as np
import pytest
from gspo_gym_envs.tic_tac_toe.board import EMPTY, best_cells, free_cells, is_over, other, placed, value, winner
from gspo_gym_envs.tic_tac_toe.env import TicTacToe
from gspo_gym_envs.tic_tac_toe.opponents import perfect_opponent, random_opponent
from gspo_gym_envs.tic_tac_toe.policies import winning_line

from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ContractError


def first_free(board: str, side: str) -> int:
    """An opponent of ours: the first free cell."""
    return board.index(" ")


def play(env: TicTacToe, policy: str, seed: int) -> tuple[list[str], float, bool | None]:
    """(everything the environment said, return, success) of a hand-written player."""
    said = [env.reset(seed=seed)[0]]
    player = env.policies[policy](env, np.random.default_rng((seed, 1)))
    rewards: list[Reward] = []
    terminated = False
    while not terminated:
        text, reward, terminated, truncated, _ = env.step(str(player(())))
        assert not truncated
        said.append(text)
        rewards.append(reward)
    return said, float(sum(rewards)), rewards[-1].success


def answers(env: TicTacToe, *actions: str) -> list[tuple[str, dict[str, float], bool, bool | None]]:
    """Each answer to the actions: (text, reward terms, terminated, success)."""
    env.reset(seed=0)
    heard = []
    for action in actions:
        text, reward, terminated, _, _ = env.step(action)
        heard.append((text, dict(reward.terms), terminated, reward.success))
    return heard


# --- the board --------------------------------------------------------------------------------------------------------


def boards() -> dict[str, str]:
    """Every board that can come up with X first, and the side to move."""
    found, frontier = {EMPTY: "X"}, [EMPTY]
    while frontier:
        board = frontier.pop()
        if is_over(board):
            continue
        for cell in free_cells(board):
            after = placed(board, cell, found[board])
            if after not in found:
                found[after] = other(found[board])
                frontier.append(after)
    return found


def test_there_are_as_many_boards_as_the_game_is_known_to_have() -> None:
    found = boards()
    assert len(found) == 5478
    over = [board for board in found if is_over(board)]
    # Known counts of final positions: 626 won by the first side, 316 by the second, 16 drawn.
    assert Counter(winner(board) for board in over) == {"X": 626, "O": 316, None: 16}


def test_values_agree_with_a_search_over_lines_of_play() -> None:
    """Retrograde: positions are settled from the end, by sets, not by recursion over one position."""
    found = boards()
    wins = {board: 1 if winner(board) == side else -1 for board, side in found.items() if winner(board)}
    settled = wins | {board: 0 for board in found if " " not in board and not winner(board)}
    for board in sorted(found, key=lambda b: b.count(" ")):
        if board not in settled:
            side = found[board]
            settled[board] = max(-settled[placed(board, cell, side)] for cell in free_cells(board))
    assert {board: value(board, side) for board, side in found.items()} == settled
    assert settled[EMPTY] == 0


def test_best_cells_win_block_and_take_the_middle() -> None:
    assert best_cells("XX OO    ", "X") == [2]
    assert best_cells("XX  O    ", "O") == [2]
    assert best_cells("X        ", "O") == [4]


# --- opponents --------------------------------------------------------------------------------------------------------


def test_the_random_opponent_is_uniform_over_the_free_cells() -> None:
    rng = np.random.default_rng(0)
    board = "XO  X    "  # six cells are free
    counts = Counter(random_opponent([int(c) for c in rng.permutation(9)])(board, "O") for _ in range(6000))
    # Binomial(6000, 1/6): mean 1000, standard deviation 28.9; five deviations of slack.
    assert set(counts) == {2, 3, 5, 6, 7, 8}
    assert all(abs(count - 1000) < 145 for count in counts.values())


def test_against_every_order_of_a_sample_there_is_a_win_whoever_begins() -> None:
    for order in itertools.islice(itertools.permutations(range(9)), 0, None, 1999):
        opponent = random_opponent(order)
        assert winning_line(EMPTY, "X", opponent) is not None
        assert winning_line(placed(EMPTY, order[0], "O"), "X", opponent) is not None


def test_the_perfect_opponent_never_loses_to_any_line_of_play() -> None:
    opponent = perfect_opponent(range(9))
    results = Counter()

    def explore(board: str) -> None:
        """X to move."""
        for cell in free_cells(board):
            after = placed(board, cell, "X")
            if not is_over(after):
                after = placed(after, opponent(after, "O"), "O")
            if is_over(after):
                results[winner(after)] += 1
            else:
                explore(after)

    explore(EMPTY)
    explore(placed(EMPTY, opponent(EMPTY, "O"), "O"))
    assert results["X"] == 0
    assert results["O"] > 0
    assert results[None] > 0


def test_an_opponent_of_ones_own_is_shown_the_board_and_its_side() -> None:
    seen = []

    def opponent(board: str, side: str) -> int:
        seen.append((board, side))
        return first_free(board, side)

    env = TicTacToe(style="terse", opponent=opponent, first="agent")
    assert answers(env, "5")[0][0] == "O23\n4X6\n789"
    assert seen == [("    X    ", "O")]


def test_an_opponent_that_takes_a_cell_that_is_not_free_is_an_error() -> None:
    env = TicTacToe(style="terse", opponent=lambda board, side: 4, first="agent")
    env.reset(seed=0)
    with pytest.raises(ContractError, match=r"expected one of the free cells .* got 4"):
        env.step("5")


# --- episodes ---------------------------------------------------------------------------------------------------------


def test_a_won_episode_reads_exactly_so() -> None:
    env = TicTacToe(style="terse", opponent=first_free, first="agent")
    assert env.reset(seed=0)[0] == "You X.\n123\n456\n789"
    assert answers(env, "5", "4", "6") == [
        ("O23\n4X6\n789", {}, False, None),
        ("OO3\nXX6\n789", {}, False, None),
        ("won", {"won": 1.0}, True, True),
    ]


def test_a_lost_episode_earns_nothing_and_an_illegal_answer_costs() -> None:
    env = TicTacToe(style="terse", opponent=first_free, first="opponent")
    assert env.reset(seed=0)[0] == "You X.\nO23\n456\n789"
    assert answers(env, "1", "9", "8") == [
        ("taken\nO23\n456\n789", {"illegal": -0.1}, False, None),
        ("OO3\n456\n78X", {}, False, None),
        ("lost", {}, True, False),
    ]


def test_a_verbose_episode_reads_exactly_so() -> None:
    env = TicTacToe(opponent=first_free, first="agent", style="verbose")
    assert env.reset(seed=0)[0] == (
        "Tic-tac-toe: three in a line win. You play X, I play O. Free cells are shown by their number. "
        "Answer with the number of a free cell alone.\n123\n456\n789"
    )
    assert answers(env, "5", "4", "6")[-1][0] == "You have won."


def test_a_draw_is_a_success_against_the_perfect_opponent_only() -> None:
    def opponent(board: str, side: str) -> int:
        return best_cells(board, side)[0]

    for env, is_success in (
        (TicTacToe(style="terse", opponent="minimax"), True),
        (TicTacToe(style="terse", opponent=opponent), False),
    ):
        said, total, success = play(env, "minimax", seed=1)
        assert (said[-1], total, success) == ("draw", 0.5, is_success)


@pytest.mark.parametrize("text", ["", "0", "10", "x", "5.", "٥", "5 6", "123456789" * 500])
def test_anything_but_a_digit_is_illegal(text: str) -> None:
    env = TicTacToe(style="terse", opponent=first_free, first="agent")
    [(heard, terms, _, _)] = answers(env, text)
    assert (heard, terms) == ("not 1-9\n123\n456\n789", {"illegal": -0.1})


def test_the_third_illegal_answer_forfeits_the_game() -> None:
    assert answers(TicTacToe(style="terse", first="agent"), "x", "", "0") == [
        ("not 1-9\n123\n456\n789", {"illegal": -0.1}, False, None),
        ("not 1-9\n123\n456\n789", {"illegal": -0.1}, False, None),
        ("forfeit", {"illegal": -0.1}, True, False),
    ]


def test_who_begins_is_drawn_evenly_or_chosen() -> None:
    env = TicTacToe(style="terse")
    num_first = sum(env.reset(seed=seed)[0] == "You X.\n123\n456\n789" for seed in range(400))
    assert abs(num_first - 200) < 50  # Binomial(400, 1/2): standard deviation 10; five deviations
    for seed in range(5):
        assert env.reset(seed=seed, options={"first": "agent"})[0].endswith("123\n456\n789")
        assert "O" in env.reset(seed=seed, options={"first": "opponent"})[0].removeprefix("You X.")


# --- both sides -------------------------------------------------------------------------------------------------------


def test_playing_both_sides_the_side_to_move_is_told_and_each_blunder_is_charged_to_its_move() -> None:
    env = TicTacToe(style="terse", opponent="self")
    assert env.reset(seed=0)[0] == "X to move\n123\n456\n789"
    heard = answers(env, "1", "2")
    # 2 answers a corner with an edge: lost (X takes the middle and makes two threats), so it is a blunder of O's.
    assert heard[0] == ("O to move\nX23\n456\n789", {}, False, None)
    assert heard[1] == ("X to move\nXO3\n456\n789", {"blunder": -0.1}, False, None)


def test_playing_both_sides_a_win_earns_nothing_and_a_draw_does() -> None:
    env = TicTacToe(style="terse", opponent="self")
    *_, (text, terms, terminated, success) = answers(env, "1", "2", "5", "3", "9")
    assert (text, terms, terminated, success) == ("X won", {}, True, False)
    said, total, success = play(env, "reference", seed=0)
    assert (said[-1], total, success) == ("draw", 0.5, True)


def test_one_side_losing_on_purpose_earns_less_than_a_draw() -> None:
    heard = answers(TicTacToe(style="terse", opponent="self"), "1", "4", "2", "5", "3")
    assert heard[-1][0] == "X won"
    assert sum(value for _, terms, *_ in heard for value in terms.values()) < 0


@functools.cache
def most_blunders(board: str, side: str, blunderer: str | None) -> int:
    """In the rest of one game; the other side plays perfectly. None: both may blunder."""
    if is_over(board):
        return 0
    may_blunder = blunderer in (side, None)
    best = best_cells(board, side)
    cells = free_cells(board) if may_blunder else best
    return max((cell not in best) + most_blunders(placed(board, cell, side), other(side), blunderer) for cell in cells)


@pytest.mark.parametrize(
    ("opponent", "expected"), [("random", (-0.3, 1.0)), ("minimax", (-0.4, 0.5)), ("self", (-1.0, 0.5))]
)
def test_the_reward_range_follows_from_the_opponent(opponent: str, expected: tuple[float, float]) -> None:
    assert TicTacToe(style="terse", opponent=opponent).reward_range == pytest.approx(expected)


def test_a_perfect_opponent_leaves_one_blunder_and_both_sides_make_seven_at_most() -> None:
    # The first move of all is never a blunder; by symmetry a corner, an edge and the middle are all there are.
    assert {most_blunders(placed(EMPTY, cell, "O"), "X", "X") for cell in (0, 1, 4)} == {1}
    assert max(most_blunders(placed(EMPTY, cell, "X"), "O", None) for cell in (0, 1, 4)) == 7


@pytest.mark.parametrize("opponent", ["random", "minimax", "self"])
def test_the_reference_earns_the_top_and_random_play_stays_in_range(opponent: str) -> None:
    env = TicTacToe(style="terse", opponent=opponent)
    low, high = env.reward_range
    assert {play(env, "reference", seed)[1:] for seed in range(50)} == {(high, True)}
    returns = [play(env, "random", seed)[1] for seed in range(200)]
    assert all(low <= total <= high for total in returns)
    assert np.mean(returns) < high - 0.3


def test_perfect_play_never_loses_to_the_random_opponent() -> None:
    endings = Counter(play(TicTacToe(style="terse"), "minimax", seed)[0][-1] for seed in range(200))
    assert set(endings) == {"won", "draw"}


def test_an_answer_that_could_not_be_read_is_illegal() -> None:
    env = TicTacToe(style="terse", first="agent")
    env.reset(seed=0)
    text, reward, terminated, _, _ = env.invalid_action("unclosed <think>")
    assert (text, dict(reward.terms), terminated) == ("unclosed <think>\n123\n456\n789", {"illegal": -0.1}, False)

"""Hand-written players of TextArena's games. What they know is in the conversation; none reads the game's state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, reduce
from operator import xor
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.types import Message

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_LEGAL = re.compile(r"(?:available|legal|valid|possible|allowed)[^\n]*?:[^\n]*(?:\n[^\n]*\[[^\n]*)*", re.IGNORECASE)
_SPEAKER = re.compile(r"^\[(?:GAME|Player[^\]]*)\] ", re.MULTILINE)


class RandomMover:
    """Says something in square brackets: one of the moves listed as legal, else like one that was shown.

    Games say "Available Moves: '[0]', '[4]'" or give examples in their rules. An example is varied: each of its whole
    numbers becomes a random digit half of the time. So in many games a part of its moves is not legal.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, messages: Sequence[Message]) -> str:
        heard = [_SPEAKER.sub("", message.content) for message in messages if message.role != "assistant"]
        listed = [move for part in _LEGAL.findall(heard[-1]) for move in _BRACKETED.findall(part)]
        if listed:
            return self._one_of(listed)
        shown = _BRACKETED.findall(heard[0]) or _BRACKETED.findall(heard[-1])
        if not shown:
            return f"[{self._rng.integers(10)}]"
        return re.sub(r"\d+", self._varied, self._one_of(shown))

    def _varied(self, number: re.Match[str]) -> str:
        return number[0] if self._rng.random() < 0.5 else str(self._rng.integers(10))

    def _one_of(self, moves: Sequence[str]) -> str:
        return moves[int(self._rng.integers(len(moves)))]


def scripted_player(game: str) -> PolicyFactory | None:
    """The hand-written player of a game, in any of its variants; None if there is none."""
    return _SCRIPTED.get(game.partition("-v0")[0])


def bisect_number(_env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """GuessTheNumber: the middle of what the hints leave."""

    def play(messages: Sequence[Message]) -> str:
        low, high = map(int, re.findall(r"between (\d+) and (\d+)", messages[0].content)[0])
        guess = (low + high) // 2
        for message in messages[1:]:
            if message.role == "user":
                low, high = (guess + 1, high) if "higher" in message.content else (low, guess - 1)
                guess = (low + high) // 2
        return f"[{guess}]"

    return play


def stack_disks(_env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """TowerOfHanoi: the shortest solution, from wherever the disks lie."""

    def play(messages: Sequence[Message]) -> str:
        board = dict(re.findall(r"([ABC]): \[([\d, ]*)\]", messages[-1].content))
        peg_of = {int(disk): peg for peg, disks in board.items() for disk in disks.split(",") if disk.strip()}
        source, target = _next_disk_move(peg_of)
        return f"[{source} {target}]"

    return play


def _next_disk_move(peg_of: dict[int, str]) -> tuple[str, str]:
    """The largest disk that is not where it should be moves, when all smaller ones are on the third peg."""
    wanted, move = "C", ("A", "C")
    for disk in sorted(peg_of, reverse=True):
        if peg_of[disk] != wanted:
            move = (peg_of[disk], wanted)
            wanted = next(peg for peg in "ABC" if peg not in move)
    return move


def balance_piles(_env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Nim: leaves piles whose exclusive or is 0, if that can be done; if not, takes one object from any pile."""

    def play(messages: Sequence[Message]) -> str:
        piles = [(int(pile), int(left)) for pile, left in re.findall(r"pile (\d+): (\d+)", messages[-1].content)]
        piles = list(dict(piles).items())  # the last board, if several were shown
        balance = reduce(xor, (left for _, left in piles))
        for pile, left in piles:
            if left ^ balance < left:
                return f"[{pile} {left - (left ^ balance)}]"
        standing = [pile for pile, left in piles if left]
        return f"[{standing[int(rng.integers(len(standing)))]} 1]"

    return play


def never_lose_tic_tac_toe(_env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """TicTacToe: a move of the best value, found by trying all."""

    def play(messages: Sequence[Message]) -> str:
        board = messages[-1].content.rpartition("Current Board:")[2].partition("Available")[0]
        cells = tuple(cell if cell in "XO" else " " for cell in re.findall(r"[XO]|\d", board))
        me = "O" if cells.count("O") == cells.count("X") else "X"  # player 0 is O and begins
        best = max(_free(cells), key=lambda cell: -_value(_with(cells, cell, me), "X" if me == "O" else "O"))
        return f"[{best}]"

    return play


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@cache
def _value(cells: tuple[str, ...], to_move: str) -> int:
    """1, 0 or -1 for the player to move, if both play their best."""
    if any(cells[a] == cells[b] == cells[c] != " " for a, b, c in _LINES):
        return -1  # the other one has just won
    other = "X" if to_move == "O" else "O"
    return max((-_value(_with(cells, cell, to_move), other) for cell in _free(cells)), default=0)


def _free(cells: tuple[str, ...]) -> list[int]:
    return [cell for cell, mark in enumerate(cells) if mark == " "]


def _with(cells: tuple[str, ...], cell: int, mark: str) -> tuple[str, ...]:
    return (*cells[:cell], mark, *cells[cell + 1 :])


_SCRIPTED: dict[str, PolicyFactory] = {
    "GuessTheNumber": bisect_number,
    "TowerOfHanoi": stack_disks,
    "Nim": balance_piles,
    "TicTacToe": never_lose_tic_tac_toe,
}
